// float8_e4m3fn: a sign, four bits of exponent (bias 7) and three of fraction; 448 is the largest. 0x7f, the one that is
// none, never occurs.
#pragma once

#include "gemm/compact.h"

namespace qr {
namespace {

struct Float8 {
  uint8_t bits;
};

// The upper byte of its bf16 depends on its upper nibble alone and the lower byte on its lower nibble, but where the
// exponent is 0 or 1 both depend on the lower one: numbers without exponent stand there.
alignas(16) constexpr uint8_t kUpperBytes[16] = {60,  61,  62,  63,  64,  65,  66,  67,
                                                 188, 189, 190, 191, 192, 193, 194, 195};
alignas(16) constexpr uint8_t kSmallUpperBytes[16] = {0, 59, 59, 59, 60, 60, 60, 60, 60, 60, 60, 60, 60, 60, 60, 60};
alignas(16) constexpr uint8_t kSmallLowerBytes[16] = {0,    0,    0x80, 0xc0, 0,    0x20, 0x40, 0x60,
                                                      0x80, 0x90, 0xa0, 0xb0, 0xc0, 0xd0, 0xe0, 0xf0};

// Bytes as bf16: the first half of each 16, and the second.
QR_INLINE void widen_float8(Bytes bytes, Bytes& first, Bytes& second) {
  const Bytes low = low_nibbles(bytes), small = bits_of(bytes, 0x70), none = all_bytes(0);
  const Bytes small_upper = either(look_up(sixteen_bytes(kSmallUpperBytes), low), bits_of(bytes, 0x80));
  const Bytes upper = where_equal(small, none, small_upper, look_up(sixteen_bytes(kUpperBytes), high_nibbles(bytes)));
  const Bytes small_lower = look_up(sixteen_bytes(kSmallLowerBytes), low);
  const Bytes lower = where_equal(small, none, small_lower, words_left(low, 4));
  first = first_pairs(lower, upper);
  second = second_pairs(lower, upper);
}

// W quads as bf16, exactly: W pairs of their first two, and of their last two.
QR_INLINE void widen_quads(Bf16* first, Bf16* last, const Float8* in) {
  alignas(16) static constexpr uint8_t kHalves[16] = {0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15};
  for (int64_t at = 0; at < 4 * W; at += int64_t(sizeof(Bytes))) {
    Bytes pairs, others;
    const Bytes quads = load_bytes_of(reinterpret_cast<const char*>(in) + at);
    widen_float8(look_up(quads, sixteen_bytes(kHalves)), pairs, others);
    store_bytes(reinterpret_cast<char*>(first) + at, pairs);
    store_bytes(reinterpret_cast<char*>(last) + at, others);
  }
}

// The nearest one, the even one of two; |x| is below 464.
QR_INLINE Float8 to_float8(float x) {
  constexpr uint32_t kLeastNormal = 0x3c800000, kSmallStep = 0x46800000;  // 2^-6; 2^14, whose last bit is 2^-9
  uint32_t bits, small;
  const float shifted = __builtin_fabsf(x) + 16384.0f;
  std::memcpy(&bits, &x, 4);
  std::memcpy(&small, &shifted, 4);
  const uint32_t magnitude = bits & 0x7fffffff, sign = bits >> 24 & 0x80;
  const uint32_t normal = ((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - ((127 - 7) << 3);
  return Float8{uint8_t(sign | (magnitude < kLeastNormal ? small - kSmallStep : normal))};
}

}  // namespace
}  // namespace qr
