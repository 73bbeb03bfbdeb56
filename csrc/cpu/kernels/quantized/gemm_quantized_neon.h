// Integer products on ARM, of signed bytes: smmla (two rows and two columns, 8 k deep), sdot (four columns, 4 k deep), or
// widening multiplications where there is neither. The sums are the same integers.
#pragma once

#include "gemm_quantized_rows.h"

namespace qr {
namespace {

constexpr int kUnits = 8;  // of 8 k in a step of 64

// Four columns, k 0..3 and k 4..7 of a unit of a half, as signed bytes; of Int4 in sixteenths.
template <int Group, bool Grouped>
QR_INLINE void signed_bytes(const Int8Of<Group, Grouped>&, const char* half, int unit, int four, int8x16_t& first,
                        int8x16_t& second) {
  const auto* bytes = reinterpret_cast<const int8_t*>(half) + unit * 128 + four * 16;
  first = vld1q_s8(bytes);
  second = vld1q_s8(bytes + 64);
}
template <int Group>
QR_INLINE void signed_bytes(const Int4<Group>&, const char* half, int unit, int four, int8x16_t& first,
                        int8x16_t& second) {
  const int8x16_t both = vld1q_s8(reinterpret_cast<const int8_t*>(half) + unit * 64 + four * 16);
  first = vshlq_n_s8(both, 4);
  second = vandq_s8(both, vdupq_n_s8(int8_t(0xf0)));
}
template <int Group>
QR_INLINE void signed_bytes(const Levels<Group>& format, const char* half, int unit, int four, int8x16_t& first,
                        int8x16_t& second) {
  const Bytes both = load_bytes_of(half + unit * 64 + four * 16);
  first = vreinterpretq_s8_u8(look_up(format.levels, low_nibbles(both)));
  second = vreinterpretq_s8_u8(look_up(format.levels, high_nibbles(both)));
}
template <class Format>
QR_INLINE void unit_of(const Format& format, const char* half, int unit, int four, int8x16_t& first,
                       int8x16_t& second) {
  if constexpr (Format::kBits < 8 && Format::kCodeShift == 0) {
    const int8x16_t bias = vdupq_n_s8(int8_t(Format::kBias));
    Bytes lower, upper;
    constexpr int kTogether = Format::kRowsTogether;
    format.codes_of_row(half + four * 16, unit / kTogether * kTogether, unit % kTogether, lower, upper);
    first = vsubq_s8(vreinterpretq_s8_u8(lower), bias);
    second = vsubq_s8(vreinterpretq_s8_u8(upper), bias);
  } else {
    signed_bytes(format, half, unit, four, first, second);
  }
}

// acc += sums of four products
QR_INLINE int32x4_t dot(int32x4_t acc, int8x16_t w, int8x16_t x) {
#if defined(__ARM_FEATURE_DOTPROD)
  return vdotq_s32(acc, w, x);
#else
  // two products fit 16 bits: -128 * 127 at most
  const int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(x)), high = vmull_high_s8(w, x);
  return vpadalq_s16(acc, vpaddq_s16(low, high));
#endif
}

QR_INLINE int8x16_t four_bytes(const int8_t* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  return vreinterpretq_s8_s32(vdupq_n_s32(four));
}

// Sums of R rows of x times the 16 columns of a half.
template <int R>
class RowSumsOfHalf {
 public:
  RowSumsOfHalf() {
    for (auto& row : acc)
      for (auto& four : row) four = vdupq_n_s32(0);
  }

  // A unit of a half; `x`: 8 k of the first row, the others kQuantizedDepth apart.
  template <class Format>
  __attribute__((always_inline)) void add(const Format& format, const char* half, int unit, const int8_t* x) {
    for (int four = 0; four < 4; ++four) {
      int8x16_t first, second;
      unit_of(format, half, unit, four, first, second);
      for (int r = 0; r < R; ++r) {
        acc[r][four] = dot(acc[r][four], first, four_bytes(x + r * kQuantizedDepth));
        acc[r][four] = dot(acc[r][four], second, four_bytes(x + r * kQuantizedDepth + 4));
      }
    }
  }

  // Eight columns of a row.
  __attribute__((always_inline)) vi of(int r, int eight) const { return {acc[r][2 * eight], acc[r][2 * eight + 1]}; }

