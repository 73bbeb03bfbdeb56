// Attention over latents: what each head multiplies before and behind attention. Heads lie side by side in a row, and a
// product reads and writes whole rows: a piece copies some rows of one head, multiplies them and copies what comes out.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "../arguments.h"
#include "../products/gemm.h"
#include "../kernels.h"
#include "../runtime/threads.h"

using namespace qr;

namespace {

// Rows of one piece: what it copies stays in L2, and it reads a head's weight once for all of them.
constexpr int64_t kRows = 64;
constexpr int64_t kPiecesPerThread = 4;

// Heads that lie side by side: where the first one's features begin, and the bytes from row to row and head to head.
struct Heads {
  char* begin;
  int64_t row_bytes, head_bytes;

  char* at(int64_t row, int64_t head) const { return begin + row * row_bytes + head * head_bytes; }
};

// out[row, head] = x[row, head] . weights[head], each [n, k].
struct Products {
  const qr_weight* weights;
  int32_t dtype;
  int64_t rows, heads, n, k;
  Heads x, out;
  int64_t blocks, groups, panels;  // of rows; of the panels of a weight, and how many each has

  Products(const qr_weight* weights, int32_t dtype, int64_t rows, int64_t heads, int64_t n, int64_t k, Heads x,
           Heads out)
      : weights(weights), dtype(dtype), rows(rows), heads(heads), n(n), k(k), x(x), out(out),
        blocks(divide_up(rows, kRows)) {
    const int64_t all = divide_up(n, kPanel), wanted = divide_up(num_threads() * kPiecesPerThread, heads * blocks);
    panels = divide_up(all, std::min(all, wanted));
    groups = divide_up(all, panels);
  }

  int64_t pieces() const { return heads * blocks * groups; }

  // Pieces of one head follow each other: they share its weight.
  int32_t run(int64_t piece) const {
    const int64_t head = piece / (blocks * groups), begin = piece / groups % blocks * kRows;
    const int64_t count = std::min(kRows, rows - begin), size = bytes_of(dtype);
    const Weight weight = weight_of(weights[head], dtype, k);
    GemmArgs args = weight.args;
    const int64_t prepared = weight.gemm->prepared_bytes(count, k, dtype), in = round_up(count * k * size, 64);
    const int64_t result = round_up(count * n * size, 64);
    char* memory = static_cast<char*>(scratch(1, in + result + prepared));
    if (memory == nullptr) return QR_ENOMEM;
    for (int64_t row = 0; row < count; ++row)
      std::memcpy(memory + row * k * size, x.at(begin + row, head), size_t(k * size));
    args.x = memory;
    if (prepared != 0) {
      weight.gemm->prepare(memory + in + result, memory, dtype, count, k, 0, count, args.order);
      args.x = memory + in + result;
    }
    args.rows = count;
    args.n = n;
    args.k = k;
    args.activation = QR_NONE;
    args.out = memory + in;
    args.out_dtype = dtype;
    const int64_t first = piece % groups * panels, last = std::min(first + panels, divide_up(n, kPanel));
    weight.gemm->run(args, 0, count, first, last);
    const int64_t from = first * kPanel * size, bytes = std::min(last * kPanel, n) * size - from;
    for (int64_t row = 0; row < count; ++row)
      std::memcpy(out.at(begin + row, head) + from, memory + in + row * n * size + from, size_t(bytes));
    return QR_OK;
  }
};

// What of a token's QKV is no product: the rotated parts, the latent as key and as value, and zeros.
struct Copies {
  char* qkv;
  const char *query, *compressed;
  int32_t dtype;
  const float* norm;
  float eps;
  int64_t heads, rope, nope, latent, head_size;
  const char* index_key;  // or null
  int64_t index;

