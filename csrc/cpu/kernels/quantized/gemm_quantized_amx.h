// int8 times int8 by AMX tiles: 16 rows x 64 k times 64 k x 16 columns per instruction, fewer k where groups are smaller
// (which takes as long). Weights of fewer bits are unpacked into tiles in L1, one part of K ahead of the products.
#pragma once

#include "../gemm/gemm_amx.h"
#include "gemm_quantized.h"

namespace qr {
namespace {

template <class Format>
struct AmxQuantizedMicro : QuantizedMicro<Format> {
  using QuantizedMicro<Format>::x;
  static constexpr bool kUnpacked = Format::kHalfBytes != kTileBytes;  // others are tiles as they are
  static constexpr int64_t kGroup = Format::kGroup, kDepth = kGroup < 64 ? kGroup : 64;  // k of one instruction
  static constexpr int64_t kStepBytes = 2 * Format::kHalfBytes;                          // packed, of 64 k
  static constexpr int64_t kFewRows = Format::kGrouped ? 8 : 4;
  static constexpr int kTogether = kGroup < 64 ? 4 : 1;  // groups that are weighed together
  static constexpr int64_t kShortPart = 2, kLongPart = 8;  // steps of 64 k unpacked at a time
  alignas(64) mutable char buffers[2][kUnpacked ? kLongPart * 2 * kTileBytes : 64];

  explicit AmxQuantizedMicro(const GemmArgs& g) : QuantizedMicro<Format>(g) {
    TileConfig config;
    for (int tile = 0; tile < 4; ++tile) config.set(tile, int(x.height), 64);           // sums
    for (int tile = 4; tile < 6; ++tile) config.set(tile, int(x.height), int(kDepth));  // x
    for (int tile = 6; tile < 8; ++tile) config.set(tile, int(kDepth / 4), 64);         // weights
    config.use();
  }
  ~AmxQuantizedMicro() { _tile_release(); }
  AmxQuantizedMicro(const AmxQuantizedMicro&) = delete;
  AmxQuantizedMicro& operator=(const AmxQuantizedMicro&) = delete;

  void multiply(const GemmArgs& g, int64_t row_begin, int64_t row_end, const char* packed, float* sums) const {
    const Format format(g);
    const int64_t panel = this->panel_of(g, packed), rows = row_end - row_begin, blocks = divide_up(rows, 32);
    const int64_t part = blocks > 1 ? kLongPart : kShortPart, parts = divide_up(x.steps, part);
    std::memset(sums, 0, size_t(rows) * kPanel * 4);
    const char* tiles = unpacked(format, packed, 0, part);
    for (int64_t index = 0; index < parts; ++index) {
      const int64_t begin = index * part, end = begin + part < x.steps ? begin + part : x.steps;
      const char* following = index + 1 < parts ? unpacked(format, packed, index + 1, part) : nullptr;
      // what will be read next is fetched meanwhile, each block of rows its share
      const int64_t ahead = (int(kUnpacked) + int(blocks > 1)) * part * kStepBytes;
      const int64_t share = divide_up(kStepBytes, blocks);
      const char* later = packed + begin * kStepBytes + ahead;
      for (int64_t block = 0; block < blocks; ++block) {
        const int64_t row = row_begin + block * 32;
        multiply_part(g, panel, row, row_end - row < 32 ? row_end - row : 32, tiles, begin, end,
                      later + block * share, share, sums + block * 32 * kPanel);
      }
      tiles = following;
    }
    scale_columns<Format>(g, panel, rows, sums);
  }

  // Tiles of the part `index`.
  const char* unpacked(const Format& format, const char* packed, int64_t index, int64_t part) const {
    const char* in = packed + index * part * kStepBytes;
    if constexpr (!kUnpacked) {
      return in;
    } else {
      const int64_t left = x.steps - index * part, halves = 2 * (left < part ? left : part);
      char* out = buffers[index % 2];
      for (int64_t half = 0; half < halves; ++half)
        unpack_half(format, in + half * Format::kHalfBytes, out + half * kTileBytes);
      return out;
    }
  }

