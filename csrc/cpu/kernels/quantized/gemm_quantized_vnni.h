// Integer products by vpdpbusd: four products of unsigned weights (kBias more than they are) and signed x are summed into
// 32 bits.
//
// Rows pass a few at a time, a tile, over each group of weights (of nested ones a block), which stays in L1 meanwhile.
// Sums of a tile and all 32 columns stay in registers, together with what those of a block add up to.
#pragma once

#include "gemm_quantized_vnni_row.h"

namespace qr {
namespace {

// Rows of a tile; divides the height of a block of x. Eight leave no registers for what a block adds up to; where weights
// take many operations to unpack, it is kept in memory rather. Where AMX multiplies more, eight come at most.
template <class Format>
constexpr bool kHasSmallTiles = Format::kNested && Format::kBits < 6 && Format::kBits != 3;
#if defined(__AMX_INT8__)
template <class Format>
constexpr int kTileRows = 8;
#else
template <class Format>
constexpr int kTileRows = kHasSmallTiles<Format> ? 4 : 8;
#endif

template <int R>
constexpr int kChains = R == 1 ? 2 : 1;  // sums of one row would wait for each other

// Integer sums of R rows and the columns of a panel.
template <int R>
struct GroupSums {
  vi chains[kChains<R>][R][kVectors];

