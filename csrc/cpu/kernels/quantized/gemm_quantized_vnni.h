// Integer products by vpdpbusd: four products of unsigned weights (kBias more than they are) and signed x are summed into
// 32 bits. Sums start at what the biases are too many.
//
// The sums of eight rows and 32 columns take half of the registers. More rows pass eight at a time over each group of
// weights, which stays in L1 meanwhile.
#pragma once

#include "nested.h"

namespace qr {
namespace {

constexpr int kVnniRows = 8;  // divides the height of a block of x

// acc += sums of four products of unsigned w and signed x
QR_INLINE vi dot(vi acc, vi w, vi x) { return _mm512_dpbusd_epi32(acc, w, x); }

template <int R>
constexpr int kChains = R <= 4 ? 2 : 1;  // sums of few rows would wait for each other

// Integer sums of R rows and the columns of a panel.
template <int R>
struct GroupSums {
  vi chains[kChains<R>][R][kVectors];

  template <int Bias>
  QR_INLINE void start(GroupSums& sums, const RowGroup* of, int64_t groups) {
    each<R>([&](auto r) __attribute__((always_inline)) {
      const vi begin = _mm512_set1_epi32(-Bias * of[r * groups].sum);
      each<kVectors>([&](auto v) __attribute__((always_inline)) {
        sums.chains[0][r][v] = begin;
        if constexpr (kChains<R> == 2) sums.chains[1][r][v] = none();
      });
    });
  }

  // 8 k, the row begin + eight of a step of 64; `lines` of x have 64 k each.
  template <class Format>
  QR_INLINE void add(GroupSums& sums, const Format& format, const int8_t* lines, const char* step, int begin,
                     int eight) {
    vi w[kVectors][2];
    each<kVectors>([&](auto v) __attribute__((always_inline)) {
      format.unsigned_row(step + v * Format::kHalfBytes, begin, eight, w[v][0], w[v][1]);
    });
    each<R>([&](auto r) __attribute__((always_inline)) {
      each<2>([&](auto four) __attribute__((always_inline)) {
        const vi x = four_bytes(lines + r * kQuantizedDepth + (begin + eight) * 8 + four * 4);
        each<kVectors>([&](auto v) __attribute__((always_inline)) {
          vi& own = sums.chains[four % kChains<R>][r][v];
          own = dot(own, w[v][four], x);
        });
      });
    });
  }

  QR_INLINE vi get(const GroupSums& sums, int r, int v) {
    return kChains<R> == 1 ? sums.chains[0][r][v] : qr::add(sums.chains[0][r][v], sums.chains[kChains<R> - 1][r][v]);
  }
};

template <class Format>
struct VnniPanel {
  static constexpr int64_t kStepBytes = 2 * Format::kHalfBytes;  // of 64 k
  static constexpr int64_t kSteps = Format::kGroup < 64 ? 1 : Format::kGroup / 64;
  static constexpr int kEights = Format::kGroup < 64 ? Format::kGroup / 8 : 8;  // rows of 8 k of a group in one step
  static constexpr int kGroupInStep = Format::kGroup < 64 ? Format::kGroup : 64;  // k of a group in one step
  static constexpr int64_t kSoon = kPrefetchBytes, kLater = kFarBytes;  // bytes ahead that go to L1, and to L2
#if defined(__AMX_INT8__)
  static constexpr int kRowsInOrder = 0;  // Intel: int4_g128 takes 1.45 times as long so, int8 1.07, most 1.05
#else
  // Zen 4 reads two places of a page in turn at half the speed of one. Formats of fewer bits lie closer together, and
  // with more rows loading x once for each half costs more than that.
  static constexpr int kRowsInOrder = Format::kHalfBytes == 1024 ? 4 : 1;
#endif
  // Bytes ahead that one row fetches to L2 where hardware alone is slower: many operations for a line, or very few.
  static constexpr int64_t kAhead = !Format::kGrouped ? 4096 : Format::kHalfBytes < 1024 && kSteps == 1 ? kFarBytes : 0;

  const GemmArgs& g;
  const Format format;
  const QuantizedRows<Format::kGroup>& x;
  int64_t panel;
  const char *packed, *following;  // following: the panel that is read after this one

  VnniPanel(const GemmArgs& g, const QuantizedRows<Format::kGroup>& x, int64_t panel)
      : g(g), format(g), x(x), panel(panel), packed(static_cast<const char*>(g.packed) + panel * g.panel_bytes) {
    const int64_t next = g.up_panels == 0 ? 1 : panel < g.up_panels ? g.up_panels : 1 - g.up_panels;
    following = packed + next * g.panel_bytes;
  }

