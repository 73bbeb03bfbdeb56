// RMS and layer norm of rows.
#pragma once

#include "../kernels.h"
#include "simd.h"

namespace qr {
namespace {

// Sums over a row run in four chains, then in one fixed tree.
template <class Term>
QR_INLINE float row_sum(int64_t n, const Term& term) {
  vf a = zero(), b = zero(), c = zero(), d = zero();
  int64_t i = 0;
  for (; i + 4 * W <= n; i += 4 * W) {
    a = add(a, term(i, W));
    b = add(b, term(i + W, W));
    c = add(c, term(i + 2 * W, W));
    d = add(d, term(i + 3 * W, W));
  }
  for (; i < n; i += W) a = add(a, term(i, n - i < W ? int(n - i) : W));
  return sum(add(add(a, b), add(c, d)));
}

// 1 / sqrt(x), correctly rounded twice, so that every instruction set agrees
QR_INLINE float inverse_root(float x) {
  return 1.0f / __builtin_sqrtf(x);
}

template <class T>
void rms_norm_rows(const NormArgs& args, int64_t row_begin, int64_t row_end) {
  const int64_t n = args.cols;
  const Places places(n, args.out_dtype);
  for (int64_t row = row_begin; row < row_end; ++row) {
    const T* x = static_cast<const T*>(args.x) + row * n;
    T* out = static_cast<T*>(args.out) + places.row(row);
    const T* residual = args.residual == nullptr ? nullptr : static_cast<const T*>(args.residual) + row * n;
    const float squares = row_sum(n, [&](int64_t i, int count) __attribute__((always_inline)) {
      vf v = load_some(x + i, count);
      return mul(v, v);
    });
    const vf factor = set1(inverse_root(squares / float(n) + args.eps));
    each_vector(n, [&](int64_t i, int count) __attribute__((always_inline)) {
      vf v = mul(mul(load_some(x + i, count), factor), load_some(args.weight + i, count));
      if (residual != nullptr) v = add(v, load_some(residual + i, count));
      store_some(out + places.column(i), v, count);
    });
  }
}

template <class T>
void layer_norm_rows(const NormArgs& args, int64_t row_begin, int64_t row_end) {
  const int64_t n = args.cols;
  const Places places(n, args.out_dtype);
  for (int64_t row = row_begin; row < row_end; ++row) {
    const T* x = static_cast<const T*>(args.x) + row * n;
    T* out = static_cast<T*>(args.out) + places.row(row);
    const float total = row_sum(n, [&](int64_t i, int count) __attribute__((always_inline)) {
      return load_some(x + i, count);
    });
    const vf mean = set1(total / float(n));
    const float squares = row_sum(n, [&](int64_t i, int count) __attribute__((always_inline)) {
      vf v = sub(load_some(x + i, count), mean);
      v = mul(v, v);
      if (count == W) return v;
      alignas(64) float lanes[W] = {};  // lanes past the end hold mean^2
      store(lanes, v, count);
      return load(lanes);
    });
    const vf factor = set1(inverse_root(squares / float(n) + args.eps));
    each_vector(n, [&](int64_t i, int count) __attribute__((always_inline)) {
      vf v = mul(mul(sub(load_some(x + i, count), mean), factor), load_some(args.weight + i, count));
      if (args.bias != nullptr) v = add(v, load_some(args.bias + i, count));
      store_some(out + places.column(i), v, count);
    });
  }
}

void rms_norm(const NormArgs& args, int64_t begin, int64_t end) {
  if (args.dtype == QR_FLOAT32)
    rms_norm_rows<float>(args, begin, end);
  else if (args.dtype == QR_BFLOAT16)
    rms_norm_rows<Bf16>(args, begin, end);
  else
    rms_norm_rows<Fp16>(args, begin, end);
}

void layer_norm(const NormArgs& args, int64_t begin, int64_t end) {
  if (args.dtype == QR_FLOAT32)
    layer_norm_rows<float>(args, begin, end);
  else if (args.dtype == QR_BFLOAT16)
    layer_norm_rows<Bf16>(args, begin, end);
  else
    layer_norm_rows<Fp16>(args, begin, end);
}

}  // namespace
}  // namespace qr
