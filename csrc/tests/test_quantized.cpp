// Products with quantised weights against loops in double precision over the integers that x becomes.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "check.h"
#include "quire_cpu.h"

namespace {

// A weight [n, k] of integers, and what they stand for.
struct Layer {
  int64_t n, k, group;
  int32_t format;
  std::vector<float> scales;        // [n] of int8, [groups][n] of int4
  std::vector<int8_t> numbers, zeros;  // zeros: zero points [groups][n] of int4
  std::vector<char> packed_scales;
  std::vector<int8_t> corrections;
  char* packed;

  Layer(int32_t format, int64_t n, int64_t k, int64_t group, bool has_zeros)
      : n(n), k(k), group(format == QR_INT8 ? 128 : group), format(format), numbers(size_t(n * k)) {
    const bool is_int8 = format == QR_INT8;
    std::uniform_int_distribution<int> any(is_int8 ? -127 : 0, is_int8 ? 127 : 15), zero(0, 15);
    for (int8_t& number : numbers) number = int8_t(any(rng()));
    const int64_t scale_groups = is_int8 ? 1 : groups(), columns = (n + 31) / 32 * 32;
    const int32_t dtype = is_int8 ? QR_FLOAT32 : QR_FLOAT16;
    for (float value : random_floats(scale_groups * n, 0.01f)) scales.push_back(std::fabs(value));
    scales = decode(encode(scales, dtype), dtype);
    std::vector<float> in_panels(size_t(scale_groups * columns));
    zeros.assign(scales.size(), 8);
    corrections.assign(in_panels.size(), 0);
    for (int64_t g = 0; g < scale_groups; ++g)
      for (int64_t c = 0; c < n; ++c) {
        const size_t at = size_t((c / 32 * scale_groups + g) * 32 + c % 32), own = size_t(g * n + c);
        if (has_zeros) zeros[own] = int8_t(zero(rng()));
        in_panels[at] = scales[own];
        corrections[at] = int8_t(8 - zeros[own]);
      }
    if (!has_zeros) corrections.clear();
    packed_scales = encode(in_panels, dtype);
    packed = aligned_zeros(qr_quantized_bytes(format, n, k));
    CHECK(qr_pack_quantized(packed, format, n, k, numbers.data(), n, k, 0) == QR_OK);
  }
  ~Layer() { std::free(packed); }
  Layer(const Layer&) = delete;
  Layer& operator=(const Layer&) = delete;

  int64_t groups() const { return (k + group - 1) / group; }

  // out[rows, n] in float32
  int32_t run(float* out, const void* x, int32_t dtype, int64_t rows, const float* bias) const {
    return qr_linear_quantized(out, QR_FLOAT32, x, dtype, packed, format, format == QR_INT8 ? 0 : group,
                               packed_scales.data(), corrections.empty() ? nullptr : corrections.data(), rows, n, k,
                               bias, QR_NONE, nullptr);
  }

  double product(const float* x, int64_t column) const {
    double total = 0;
    for (int64_t g = 0; g < groups(); ++g) {
      const int64_t begin = g * group, end = std::min(begin + group, k);
      float largest = 0;
      for (int64_t i = begin; i < end; ++i) largest = std::max(largest, std::fabs(x[i]));
      const float inverse = largest > 1e-30f ? 127.0f / largest : 0.0f;
      const size_t own = size_t(format == QR_INT8 ? column : g * n + column);
      double sum = 0;
      for (int64_t i = begin; i < end; ++i)
        sum += double(std::nearbyint(x[i] * inverse)) *
               (numbers[size_t(column * k + i)] - (format == QR_INT8 ? 0 : zeros[own]));
      total += sum * scales[own] * largest / 127;
    }
    return total;
  }
};

void check_values(const Layer& layer, int32_t dtype, int64_t rows) {
  const std::vector<char> x = encode(random_floats(rows * layer.k), dtype);
  const std::vector<float> xs = decode(x, dtype), bias = random_floats(layer.n);
  std::vector<float> got(size_t(rows * layer.n));
  CHECK(layer.run(got.data(), x.data(), dtype, rows, bias.data()) == QR_OK);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < layer.n; ++c) {
      const double want = layer.product(xs.data() + r * layer.k, c) + bias[size_t(c)];
      const float value = got[size_t(r * layer.n + c)];
      CHECK(std::fabs(value - want) <= 1e-4 + 1e-5 * std::fabs(want),
            "format %d group %ld n %ld k %ld rows %ld: [%ld, %ld] %g, not %g", layer.format, long(layer.group),
            long(layer.n), long(layer.k), long(rows), long(r), long(c), value, want);
    }
}

void check_bits(const Layer& layer, int64_t most) {
  const std::vector<char> x = encode(random_floats(most * layer.k), QR_BFLOAT16);
  std::vector<float> all(size_t(most * layer.n)), some(all.size());
  CHECK(layer.run(all.data(), x.data(), QR_BFLOAT16, most, nullptr) == QR_OK);
  for (int64_t rows : {1, 2, 3, 4, 5, 7, 8, 16, 17, 33})
    for (int64_t first : {0L, 1L, 6L}) {
      CHECK(layer.run(some.data(), x.data() + first * layer.k * 2, QR_BFLOAT16, rows, nullptr) == QR_OK);
      CHECK(std::memcmp(some.data(), all.data() + first * layer.n, size_t(rows * layer.n) * 4) == 0,
            "format %d group %ld: rows %ld from %ld", layer.format, long(layer.group), long(rows), long(first));
    }
}

}  // namespace

TEST(quantised_products_match_naive_loops_and_rows_have_the_same_bits_in_every_batch) {
  for (auto [n, k] : {std::pair<int64_t, int64_t>{32, 64}, {40, 72}, {96, 320}, {7, 45}}) {
    for (int64_t group : {32, 64, 128})
      for (bool has_zeros : {false, true}) {
        const Layer layer(QR_INT4, n, k, group, has_zeros);
        for (int64_t rows : {1, 2, 3, 4, 7, 18}) check_values(layer, QR_BFLOAT16, rows);
        check_bits(layer, 40);
      }
    const Layer layer(QR_INT8, n, k, 0, false);
    for (int32_t dtype : {QR_FLOAT32, QR_BFLOAT16, QR_FLOAT16})
      for (int64_t rows : {1, 2, 3, 4, 7, 18}) check_values(layer, dtype, rows);
    check_bits(layer, 40);
  }
}

TEST(quantised_products_of_the_largest_integers_do_not_overflow) {
  for (int32_t format : {QR_INT8, QR_INT4}) {
    Layer layer(format, 32, 256, 128, false);
    for (int8_t sign : {1, -1}) {
      for (int8_t& number : layer.numbers) number = int8_t(format == QR_INT8 ? 127 * sign : sign > 0 ? 15 : 0);
      CHECK(qr_pack_quantized(layer.packed, format, layer.n, layer.k, layer.numbers.data(), layer.n, layer.k, 0) ==
            QR_OK);
      std::vector<float> x(size_t(3 * layer.k), 2.0f), got(size_t(3 * layer.n));
      CHECK(layer.run(got.data(), x.data(), QR_FLOAT32, 3, nullptr) == QR_OK);
      for (int64_t i = 0; i < 3 * layer.n; ++i) {
        const double want = layer.product(x.data(), i % layer.n);
        CHECK(std::fabs(got[size_t(i)] - want) <= 1e-5 * std::fabs(want), "format %d: %g, not %g", format,
              got[size_t(i)], want);
      }
    }
  }
}
