// Sixteen lanes of float32, each of which takes a pair of bf16 products in one operation: vdpbf16ps, or bfdot on ARM.
#pragma once

#include <cstring>

#include "../simd.h"

namespace qr {
namespace {

constexpr int kLanes = 16;

#if defined(__AVX512BF16__)
using Sums = __m512;    // sixteen floats
using Pairs = __m512bh;  // and as many pairs of bf16
constexpr int kSumsInRegisters = 24;
QR_INLINE Sums no_sums() { return _mm512_setzero_ps(); }
QR_INLINE Pairs load_pairs(const void* p) { return reinterpret_cast<Pairs>(_mm512_loadu_si512(p)); }
QR_INLINE Pairs same_pairs(int32_t pair) { return reinterpret_cast<Pairs>(_mm512_set1_epi32(pair)); }
QR_INLINE Sums add_products(Sums sums, Pairs a, Pairs b) { return _mm512_dpbf16_ps(sums, a, b); }
QR_INLINE void store_sums(float* p, Sums sums) { _mm512_storeu_ps(p, sums); }
#else
struct Sums {
  float32x4_t fours[4];
};
struct Pairs {
  bfloat16x8_t fours[4];
};
constexpr int kSumsInRegisters = 4;
QR_INLINE Sums no_sums() {
  const float32x4_t none = vdupq_n_f32(0.0f);
  return {{none, none, none, none}};
}
QR_INLINE Pairs load_pairs(const void* p) {
  const auto* numbers = static_cast<const bfloat16_t*>(p);
  return {{vld1q_bf16(numbers), vld1q_bf16(numbers + 8), vld1q_bf16(numbers + 16), vld1q_bf16(numbers + 24)}};
}
QR_INLINE Pairs same_pairs(int32_t pair) {
  const bfloat16x8_t all = vreinterpretq_bf16_s32(vdupq_n_s32(pair));
  return {{all, all, all, all}};
}
QR_INLINE Sums add_products(Sums sums, Pairs a, Pairs b) {
  return {{vbfdotq_f32(sums.fours[0], a.fours[0], b.fours[0]), vbfdotq_f32(sums.fours[1], a.fours[1], b.fours[1]),
           vbfdotq_f32(sums.fours[2], a.fours[2], b.fours[2]), vbfdotq_f32(sums.fours[3], a.fours[3], b.fours[3])}};
}
QR_INLINE void store_sums(float* p, Sums sums) {
  for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, sums.fours[i]);
}
#endif

// Both products of a pair in one operation. Ways to add them up have the same members; see WidenedPairs.
struct PairedProducts {
  static constexpr int kTerms = 1;  // operations
  static constexpr int kRows = 8;   // whose sums are in registers at most, beside one line of pairs
  using Number = Bf16;              // of what a line of pairs is multiplied with
  struct Scope {};                  // around all of it
  QR_INLINE void take(Number* pair, const Bf16* in) { std::memcpy(pair, in, 4); }
  QR_INLINE Pairs load(const Bf16* line, int) { return load_pairs(line); }
  QR_INLINE Pairs same(const Number* pair, int) {
    int32_t both;
    std::memcpy(&both, pair, 4);
    return same_pairs(both);
  }
  QR_INLINE Sums add(Sums sums, Pairs a, Pairs b) { return add_products(sums, a, b); }
};

}  // namespace
}  // namespace qr
