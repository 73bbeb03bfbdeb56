// Attention over an int8 cache by dot products of bytes (digits.h): pages are multiplied as they are, with the integers of
// AMX's tiles and, in vectors of 16, their bits.
#pragma once

#include "attention_float.h"
#include "digits.h"

namespace qr {
namespace {

struct VnniInt8Math {
  using Cache = int8_t;
  using Weight = float;
  static constexpr bool kShortWeights = true;
  static constexpr int64_t kGroups = kKeyGroups;
  static constexpr int kVectorsOfGroup = 16 / W;
  // Rows, and groups of keys times rows, whose sums of both digits stay in registers; likewise of values.
  static constexpr int kKeyRows = W == 16 ? 8 : 2, kKeySums = W == 16 ? 8 : 2;
  static constexpr int kValueRows = W == 16 ? 4 : 2, kValueSums = W == 16 ? 8 : 4;
  static constexpr int kKeyBias = 128;  // keys are multiplied as unsigned bytes, so much more than they are

  struct Row {
    int32_t start[2];  // what sums over each digit of the query begin at: what the keys' bias adds, negated
    float unit;        // of the query's integers
  };

  int64_t head, wide, padded;
  Row query_rows[kQueryBlocks * kQueryRows];
  float weight_units[kQueryRows];

  VnniInt8Math(const AttentionArgs& args, const Workspace&)
      : head(args.layout.head_size), wide(padded_head(args.layout)), padded(padded_slots(args.layout)) {}

  // Weights' digits, [row][2][columns].
  static int64_t own_bytes(const Workspace& w, int64_t) { return 2 * kQueryRows * w.columns; }
  static uint8_t* digits(const Workspace& w, int64_t row) { return reinterpret_cast<uint8_t*>(w.own) + 2 * row * w.columns; }

  // Of each block of rows as [fours][rows][2 digits][4], so that one address leads to all of them.
  template <class QueryAt>
  void take_queries(const AttentionArgs& args, const Workspace& w, const QueryAt& query_at) {
    alignas(64) int8_t digit[2][kMostHead + W];
    each_row_block<kKeyRows>(w.rows, [&](auto count, int64_t row) {
      auto* out = static_cast<int8_t*>(w.query) + row * 2 * head;
      for (int64_t r = 0; r < count.value; ++r, out += 8) {
        Row& own = query_rows[w.first_row + row + r];
        own.unit = digits_of_query(static_cast<const Bf16*>(args.query) + query_at(row + r), head, digit[0], digit[1]);
        for (int which = 0; which < 2; ++which) {
          own.start[which] = 0;
          for (int64_t i = 0; i < head; ++i) own.start[which] -= kKeyBias * digit[which][i];
          for (int64_t i = 0; i < head; i += 4) std::memcpy(out + i * 2 * count.value + 4 * which, digit[which] + i, 4);
        }
      }
    });
  }

  void begin_scores() const {}
  void complete_scores(const Workspace&, int64_t, int64_t) const {}
  void begin_values() const {}

  template <int R, int G>
  QR_INLINE void score_rows(const int8_t* query, const Row* rows, int64_t head, const KeyGroups<int8_t>& groups,
                            int64_t group, float* out, int64_t columns) {
    vi acc[R][G][kVectorsOfGroup][2];
    const char *keys[G], *ahead[G];
    for (int g = 0; g < G; ++g) {
      keys[g] = reinterpret_cast<const char*>(groups.keys[group + g]);
      ahead[g] = groups.ahead[group + g];
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < kVectorsOfGroup; ++v)
          for (int digit = 0; digit < 2; ++digit) acc[r][g][v][digit] = same(rows[r].start[digit]);
    }
    for (int64_t at = 0; at < head * 16; at += 64, query += 8 * R)
      for (int g = 0; g < G; ++g) {
        if (R <= kFewRows) prefetch_to_l2(ahead[g] + at);
        for (int v = 0; v < kVectorsOfGroup; ++v) {
          const vi key = flip(load_bytes(keys[g] + at + v * W * 4), kKeyBias);
          for (int r = 0; r < R; ++r)
            for (int digit = 0; digit < 2; ++digit)
              acc[r][g][v][digit] = dot(acc[r][g][v][digit], key, four_bytes(query + r * 8 + digit * 4));
        }
      }
    for (int r = 0; r < R; ++r)
      for (int g = 0; g < G; ++g)
        for (int v = 0; v < kVectorsOfGroup; ++v)
          store(out + r * columns + groups.columns[group + g] + v * W,
                joined(acc[r][g][v][0], acc[r][g][v][1], set1(rows[r].unit)));
  }

