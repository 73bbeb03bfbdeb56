// The vectors of simd.h on ARM: eight floats in two registers. With half as many to a block of rows as AVX-512 has, the
// 32 registers hold what its 32 do, and every kernel that is written for eight floats serves as it is.
#pragma once

#include "numbers.h"

namespace qr {
namespace {

constexpr int W = 8;  // floats in a vector
struct vf {
  float32x4_t low, high;
};

QR_INLINE vf zero() { return {vdupq_n_f32(0.0f), vdupq_n_f32(0.0f)}; }
QR_INLINE vf set1(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }

// Sixteen bits each, and eight floats.
QR_INLINE uint16x8_t load_16bit(const void* p) { return vld1q_u16(static_cast<const uint16_t*>(p)); }
QR_INLINE uint16x8_t load_16bit(const void* p, int n) {
  alignas(16) uint16_t buffer[8] = {};
  std::memcpy(buffer, p, size_t(n) * 2);
  return vld1q_u16(buffer);
}
QR_INLINE void store_16bit(void* p, uint16x8_t v) { vst1q_u16(static_cast<uint16_t*>(p), v); }
QR_INLINE void store_16bit(void* p, uint16x8_t v, int n) {
  alignas(16) uint16_t buffer[8];
  vst1q_u16(buffer, v);
  std::memcpy(p, buffer, size_t(n) * 2);
}
QR_INLINE vf widen_bf16(uint16x8_t raw) {
  return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(raw), 16)), vreinterpretq_f32_u32(vshll_high_n_u16(raw, 16))};
}
QR_INLINE vf widen_fp16(uint16x8_t raw) {
  const float16x8_t half = vreinterpretq_f16_u16(raw);
  return {vcvt_f32_f16(vget_low_f16(half)), vcvt_high_f32_f16(half)};
}
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
QR_INLINE uint16x8_t bf16_of(vf v) {
  return vreinterpretq_u16_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(v.low), v.high));
}
#else
QR_INLINE uint32x4_t rounded_to_bf16(float32x4_t v) {
  const uint32x4_t bits = vreinterpretq_u32_f32(v), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  return vbslq_u32(vceqq_f32(v, v), rounded, vorrq_u32(bits, vdupq_n_u32(0x400000)));
}
QR_INLINE uint16x8_t bf16_of(vf v) {
  return vshrn_high_n_u32(vshrn_n_u32(rounded_to_bf16(v.low), 16), rounded_to_bf16(v.high), 16);
}
#endif
QR_INLINE uint16x8_t fp16_of(vf v) {
  return vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(v.low), v.high));
}

QR_INLINE vf load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
QR_INLINE vf load(const Bf16* p) { return widen_bf16(load_16bit(p)); }
QR_INLINE vf load(const Fp16* p) { return widen_fp16(load_16bit(p)); }
QR_INLINE vf load(const int8_t* p) {
  const int16x8_t wide = vmovl_s8(vld1_s8(p));
  return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide))), vcvtq_f32_s32(vmovl_high_s16(wide))};
}
QR_INLINE vf load(const float* p, int n) {
  alignas(16) float buffer[8] = {};
  std::memcpy(buffer, p, size_t(n) * 4);
  return load(buffer);
}
QR_INLINE vf load(const Bf16* p, int n) { return widen_bf16(load_16bit(p, n)); }
QR_INLINE vf load(const Fp16* p, int n) { return widen_fp16(load_16bit(p, n)); }
QR_INLINE void store(float* p, vf v) {
  vst1q_f32(p, v.low);
  vst1q_f32(p + 4, v.high);
}
QR_INLINE void store(Bf16* p, vf v) { store_16bit(p, bf16_of(v)); }
QR_INLINE void store(Fp16* p, vf v) { store_16bit(p, fp16_of(v)); }
QR_INLINE void store(float* p, vf v, int n) {
  alignas(16) float buffer[8];
  store(buffer, v);
  std::memcpy(p, buffer, size_t(n) * 4);
}
QR_INLINE void store(Bf16* p, vf v, int n) { store_16bit(p, bf16_of(v), n); }
QR_INLINE void store(Fp16* p, vf v, int n) { store_16bit(p, fp16_of(v), n); }

