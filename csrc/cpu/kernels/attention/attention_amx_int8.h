// Attention over an int8 cache by AMX tiles of integers (digits.h): pages are multiplied as they are.
#pragma once

#include "attention_amx.h"
#include "digits.h"

namespace qr {
namespace {

struct AmxInt8Math {
  using Cache = int8_t;
  using Weight = float;
  static constexpr int64_t kGroups = 1;
  static constexpr bool kShortWeights = true;

  int64_t head, wide, padded;
  int64_t dims;   // of one tile of keys: 64, or the largest power of two that divides the head size
  int64_t steps;  // tiles in a head
  int64_t depth;  // slots of one tile of values: 64, or the largest power of two that divides a page's
  int64_t low;    // rows from high digits to low ones: up to 8 rows share a tile with their low digits
  float query_scale[kQueryBlocks * kQueryRows];
  TileConfig for_scores, for_values;

  static bool shares_tile(const Workspace& w) { return w.row_capacity == 16 && w.rows <= 8; }
  // Low digits' sums of scores follow the scores. Then weights' digits, and the sums of values.
  static int64_t own_bytes(const Workspace& w, int64_t wide) { return 2 * kQueryRows * (w.columns + wide * 4); }
  static uint8_t* digits(const Workspace& w) { return reinterpret_cast<uint8_t*>(w.own); }
  static int32_t* sums(const Workspace& w) { return reinterpret_cast<int32_t*>(w.own + 2 * kQueryRows * w.columns); }

  AmxInt8Math(const AttentionArgs& args, const Workspace& w)
      : head(args.layout.head_size), wide(padded_head(args.layout)), padded(padded_slots(args.layout)),
        dims(head % 64 == 0 ? 64 : head & -head), steps(head / dims), depth(padded % 64 == 0 ? 64 : padded & -padded),
        low(shares_tile(w) ? w.rows : w.row_capacity) {
    const bool shared = shares_tile(w);
    const int rows = shared ? int(2 * w.rows) : 16;
    for (int tile = 0; tile < 4; ++tile) {  // sums
      for_scores.set(tile, rows, 64);
      for_values.set(tile, rows, 64);
    }
    for (int tile = 4; tile < 6; ++tile) {  // digits of queries, or of weights
      for_scores.set(tile, rows, int(dims));
      for_values.set(tile, rows, int(depth));
    }
    for (int tile = 6; tile < 8; ++tile) {  // keys, or values
      for_scores.set(tile, int(dims) / 4, 64);
      for_values.set(tile, int(depth) / 4, 64);
    }
    if (shared) {  // few rows do not pay for two configurations
      for_scores.set(5, rows, int(depth));
      for_scores.set(7, int(depth) / 4, 64);
    }
    for_scores.use();
  }
  ~AmxInt8Math() { _tile_release(); }
  AmxInt8Math(const AmxInt8Math&) = delete;
  AmxInt8Math& operator=(const AmxInt8Math&) = delete;

  template <class QueryAt>
  void take_queries(const AttentionArgs& args, const Workspace& w, const QueryAt& query_at) {
    for (int64_t row = 0; row < w.row_capacity; ++row) {
      const auto* in = row < w.rows ? static_cast<const Bf16*>(args.query) + query_at(row) : nullptr;
      if (in != nullptr)
        query_scale[w.first_row + row] = split(in, query_row(w, row), query_row(w, row + low));
      else if (!shares_tile(w))
        clear(query_row(w, row), query_row(w, row + low));
    }
  }

  void begin_scores() const {
    if (low > 8) for_scores.use();
  }

  // Integer sums of a page, of both digits. Few rows wait for memory, and fetch what they can.
  void scores(const Workspace& w, int64_t page, int64_t, const void* next, const void* const* values) const {
    const auto* keys = static_cast<const int8_t*>(w.keys[page]);
    memory_barrier();
    if (shares_tile(w))
      score_few(w, page, keys, static_cast<const int8_t*>(next), static_cast<const int8_t*>(values[page]));
    else
      for (int64_t row = 0; row < w.row_capacity; row += 16) score_tiles(w, page, row, keys);
    memory_barrier();
  }

