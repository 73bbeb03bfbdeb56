// Several rows times a panel on AVX2. A group of weights (of nested ones a block) is unpacked to bytes in L1 once, and
// rows pass over it two at a time against all 32 columns, whose sums stay in registers. Fewer columns for more rows need
// as many loads, and more of what is done once for a row.
//
// Whatever loops index is indexed by constants: GCC keeps sums that a loop indexes in memory.
#pragma once

#include "unpacked_products.h"

namespace qr {
namespace {

constexpr int kTileRows = 2;  // divides the height of a block of x

// How a format is unpacked: kInputs at a time, as [steps of 64][halves of 16 columns][fours of inputs][16][4]. Panels of
// 8 bits have that form already, and are read where they are.
template <class Format>
struct Unpacking {
  static constexpr bool kMustUnpack = Format::kHalfBytes < 1024;
  static constexpr int kInputs = Format::kRounded;
  static constexpr int kInStep = Format::kGroup < 64 ? Format::kGroup : 64;  // inputs of a group in one step
  static constexpr int kParts = kInputs / kInStep, kPartsOfStep = 64 / kInStep;
  static constexpr int kFours = kInStep / 4;
  static constexpr int64_t kFourBytes = 64, kStepBytes = 2048;
  static constexpr int64_t kHalf = kMustUnpack && kInputs < 64 ? kInputs * 16 : kStepBytes / 2;
  static constexpr int kRows = Format::kGroup < 32 ? Format::kGroup / 8 : 4;  // of 8 k, that are unpacked side by side
  static constexpr int64_t kPackedBytes = kInputs * Format::kHalfBytes / 32;

  QR_INLINE int64_t step_of(int64_t input) { return int64_t(uint64_t(input) / 64); }
  QR_INLINE int64_t in_step(int64_t input) { return int64_t(uint64_t(input) % 64); }

  // kRows rows of 8 k of a half, the first of them `first`.
  QR_INLINE void unpack_rows(const Format& format, char* out, const char* half, int64_t first) {
    each<kRows>([&](auto row) __attribute__((always_inline)) {
      each<2>([&](auto v) __attribute__((always_inline)) {
        vi low, high;
        Products<Format>::unpack(format, half + v * 32, first, row, low, high);
        keep(out + row * 2 * kFourBytes + v * 32, low);
        keep(out + (row * 2 + 1) * kFourBytes + v * 32, high);
      });
    });
  }

  // Where inputs [begin, begin + count) of a panel lie unpacked; in `bytes`, if it must be written.
  QR_INLINE const char* unpack(const Format& format, char* bytes, const char* packed, int64_t begin, int64_t count) {
    if constexpr (!kMustUnpack) return packed + step_of(begin) * kStepBytes + in_step(begin) * 16;
    for (int64_t i = 0; i < count; i += kRows * 8) {
      const char* step = packed + step_of(begin + i) * (2 * Format::kHalfBytes);
      char* out = bytes + step_of(i) * kStepBytes + in_step(i) * 16;
      each<2>([&](auto half) __attribute__((always_inline)) {
        unpack_rows(format, out + half * kHalf, step + half * Format::kHalfBytes, in_step(begin + i) / 8);
      });
    }
    return bytes;
  }
};

// What is fetched while a part of a group is multiplied: so many lines of what follows.
struct Ahead {
  const char* at;
  int64_t lines;

  __attribute__((always_inline)) void fetch(int64_t part) const {
    for (const char *line = at + part * lines * 64, *end = line + lines * 64; line < end; line += 64) prefetch(line);
  }
};

// kAtOnce: vectors of columns; those of one half are read in order of address.
template <class Format, int kAtOnce>
class UnpackedPanel {
  using Layout = Unpacking<Format>;
  using Weights = Products<Format>;
  static constexpr int kGroups = Format::kNested ? Layout::kParts : 1;
  static constexpr int kBias = Weights::kBias, kBiasBits = kBias == 0 ? 0 : __builtin_ctz(unsigned(kBias));
  static_assert(kBias == 0 || kBias == 1 << kBiasBits, "biases are shifts");

  const GemmArgs& g;
  const Format format;
  const QuantizedRows<Format::kGroup> x;
  const int64_t panel, groups;
  const char* packed;
  alignas(64) char bytes[Layout::kMustUnpack ? Layout::kInputs * kPanel : 1];
  alignas(64) char codes[kGroups * kVectors * 32];  // of nested groups, as factors of Products
  alignas(64) char pairs[kGroups * kVectors * 32];  // what the sums of two groups' inputs are multiplied by

