// Attention over a bf16 cache by vdpbf16ps. Weights are rounded to bf16, as their products' partners are; their sum is
// taken before.
#pragma once

#include "attention.h"
#include "gemm_bf16.h"

namespace qr {
namespace {

struct Bf16Math {
  using Cache = Bf16;
  using Weight = Bf16;
  static constexpr bool kShortWeights = true;

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
    __m512 acc[R];
    for (int r = 0; r < R; ++r) acc[r] = _mm512_setzero_ps();
    for (int64_t i = 0; i < pairs; ++i) {
      const __m512bh key = as_bf16(_mm512_loadu_si512(group + i * 32));
      for (int r = 0; r < R; ++r)
        acc[r] = _mm512_dpbf16_ps(acc[r], key, as_bf16(_mm512_set1_epi32(query[r * stride + i])));
    }
    for (int r = 0; r < R; ++r) _mm512_storeu_ps(out + r * columns, acc[r]);
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
      each_row_block<8>(w.rows, [&](auto count, int64_t row) __attribute__((always_inline)) {
        score_rows<count.value>(query + row * stride, pairs, stride, keys + slot * head, out + row * w.columns,
                                w.columns);
      });
    }
  }

  template <int R, int V>
  QR_INLINE void value_rows(const Workspace& w, int64_t pages, int64_t padded, int64_t head, int64_t wide, int64_t row,
                            int64_t d) {
    __m512 acc[R][V];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) acc[r][v] = _mm512_setzero_ps();
    for (int64_t page = 0; page < pages; ++page) {
      const Bf16* values = static_cast<const Bf16*>(w.values[page]) + d * 2;
      const char* weights = reinterpret_cast<const char*>(static_cast<const Bf16*>(w.weights) + row * w.columns +
                                                          page * padded);
      for (int64_t pair = 0; pair < padded / 2; ++pair) {
        __m512bh value[V];
        for (int v = 0; v < V; ++v) value[v] = as_bf16(_mm512_loadu_si512(values + pair * head * 2 + v * 32));
        for (int r = 0; r < R; ++r) {
          int32_t both;
          std::memcpy(&both, weights + r * w.columns * 2 + pair * 4, 4);
          const __m512bh weight = as_bf16(_mm512_set1_epi32(both));
          for (int v = 0; v < V; ++v) acc[r][v] = _mm512_dpbf16_ps(acc[r][v], value[v], weight);
        }
      }
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) _mm512_storeu_ps(w.partial + (row + r) * wide + d + v * 16, acc[r][v]);
  }

  template <int R, int V>
  QR_INLINE void value_row_block(const Workspace& w, int64_t pages, int64_t padded, int64_t head, int64_t wide,
                                 int64_t row) {
    int64_t d = 0;
    for (; d + V * 16 <= wide; d += V * 16) value_rows<R, V>(w, pages, padded, head, wide, row, d);
    for (; d < wide; d += 16) value_rows<R, 1>(w, pages, padded, head, wide, row, d);
  }

  QR_INLINE bool by_page(const Workspace&) { return false; }
  template <class Prepare>
  void weighted_values(const Workspace& w, int64_t pages, const Prepare& prepare) const {
    for (int64_t i = 0; i < pages; ++i) prepare(i);
    each_row_block<4>(w.rows, [&](auto count, int64_t row) __attribute__((always_inline)) {
      value_row_block<count.value, count.value == 4 ? 4 : 8>(w, pages, padded, head, wide, row);
    });
  }
};

}  // namespace
}  // namespace qr