  void complete_scores(const Workspace& w, int64_t row, int64_t pages) const {
    float* scores = w.scores + row * w.columns;
    join(scores, reinterpret_cast<const int32_t*>(scores), reinterpret_cast<const int32_t*>(scores + low * w.columns),
         pages * padded, query_scale[w.first_row + row]);
  }

  // Weights become digits.
  void take_weights(const Workspace& w, int64_t row, int64_t pages) {
    uint8_t* high = digits(w) + row * w.columns;
    weight_scale[row] = digits_of_weights(w.scores + row * w.columns, pages * padded, high, high + low * w.columns);
  }
  void begin_values() const {
    if (low > 8) for_values.use();
  }

  bool by_page(const Workspace&) const { return false; }
  template <class Prepare>
  void weighted_values(const Workspace& w, int64_t pages, const Prepare& prepare) const {
    for (int64_t page = 0; page < pages; ++page) prepare(page);
    memory_barrier();
    if (shares_tile(w)) {
      int64_t d = 0;
      for (; d + 64 <= wide; d += 64) weigh_few<4>(w, pages, d);
      if (d < wide) weigh_few<2>(w, pages, d);
    } else {
      for (int64_t row = 0; row < w.row_capacity; row += 16)
        for (int64_t d = 0; d < wide; d += 32) value_tiles(w, pages, row, d);
    }
    memory_barrier();
    for (int64_t row = 0; row < w.rows; ++row)
      join(w.partial + row * wide, sums(w) + row * wide, sums(w) + (row + low) * wide, wide, weight_scale[row]);
  }

 private:
  float weight_scale[kQueryRows];

  // Where a row's digits of a step of queries begin: tiles [step][rows][64].
  static char* query_row(const Workspace& w, int64_t row) { return static_cast<char*>(w.query) + row * 64; }

  void clear(char* high, char* lower) const {
    for (int64_t s = 0; s < steps; ++s) {
      std::memset(high + s * kTileBytes * 4, 0, 64);
      std::memset(lower + s * kTileBytes * 4, 0, 64);
    }
  }

  // A query's digits; gives what one of their units is worth.
  float split(const Bf16* in, char* high, char* lower) const {
    alignas(64) int8_t digit[2][kMostHead + W];
    const float unit = digits_of_query(in, head, digit[0], digit[1]);
    for (int64_t s = 0; s < steps; ++s) {
      std::memcpy(high + s * kTileBytes * 4, digit[0] + s * dims, size_t(dims));
      std::memcpy(lower + s * kTileBytes * 4, digit[1] + s * dims, size_t(dims));
    }
    return unit;
  }

  // out[i] = (256 high[i] + lower[i]) * scale; out may be high.
  static void join(float* out, const int32_t* high, const int32_t* lower, int64_t n, float scale) {
    for (int64_t i = 0; i < n; i += W) store(out + i, joined(load_integers(high + i), load_integers(lower + i), set1(scale)));
  }

  void score_few(const Workspace& w, int64_t page, const int8_t* keys, const int8_t* next,
                 const int8_t* values) const {
    const int64_t bytes = padded * (head + 4), lines = divide_up(bytes, 64 * (padded / 16) * steps);
    Fetch later(values, bytes);
    FetchTo<prefetch> soon(next, bytes);
    for (int64_t slot = 0; slot < padded; slot += 16) {
      _tile_zero(0);
      for (int64_t s = 0; s < steps; ++s) {
        soon.advance(lines);
        memory_barrier();
        _tile_loadd(4, query_row(w, 0) + s * kTileBytes * 4, 64);
        _tile_loadd(6, keys + slot * head + s * dims * 16, 64);
        _tile_dpbssd(0, 4, 6);
        memory_barrier();
        later.advance(lines);
      }
      _tile_stored(0, w.scores + page * padded + slot, w.columns * 4);
      memory_barrier();
    }
  }

