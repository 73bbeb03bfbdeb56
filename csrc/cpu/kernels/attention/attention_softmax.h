// What attention does with scores: their softmax over one split of the context, and splits merged in order.
#pragma once

#include <type_traits>

#include "../../runtime/threads.h"
#include "cache.h"
#include "../gemm/gemm.h"

namespace qr {
namespace {

constexpr float kMinusInfinity = -__builtin_inff();
constexpr float kLowest = -3.402823466e38f;  // only minus infinity is less
constexpr float kLog2E = 1.44269504088896341f;
constexpr int64_t kSoftmaxRows = 4;  // whose scores stay in L1 from their largest to their weights

// What a block works with, in thread scratch.
struct Workspace {
  int64_t first_row;     // of the block, in the piece
  int64_t rows;          // of the block
  int64_t row_capacity;  // rows rounded up to whole tiles; of one of several blocks kQueryRows
  int64_t columns;       // score columns of a split: pages * padded slots
  void* query;           // as Math prepared it
  float* scores;         // [row_capacity][columns]
  void* weights;         // [row_capacity][columns], float or bf16; of integer Maths the scores, in place
  char* own;             // of integer Maths
  float* partial;        // [row_capacity][E]: this split's weighted values
  const void** keys;     // pages of the split
  const void** values;   // likewise, as Math reads them
  const void** later;    // by page of the split: one of keys to fetch meanwhile, or null
  float* key_scales;     // [columns], or null
  float* value_scales;   // [columns], or null
};

// Whether what is done to scores before their softmax takes them scaled.
QR_INLINE bool are_scores_scaled(const AttentionArgs& args) {
  return args.soft_cap != 0.0f || args.slopes != nullptr;
}
// The exponents of softmax are (score - largest) * this, to base 2.
QR_INLINE float exponent_factor(const AttentionArgs& args) {
  return are_scores_scaled(args) ? kLog2E : args.scale * kLog2E;
}

// Scores of rows over a split become weights exp(score - largest), times the values' scales. Largest scores of several
// rows are found before any row's exponentials, which would wait for them.
// kShort: weights will be rounded, an exponential that is as exact as that needs will do.
template <bool Scaled, bool kShort, class Weight>
class Softmax {
 public:
  Softmax(const AttentionArgs& args, const Workspace& w, int64_t pages) : args(args), w(w) {
    const int64_t slots = args.layout.block_size, padded = padded_slots(args.layout);
    // without padding between the pages, the split is one long page
    segment = slots == padded ? pages * slots : slots;
    stride = slots == padded ? segment : padded;
    segments = slots == padded ? 1 : pages;
  }

  // The largest score of a row, whose token is the last that it sees. Slots [visible_begin, visible_end) count, by
  // position relative to the split's first page; scores beside them, in the same vectors, become minus infinity. Where
  // there are slopes, scores lose `slope` for each token of distance.
  float find_largest(int64_t row, int64_t visible_begin, int64_t visible_end, float slope) const {
    float* scores = w.scores + row * w.columns;
    const vf minus_infinity = set1(kMinusInfinity);
    alignas(64) float counting[W];
    for (int i = 0; i < W; ++i) counting[i] = float(i);
    const vf lane = load(counting);
    vf largest = minus_infinity;
    each_segment(visible_begin, visible_end, [&](int64_t at, int64_t begin, int64_t limit, int64_t end)
                 __attribute__((always_inline)) {
      float* row_scores = scores + at;
      const int64_t first = begin / W * W;
      if (Scaled)
        for (int64_t i = first; i < limit; i += W)
          store(row_scores + i, mul(load(row_scores + i), load(w.key_scales + at + i)));
      if (args.soft_cap != 0.0f) {
        const vf scale = set1(args.scale), cap = set1(args.soft_cap), per_cap = set1(1.0f / args.soft_cap);
        for (int64_t i = first; i < limit; i += W)
          store(row_scores + i, mul(tanh(mul(mul(load(row_scores + i), scale), per_cap)), cap));
      }
      if (args.slopes != nullptr) {
        const vf scale = set1(args.soft_cap == 0.0f ? args.scale : 1.0f), per_token = set1(slope);
        for (int64_t i = first; i < limit; i += W) {
          const vf distance = sub(set1(float(end - 1 - i)), lane);  // exact: whole numbers below 2^24
          store(row_scores + i, sub(mul(load(row_scores + i), scale), mul(per_token, distance)));
        }
      }
      if (first < begin && first < limit)
        store(row_scores + first,
              where_less(lane, set1(float(begin - first)), minus_infinity, load(row_scores + first)));
      if (first < limit && limit % W != 0) {
        float* last = row_scores + limit / W * W;
        store(last, where_less(lane, set1(float(limit % W)), load(last), minus_infinity));
      }
      for (int64_t i = first; i < limit; i += W) largest = max(largest, load(row_scores + i));
    });
    return qr::largest(largest);
  }

