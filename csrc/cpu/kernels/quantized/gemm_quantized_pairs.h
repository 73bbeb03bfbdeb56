// Integer products on AVX-512 without dot product instructions: pairs of bytes are multiplied and added in 16 bits, where
// the pairs of int8 just fit, and those of 32 int2, eight int4, four int5 or two int6 together.
#pragma once

#include "gemm_quantized_rows.h"

namespace qr {
namespace {

constexpr int kAtOnce = 2;  // vectors of columns: one of each half

QR_INLINE vi multiply_pairs(vi a, vi b) { return _mm512_maddubs_epi16(a, b); }
QR_INLINE vi add_shorts(vi a, vi b) { return _mm512_add_epi16(a, b); }
QR_INLINE vi pairs(vi sums) { return _mm512_madd_epi16(sums, _mm512_set1_epi16(1)); }
QR_INLINE vi shifted(vi v, int bits) { return _mm512_slli_epi32(v, unsigned(bits)); }

// Weights as their sizes, up to 128, and as what gives x their signs.
struct SignedWeights {
  vi size;
  __mmask64 negative;
  explicit __attribute__((always_inline)) SignedWeights(vi w)
      : size(_mm512_abs_epi8(w)), negative(_mm512_movepi8_mask(w)) {}
  __attribute__((always_inline)) vi sign(vi x) const { return _mm512_mask_sub_epi8(x, negative, none(), x); }
};

// Fetch what comes after so many rows of 8 k of each vector.
template <class Format, int Rows>
QR_INLINE void fetch_after(const char* half, int64_t row) {
  constexpr int64_t kLines = Format::kHalfBytes / 64;
  const char* line = half + row * kLines / 8 * 64;
  for (int64_t i = 0; i < (Rows * kLines + 7) / 8; ++i, line += 64)
    for (int64_t at = 0; at < kAtOnce * W * 4; at += 64) prefetch_stream(line + at / 64 * Format::kHalfBytes);
}

template <class Format>
constexpr int kAdded = Format::kGroup < 32 ? Format::kGroup / 8 : 4;  // rows of 8 k that are added at once

// acc += the products of kAdded rows of 8 k from `begin` of so many vectors, whose columns have 4 bytes side by side.
// `lines`: of x, 64 in a row.
template <int R, class Format>
QR_INLINE void add_products(const Format& format, vi (&acc)[R][kAtOnce], const int8_t* lines, const char* half,
                            int64_t begin) {
  constexpr int64_t kRowBytes = Format::kHalfBytes / 8;
  const char* weight = half + begin * kRowBytes;
  for (int row = 0; row < kAdded<Format>; ++row, weight += kRowBytes) {
    fetch_after<Format, 1>(half, begin + row);
    for (int four = 0; four < 2; ++four) {
      const SignedWeights w[kAtOnce] = {SignedWeights(format.signed_four(weight, four)),
                                        SignedWeights(format.signed_four(weight + Format::kHalfBytes, four))};
      for (int r = 0; r < R; ++r) {
        // |w| times x with the sign of w: two of 128 * 127 fit 16 bits
        const vi x = four_bytes(lines + r * kQuantizedDepth + row * 8 + four * 4);
        for (int v = 0; v < kAtOnce; ++v)
          acc[r][v] = add(acc[r][v], pairs(multiply_pairs(w[v].size, w[v].sign(x))));
      }
    }
  }
}

// The same with codes of fewer bits.
template <int R, class Format>
QR_INLINE void add_codes(const Format& format, vi (&acc)[R][kAtOnce], const int8_t* lines, const char* half,
                         int64_t begin) {
  constexpr int kFours = 2 * kAdded<Format>;
  constexpr int kTogether = 1 << (7 - Format::kBits);  // 2 * 127 times the largest code: so many fit 16 bits
  fetch_after<Format, kAdded<Format>>(half, begin);
  for (int v = 0; v < kAtOnce; ++v) {
    asm volatile("" ::: "memory");  // x is read again: kept for the next v, it would crowd out the weights
    vi w[kFours];
    for (int row = 0; row < kAdded<Format>; ++row)
      format.codes_of_row(half + v * Format::kHalfBytes, begin, row, w[2 * row], w[2 * row + 1]);
    for (int r = 0; r < R; ++r) {
      const int8_t* x = lines + r * kQuantizedDepth;
      for (int first = 0; first < kFours; first += kTogether) {
        vi sums = multiply_pairs(w[first], four_bytes(x + first * 4));
        for (int i = first + 1; i < first + kTogether && i < kFours; ++i)
          sums = add_shorts(sums, multiply_pairs(w[i], four_bytes(x + i * 4)));
        acc[r][v] = add(acc[r][v], pairs(sums));
      }
    }
  }
}

// Sums of products, in units of Format::kUnit.
template <class Format>
QR_INLINE vi products_of(vi sums, RowGroup x) {
  if constexpr (Format::kBits == 8)
    return sums;
  else
    return sub(shifted(sums, Format::kCodeShift), same(Format::kBias * x.sum));
}

template <class Format, int R>
void multiply_rows(const GemmArgs& g, const QuantizedRows<Format::kGroup>& x, int64_t row, int64_t panel, float* sums) {
  constexpr uint64_t kParts = 8 / kAdded<Format>;  // of a step of 64 k
  const Format format(g);
  const char* packed = static_cast<const char*>(g.packed) + panel * g.panel_bytes;
  const int8_t* values = x.line(row, 0);
  const int64_t groups = x.groups, step_bytes = x.step_bytes(), end = int64_t(kParts) * x.steps;
  Total<Format> total[R][kVectors];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v) clear(total[r][v]);
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t first = group * Format::kGroup / (8 * kAdded<Format>);
    const int64_t last = first + Format::kGroup / (8 * kAdded<Format>);
    const auto scales = GroupScales<Format>::of(g, panel, groups, group);
    for (int first_vector = 0; first_vector < kVectors; first_vector += kAtOnce) {
      const int half = first_vector * W / 16;
      vi acc[R][kAtOnce];
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < kAtOnce; ++v) acc[r][v] = none();
      for (int64_t part = first; part < last && part < end; ++part) {
        const int64_t step = int64_t(uint64_t(part) / kParts), begin = int64_t(uint64_t(part) % kParts) * kAdded<Format>;
        const int8_t* lines = values + step * step_bytes + begin * 8;
        const char* weight = packed + (step * 2 + half) * Format::kHalfBytes;
        if constexpr (Format::kBits == 8)
          add_products<R>(format, acc, lines, weight, begin);
        else
          add_codes<R>(format, acc, lines, weight, begin);
      }
      scales.by_kind([&](auto kind) __attribute__((always_inline)) {
        for (int r = 0; r < R; ++r) {
          const RowGroup of = x.row_groups[(row + r) * groups + group];
          for (int v = 0; v < kAtOnce; ++v) {
            auto& own = total[r][first_vector + v];
            own = scales.add(kind, own, products_of<Format>(acc[r][v], of), of, first_vector + v);
          }
        }
      });
    }
    end_group<Format, R>(g, panel, groups, group, x.row_groups + row * groups,
                         [&](int r, int v) __attribute__((always_inline)) -> Total<Format>& { return total[r][v]; });
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v) store(sums + r * kPanel + v * W, value_of(total[r][v]));
}

}  // namespace
}  // namespace qr
