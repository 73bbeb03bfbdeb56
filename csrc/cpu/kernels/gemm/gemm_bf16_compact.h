// bfloat16 in 12 bits (compact.h) times bfloat16 by vdpbf16ps, with the bits of plain panels.
//
// A panel is read in stretches of K. The first block of rows unpacks four lines of weights in registers and multiplies
// them at once: on Zen 4 shuffles and vdpbf16ps do not wait for each other (benchmarks/cpu.md). Where more blocks
// follow, it leaves the lines in L1 for them. Zen 5 has two vdpbf16ps a cycle, for which numbers of x come too slowly if
// each meets 16 columns only: there several blocks are those of plain panels, over a stretch that is unpacked first.
#pragma once

#include "gemm_bf16.h"

namespace qr {
namespace {

constexpr int kCompactRows = 16;          // rows of a block at most, whose sums of 16 columns stay in registers
constexpr int64_t kCompactStretch = 128;  // pairs of k; 12 KiB, and as many groups as a word has bits

// Some pairs of k of a panel.
struct CompactStretch {
  const char* groups;
  int64_t part, step;  // bytes from one part of a step to the next, and from step to step
  Bytes table;
  const uint32_t *patch, *patch_end;  // of these pairs
  int64_t first_group, pairs;
  uint64_t patched;   // groups that have patches
  const char* ahead;  // what is read next
};

// A panel's stretches in ascending order.
class CompactPanel {
 public:
  CompactPanel(const GemmArgs& g, const char* panel, const char* next)
      : panel(panel), next(next), places(CompactPlaces::of(panel, g.k)), all(pairs_of(g.k)) {
    const auto* header = reinterpret_cast<const CompactHeader*>(panel);
    table = sixteen_bytes(header->upper);
    patch = reinterpret_cast<const uint32_t*>(header + 1);
    end = patch + header->patches;
  }
  CompactStretch stretch(int64_t pair, int64_t pairs) {
    const int64_t first = pair / 2, groups = first + kCompactStretch / 2;  // in order of address
    const uint32_t* const begin = patch;
    uint64_t patched = 0;
    for (; patch < end && group_of(*patch) < groups; ++patch) patched |= uint64_t(1) << (group_of(*patch) - first);
    const bool is_last = pair + kCompactStretch >= all;
    const char* at = panel + places.begin + first / 8 * places.step;
    for (int64_t line = 0; is_last && line < places.begin; line += 64) prefetch(next + line);
    return {at, places.part, places.step, table, begin, patch, first, pairs, patched,
            is_last ? next + places.begin : at + kCompactStretch / 16 * places.step};
  }
  static int64_t group_of(uint32_t patch) { return patch >> 8 >> 7; }