  void run(int64_t row) const {
    const int64_t size = bytes_of(dtype), end = rope + latent, slot = head_size * size;
    char* out = qkv + row * (heads + 2) * slot;
    const char* in = query + row * heads * (nope + rope) * size;
    for (int64_t head = 0; head < heads; ++head)
      std::memcpy(out + head * slot, in + (head * (nope + rope) + nope) * size, size_t(rope * size));
    char *key = out + heads * slot, *value = key + slot;
    const char* own = compressed + row * (latent + rope) * size;
    std::memcpy(key, own + latent * size, size_t(rope * size));
    std::memset(value, 0, size_t(rope * size));
    kernels()->rms_norm(
        NormArgs{key + rope * size, dtype, own, dtype, nullptr, norm, nullptr, latent, eps}, 0, 1);
    std::memcpy(value + rope * size, key + rope * size, size_t(latent * size));
    for (int64_t head = 0; head < heads + 2; ++head)
      std::memset(out + head * slot + end * size, 0, size_t(slot - end * size));
    if (index_key != nullptr)
      std::memcpy(key + slot - index * size, index_key + row * index * size, size_t(index * size));
  }
};

int32_t run(const Products& products, const Copies* copies) {
  std::atomic<int32_t> status{QR_OK};
  const int64_t copied = copies == nullptr ? 0 : products.blocks;
  parallel_for(copied + products.pieces(), [&](int64_t index) {
    if (index >= copied) {
      const int32_t own = products.run(index - copied);
      if (own != QR_OK) status.store(own);
      return;
    }
    for (int64_t row = index * kRows; row < std::min((index + 1) * kRows, products.rows); ++row) copies->run(row);
  });
  return status.load();
}

}  // namespace

extern "C" {

int32_t qr_latent_qkv(void* qkv, const void* query, const void* compressed, int32_t dtype, const float* norm, float eps,
                      const qr_weight* to_latents, int64_t tokens, int64_t heads, int64_t rope_size, int64_t nope_size,
                      int64_t latent_size, int64_t head_size, const void* index_key, int64_t index_size) {
  if (kernels() == nullptr) return QR_ESTATE;
  if (index_size < 0 || index_size > head_size || rope_size + latent_size > head_size - index_size) return QR_EINVAL;
  if (!is_dtype(dtype) || !is_epsilon(eps) || heads <= 0 || !are_sizes(heads) || !are_sizes(rope_size, latent_size) ||
      !are_sizes(nope_size) || !are_sizes(tokens, heads + 2, head_size) ||
      !are_sizes(tokens, heads, nope_size + rope_size))
    return QR_EINVAL;
  if (!are_there(to_latents) || (tokens > 0 && !are_there(qkv, query, compressed, norm))) return QR_EINVAL;
  for (int64_t head = 0; head < heads; ++head)
    if (!is_weight_of(to_latents[head], latent_size, nope_size)) return QR_EINVAL;
  if (tokens == 0) return QR_OK;
  const int64_t size = bytes_of(dtype), in = (nope_size + rope_size) * size, out = head_size * size;
  const Heads x{static_cast<char*>(const_cast<void*>(query)), heads * in, in};
  const Heads products{static_cast<char*>(qkv) + rope_size * size, (heads + 2) * out, out};
  const Copies copies{static_cast<char*>(qkv), static_cast<const char*>(query), static_cast<const char*>(compressed),
                      dtype, norm, eps, heads, rope_size, nope_size, latent_size, head_size,
                      static_cast<const char*>(index_key), index_size};
  return run(Products(to_latents, dtype, tokens, heads, latent_size, nope_size, x, products), &copies);
}

int32_t qr_latent_values(void* values, const void* attended, int32_t dtype, const qr_weight* to_values, int64_t tokens,
                         int64_t heads, int64_t rope_size, int64_t latent_size, int64_t value_size, int64_t head_size) {
  if (kernels() == nullptr) return QR_ESTATE;
  if (!is_dtype(dtype) || heads <= 0 || !are_sizes(rope_size, latent_size) || !are_sizes(tokens, heads, head_size) ||
      rope_size + latent_size > head_size || !are_sizes(tokens, heads, value_size))
    return QR_EINVAL;
  if (!are_there(to_values) || (tokens > 0 && !are_there(values, attended))) return QR_EINVAL;
  for (int64_t head = 0; head < heads; ++head)
    if (!is_weight_of(to_values[head], value_size, latent_size)) return QR_EINVAL;
  if (tokens == 0) return QR_OK;
  const int64_t size = bytes_of(dtype), in = head_size * size, out = value_size * size;
  const Heads x{static_cast<char*>(const_cast<void*>(attended)) + rope_size * size, heads * in, in};
  const Heads products{static_cast<char*>(values), heads * out, out};
  return run(Products(to_values, dtype, tokens, heads, value_size, latent_size, x, products), nullptr);
}
}
