// Products of unpacked weights, which are bytes, with inputs on AVX2: by vpdpbusd where there is AVX-VNNI, else of pairs.
//
// `Products<Format>` says what bytes weights are unpacked to, how many too many those are (kBias), and in what form the
// codes of nested groups are kept; and it adds the products of R rows with what a group has in one step.
#pragma once

#include "gemm_quantized_row.h"

namespace qr {
namespace {

// Keeps the order of sums, at no cost: without it GCC computes all products of a tile first, and spills them.
QR_INLINE void settle(vi& v) { asm("" : "+x"(v)); }
QR_INLINE void keep(char* at, vi v) { _mm256_store_si256(reinterpret_cast<__m256i*>(at), v); }
QR_INLINE vi kept(const char* at) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(at)); }
// The lower halves of numbers of 32 bits, those of `high` above those of `low`.
QR_INLINE vi lower_halves(vi low, vi high) { return _mm256_blend_epi16(low, _mm256_slli_epi32(high, 16), 0xaa); }

// Which products are added: with so many fours of inputs, and vectors of columns [First, First + Count). Bytes of four
// inputs and 8 columns each lie as [halves of 16 columns, Half bytes apart][fours][2].
template <int Fours, int64_t Half, int First = 0, int Count = kVectors>
struct ProductsOf {
  static constexpr int kFours = Fours, kFirst = First, kCount = Count;
  QR_INLINE vi bytes(const char* weights, int four, int v) {
    return kept(weights + v / 2 * Half + four * 64 + v % 2 * 32);
  }
};

// Four inputs of each row.
template <int R>
QR_INLINE void read_inputs(vi (&x)[R], const int8_t* lines) {
  each<R>([&](auto r) __attribute__((always_inline)) { x[r] = four_bytes(lines + r * kQuantizedDepth); });
}

#if defined(__AVXVNNI__)

template <class Format>
struct Products {
  static constexpr int kBias = Format::kBias;

  QR_INLINE void unpack(const Format& format, const char* half, int64_t begin, int row, vi& first, vi& second) {
    format.unsigned_row(half, begin, row, first, second);
  }
  QR_INLINE vi factor(vi code) { return code; }

  template <int R, class Of>
  QR_INLINE void add(Of, vi (&acc)[R][kVectors], const char* weights, const int8_t* lines) {
    constexpr int kChains = R * Of::kCount < kVectors * 2 ? 2 : 1;  // few sums would wait for each other
    vi others[R][Of::kCount];
    each<R * Of::kCount>([&](auto i) __attribute__((always_inline)) { others[i % R][i / R] = none(); });
    each<Of::kFours>([&](auto four) __attribute__((always_inline)) {
      vi x[R];
      read_inputs<R>(x, lines + four * 4);
      each<Of::kCount>([&](auto i) __attribute__((always_inline)) {
        const vi bytes = Of::bytes(weights, four, Of::kFirst + i);
        const vi w = Format::kHalfBytes == 1024 ? flip(bytes, 0x80) : bytes;  // as they were packed: signed
        each<R>([&](auto r) __attribute__((always_inline)) {
          vi& own = four % kChains == 0 ? acc[r][Of::kFirst + i] : others[r][i];
          own = dot(own, w, x[r]);
          if constexpr (kChains == 1) settle(own);
        });
      });
    });
    if constexpr (kChains == 2)
      each<R * Of::kCount>([&](auto i) __attribute__((always_inline)) {
        acc[i % R][Of::kFirst + i / R] = qr::add(acc[i % R][Of::kFirst + i / R], others[i % R][i / R]);
      });
  }

