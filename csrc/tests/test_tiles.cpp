// Activations in tiles: every op that writes them so writes the numbers of its rows, and every op that reads them so
// reads the same.
#include <array>
#include <cstdlib>
#include <cstring>

#include "check.h"
#include "quire_cpu.h"

namespace {

size_t place(int64_t row, int64_t column, int64_t columns) {
  return size_t(row / 32 * 32 * columns + column / 32 * 32 * 32 + row % 32 * 32 + column % 32);
}

using Numbers = std::vector<uint16_t>;

Numbers random_numbers(int64_t count) {
  std::vector<char> raw = encode(random_floats(count), QR_BFLOAT16);
  Numbers numbers(raw.size() / 2);
  std::memcpy(numbers.data(), raw.data(), raw.size());
  return numbers;
}

// What follows the last row holds NaN: nothing may depend on it.
Numbers tiles(int64_t rows, int64_t columns) { return Numbers(size_t((rows + 31) / 32 * 32 * columns), 0x7fc1); }

Numbers to_tiles(const Numbers& in, int64_t rows, int64_t columns) {
  Numbers out = tiles(rows, columns);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c) out[place(r, c, columns)] = in[size_t(r * columns + c)];
  return out;
}

bool same(const Numbers& in_rows, const Numbers& in_tiles, int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c)
      if (in_rows[size_t(r * columns + c)] != in_tiles[place(r, c, columns)]) return false;
  return true;
}

struct Packed {
  char* memory;
  Packed(int64_t n, int64_t k, int32_t dtype) : memory(aligned_zeros(qr_packed_bytes(dtype, n, k))) {
    Numbers weight = random_numbers(n * k);
    CHECK(qr_pack_linear(memory, dtype, n, k, weight.data(), QR_BFLOAT16, n, k, 0) == QR_OK);
  }
  ~Packed() { std::free(memory); }
  Packed(const Packed&) = delete;
  Packed& operator=(const Packed&) = delete;
};

}  // namespace

TEST(linear_layers_write_and_read_tiles) {
  // the largest passes the caches by, and its K is cut into stretches
  for (auto [rows, n, k] : {std::array<int64_t, 3>{33, 64, 96}, {64, 32, 64}, {300, 96, 1056}, {1030, 1024, 1536}})
    for (bool reads : {false, true}) {
      if (reads && qr_reads_tiles(QR_BFLOAT16, rows, k) == 0) continue;
      if (is_emulated() && rows > 100) continue;
      const Packed layer(2 * n, k, QR_BFLOAT16);
      const Numbers x = random_numbers(rows * k), residual = random_numbers(rows * n), other = to_tiles(x, rows, k);
      const std::vector<float> bias = random_floats(2 * n);
      Numbers want(residual.size()), got = tiles(rows, n);
      for (bool gated : {false, true}) {
        auto run = [&](Numbers& out, int32_t out_dtype, const Numbers& in, int32_t in_dtype) {
          return gated ? qr_gated_linear(out.data(), out_dtype, in.data(), in_dtype, layer.memory, QR_BFLOAT16, rows, n,
                                         k, bias.data(), QR_SILU)
                       : qr_linear(out.data(), out_dtype, in.data(), in_dtype, layer.memory, QR_BFLOAT16, rows, n, k,
                                   bias.data(), QR_RELU, residual.data());
        };
        CHECK(run(want, QR_BFLOAT16, x, QR_BFLOAT16) == QR_OK);
        CHECK((reads ? run(got, QR_BFLOAT16_TILES, other, QR_BFLOAT16_TILES)
                     : run(got, QR_BFLOAT16_TILES, x, QR_BFLOAT16)) == QR_OK);
        CHECK(same(want, got, rows, n), "rows %ld n %ld k %ld gated %d reads %d", long(rows), long(n), long(k),
              int(gated), int(reads));
      }
    }
}

TEST(quantised_layers_write_tiles) {
  const int64_t rows = 45, n = 96, k = 160, group = 32;
  const Numbers x = random_numbers(rows * k);
  const std::vector<int8_t> weight(size_t(n * k), 3);
  for (int32_t format : {QR_INT8, QR_INT4}) {
    char* packed = aligned_zeros(qr_quantized_bytes(format, n, k));
    CHECK(qr_pack_quantized(packed, format, n, k, weight.data(), n, k, 0) == QR_OK);
    const std::vector<float> scales(size_t(n), 0.01f);
    const std::vector<uint16_t> halves(size_t(n * k / group), 0x2000);
    auto run = [&](Numbers& out, int32_t out_dtype) {
      qr_weight layer{};
      layer.packed = packed;
      layer.scales = format == QR_INT8 ? static_cast<const void*>(scales.data()) : halves.data();
      layer.format = format;
      layer.group = format == QR_INT8 ? 0 : group;
      layer.outputs = n;
      layer.unit = 1.0;
      return qr_linear_quantized(out.data(), out_dtype, x.data(), QR_BFLOAT16, &layer, 1, rows, n, k, nullptr, QR_NONE,
                                 nullptr);
    };
    Numbers want(size_t(rows * n)), got = tiles(rows, n);
    CHECK(run(want, QR_BFLOAT16) == QR_OK);
    CHECK(run(got, QR_BFLOAT16_TILES) == QR_OK);
    CHECK(same(want, got, rows, n), "format %d", format);
    std::free(packed);
  }
}