 private:
  const char *panel, *next;
  CompactPlaces places;
  int64_t all;
  Bytes table;
  const uint32_t *patch, *end;
};

QR_INLINE void unpack_lines(__m512i (&lines)[4], Bytes table, const char* group) {
  const Bytes codes = load_bytes_of(group), lower01 = load_bytes_of(group + 64), lower23 = load_bytes_of(group + 128);
  const Bytes upper01 = look_up(table, low_nibbles(codes)), upper23 = look_up(table, high_nibbles(codes));
  lines[0] = first_pairs(lower01, upper01);
  lines[1] = second_pairs(lower01, upper01);
  lines[2] = first_pairs(lower23, upper23);
  lines[3] = second_pairs(lower23, upper23);
}

// Without branches on the line, for which the compiler would keep all lines in memory.
QR_INLINE void patch_lines(__m512i (&lines)[4], const CompactStretch& s, int64_t group) {
  for (const uint32_t* patch = s.patch; patch < s.patch_end; ++patch) {
    const uint64_t number = *patch >> 8 & 127, own = CompactPanel::group_of(*patch) == group;
    const Bytes upper = all_bytes(int(*patch));
    for (uint64_t i = 0; i < 4; ++i)
      lines[i] = _mm512_mask_mov_epi8(lines[i], (own & uint64_t(number / 32 == i)) << (number % 32 * 2 + 1), upper);
  }
}

template <int R>
QR_INLINE void add_line(__m512 (&acc)[R], __m512i line, const int32_t* x) {
  for (int r = 0; r < R; ++r) acc[r] = _mm512_dpbf16_ps(acc[r], as_bf16(line), as_bf16(_mm512_set1_epi32(x[r])));
}

// All of K of few rows, x [pairs][R]. Memory decides: a step's lines are asked for at once and unpacked into L1, which
// the products read, and nothing is fetched ahead (benchmarks/cpu.md).
template <int R>
void stream_block(const int32_t* x, int64_t pairs, Expander weights, float* sums) {
  __m512 acc[R][2];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < 2; ++v) acc[r][v] = _mm512_setzero_ps();
  alignas(64) char tiles[kExpandedStep];
  for (int64_t step = 0; pairs > 0; ++step, pairs -= 16, x += 16 * R) {
    weights.expand(step, tiles);
    asm volatile("" ::: "memory");  // or the compiler keeps tiles in registers, of which there are too few
    const int count = pairs < 16 ? int(pairs) : 16;
    for (int pair = 0; pair < count; ++pair) {
      const __m512bh w0 = as_bf16(_mm512_load_si512(tiles + pair * 64));
      const __m512bh w1 = as_bf16(_mm512_load_si512(tiles + 1024 + pair * 64));
      for (int r = 0; r < R; ++r) {
        const __m512bh both = as_bf16(_mm512_set1_epi32(x[pair * R + r]));
        acc[r][0] = _mm512_dpbf16_ps(acc[r][0], w0, both);
        acc[r][1] = _mm512_dpbf16_ps(acc[r][1], w1, both);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < 2; ++v) _mm512_storeu_ps(sums + r * kPanel + v * 16, acc[r][v]);
}

// R rows and one stretch, x [pairs][R], 16 columns at a time; goes on with `sums`. kKeeps: leaves the lines in `tiles`.
template <int R, bool kKeeps>
void compact_block(const int32_t* x, const CompactStretch& s, bool is_first, float* sums, char* tiles) {
  const Bytes table = s.table;  // which no store to `tiles` changes
  const char* ahead = s.ahead;
  for (int v = 0; v < 2; ++v) {
    __m512 acc[R];
    for (int r = 0; r < R; ++r) acc[r] = is_first ? _mm512_setzero_ps() : _mm512_loadu_ps(sums + r * kPanel + v * 16);
    const int32_t* own = x;
    const char* step = s.groups + v * 2 * s.part;
    uint64_t patched = s.patched >> v * 4;
    int64_t left = s.pairs, group = v * 4;
    for (; left > 0; step += s.step, patched >>= 4, group += 4)
      for (int64_t quad = 0; quad < 4 && left > 0; ++quad, ++group, left -= 4, own += 4 * R, patched >>= 1) {
        __m512i lines[4];
        unpack_lines(lines, table, step + quad / 2 * s.part + quad % 2 * kCompactGroup);
        if (__builtin_expect(patched & 1, 0)) patch_lines(lines, s, s.first_group + group);
        for (int line = 0; line < 3; ++line, ahead += 64) prefetch_to_l2(ahead);
        for (int i = 0; kKeeps && i < 4; ++i) _mm512_store_si512(tiles + group * 256 + i * 64, lines[i]);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i)
          if (left > i) add_line<R>(acc, lines[i], own + i * R);
      }
    for (int r = 0; r < R; ++r) _mm512_storeu_ps(sums + r * kPanel + v * 16, acc[r]);
  }
}

// The same for lines that were left in L1.
template <int R>
void kept_block(const int32_t* x, int64_t pairs, const char* tiles, bool is_first, float* sums) {
  for (int v = 0; v < 2; ++v, tiles += 1024) {
    __m512 acc[R];
    for (int r = 0; r < R; ++r) acc[r] = is_first ? _mm512_setzero_ps() : _mm512_loadu_ps(sums + r * kPanel + v * 16);
    for (int64_t pair = 0; pair < pairs; ++pair) {
      const __m512bh weights = as_bf16(_mm512_load_si512(tiles + pair / 16 * kExpandedStep + pair % 16 * 64));
      for (int r = 0; r < R; ++r)
        acc[r] = _mm512_dpbf16_ps(acc[r], weights, as_bf16(_mm512_set1_epi32(x[pair * R + r])));
    }
    for (int r = 0; r < R; ++r) _mm512_storeu_ps(sums + r * kPanel + v * 16, acc[r]);
  }
}

// What a block of so many rows takes: as the only one, as the first of several, as one that follows.
struct CompactBlocks {
  void (*only)(const int32_t*, const CompactStretch&, bool, float*, char*) = nullptr;
  void (*first)(const int32_t*, const CompactStretch&, bool, float*, char*) = nullptr;
  void (*other)(const int32_t*, int64_t, const char*, bool, float*) = nullptr;
};

template <int R>
constexpr CompactBlocks compact_blocks_of() {
  CompactBlocks blocks;
  blocks.only = compact_block<R, false>;
  if constexpr (R >= kCompactRows / 2) {  // the least that several equal blocks have
    blocks.first = compact_block<R, true>;
    blocks.other = kept_block<R>;
  }
  return blocks;
}

template <int... kRows>
constexpr std::array<CompactBlocks, sizeof...(kRows)> compact_blocks(std::integer_sequence<int, kRows...>) {
  return {compact_blocks_of<kRows + 1>()...};
}
constexpr auto kCompactBlocks = compact_blocks(std::make_integer_sequence<int, kCompactRows>());

template <int R>
void stream_rows(int64_t rows, const int32_t* x, int64_t pairs, const Expander& weights, float* sums) {
  if constexpr (R > 1)
    if (rows < R) return stream_rows<R - 1>(rows, x, pairs, weights, sums);
  stream_block<R>(x, pairs, weights, sums);
}

struct CompactMicro {
  static constexpr bool kExpands = true;
  explicit CompactMicro(const GemmArgs&) {}
  // next: the panel that follows
  void multiply(const GemmArgs& g, int64_t row_begin, int64_t row_end, const char* panel, const char* next,
                float* sums) const {
    const PairedRows<kCompactStretch> places(g.rows, g.k, row_begin);
    const RowBlocks blocks(row_end - row_begin, kCompactRows);
    const auto* x = static_cast<const int32_t*>(g.x);
    if (places.rows <= kStreamedRows && core() != Core::kZen5)
      return stream_rows<kStreamedRows>(places.rows, x + places.at(0, 0), places.pairs, Expander(panel, g.k), sums);
    alignas(64) char tiles[kCompactStretch * kPanel * 4];
    CompactPanel weights(g, panel, next);
    for (int64_t pair = 0; pair < places.pairs; pair += places.stretch) {
      const int64_t pairs = places.length(pair);
      const CompactStretch stretch = weights.stretch(pair, pairs);
      const int64_t rows = blocks.first(1);
      const CompactBlocks& of_first = kCompactBlocks[size_t(rows - 1)];
      (blocks.count == 1 ? of_first.only : of_first.first)(x + places.at(pair, 0), stretch, pair == 0, sums, tiles);
      for (int64_t block = 1; block < blocks.count; ++block) {
        const int64_t first = blocks.first(block), own = blocks.first(block + 1) - first;
        kCompactBlocks[size_t(own - 1)].other(x + places.at(pair, first), pairs, tiles, pair == 0,
                                              sums + first * kPanel);
      }
    }
  }
};

bool is_unpacked_first(int64_t rows) { return rows > kCompactRows && core() == Core::kZen5; }

// So many rows over stretches that are unpacked first.
struct UnpackedMicro {
  static constexpr bool kExpands = true;
  explicit UnpackedMicro(const GemmArgs&) {}
  // next: the panel that follows
  void multiply(const GemmArgs& g, int64_t row_begin, int64_t row_end, const char* panel, const char* next,
                float* sums) const {
    const PairedRows<kCompactStretch> places(g.rows, g.k, row_begin);
    const RowBlocks blocks(row_end - row_begin);
    const CompactPlaces packed = CompactPlaces::of(panel, g.k);
    Expander weights(panel, g.k);
    alignas(64) char tiles[kCompactStretch * kPanel * 4];
    for (int64_t pair = 0; pair < places.pairs; pair += places.stretch) {
      const int64_t end = pair + places.length(pair);
      for (int64_t step = pair / 16; step * 16 < end; ++step)
        weights.expand(step, tiles + (step - pair / 16) * kExpandedStep);
      const char* ahead = end < places.pairs ? panel + packed.begin + end / 16 * packed.step : next;
      Bf16Micro::multiply_blocks(g, places, blocks, pair, tiles, ahead, sums);
    }
  }
};

void compact_rows(void* prepared, const void* x, int32_t dtype, int64_t rows, int64_t k, int64_t begin, int64_t end,
                  const int32_t* order) {
  if (is_unpacked_first(rows))
    bf16_rows<kCompactStretch>(prepared, x, dtype, rows, k, begin, end, order);
  else
    bf16_rows<kCompactStretch, kCompactRows>(prepared, x, dtype, rows, k, begin, end, order);
}

void run_compact(const GemmArgs& g, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end) {
  if (is_unpacked_first(g.rows))
    run_streamed<UnpackedMicro>(g, row_begin, row_end, panel_begin, panel_end);
  else
    run_streamed<CompactMicro>(g, row_begin, row_end, panel_begin, panel_end);
}

Gemm compact_gemm() { return Gemm{bf16_rows_bytes, compact_rows, run_compact}; }

}  // namespace
}  // namespace qr
