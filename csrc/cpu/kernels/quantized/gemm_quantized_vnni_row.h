// One row, or a few, times a panel by vpdpbusd: read in order of address, with all sums in registers.
#pragma once

#include "nested.h"

namespace qr {
namespace {

// What sums start at: what the biases of weights are too many, negated. A bias is a power of two.
template <class Format>
QR_INLINE vi less_biases(const RowGroup& of) {
  if constexpr (Format::kBias == 0) return none();
  if constexpr (Format::kNested) return same(of.sum);
  return sub(none(), _mm512_slli_epi32(same(of.sum), unsigned(__builtin_ctz(unsigned(Format::kBias)))));
}

// Zen 4 reads two places of a page in turn at half the speed of one; Zen 5 gains with one row only. On a Xeon with AMX
// int4_g128 takes 1.45 times as long in order, int8 1.07, most others 1.05.
QR_INLINE bool gain_by_order(int64_t rows) { return core() == Core::kOther || (core() == Core::kZen5 && rows == 1); }

template <class Format>
struct RowsInOrder {
  static constexpr int64_t kSteps = Format::kGroup < 64 ? 1 : Format::kGroup / 64;
  static constexpr int kGroupInStep = Format::kGroup < 64 ? Format::kGroup : 64;  // k of a group in one step
  static constexpr int kEights = kGroupInStep / 8;
  // Formats of fewer bits lie closer together, and with more rows loading x once for each half costs more than reading
  // in order saves.
  static constexpr int kMostRows = Format::kHalfBytes == 1024 ? 4 : 1;
  // Bytes ahead that one row fetches to L2 where hardware alone is slower: many operations for a line, or very few, and on
  // Zen 5 always.
  static constexpr int64_t kAhead = Format::kHalfBytes < 1024 && kSteps == 1 ? kFarBytes : 4096;
  static constexpr bool kAsks = !Format::kGrouped || Format::kBits == 2 || kAhead == kFarBytes;

  const GemmArgs& g;
  const Format format;
  const QuantizedRows<Format::kGroup>& x;
  const int64_t panel;
  const char* packed;
  const bool asks = kAsks || core() == Core::kZen5;

  RowsInOrder(const GemmArgs& g, const QuantizedRows<Format::kGroup>& x, int64_t panel)
      : g(g), format(g), x(x), panel(panel), packed(static_cast<const char*>(g.packed) + panel * g.panel_bytes) {}

  __attribute__((always_inline)) void fetch_half(const char* half) const {
    if (!asks) return;
    each<Format::kHalfBytes / 64>([&](auto line) __attribute__((always_inline)) {
      prefetch_to_l2(half + kAhead + line * 64);
    });
  }

  // The integer sums of R rows and the 16 columns of a half: products of a group's part of a step from row `begin` on.
  template <int R>
  __attribute__((always_inline)) void add_half(vi (&acc)[2][R], const int8_t* lines, const char* half, int begin) const {
    each<kEights / Format::kRowsTogether>([&](auto run) __attribute__((always_inline)) {
      constexpr int kFirst = run * Format::kRowsTogether;
      each<Format::kRowsTogether>([&](auto eight) __attribute__((always_inline)) {
        vi w[2];
        format.unsigned_row(half, begin + kFirst, eight, w[0], w[1]);
        each<R>([&](auto r) __attribute__((always_inline)) {
          each<2>([&](auto four) __attribute__((always_inline)) {
            const int at = (begin + kFirst + eight) * 8 + four * 4;
            acc[four][r] = dot(acc[four][r], w[four], four_bytes(lines + r * kQuantizedDepth + at));
          });
        });
      });
    });
  }

  template <int R>
  __attribute__((always_inline)) void start_half(vi (&acc)[2][R], const RowGroup* of) const {
    each<R>([&](auto r) __attribute__((always_inline)) {
      acc[0][r] = less_biases<Format>(of[r * x.groups]);
      acc[1][r] = none();
    });
  }

  template <int R>
  __attribute__((always_inline)) void end_half(const vi (&acc)[2][R], const RowGroup* of,
                                               const GroupScales<Format>& scales, int v,
                                               Total<Format> (&total)[kVectors][R]) const {
    scales.by_kind([&](auto kind) __attribute__((always_inline)) {
      each<R>([&](auto r) __attribute__((always_inline)) {
        total[v][r] = scales.add(kind, total[v][r], qr::add(acc[0][r], acc[1][r]), of[r * x.groups], v);
      });
    });
  }

  // Groups that share a step: those of one half, then those of the other.
  template <int R>
  __attribute__((always_inline)) void add_small_groups(const RowGroup* of, const int8_t* lines, int64_t step,
                                                       Total<Format> (&total)[kVectors][R]) const {
    constexpr int kGroups = 64 / kGroupInStep;
    each<kVectors>([&](auto v) __attribute__((always_inline)) {
      const char* half = packed + (step * 2 + v) * Format::kHalfBytes;
      if constexpr (R == 1) fetch_half(half);
      each<kGroups>([&](auto i) __attribute__((always_inline)) {
        const int64_t group = step * kGroups + i;
        if (group >= x.groups) return;
        vi acc[2][R];
        start_half<R>(acc, of + group);
        add_half<R>(acc, lines, half, i * kEights);
        end_half<R>(acc, of + group, GroupScales<Format>::of(g, panel, x.groups, group), v, total);
      });
    });
  }

  // A group that fills its steps.
  template <int R>
  __attribute__((always_inline)) void add_large_group(const RowGroup* of, const int8_t* lines, int64_t group,
                                                      Total<Format> (&total)[kVectors][R]) const {
    const auto scales = GroupScales<Format>::of(g, panel, x.groups, group);
    vi acc[kVectors][2][R];
    each<kVectors>([&](auto v) __attribute__((always_inline)) { start_half<R>(acc[v], of + group); });
    const int64_t first = group * kSteps, last = first + kSteps < x.steps ? first + kSteps : x.steps;
    for (int64_t step = first; step < last; ++step, lines += x.step_bytes())
      each<kVectors>([&](auto v) __attribute__((always_inline)) {
        const char* half = packed + (step * 2 + v) * Format::kHalfBytes;
        if constexpr (R == 1) fetch_half(half);
        add_half<R>(acc[v], lines, half, 0);
      });
    each<kVectors>([&](auto v) __attribute__((always_inline)) { end_half<R>(acc[v], of + group, scales, v, total); });
  }

  // All of R rows.
  template <int R>
  void multiply(int64_t row, float* sums) const {
    const RowGroup* of = x.row_groups + row * x.groups;
    const int8_t* lines = x.line(row, 0);
    Total<Format> total[kVectors][R];
    each<kVectors * R>([&](auto i) __attribute__((always_inline)) { clear(total[i / R][i % R]); });
    for (int64_t step = 0; step < x.steps; step += kSteps, lines += kSteps * x.step_bytes()) {
      if constexpr (Format::kGroup < 64)
        add_small_groups<R>(of, lines, step, total);
      else
        add_large_group<R>(of, lines, step / kSteps, total);
      end_group<Format, R>(g, panel, x.groups, (step + 1) * 64 / kGroupInStep - 1, of,
                           [&](auto r, auto v) __attribute__((always_inline)) -> Total<Format>& { return total[v][r]; });
    }
    each<kVectors * R>([&](auto i) __attribute__((always_inline)) {
      store(sums + i % R * kPanel + i / R * W, value_of(total[i / R][i % R]));
    });
  }
};

}  // namespace
}  // namespace qr