  // A row's weights, 0 for slots that do not count; gives their sum, before scales.
  float weigh(int64_t row, int64_t visible_begin, int64_t visible_end, float largest) const {
    const float* scores = w.scores + row * w.columns;
    Weight* weights = static_cast<Weight*>(w.weights) + row * w.columns;
    const float factor = exponent_factor(args);
    const vf multiplier = set1(factor), shift = set1(-largest * factor);
    vf total = zero();
    each_segment(visible_begin, visible_end, [&](int64_t at, int64_t begin, int64_t limit, int64_t)
                 __attribute__((always_inline)) {
      const float* row_scores = scores + at;
      Weight* row_weights = weights + at;
      const float* scales = w.value_scales + at;
      int64_t i = 0;
      for (; i < stride && i < begin / W * W; i += W) store(row_weights + i, zero());
      for (; i < limit; i += W) {
        const vf weight = exp2<kShort ? 3 : 5>(fma(load(row_scores + i), multiplier, shift));
        total = add(total, weight);
        store(row_weights + i, Scaled ? mul(weight, load(scales + i)) : weight);
      }
      for (; i < stride; i += W) store(row_weights + i, zero());
    });
    return sum(total);
  }

 private:
  const AttentionArgs& args;
  const Workspace& w;
  int64_t segment, stride, segments;

  // Call body(scores, begin, limit, end) with the slots of each segment that count, and where the last one ends that
  // the row sees, be it in a later segment.
  template <class Body>
  inline __attribute__((always_inline)) void each_segment(int64_t visible_begin, int64_t visible_end,
                                                          const Body& body) const {
    for (int64_t s = 0; s < segments; ++s) {
      const int64_t begin = visible_begin - s * segment, end = visible_end - s * segment;
      body(s * stride, begin > 0 ? begin : 0, end < segment ? end : segment, end);
    }
  }
};

// Where the rows of a piece lie in query and out, and in their sequence.
struct Rows {
  int64_t first_token, first_position, heads, group, head, kv_head, row_begin, window;

  Rows(const AttentionArgs& args, const AttentionPiece& piece)
      : first_token(args.query_start[piece.sequence]),
        first_position(args.seq_lens[piece.sequence] - (args.query_start[piece.sequence + 1] - first_token)),
        heads(args.heads), group(args.heads / args.layout.kv_heads), head(args.layout.head_size),
        kv_head(piece.kv_head), row_begin(piece.row_begin), window(args.window) {}

