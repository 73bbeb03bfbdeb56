// One vector of floats, as wide as the instruction set of the including translation unit.
//
// Everything here is static: nothing compiled with wide instructions may become a symbol that another unit shares.
#pragma once

#include <type_traits>
#include <utility>

#include "numbers.h"

#if defined(__ARM_NEON)
#include "simd_neon.h"
#else

namespace qr {
namespace {

#if defined(__AVX512F__)

constexpr int W = 16;  // floats in a vector
using vf = __m512;

QR_INLINE __mmask16 first(int n) { return __mmask16((1u << n) - 1); }  // n <= 16
QR_INLINE vf zero() { return _mm512_setzero_ps(); }
QR_INLINE vf set1(float x) { return _mm512_set1_ps(x); }
QR_INLINE vf load(const float* p) { return _mm512_loadu_ps(p); }
QR_INLINE vf load(const Bf16* p) {
  __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
}
QR_INLINE vf load(const Fp16* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
QR_INLINE vf load(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
QR_INLINE vf load(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
QR_INLINE vf load(const Bf16* p, int n) {
  __m256i raw = _mm256_maskz_loadu_epi16(first(n), p);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
}
QR_INLINE vf load(const Fp16* p, int n) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p)); }
QR_INLINE __m256i bf16_of(vf v) {
#if defined(__AVX512BF16__)
  return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v));
#else
  __m512i bits = _mm512_castps_si512(v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
#endif
}
QR_INLINE __m256i fp16_of(vf v) { return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT); }
QR_INLINE void store(float* p, vf v) { _mm512_storeu_ps(p, v); }
QR_INLINE void store(Bf16* p, vf v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), bf16_of(v)); }
QR_INLINE void store(Fp16* p, vf v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), fp16_of(v)); }
QR_INLINE void store(float* p, vf v, int n) { _mm512_mask_storeu_ps(p, first(n), v); }
QR_INLINE void store(Bf16* p, vf v, int n) { _mm256_mask_storeu_epi16(p, first(n), bf16_of(v)); }
QR_INLINE void store(Fp16* p, vf v, int n) { _mm256_mask_storeu_epi16(p, first(n), fp16_of(v)); }
// A whole cache line, past the caches.
QR_INLINE void store_line(void* p, __m256i low, __m256i high) {
  _mm512_stream_si512(static_cast<__m512i*>(p), _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
}
QR_INLINE void store_line(Bf16* p, vf low, vf high) { store_line(p, bf16_of(low), bf16_of(high)); }
QR_INLINE void store_line(Fp16* p, vf low, vf high) { store_line(p, fp16_of(low), fp16_of(high)); }
QR_INLINE vf add(vf a, vf b) { return _mm512_add_ps(a, b); }
QR_INLINE vf sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
QR_INLINE vf mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
QR_INLINE vf div(vf a, vf b) { return _mm512_div_ps(a, b); }
QR_INLINE vf short_reciprocal(vf a) { return _mm512_rcp14_ps(a); }  // within 2^-14
QR_INLINE vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
QR_INLINE vf max(vf a, vf b) { return _mm512_max_ps(a, b); }  // b when either is NaN
QR_INLINE vf min(vf a, vf b) { return _mm512_min_ps(a, b); }
QR_INLINE vf round(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
QR_INLINE vf abs(vf a) { return _mm512_abs_ps(a); }
QR_INLINE vf sqrt(vf a) { return _mm512_sqrt_ps(a); }
// value where a < b, otherwise fallback
QR_INLINE vf where_less(vf a, vf b, vf value, vf fallback) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), fallback, value);
}
QR_INLINE bool all_less(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ) == 0xffff; }
QR_INLINE bool any_less(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ) != 0; }
// A bit for each element that is not less, as NaN never is.
QR_INLINE uint32_t bits_not_less(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ); }
QR_INLINE vf times_power_of_two(vf a, vf n) { return _mm512_scalef_ps(a, n); }
QR_INLINE vf above_floor(vf a) { return _mm512_reduce_ps(a, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
// a * 2^floor(x), 0 where x < -126: no results without an exponent, which take 150 cycles.
QR_INLINE vf times_power_of_floor(vf a, vf x) {
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ), a, x);
}
// Sums in one fixed tree.
QR_INLINE float sum(vf v) {
  __m256 a = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_shuffle_ps(b, b, 1)));
}
QR_INLINE float largest(vf v) { return _mm512_reduce_max_ps(v); }
// 16 x 16 elements of four bytes: out[column][row] = row `row` of `in`, whose rows lie `stride` bytes apart.
QR_INLINE void transpose_16x16(void* out, const void* in, int64_t stride) {
  __m512i rows[16], pairs[16];
  for (int i = 0; i < 16; ++i) rows[i] = _mm512_loadu_si512(static_cast<const char*>(in) + i * stride);
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)  // 4 x 4 in each quarter of a vector
    for (int half = 0; half < 2; ++half) {
      rows[i + 2 * half] = _mm512_unpacklo_epi64(pairs[i + half], pairs[i + half + 2]);
      rows[i + 2 * half + 1] = _mm512_unpackhi_epi64(pairs[i + half], pairs[i + half + 2]);
    }
  for (int i = 0; i < 4; ++i) {  // then the quarters as 4 x 4
    const __m512i even_top = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0x88);
    const __m512i odd_top = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0xdd);
    const __m512i even_bottom = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0x88);
    const __m512i odd_bottom = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0xdd);
    char* column = static_cast<char*>(out) + i * 64;
    _mm512_storeu_si512(column, _mm512_shuffle_i32x4(even_top, even_bottom, 0x88));
    _mm512_storeu_si512(column + 4 * 64, _mm512_shuffle_i32x4(odd_top, odd_bottom, 0x88));
    _mm512_storeu_si512(column + 8 * 64, _mm512_shuffle_i32x4(even_top, even_bottom, 0xdd));
    _mm512_storeu_si512(column + 12 * 64, _mm512_shuffle_i32x4(odd_top, odd_bottom, 0xdd));
  }
}
// W quads of integers to bf16, exactly: the first two of each quad, and the last two.
QR_INLINE void widen_quads(Bf16* first, Bf16* last, const int8_t* in) {
  const __m512i quads = _mm512_loadu_si512(in);
  auto wide = [](__m512i high_byte) __attribute__((always_inline)) {
    return _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_srai_epi32(high_byte, 24)));
  };
  auto pair = [](__m512i even, __m512i odd) __attribute__((always_inline)) {
    return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(even, 16), odd);
  };
  _mm512_storeu_si512(first, pair(wide(_mm512_slli_epi32(quads, 24)), wide(_mm512_slli_epi32(quads, 16))));
  _mm512_storeu_si512(last, pair(wide(_mm512_slli_epi32(quads, 8)), wide(quads)));
}
// Pairs of bf16 side by side, as floats: the first of each pair, and the second.
QR_INLINE vf low_half(const char* p) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16)); }
QR_INLINE vf high_half(const char* p) {
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(int(0xffff0000))));
}