  template <class Format>
  QR_INLINE void start(GroupSums& sums, const RowGroup* of, int64_t groups) {
    each<R>([&](auto r) __attribute__((always_inline)) {
      const vi begin = less_biases<Format>(of[r * groups]);
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

// ---- what a tile fetches while it works on a step, for kRowsTogether rows of 8 k at a time ----

// A single tile: each line twice, soon before it is read to L1, and long before to L2.
template <class Format>
struct FetchTwice {
  const char *soon, *later;
  __attribute__((always_inline)) void fetch(int row) const {
    constexpr int64_t kLines = Format::kHalfBytes / 64, kAtOnce = (kLines * Format::kRowsTogether + 7) / 8;
    for (int64_t line = 0, first = row * kLines / 8 * 64; line < kAtOnce * 64; line += 64)
      for (int64_t half = 0; half < 2 * Format::kHalfBytes; half += Format::kHalfBytes) {
        prefetch(soon + half + first + line);
        prefetch_to_l2(later + half + first + line);
      }
  }
};

// Each of the first two of several tiles: half of the lines that follow the group or block.
template <class Format>
struct FetchHalf {
  static constexpr int64_t kRowBytes = Format::kHalfBytes / 4;  // of a row of 8 k in both halves
  static constexpr int64_t kBytes = (kRowBytes * Format::kRowsTogether + 127) / 128 * 64;
  const char* lines;
  __attribute__((always_inline)) void fetch(int row) const {
    for (int64_t line = 0; line < kBytes; line += 64) prefetch(lines + row * kRowBytes + line);
  }
};

struct FetchNothing {
  void fetch(int) const {}
};

// Call body(std::integral_constant<int, rows, but at most R>()); rows > 0.
template <int R, class Body>
__attribute__((always_inline)) inline void with_rows(int64_t rows, const Body& body) {
  if constexpr (R > 1)
    if (rows < R) return with_rows<R - 1>(rows, body);
  body(std::integral_constant<int, R>());
}

template <class Format>
struct VnniPanel {
  static constexpr int64_t kStepBytes = 2 * Format::kHalfBytes;  // of 64 k
  static constexpr int64_t kSteps = Format::kGroup < 64 ? 1 : Format::kGroup / 64;
  static constexpr int kGroupInStep = Format::kGroup < 64 ? Format::kGroup : 64;  // k of a group in one step
  static constexpr int kEights = kGroupInStep / 8;

  const GemmArgs& g;
  const Format format;
  const QuantizedRows<Format::kGroup>& x;
  const int64_t panel;
  const char *packed, *following;  // following: the panel that is read after this one

  VnniPanel(const GemmArgs& g, const QuantizedRows<Format::kGroup>& x, int64_t panel)
      : g(g), format(g), x(x), panel(panel), packed(static_cast<const char*>(g.packed) + panel * g.panel_bytes) {
    const int64_t next = g.up_panels == 0 ? 1 : panel < g.up_panels ? g.up_panels : 1 - g.up_panels;
    following = packed + next * g.panel_bytes;
  }

  void multiply(int64_t row_begin, int64_t row_end, float* sums) const {
    if constexpr (Format::kNested) {
      const int64_t blocks = int64_t(uint64_t(x.groups) / Format::kGroups);
      for (int64_t block = 0; block < blocks; ++block) {
        const BlockCodes<Format> codes(NestedBlock<Format>(g, panel, x.groups, block));
        each_tile(first_step(block * Format::kGroups), kNestedBlock / 64, row_begin, row_end, sums,
                  [&](auto rows, int64_t row, const auto& ahead, float* total) __attribute__((always_inline)) {
                    add_block<rows>(row, block, codes, ahead, total);
                  });
      }
    } else {
      for (int64_t group = 0; group < x.groups; ++group) {
        const auto scales = GroupScales<Format>::of(g, panel, x.groups, group);
        each_tile(first_step(group), kSteps, row_begin, row_end, sums,
                  [&](auto rows, int64_t row, const auto& ahead, float* total) __attribute__((always_inline)) {
                    add_group<rows>(row, group, scales, ahead, total);
                  });
      }
    }
  }

 private:
  // So many bytes from the panel's start in the order in which they are read.
  const char* at(int64_t offset) const {
    return offset < g.panel_bytes ? packed + offset : following + (offset - g.panel_bytes);
  }
  int64_t first_step(int64_t group) const { return int64_t(uint64_t(group) * Format::kGroup / 64); }
  int64_t last_step(int64_t group) const {
    const int64_t last = first_step(group) + kSteps;
    return kSteps == 1 || last < x.steps ? last : x.steps;
  }

  // Call body(rows of a tile, its first row, ahead, its sums), ahead(step) being what to fetch in a step, of `steps` from
  // `first` on; groups that share one fetch their parts of the next.
  template <class Body>
  __attribute__((always_inline)) void each_tile(int64_t first, int64_t steps, int64_t row_begin, int64_t row_end,
                                                float* sums, const Body& body) const {
    constexpr int kRows = kTileRows<Format>;
    if (row_end - row_begin <= kRows) {
      const auto twice = [&](int64_t step) __attribute__((always_inline)) {
        return FetchTwice<Format>{at(step * kStepBytes + kPrefetchBytes), at(step * kStepBytes + kFarBytes)};
      };
      return with_rows<kRows>(row_end - row_begin,
                              [&](auto rows) __attribute__((always_inline)) { body(rows, row_begin, twice, sums); });
    }
    const char* next = at((first + steps) * kStepBytes);
    const auto half = [&](int64_t step) __attribute__((always_inline)) {
      return FetchHalf<Format>{next + (step - first) * kStepBytes};
    };
    const auto nothing = [](int64_t) __attribute__((always_inline)) { return FetchNothing(); };
    body(std::integral_constant<int, kRows>(), row_begin, half, sums);
    next += FetchHalf<Format>::kBytes;
    with_rows<kRows>(row_end - row_begin - kRows, [&](auto rows) __attribute__((always_inline)) {
      body(rows, row_begin + kRows, half, sums + kRows * kPanel);
    });
    for (int64_t row = row_begin + 2 * kRows; row < row_end; row += kRows)
      with_rows<kRows>(row_end - row, [&](auto rows) __attribute__((always_inline)) {
        body(rows, row, nothing, sums + (row - row_begin) * kPanel);
      });
  }

  // The integer sums of R rows and a group.
  template <int R, class Ahead>
  __attribute__((always_inline)) void sum_group(int64_t row, int64_t group, const Ahead& ahead,
                                                GroupSums<R>& sums) const {
    const RowGroup* of = x.row_groups + row * x.groups + group;
    const int begin = Format::kGroup < 64 ? int(uint64_t(group) % (64 / kGroupInStep)) * kEights : 0;
    const int8_t* lines = x.line(row, first_step(group));
    GroupSums<R>::template start<Format>(sums, of, x.groups);
    for (int64_t step = first_step(group), last = last_step(group); step < last; ++step, lines += x.step_bytes()) {
      const auto later = ahead(step);
      for (int i = begin; i < begin + kEights; i += Format::kRowsTogether) {
        later.fetch(i);
        each<Format::kRowsTogether>([&](auto eight) __attribute__((always_inline)) {
          GroupSums<R>::add(sums, format, lines, packed + step * kStepBytes, i, eight);
        });
      }
    }
  }

  // The products of R rows and a group are added to `total`.
  template <int R, class Ahead>
  __attribute__((always_inline)) void add_group(int64_t row, int64_t group, const GroupScales<Format>& scales,
                                                const Ahead& ahead, float* total) const {
    const RowGroup* of = x.row_groups + row * x.groups + group;
    GroupSums<R> sums;
    sum_group<R>(row, group, ahead, sums);
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
  template <int R, class Ahead>
  __attribute__((always_inline)) void add_block(int64_t row, int64_t index, const BlockCodes<Format>& codes,
                                                const Ahead& ahead, float* total) const {
    const NestedBlock<Format> block(g, panel, x.groups, index);
    const int64_t first = index * Format::kGroups;
    const RowGroup* of = x.row_groups + row * x.groups + first;
    vi integers[R][kVectors];
    each<R * kVectors>([&](auto i) __attribute__((always_inline)) { integers[i / kVectors][i % kVectors] = none(); });
#pragma GCC unroll 1
    for (int64_t group = 0; group < Format::kGroups; ++group) {
      GroupSums<R> sums;
      sum_group<R>(row, first + group, ahead, sums);
      each<kVectors>([&](auto v) __attribute__((always_inline)) {
        const vi code = codes.of_group[group][v];
        each<R>([&](auto r) __attribute__((always_inline)) {
          integers[r][v] = qr::add(integers[r][v], mul(GroupSums<R>::get(sums, r, v), code));
        });
      });
    }
    each<kVectors>([&](auto v) __attribute__((always_inline)) {
      NestedBlock<Format>::template scale_sums<R>(
          block, v, of, x.groups, [&](int64_t pair) __attribute__((always_inline)) { return codes.least[pair][v]; },
          [&](auto r) __attribute__((always_inline)) { return integers[r][v]; },
          [&](auto r, vf value) __attribute__((always_inline)) {
            float* own = total + r * kPanel + v * W;
            store(own, fma(value, set1(of[r * x.groups].scale), index == 0 ? zero() : load(own)));
          });
    });
  }
};

template <class Format>
void multiply_panel(const GemmArgs& g, const QuantizedRows<Format::kGroup>& x, int64_t row_begin, int64_t row_end,
                    int64_t panel, float* sums) {
  constexpr int kInOrder = RowsInOrder<Format>::kMostRows;
  if (row_end - row_begin <= kInOrder && gain_by_order(row_end - row_begin))
    return with_rows<kInOrder>(row_end - row_begin, [&](auto rows) {
      RowsInOrder<Format>(g, x, panel).template multiply<rows>(row_begin, sums);
    });
  VnniPanel<Format>(g, x, panel).multiply(row_begin, row_end, sums);
}

}  // namespace
}  // namespace qr