QR_INLINE vf add(vf a, vf b) { return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }
QR_INLINE vf sub(vf a, vf b) { return {vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)}; }
QR_INLINE vf mul(vf a, vf b) { return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }
QR_INLINE vf div(vf a, vf b) { return {vdivq_f32(a.low, b.low), vdivq_f32(a.high, b.high)}; }
QR_INLINE vf short_reciprocal(vf a) { return div(set1(1.0f), a); }
QR_INLINE vf fma(vf a, vf b, vf c) { return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)}; }
// value where a < b, otherwise fallback
QR_INLINE float32x4_t where_less(float32x4_t a, float32x4_t b, float32x4_t value, float32x4_t fallback) {
  return vbslq_f32(vcltq_f32(a, b), value, fallback);
}
QR_INLINE vf where_less(vf a, vf b, vf value, vf fallback) {
  return {where_less(a.low, b.low, value.low, fallback.low), where_less(a.high, b.high, value.high, fallback.high)};
}
// b when either is NaN, which the instructions for it would have otherwise
QR_INLINE vf max(vf a, vf b) { return where_less(b, a, a, b); }
QR_INLINE vf min(vf a, vf b) { return where_less(a, b, a, b); }
QR_INLINE vf round(vf a) { return {vrndnq_f32(a.low), vrndnq_f32(a.high)}; }
QR_INLINE vf floor(vf a) { return {vrndmq_f32(a.low), vrndmq_f32(a.high)}; }
QR_INLINE vf abs(vf a) { return {vabsq_f32(a.low), vabsq_f32(a.high)}; }
QR_INLINE vf sqrt(vf a) { return {vsqrtq_f32(a.low), vsqrtq_f32(a.high)}; }
QR_INLINE bool all_less(vf a, vf b) {
  return vminvq_u32(vandq_u32(vcltq_f32(a.low, b.low), vcltq_f32(a.high, b.high))) != 0;
}
QR_INLINE bool any_less(vf a, vf b) {
  return vmaxvq_u32(vorrq_u32(vcltq_f32(a.low, b.low), vcltq_f32(a.high, b.high))) != 0;
}
// A bit for each element that is not less, as NaN never is.
QR_INLINE uint32_t bits_not_less(vf a, vf b) {
  alignas(16) static const uint32_t bits[8] = {1, 2, 4, 8, 16, 32, 64, 128};
  const uint32x4_t low = vbicq_u32(vld1q_u32(bits), vcltq_f32(a.low, b.low));
  const uint32x4_t high = vbicq_u32(vld1q_u32(bits + 4), vcltq_f32(a.high, b.high));
  return vaddvq_u32(vorrq_u32(low, high));
}
QR_INLINE vf above_floor(vf a) { return sub(a, floor(a)); }
// n in [-126, 127]: the callers clamp.
QR_INLINE float32x4_t power_of_two(float32x4_t n) {
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127)), 23));
}
QR_INLINE vf times_power_of_two(vf a, vf n) { return mul(a, vf{power_of_two(n.low), power_of_two(n.high)}); }
// a * 2^floor(x), 0 where x < -126
QR_INLINE vf times_power_of_floor(vf a, vf x) {
  return where_less(x, set1(-126.0f), zero(), times_power_of_two(a, floor(x)));
}
// In one fixed tree.
QR_INLINE float sum(vf v) {
  const float32x4_t four = vaddq_f32(v.low, v.high);
  const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
QR_INLINE float largest(vf v) {
  const float32x4_t four = where_less(v.high, v.low, v.low, v.high);
  float lanes[4];
  vst1q_f32(lanes, four);
  const float first = lanes[0] > lanes[2] ? lanes[0] : lanes[2], second = lanes[1] > lanes[3] ? lanes[1] : lanes[3];
  return first > second ? first : second;
}

// 16 x 16 elements of four bytes: out[column][row] = row `row` of `in`, whose rows lie `stride` bytes apart.
QR_INLINE void transpose_16x16(void* out, const void* in, int64_t stride) {
  for (int row = 0; row < 16; row += 4)
    for (int column = 0; column < 16; column += 4) {
      const char* from = static_cast<const char*>(in) + row * stride + column * 4;
      uint32x4_t rows[4];
      for (int i = 0; i < 4; ++i) std::memcpy(&rows[i], from + i * stride, 16);
      const uint32x4x2_t top = vzipq_u32(rows[0], rows[2]), bottom = vzipq_u32(rows[1], rows[3]);
      const uint32x4x2_t left = vzipq_u32(top.val[0], bottom.val[0]), right = vzipq_u32(top.val[1], bottom.val[1]);
      char* to = static_cast<char*>(out) + column * 64 + row * 4;
      std::memcpy(to, &left.val[0], 16);
      std::memcpy(to + 64, &left.val[1], 16);
      std::memcpy(to + 128, &right.val[0], 16);
      std::memcpy(to + 192, &right.val[1], 16);
    }
}

// W quads of integers to bf16, exactly: the first two of each quad, and the last two.
QR_INLINE void widen_quads(Bf16* first, Bf16* last, const int8_t* in) {
  for (int i = 0; i < 2; ++i) {
    const int8x16_t quads = vld1q_s8(in + 16 * i);
    const int16x8_t low = vmovl_s8(vget_low_s8(quads)), high = vmovl_high_s8(quads);
    const vf quads01 = {vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_high_s16(low))};
    const vf quads23 = {vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_high_s16(high))};
    const uint32x4_t a = vreinterpretq_u32_u16(bf16_of(quads01)), b = vreinterpretq_u32_u16(bf16_of(quads23));
    store_16bit(first + 8 * i, vreinterpretq_u16_u32(vuzp1q_u32(a, b)));
    store_16bit(last + 8 * i, vreinterpretq_u16_u32(vuzp2q_u32(a, b)));
  }
}