#else

constexpr int W = 8;
using vf = __m256;

QR_INLINE __m256i first(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
QR_INLINE vf zero() { return _mm256_setzero_ps(); }
QR_INLINE vf set1(float x) { return _mm256_set1_ps(x); }
QR_INLINE vf widen_bf16(__m128i raw) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
}
QR_INLINE __m128i load_16bit(const void* p, int n) {
  alignas(16) uint16_t buffer[8] = {};
  std::memcpy(buffer, p, size_t(n) * 2);
  return _mm_load_si128(reinterpret_cast<const __m128i*>(buffer));
}
QR_INLINE void store_16bit(void* p, __m128i v, int n) {
  alignas(16) uint16_t buffer[8];
  _mm_store_si128(reinterpret_cast<__m128i*>(buffer), v);
  std::memcpy(p, buffer, size_t(n) * 2);
}
QR_INLINE vf load(const float* p) { return _mm256_loadu_ps(p); }
QR_INLINE vf load(const Bf16* p) { return widen_bf16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
QR_INLINE vf load(const Fp16* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
QR_INLINE vf load(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
QR_INLINE vf load(const float* p, int n) { return _mm256_maskload_ps(p, first(n)); }
QR_INLINE vf load(const Bf16* p, int n) { return widen_bf16(load_16bit(p, n)); }
QR_INLINE vf load(const Fp16* p, int n) { return _mm256_cvtph_ps(load_16bit(p, n)); }
QR_INLINE __m128i bf16_of(vf v) {
  __m256i bits = _mm256_castps_si256(v);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  rounded = _mm256_blendv_epi8(rounded, _mm256_or_si256(bits, _mm256_set1_epi32(0x400000)), nan);
  rounded = _mm256_srli_epi32(rounded, 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
}
QR_INLINE __m128i fp16_of(vf v) { return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT); }
QR_INLINE void store(float* p, vf v) { _mm256_storeu_ps(p, v); }
QR_INLINE void store(Bf16* p, vf v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bf16_of(v)); }
QR_INLINE void store(Fp16* p, vf v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), fp16_of(v)); }
QR_INLINE void store(float* p, vf v, int n) { _mm256_maskstore_ps(p, first(n), v); }
QR_INLINE void store(Bf16* p, vf v, int n) { store_16bit(p, bf16_of(v), n); }
QR_INLINE void store(Fp16* p, vf v, int n) { store_16bit(p, fp16_of(v), n); }
QR_INLINE vf add(vf a, vf b) { return _mm256_add_ps(a, b); }
QR_INLINE vf sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
QR_INLINE vf mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
QR_INLINE vf div(vf a, vf b) { return _mm256_div_ps(a, b); }
QR_INLINE vf short_reciprocal(vf a) { return div(set1(1.0f), a); }
QR_INLINE vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
QR_INLINE vf max(vf a, vf b) { return _mm256_max_ps(a, b); }
QR_INLINE vf min(vf a, vf b) { return _mm256_min_ps(a, b); }
QR_INLINE vf round(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
QR_INLINE vf abs(vf a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
QR_INLINE vf sqrt(vf a) { return _mm256_sqrt_ps(a); }
QR_INLINE vf where_less(vf a, vf b, vf value, vf fallback) {
  return _mm256_blendv_ps(fallback, value, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
QR_INLINE bool all_less(vf a, vf b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_LT_OQ)) == 0xff; }
QR_INLINE bool any_less(vf a, vf b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_LT_OQ)) != 0; }
QR_INLINE uint32_t bits_not_less(vf a, vf b) {
  return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_NLT_UQ)));
}
QR_INLINE vf floor(vf a) { return _mm256_floor_ps(a); }
QR_INLINE vf above_floor(vf a) { return sub(a, floor(a)); }
// n in [-126, 127]: the callers clamp.
QR_INLINE vf times_power_of_two(vf a, vf n) {
  __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(a, _mm256_castsi256_ps(exponent));
}
QR_INLINE vf times_power_of_floor(vf a, vf x) {
  return where_less(x, set1(-126.0f), zero(), times_power_of_two(a, floor(x)));
}
QR_INLINE float sum(vf v) {
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_shuffle_ps(b, b, 1)));
}
QR_INLINE float largest(vf v) {
  __m128 b = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  b = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(b, _mm_shuffle_ps(b, b, 1)));
}
// 8 x 8 of these elements.
QR_INLINE void transpose_8x8(char* out, const char* in, int64_t stride) {
  __m256i rows[8], pairs[8];
  for (int i = 0; i < 8; ++i) rows[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + i * stride));
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_epi32(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 8; i += 4)  // 4 x 4 in each half of a vector
    for (int half = 0; half < 2; ++half) {
      rows[i + 2 * half] = _mm256_unpacklo_epi64(pairs[i + half], pairs[i + half + 2]);
      rows[i + 2 * half + 1] = _mm256_unpackhi_epi64(pairs[i + half], pairs[i + half + 2]);
    }
  for (int i = 0; i < 4; ++i) {
    auto* column = reinterpret_cast<__m256i*>(out + i * 64);
    _mm256_storeu_si256(column, _mm256_permute2x128_si256(rows[i], rows[i + 4], 0x20));
    _mm256_storeu_si256(column + 8, _mm256_permute2x128_si256(rows[i], rows[i + 4], 0x31));
  }
}
QR_INLINE void transpose_16x16(void* out, const void* in, int64_t stride) {
  for (int row = 0; row < 16; row += 8)
    for (int column = 0; column < 16; column += 8)
      transpose_8x8(static_cast<char*>(out) + column * 64 + row * 4,
                    static_cast<const char*>(in) + row * stride + column * 4, stride);
}
QR_INLINE void widen_quads(Bf16* first, Bf16* last, const int8_t* in) {
  const __m256i quads = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in));
  auto wide = [](__m256i high_byte) __attribute__((always_inline)) {
    return _mm256_castps_si256(_mm256_cvtepi32_ps(_mm256_srai_epi32(high_byte, 24)));
  };
  auto pair = [](__m256i even, __m256i odd) __attribute__((always_inline)) {
    return _mm256_blend_epi16(_mm256_srli_epi32(even, 16), odd, 0xaa);
  };
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(first),
                      pair(wide(_mm256_slli_epi32(quads, 24)), wide(_mm256_slli_epi32(quads, 16))));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(last), pair(wide(_mm256_slli_epi32(quads, 8)), wide(quads)));
}

