// Integer products without dot product instructions, on AVX2 and AVX-512: pairs of bytes are multiplied and added in 16
// bits, where the pairs of int8 just fit, and those of eight int4 together.
#pragma once

#include "gemm_quantized_rows.h"

namespace qr {
namespace {

constexpr int kAtOnce = 2;  // vectors of columns: of half a panel, or one of each half
template <class Format>  // bytes between the two
constexpr int64_t kNextVector = W == 16 ? Format::kHalfBytes : 32;

#if defined(__AVX512F__)
QR_INLINE vi multiply_pairs(vi a, vi b) { return _mm512_maddubs_epi16(a, b); }
QR_INLINE vi add_shorts(vi a, vi b) { return _mm512_add_epi16(a, b); }
QR_INLINE vi pairs(vi sums) { return _mm512_madd_epi16(sums, _mm512_set1_epi16(1)); }
QR_INLINE vi sixteen_times(vi v) { return _mm512_slli_epi32(v, 4); }
QR_INLINE vi nibbles_below(vi v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
QR_INLINE vi nibbles_above(vi v) { return nibbles_below(_mm512_srli_epi16(v, 4)); }
#else
QR_INLINE vi multiply_pairs(vi a, vi b) { return _mm256_maddubs_epi16(a, b); }
QR_INLINE vi add_shorts(vi a, vi b) { return _mm256_add_epi16(a, b); }
QR_INLINE vi pairs(vi sums) { return _mm256_madd_epi16(sums, _mm256_set1_epi16(1)); }
QR_INLINE vi sixteen_times(vi v) { return _mm256_slli_epi32(v, 4); }
QR_INLINE vi nibbles_below(vi v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
QR_INLINE vi nibbles_above(vi v) { return nibbles_below(_mm256_srli_epi16(v, 4)); }
#endif

// Four x of a row, as their sizes and as what gives a weight their signs.
struct SignedX {
  vi size;
#if defined(__AVX512F__)
  __mmask64 negative;
  explicit __attribute__((always_inline)) SignedX(vi x)
      : size(_mm512_abs_epi8(x)), negative(_mm512_movepi8_mask(x)) {}
  __attribute__((always_inline)) vi sign(vi w) const { return _mm512_mask_sub_epi8(w, negative, none(), w); }
#else
  vi x;
  explicit __attribute__((always_inline)) SignedX(vi x) : size(_mm256_abs_epi8(x)), x(x) {}
  __attribute__((always_inline)) vi sign(vi w) const { return _mm256_sign_epi8(w, x); }
#endif
};

// Fetch what comes after a line of each vector.
template <class Format>
QR_INLINE void fetch_after(const char* line) {
  for (int64_t at = 0; at < kAtOnce * W * 4; at += 64) prefetch_stream(line + at / 64 * Format::kHalfBytes);
}

// acc += the products of 4 rows of 8 k of so many vectors, whose columns have 4 bytes side by side. `lines`: of x, 64 in
// a row.
template <int R>
QR_INLINE void add_products(Int8, vi (&acc)[R][kAtOnce], const int8_t* lines, const char* weight) {
  for (int four = 0; four < 8; ++four) {
    vi w[kAtOnce];
    for (int v = 0; v < kAtOnce; ++v) w[v] = load_bytes(weight + four * 64 + v * kNextVector<Int8>);
    fetch_after<Int8>(weight + four * 64);
    for (int r = 0; r < R; ++r) {
      // |x| times w with the sign of x: two of 127 * 127 fit 16 bits
      const SignedX x(four_bytes(lines + r * kQuantizedDepth + four * 4));
      for (int v = 0; v < kAtOnce; ++v)
        acc[r][v] = add(acc[r][v], pairs(multiply_pairs(x.size, x.sign(w[v]))));
    }
  }
}

template <int R, int Group>
QR_INLINE void add_products(Int4<Group>, vi (&acc)[R][kAtOnce], const int8_t* lines, const char* weight) {
  for (int row = 0; row < 4; ++row) fetch_after<Int4<Group>>(weight + row * 64);
  for (int v = 0; v < kAtOnce; ++v) {
    asm volatile("" ::: "memory");  // x is read again: kept for the next v, it would crowd out the weights
    vi w[8];
    for (int row = 0; row < 4; ++row) {
      const vi both = flip(load_bytes(weight + row * 64 + v * kNextVector<Int4<Group>>), 0x88);
      w[2 * row] = nibbles_below(both);
      w[2 * row + 1] = nibbles_above(both);
    }
    for (int r = 0; r < R; ++r) {
      const int8_t* x = lines + r * kQuantizedDepth;
      vi sums = multiply_pairs(w[0], four_bytes(x));  // eight times two products of 15 * 127 at most
      for (int i = 1; i < 8; ++i) sums = add_shorts(sums, multiply_pairs(w[i], four_bytes(x + i * 4)));
      acc[r][v] = add(acc[r][v], pairs(sums));
    }
  }
}

// Sums of products as floats, exactly; of int4 in sixteenths, as Format::kUnit has it.
QR_INLINE vf products_of(Int8, vi sums, RowGroup) { return floats(sums); }
template <int Group>
QR_INLINE vf products_of(Int4<Group>, vi sums, RowGroup x) {
  return add(floats(sixteen_times(sums)), set1(-128.0f * x.sum));
}

template <class Format, int R>
void multiply_rows(const GemmArgs& g, const QuantizedRows<Format::kGroup>& x, int64_t row, int64_t panel, float* sums) {
  constexpr int64_t kQuarter = Format::kHalfBytes / 2;  // 4 rows of 8 k of a half
  const char* packed = static_cast<const char*>(g.packed) + panel * g.panel_bytes;
  vf total[R][kVectors];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v) total[r][v] = zero();
  for (int64_t group = 0; group < x.groups; ++group) {
    const int64_t first = group * Format::kGroup / 32, last = first + Format::kGroup / 32, end = 2 * x.steps;
    const auto scales = GroupScales<Format>::of(g, panel, x.groups, group);
    for (int first_vector = 0; first_vector < kVectors; first_vector += kAtOnce) {
      const int half = first_vector * W / 16;
      vi acc[R][kAtOnce];
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < kAtOnce; ++v) acc[r][v] = none();
      for (int64_t part = first; part < last && part < end; ++part)  // 32 k
        add_products<R>(Format(), acc, x.line(row, part / 2) + part % 2 * 32,
                        packed + (part / 2 * 2 + half) * Format::kHalfBytes + part % 2 * kQuarter);
      for (int r = 0; r < R; ++r) {
        const RowGroup of = x.row_groups[(row + r) * x.groups + group];
        for (int v = 0; v < kAtOnce; ++v) {
          vf& own = total[r][first_vector + v];
          own = scales.add(own, products_of(Format(), acc[r][v], of), of, first_vector + v);
        }
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v) store(sums + r * kPanel + v * W, total[r][v]);
}

}  // namespace
}  // namespace qr
