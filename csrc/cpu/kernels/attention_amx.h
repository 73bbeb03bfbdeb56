// Attention over a bf16 cache by AMX tiles, decode and prefill alike: a decode step's few rows make short tiles.
#pragma once

#include "attention.h"
#include "gemm_amx.h"

namespace qr {
namespace {

struct AmxMath {
  using Cache = Bf16;
  using Weight = Bf16;

  int64_t head, wide, padded;
  int64_t dims;   // of one tile of keys: 32, or the largest power of two that divides the head size
  int64_t steps;  // tiles in a head
  int64_t depth;  // slots of one tile of values: 32, or 16 where pages are not multiples of 32
  TileConfig for_scores, for_values;

  template <class QueryAt>
  AmxMath(const AttentionArgs& args, const Workspace& w, const QueryAt& query_at)
      : head(args.layout.head_size), wide(padded_head(args.layout)), padded(padded_slots(args.layout)),
        dims(head % 32 == 0 ? 32 : head & -head), steps(head / dims), depth(padded % 32 == 0 ? 32 : 16) {
    // queries as tiles [row / 16][step][16][32]
    const __mmask32 mask = dims == 32 ? ~__mmask32(0) : (__mmask32(1) << dims) - 1;
    for (int64_t row = 0; row < w.row_capacity; ++row) {
      char* out = static_cast<char*>(w.query) + row / 16 * steps * kTileBytes + row % 16 * 64;
      const auto* in = row < w.rows ? static_cast<const uint16_t*>(args.query) + query_at(row) : nullptr;
      for (int64_t s = 0; s < steps; ++s) {
        const __m512i part =
            in == nullptr ? _mm512_setzero_si512() : _mm512_maskz_loadu_epi16(mask, in + s * dims);
        _mm512_storeu_si512(out + s * kTileBytes, part);
      }
    }
    const int rows = w.rows < 16 ? int(w.rows) : 16;
    for (int tile = 0; tile < 6; ++tile) {  // 0-3 sums, 4-5 queries or weights
      for_scores.set(tile, rows, tile < 4 ? 64 : int(dims) * 2);
      for_values.set(tile, rows, tile < 4 ? 64 : int(depth) * 2);
    }
    for (int tile = 6; tile < 8; ++tile) {  // keys or values
      for_scores.set(tile, int(dims) / 2, 64);
      for_values.set(tile, int(depth) / 2, 64);
    }
    for_scores.use();
  }
  ~AmxMath() { _tile_release(); }
  AmxMath(const AmxMath&) = delete;
  AmxMath& operator=(const AmxMath&) = delete;

  bool reconfigure() const { return depth != dims; }

  void scores(const Workspace& w, int64_t pages) const {
    memory_barrier();
    if (reconfigure()) for_scores.use();
    const char* query = static_cast<const char*>(w.query);
    const int64_t query_bytes = steps * kTileBytes, tile_bytes = dims * 32, group_bytes = head * 32;
    const int64_t stride = w.columns * 4;
    for (int64_t page = 0; page < pages; ++page) {
      const char* values = static_cast<const char*>(w.values[page]);
      const char* later = static_cast<const char*>(w.keys[page + 1 < pages ? page + 1 : page]);
      for (int64_t slot = 0; slot < padded; slot += 32) {
        const char* keys = static_cast<const char*>(w.keys[page]) + slot * head * 2;
        float* out = w.scores + page * padded + slot;
        const bool two = slot + 16 < padded;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t s = 0; s < steps; ++s) {
          // Few rows wait for memory: the values of this page are read after all keys; the next page's keys at once.
          const int64_t ahead = slot * head * 2 + s * 2 * tile_bytes;
          for (int64_t byte = 0; w.rows <= 16 && byte < (two ? 2 : 1) * tile_bytes; byte += 64) {
            _mm_prefetch(values + ahead + byte, _MM_HINT_T1);
            prefetch(later + ahead + byte);
          }
          _tile_loadd(4, query + s * kTileBytes, 64);
          _tile_loadd(6, keys + s * tile_bytes, 64);
          _tile_dpbf16ps(0, 4, 6);
          if (two) {
            _tile_loadd(7, keys + group_bytes + s * tile_bytes, 64);
            _tile_dpbf16ps(1, 4, 7);
          }
          if (w.rows > 16) {
            _tile_loadd(5, query + query_bytes + s * kTileBytes, 64);
            _tile_dpbf16ps(2, 5, 6);
            if (two) _tile_dpbf16ps(3, 5, 7);
          }
        }
        _tile_stored(0, out, stride);
        if (two) _tile_stored(1, out + 16, stride);
        if (w.rows > 16) {
          _tile_stored(2, out + 16 * w.columns, stride);
          if (two) _tile_stored(3, out + 16 * w.columns + 16, stride);
        }
      }
    }
    memory_barrier();
  }