  // The same of a nested group. factor_of(v): what its sums are multiplied by.
  template <int R, class Of, class Factor>
  QR_INLINE void add(Of, vi (&acc)[R][kVectors], const char* weights, const int8_t* lines, const Factor& factor_of) {
    vi sums[R][kVectors];
    each<R * kVectors>([&](auto i) __attribute__((always_inline)) { sums[i / kVectors][i % kVectors] = none(); });
    add<R>(Of(), sums, weights, lines);
    each<kVectors>([&](auto v) __attribute__((always_inline)) {
      const vi by = factor_of(v);
      each<R>([&](auto r) __attribute__((always_inline)) {
        acc[r][v] = qr::add(acc[r][v], mul(sums[r][v], by));
        settle(acc[r][v]);
      });
    });
  }
};

#else

// Four inputs of 8 columns each: codes of fewer than 8 bits. Products with pairs of x are added in 16 bits.
template <int Bits>
struct UnpackedBytes {
  static constexpr int kFit = 1 << (7 - Bits);  // 2 * 127 times the largest code: so many fit
  vi w;
  explicit __attribute__((always_inline)) UnpackedBytes(vi bytes) : w(bytes) {}
  __attribute__((always_inline)) vi times(vi x) const { return _mm256_maddubs_epi16(w, x); }
};
// Signed bytes: their sizes, up to 128, times x with their signs, of which two of 128 * 127 fit.
template <>
struct UnpackedBytes<8> {
  static constexpr int kFit = 1;
  vi w, size;
  explicit __attribute__((always_inline)) UnpackedBytes(vi bytes) : w(bytes), size(_mm256_abs_epi8(bytes)) {}
  __attribute__((always_inline)) vi times(vi x) const { return _mm256_maddubs_epi16(size, _mm256_sign_epi8(x, w)); }
};

template <class Format>
struct Products {
  using Weights = UnpackedBytes<Format::kBits>;
  static constexpr int kBias = Format::kBits == 8 ? 0 : Format::kBias;

  QR_INLINE void unpack(const Format& format, const char* half, int64_t begin, int row, vi& first, vi& second) {
    if constexpr (Format::kBits == 8) {
      const char* line = half + (begin + row) * (Format::kHalfBytes / 8);
      first = format.signed_four(line, 0);
      second = format.signed_four(line, 1);
    } else {
      format.codes_of_row(half, begin, row, first, second);
    }
  }
  // Twice, in 16 bits.
  QR_INLINE vi factor(vi code) { return lower_halves(code, code); }

  template <int R, class Of>
  QR_INLINE void add(Of, vi (&acc)[R][kVectors], const char* weights, const int8_t* lines) {
    const vi unit = _mm256_set1_epi16(1 << Format::kCodeShift);
    add<R>(Of(), acc, weights, lines, [&](int) __attribute__((always_inline)) { return unit; });
  }

  // factor_of(v): what sums are multiplied by.
  template <int R, class Of, class Factor>
  QR_INLINE void add(Of, vi (&acc)[R][kVectors], const char* weights, const int8_t* lines, const Factor& factor_of) {
    constexpr int kTogether = Weights::kFit < Of::kFours ? Weights::kFit : Of::kFours;  // in 16 bits
    each<Of::kFours / kTogether>([&](auto part) __attribute__((always_inline)) {
      vi sums[R][kVectors];
      each<kTogether>([&](auto i) __attribute__((always_inline)) {
        constexpr int kFour = part * kTogether + i;
        vi x[R];
        read_inputs<R>(x, lines + kFour * 4);
        each<Of::kCount>([&](auto column) __attribute__((always_inline)) {
          constexpr int v = Of::kFirst + column;
          const Weights w(Of::bytes(weights, kFour, v));
          each<R>([&](auto r) __attribute__((always_inline)) {
            const vi products = w.times(x[r]);
            sums[r][v] = i == 0 ? products : _mm256_add_epi16(sums[r][v], products);
            if constexpr (kTogether > 2) settle(sums[r][v]);
            if constexpr (i == kTogether - 1) {
              acc[r][v] = qr::add(acc[r][v], _mm256_madd_epi16(sums[r][v], factor_of(v)));
              settle(acc[r][v]);
            }
          });
        });
      });
    });
  }
};

#endif

}  // namespace
}  // namespace qr