 public:
  UnpackedPanel(const GemmArgs& g, const QuantizedRows<Format::kGroup>& x, int64_t panel)
      : g(g), format(g), x(x), panel(panel), groups(x.groups),
        packed(static_cast<const char*>(g.packed) + panel * g.panel_bytes) {}

  void multiply(int64_t row_begin, int64_t row_end, float* sums) {
    for (int64_t i = 0; i < (row_end - row_begin) * kPanel; i += W) store(sums + i, zero());
    const int64_t end = x.steps * kQuantizedDepth;
    for (int64_t begin = 0, group = 0; group < groups; begin += Layout::kInputs, group += kGroups) {
      const int64_t count = begin + Layout::kInputs < end ? Layout::kInputs : end - begin;
      const char* weights = Layout::unpack(format, bytes, packed, begin, count);
      if constexpr (Format::kNested) {
        unpack_codes(group / kGroups);
        each_tile(row_begin, row_end, begin, sums, [&](auto rows, auto... of_tile) __attribute__((always_inline)) {
          add_block<rows>(weights, group, of_tile...);
        });
      } else {
        const auto scales = GroupScales<Format>::of(g, panel, groups, group);
        scales.by_kind([&](auto kind) __attribute__((always_inline)) {
          each_tile(row_begin, row_end, begin, sums, [&](auto rows, auto... of_tile) __attribute__((always_inline)) {
            add_group<rows>(kind, scales, weights, count, group, of_tile...);
          });
        });
      }
    }
  }

 private:
  // Call body(how many rows, the first, their x from the input `begin` on, what to fetch, their sums). The first two
  // tiles fetch what is unpacked next; a single one does it alone.
  template <class Body>
  __attribute__((always_inline)) void each_tile(int64_t row_begin, int64_t row_end, int64_t begin, float* sums,
                                                const Body& body) const {
    constexpr int64_t kLines = Layout::kPackedBytes / Layout::kParts / 64;
    constexpr int64_t kDistance = Layout::kInputs < 64 ? 2 * Format::kHalfBytes : Layout::kPackedBytes;
    const int64_t step = Layout::step_of(begin), within = Layout::in_step(begin);
    Ahead ahead{packed + begin / Layout::kInputs * Layout::kPackedBytes + kDistance,
                row_end - row_begin < 2 * kTileRows ? kLines : (kLines + 1) / 2};
    const char* last = ahead.at + Layout::kPackedBytes;
    int64_t row = row_begin;
    for (; row + kTileRows <= row_end; row += kTileRows, sums += kTileRows * kPanel) {
      body(std::integral_constant<int, kTileRows>(), row, x.line(row, step) + within, ahead, sums);
      ahead.at += ahead.lines * Layout::kParts * 64;
      if (ahead.at >= last) ahead.lines = 0;
    }
    if (row < row_end) body(std::integral_constant<int, 1>(), row, x.line(row, step) + within, ahead, sums);
  }

  void unpack_codes(int64_t index) {
    const NestedBlock<Format> block(g, panel, groups, index);
    for (int i = 0; i < kGroups; ++i)
      for (int v = 0; v < kVectors; ++v)
        keep(codes + (i * kVectors + v) * 32, Weights::factor(block.codes_of(i, 0, v)));
    for (int i = 0; i < kGroups / 2; ++i)
      for (int v = 0; v < kVectors; ++v)
        keep(pairs + (i * kVectors + v) * 32,
             Format::kKinds == 2 ? block.least_of(i, v)
                                 : lower_halves(block.codes_of(2 * i, 0, v), block.codes_of(2 * i + 1, 0, v)));
  }

  // The products of R rows and a group are added to `total`.
  template <int R, class Kind>
  __attribute__((always_inline)) void add_group(Kind kind, const GroupScales<Format>& scales, const char* weights,
                                                int64_t count, int64_t group, int64_t row, const int8_t* lines,
                                                const Ahead& ahead, float* total) const {
    vi acc[R][kVectors];
    each<R * kVectors>([&](auto i) __attribute__((always_inline)) { acc[i / kVectors][i % kVectors] = none(); });
    for (int64_t step = 0; step < (Format::kGroup <= 64 ? 1 : count / 64); ++step) {
      ahead.fetch(step);
      each<kVectors / kAtOnce>([&](auto i) __attribute__((always_inline)) {
        Weights::template add<R>(ProductsOf<Layout::kFours, Layout::kHalf, kAtOnce * i, kAtOnce>(), acc,
                                 weights + step * Layout::kStepBytes, lines + step * x.step_bytes());
      });
    }
    each<R>([&](auto r) __attribute__((always_inline)) {
      const RowGroup& of = x.row_groups[(row + r) * groups + group];
      const vi bias = _mm256_slli_epi32(same(of.sum), kBiasBits);
      each<kVectors>([&](auto v) __attribute__((always_inline)) {
        float* at = total + r * kPanel + v * W;
        store(at, scales.add(kind, load(at), kBias == 0 ? acc[r][v] : sub(acc[r][v], bias), of, v));
      });
    });
  }

