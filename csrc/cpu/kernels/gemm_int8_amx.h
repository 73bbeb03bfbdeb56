// int8 times int8 by AMX tiles: 16 rows x 64 k times 64 k x 16 columns per instruction.
#pragma once

#include "gemm_amx.h"
#include "gemm_int8.h"

namespace qr {
namespace {

struct AmxInt8Micro {
  int64_t steps;

  explicit AmxInt8Micro(const GemmArgs& g) : steps(divide_up(g.k, kInt8Depth)) {
    const int rows = g.rows < 16 ? int(g.rows) : 16;
    TileConfig config;
    for (int tile = 0; tile < 6; ++tile) config.set(tile, rows, 64);
    for (int tile = 6; tile < 8; ++tile) config.set(tile, 16, 64);
    config.use();
  }
  ~AmxInt8Micro() { _tile_release(); }
  AmxInt8Micro(const AmxInt8Micro&) = delete;
  AmxInt8Micro& operator=(const AmxInt8Micro&) = delete;

  void multiply(const GemmArgs& g, int64_t row_begin, int64_t rows, const char* panel, int32_t* sums) const {
    memory_barrier();
    const char* x = static_cast<const char*>(g.x) + int8_values_at(g.rows) + row_begin / 16 * steps * kTileBytes;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t s = 0; s < steps; ++s) {
      const char* w = panel + s * 2 * kTileBytes;
      // past the end of the panel lies the next one
      for (int line = 0; line < 32; ++line) prefetch(w + kTilePrefetch + line * 64);
      _tile_loadd(4, x + s * kTileBytes, 64);
      _tile_loadd(6, w, 64);
      _tile_dpbssd(0, 4, 6);
      _tile_loadd(7, w + kTileBytes, 64);
      _tile_dpbssd(1, 4, 7);
      if (rows > 16) {
        _tile_loadd(5, x + (steps + s) * kTileBytes, 64);
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
};

}  // namespace
}  // namespace qr