// Pairs of bf16 side by side, as floats: the first of each pair, and the second.
QR_INLINE vf low_half(const char* p) {
  const uint32_t* words = reinterpret_cast<const uint32_t*>(p);
  return {vreinterpretq_f32_u32(vshlq_n_u32(vld1q_u32(words), 16)),
          vreinterpretq_f32_u32(vshlq_n_u32(vld1q_u32(words + 4), 16))};
}
QR_INLINE vf high_half(const char* p) {
  const uint32_t* words = reinterpret_cast<const uint32_t*>(p);
  const uint32x4_t mask = vdupq_n_u32(0xffff0000u);
  return {vreinterpretq_f32_u32(vandq_u32(vld1q_u32(words), mask)),
          vreinterpretq_f32_u32(vandq_u32(vld1q_u32(words + 4), mask))};
}

// ---- doubles ----

constexpr int kDoubles = 4;
struct vd {
  float64x2_t low, high;
};
QR_INLINE vd set1d(double x) { return {vdupq_n_f64(x), vdupq_n_f64(x)}; }
QR_INLINE vd widen_double(const float* p) {
  const float32x4_t four = vld1q_f32(p);
  return {vcvt_f64_f32(vget_low_f32(four)), vcvt_high_f64_f32(four)};
}
QR_INLINE vd fmad(vd a, vd b, vd c) { return {vfmaq_f64(c.low, a.low, b.low), vfmaq_f64(c.high, a.high, b.high)}; }
QR_INLINE vd addd(vd a, vd b) { return {vaddq_f64(a.low, b.low), vaddq_f64(a.high, b.high)}; }
QR_INLINE vd subd(vd a, vd b) { return {vsubq_f64(a.low, b.low), vsubq_f64(a.high, b.high)}; }
QR_INLINE vd divd(vd a, vd b) { return {vdivq_f64(a.low, b.low), vdivq_f64(a.high, b.high)}; }
QR_INLINE vd muld(vd a, vd b) { return {vmulq_f64(a.low, b.low), vmulq_f64(a.high, b.high)}; }
QR_INLINE vd maxd(vd a, vd b) {
  return {vbslq_f64(vcgtq_f64(a.low, b.low), a.low, b.low), vbslq_f64(vcgtq_f64(a.high, b.high), a.high, b.high)};
}
QR_INLINE vd roundd(vd a) { return {vrndnq_f64(a.low), vrndnq_f64(a.high)}; }
QR_INLINE float64x2_t power_of_two(float64x2_t n) {
  return vreinterpretq_f64_s64(vshlq_n_s64(vaddq_s64(vcvtnq_s64_f64(n), vdupq_n_s64(1023)), 52));
}
QR_INLINE vd scale_by(vd a, vd n) { return muld(a, vd{power_of_two(n.low), power_of_two(n.high)}); }
QR_INLINE void store_rounded(int64_t* p, vd v) {
  vst1q_s64(p, vcvtnq_s64_f64(v.low));
  vst1q_s64(p + 2, vcvtnq_s64_f64(v.high));
}

// ---- integers of 32 bits: sums of products of bytes ----