  int64_t token(int64_t row) const { return first_token + (row_begin + row) / group; }
  int64_t query_head(int64_t row) const { return kv_head * group + (row_begin + row) % group; }
  int64_t column(int64_t row) const { return query_head(row) * head; }
  int64_t operator()(int64_t row) const { return token(row) * heads * head + column(row); }
  int64_t position(int64_t row) const { return first_position + (row_begin + row) / group; }
  // The first position that a row sees.
  int64_t seen_from(int64_t row) const {
    const int64_t at = position(row);
    return window > 0 && at >= window ? at - window + 1 : 0;
  }
};

// What the splits of a piece's rows have come to so far; before the first one that is their sinks.
struct Merged {
  alignas(64) float largest[kQueryBlocks * kQueryRows];
  alignas(64) float total[kQueryBlocks * kQueryRows];
  float* values;  // [rows][wide]
  int64_t rows, wide;
  float factor;

  Merged(const AttentionArgs& args, const Rows& at, float* values, int64_t rows)
      : values(values), rows(rows), wide(padded_head(args.layout)), factor(exponent_factor(args)) {
    for (int64_t row = 0; row < round_up(rows, W); ++row) {
      largest[row] = kMinusInfinity;
      total[row] = 0.0f;
    }
    for (int64_t row = 0; args.sinks != nullptr && row < rows; ++row) {
      const float sink = args.sinks[at.query_head(row)];
      largest[row] = are_scores_scaled(args) ? sink : sink / args.scale;
      total[row] = 1.0f;
    }
    for (int64_t i = 0; i < rows * wide; i += W) store(values + i, zero());
  }

  // A split of `count` rows, from row `first` on. Both sides are scaled to the larger maximum.
  void add_split(int64_t first, int64_t count, const float* split_largest, const float* split_total,
                 const float* split_values) {
    alignas(64) float before[kQueryRows];
    alignas(64) float now[kQueryRows];
    const vf lowest = set1(kLowest), multiplier = set1(factor);
    for (int64_t row = 0; row < count; row += W) {
      float *merged_largest = largest + first + row, *merged_total = total + first + row;
      const vf old = load(merged_largest), own = load(split_largest + row), top = max(old, own);
      const vf a = where_less(old, lowest, zero(), exp2<5>(mul(sub(old, top), multiplier)));
      const vf b = exp2<5>(mul(sub(own, top), multiplier));
      store(before + row, a);
      store(now + row, b);
      const vf both = add(mul(load(merged_total), a), mul(load(split_total + row), b));
      store(merged_total, where_less(own, lowest, load(merged_total), both));
      store(merged_largest, top);
    }
    for (int64_t row = 0; row < count; ++row) {
      if (split_largest[row] < kLowest) continue;  // sees nothing of this split
      const vf a = set1(before[row]), b = set1(now[row]);
      float* out = values + (first + row) * wide;
      const float* in = split_values + row * wide;
      for (int64_t i = 0; i < wide; i += W) store(out + i, fma(load(out + i), a, mul(load(in + i), b)));
    }
  }

  // Normalise, and round once.
  void write(const AttentionArgs& args, const Rows& at) const {
    if (args.dtype == QR_FLOAT32)
      write_as<float>(args, at);
    else if (args.dtype == QR_BFLOAT16)
      write_as<Bf16>(args, at);
    else
      write_as<Fp16>(args, at);
  }

 private:
  template <class T>
  void write_as(const AttentionArgs& args, const Rows& at) const {
    const Places places(at.heads * at.head, args.out_dtype);
    for (int64_t row = 0; row < rows; ++row) {
      const vf factor = set1(1.0f / total[row]);
      T* out = static_cast<T*>(args.out) + places.row(at.token(row));
      const int64_t column = at.column(row);
      each_vector(at.head, [&](int64_t i, int n) __attribute__((always_inline)) {
        const vf v = mul(load_some(values + row * wide + i, n), factor);
        const int64_t first = places.column(column + i);
        if (places.column(column + i + n - 1) == first + n - 1) return store_some(out + first, v, n);
        T lanes[W];  // a head that ends within a tile
        store_some(lanes, v, n);
        for (int lane = 0; lane < n; ++lane) out[places.column(column + i + lane)] = lanes[lane];
      });
    }
  }
};

}  // namespace
}  // namespace qr
