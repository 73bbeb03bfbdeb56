// One row times a panel on AVX2: read in order of address, all sums in registers. What comes soon the hardware fetches
// by itself.
//
// Whatever loops index is indexed by constants: GCC keeps sums that a loop indexes in memory.
#pragma once

#include "nested.h"

namespace qr {
namespace {

template <class Format>
struct OneRow {
  static constexpr int kRows = Format::kGroup < 32 ? Format::kGroup / 8 : 4;  // of 8 k that are added at once
  static constexpr int64_t kRowBytes = Format::kHalfBytes / 8;

#if defined(__AVXVNNI__)
  static constexpr int kBias = Format::kBias;

  // acc[v] += products of kRows rows of 8 k from `begin` of the two vectors of a half, of weights kBias too many.
  QR_INLINE void add_products(const Format& format, vi* acc, const int8_t* x, const char* half, int64_t begin) {
    vi others[2] = {none(), none()};  // sums of one chain would wait for each other
    each<kRows>([&](auto row) __attribute__((always_inline)) {
      const vi first = four_bytes(x + row * 8), second = four_bytes(x + row * 8 + 4);
      each<2>([&](auto v) __attribute__((always_inline)) {
        vi low, high;
        format.unsigned_row(half + v * 32, begin, row, low, high);
        acc[v] = dot(acc[v], low, first);
        others[v] = dot(others[v], high, second);
      });
    });
    each<2>([&](auto v) __attribute__((always_inline)) { acc[v] = add(acc[v], others[v]); });
  }
#else
  static constexpr bool kHasCodes = Format::kBits < 8;
  static constexpr int kBias = kHasCodes ? Format::kBias : 0;

  // acc[v] += products of kRows rows of 8 k from `begin` of the two vectors of a half, in units of 2^-kCodeShift.
  QR_INLINE void add_codes(const Format& format, vi* acc, const int8_t* x, const char* half, int64_t begin) {
    constexpr int kFours = 2 * kRows;
    constexpr int kFit = 1 << (7 - Format::kBits);  // 2 * 127 times the largest code: so many fit 16 bits
    constexpr int kTogether = kFit < kFours ? kFit : kFours;
    const vi unit = _mm256_set1_epi16(1 << Format::kCodeShift);
    each<kFours / kTogether>([&](auto part) __attribute__((always_inline)) {
      vi sums[2];
      each<kTogether / 2>([&](auto i) __attribute__((always_inline)) {
        constexpr int kRow = part * kTogether / 2 + i;
        const vi first = four_bytes(x + kRow * 8), second = four_bytes(x + kRow * 8 + 4);
        each<2>([&](auto v) __attribute__((always_inline)) {
          vi low, high;
          format.codes_of_row(half + v * 32, begin, kRow, low, high);
          const vi both = _mm256_add_epi16(_mm256_maddubs_epi16(low, first), _mm256_maddubs_epi16(high, second));
          sums[v] = i == 0 ? both : _mm256_add_epi16(sums[v], both);
        });
      });
      each<2>([&](auto v) __attribute__((always_inline)) { acc[v] = add(acc[v], _mm256_madd_epi16(sums[v], unit)); });
    });
  }

  // The same with signed weights: their sizes, up to 128, times x with their signs; two of 128 * 127 fit 16 bits.
  QR_INLINE void add_signed(const Format& format, vi* acc, const int8_t* x, const char* half, int64_t begin) {
    const vi ones = _mm256_set1_epi16(1);
    each<2 * kRows>([&](auto i) __attribute__((always_inline)) {
      const vi four = four_bytes(x + i * 4);
      each<2>([&](auto v) __attribute__((always_inline)) {
        const vi w = format.signed_four(half + v * 32 + (begin + i / 2) * kRowBytes, i % 2);
        const vi both = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(four, w));
        acc[v] = add(acc[v], _mm256_madd_epi16(both, ones));
      });
    });
  }

  QR_INLINE void add_products(const Format& format, vi* acc, const int8_t* x, const char* half, int64_t begin) {
    if constexpr (kHasCodes)
      add_codes(format, acc, x, half, begin);
    else
      add_signed(format, acc, x, half, begin);
  }
#endif