  // Sixteen rows times all slots of a page: tiles 0 and 1 for their high digits, 2 and 3 for the low ones.
  void score_tiles(const Workspace& w, int64_t page, int64_t row, const int8_t* keys) const {
    for (int64_t slot = 0; slot < padded; slot += 32) {
      const bool two = slot + 16 < padded;
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int64_t s = 0; s < steps; ++s) {
        const char* query = query_row(w, row) + s * kTileBytes * 4;
        const int8_t* key = keys + slot * head + s * dims * 16;
        _tile_loadd(4, query, 64);
        _tile_loadd(6, key, 64);
        _tile_dpbssd(0, 4, 6);
        _tile_loadd(5, query + low * 64, 64);
        _tile_dpbssd(2, 5, 6);
        if (two) {
          _tile_loadd(7, key + head * 16, 64);
          _tile_dpbssd(1, 4, 7);
          _tile_dpbssd(3, 5, 7);
        }
      }
      float *out = w.scores + row * w.columns + page * padded + slot, *lower = out + low * w.columns;
      _tile_stored(0, out, w.columns * 4);
      _tile_stored(2, lower, w.columns * 4);
      if (two) _tile_stored(1, out + 16, w.columns * 4);
      if (two) _tile_stored(3, lower + 16, w.columns * 4);
    }
  }

  // Few rows over all pages, for Tiles of 16 dimensions from d on. Meanwhile a share of what follows is fetched.
  template <int Tiles>
  void weigh_few(const Workspace& w, int64_t pages, int64_t d) const {
    const int64_t bytes = padded * (head + 4), share = round_up(divide_up(bytes, divide_up(wide, 64)), 64);
    const int64_t from = d / 64 * share, to = from + share < bytes ? from + share : bytes;
    const int64_t lines = divide_up(share, 64 * Tiles * (padded / depth)), value_stride = head * 4;
    const uint8_t* weights = digits(w);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t page = 0; page < pages; ++page) {
      const auto* following = static_cast<const char*>(w.later[page]);
      Fetch later(following == nullptr ? nullptr : following + from, to - from);
      for (int64_t slot = 0; slot < padded; slot += depth, weights += depth) {
        const int8_t* values = static_cast<const int8_t*>(w.values[page]) + slot * head + d * 4;
        _tile_loadd(5, weights, w.columns);
        _tile_loadd(7, values, value_stride);
        _tile_dpbusd(0, 5, 7);
        later.advance(lines);
        _tile_loadd(7, values + 64, value_stride);
        _tile_dpbusd(1, 5, 7);
        later.advance(lines);
        if (Tiles == 2) continue;
        _tile_loadd(7, values + 128, value_stride);
        _tile_dpbusd(2, 5, 7);
        later.advance(lines);
        _tile_loadd(7, values + 192, value_stride);
        _tile_dpbusd(3, 5, 7);
        later.advance(lines);
      }
    }
    int32_t* out = sums(w) + d;
    _tile_stored(0, out, wide * 4);
    _tile_stored(1, out + 16, wide * 4);
    if (Tiles == 4) _tile_stored(2, out + 32, wide * 4);
    if (Tiles == 4) _tile_stored(3, out + 48, wide * 4);
  }

  // Sixteen rows over all pages, for 32 dimensions from d on.
  void value_tiles(const Workspace& w, int64_t pages, int64_t row, int64_t d) const {
    const int64_t stride = w.columns, value_stride = head * 4;
    const uint8_t* weights = digits(w) + row * stride;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t page = 0; page < pages; ++page)
      for (int64_t slot = 0; slot < padded; slot += depth, weights += depth) {
        const int8_t* values = static_cast<const int8_t*>(w.values[page]) + slot * head + d * 4;
        _tile_loadd(4, weights, stride);
        _tile_loadd(6, values, value_stride);
        _tile_dpbusd(0, 4, 6);
        _tile_loadd(5, weights + low * stride, stride);
        _tile_dpbusd(2, 5, 6);
        _tile_loadd(7, values + 64, value_stride);
        _tile_dpbusd(1, 4, 7);
        _tile_dpbusd(3, 5, 7);
      }
    int32_t *out = sums(w) + row * wide + d, *lower = out + low * wide;
    _tile_stored(0, out, wide * 4);
    _tile_stored(1, out + 16, wide * 4);
    _tile_stored(2, lower, wide * 4);
    _tile_stored(3, lower + 16, wide * 4);
  }
};

}  // namespace
}  // namespace qr
