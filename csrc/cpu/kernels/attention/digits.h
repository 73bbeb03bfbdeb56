// Integers of sixteen bits in place of numbers, for attention over an int8 cache: a query, and a row's weights over a
// split, relative to their largest magnitude. They are two digits of eight bits, each multiplied on its own: sums of
// integers are exact, so they may be taken in any order.
#pragma once

#include "attention.h"
#include "../integers.h"

namespace qr {
namespace {

// The integers of the largest magnitude: high * 256 + low. Queries have signed digits, weights unsigned ones.
constexpr float kMostQuery = 127 * 256, kMostWeight = 65535;

QR_INLINE vi nearest(vf v) {
#if defined(__AVX512F__)
  return _mm512_cvtps_epi32(v);
#else
  return _mm256_cvtps_epi32(v);
#endif
}
QR_INLINE vi high_digits(vi v) {
#if defined(__AVX512F__)
  return _mm512_srai_epi32(v, 8);
#else
  return _mm256_srai_epi32(v, 8);
#endif
}
// The lowest byte of each.
QR_INLINE void store_low_bytes(uint8_t* p, vi v) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(v));
#else
  const __m256i bytes = _mm256_shuffle_epi8(v, _mm256_set1_epi32(0x0c080400));
  const __m128i both = _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), both);
#endif
}

// Call store(i, integers) for 0, W, 2W, ... below n, of the numbers that load(i, count) gives; returns what one of their
// units is worth. `most` is the integer of the largest magnitude.
template <class Load, class Store>
QR_INLINE float each_integers(int64_t n, float most, const Load& load_at, const Store& store_at) {
  vf largest = zero(), total = zero();
  each_vector(n, [&](int64_t i, int count) __attribute__((always_inline)) {
    const vf v = load_at(i, count);
    largest = max(abs(v), largest);
    total = add(v, total);
  });
  const float top = qr::largest(largest);
  const vf factor = set1(top > 0.0f ? most / top : 0.0f);
  each_vector(n, [&](int64_t i, int count) __attribute__((always_inline)) {
    store_at(i, nearest(mul(load_at(i, count), factor)));
  });
  return top / most + 0.0f * sum(total);  // NaN remains
}

// The digits of a query, [n] each, in whole vectors; returns what a unit is worth.
QR_INLINE float digits_of_query(const Bf16* in, int64_t n, int8_t* high, int8_t* low) {
  return each_integers(
      n, kMostQuery, [&](int64_t i, int count) __attribute__((always_inline)) { return load_some(in + i, count); },
      [&](int64_t i, vi whole) __attribute__((always_inline)) {
        store_low_bytes(reinterpret_cast<uint8_t*>(high + i), high_digits(add(whole, same(128))));
        store_low_bytes(reinterpret_cast<uint8_t*>(low + i), whole);
      });
}

// The digits of weights, which are not negative; n is a multiple of 16.
QR_INLINE float digits_of_weights(const float* in, int64_t n, uint8_t* high, uint8_t* low) {
  return each_integers(
      n, kMostWeight, [&](int64_t i, int) __attribute__((always_inline)) { return load(in + i); },
      [&](int64_t i, vi whole) __attribute__((always_inline)) {
        store_low_bytes(high + i, high_digits(whole));
        store_low_bytes(low + i, whole);
      });
}

QR_INLINE vi load_integers(const int32_t* p) { return load_bytes(reinterpret_cast<const char*>(p)); }

// Sums over both digits, as numbers.
QR_INLINE vf joined(vi high, vi low, vf unit) { return mul(fma(floats(high), set1(256), floats(low)), unit); }

}  // namespace
}  // namespace qr
