// What is done to each element by itself.
#pragma once

#include "../kernels.h"
#include "simd.h"

namespace qr {
namespace {

template <class T>
void scale_add_to(T* out, const T* x, const T* residual, float scale, int64_t n) {
  each_vector(n, [&](int64_t i, int count) __attribute__((always_inline)) {
    vf value = mul(load_some(x + i, count), set1(scale));
    if (residual != nullptr) value = add(value, load_some(residual + i, count));
    store_some(out + i, value, count);
  });
}

void scale_add(void* out, const void* x, const void* residual, int32_t dtype, float scale, int64_t n) {
  if (dtype == QR_FLOAT32)
    scale_add_to(static_cast<float*>(out), static_cast<const float*>(x), static_cast<const float*>(residual), scale, n);
  else if (dtype == QR_BFLOAT16)
    scale_add_to(static_cast<Bf16*>(out), static_cast<const Bf16*>(x), static_cast<const Bf16*>(residual), scale, n);
  else
    scale_add_to(static_cast<Fp16*>(out), static_cast<const Fp16*>(x), static_cast<const Fp16*>(residual), scale, n);
}

void soft_cap(float* x, float cap, int64_t n) {
  each_vector(n, [&](int64_t i, int count) __attribute__((always_inline)) {
    store_some(x + i, soft_capped(load_some(x + i, count), cap), count);
  });
}

template <class T>
void weighed_sum_to(const WeighedSum& s) {
  each_vector(s.n, [&](int64_t i, int count) __attribute__((always_inline)) {
    vf value = s.total == nullptr ? zero() : load_some(s.total + i, count);
    for (int64_t j = 0; j < s.count; ++j)
      value = add(value, mul(load_some(s.outputs + s.places[j] * s.n + i, count), set1(s.weights[j])));
    if (s.residual != nullptr) value = add(value, load_some(static_cast<const T*>(s.residual) + i, count));
    store_some(static_cast<T*>(s.out) + i, value, count);
  });
}

void weighed_sum(const WeighedSum& s) {
  if (s.dtype == QR_FLOAT32)
    weighed_sum_to<float>(s);
  else if (s.dtype == QR_BFLOAT16)
    weighed_sum_to<Bf16>(s);
  else
    weighed_sum_to<Fp16>(s);
}

}  // namespace
}  // namespace qr
