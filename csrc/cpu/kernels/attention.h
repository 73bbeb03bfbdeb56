// Paged attention of one piece: up to 32 rows (token, query head) of one kv head over their context.
//
// The context is taken in splits of a fixed number of tokens, aligned to position 0. Within a split: all scores, their
// maximum, the exponentials, their product with the values; then the split is merged into the running result, in
// order. A token that a row may not see has the weight 0 exactly and adds exact zeros, so a row's bits do not depend on
// which rows it shares a piece with, on the chunk it came in, or on whether this is prefill or decode.
//
// A Math says how scores and weighted values are computed; the rest is shared.
#pragma once

#include <type_traits>

#include "../threads.h"
#include "cache.h"
#include "gemm.h"

namespace qr {
namespace {

constexpr float kMinusInfinity = -__builtin_inff();

// What a piece works with, in thread scratch.
struct Workspace {
  int64_t rows;          // of the piece
  int64_t row_capacity;  // rows rounded up to whole tiles
  int64_t columns;       // score columns of a split: pages * padded slots
  void* query;           // as Math prepared it
  float* scores;         // [row_capacity][columns]
  void* weights;         // [row_capacity][columns], float or bf16
  float* partial;        // [row_capacity][E]: this split's weighted values
  float* result;         // [row_capacity][E]: of all splits so far
  char* copies;          // of pages of values with slots that must not count, zero there
  const void** keys;     // pages of the split
  const void** values;
};

// Rows of weights as Math wants them.
QR_INLINE void store_weight(float* row, int64_t at, vf v) { store(row + at, v); }
QR_INLINE void store_weight(Bf16* row, int64_t at, vf v) { store(row + at, v); }

struct Softmax {
  float largest, total;
};

// Scores of one row over a split become weights exp(score - largest). Slots [visible_begin, visible_end) count, by
// position relative to the split's first page.
template <class Weight>
Softmax softmax_row(const AttentionArgs& args, float* scores, Weight* weights, int64_t pages, int64_t visible_begin,
                    int64_t visible_end) {
  const int64_t slots = args.layout.block_size, padded = padded_slots(args.layout);
  // without padding between the pages, the split is one long page
  const int64_t segment = slots == padded ? pages * slots : slots, stride = slots == padded ? segment : padded;
  const int64_t segments = slots == padded ? 1 : pages;
  const vf scale = set1(args.scale), cap = set1(args.soft_cap), per_cap = set1(1.0f / args.soft_cap);
  alignas(64) float counting[W];
  for (int i = 0; i < W; ++i) counting[i] = float(i);
  const vf lane = load(counting), minus_infinity = set1(kMinusInfinity);

  vf largest = minus_infinity;
  for (int64_t s = 0; s < segments; ++s) {
    const int64_t begin = visible_begin - s * segment, end = visible_end - s * segment;
    const int64_t limit = end < segment ? end : segment;
    for (int64_t i = begin > 0 ? begin / W * W : 0; i < limit; i += W) {
      vf score = mul(load(scores + s * stride + i), scale);
      if (args.soft_cap != 0.0f) score = mul(tanh(mul(score, per_cap)), cap);
      if (i < begin) score = where_less(lane, set1(float(begin - i)), minus_infinity, score);
      if (i + W > limit) score = where_less(lane, set1(float(limit - i)), score, minus_infinity);
      store(scores + s * stride + i, score);
      largest = max(largest, score);
    }
  }
  const float top = qr::largest(largest);
  const vf shift = set1(top);
  vf total = zero();
  for (int64_t s = 0; s < segments; ++s) {
    const int64_t begin = visible_begin - s * segment, end = visible_end - s * segment;
    const int64_t limit = end < segment ? end : segment;
    const int64_t first = begin > 0 ? begin / W * W : 0;
    int64_t i = 0;
    for (; i < stride && i < first; i += W) store_weight(weights, s * stride + i, zero());
    for (; i < limit; i += W) {
      const vf weight = exp(sub(load(scores + s * stride + i), shift));
      total = add(total, weight);
      store_weight(weights, s * stride + i, weight);
    }
    for (; i < stride; i += W) store_weight(weights, s * stride + i, zero());
  }
  return Softmax{top, sum(total)};
}

// result = result * exp(running - top) + partial * exp(largest - top)
QR_INLINE void merge(float* result, const float* partial, int64_t n, float old_factor, float new_factor) {
  const vf a = set1(old_factor), b = set1(new_factor);
  for (int64_t i = 0; i < n; i += W) store(result + i, fma(load(result + i), a, mul(load(partial + i), b)));
}

QR_INLINE float exp_one(float x) {
  alignas(64) float lanes[W];
  store(lanes, exp(set1(x)));
  return lanes[0];
}

// A page's values, zero from slot `used` on.
template <class T>
void copy_value_page(T* out, const T* in, int64_t used, int64_t padded, int64_t head) {
  if (sizeof(T) == 2 && std::is_same<T, Bf16>::value) {
    const int64_t whole = used / 2 * 2;
    std::memcpy(out, in, size_t(whole * head) * 2);
    std::memset(static_cast<void*>(out + whole * head), 0, size_t((padded - whole) * head) * 2);
    if (used != whole)
      for (int64_t d = 0; d < head; ++d) out[whole * head + 2 * d] = in[whole * head + 2 * d];
  } else {
    std::memcpy(static_cast<void*>(out), in, size_t(used * head) * sizeof(T));
    std::memset(static_cast<void*>(out + used * head), 0, size_t((padded - used) * head) * sizeof(T));
  }
}

template <class Math>
void attend(const AttentionArgs& args, const AttentionPiece& piece) {
  using Weight = typename Math::Weight;
  using Cache = typename Math::Cache;
  const CacheLayout& layout = args.layout;
  const int64_t slots = layout.block_size, padded = padded_slots(layout), head = layout.head_size;
  const int64_t wide = padded_head(layout), group = args.heads / layout.kv_heads;
  const int64_t split_pages = kSplitTokens / slots > 0 ? kSplitTokens / slots : 1;
  const int64_t first_token = args.query_start[piece.sequence];
  const int64_t num_tokens = args.query_start[piece.sequence + 1] - first_token;
  const int64_t seq_len = args.seq_lens[piece.sequence], first_position = seq_len - num_tokens;
  const int32_t* table = args.block_tables + piece.sequence * args.table_stride;

  // 1. scratch
  Workspace w;
  w.rows = piece.row_end - piece.row_begin;
  w.row_capacity = w.rows <= 16 ? 16 : kQueryRows;
  w.columns = split_pages * padded;
  const int64_t cells = kQueryRows * w.columns, outputs = kQueryRows * wide;
  const int64_t page_bytes = round_up(padded * head * int64_t(sizeof(Cache)) + kCacheSlack, 64);
  const int64_t copies = slots == padded ? 1 : split_pages;
  char* memory = static_cast<char*>(
      scratch(0, head * 1024 + cells * 4 + cells * int64_t(sizeof(Weight)) + 2 * outputs * 4 + copies * page_bytes +
                     2 * split_pages * int64_t(sizeof(void*)) + 64));
  if (memory == nullptr) return;
  auto take = [&](int64_t bytes) {
    char* at = memory;
    memory += round_up(bytes, 64);
    return at;
  };
  w.query = take(head * 1024);  // two tiles of rows in steps of two dimensions, at worst
  w.scores = reinterpret_cast<float*>(take(cells * 4));
  w.weights = take(cells * int64_t(sizeof(Weight)));
  w.partial = reinterpret_cast<float*>(take(outputs * 4));
  w.result = reinterpret_cast<float*>(take(outputs * 4));
  w.copies = take(copies * page_bytes);
  w.keys = reinterpret_cast<const void**>(memory);
  w.values = w.keys + split_pages;
  float running[kQueryRows], total[kQueryRows];
  for (int64_t row = 0; row < w.rows; ++row) {
    running[row] = kMinusInfinity;
    total[row] = 0.0f;
  }
  for (int64_t i = 0; i < w.rows * wide; i += W) store(w.result + i, zero());

  // 2. queries
  auto query_at = [&](int64_t row) {
    const int64_t r = piece.row_begin + row;
    return ((first_token + r / group) * args.heads + piece.kv_head * group + r % group) * head;
  };
  const Math math(args, w, query_at);

  // 3. splits, in order
  auto position_of = [&](int64_t row) { return first_position + (piece.row_begin + row) / group; };
  auto seen_from = [&](int64_t position) {
    return args.window > 0 && position >= args.window ? position - args.window + 1 : 0;
  };
  const int64_t last = position_of(w.rows - 1), first = seen_from(position_of(0));
  const int64_t split_tokens = split_pages * slots;
  for (int64_t split = first / split_tokens; split <= last / split_tokens; ++split) {
    const int64_t begin_page = split * split_pages > first / slots ? split * split_pages : first / slots;
    int64_t end_page = (split + 1) * split_pages;
    if (end_page > last / slots + 1) end_page = last / slots + 1;
    const int64_t pages = end_page - begin_page, base = begin_page * slots;
    for (int64_t i = 0; i < pages; ++i) {
      const int64_t block = table[begin_page + i];
      w.keys[i] = static_cast<const Cache*>(args.cache) + key_page(layout, block, piece.kv_head);
      w.values[i] = static_cast<const Cache*>(args.cache) + value_page(layout, block, piece.kv_head);
    }
    math.scores(w, pages);
    // Slots past the sequence, or past the page's, hold whatever was there: 0 * NaN would be NaN.
    for (int64_t i = slots == padded ? pages - 1 : 0; i < pages; ++i) {
      const int64_t left = seq_len - (begin_page + i) * slots, used = left < slots ? left : slots;
      if (used == padded) continue;
      auto* copy = reinterpret_cast<Cache*>(w.copies + i % copies * page_bytes);
      copy_value_page(copy, static_cast<const Cache*>(w.values[i]), used, padded, head);
      w.values[i] = copy;
    }
    float largest[kQueryRows], sums[kQueryRows];
    for (int64_t row = 0; row < w.rows; ++row) {
      const int64_t position = position_of(row);
      const int64_t from = seen_from(position) - base, to = position + 1 - base;
      const Softmax s = softmax_row(args, w.scores + row * w.columns, static_cast<Weight*>(w.weights) + row * w.columns,
                                    pages, from > 0 ? from : 0, to);
      largest[row] = s.largest;
      sums[row] = s.total;
    }
    math.weighted_values(w, pages);
    for (int64_t row = 0; row < w.rows; ++row) {
      if (largest[row] == kMinusInfinity) continue;  // sees nothing of this split
      const float top = running[row] > largest[row] ? running[row] : largest[row];
      const float old_factor = exp_one(running[row] - top), new_factor = exp_one(largest[row] - top);
      merge(w.result + row * wide, w.partial + row * wide, wide, old_factor, new_factor);
      total[row] = total[row] * old_factor + sums[row] * new_factor;
      running[row] = top;
    }
  }

  // 4. normalise and round once
  for (int64_t row = 0; row < w.rows; ++row) {
    float* result = w.result + row * wide;
    const vf divisor = set1(total[row]);
    for (int64_t i = 0; i < wide; i += W) store(result + i, div(load(result + i), divisor));
    each_vector(head, [&](int64_t i, int n) __attribute__((always_inline)) {
      const vf v = load_some(result + i, n);
      const int64_t at = query_at(row) + i;
      if (args.dtype == QR_FLOAT32)
        store_some(static_cast<float*>(args.out) + at, v, n);
      else if (args.dtype == QR_BFLOAT16)
        store_some(static_cast<Bf16*>(args.out) + at, v, n);
      else
        store_some(static_cast<Fp16*>(args.out) + at, v, n);
    });
  }
}

// ---- float32 arithmetic over any cache ----

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

template <class T>
struct FloatMath {
  using Cache = T;
  using Weight = float;
  static constexpr int kKeyRows = W == 16 ? 8 : 4;
  static constexpr int kValueRows = W == 16 ? 4 : 2;
  static constexpr int kVectorsOfGroup = 16 / W;