  void scores(const Workspace& w, int64_t first, int64_t last, const void*, const void* const* values) const {
    const auto* query = static_cast<const int8_t*>(w.query);
    for (int64_t page = first; page < last; ++page)  // of values, the scales
      Fetch(static_cast<const int8_t*>(values[page]) + padded * head, padded * 4).complete();
    each_key_group<kKeyRows, kKeySums, int8_t>(
        w, first, last, padded, head, values,
        [&](auto rows, auto many, int64_t row, int64_t group, const KeyGroups<int8_t>& groups)
            __attribute__((always_inline)) {
              score_rows<rows.value, many.value>(query + row * 2 * head, query_rows + w.first_row + row, head, groups,
                                                 group, w.scores + row * w.columns, w.columns);
            });
  }

  void take_weights(const Workspace& w, int64_t row, int64_t pages) {
    uint8_t* high = digits(w, row);
    weight_units[row] = digits_of_weights(w.scores + row * w.columns, pages * padded, high, high + w.columns);
  }

  // R rows times V vectors of dimensions over all slots of the split. kFetches: meanwhile keys that are read next are
  // fetched.
  template <int R, int V, bool kFetches>
  QR_INLINE void value_rows(const Workspace& w, const float* units, int64_t pages, int64_t padded, int64_t head,
                            int64_t wide, int64_t row, int64_t d) {
    vi acc[R][V][2];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) acc[r][v][0] = acc[r][v][1] = none();
    const int64_t columns = w.columns;
    for (int64_t page = 0; page < pages; ++page) {
      const char* values = static_cast<const char*>(w.values[page]) + d * 4;
      const auto* weights = reinterpret_cast<const int8_t*>(digits(w, row)) + page * padded;
      Fetch later(kFetches ? w.later[page] : nullptr, padded * (head + 4));
      for (int64_t slot = 0; slot < padded; slot += 4, values += head * 4) {
        if constexpr (kFetches) later.advance(divide_up(head + 4, 16));
        vi value[V];
        for (int v = 0; v < V; ++v) value[v] = load_bytes(values + v * W * 4);
        for (int r = 0; r < R; ++r)
          for (int digit = 0; digit < 2; ++digit) {
            const vi weight = four_bytes(weights + (2 * r + digit) * columns + slot);
            for (int v = 0; v < V; ++v) acc[r][v][digit] = dot(acc[r][v][digit], weight, value[v]);
          }
      }
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v)
        store(w.partial + (row + r) * wide + d + v * W, joined(acc[r][v][0], acc[r][v][1], set1(units[row + r])));
  }

  template <int R, int V = kValueSums / R>
  QR_INLINE void value_row_block(const Workspace& w, const float* units, int64_t pages, int64_t padded, int64_t head,
                                 int64_t wide, int64_t row) {
    if constexpr (V > 4)
      if (V * W > wide) return value_row_block<R, 4>(w, units, pages, padded, head, wide, row);
    int64_t d = 0;
    if (w.rows <= kFewRows && row == 0 && V * W <= wide) {
      value_rows<R, V, true>(w, units, pages, padded, head, wide, row, d);
      d += V * W;
    }
    for (; d + V * W <= wide; d += V * W) value_rows<R, V, false>(w, units, pages, padded, head, wide, row, d);
    for (; d < wide; d += W) value_rows<R, 1, false>(w, units, pages, padded, head, wide, row, d);
  }

  QR_INLINE bool by_page(const Workspace&) { return false; }
  template <class Prepare>
  void weighted_values(const Workspace& w, int64_t pages, const Prepare& prepare) const {
    for (int64_t i = 0; i < pages; ++i) prepare(i);
    each_row_block<kValueRows>(w.rows, [&](auto count, int64_t row) __attribute__((always_inline)) {
      value_row_block<count.value>(w, weight_units, pages, padded, head, wide, row);
    });
  }
};

}  // namespace
}  // namespace qr
