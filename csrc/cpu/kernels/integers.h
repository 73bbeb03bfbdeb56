// One vector of 32-bit integers, as many as there are floats in a vector, and dot products of bytes.
#pragma once

#include "simd.h"

namespace qr {
namespace {

#if defined(__AVX512F__)
using vi = __m512i;
QR_INLINE vi none() { return _mm512_setzero_si512(); }
QR_INLINE vi load_bytes(const char* p) { return _mm512_loadu_si512(p); }
QR_INLINE vi four_bytes(const int8_t* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  return _mm512_set1_epi32(four);
}
QR_INLINE vi flip(vi v, int byte) { return _mm512_xor_si512(v, _mm512_set1_epi8(int8_t(byte))); }
QR_INLINE vi upper_nibbles(vi v) { return _mm512_and_si512(v, _mm512_set1_epi8(int8_t(0xf0))); }
QR_INLINE vi lower_nibbles(vi v) { return upper_nibbles(_mm512_slli_epi16(v, 4)); }
QR_INLINE vi add(vi a, vi b) { return _mm512_add_epi32(a, b); }
QR_INLINE vi sub(vi a, vi b) { return _mm512_sub_epi32(a, b); }
QR_INLINE vi mul(vi a, vi b) { return _mm512_mullo_epi32(a, b); }
QR_INLINE vi same(int32_t value) { return _mm512_set1_epi32(value); }
QR_INLINE vi widened(const int8_t* p) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
QR_INLINE vf floats(vi v) { return _mm512_cvtepi32_ps(v); }
#elif defined(__AVX2__)
using vi = __m256i;
QR_INLINE vi none() { return _mm256_setzero_si256(); }
QR_INLINE vi load_bytes(const char* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
QR_INLINE vi four_bytes(const int8_t* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  return _mm256_set1_epi32(four);
}
QR_INLINE vi flip(vi v, int byte) { return _mm256_xor_si256(v, _mm256_set1_epi8(int8_t(byte))); }
QR_INLINE vi upper_nibbles(vi v) { return _mm256_and_si256(v, _mm256_set1_epi8(int8_t(0xf0))); }
QR_INLINE vi lower_nibbles(vi v) { return upper_nibbles(_mm256_slli_epi16(v, 4)); }
QR_INLINE vi add(vi a, vi b) { return _mm256_add_epi32(a, b); }
QR_INLINE vi sub(vi a, vi b) { return _mm256_sub_epi32(a, b); }
QR_INLINE vi mul(vi a, vi b) { return _mm256_mullo_epi32(a, b); }
QR_INLINE vi same(int32_t value) { return _mm256_set1_epi32(value); }
QR_INLINE vi widened(const int8_t* p) {
  return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
QR_INLINE vf floats(vi v) { return _mm256_cvtepi32_ps(v); }
#endif

// Two numbers of 16 bits in each of 32; not negative.
#if defined(__AVX512F__)
QR_INLINE vi two_in_one(vi low, vi high) { return _mm512_or_si512(low, _mm512_slli_epi32(high, 16)); }
#elif defined(__AVX2__)
QR_INLINE vi two_in_one(vi low, vi high) { return _mm256_or_si256(low, _mm256_slli_epi32(high, 16)); }
#endif
// acc + the products of two such pairs
#if defined(__AVX512VNNI__)
QR_INLINE vi add_pairs(vi acc, vi a, vi b) { return _mm512_dpwssd_epi32(acc, a, b); }
#elif defined(__AVX512F__)
QR_INLINE vi add_pairs(vi acc, vi a, vi b) { return _mm512_add_epi32(acc, _mm512_madd_epi16(a, b)); }
#elif defined(__AVX2__)
QR_INLINE vi add_pairs(vi acc, vi a, vi b) { return _mm256_add_epi32(acc, _mm256_madd_epi16(a, b)); }
#endif

// acc + sums of four products of unsigned a and signed b. In assembly, for gcc 12 copies registers before and after its own
// function for vpdpbusd.
#if defined(__AVX512VNNI__)
QR_INLINE vi dot(vi acc, vi a, vi b) {
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
  return acc;
}
#elif defined(QR_EVEX)  // for tests on processors that know it in the encoding of AVX-512 alone
QR_INLINE vi dot(vi acc, vi a, vi b) {
  asm("%{evex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(a), "x"(b));
  return acc;
}
#elif defined(__AVXVNNI__)
QR_INLINE vi dot(vi acc, vi a, vi b) { return _mm256_dpbusd_avx_epi32(acc, a, b); }
#endif

}  // namespace
}  // namespace qr