struct vi {
  int32x4_t low, high;
};
QR_INLINE vi none() { return {vdupq_n_s32(0), vdupq_n_s32(0)}; }
QR_INLINE vi add(vi a, vi b) { return {vaddq_s32(a.low, b.low), vaddq_s32(a.high, b.high)}; }
QR_INLINE vi sub(vi a, vi b) { return {vsubq_s32(a.low, b.low), vsubq_s32(a.high, b.high)}; }
QR_INLINE vi mul(vi a, vi b) { return {vmulq_s32(a.low, b.low), vmulq_s32(a.high, b.high)}; }
QR_INLINE vi same(int32_t value) { return {vdupq_n_s32(value), vdupq_n_s32(value)}; }
QR_INLINE vi widened(const int8_t* p) {
  const int16x8_t wide = vmovl_s8(vld1_s8(p));
  return {vmovl_s16(vget_low_s16(wide)), vmovl_high_s16(wide)};
}
QR_INLINE int32x4_t two_in_one(int32x4_t low, int32x4_t high) { return vorrq_s32(low, vshlq_n_s32(high, 16)); }
QR_INLINE vi two_in_one(vi low, vi high) { return {two_in_one(low.low, high.low), two_in_one(low.high, high.high)}; }
QR_INLINE int32x4_t add_pairs(int32x4_t acc, int32x4_t a, int32x4_t b) {
  const int16x8_t left = vreinterpretq_s16_s32(a), right = vreinterpretq_s16_s32(b);
  const int32x4_t low = vmull_s16(vget_low_s16(left), vget_low_s16(right)), high = vmull_high_s16(left, right);
  return vaddq_s32(acc, vpaddq_s32(low, high));
}
QR_INLINE vi add_pairs(vi acc, vi a, vi b) {
  return {add_pairs(acc.low, a.low, b.low), add_pairs(acc.high, a.high, b.high)};
}
QR_INLINE vf floats(vi v) { return {vcvtq_f32_s32(v.low), vcvtq_f32_s32(v.high)}; }
QR_INLINE void store_int8(int8_t* out, vf v) {
  vst1_s8(out, vqmovn_s16(vqmovn_high_s32(vqmovn_s32(vcvtnq_s32_f32(v.low)), vcvtnq_s32_f32(v.high))));
}

// ---- bytes ----

using Bytes = uint8x16_t;
QR_INLINE Bytes load_bytes_of(const char* p) { return vld1q_u8(reinterpret_cast<const uint8_t*>(p)); }
QR_INLINE void store_bytes(char* p, Bytes v) { vst1q_u8(reinterpret_cast<uint8_t*>(p), v); }
QR_INLINE Bytes sixteen_bytes(const uint8_t* p) { return vld1q_u8(p); }
QR_INLINE Bytes low_nibbles(Bytes v) { return vandq_u8(v, vdupq_n_u8(15)); }
QR_INLINE Bytes high_nibbles(Bytes v) { return vshrq_n_u8(v, 4); }
QR_INLINE Bytes look_up(Bytes table, Bytes at) { return vqtbl1q_u8(table, at); }
QR_INLINE Bytes first_pairs(Bytes low, Bytes high) { return vzip1q_u8(low, high); }
QR_INLINE Bytes second_pairs(Bytes low, Bytes high) { return vzip2q_u8(low, high); }
QR_INLINE Bytes lower_bytes(Bytes a, Bytes b) { return vuzp1q_u8(a, b); }
QR_INLINE Bytes upper_bytes(Bytes a, Bytes b) { return vuzp2q_u8(a, b); }
QR_INLINE Bytes all_bytes(int value) { return vdupq_n_u8(uint8_t(value)); }
QR_INLINE Bytes where_equal(Bytes a, Bytes b, Bytes then, Bytes otherwise) {
  return vbslq_u8(vceqq_u8(a, b), then, otherwise);
}
QR_INLINE Bytes bits_of(Bytes a, int mask) { return vandq_u8(a, all_bytes(mask)); }
QR_INLINE Bytes either(Bytes a, Bytes b) { return vorrq_u8(a, b); }
QR_INLINE Bytes flip(Bytes v, int byte) { return veorq_u8(v, all_bytes(byte)); }
// Of words of 16 bits, by so many bits.
QR_INLINE Bytes words_left(Bytes a, int bits) {
  return vreinterpretq_u8_u16(vshlq_u16(vreinterpretq_u16_u8(a), vdupq_n_s16(int16_t(bits))));
}
QR_INLINE Bytes words_right(Bytes a, int bits) {
  return vreinterpretq_u8_u16(vshlq_u16(vreinterpretq_u16_u8(a), vdupq_n_s16(int16_t(-bits))));
}

// ---- sums of words, to read as fast as one core can ----

using Words = uint64x2_t;
QR_INLINE Words load_words(const char* p) { return vld1q_u64(reinterpret_cast<const uint64_t*>(p)); }
QR_INLINE Words add_words(Words a, Words b) { return vaddq_u64(a, b); }
QR_INLINE uint64_t sum_words(Words v) { return vaddvq_u64(v); }

}  // namespace
}  // namespace qr