QR_INLINE vf low_half(const char* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), 16));
}
QR_INLINE vf high_half(const char* p) {
  return _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
                                              _mm256_set1_epi32(int(0xffff0000))));
}

#endif

// Words of 64 bits to sum.
using Words = __m256i;
QR_INLINE Words load_words(const char* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
QR_INLINE Words add_words(Words a, Words b) { return _mm256_add_epi64(a, b); }
QR_INLINE uint64_t sum_words(Words v) {
  alignas(32) uint64_t lanes[4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), v);
  return lanes[0] + lanes[1] + lanes[2] + lanes[3];
}

}  // namespace
}  // namespace qr

#endif

namespace qr {
namespace {

// Ask for a cache line, to L1 or to L2.
QR_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
QR_INLINE void prefetch_to_l2(const void* p) { __builtin_prefetch(p, 0, 2); }

// Past the caches where the instruction set can; p is aligned to a vector. Whoever stores so calls settle_stores() before
// another thread may read it.
QR_INLINE void store_past(float* p, vf v) {
#if defined(__AVX512F__)
  _mm512_stream_ps(p, v);
#elif defined(__AVX2__)
  _mm256_stream_ps(p, v);
#else
  store(p, v);
#endif
}
QR_INLINE void settle_stores() {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}

// Call body(0), ..., body(N - 1) with constants: an array that they index stays in registers, which after a loop it may
// not.
template <int... I, class Body>
QR_INLINE void each_of(std::integer_sequence<int, I...>, const Body& body) {
  (body(std::integral_constant<int, I>()), ...);
}
template <int N, class Body>
QR_INLINE void each(const Body& body) {
  each_of(std::make_integer_sequence<int, N>(), body);
}

// Call body(index, count) for 0, W, 2W, ... below n; count is W but for the last.
template <class Body>
QR_INLINE void each_vector(int64_t n, const Body& body) {
  int64_t i = 0;
  for (; i + W <= n; i += W) body(i, W);
  if (i < n) body(i, int(n - i));
}
template <class T>
QR_INLINE vf load_some(const T* p, int n) {
  return n == W ? load(p) : load(p, n);
}
// n of the elements that `p` has of a dtype, from element `at` on.
QR_INLINE vf load_as(const void* p, int32_t dtype, int64_t at, int n) {
  return dtype == QR_FLOAT32    ? load_some(static_cast<const float*>(p) + at, n)
         : dtype == QR_BFLOAT16 ? load_some(static_cast<const Bf16*>(p) + at, n)
                                : load_some(static_cast<const Fp16*>(p) + at, n);
}
template <class T>
QR_INLINE void store_some(T* p, vf v, int n) {
  if (n == W)
    store(p, v);
  else
    store(p, v, n);
}

// e^x within 1 ulp or so: 2^n * e^r with |r| <= ln(2)/2 and a polynomial of degree 6. 0 below -87.3 (e^-inf too), NaN
// stays NaN.
QR_INLINE vf exp(vf x) {
  const vf low = set1(-87.336544f), high = set1(88.3762626647949f);
  vf clamped = max(low, min(high, x));
  vf n = round(mul(clamped, set1(1.44269504088896341f)));
  vf r = fma(n, set1(-0.693145751953125f), clamped);
  r = fma(n, set1(-1.42860682030941723e-6f), r);
  vf p = set1(1.0f / 720);
  p = fma(p, r, set1(1.0f / 120));
  p = fma(p, r, set1(1.0f / 24));
  p = fma(p, r, set1(1.0f / 6));
  p = fma(p, r, set1(0.5f));
  p = fma(p, r, set1(1.0f));
  p = fma(p, r, set1(1.0f));
  return where_less(x, low, zero(), times_power_of_two(p, n));
}

// 2^x for x <= 0, what softmax needs: 1 at 0, 0 below -126, NaN at NaN. Within 2e-7 by a polynomial of degree 5, 1e-4
// by one of degree 3, a twentieth of what rounding to bf16 takes.
template <int Degree>
QR_INLINE vf exp2(vf x) {
  static_assert(Degree == 3 || Degree == 5, "no coefficients");
  const vf r = above_floor(x);
  vf p = set1(Degree == 5 ? 0.00186713007f : 0.0770670420f);
  if (Degree == 5) p = fma(p, r, set1(0.00901703032f));
  if (Degree == 5) p = fma(p, r, set1(0.0557999131f));
  p = fma(p, r, set1(Degree == 5 ? 0.240164450f : 0.227644991f));
  p = fma(p, r, set1(Degree == 5 ? 0.693151312f : 0.695116786f));
  p = fma(p, r, set1(1.0f));
  return times_power_of_floor(p, x);
}

QR_INLINE vf sigmoid(vf x) { return div(set1(1.0f), add(set1(1.0f), exp(sub(zero(), x)))); }
// Within 3e-4 of it, for results that are rounded to bf16.
QR_INLINE vf short_sigmoid(vf x) {
  const vf power = exp2<3>(max(set1(-125.0f), min(set1(125.0f), mul(x, set1(-1.44269504088896341f)))));
  return short_reciprocal(add(set1(1.0f), power));
}
// tanh x = 1 - 2 / (e^2x + 1), good to an absolute error of one ulp of 1, which is what its users add to 1 or scale.
QR_INLINE vf tanh(vf x) {
  vf e = exp(add(x, x));
  return sub(set1(1.0f), div(set1(2.0f), add(e, set1(1.0f))));
}
QR_INLINE vf soft_capped(vf x, float cap) { return mul(set1(cap), tanh(mul(x, set1(1.0f / cap)))); }

}  // namespace
}  // namespace qr
