// Elements of 16 bits, one at a time: bfloat16 and float16 to float and back.
#pragma once

#if defined(__ARM_NEON)
#include <arm_neon.h>
#else
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>

#include "quire_cpu.h"

#define QR_INLINE static inline __attribute__((always_inline))

namespace qr {
namespace {

struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};

#if defined(__ARM_NEON)
QR_INLINE float half_to_float(uint16_t bits) {
  __fp16 half;
  std::memcpy(&half, &bits, 2);
  return float(half);
}
QR_INLINE uint16_t float_to_half(float x) {
  const __fp16 half = __fp16(x);
  uint16_t bits;
  std::memcpy(&bits, &half, 2);
  return bits;
}
#else
QR_INLINE float half_to_float(uint16_t bits) { return _cvtsh_ss(bits); }
QR_INLINE uint16_t float_to_half(float x) { return uint16_t(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT)); }
#endif

QR_INLINE float to_float(float x) { return x; }
QR_INLINE float to_float(Bf16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
QR_INLINE float to_float(Fp16 x) { return half_to_float(x.bits); }

// Round to nearest even; a NaN stays one.
QR_INLINE uint16_t bf16_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t((bits >> 16) | 0x40);
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
template <class T>
T from_float(float x);
template <>
inline __attribute__((always_inline)) float from_float<float>(float x) {
  return x;
}
template <>
inline __attribute__((always_inline)) Bf16 from_float<Bf16>(float x) {
  return Bf16{bf16_bits(x)};
}
template <>
inline __attribute__((always_inline)) Fp16 from_float<Fp16>(float x) {
  return Fp16{float_to_half(x)};
}

}  // namespace
}  // namespace qr