  // What is subtracted from the sums of a block, before they are scaled or beside it: sums of inputs times `pairs`.
  template <int R>
  __attribute__((always_inline)) void add_inputs(vi (&acc)[R][kVectors], const RowGroup* of) const {
#pragma GCC unroll 1
    for (int pair = 0; pair < kGroups / 2; ++pair)
      each<R>([&](auto r) __attribute__((always_inline)) {
        const RowGroup* two = of + r * groups + 2 * pair;
        const int32_t both = Format::kKinds == 2 ? two[0].sum : joined(two[0].sum, two[1].sum);
        each<kVectors>([&](auto v) __attribute__((always_inline)) {
          acc[r][v] = add_pairs(acc[r][v], same(both), kept(pairs + (pair * kVectors + v) * 32));
        });
      });
  }

  // The same as add_group, of a block of nested groups.
  template <int R>
  __attribute__((always_inline)) void add_block(const char* weights, int64_t group, int64_t row, const int8_t* lines,
                                                const Ahead& ahead, float* total) const {
    const RowGroup* of = x.row_groups + row * groups + group;
    vi acc[R][kVectors], inputs[R][kVectors];
    each<R * kVectors>([&](auto i) __attribute__((always_inline)) {
      acc[i / kVectors][i % kVectors] = none();
      inputs[i / kVectors][i % kVectors] = none();
    });
#pragma GCC unroll 1
    for (int64_t part = 0; part < kGroups; ++part) {
      const int64_t step = part / Layout::kPartsOfStep, in_step = part % Layout::kPartsOfStep;
      ahead.fetch(part);
      const char* in_weights = weights + step * Layout::kStepBytes + in_step * (Layout::kFours * Layout::kFourBytes);
      const int8_t* in_lines = lines + step * x.step_bytes() + in_step * Layout::kInStep;
      Weights::template add<R>(
          ProductsOf<Layout::kFours, Layout::kHalf>(), acc, in_weights, in_lines,
          [&](int v) __attribute__((always_inline)) { return kept(codes + (part * kVectors + v) * 32); });
    }
    if constexpr (Format::kKinds == 2 || kBias != 0) add_inputs<R>(inputs, of);
    const NestedBlock<Format> block(g, panel, groups, group / kGroups);
    each<R * kVectors>([&](auto i) __attribute__((always_inline)) {
      constexpr int r = i / kVectors, v = i % kVectors;
      if constexpr (Format::kKinds == 1 && kBias != 0)
        acc[r][v] = sub(acc[r][v], _mm256_slli_epi32(inputs[r][v], kBiasBits));
      vf value = mul(floats(acc[r][v]), load(block.halves + v * W));
      if constexpr (Format::kKinds == 2) value = fma(floats(inputs[r][v]), block.negative_least(v), value);
      float* at = total + r * kPanel + v * W;
      store(at, fma(value, set1(of[r * groups].scale), load(at)));
    });
  }
};

template <class Format>
void multiply_panel(const GemmArgs& g, const QuantizedRows<Format::kGroup>& x, int64_t row_begin, int64_t row_end,
                    int64_t panel, float* sums) {
  constexpr int kFewRows = Format::kGroup < 64 ? 1 : 4;  // for so many memory is waited for, in order of address least
  const int64_t rows = row_end - row_begin;
  if constexpr (Unpacking<Format>::kMustUnpack) {  // for one row, what is unpacked is not worth keeping
    if (rows == 1) return multiply_row<Format>(g, x, row_begin, panel, sums);
  } else if (rows <= kFewRows) {
    return UnpackedPanel<Format, kVectors / 2>(g, x, panel).multiply(row_begin, row_end, sums);
  }
  UnpackedPanel<Format, kVectors>(g, x, panel).multiply(row_begin, row_end, sums);
}

}  // namespace
}  // namespace qr