  QR_INLINE void add_rows(const Format& format, vi* acc, const int8_t* x, const char* half, int64_t begin) {
    each<(kRows * kRowBytes + 63) / 64>([&](auto line) __attribute__((always_inline)) {
      prefetch_to_l2(half + begin * kRowBytes + line * 64 + kFarBytes);
    });
    add_products(format, acc, x, half, begin);
  }

  // total + (integers * scale + shift * sum) * x.scale: the operations of GroupScales::add.
  // Of vectors [First, First + Count).
  template <int First, int Count>
  QR_INLINE void add_group(const GroupScales<Format>& scales, Total<Format>* total, const vi* acc, RowGroup x) {
    const vi bias = _mm256_set1_epi32(kBias * x.sum);
    scales.by_kind([&](auto kind) __attribute__((always_inline)) {
      each<Count>([&](auto i) __attribute__((always_inline)) {
        auto& own = total[First + i];
        own = scales.add(kind, own, sub(acc[i], bias), x, First + i);
      });
    });
  }

  // A step of 64 k with several groups: those of one half, then those of the other.
  QR_INLINE void add_small_groups(const GemmArgs& g, const Format& format, Total<Format>* total, const RowGroup* x,
                                  int64_t groups, const int8_t* values, const char* packed, int64_t panel, int64_t step) {
    constexpr int kGroups = 64 / Format::kGroup, kRowsOfGroup = Format::kGroup / 8;
    each<2>([&](auto half) __attribute__((always_inline)) {
      each<kGroups>([&](auto i) __attribute__((always_inline)) {
        const int64_t group = step * kGroups + i;
        if (group >= groups) return;
        const auto scales = GroupScales<Format>::of(g, panel, groups, group);
        vi acc[2] = {none(), none()};
        add_rows(format, acc, values + i * Format::kGroup, packed + (step * 2 + half) * Format::kHalfBytes,
                 i * kRowsOfGroup);
        add_group<2 * half, 2>(scales, total, acc, x[group]);
      });
    });
  }
};

template <class Format>
void multiply_row(const GemmArgs& g, const QuantizedRows<Format::kGroup>& x, int64_t row, int64_t panel, float* sums) {
  using Row = OneRow<Format>;
  const Format format(g);
  const char* packed = static_cast<const char*>(g.packed) + panel * g.panel_bytes;
  const RowGroup* row_groups = x.row_groups + row * x.groups;
  const int8_t* values = x.line(row, 0);
  const int64_t step_bytes = x.step_bytes();
  Total<Format> total[kVectors];
  each<kVectors>([&](auto v) __attribute__((always_inline)) { clear(total[v]); });
  if constexpr (Format::kGroup < 64) {
    for (int64_t step = 0; step < x.steps; ++step) {
      Row::add_small_groups(g, format, total, row_groups, x.groups, values + step * step_bytes, packed, panel, step);
      end_group<Format, 1>(g, panel, x.groups, (step + 1) * (64 / Format::kGroup) - 1, row_groups,
                           [&](auto, auto v) __attribute__((always_inline)) -> Total<Format>& { return total[v]; });
    }
  } else {
    constexpr int64_t kSteps = Format::kGroup / 64;
    for (int64_t group = 0; group < x.groups; ++group) {
      const int64_t first = group * kSteps, last = first + kSteps < x.steps ? first + kSteps : x.steps;
      const auto scales = GroupScales<Format>::of(g, panel, x.groups, group);
      vi acc[kVectors] = {none(), none(), none(), none()};
      for (int64_t step = first; step < last; ++step)
        each<2>([&](auto half) __attribute__((always_inline)) {
          for (int64_t begin = 0; begin < 8; begin += Row::kRows)
            Row::add_rows(format, acc + 2 * half, values + step * step_bytes + begin * 8,
                          packed + (step * 2 + half) * Format::kHalfBytes, begin);
        });
      Row::template add_group<0, kVectors>(scales, total, acc, row_groups[group]);
    }
  }
  for (int v = 0; v < kVectors; ++v) store(sums + v * W, value_of(total[v]));
}

}  // namespace
}  // namespace qr