  // So many bytes from the panel's start in the order in which they are read.
  const char* at(int64_t offset) const {
    return offset < g.panel_bytes ? packed + offset : following + (offset - g.panel_bytes);
  }
  int64_t first_step(int64_t group) const { return group * Format::kGroup / 64; }
  int64_t last_step(int64_t group) const {
    const int64_t last = first_step(group) + kSteps;
    return last < x.steps ? last : x.steps;
  }

  // The integer sums of R rows and a group. fetch(step, row of 8 k) fetches what is read later, for kRowsTogether rows.
  template <int R, class Fetch>
  __attribute__((always_inline)) void sum_group(int64_t row, int64_t group, const Fetch& fetch, GroupSums<R>& sums) const {
    const RowGroup* of = x.row_groups + row * x.groups + group;
    const int begin = Format::kGroup < 64 ? int(uint64_t(group) % (64 / kGroupInStep)) * kEights : 0;
    const int8_t* lines = x.line(row, first_step(group));
    GroupSums<R>::template start<Format::kBias>(sums, of, x.groups);
    for (int64_t step = first_step(group); step < last_step(group); ++step) {
      for (int i = begin; i < begin + kEights; i += Format::kRowsTogether) {
        fetch(step, i);
        each<Format::kRowsTogether>([&](auto row) __attribute__((always_inline)) {
          GroupSums<R>::add(sums, format, lines, packed + step * kStepBytes, i, row);
        });
      }
      lines += x.step_bytes();
    }
  }

  // The products of R rows and a group are added to `total`.
  template <int R, class Fetch>
  __attribute__((always_inline)) void add_group(int64_t row, int64_t group, const GroupScales<Format>& scales,
                                                const Fetch& fetch, float* total) const {
    const RowGroup* of = x.row_groups + row * x.groups + group;
    GroupSums<R> sums;
    sum_group<R>(row, group, fetch, sums);
    const GroupScales<Format> own_scales = scales;  // which no store to `total` changes
    own_scales.by_kind([&](auto kind) __attribute__((always_inline)) {
      each<R>([&](auto r) __attribute__((always_inline)) {
        const RowGroup own_row = of[r * x.groups];
        each<kVectors>([&](auto v) __attribute__((always_inline)) {
          float* own = total + r * kPanel + v * W;
          const vi integers = GroupSums<R>::get(sums, r, v);
          store(own, own_scales.add(kind, group == 0 ? zero() : load(own), integers, own_row, v));
        });
      });
    });
  }

  // The same of a block of nested groups.
  template <int R, class Fetch>
  __attribute__((always_inline)) void add_block(int64_t row, int64_t index, const Fetch& fetch, float* total) const {
    const NestedBlock<Format> block(g, panel, x.groups, index);
    const int64_t first = index * Format::kGroups;
    const RowGroup* of = x.row_groups + row * x.groups + first;
    vi integers[R][kVectors];
    each<R * kVectors>([&](auto i) __attribute__((always_inline)) { integers[i / kVectors][i % kVectors] = none(); });
#pragma GCC unroll 1
    for (int64_t group = first; group < first + Format::kGroups; ++group) {
      const auto scales = GroupScales<Format>::of(g, panel, x.groups, group);
      GroupSums<R> sums;
      sum_group<R>(row, group, fetch, sums);
      each<R>([&](auto r) __attribute__((always_inline)) {
        each<kVectors>([&](auto v) __attribute__((always_inline)) {
          integers[r][v] = qr::add(integers[r][v], mul(GroupSums<R>::get(sums, r, v), scales.codes[v]));
        });
      });
    }
    each<kVectors>([&](auto v) __attribute__((always_inline)) {
      NestedBlock<Format>::template scale_sums<R>(
          block, v, of, x.groups, [&](auto r) __attribute__((always_inline)) { return integers[r][v]; },
          [&](auto r, vf value) __attribute__((always_inline)) {
            float* own = total + r * kPanel + v * W;
            store(own, fma(value, set1(of[r * x.groups].scale), index == 0 ? zero() : load(own)));
          });
    });
  }

  // The products of R rows with what is scaled at once: group `index`, or block `index` of nested ones.
  template <int R, class Fetch>
  __attribute__((always_inline)) void add_scaled(int64_t row, int64_t index, const GroupScales<Format>& scales,
                                                 const Fetch& fetch, float* total) const {
    if constexpr (Format::kNested)
      add_block<R>(row, index, fetch, total);
    else
      add_group<R>(row, index, scales, fetch, total);
  }
  int64_t first_group(int64_t index) const { return Format::kNested ? index * (kNestedBlock / Format::kGroup) : index; }
  int64_t num_scaled() const { return Format::kNested ? x.groups / (kNestedBlock / Format::kGroup) : x.groups; }