  // 64 k of 16 columns.
  QR_INLINE void unpack_half(const Format& format, const char* half, char* tile) {
    constexpr int kRun = Format::kRowsTogether;
    each<8 / kRun>([&](auto run) __attribute__((always_inline)) {
      each<kRun>([&](auto row) __attribute__((always_inline)) {
        vi first, second;
        format.signed_row(half, run * kRun, row, first, second);
        char* line = tile + (run * kRun + row) * 128;
        _mm512_store_si512(line, first);
        _mm512_store_si512(line + 64, second);
      });
    });
  }

  // Up to 32 rows over k steps [begin, end).
  void multiply_part(const GemmArgs& g, int64_t panel, int64_t row, int64_t rows, const char* tiles, int64_t begin,
                     int64_t end, const char* later, int64_t share, float* sums) const {
    alignas(64) int32_t integers[kTogether][32 * kPanel];
    const int64_t last_group = end == x.steps ? x.groups : end * 64 / kGroup;
    for (int64_t group = begin * 64 / kGroup; group < last_group; group += kTogether) {
      const int64_t count = last_group - group < kTogether ? last_group - group : kTogether;
      for (int64_t i = 0; i < count; ++i) {
        const int64_t k = (group + i) * kGroup, stop = k + kGroup < end * 64 ? k + kGroup : end * 64;
        multiply_group(x.line(row, begin), rows, tiles, k - begin * 64, stop - begin * 64, later, share, integers[i]);
      }
      if (count == kTogether)
        weigh<kTogether>(g, panel, row, rows, group, integers, sums);
      else
        for (int64_t i = 0; i < count; ++i) weigh<1>(g, panel, row, rows, group + i, integers + i, sums);
    }
  }

  // The integer sums of one group; k is counted from where `values`, `tiles` and `later` begin.
  void multiply_group(const int8_t* values, int64_t rows, const char* tiles, int64_t k, int64_t last,
                      const char* later, int64_t share, int32_t* sums) const {
    const int64_t step_bytes = x.step_bytes(), second = x.steps * step_bytes;  // from one tile of rows to the next
    memory_barrier();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (; k < last; k += kDepth) {
      const int64_t step = int64_t(uint64_t(k) / 64), in_step = int64_t(uint64_t(k) % 64);
      const int8_t* own = values + step * step_bytes + in_step;
      const char* w = tiles + step * 2 * kTileBytes + in_step * 16;
      if (in_step == 0)
        for (int64_t line = 0; line < share; line += 64) prefetch_stream(later + step * kStepBytes + line);
      _tile_loadd(4, own, 64);
      _tile_loadd(6, w, 64);
      _tile_dpbssd(0, 4, 6);
      _tile_loadd(7, w + kTileBytes, 64);
      _tile_dpbssd(1, 4, 7);
      if (rows > 16) {
        _tile_loadd(5, own + second, 64);
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
      }
    }
    _tile_stored(0, sums, kPanel * 4);
    _tile_stored(1, sums + 16, kPanel * 4);
    if (rows > 16) {
      _tile_stored(2, sums + 16 * kPanel, kPanel * 4);
      _tile_stored(3, sums + 16 * kPanel + 16, kPanel * 4);
    }
    memory_barrier();
  }

  // What neighbouring groups add to the totals of a block. It waits for reads and writes of lines, so a total
  // is read and written once for all of them, and a row's scales are read once for its columns.
  template <int kCount>
  void weigh(const GemmArgs& g, int64_t panel, int64_t row, int64_t rows, int64_t group,
             const int32_t (*integers)[32 * kPanel], float* sums) const {
    const int64_t groups = x.groups;
    GroupScales<Format> scales[kCount];
    each<kCount>([&](auto i) __attribute__((always_inline)) {
      scales[i] = GroupScales<Format>::of(g, panel, groups, group + i);
    });
    const RowGroup* of = x.row_groups + row * groups + group;
    scales[0].by_kind([&](auto kind) __attribute__((always_inline)) {
      for (int64_t at = 0; at < rows * kPanel; at += kPanel, of += groups) {
        vf total[kVectors] = {load(sums + at), load(sums + at + W)};
        each<kCount>([&](auto i) __attribute__((always_inline)) {
          each<kVectors>([&](auto v) __attribute__((always_inline)) {
            const vi products = _mm512_load_si512(integers[i] + at + v * W);
            total[v] = scales[i].add(kind, total[v], products, of[i], v);
          });
        });
        store(sums + at, total[0]);
        store(sums + at + W, total[1]);
      }
    });
  }
};

}  // namespace
}  // namespace qr