TEST(norms_write_tiles) {
  const int64_t rows = 45, columns = 192;
  const Numbers x = random_numbers(rows * columns);
  const std::vector<float> weight = random_floats(columns);
  for (bool layer : {false, true}) {
    auto run = [&](Numbers& out, int32_t out_dtype) {
      return layer ? qr_layer_norm(out.data(), out_dtype, x.data(), QR_BFLOAT16, weight.data(), weight.data(), rows,
                                   columns, 1e-6f)
                   : qr_rms_norm(out.data(), out_dtype, x.data(), QR_BFLOAT16, x.data(), weight.data(), rows, columns,
                                 1e-6f);
    };
    Numbers want(x.size()), got = tiles(rows, columns);
    CHECK(run(want, QR_BFLOAT16) == QR_OK);
    CHECK(run(got, QR_BFLOAT16_TILES) == QR_OK);
    CHECK(same(want, got, rows, columns), "layer %d", int(layer));
  }
}

TEST(attention_reads_and_writes_tiles) {
  const int64_t tokens = 50, kv_heads = 2, heads = 4, block_size = 16, blocks = 4;
  for (int64_t head : {64, 128, 48, 24}) {  // heads that end within a tile are written so, not read
    if (heads * head % 32 != 0) continue;
    const int64_t columns = (heads + 2 * kv_heads) * head, page = qr_cache_page(QR_BFLOAT16, block_size, head);
    const Numbers qkv = random_numbers(tokens * columns), other = to_tiles(qkv, tokens, columns);
    const int64_t cache_bytes = 2 * blocks * kv_heads * page * 2;
    const std::vector<float> cos_sin = random_floats(tokens * head);
    std::vector<int64_t> positions, slots;
    for (int64_t t = 0; t < tokens; ++t) {
      positions.push_back(t);
      slots.push_back(t);
    }
    char *want_cache = aligned_zeros(cache_bytes + 128), *cache = aligned_zeros(cache_bytes + 128);
    Numbers want_query(size_t(tokens * heads * head)), query(want_query.size());
    auto rope = [&](Numbers& out, const Numbers& in, int32_t dtype, char* to) {
      return qr_rope_and_cache(out.data(), in.data(), dtype, positions.data(), cos_sin.data(), nullptr, nullptr, to,
                               QR_BFLOAT16, blocks, block_size, page, kv_heads * page, slots.data(), tokens, heads,
                               kv_heads, head, head, 0, 1e-6f, nullptr, nullptr);
    };
    CHECK(rope(want_query, qkv, QR_BFLOAT16, want_cache) == QR_OK);
    CHECK(rope(query, other, QR_BFLOAT16_TILES, cache) == (head % 32 == 0 ? QR_OK : QR_EINVAL));
    if (head % 32 == 0) {
      CHECK(query == want_query);
      CHECK(std::memcmp(cache, want_cache, size_t(cache_bytes)) == 0);
    }
    const int32_t starts[] = {0, int32_t(tokens)}, lengths[] = {int32_t(tokens)}, table[] = {0, 1, 2, 3};
    auto attend = [&](Numbers& out, int32_t dtype) {
      return qr_paged_attention(out.data(), dtype, want_query.data(), QR_BFLOAT16, want_cache, QR_BFLOAT16, blocks,
                                block_size, page, kv_heads * page, starts, lengths, 1, table, blocks, heads, kv_heads,
                                head, 0.1f, 0.0f, 0, nullptr, nullptr);
    };
    Numbers want(want_query.size()), got = tiles(tokens, heads * head);
    CHECK(attend(want, QR_BFLOAT16) == QR_OK);
    CHECK(attend(got, QR_BFLOAT16_TILES) == QR_OK);
    CHECK(same(want, got, tokens, heads * head), "head %ld", long(head));
    std::free(want_cache);
    std::free(cache);
  }
}

TEST(tiles_are_refused_where_they_cannot_be) {
  const Packed layer(64, 64, QR_BFLOAT16);
  Numbers x = tiles(64, 64), out = tiles(64, 64);
  const std::vector<float> weight = random_floats(64);
  const auto linear = [&](int32_t out_dtype, int32_t x_dtype, int64_t rows, int64_t n, int64_t k) {
    return qr_linear(out.data(), out_dtype, x.data(), x_dtype, layer.memory, QR_BFLOAT16, rows, n, k, nullptr, QR_NONE,
                     nullptr);
  };
  CHECK(qr_reads_tiles(QR_FLOAT32, 64, 64) == 0);
  CHECK(linear(QR_BFLOAT16, QR_BFLOAT16_TILES, 32, 64, 64) == QR_EINVAL);                 // few rows
  CHECK(linear(QR_BFLOAT16, QR_BFLOAT16_TILES, 64, 64, 48) == QR_EINVAL);                 // part of a tile
  CHECK(linear(QR_BFLOAT16_TILES, QR_BFLOAT16, 64, 40, 64) == QR_EINVAL);                 // likewise
  CHECK(linear(QR_BFLOAT16_COMPACT, QR_BFLOAT16, 64, 64, 64) == QR_EINVAL);               // of weights only
  CHECK(qr_rms_norm(out.data(), QR_BFLOAT16_TILES, x.data(), QR_FLOAT32, nullptr, weight.data(), 1, 32, 1e-6f) ==
        QR_EINVAL);
  CHECK(qr_rms_norm(out.data(), QR_FLOAT32, x.data(), QR_BFLOAT16, nullptr, weight.data(), 1, 32, 1e-6f) == QR_EINVAL);
}
