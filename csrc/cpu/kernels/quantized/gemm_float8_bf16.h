// Products of bf16 activations with float8 weights by vdpbf16ps, or with its bits; x is prepared as for bf16 weights, in
// stretches of a group.
#pragma once

#include "../gemm/gemm_bf16_widened.h"
#include "gemm_float8.h"

namespace qr {
namespace {

constexpr int64_t kFloat8Pairs = kFloat8Group / 2;
constexpr int kDirectFloat8Rows = 4;  // so few are multiplied as weights are widened; more read tiles in L1

// All rows of a block of few, x [pairs][R]; `pairs` may end within the last step, where x counts as zero.
template <int R>
void float8_block(const int32_t* x, int64_t pairs, const char* packed, float* sums) {
  __m512 acc[R][2];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < 2; ++v) acc[r][v] = _mm512_setzero_ps();
  for (int64_t pair = 0; pair < pairs; pair += 16, packed += kFloat8Step)
    for (int v = 0; v < 2; ++v)
      for (int64_t line = 0; line < 8 && pair + 2 * line < pairs; ++line) {
        const char* at = packed + v * (kFloat8Step / 2) + line * kFloat8Line;
        const int32_t* own = x + (pair + 2 * line) * R;
        const bool has_second = pair + 2 * line + 1 < pairs;
        __m512i first, second;
        widen_float8(load_bytes_of(at), first, second);
        for (int r = 0; r < R; ++r)
          acc[r][v] = _mm512_dpbf16_ps(acc[r][v], as_bf16(first), as_bf16(_mm512_set1_epi32(own[r])));
        for (int r = 0; has_second && r < R; ++r)
          acc[r][v] = _mm512_dpbf16_ps(acc[r][v], as_bf16(second), as_bf16(_mm512_set1_epi32(own[R + r])));
      }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < 2; ++v) _mm512_storeu_ps(sums + r * kPanel + v * 16, acc[r][v]);
}

template <int R>
void float8_few(int64_t rows, const int32_t* x, int64_t pairs, const char* packed, float* sums) {
  if constexpr (R > 1)
    if (rows < R) return float8_few<R - 1>(rows, x, pairs, packed, sums);
  float8_block<R>(x, pairs, packed, sums);
}

struct Float8Pairs {
  static void multiply(const GemmArgs& g, int64_t row_begin, int64_t row_end, const char* packed, int64_t group,
                       float* sums) {
    const PairedRows<kFloat8Pairs> places(g.rows, g.k, row_begin);
    const int64_t pair = group * kFloat8Pairs, pairs = places.length(pair);
    const auto* x = static_cast<const int32_t*>(g.x);
    if (places.rows <= kDirectFloat8Rows)
      return float8_few<kDirectFloat8Rows>(places.rows, x + places.at(pair, 0), pairs, packed, sums);
    alignas(64) char tiles[2 * kFloat8Bytes];
    widen_float8_steps(tiles, packed, divide_up(pairs, 16));
    const RowBlocks blocks(row_end - row_begin);
    for (int64_t block = 0; block < blocks.count; ++block) {
      const int64_t first = blocks.first(block), rows = blocks.first(block + 1) - first;
      kBf16Blocks[0][size_t(rows - 1)](x + places.at(pair, first), pairs, tiles, nullptr, true,
                                       sums + first * kPanel);
    }
  }
};

struct Float8Widened {
  static void multiply(const GemmArgs& g, int64_t row_begin, int64_t row_end, const char* packed, int64_t group,
                       float* sums) {
    if (g.rows <= kDirectFloat8Rows) return Float8Pairs::multiply(g, row_begin, row_end, packed, group, sums);
    const NoDenormals scope;
    const int64_t begin = group * kStretch, steps = begin + kStretch < g.k ? kStretch : g.k - begin;
    alignas(64) char tiles[2 * kFloat8Bytes];
    alignas(64) float weights[kStretch * kPanel];
    widen_float8_steps(tiles, packed, divide_up(steps, kDepth));
    widen_panel<true>(weights, tiles, 0, steps);
    multiply_stretch(static_cast<const float*>(g.x) + begin * g.rows + row_begin * kStretch, row_end - row_begin,
                     2 * pairs_of(steps), weights, packed, true, sums);
  }
};

Gemm float8_bf16_gemm(bool slow_pairs) {
  using Widened = WidenedRows<kDirectFloat8Rows, kFloat8Pairs>;
  if (slow_pairs) return Gemm{Widened::bytes, Widened::prepare, run_gemm<Float8Micro<Float8Widened>>};
  return Gemm{bf16_rows_bytes, bf16_rows<kFloat8Pairs>, run_gemm<Float8Micro<Float8Pairs>>};
}

}  // namespace
}  // namespace qr
