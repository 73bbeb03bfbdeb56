// bfloat16 times bfloat16 by vdpbf16ps: a pair of products per lane and instruction, summed in float32.
//
// A panel is read in stretches of K. All rows pass over one, in blocks whose sums fill the registers, while the next one
// is fetched in order of address: Zen 4 reads two parts of a page in turn at half the speed of one (benchmarks/cpu.md).
#pragma once

#include <array>
#include <utility>

#include "gemm.h"

namespace qr {
namespace {

constexpr int kBf16Rows = 12;  // rows of a block at most

// Pairs of k in a stretch: 4 KiB of a panel, which come to L1, or 32 KiB, which come to L2 and save spilling of sums.
constexpr int64_t bf16_stretch(int64_t rows) { return rows <= kBf16Rows ? 32 : 256; }

int64_t pairs_of(int64_t k) { return (k + 1) / 2; }

// How the rows of a piece of work are cut into blocks, as evenly as can be.
struct RowBlocks {
  int64_t rows, count;

  explicit RowBlocks(int64_t rows, int64_t most = kBf16Rows) : rows(rows), count(divide_up(rows, most)) {}
  int64_t first(int64_t block) const { return block * rows / count; }
  int64_t of(int64_t row) const { return ((row + 1) * count - 1) / rows; }
};

// x as pairs: of each piece's rows [stretches][blocks][pairs of the stretch][rows of the block]. kStretch: pairs of a
// stretch, 0 where that depends on the rows.
template <int64_t kStretch = 0>
struct PairedRows {
  int64_t piece, rows, pairs, stretch;  // of the piece that begins at row `piece`