  void weighted_values(const Workspace& w, int64_t pages) const {
    memory_barrier();
    if (reconfigure()) for_values.use();
    // Few rows: page by page, so that each page is read once from end to end; reloading short sums costs little.
    // Many rows: all pages for some columns at a time, so that the sums stay in tiles. Same bits.
    const int64_t pass = w.rows <= 4 ? 1 : pages;
    for (int64_t first = 0; first < pages; first += pass) {
      const int64_t last = first + pass < pages ? first + pass : pages;
      if (w.rows > 16) {
        for (int64_t d = 0; d < wide; d += 32) two_by_two(w, first, last, d);
      } else {
        int64_t d = 0;
        for (; d + 64 <= wide; d += 64) one_by_four(w, first, last, d);
        if (d < wide) one_by_two(w, first, last, d);
      }
    }
    memory_barrier();
  }

  QR_INLINE const char* weights_at(const Workspace& w, int64_t row, int64_t column) {
    return reinterpret_cast<const char*>(static_cast<const Bf16*>(w.weights) + row * w.columns + column);
  }

  void one_by_four(const Workspace& w, int64_t first, int64_t last, int64_t d) const {
    float* out = w.partial + d;
    const int64_t out_stride = wide * 4, value_stride = head * 4, weight_stride = w.columns * 2;
    if (first == 0) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    } else {
      _tile_loadd(0, out, out_stride);
      _tile_loadd(1, out + 16, out_stride);
      _tile_loadd(2, out + 32, out_stride);
      _tile_loadd(3, out + 48, out_stride);
    }
    for (int64_t page = first; page < last; ++page)
      for (int64_t slot = 0; slot < padded; slot += depth) {
        const char* values = static_cast<const char*>(w.values[page]) + (slot * head + d * 2) * 2;
        _tile_loadd(4, weights_at(w, 0, page * padded + slot), weight_stride);
        _tile_loadd(6, values, value_stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, values + 64, value_stride);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(6, values + 128, value_stride);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(7, values + 192, value_stride);
        _tile_dpbf16ps(3, 4, 7);
      }
    _tile_stored(0, out, out_stride);
    _tile_stored(1, out + 16, out_stride);
    _tile_stored(2, out + 32, out_stride);
    _tile_stored(3, out + 48, out_stride);
  }

  void one_by_two(const Workspace& w, int64_t first, int64_t last, int64_t d) const {
    float* out = w.partial + d;
    const int64_t out_stride = wide * 4, value_stride = head * 4, weight_stride = w.columns * 2;
    if (first == 0) {
      _tile_zero(0);
      _tile_zero(1);
    } else {
      _tile_loadd(0, out, out_stride);
      _tile_loadd(1, out + 16, out_stride);
    }
    for (int64_t page = first; page < last; ++page)
      for (int64_t slot = 0; slot < padded; slot += depth) {
        const char* values = static_cast<const char*>(w.values[page]) + (slot * head + d * 2) * 2;
        _tile_loadd(4, weights_at(w, 0, page * padded + slot), weight_stride);
        _tile_loadd(6, values, value_stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, values + 64, value_stride);
        _tile_dpbf16ps(1, 4, 7);
      }
    _tile_stored(0, out, out_stride);
    _tile_stored(1, out + 16, out_stride);
  }

  void two_by_two(const Workspace& w, int64_t first, int64_t last, int64_t d) const {
    float* out = w.partial + d;
    const int64_t out_stride = wide * 4, value_stride = head * 4, weight_stride = w.columns * 2;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t page = first; page < last; ++page)
      for (int64_t slot = 0; slot < padded; slot += depth) {
        const char* values = static_cast<const char*>(w.values[page]) + (slot * head + d * 2) * 2;
        _tile_loadd(4, weights_at(w, 0, page * padded + slot), weight_stride);
        _tile_loadd(6, values, value_stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, values + 64, value_stride);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, weights_at(w, 16, page * padded + slot), weight_stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    _tile_stored(0, out, out_stride);
    _tile_stored(1, out + 16, out_stride);
    _tile_stored(2, out + 16 * wide, out_stride);
    _tile_stored(3, out + 16 * wide + 16, out_stride);
  }
};

}  // namespace
}  // namespace qr
