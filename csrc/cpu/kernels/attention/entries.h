// Entries of compressed attention: sums of the products of tokens, weighed by softmaxes of their gates, normed and rotated.
// In float32, feature by feature, tokens in order; rounded once.
#pragma once

#include "../norm.h"
#include "rotary.h"

namespace qr {
namespace {

// A token of an entry: its row, whose second half are gates, and what is added to these.
template <class T>
struct GatedToken {
  const T *products, *gates;
  const float* bias;
};

// V vectors of the features of a part. Those of `count` tokens, of which the first `before` give them from `column` on,
// and the others from `own_column`.
template <int V, class T>
QR_INLINE void weigh(float* out, const GatedToken<T>* tokens, int64_t before, int64_t count, int64_t column,
                     int64_t own_column, int n) {
  const auto gate = [&](int64_t t, int v) __attribute__((always_inline)) {
    const int64_t at = (t < before ? column : own_column) + v * W;
    return add(load_some(tokens[t].gates + at, n), load_some(tokens[t].bias + at, n));
  };
  vf largest[V], total[V], sums[V];
  for (int v = 0; v < V; ++v) largest[v] = gate(0, v);
  for (int64_t t = 1; t < count; ++t)
    for (int v = 0; v < V; ++v) largest[v] = max(gate(t, v), largest[v]);
  for (int v = 0; v < V; ++v) total[v] = sums[v] = zero();
  for (int64_t t = 0; t < count; ++t)
    for (int v = 0; v < V; ++v) {
      const vf weight = exp(sub(gate(t, v), largest[v]));
      const int64_t at = (t < before ? column : own_column) + v * W;
      total[v] = add(total[v], weight);
      sums[v] = fma(load_some(tokens[t].products + at, n), weight, sums[v]);
    }
  for (int v = 0; v < V; ++v) store_some(out + v * W, div(sums[v], total[v]), n);
}

// All features of a part of an entry; see `weigh`.
template <class T>
void weigh_part(float* out, const GatedToken<T>* tokens, int64_t before, int64_t count, int64_t column,
                int64_t own_column, int64_t size) {
  constexpr int kTogether = 4;  // a cache line of bf16 where W is 8
  int64_t i = 0;
  for (; i + kTogether * W <= size; i += kTogether * W)
    weigh<kTogether>(out + i, tokens, before, count, column + i, own_column + i, W);
  for (; i < size; i += W)
    weigh<1>(out + i, tokens, before, count, column + i, own_column + i, size - i < W ? int(size - i) : W);
}

void norm_part(float* x, const float* weight, int64_t size, float eps) {
  const float squares = row_sum(size, [&](int64_t i, int n) __attribute__((always_inline)) {
    const vf v = load_some(x + i, n);
    return mul(v, v);
  });
  const vf root = set1(__builtin_sqrtf(squares / float(size) + eps));
  each_vector(size, [&](int64_t i, int n) __attribute__((always_inline)) {
    store_some(x + i, mul(div(load_some(x + i, n), root), load_some(weight + i, n)), n);
  });
}

template <class T>
void store_row(T* first, int64_t half, int64_t width, const float* row) {
  each_vector(width, [&](int64_t i, int n) __attribute__((always_inline)) {
    store_some(first + i, load_some(row + i, n), n);
    store_some(first + half + i, load_some(row + width + i, n), n);
  });
}

template <class T>
void compress_of(const CompressArgs& args, const CompressPiece& piece) {
  const RowLayout& tail = args.tail_layout;
  const int64_t rate = args.rate, own = piece.entry * rate, width = args.layout.width;
  const int64_t first = own - (args.reach - rate) < 0 ? 0 : own - (args.reach - rate), count = own + rate - first;
  char* memory = static_cast<char*>(scratch(0, round_up(2 * width * 4, 64) + count * int64_t(sizeof(GatedToken<T>))));
  if (memory == nullptr) return;
  auto* row = reinterpret_cast<float*>(memory);
  auto* tokens = reinterpret_cast<GatedToken<T>*>(memory + round_up(2 * width * 4, 64));
  for (int64_t t = 0; t < count; ++t) {
    const T* products = static_cast<const T*>(args.tail) + tail.row(piece.tail_pages, first + t);
    tokens[t] = {products, products + tail.half(), args.bias + (first + t) % rate * tail.width};
  }
  row[2 * width - 1] = 0.0f;  // behind rows that are an element shorter
  float* out = row;
  const bool overlaps = args.reach > rate;
  for (int64_t part = 0, column = 0; part < 2 && args.sizes[part] > 0; ++part) {
    const int64_t size = args.sizes[part];
    weigh_part(out, tokens, own - first, count, column, overlaps ? column + size : column, size);
    norm_part(out, args.norms[part], size, args.eps);
    rotate_last(RotateArgs{out, QR_FLOAT32, &own, args.cos_sin, 1, size, args.rotated, false}, 0, 1);
    out += size;
    column += overlaps ? 2 * size : size;
  }
  const int64_t at = args.layout.row(piece.pages, piece.entry), half = args.layout.half();
  if (args.dtype == QR_FLOAT32)
    store_row(static_cast<float*>(args.entries) + at, half, width, row);
  else if (args.dtype == QR_BFLOAT16)
    store_row(static_cast<Bf16*>(args.entries) + at, half, width, row);
  else
    store_row(static_cast<Fp16*>(args.entries) + at, half, width, row);
}

void compress(const CompressArgs& args, const CompressPiece& piece) {
  if (args.tail_dtype == QR_FLOAT32)
    compress_of<float>(args, piece);
  else if (args.tail_dtype == QR_BFLOAT16)
    compress_of<Bf16>(args, piece);
  else
    compress_of<Fp16>(args, piece);
}

}  // namespace
}  // namespace qr
