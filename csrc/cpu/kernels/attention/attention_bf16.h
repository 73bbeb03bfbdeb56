// Attention over a bf16 cache by products of pairs of bf16. Weights are rounded to bf16, as their products' partners are; their sum is
// taken before.
#pragma once

#include "attention_float.h"
#include "../gemm/bf16_pairs.h"

namespace qr {
namespace {

// Products: how pairs are multiplied and added up.
template <class Products>
struct Bf16Math {
  using Cache = Bf16;
  using Weight = typename Products::Number;
  using Number = typename Products::Number;
  using Scope = typename Products::Scope;
  static constexpr bool kShortWeights = true;
  static constexpr int64_t kGroups = kKeyGroups;
  // Rows, and vectors of sums of each, that stay in registers.
  static constexpr int kKeyRows = kSumsInRegisters < 8 ? kSumsInRegisters : Products::kRows,
                       kKeySums = kSumsInRegisters < 8 ? kSumsInRegisters : 16;
  template <int R>
  static constexpr int kVectorsOf = kSumsInRegisters / R < 8 ? (kSumsInRegisters / R < 4 ? 1 : 4) : 8;

  int64_t head, wide, padded;

  Bf16Math(const AttentionArgs& args, const Workspace&)
      : head(args.layout.head_size), wide(padded_head(args.layout)), padded(padded_slots(args.layout)) {}

  // Of each block of rows as [pairs][rows], so that one address leads to all of them.
  template <class QueryAt>
  void take_queries(const AttentionArgs& args, const Workspace& w, const QueryAt& query_at) const {
    each_row_block<kKeyRows>(w.rows, [&](auto count, int64_t row) __attribute__((always_inline)) {
      auto* out = static_cast<Number*>(w.query) + row * wide;
      for (int64_t r = 0; r < count.value; ++r) {
        const auto* in = static_cast<const Bf16*>(args.query) + query_at(row + r);
        for (int64_t i = 0; i < head; i += 2) Products::take(out + (i * count.value + 2 * r), in + i);
      }
    });
  }

  template <int R, int G>
  QR_INLINE void score_rows(const Number* query, int64_t pairs, const KeyGroups<Bf16>& groups, int64_t group, float* out,
                            int64_t columns) {
    Sums acc[R][G];
    const Bf16* keys[G];
    const char* ahead[G];
    for (int g = 0; g < G; ++g) keys[g] = groups.keys[group + g], ahead[g] = groups.ahead[group + g];
    for (int r = 0; r < R; ++r)
      for (int g = 0; g < G; ++g) acc[r][g] = no_sums();
    for (int64_t i = 0; i < pairs; ++i, query += 2 * R) {
      for (int g = 0; R <= kFewRows && g < G; ++g) prefetch_to_l2(ahead[g] + i * 64);
      for (int term = 0; term < Products::kTerms; ++term)
        for (int g = 0; g < G; ++g) {
          const auto key = Products::load(keys[g] + i * 32, term);
          for (int r = 0; r < R; ++r)
            acc[r][g] = Products::add(acc[r][g], key, Products::same(query + 2 * r, term));
        }
    }
    for (int r = 0; r < R; ++r)
      for (int g = 0; g < G; ++g) store_sums(out + r * columns + groups.columns[group + g], acc[r][g]);
  }

  static int64_t own_bytes(const Workspace&, int64_t) { return 0; }
  void begin_scores() const {}
  void complete_scores(const Workspace&, int64_t, int64_t) const {}
  void take_weights(const Workspace&, int64_t, int64_t) const {}
  void begin_values() const {}

  void scores(const Workspace& w, int64_t first, int64_t last, const void*, const void* const* values) const {
    [[maybe_unused]] const Scope scope;
    const auto* query = static_cast<const Number*>(w.query);
    each_key_group<kKeyRows, kKeySums, Bf16>(
        w, first, last, padded, head, values,
        [&](auto rows, auto many, int64_t row, int64_t group, const KeyGroups<Bf16>& groups)
            __attribute__((always_inline)) {
              score_rows<rows.value, many.value>(query + row * wide, head / 2, groups, group,
                                                 w.scores + row * w.columns, w.columns);
            });
  }

  // kFetches: meanwhile keys that are read next are fetched.
  template <int R, int V, bool kFetches>
  QR_INLINE void value_rows(const Workspace& w, int64_t pages, int64_t padded, int64_t head, int64_t wide, int64_t row,
                            int64_t d) {
    Sums acc[R][V];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) acc[r][v] = no_sums();
    for (int64_t page = 0; page < pages; ++page) {
      const Bf16* values = static_cast<const Bf16*>(w.values[page]) + d * 2;
      const auto* weights = static_cast<const Number*>(w.weights) + row * w.columns + page * padded;
      Fetch later(kFetches ? w.later[page] : nullptr, padded * head * 2);
      for (int64_t pair = 0; pair < padded / 2; ++pair) {
        if constexpr (kFetches) later.advance(head / 16);
        for (int term = 0; term < Products::kTerms; ++term) {
          decltype(Products::load(values, term)) value[V];
          for (int v = 0; v < V; ++v) value[v] = Products::load(values + pair * head * 2 + v * 32, term);
          for (int r = 0; r < R; ++r) {
            const auto weight = Products::same(weights + r * w.columns + 2 * pair, term);
            for (int v = 0; v < V; ++v) acc[r][v] = Products::add(acc[r][v], value[v], weight);
          }
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
    if constexpr (R <= kFewRows)
      if (w.rows <= kFewRows && row == 0 && V * kLanes <= wide) {
        value_rows<R, V, true>(w, pages, padded, head, wide, row, d);
        d += V * kLanes;
      }
    for (; d + V * kLanes <= wide; d += V * kLanes)
      value_rows<R, V, false>(w, pages, padded, head, wide, row, d);
    for (; d < wide; d += kLanes) value_rows<R, 1, false>(w, pages, padded, head, wide, row, d);
  }

  QR_INLINE bool by_page(const Workspace&) { return false; }
  template <class Prepare>
  void weighted_values(const Workspace& w, int64_t pages, const Prepare& prepare) const {
    for (int64_t i = 0; i < pages; ++i) prepare(i);
    [[maybe_unused]] const Scope scope;
    each_row_block<4>(w.rows, [&](auto count, int64_t row) __attribute__((always_inline)) {
      value_row_block<count.value, kVectorsOf<count.value>>(w, pages, padded, head, wide, row);
    });
  }
};

template <class Products>
void fill_bf16_attention(Kernels& kernels) {
  kernels.attend_bf16[QR_BFLOAT16] = attend<Bf16Math<Products>, Bf16>;
  kernels.attend_bf16[QR_CACHE_FLOAT8] = attend<Bf16Math<Products>, Float8>;
}

}  // namespace
}  // namespace qr