  int64_t head, wide, padded;

  template <class QueryAt>
  FloatMath(const AttentionArgs& args, const Workspace& w, const QueryAt& query_at)
      : head(args.layout.head_size), wide(padded_head(args.layout)), padded(padded_slots(args.layout)) {
    float* out = static_cast<float*>(w.query);
    for (int64_t row = 0; row < w.rows; ++row)
      each_vector(head, [&](int64_t i, int n) __attribute__((always_inline)) {
        vf v;
        const int64_t at = query_at(row) + i;
        if (args.dtype == QR_FLOAT32)
          v = load_some(static_cast<const float*>(args.query) + at, n);
        else if (args.dtype == QR_BFLOAT16)
          v = load_some(static_cast<const Bf16*>(args.query) + at, n);
        else
          v = load_some(static_cast<const Fp16*>(args.query) + at, n);
        store_some(out + row * wide + i, v, n);
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

  void scores(const Workspace& w, int64_t pages) const {
    const float* query = static_cast<const float*>(w.query);
    for (int64_t page = 0; page < pages; ++page) {
      const T* keys = static_cast<const T*>(w.keys[page]);
      const char* values = static_cast<const char*>(w.values[page]);
      for (int64_t slot = 0; slot < padded; slot += 16) {
        // the values are read next: let them come while the keys are worked on
        for (int64_t i = 0; i < 16 * head * int64_t(sizeof(T)); i += 64)
          _mm_prefetch(values + slot * head * int64_t(sizeof(T)) + i, _MM_HINT_T1);
        const T* group = keys + slot * head;
        float* out = w.scores + page * padded + slot;
        int64_t row = 0;
        for (; row + kKeyRows <= w.rows; row += kKeyRows)
          score_rows<kKeyRows>(query + row * wide, head, wide, group, out + row * w.columns, w.columns);
        for (; row + 2 <= w.rows; row += 2)
          score_rows<2>(query + row * wide, head, wide, group, out + row * w.columns, w.columns);
        if (row < w.rows) score_rows<1>(query + row * wide, head, wide, group, out + row * w.columns, w.columns);
      }
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

  void weighted_values(const Workspace& w, int64_t pages) const {
    int64_t row = 0;
    for (; row + kValueRows <= w.rows; row += kValueRows)
      value_row_block<kValueRows>(w, pages, padded, head, wide, row);
    for (; row + 2 <= w.rows; row += 2) value_row_block<2>(w, pages, padded, head, wide, row);
    if (row < w.rows) value_row_block<1>(w, pages, padded, head, wide, row);
  }
};

}  // namespace
}  // namespace qr
