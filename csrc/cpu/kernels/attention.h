// Paged attention of one piece: rows (token, query head) of one kv head over their context, in blocks of up to 32.
//
// The context is taken in splits of a fixed number of tokens, aligned to position 0. Within a split: all scores, their
// maximum, the exponentials, their product with the values; then the split is merged into the running result, in
// order. Each split is taken for all blocks in turn, while its pages are in L2. A token that a row may not see has the
// weight 0 exactly and adds exact zeros, so a row's bits do not depend on which rows it shares a piece with, on the
// chunk it came in, or on whether this is prefill or decode. Splits of one piece may be computed on several threads:
// they are merged in the same order.
//
// A Math says how scores and weighted values are computed; the rest is shared. It calls prepare(page) before it reads
// the values of a page: for all pages first, or one by one (by_page), so that what is prepared stays in L1. An int8
// cache is widened a page at a time to bf16, which holds its integers exactly, or multiplied as it is by a Math that
// works with integers. The scales of keys multiply scores, those of values the weights.
#pragma once

#include <type_traits>

#include "../threads.h"
#include "cache.h"
#include "gemm.h"

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

// A page's values, zero from slot `used` on.
template <class T>
void copy_value_page(T* out, const T* in, int64_t used, int64_t padded, int64_t head) {
  const int64_t whole = std::is_same<T, Bf16>::value ? used / 2 * 2 : used;
  std::memcpy(static_cast<void*>(out), in, size_t(whole * head) * sizeof(T));
  std::memset(static_cast<void*>(out + whole * head), 0, size_t((padded - whole) * head) * sizeof(T));
  if (used != whole)  // the first of an interleaved pair
    for (int64_t d = 0; d < head; ++d) out[whole * head + 2 * d] = in[whole * head + 2 * d];
}

// The scales behind a page; slots that nobody wrote get 0, for what is there may be NaN.
QR_INLINE void copy_scales(float* out, const int8_t* scales, int64_t used, int64_t padded) {
  std::memcpy(out, scales, size_t(used) * 4);
  for (int64_t slot = used; slot < padded; ++slot) out[slot] = 0.0f;
}

// Lines that are asked for a few at a time, between other work.
template <void (*kPrefetch)(const void*)>
class FetchTo {
 public:
  FetchTo(const void* begin, int64_t bytes)
      : at(static_cast<const char*>(begin)), end(begin == nullptr ? at : at + bytes) {}
  void advance(int64_t lines) {
    for (; lines > 0 && at < end; --lines, at += 64) kPrefetch(at);
  }
  void complete() { advance(end - at); }

 private:
  const char *at, *end;
};
using Fetch = FetchTo<prefetch_to_l2>;

// Asks for a line of each 4 KiB, so that their addresses are translated when the others are asked for: in a virtual
// machine that takes as long as memory itself.
QR_INLINE void translate(const void* begin, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 4096) prefetch_to_l2(static_cast<const char*>(begin) + at);
}

// int8 pages to bf16, while a page that will be read next is fetched. Two lines of pairs of bf16 for each of quads.
QR_INLINE void widen_keys(Bf16* out, const int8_t* in, int64_t n, Fetch then) {
  for (int64_t i = 0; i < n; i += 64) {
    then.advance(1);
    for (int64_t part = 0; part < 16; part += W)
      widen_quads(out + i + 2 * part, out + i + 32 + 2 * part, in + i + 4 * part);
  }
  then.complete();
}
QR_INLINE void widen_values(Bf16* out, const int8_t* in, int64_t n, int64_t head, Fetch then) {
  for (int64_t i = 0; i < n; i += 4 * head) {
    Bf16 *first = out + i, *last = first + 2 * head;
    int64_t d = 0;
    for (; d + W <= head; d += W) {
      then.advance(1);
      widen_quads(first + 2 * d, last + 2 * d, in + i + 4 * d);
    }
    if (d == head) continue;
    alignas(64) int8_t quads[4 * W] = {};
    alignas(64) Bf16 firsts[2 * W], lasts[2 * W];
    std::memcpy(quads, in + i + 4 * d, size_t(head - d) * 4);
    widen_quads(firsts, lasts, quads);
    std::memcpy(static_cast<void*>(first + 2 * d), firsts, size_t(head - d) * 4);
    std::memcpy(static_cast<void*>(last + 2 * d), lasts, size_t(head - d) * 4);
  }
  then.complete();
}

// The pages [begin, end) of one split that rows [row_begin, row_end) of a piece see; begin >= end: none.
struct SplitPages {
  int64_t begin, end;

  SplitPages(const AttentionArgs& args, const AttentionPiece& piece, int64_t split, int64_t row_begin,
             int64_t row_end) {
    const Rows at(args, piece);
    const int64_t slots = args.layout.block_size, pages = pages_of_split(args.layout);
    const int64_t first = at.seen_from(row_begin) / slots, last = at.position(row_end - 1) / slots;
    begin = split * pages > first ? split * pages : first;
    end = (split + 1) * pages <= last ? (split + 1) * pages : last + 1;
  }
};

