// Groups whose scales are codes of 8 bits under a float16 of 256 inputs, as in the K-quants of GGUF. Activations are
// rounded in the same blocks, so what a block adds to an output is an integer times floats of the block, and has the same
// bits however the integer is summed.
#pragma once

#include "gemm_quantized.h"

namespace qr {
namespace {

// Of a row and a vector of columns: the sum of all blocks before, and the integers of the block at hand.
struct NestedTotal {
  vf value;
  vi block;
};
template <bool Nested>
struct TotalOf {
  using Type = vf;
};
template <>
struct TotalOf<true> {
  using Type = NestedTotal;
};
template <class Format>
using Total = typename TotalOf<Format::kNested>::Type;

QR_INLINE void clear(vf& total) { total = zero(); }
QR_INLINE void clear(NestedTotal& total) { total = {zero(), none()}; }
QR_INLINE vf value_of(vf total) { return total; }
QR_INLINE vf value_of(NestedTotal total) { return total.value; }

// The scales of one block of a panel; see qr_weight.
template <class Format>
struct NestedBlock {
  static constexpr int64_t kBytes = Format::kKinds * (2 + Format::kGroups) * kPanel;
  const Fp16* halves;   // [kinds][32]
  const int8_t* codes;  // [groups][kinds][32]

  NestedBlock(const GemmArgs& g, int64_t panel, int64_t groups, int64_t block) {
    const char* begin =
        static_cast<const char*>(g.scales) + (panel * int64_t(uint64_t(groups) / Format::kGroups) + block) * kBytes;
    halves = reinterpret_cast<const Fp16*>(begin);
    codes = reinterpret_cast<const int8_t*>(begin) + Format::kKinds * 2 * kPanel;
  }

  vi codes_of(int64_t group, int kind, int v) const {
    return widened(codes + (group * Format::kKinds + kind) * kPanel + v * W);
  }

  // The second float16, negated.
  vf negative_least(int v) const { return mul(load(halves + kPanel + v * W), set1(-1.0f)); }

  // The second codes of two groups.
  vi least_of(int64_t pair, int v) const { return two_in_one(codes_of(2 * pair, 1, v), codes_of(2 * pair + 1, 1, v)); }

  // Scale a block's sums of R rows: scale * sums, with two kinds less least * inputs. Calls take(r, value), who multiplies
  // by the row's own scale. least_of(pair): as below, widened before or now. sums_of(r): integers times codes. of:
  // the block's first group of the first row; the next row's is `stride` further on.
  template <int R, class Least, class SumsOf, class Take>
  QR_INLINE void scale_sums(const NestedBlock& block, int v, const RowGroup* of, int64_t stride, const Least& least_of,
                            const SumsOf& sums_of, const Take& take) {
    const vf scale = load(block.halves + v * W);
    if constexpr (Format::kKinds == 1) {
      each<R>([&](auto r) __attribute__((always_inline)) { take(r, mul(floats(sums_of(r)), scale)); });
    } else {
      const vf least = block.negative_least(v);
      vi inputs[R];
      each<R>([&](auto r) __attribute__((always_inline)) { inputs[r] = none(); });
#pragma GCC unroll 1
      for (int64_t pair = 0; pair < Format::kGroups / 2; ++pair) {
        const vi codes = least_of(pair);
        each<R>([&](auto r) __attribute__((always_inline)) {
          inputs[r] = add_pairs(inputs[r], same(of[r * stride + 2 * pair].sum), codes);
        });
      }
      each<R>([&](auto r) __attribute__((always_inline)) {
        take(r, fma(floats(inputs[r]), least, mul(floats(sums_of(r)), scale)));
      });
    }
  }
};

// The codes of a block, widened once for all rows. Those of the next block are fetched.
template <class Format>
struct BlockCodes {
  vi of_group[Format::kGroups][kVectors];
  vi least[Format::kGroups / 2][kVectors];  // of two groups; where there are two kinds

  explicit BlockCodes(const NestedBlock<Format>& block) {
    const char* next = reinterpret_cast<const char*>(block.halves) + NestedBlock<Format>::kBytes;
    for (int64_t line = 0; line < NestedBlock<Format>::kBytes; line += 64) prefetch(next + line);
    for (int64_t group = 0; group < Format::kGroups; ++group)
      for (int v = 0; v < kVectors; ++v) of_group[group][v] = block.codes_of(group, 0, v);
    if constexpr (Format::kKinds == 2)
      for (int64_t pair = 0; pair < Format::kGroups / 2; ++pair)
        for (int v = 0; v < kVectors; ++v) least[pair][v] = block.least_of(pair, v);
  }
};

// One group's codes. What rows add to the block's integers is scaled with all of the block, by end_group.
template <class Stored, int Kinds>
struct GroupScales<Nested<Stored, Kinds>> {
  using Block = NestedBlock<Nested<Stored, Kinds>>;
  vi codes[kVectors];

  QR_INLINE GroupScales of(const GemmArgs& g, int64_t panel, int64_t groups, int64_t group) {
    constexpr uint64_t kGroups = Nested<Stored, Kinds>::kGroups;
    const int64_t in_block = int64_t(uint64_t(group) % kGroups);
    const Block block(g, panel, groups, int64_t(uint64_t(group) / kGroups));
    prefetch(reinterpret_cast<const char*>(block.halves) + Block::kBytes + in_block % 2 * 64);
    prefetch(block.codes + in_block * Kinds * kPanel + Block::kBytes);
    GroupScales out;
    for (int v = 0; v < kVectors; ++v) out.codes[v] = block.codes_of(in_block, 0, v);
    return out;
  }

  template <class Body>
  __attribute__((always_inline)) void by_kind(const Body& body) const {
    body(Shifted<Shift::kNone>());
  }
  __attribute__((always_inline)) NestedTotal add(Shifted<Shift::kNone>, NestedTotal total, vi sums, const RowGroup&,
                                                 int v) const {
    return {total.value, qr::add(total.block, mul(sums, codes[v]))};
  }
};

// After the group `group`: if it ends a block, the block is scaled and added. of: the first group of the first row;
// total_at(r, v): of row r.
template <class Format, int R, class TotalAt>
QR_INLINE void end_group(const GemmArgs& g, int64_t panel, int64_t groups, int64_t group, const RowGroup* of,
                         const TotalAt& total_at) {
  if constexpr (Format::kNested) {
    constexpr uint64_t kGroups = Format::kGroups;
    if (uint64_t(group + 1) % kGroups != 0) return;
    const int64_t index = int64_t(uint64_t(group) / kGroups);
    const NestedBlock<Format> block(g, panel, groups, index);
    const RowGroup* own = of + index * int64_t(kGroups);
    each<kVectors>([&](auto v) __attribute__((always_inline)) {
      NestedBlock<Format>::template scale_sums<R>(
          block, v, own, groups,
          [&](int64_t pair) __attribute__((always_inline)) { return block.least_of(pair, v); },
          [&](auto r) __attribute__((always_inline)) { return total_at(r, v).block; },
          [&](auto r, vf value) __attribute__((always_inline)) {
            NestedTotal& total = total_at(r, v);
            total = {fma(value, set1(own[r * groups].scale), total.value), none()};
          });
    });
  }
}

}  // namespace
}  // namespace qr