  PairedRows(int64_t all_rows, int64_t k, int64_t piece)
      : piece(piece),
        rows(all_rows - piece < kBlockRows ? all_rows - piece : kBlockRows),
        pairs(pairs_of(k)),
        stretch(kStretch != 0 ? kStretch : bf16_stretch(rows)) {}
  // Where the row that is `row` of the piece begins, if it begins a block, in the stretch that begins at `pair`.
  int64_t at(int64_t pair, int64_t row) const { return piece * pairs + pair * rows + row * length(pair); }
  int64_t length(int64_t pair) const { return pairs - pair < stretch ? pairs - pair : stretch; }
};

int64_t bf16_rows_bytes(int64_t rows, int64_t k, int32_t) {
  return rows == 1 && k % 2 == 0 ? 0 : rows * pairs_of(k) * 4;
}

// Some rows of one block and stretch: `count` of its `block_rows`, each with `elements` from x on, whose distance is k.
QR_INLINE void pair_rows(int32_t* out, int64_t block_rows, const uint16_t* x, int64_t count, int64_t k,
                         int64_t elements) {
  if (count == 1) {
    for (int64_t i = 0; i + 1 < elements; i += 2, out += block_rows) std::memcpy(out, x + i, 4);
    if (elements % 2 != 0) *out = x[elements - 1];
    return;
  }
  alignas(64) __m512i rows[16] = {}, columns[16];
  const __mmask16 some = first(int(count));
  for (int64_t i = 0; i < elements; i += 32) {
    const int64_t left = elements - i;
    const __mmask32 mask = left >= 32 ? ~__mmask32(0) : (__mmask32(1) << left) - 1;
    for (int64_t row = 0; row < count; ++row) rows[row] = _mm512_maskz_loadu_epi16(mask, x + row * k + i);
    transpose_16x16(columns, rows, 64);
    for (int64_t pair = 0; pair < 16 && pair * 2 < left; ++pair, out += block_rows)
      _mm512_mask_storeu_epi32(out, some, columns[pair]);
  }
}

// kRows: of a block at most.
template <int64_t kStretch = 0, int64_t kRows = kBf16Rows>
void bf16_rows(void* prepared, const void* x, int32_t, int64_t rows, int64_t k, int64_t begin, int64_t end,
               const int32_t*) {
  for (int64_t row = begin, to; row < end; row = to) {
    const PairedRows<kStretch> places(rows, k, row / kBlockRows * kBlockRows);
    const RowBlocks blocks(places.rows, kRows);
    const int64_t block = blocks.of(row - places.piece), first = blocks.first(block), last = blocks.first(block + 1);
    to = places.piece + last < end ? places.piece + last : end;
    for (int64_t pair = 0; pair < places.pairs; pair += places.stretch) {
      int32_t* out = static_cast<int32_t*>(prepared) + places.at(pair, first) + row - places.piece - first;
      const int64_t left = k - 2 * pair, elements = left < 2 * places.stretch ? left : 2 * places.stretch;
      pair_rows(out, last - first, static_cast<const uint16_t*>(x) + row * k + 2 * pair, to - row, k, elements);
    }
  }
}

QR_INLINE __m512bh as_bf16(__m512i v) { return reinterpret_cast<__m512bh>(v); }

// Up to so many rows a panel is read tile by tile: a core has the time to load x twice, and memory is fastest unprompted.
constexpr int kStreamedRows = 4;

// One block and stretch: x [pairs][R]; sums are gone on with. `kAhead` lines are fetched with each pair.
template <int R, int kAhead>
void bf16_block(const int32_t* x, int64_t pairs, const char* panel, const char* ahead, bool is_first, float* sums) {
  __m512 acc[R][2];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < 2; ++v)
      acc[r][v] = is_first ? _mm512_setzero_ps() : _mm512_loadu_ps(sums + r * kPanel + v * 16);
  const auto weights = [&](int pair, int v) __attribute__((always_inline)) {
    return as_bf16(_mm512_loadu_si512(panel + v * 1024 + pair * 64));
  };
  const auto value = [&](int pair, int r) __attribute__((always_inline)) {
    return as_bf16(_mm512_set1_epi32(x[pair * R + r]));
  };
  const auto add = [&](int pair) __attribute__((always_inline)) {
    if constexpr (kAhead == 1) prefetch_to_l2(ahead + pair * 64);
    for (int line = 0; kAhead == 2 && line < 2; ++line) prefetch(ahead + pair * 128 + line * 64);
    const __m512bh w0 = weights(pair, 0), w1 = weights(pair, 1);
    for (int r = 0; r < R; ++r) {
      const __m512bh both = value(pair, r);
      acc[r][0] = _mm512_dpbf16_ps(acc[r][0], w0, both);
      acc[r][1] = _mm512_dpbf16_ps(acc[r][1], w1, both);
    }
  };
  const auto add_tile = [&](int v) __attribute__((always_inline)) {
    for (int pair = 0; pair < 16; ++pair)
      for (int r = 0; r < R; ++r) acc[r][v] = _mm512_dpbf16_ps(acc[r][v], weights(pair, v), value(pair, r));
  };
  for (; pairs > 0; pairs -= 16, panel += 2048, ahead += 16 * 64 * kAhead, x += 16 * R) {
    const int count = pairs < 16 ? int(pairs) : 16;
    if (R <= kStreamedRows && count == 16) {
      add_tile(0);
      add_tile(1);
    } else {
      for (int pair = 0; pair < count; ++pair) add(pair);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < 2; ++v) _mm512_storeu_ps(sums + r * kPanel + v * 16, acc[r][v]);
}

using Bf16BlockFn = void (*)(const int32_t*, int64_t, const char*, const char*, bool, float*);

template <int kAhead, int... kRows>
constexpr std::array<Bf16BlockFn, sizeof...(kRows)> bf16_blocks(std::integer_sequence<int, kRows...>) {
  return {bf16_block<kRows + 1, kAhead>...};
}

// By lines to fetch with each pair and rows, less one: few rows bring the next stretch in one block or in two.
constexpr std::array<Bf16BlockFn, kBf16Rows> kBf16Blocks[3] = {
    bf16_blocks<0>(std::make_integer_sequence<int, kBf16Rows>()),
    bf16_blocks<1>(std::make_integer_sequence<int, kBf16Rows>()),
    bf16_blocks<2>(std::make_integer_sequence<int, kBf16Rows>())};

struct Bf16Micro {
  static constexpr bool kExpands = false;
  explicit Bf16Micro(const GemmArgs&) {}
  // next: the panel that follows
  void multiply(const GemmArgs& g, int64_t row_begin, int64_t row_end, const char* panel, const char* next,
                float* sums) const {
    const PairedRows<> places(g.rows, g.k, row_begin);
    const RowBlocks blocks(row_end - row_begin);
    const int64_t bytes = places.stretch * kPanel * 4;
    for (int64_t pair = 0; pair < places.pairs; pair += places.stretch, panel += bytes) {
      const char* ahead = pair + places.stretch < places.pairs ? panel + bytes : next;
      multiply_blocks(g, places, blocks, pair, panel, ahead, sums);
    }
  }

  // All rows of the stretch of weights that begins at `pair`; meanwhile what lies ahead is fetched.
  template <int64_t kStretch>
  static void multiply_blocks(const GemmArgs& g, const PairedRows<kStretch>& places, const RowBlocks& blocks,
                              int64_t pair, const char* weights, const char* ahead, float* sums) {
    const auto* x = static_cast<const int32_t*>(g.x);
    for (int64_t block = 0; block < blocks.count; ++block, ahead += places.stretch * kPanel * 2) {
      const int64_t first = blocks.first(block), rows = blocks.first(block + 1) - first;
      const int lines = blocks.count == 1 ? 2 : block < 2 ? 1 : 0;
      kBf16Blocks[lines][size_t(rows - 1)](x + places.at(pair, first), places.length(pair), weights, ahead, pair == 0,
                                           sums + first * kPanel);
    }
  }
};

Gemm bf16_gemm() { return Gemm{bf16_rows_bytes, bf16_rows<>, run_streamed<Bf16Micro>}; }

}  // namespace
}  // namespace qr