  QR_INLINE void fetch_half(const char* half) {
    if constexpr (kAhead > 0)
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
      acc[0][r] = _mm512_set1_epi32(-Format::kBias * of[r * x.groups].sum);
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
      const char* half = packed + step * kStepBytes + v * Format::kHalfBytes;
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
    for (int64_t step = first_step(group); step < last_step(group); ++step, lines += x.step_bytes())
      each<kVectors>([&](auto v) __attribute__((always_inline)) {
        const char* half = packed + step * kStepBytes + v * Format::kHalfBytes;
        if constexpr (R == 1) fetch_half(half);
        add_half<R>(acc[v], lines, half, 0);
      });
    each<kVectors>([&](auto v) __attribute__((always_inline)) { end_half<R>(acc[v], of + group, scales, v, total); });
  }

  // R rows, read in order of address, with all sums in registers.
  template <int R>
  void multiply_in_order(int64_t row, float* sums) const {
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

  // All of up to R rows. Each line is fetched twice: soon before it is read to L1, and long before to L2.
  template <int R>
  void multiply_few(int64_t row, int64_t rows, float* sums) const {
    if constexpr (R > 1)
      if (rows < R) return multiply_few<R - 1>(row, rows, sums);
    if constexpr (R <= kRowsInOrder) return multiply_in_order<R>(row, sums);
    const auto fetch = [&](int64_t step, int i) __attribute__((always_inline)) {
      constexpr int64_t kLines = Format::kHalfBytes / 64, kAtOnce = kLines * Format::kRowsTogether / 8;
      const char *soon = at(step * kStepBytes + kSoon), *later = at(step * kStepBytes + kLater);
      for (int64_t line = 0, first = i * kLines / 8 * 64; line < kAtOnce * 64; line += 64)
        for (int64_t half = 0; half < kStepBytes; half += Format::kHalfBytes) {
          prefetch(soon + half + first + line);
          prefetch_to_l2(later + half + first + line);
        }
    };
    for (int64_t index = 0; index < num_scaled(); ++index)
      add_scaled<R>(row, index, GroupScales<Format>::of(g, panel, x.groups, first_group(index)), fetch, sums);
  }

  // Up to R rows of a group or block. `ahead`: what to fetch, 1 KiB for each step.
  template <int R>
  void add_rows(int64_t row, int64_t rows, int64_t index, const GroupScales<Format>& scales, const char* ahead,
                float* sums) const {
    if constexpr (R > 1)
      if (rows < R) return add_rows<R - 1>(row, rows, index, scales, ahead, sums);
    const auto fetch = [&](int64_t step, int i) __attribute__((always_inline)) {
      const char* lines = ahead + (step - first_step(first_group(index))) * kStepBytes + i * 128;
      for (int64_t line = 0; line < 128 * Format::kRowsTogether; line += 64) prefetch(lines + line);
    };
    add_scaled<R>(row, index, scales, fetch, sums);
  }

  // Group by group, or block by block; the first rows fetch what follows.
  void multiply_many(int64_t row_begin, int64_t row_end, float* sums) const {
    for (int64_t index = 0; index < num_scaled(); ++index) {
      const auto scales = GroupScales<Format>::of(g, panel, x.groups, first_group(index));
      const int64_t steps = Format::kNested ? kNestedBlock / 64 : kSteps;
      const int64_t own = first_step(first_group(index)) * kStepBytes, next = own + steps * kStepBytes;
      for (int64_t row = row_begin; row < row_end; row += kVnniRows) {
        const int64_t done = (row - row_begin) / kVnniRows * 1024;  // bytes of each step that are fetched already
        add_rows<kVnniRows>(row, row_end - row, index, scales, done < kStepBytes ? at(next) + done : packed + own,
                            sums + (row - row_begin) * kPanel);
      }
    }
  }
};

template <class Format>
void multiply_panel(const GemmArgs& g, const QuantizedRows<Format::kGroup>& x, int64_t row_begin, int64_t row_end,
                    int64_t panel, float* sums) {
  const VnniPanel<Format> weights(g, x, panel);
  if (row_end - row_begin <= kVnniRows)
    weights.template multiply_few<kVnniRows>(row_begin, row_end - row_begin, sums);
  else
    weights.multiply_many(row_begin, row_end, sums);
}

}  // namespace
}  // namespace qr
