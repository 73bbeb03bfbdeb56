// Attention over a bf16 cache by products of pairs of bf16. Weights are rounded to bf16, as their products' partners are; their sum is
// taken before.
#pragma once

#include "attention_float.h"
#include "../gemm/bf16_pairs.h"

namespace qr {
namespace {

struct Bf16Math {
  using Cache = Bf16;
  using Weight = Bf16;
  static constexpr bool kShortWeights = true;
  // Rows, and vectors of sums of each, that stay in registers.
  static constexpr int kKeyRows = kSumsInRegisters < 8 ? kSumsInRegisters : 8;
  template <int R>
  static constexpr int kVectorsOf = kSumsInRegisters / R < 8 ? (kSumsInRegisters / R < 4 ? 1 : 4) : 8;

  int64_t head, wide, padded;

  Bf16Math(const AttentionArgs& args, const Workspace&)
      : head(args.layout.head_size), wide(padded_head(args.layout)), padded(padded_slots(args.layout)) {}

  template <class QueryAt>
  void take_queries(const AttentionArgs& args, const Workspace& w, const QueryAt& query_at) const {
    auto* out = static_cast<uint16_t*>(w.query);
    for (int64_t row = 0; row < w.rows; ++row)
      std::memcpy(out + row * wide, static_cast<const uint16_t*>(args.query) + query_at(row), size_t(head) * 2);
  }

  template <int R>
  QR_INLINE void score_rows(const int32_t* query, int64_t pairs, int64_t stride, const Bf16* group, float* out,
                            int64_t columns) {
    Sums acc[R];
    for (int r = 0; r < R; ++r) acc[r] = no_sums();
    for (int64_t i = 0; i < pairs; ++i) {
      const Pairs key = load_pairs(group + i * 32);
      for (int r = 0; r < R; ++r) acc[r] = add_products(acc[r], key, same_pairs(query[r * stride + i]));
    }
    for (int r = 0; r < R; ++r) store_sums(out + r * columns, acc[r]);
  }

  static int64_t own_bytes(const Workspace&, int64_t) { return 0; }
  void begin_scores() const {}
  void complete_scores(const Workspace&, int64_t, int64_t) const {}
  void take_weights(const Workspace&, int64_t, int64_t) const {}
  void begin_values() const {}

  void scores(const Workspace& w, int64_t page, const Bf16* keys, const Bf16*, const Bf16* values) const {
    const int32_t* query = static_cast<const int32_t*>(w.query);
    const int64_t stride = wide / 2, pairs = head / 2;
    for (int64_t slot = 0; slot < padded; slot += 16) {
      prefetch_group(values, slot, head);
      float* out = w.scores + page * padded + slot;
      each_row_block<kKeyRows>(w.rows, [&](auto count, int64_t row) __attribute__((always_inline)) {
        score_rows<count.value>(query + row * stride, pairs, stride, keys + slot * head, out + row * w.columns,
                                w.columns);
      });
    }
  }

  template <int R, int V>
  QR_INLINE void value_rows(const Workspace& w, int64_t pages, int64_t padded, int64_t head, int64_t wide, int64_t row,
                            int64_t d) {
    Sums acc[R][V];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) acc[r][v] = no_sums();
    for (int64_t page = 0; page < pages; ++page) {
      const Bf16* values = static_cast<const Bf16*>(w.values[page]) + d * 2;
      const char* weights = reinterpret_cast<const char*>(static_cast<const Bf16*>(w.weights) + row * w.columns +
                                                          page * padded);
      for (int64_t pair = 0; pair < padded / 2; ++pair) {
        Pairs value[V];
        for (int v = 0; v < V; ++v) value[v] = load_pairs(values + pair * head * 2 + v * 32);
        for (int r = 0; r < R; ++r) {
          int32_t both;
          std::memcpy(&both, weights + r * w.columns * 2 + pair * 4, 4);
          const Pairs weight = same_pairs(both);
          for (int v = 0; v < V; ++v) acc[r][v] = add_products(acc[r][v], value[v], weight);
        }
      }
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) store_sums(w.partial + (row + r) * wide + d + v * kLanes, acc[r][v]);
  }

  template <int R, int V>
  QR_INLINE void value_row_block(const Workspace& w, int64_t pages, int64_t padded, int64_t head, int64_t wide,
                                 int64_t row) {
    int64_t d = 0;
    for (; d + V * kLanes <= wide; d += V * kLanes) value_rows<R, V>(w, pages, padded, head, wide, row, d);
    for (; d < wide; d += kLanes) value_rows<R, 1>(w, pages, padded, head, wide, row, d);
  }

  QR_INLINE bool by_page(const Workspace&) { return false; }
  template <class Prepare>
  void weighted_values(const Workspace& w, int64_t pages, const Prepare& prepare) const {
    for (int64_t i = 0; i < pages; ++i) prepare(i);
    each_row_block<4>(w.rows, [&](auto count, int64_t row) __attribute__((always_inline)) {
      value_row_block<count.value, kVectorsOf<count.value>>(w, pages, padded, head, wide, row);
    });
  }
};

}  // namespace
}  // namespace qr
