// Conversion of single elements, for packing and for single rows: kernels widen and narrow vectors.
#pragma once

#include <cstdint>
#include <cstring>

#include "quire_cpu.h"

namespace qr {

inline float from_bfloat16(uint16_t bits) {
  uint32_t word = uint32_t(bits) << 16;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}

inline float from_half(uint16_t bits) {
  const uint32_t sign = uint32_t(bits & 0x8000) << 16, exponent = (bits >> 10) & 31, mantissa = bits & 0x3ff;
  uint32_t word;
  if (exponent == 31) {
    word = sign | 0x7f800000u | (mantissa << 13);
  } else if (exponent != 0) {
    word = sign | ((exponent + 112) << 23) | (mantissa << 13);
  } else {
    float value = float(mantissa) * 5.9604644775390625e-8f;  // 2^-24
    return sign != 0 ? -value : value;
  }
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}

inline uint16_t to_bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t((bits >> 16) | 0x40);
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline uint16_t to_half(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint16_t sign = uint16_t((bits >> 16) & 0x8000);
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return uint16_t(sign | 0x7e00);
  if (bits >= 0x477ff000u) return uint16_t(sign | 0x7c00);  // 65520 and above round to infinity
  if (bits < 0x38800000u) {                                 // subnormal: let the adder round
    float value;
    std::memcpy(&value, &bits, 4);
    value += 0.5f;
    std::memcpy(&bits, &value, 4);
    return uint16_t(sign | (bits - 0x3f000000u));
  }
  bits += 0xfff + ((bits >> 13) & 1);
  return uint16_t(sign | ((bits - 0x38000000u) >> 13));
}

inline float read_float(const void* row, int32_t dtype, int64_t i) {
  if (dtype == QR_FLOAT32) return static_cast<const float*>(row)[i];
  const uint16_t bits = static_cast<const uint16_t*>(row)[i];
  return dtype == QR_BFLOAT16 ? from_bfloat16(bits) : from_half(bits);
}

}  // namespace qr