template <class Math, class Stored>
void attend(const AttentionArgs& args, const AttentionPiece& piece) {
  using Weight = typename Math::Weight;
  using Cache = typename Math::Cache;
  constexpr bool kScaled = std::is_same<Stored, int8_t>::value;
  constexpr bool kWidened = kScaled && !std::is_same<Cache, int8_t>::value;
  const CacheLayout& layout = args.layout;
  const int64_t slots = layout.block_size, padded = padded_slots(layout), head = layout.head_size;
  const int64_t wide = padded_head(layout), elements = padded * head;
  const int64_t split_pages = pages_of_split(layout);
  const int64_t seq_len = args.seq_lens[piece.sequence];
  const Rows at(args, piece);
  const auto used_slots = [&](int64_t page) { return seq_len - page * slots < slots ? seq_len - page * slots : slots; };

  // 1. scratch
  const int64_t rows = piece.row_end - piece.row_begin, blocks = divide_up(rows, kQueryRows);
  Workspace w;
  w.first_row = 0;
  w.rows = rows < kQueryRows ? rows : kQueryRows;
  w.row_capacity = rows <= 16 ? 16 : kQueryRows;
  w.columns = split_pages * padded;
  const int64_t cells = kQueryRows * w.columns;
  const int64_t page_bytes = round_up(elements * int64_t(sizeof(Cache)) + kCacheSlack, 64);
  const int64_t copies = kWidened ? split_pages + 1 : kScaled ? 0 : slots == padded ? 1 : split_pages;
  const int64_t own_bytes = Math::own_bytes(w, wide);
  const int64_t query_bytes = head * 1024;  // two tiles of rows in steps of two dimensions, at worst
  char* memory = static_cast<char*>(
      scratch(0, blocks * (query_bytes + kQueryRows * wide * 4) + 2 * cells * 4 + own_bytes +
                     partial_floats(layout) * 4 + copies * page_bytes + 2 * round_up(w.columns * 4, 64) +
                     4 * split_pages * int64_t(sizeof(void*)) + 128));
  if (memory == nullptr) return;
  auto take = [&](int64_t bytes) {
    char* taken = memory;
    memory += round_up(bytes, 64);
    return taken;
  };
  char* queries = take(blocks * query_bytes);
  w.scores = reinterpret_cast<float*>(take((own_bytes != 0 ? 2 : 1) * cells * 4));
  w.weights = own_bytes != 0 ? w.scores : static_cast<void*>(take(cells * int64_t(sizeof(Weight))));
  w.own = take(own_bytes);
  auto* split_sums = reinterpret_cast<float*>(take(partial_floats(layout) * 4));
  auto* merged_values = reinterpret_cast<float*>(take(blocks * kQueryRows * wide * 4));
  char* page_copies = take(copies * page_bytes);
  w.key_scales = reinterpret_cast<float*>(take(w.columns * 4));
  w.value_scales = reinterpret_cast<float*>(take(w.columns * 4));
  w.keys = reinterpret_cast<const void**>(memory);
  w.values = w.keys + split_pages;
  w.later = w.values + split_pages;
  const void** fetched = kWidened ? w.later + split_pages : w.later;  // what widens fetches as well
  Merged merged(args, at, merged_values, piece.partials == nullptr ? rows : 0);
  const auto take_block = [&](int64_t block) {
    w.first_row = block * kQueryRows;
    w.rows = rows - w.first_row < kQueryRows ? rows - w.first_row : kQueryRows;
    w.query = queries + block * query_bytes;
  };

  // 2. queries
  Math math(args, w);
  for (int64_t block = 0; block < blocks; ++block) {
    take_block(block);
    math.take_queries(args, w, [&](int64_t row) { return at(w.first_row + row); });
  }

  const int64_t bytes = (elements + (kScaled ? 4 * padded : 0)) * int64_t(sizeof(Stored));

  // 3. splits, in order, each for all blocks. While keys are scored, the values of the same pages come from memory;
  // while the last block's values are weighed, the keys of what follows: the next split, or the next piece's first.
  const auto* cache = static_cast<const Stored*>(args.cache);
  const auto block_of = [&](const AttentionPiece& of, int64_t page) {
    return args.block_tables[of.sequence * args.table_stride + page];
  };
  for (int64_t step = piece.split_begin * blocks; step < piece.split_end * blocks; ++step) {
    const int64_t split = step / blocks;
    take_block(step % blocks);
    const SplitPages seen(args, piece, split, w.first_row, w.first_row + w.rows);
    if (seen.begin >= seen.end) continue;
    const int64_t pages = seen.end - seen.begin, base = seen.begin * slots;
    for (int64_t i = 0; i < pages; ++i) {
      w.keys[i] = cache + key_page(layout, block_of(piece, seen.begin + i), piece.kv_head);
      w.values[i] = cache + value_page(layout, block_of(piece, seen.begin + i), piece.kv_head);
    }
    const bool ends = split + 1 == piece.split_end;
    const AttentionPiece* following = (step + 1) % blocks != 0 ? nullptr : ends ? piece.next : &piece;
    for (int64_t i = 0; i < pages; ++i) w.later[i] = fetched[i] = nullptr;
    if (following != nullptr) {
      const SplitPages next(args, *following, ends ? following->split_begin : split + 1, 0,
                            following->row_end - following->row_begin);
      for (int64_t i = 0; i < pages && i < next.end - next.begin; ++i) {
        const int64_t block = block_of(*following, next.begin + i);
        const Stored *keys = cache + key_page(layout, block, following->kv_head),
                     *values = cache + value_page(layout, block, following->kv_head);
        fetched[i] = keys;
        translate(keys, bytes);
        translate(values, bytes);
      }
    }

    math.begin_scores();
    for (int64_t i = 0; i < pages; ++i) {
      const auto* keys = static_cast<const Stored*>(w.keys[i]);
      if constexpr (kScaled)
        copy_scales(w.key_scales + i * padded, keys + elements, used_slots(seen.begin + i), padded);
      if constexpr (kWidened) {
        auto* copy = reinterpret_cast<Bf16*>(page_copies + split_pages * page_bytes);
        widen_keys(copy, keys, elements, Fetch(w.values[i], bytes));
        math.scores(w, i, copy, nullptr, nullptr);
      } else {
        math.scores(w, i, keys, i + 1 < pages ? static_cast<const Cache*>(w.keys[i + 1]) : nullptr,
                    static_cast<const Cache*>(w.values[i]));
      }
    }
    for (int64_t i = 0; kScaled && i < pages; ++i)
      copy_scales(w.value_scales + i * padded, static_cast<const int8_t*>(w.values[i]) + elements,
                  used_slots(seen.begin + i), padded);
    // what this split comes to: merged at once, or kept
    float* own = piece.partials == nullptr ? split_sums
                                           : piece.partials + (split - piece.split_begin) * partial_floats(layout);
    float *largest = own, *total = own + kQueryRows;
    w.partial = own + 2 * kQueryRows;
    const Softmax<kScaled, Math::kShortWeights, Weight> softmax(args, w, pages);
    for (int64_t first = 0; first < w.rows; first += kSoftmaxRows) {
      const int64_t last = first + kSoftmaxRows < w.rows ? first + kSoftmaxRows : w.rows;
      int64_t from[kSoftmaxRows], to[kSoftmaxRows];
      for (int64_t row = first; row < last; ++row) {
        const int64_t begin = at.seen_from(w.first_row + row) - base;
        from[row - first] = begin > 0 ? begin : 0;
        to[row - first] = at.position(w.first_row + row) + 1 - base;
        math.complete_scores(w, row, pages);
        const float slope = args.slopes == nullptr ? 0.0f : args.slopes[at.query_head(w.first_row + row)];
        largest[row] = softmax.find_largest(row, from[row - first], to[row - first], slope);
      }
      for (int64_t row = first; row < last; ++row) {
        total[row] = softmax.weigh(row, from[row - first], to[row - first], largest[row]);
        math.take_weights(w, row, pages);
      }
    }
    math.begin_values();
    math.weighted_values(w, pages, [&](int64_t i) {
      if constexpr (kWidened) {
        auto* copy = reinterpret_cast<Bf16*>(page_copies + (Math::by_page(w) ? i % 2 : i) * page_bytes);
        widen_values(copy, static_cast<const Stored*>(w.values[i]), elements, head, Fetch(fetched[i], bytes));
        w.values[i] = copy;
      } else if (!kScaled && used_slots(seen.begin + i) < padded) {
        // Slots past the sequence, or past the page's, hold whatever was there: 0 * NaN would be NaN.
        auto* copy = reinterpret_cast<Cache*>(page_copies + i % copies * page_bytes);
        copy_value_page(copy, static_cast<const Cache*>(w.values[i]), used_slots(seen.begin + i), padded, head);
        w.values[i] = copy;
      }
    });
    if (piece.partials == nullptr) merged.add_split(w.first_row, w.rows, largest, total, w.partial);
  }
  if (piece.partials == nullptr) merged.write(args, at);
}

// The splits of one piece that several threads computed.
void merge_splits(const AttentionArgs& args, const AttentionPiece& piece) {
  const int64_t rows = piece.row_end - piece.row_begin;
  auto* values = static_cast<float*>(scratch(0, kQueryRows * padded_head(args.layout) * 4));
  if (values == nullptr) return;
  const Rows at(args, piece);
  Merged merged(args, at, values, rows);
  for (int64_t split = piece.split_begin; split < piece.split_end; ++split) {
    const float* partial = piece.partials + (split - piece.split_begin) * partial_floats(args.layout);
    merged.add_split(0, rows, partial, partial + kQueryRows, partial + 2 * kQueryRows);
  }
  merged.write(args, at);
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
