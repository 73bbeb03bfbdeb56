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

// The values of 16 slots are read after all keys: let them come while the keys are worked on. Null: none to come.
template <class T>
QR_INLINE void prefetch_group(const T* values, int64_t slot, int64_t head) {
  const char* begin = reinterpret_cast<const char*>(values + slot * head);
  for (int64_t i = 0; values != nullptr && i < 16 * head * int64_t(sizeof(T)); i += 64)
    prefetch_to_l2(begin + i);
}

template <class T>
struct FloatMath {
  using Cache = T;
  using Weight = float;
  static constexpr bool kShortWeights = false;
  static constexpr int kKeyRows = W == 16 ? 8 : 4;
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

  template <int R>
  QR_INLINE void score_rows(const float* query, int64_t head, int64_t wide, const T* group, float* out,
                            int64_t columns) {
    vf acc[R][kVectorsOfGroup];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kVectorsOfGroup; ++v) acc[r][v] = zero();
    for (int64_t d = 0; d < head; d += 2)
      for (int64_t odd = 0; odd < 2; ++odd)
        for (int v = 0; v < kVectorsOfGroup; ++v) {
          const vf key = CacheReader<T>::key(group, d + odd, v * W, 0);
          for (int r = 0; r < R; ++r) acc[r][v] = fma(key, set1(query[r * wide + d + odd]), acc[r][v]);
        }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kVectorsOfGroup; ++v) store(out + r * columns + v * W, acc[r][v]);
  }

  static int64_t own_bytes(const Workspace&, int64_t) { return 0; }
  void begin_scores() const {}
  void complete_scores(const Workspace&, int64_t, int64_t) const {}
  void take_weights(const Workspace&, int64_t, int64_t) const {}
  void begin_values() const {}

  void scores(const Workspace& w, int64_t page, const T* keys, const T*, const T* values) const {
    const float* query = static_cast<const float*>(w.query);
    for (int64_t slot = 0; slot < padded; slot += 16) {
      const T* group = keys + slot * head;
      prefetch_group(values, slot, head);
      float* out = w.scores + page * padded + slot;
      each_row_block<kKeyRows>(w.rows, [&](auto count, int64_t row) __attribute__((always_inline)) {
        score_rows<count.value>(query + row * wide, head, wide, group, out + row * w.columns, w.columns);
      });
    }
  }

  // R rows times V vectors of dimensions over all slots of the split.
  template <int R, int V>
  QR_INLINE void value_rows(const Workspace& w, int64_t pages, int64_t padded, int64_t head, int64_t wide, int64_t row,
                            int64_t d) {
    const float* weights = static_cast<const float*>(w.weights) + row * w.columns;
    vf acc[R][V];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) acc[r][v] = zero();
    for (int64_t page = 0; page < pages; ++page) {
      const T* values = static_cast<const T*>(w.values[page]);
      for (int64_t slot = 0; slot < padded; slot += 2)
        for (int64_t odd = 0; odd < 2; ++odd)
          for (int v = 0; v < V; ++v) {
            const vf value = CacheReader<T>::value(values, slot + odd, d + v * W, head);
            for (int r = 0; r < R; ++r)
              acc[r][v] = fma(value, set1(weights[r * w.columns + page * padded + slot + odd]), acc[r][v]);
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
    for (; d + V * W <= wide; d += V * W) value_rows<R, V>(w, pages, padded, head, wide, row, d);
    for (; d < wide; d += W) value_rows<R, 1>(w, pages, padded, head, wide, row, d);
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
