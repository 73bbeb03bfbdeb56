// Attention's arithmetic in float32 over any cache.
#pragma once

#include "attention.h"

namespace qr {
namespace {

// Elements as vectors. Keys: W slots at one dimension; values: W dimensions of one slot.
template <class T>
struct CacheReader {
  QR_INLINE vf key(const T* group, int64_t d, int64_t slot, int64_t) { return load(group + d * 16 + slot); }
  QR_INLINE vf value(const T* page, int64_t slot, int64_t d, int64_t head) { return load(page + slot * head + d); }
};
template <>
struct CacheReader<Bf16> {
  QR_INLINE vf half(const void* pair, int64_t odd) {
    return odd != 0 ? high_half(static_cast<const char*>(pair)) : low_half(static_cast<const char*>(pair));
  }
  QR_INLINE vf key(const Bf16* group, int64_t d, int64_t slot, int64_t) {
    return half(group + (d / 2 * 16 + slot) * 2, d % 2);
  }
  QR_INLINE vf value(const Bf16* page, int64_t slot, int64_t d, int64_t head) {
    return half(page + (slot / 2 * head + d) * 2, slot % 2);
  }
};

// Call body(count, row) for blocks of Most rows, then of 2, then for a last one; count is a constant.
template <int Most, class Body>
QR_INLINE void each_row_block(int64_t rows, const Body& body) {
  int64_t row = 0;
  for (; row + Most <= rows; row += Most) body(std::integral_constant<int, Most>(), row);
  for (; row + 2 <= rows; row += 2) body(std::integral_constant<int, 2>(), row);
  if (row < rows) body(std::integral_constant<int, 1>(), row);
}

// Groups of 16 slots whose keys are scored at once. Each sum over a key is a chain of additions, every one of which waits
// for the one before, and few rows have few of them.
constexpr int kKeyGroups = 4;
// So many rows are few: what they read next is fetched between their products, for memory bounds them.
constexpr int kFewRows = 4;
template <class T>
struct KeyGroups {
  const T* keys[kKeyGroups];
  const char* ahead[kKeyGroups];  // the values of the same slots, as long as their keys, or the keys again
  int64_t columns[kKeyGroups];    // of their scores
};

// Call score(rows, groups, row, group, KeyGroups) until all rows have been scored over pages [first, last): for up to Most
// rows and for as many groups as leave Sums chains at most; both are constants. values: of pages, to be fetched, or null.
template <int Most, int Sums, class T, class Score>
QR_INLINE void each_key_group(const Workspace& w, int64_t first, int64_t last, int64_t padded, int64_t head,
                              const void* const* values, const Score& score) {
  constexpr int kGroupsOfMany = Sums / Most < 1 ? 1 : Sums / Most;
  const int64_t at_once = w.rows > kFewRows ? kGroupsOfMany : kKeyGroups;
  KeyGroups<T> groups;
  int64_t count = 0;
  const auto score_all = [&]() __attribute__((always_inline)) {
    for (int64_t i = 0; values != nullptr && w.rows > kFewRows && i < count; ++i)
      Fetch(groups.ahead[i], 16 * head * int64_t(sizeof(T))).complete();
    each_row_block<Most>(w.rows, [&](auto rows, int64_t row) __attribute__((always_inline)) {
      constexpr int kMany = Sums / rows.value < 1 ? 1 : Sums / rows.value < kKeyGroups ? Sums / rows.value : kKeyGroups;
      int64_t group = 0;
      for (; group + kMany <= count; group += kMany) score(rows, std::integral_constant<int, kMany>(), row, group, groups);
      for (; group < count; ++group) score(rows, std::integral_constant<int, 1>(), row, group, groups);
      for (int64_t i = 0; i < count; ++i) groups.ahead[i] = reinterpret_cast<const char*>(groups.keys[i]);
    });
    count = 0;
  };
  for (int64_t page = first; page < last; ++page)
    for (int64_t slot = 0; slot < padded; slot += 16) {
      groups.keys[count] = static_cast<const T*>(w.keys[page]) + slot * head;
      const T* ahead = values == nullptr ? groups.keys[count] : static_cast<const T*>(values[page]) + slot * head;
      groups.ahead[count] = reinterpret_cast<const char*>(ahead);
      groups.columns[count] = page * padded + slot;
      if (++count == at_once) score_all();
    }
  if (count > 0) score_all();
}

template <class T>
struct FloatMath {
  using Cache = T;
  using Weight = float;
  static constexpr bool kShortWeights = false;
  static constexpr int64_t kGroups = kKeyGroups;
  static constexpr int kKeyRows = W == 16 ? 8 : 4, kKeySums = W == 16 ? 16 : 4;
  static constexpr int kValueRows = W == 16 ? 4 : 2;
  static constexpr int kVectorsOfGroup = 16 / W;

  int64_t head, wide, padded;

  FloatMath(const AttentionArgs& args, const Workspace&)
      : head(args.layout.head_size), wide(padded_head(args.layout)), padded(padded_slots(args.layout)) {}

  template <class QueryAt>
  void take_queries(const AttentionArgs& args, const Workspace& w, const QueryAt& query_at) const {
    float* out = static_cast<float*>(w.query);
    for (int64_t row = 0; row < w.rows; ++row)
      each_vector(head, [&](int64_t i, int n) __attribute__((always_inline)) {
        store_some(out + row * wide + i, load_as(args.query, args.dtype, query_at(row) + i, n), n);
      });
  }

