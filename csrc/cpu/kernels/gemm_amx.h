// bfloat16 times bfloat16 by AMX tiles: 16 rows x 32 k times 32 k x 16 columns per instruction.
//
// Up to 16 rows: two accumulators, one per half panel, and the weight streams through once with non-temporal tile
// loads. One row costs what sixteen cost, and two chains of 52 cycles still consume 100 GB/s a core, three times what
// memory gives. More rows: 2 x 2 accumulators, and K in blocks so that half a panel's block stays in L1 while the rows
// pass by.
#pragma once

#include "gemm.h"

namespace qr {
namespace {

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
  void set(int tile, int num_rows, int num_bytes) {
    rows[tile] = uint8_t(num_rows);
    bytes[tile] = uint16_t(num_bytes);
  }
  void use() const {
    // gcc 12 drops the stores above without the barrier, and the load faults
    asm volatile("" ::"r"(this) : "memory");
    _tile_loadconfig(this);
  }
};

// Tile loads are invisible to the compiler's view of memory: order them after what was stored before.
QR_INLINE void memory_barrier() { asm volatile("" ::: "memory"); }

constexpr int64_t kTileBytes = 1024;
constexpr int64_t kTilePrefetch = 8192;  // ahead of the stream: 4-8 KiB measured best
constexpr int64_t kDepthBlock = 16;      // k steps of 32 in a block: 32 KiB of panel in the 48 KiB L1

// x as tiles [rows/16][K/32][16][32], zero where rows or k end.
int64_t tile_rows_bytes(int64_t rows, int64_t k, int32_t) { return round_up(rows, 32) * round_up(k, kDepth) * 2; }

void tile_rows(void* prepared, const void* x, int32_t, int64_t rows, int64_t k, int64_t begin, int64_t end) {
  const int64_t steps = divide_up(k, kDepth), whole = k / kDepth;
  const int64_t padded_end = rows <= 16 ? end : end == rows ? round_up(rows, 32) : end;
  for (int64_t row = begin; row < padded_end; ++row) {
    char* out = static_cast<char*>(prepared) + (row / 16) * steps * kTileBytes + (row % 16) * 64;
    if (row >= rows) {
      for (int64_t s = 0; s < steps; ++s) _mm512_storeu_si512(out + s * kTileBytes, _mm512_setzero_si512());
      continue;
    }
    const auto* in = static_cast<const uint16_t*>(x) + row * k;
    for (int64_t s = 0; s < whole; ++s) _mm512_storeu_si512(out + s * kTileBytes, _mm512_loadu_si512(in + s * kDepth));
    if (whole != steps) {
      __mmask32 rest = (1u << (k - whole * kDepth)) - 1;
      _mm512_storeu_si512(out + whole * kTileBytes, _mm512_maskz_loadu_epi16(rest, in + whole * kDepth));
    }
  }
}

struct AmxMicro {
  int64_t steps;

  explicit AmxMicro(const GemmArgs& g) : steps(divide_up(g.k, kDepth)) {
    const int rows = g.rows < 16 ? int(g.rows) : 16;
    TileConfig config;
    for (int tile = 0; tile < 6; ++tile) config.set(tile, rows, 64);  // 0-3 sums, 4-5 x
    for (int tile = 6; tile < 8; ++tile) config.set(tile, 16, 64);    // weights
    config.use();
  }
  ~AmxMicro() { _tile_release(); }  // idle tiles would be saved at every context switch
  AmxMicro(const AmxMicro&) = delete;
  AmxMicro& operator=(const AmxMicro&) = delete;

  void multiply(const GemmArgs& g, int64_t row_begin, int64_t row_end, const char* panel, const char* next,
                float* sums) const {
    memory_barrier();
    const char* x = static_cast<const char*>(g.x) + (row_begin / 16) * steps * kTileBytes;
    if (row_end - row_begin <= 16)
      stream(x, panel, next, sums);
    else
      block(x, row_end - row_begin, panel, next, sums);
    memory_barrier();
  }

  // One tile of rows; the panel is read once.
  void stream(const char* x, const char* panel, const char* next, float* sums) const {
    _tile_zero(0);
    _tile_zero(1);
    const int64_t bytes = steps * 2 * kTileBytes;
    for (int64_t s = 0; s < steps; ++s) {
      const char* w = panel + s * 2 * kTileBytes;
      const int64_t ahead = s * 2 * kTileBytes + kTilePrefetch;
      const char* later = ahead < bytes ? panel + ahead : next + (ahead - bytes);
      for (int line = 0; line < 32; ++line) prefetch(later + line * 64);
      _tile_loadd(4, x + s * kTileBytes, 64);
      _tile_stream_loadd(6, w, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_stream_loadd(7, w + kTileBytes, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, sums, kPanel * 4);
    _tile_stored(1, sums + 16, kPanel * 4);
  }

  // Pairs of row tiles, K in blocks. While the rows pass, the next block of the weight is prefetched.
  void block(const char* x, int64_t rows, const char* panel, const char* next, float* sums) const {
    const int64_t pairs = divide_up(rows, 32);
    const int64_t depth = pairs == 1 ? steps : kDepthBlock;
    const int64_t lines_each = divide_up(32, pairs);  // of the 32 lines of a k step of the next block
    for (int64_t begin = 0; begin < steps; begin += depth) {
      const int64_t end = begin + depth < steps ? begin + depth : steps;
      for (int64_t pair = 0; pair < pairs; ++pair) {
        float* c = sums + pair * 32 * kPanel;
        const char* x0 = x + pair * 2 * steps * kTileBytes;
        const char* x1 = x0 + steps * kTileBytes;
        if (begin == 0) {
          _tile_zero(0);
          _tile_zero(1);
          _tile_zero(2);
          _tile_zero(3);
        } else {
          _tile_loadd(0, c, kPanel * 4);
          _tile_loadd(1, c + 16, kPanel * 4);
          _tile_loadd(2, c + 16 * kPanel, kPanel * 4);
          _tile_loadd(3, c + 16 * kPanel + 16, kPanel * 4);
        }
        for (int64_t s = begin; s < end; ++s) {
          const char* w = panel + s * 2 * kTileBytes;
          if (pairs == 1) {
            const char* later = s + 4 < steps ? w + kTilePrefetch : next + (s + 4 - steps) * 2 * kTileBytes;
            for (int line = 0; line < 32; ++line) prefetch(later + line * 64);
          } else {
            const char* later = s + depth < steps ? w + depth * 2 * kTileBytes
                                                  : next + (s % depth) * 2 * kTileBytes;
            for (int64_t line = pair * lines_each; line < (pair + 1) * lines_each && line < 32; ++line)
              _mm_prefetch(later + line * 64, _MM_HINT_T1);
          }
          _tile_loadd(4, x0 + s * kTileBytes, 64);
          _tile_loadd(6, w, 64);
          _tile_dpbf16ps(0, 4, 6);
          _tile_loadd(7, w + kTileBytes, 64);
          _tile_dpbf16ps(1, 4, 7);
          _tile_loadd(5, x1 + s * kTileBytes, 64);
          _tile_dpbf16ps(2, 5, 6);
          _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, c, kPanel * 4);
        _tile_stored(1, c + 16, kPanel * 4);
        _tile_stored(2, c + 16 * kPanel, kPanel * 4);
        _tile_stored(3, c + 16 * kPanel + 16, kPanel * 4);
      }
    }
  }
};

Gemm amx_gemm() { return Gemm{tile_rows_bytes, tile_rows, run_gemm<AmxMicro>}; }

}  // namespace
}  // namespace qr
