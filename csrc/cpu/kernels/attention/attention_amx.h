// Attention over a bf16 cache by AMX tiles, decode and prefill alike: a decode step's few rows make short tiles.
#pragma once

#include "attention.h"
#include "../gemm/gemm_amx.h"

namespace qr {
namespace {

struct AmxMath {
  using Cache = Bf16;
  using Weight = Bf16;
  static constexpr int64_t kGroups = 1;
  static constexpr bool kShortWeights = true;

  int64_t head, wide, padded;
  int64_t dims;   // of one tile of keys: 32, or the largest power of two that divides the head size
  int64_t steps;  // tiles in a head
  int64_t depth;  // slots of one tile of values: 32, or 16 where pages are not multiples of 32
  TileConfig for_scores, for_values;

  AmxMath(const AttentionArgs& args, const Workspace& w)
      : head(args.layout.head_size), wide(padded_head(args.layout)), padded(padded_slots(args.layout)),
        dims(head % 32 == 0 ? 32 : head & -head), steps(head / dims), depth(padded % 32 == 0 ? 32 : 16) {
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

  // Queries as tiles [row / 16][step][16][32].
  template <class QueryAt>
  void take_queries(const AttentionArgs& args, const Workspace& w, const QueryAt& query_at) const {
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
  }

  static int64_t own_bytes(const Workspace&, int64_t) { return 0; }

  // Scores need no configuration of their own where tiles of keys and of values are of one depth.
  void begin_scores() const {
    if (depth != dims) for_scores.use();
  }
  void complete_scores(const Workspace&, int64_t, int64_t) const {}
  void take_weights(const Workspace&, int64_t, int64_t) const {}
  void begin_values() const {
    if (depth != dims) for_values.use();
  }

  // `next`: the page of keys after this one. Few rows wait for memory and fetch what they can.
  void scores(const Workspace& w, int64_t page, int64_t, const void* next, const void* const* values) const {
    const auto* keys = static_cast<const Bf16*>(w.keys[page]);
    if (w.row_capacity > 16)
      score_tiles<2>(w, page, keys, nullptr, nullptr);
    else
      score_tiles<1>(w, page, keys, static_cast<const Bf16*>(next),
                     values == nullptr ? nullptr : static_cast<const Bf16*>(values[page]));
  }

  // Few rows: page by page, so that each page is read once from end to end; reloading short sums costs little.
  // Many rows: all pages for some columns at a time, so that the sums stay in tiles. Same bits.
  QR_INLINE bool by_page(const Workspace& w) { return w.row_capacity == 16 && w.rows <= 4; }
  template <class Prepare>
  void weighted_values(const Workspace& w, int64_t pages, const Prepare& prepare) const {
    const int64_t pass = by_page(w) ? 1 : pages;
    for (int64_t first = 0; first < pages; first += pass) {
      const int64_t last = first + pass < pages ? first + pass : pages;
      for (int64_t page = first; page < last; ++page) prepare(page);
      memory_barrier();
      if (w.row_capacity > 16) {
        for (int64_t d = 0; d < wide; d += 32) value_tiles<2, 2>(w, first, last, d);
      } else {
        int64_t d = 0;
        const auto* later = pass == 1 ? static_cast<const Bf16*>(w.later[first]) : nullptr;
        for (; d + 64 <= wide; d += 64) value_tiles<1, 4>(w, first, last, d, later);
        if (d < wide) value_tiles<1, 2>(w, first, last, d);
      }
    }
    memory_barrier();
  }

 private:
  // Rows tiles of rows times all slots of a page.
  template <int Rows>
  void score_tiles(const Workspace& w, int64_t page, const Bf16* keys, const Bf16* next, const Bf16* values) const {
    memory_barrier();
    const char* query = static_cast<const char*>(w.query);
    const int64_t tile = dims * 16, group = head * 16;
    for (int64_t slot = 0; slot < padded; slot += 32) {
      const bool two = slot + 16 < padded;
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int64_t s = 0; s < steps; ++s) {
        if (Rows == 1 && values != nullptr) {
          const int64_t ahead = slot * head + s * 2 * tile;
          for (int64_t i = ahead; i < ahead + (two ? 2 : 1) * tile; i += 32) {
            prefetch_to_l2(values + i);
            if (next != nullptr) prefetch(next + i);
          }
        }
        const Bf16* key = keys + slot * head + s * tile;
        _tile_loadd(4, query + s * kTileBytes, 64);
        _tile_loadd(6, key, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (two) {
          _tile_loadd(7, key + group, 64);
          _tile_dpbf16ps(1, 4, 7);
        }
        if (Rows == 2) {
          _tile_loadd(5, query + (steps + s) * kTileBytes, 64);
          _tile_dpbf16ps(2, 5, 6);
          if (two) _tile_dpbf16ps(3, 5, 7);
        }
      }
      float* out = w.scores + page * padded + slot;
      _tile_stored(0, out, w.columns * 4);
      if (two) _tile_stored(1, out + 16, w.columns * 4);
      if (Rows == 2) {
        _tile_stored(2, out + 16 * w.columns, w.columns * 4);
        if (two) _tile_stored(3, out + 16 * w.columns + 16, w.columns * 4);
      }
    }
    memory_barrier();
  }

  // Rows tiles of rows times Columns tiles of dimensions from d on, over pages [first, last). Between the tiles of the
  // first page the same share of `later` is fetched: all at once, requests would hold up the tiles.
  template <int Rows, int Columns>
  void value_tiles(const Workspace& w, int64_t first, int64_t last, int64_t d, const Bf16* later = nullptr) const {
    static_assert(Rows == 1 || Columns == 2, "four sums");
    const int64_t weight_stride = w.columns * 2, value_stride = head * 4, out_stride = wide * 4;
    float* out = w.partial + d;
    float* rest = Rows == 2 ? out + 16 * wide : out + 32;
    if (first == 0) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    } else {
      _tile_loadd(0, out, out_stride);
      _tile_loadd(1, out + 16, out_stride);
      if (Rows * Columns == 4) _tile_loadd(2, rest, out_stride);
      if (Rows * Columns == 4) _tile_loadd(3, rest + 16, out_stride);
    }
    for (int64_t page = first; page < last; ++page)
      for (int64_t slot = 0; slot < padded; slot += depth) {
        const Bf16* weights = static_cast<const Bf16*>(w.weights) + page * padded + slot;
        const Bf16* values = static_cast<const Bf16*>(w.values[page]) + slot * head + d * 2;
        const auto fetch = [&](int64_t quarter) __attribute__((always_inline)) {
          if (Columns < 4 || later == nullptr) return;
          memory_barrier();
          const Bf16* lines = later + d * padded + (slot * 2 + quarter * depth / 2) * 32;
          for (int64_t line = 0; line < depth / 2; ++line) prefetch_to_l2(lines + line * 32);
          memory_barrier();
        };
        _tile_loadd(4, weights, weight_stride);
        fetch(0);
        _tile_loadd(6, values, value_stride);
        _tile_dpbf16ps(0, 4, 6);
        fetch(1);
        _tile_loadd(7, values + 32, value_stride);
        _tile_dpbf16ps(1, 4, 7);
        if (Rows == 2) {
          _tile_loadd(5, weights + 16 * w.columns, weight_stride);
          _tile_dpbf16ps(2, 5, 6);
          _tile_dpbf16ps(3, 5, 7);
        } else if (Columns == 4) {
          fetch(2);
          _tile_loadd(6, values + 64, value_stride);
          _tile_dpbf16ps(2, 4, 6);
          fetch(3);
          _tile_loadd(7, values + 96, value_stride);
          _tile_dpbf16ps(3, 4, 7);
        }
      }
    _tile_stored(0, out, out_stride);
    _tile_stored(1, out + 16, out_stride);
    if (Rows * Columns == 4) _tile_stored(2, rest, out_stride);
    if (Rows * Columns == 4) _tile_stored(3, rest + 16, out_stride);
  }
};

}  // namespace
}  // namespace qr
