// bfloat16 times bfloat16 by AMX tiles: 16 rows x 32 k times 32 k x 16 columns per instruction.
//
// Up to 16 rows: two accumulators, one per half panel, and the weight streams through once with non-temporal tile
// loads. One row costs what sixteen cost, and two chains of 52 cycles still consume 100 GB/s a core, three times what
// memory gives. More rows: 2 x 2 accumulators, and blocking for the caches.
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
constexpr int64_t kTilePrefetch = 1024;  // ahead of the stream: 17 GB/s a core against 14 at 8 KiB, which crowds L1
constexpr int64_t kInnerSteps = 8, kOuterSteps = 32;  // k steps of 32

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

  // Up to 32 rows: all of K at once.
  void multiply(const GemmArgs& g, int64_t row_begin, int64_t row_end, const char* panel, const char* next,
                float* sums) const {
    memory_barrier();
    const char* x = static_cast<const char*>(g.x) + (row_begin / 16) * steps * kTileBytes;
    if (row_end - row_begin <= 16)
      stream(x, panel, next, sums);
    else
      pair(x, panel, next, sums);
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

  // Two tiles of rows times two of weights.
  QR_INLINE void step(const char* x0, const char* x1, const char* w) {
    _tile_loadd(4, x0, 64);
    _tile_loadd(6, w, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, w + kTileBytes, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, x1, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }

  // Two tiles of rows; the panel is read once.
  void pair(const char* x, const char* panel, const char* next, float* sums) const {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const int64_t bytes = steps * 2 * kTileBytes;
    for (int64_t s = 0; s < steps; ++s) {
      const int64_t ahead = s * 2 * kTileBytes + kTilePrefetch;
      const char* later = ahead < bytes ? panel + ahead : next + (ahead - bytes);
      for (int line = 0; line < 32; ++line) prefetch(later + line * 64);
      step(x + s * kTileBytes, x + (steps + s) * kTileBytes, panel + s * 2 * kTileBytes);
    }
    store_sums(sums);
  }

  // Any number of pairs of row tiles over k steps [begin, end), continuing from `sums` unless begin is 0. While the
  // rows pass, what the panel's reader needs next is prefetched, each pair fetching its share.
  void block(const char* x, int64_t pairs, const char* panel, int64_t begin, int64_t end, const char* next,
             float* sums) const {
    const int64_t lines_each = divide_up(32, pairs);  // of the 32 lines of a k step
    for (int64_t pair = 0; pair < pairs; ++pair) {
      float* c = sums + pair * 32 * kPanel;
      const char* x0 = x + pair * 2 * steps * kTileBytes;
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
      const int64_t first = pair * lines_each < 32 ? pair * lines_each : 32;
      const int64_t last = first + lines_each < 32 ? first + lines_each : 32;
      for (int64_t s = begin; s < end; ++s) {
        const char* later = next + (s - begin) * 2 * kTileBytes;
        for (int64_t line = first; line < last; ++line) prefetch(later + line * 64);
        step(x0 + s * kTileBytes, x0 + (steps + s) * kTileBytes, panel + s * 2 * kTileBytes);
      }
      store_sums(c);
    }
  }

  QR_INLINE void store_sums(float* c) {
    _tile_stored(0, c, kPanel * 4);
    _tile_stored(1, c + 16, kPanel * 4);
    _tile_stored(2, c + 16 * kPanel, kPanel * 4);
    _tile_stored(3, c + 16 * kPanel + 16, kPanel * 4);
  }
};

// More than 32 rows. Three loops around the tiles, sized for 48 KiB of L1 and 2 MiB of L2:
//   k in parts of kOuterSteps    the rows' part of x (256 rows x 1024 x 2 bytes) stays in L2 while the panels pass
//   panels of the piece          their float32 sums stay in L2
//   k in parts of kInnerSteps    a part of the panel (16 KiB) stays in L1 while the rows (16 KiB each pair) pass
void run_amx(const GemmArgs& g, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end) {
  const int64_t pairs = divide_up(row_end - row_begin, 32), panels = panel_end - panel_begin;
  if (pairs == 1) return run_gemm<AmxMicro>(g, row_begin, row_end, panel_begin, panel_end);
  const int64_t halves = g.up_panels != 0 ? 2 : 1, panel_sums = pairs * 32 * kPanel;
  auto* sums = static_cast<float*>(scratch(0, panels * halves * panel_sums * 4));
  if (sums == nullptr) return;
  const AmxMicro micro(g);
  const char* x = static_cast<const char*>(g.x) + (row_begin / 16) * micro.steps * kTileBytes;
  memory_barrier();
  for (int64_t outer = 0; outer < micro.steps; outer += kOuterSteps) {
    const int64_t outer_end = outer + kOuterSteps < micro.steps ? outer + kOuterSteps : micro.steps;
    for (int64_t i = 0; i < panels * halves; ++i) {
      auto weight = [&](int64_t index) {
        const int64_t panel = panel_begin + index / halves + (index % halves) * g.up_panels;
        return static_cast<const char*>(g.packed) + panel * g.panel_bytes;
      };
      const char* panel = weight(i);
      for (int64_t begin = outer; begin < outer_end; begin += kInnerSteps) {
        const int64_t end = begin + kInnerSteps < outer_end ? begin + kInnerSteps : outer_end;
        const char* next = end < outer_end ? panel + end * 2 * kTileBytes
                                           : weight(i + 1 < panels * halves ? i + 1 : i) + outer * 2 * kTileBytes;
        micro.block(x, pairs, panel, begin, end, next, sums + i * panel_sums);
      }
    }
  }
  memory_barrier();
  for (int64_t panel = 0; panel < panels; ++panel) {
    const float* own = sums + panel * halves * panel_sums;
    finish(g, row_begin, row_end, panel_begin + panel, own, own + panel_sums);
  }
}

Gemm amx_gemm() { return Gemm{tile_rows_bytes, tile_rows, run_amx}; }

}  // namespace
}  // namespace qr