 private:
  int32x4_t acc[R][4];
};

#if defined(__ARM_FEATURE_MATMUL_INT8)
// Rows two by two: a register of sums has two columns of both.
template <int R>
class PairSumsOfHalf {
 public:
  PairSumsOfHalf() {
    for (auto& pair : acc)
      for (auto& two : pair) two = vdupq_n_s32(0);
  }

  template <class Format>
  __attribute__((always_inline)) void add(const Format& format, const char* half, int unit, const int8_t* x) {
    int8x16_t rows[kPairs];
    for (int p = 0; p < kPairs; ++p) {
      const int other = 2 * p + 1 < R ? 2 * p + 1 : 2 * p;
      rows[p] = vcombine_s8(vld1_s8(x + 2 * p * kQuantizedDepth), vld1_s8(x + other * kQuantizedDepth));
    }
    for (int four = 0; four < 4; ++four) {
      int8x16_t first, second;
      unit_of(format, half, unit, four, first, second);
      const int32x4_t a = vreinterpretq_s32_s8(first), b = vreinterpretq_s32_s8(second);
      const int8x16_t left = vreinterpretq_s8_s32(vzip1q_s32(a, b)), right = vreinterpretq_s8_s32(vzip2q_s32(a, b));
      for (int p = 0; p < kPairs; ++p) {
        acc[p][2 * four] = vmmlaq_s32(acc[p][2 * four], rows[p], left);
        acc[p][2 * four + 1] = vmmlaq_s32(acc[p][2 * four + 1], rows[p], right);
      }
    }
  }

  __attribute__((always_inline)) vi of(int r, int eight) const {
    const int32x4_t* twos = acc[r / 2] + 4 * eight;
    return {four_of(r, twos[0], twos[1]), four_of(r, twos[2], twos[3])};
  }

 private:
  static constexpr int kPairs = (R + 1) / 2;
  int32x4_t acc[kPairs][8];

  QR_INLINE int32x4_t four_of(int r, int32x4_t left, int32x4_t right) {
    const int64x2_t a = vreinterpretq_s64_s32(left), b = vreinterpretq_s64_s32(right);
    return vreinterpretq_s32_s64(r % 2 == 0 ? vzip1q_s64(a, b) : vzip2q_s64(a, b));
  }
};

template <int R>
using SumsOfHalf = std::conditional_t<R == 1, RowSumsOfHalf<1>, PairSumsOfHalf<R>>;
#else
template <int R>
using SumsOfHalf = RowSumsOfHalf<R>;
#endif

template <class Format, int R>
void multiply_rows(const GemmArgs& g, const QuantizedRows<Format::kGroup>& x, int64_t row, int64_t panel, float* sums) {
  constexpr int64_t kUnitBytes = Format::kHalfBytes / kUnits;
  const Format format(g);
  const char* packed = static_cast<const char*>(g.packed) + panel * g.panel_bytes;
  Total<Format> total[R][kVectors];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v) clear(total[r][v]);
  for (int64_t group = 0; group < x.groups; ++group) {
    const int64_t first = group * Format::kGroup / 8, end = first + Format::kGroup / 8, all = kUnits * x.steps;
    const auto scales = GroupScales<Format>::of(g, panel, x.groups, group);
    for (int half = 0; half < 2; ++half) {
      SumsOfHalf<R> products;
      for (int64_t unit = first; unit < end && unit < all; ++unit) {
        const int64_t step = unit / kUnits, in_step = unit % kUnits;
        const char* weight = packed + (step * 2 + half) * Format::kHalfBytes;
        for (int64_t at = 0; at < kUnitBytes; at += 64) prefetch_stream(weight + in_step * kUnitBytes + at);
        products.add(format, weight, int(in_step), x.line(row, step) + in_step * 8);
      }
      scales.by_kind([&](auto kind) __attribute__((always_inline)) {
        for (int r = 0; r < R; ++r) {
          const RowGroup of = x.row_groups[(row + r) * x.groups + group];
          for (int eight = 0; eight < 2; ++eight) {
            auto& own = total[r][half * 2 + eight];
            own = scales.add(kind, own, products.of(r, eight), of, half * 2 + eight);
          }
        }
      });
    }
    end_group<Format, R>(g, panel, x.groups, group, x.row_groups + row * x.groups,
                         [&](int r, int v) __attribute__((always_inline)) -> Total<Format>& { return total[r][v]; });
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v) store(sums + r * kPanel + v * W, value_of(total[r][v]));
}

}  // namespace
}  // namespace qr