  // Not inlined, or the compiler would keep the rows' addresses in memory.
  template <int R, int G>
  static __attribute__((noinline)) void score_rows(const float* query, int64_t head, int64_t wide,
                                                   const KeyGroups<T>& groups, int64_t group, float* out,
                                                   int64_t columns) {
    vf acc[R][G][kVectorsOfGroup];
    const T* keys[G];
    const char* ahead[G];
    for (int g = 0; g < G; ++g) {
      keys[g] = groups.keys[group + g];
      ahead[g] = groups.ahead[group + g];
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < kVectorsOfGroup; ++v) acc[r][g][v] = zero();
    }
    for (int64_t d = 0; d < head; d += 2) {
      for (int g = 0; R <= kFewRows && g < G; ++g)
        for (size_t line = 0; line < 32 * sizeof(T); line += 64)
          prefetch_to_l2(ahead[g] + size_t(d) * 16 * sizeof(T) + line);
      for (int64_t odd = 0; odd < 2; ++odd)
        for (int g = 0; g < G; ++g)
          for (int v = 0; v < kVectorsOfGroup; ++v) {
            const vf key = CacheReader<T>::key(keys[g], d + odd, v * W, 0);
            for (int r = 0; r < R; ++r) acc[r][g][v] = fma(key, set1(query[r * wide + d + odd]), acc[r][g][v]);
          }
    }
    for (int r = 0; r < R; ++r)
      for (int g = 0; g < G; ++g)
        for (int v = 0; v < kVectorsOfGroup; ++v)
          store(out + r * columns + groups.columns[group + g] + v * W, acc[r][g][v]);
  }

  // The same of one group.
  template <int R>
  QR_INLINE void score_rows(const float* query, int64_t head, int64_t wide, const T* group, float* out,
                            int64_t columns) {
    const KeyGroups<T> only = {{group}, {reinterpret_cast<const char*>(group)}, {0}};
    score_rows<R, 1>(query, head, wide, only, 0, out, columns);
  }

  static int64_t own_bytes(const Workspace&, int64_t) { return 0; }
  void begin_scores() const {}
  void complete_scores(const Workspace&, int64_t, int64_t) const {}
  void take_weights(const Workspace&, int64_t, int64_t) const {}
  void begin_values() const {}

  void scores(const Workspace& w, int64_t first, int64_t last, const void*, const void* const* values) const {
    const float* query = static_cast<const float*>(w.query);
    each_key_group<kKeyRows, kKeySums, T>(
        w, first, last, padded, head, values,
        [&](auto rows, auto many, int64_t row, int64_t group, const KeyGroups<T>& groups)
            __attribute__((always_inline)) {
              score_rows<rows.value, many.value>(query + row * wide, head, wide, groups, group,
                                                 w.scores + row * w.columns, w.columns);
            });
  }

  // R rows times V vectors of dimensions over all slots of the split. kFetches: meanwhile keys that
  // are read next are fetched.
  template <int R, int V, bool kFetches>
  QR_INLINE void value_rows(const Workspace& w, int64_t pages, int64_t padded, int64_t head, int64_t wide, int64_t row,
                            int64_t d) {
    const float* weights = static_cast<const float*>(w.weights) + row * w.columns;
    vf acc[R][V];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) acc[r][v] = zero();
    for (int64_t page = 0; page < pages; ++page) {
      const T* values = static_cast<const T*>(w.values[page]);
      Fetch later(kFetches ? w.later[page] : nullptr, padded * head * int64_t(sizeof(T)));
      for (int64_t slot = 0; slot < padded; slot += 2) {
        if constexpr (kFetches) later.advance(head * int64_t(sizeof(T)) / 32);
        for (int64_t odd = 0; odd < 2; ++odd)
          for (int v = 0; v < V; ++v) {
            const vf value = CacheReader<T>::value(values, slot + odd, d + v * W, head);
            for (int r = 0; r < R; ++r)
              acc[r][v] = fma(value, set1(weights[r * w.columns + page * padded + slot + odd]), acc[r][v]);
          }
      }
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) store(w.partial + (row + r) * wide + d + v * W, acc[r][v]);
  }

  template <int R>
  QR_INLINE void value_row_block(const Workspace& w, int64_t pages, int64_t padded, int64_t head, int64_t wide,
                                 int64_t row) {
    constexpr int V = R <= 2 && W == 16 ? 8 : 4;
    int64_t d = 0;
    if (w.rows <= kFewRows && row == 0 && V * W <= wide) {
      value_rows<R, V, true>(w, pages, padded, head, wide, row, d);
      d += V * W;
    }
    for (; d + V * W <= wide; d += V * W) value_rows<R, V, false>(w, pages, padded, head, wide, row, d);
    for (; d < wide; d += W) value_rows<R, 1, false>(w, pages, padded, head, wide, row, d);
  }

  QR_INLINE bool by_page(const Workspace&) { return false; }
  template <class Prepare>
  void weighted_values(const Workspace& w, int64_t pages, const Prepare& prepare) const {
    for (int64_t i = 0; i < pages; ++i) prepare(i);
    each_row_block<kValueRows>(w.rows, [&](auto count, int64_t row) __attribute__((always_inline)) {
      value_row_block<count.value>(w, pages, padded, head, wide, row);
    });
  }
};

}  // namespace
}  // namespace qr
