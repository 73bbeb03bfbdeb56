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
// the values of a page: for all pages first, or one by one (by_page), so that what is prepared stays in L1. A cache of
// 8 bits is widened a page at a time to bf16, which holds its numbers exactly, or multiplied as it is by a Math that
// works with integers. The scales of keys multiply scores, those of values the weights. scores(w, first, last, next,
// values) is called for pages of kGroups * 16 slots at a time, whose `values` it fetches if there are any; next: the keys
// after them.
#pragma once

#include <algorithm>

#include "../float8.h"
#include "attention_softmax.h"

namespace qr {
namespace {

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
QR_INLINE void copy_scales(float* out, const void* scales, int64_t used, int64_t padded) {
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

// Pages of 8 bits to bf16, while a page that will be read next is fetched. Two lines of pairs of bf16 for each of quads.
template <class Stored>
QR_INLINE void widen_keys(Bf16* out, const Stored* in, int64_t n, Fetch then) {
  for (int64_t i = 0; i < n; i += 64) {
    then.advance(1);
    for (int64_t part = 0; part < 16; part += W)
      widen_quads(out + i + 2 * part, out + i + 32 + 2 * part, in + i + 4 * part);
  }
  then.complete();
}
template <class Stored>
QR_INLINE void widen_values(Bf16* out, const Stored* in, int64_t n, int64_t head, Fetch then) {
  for (int64_t i = 0; i < n; i += 4 * head) {
    Bf16 *first = out + i, *last = first + 2 * head;
    int64_t d = 0;
    for (; d + W <= head; d += W) {
      then.advance(1);
      widen_quads(first + 2 * d, last + 2 * d, in + i + 4 * d);
    }
    if (d == head) continue;
    alignas(64) Stored quads[4 * W] = {};
    alignas(64) Bf16 firsts[2 * W], lasts[2 * W];
    std::memcpy(static_cast<void*>(quads), in + i + 4 * d, size_t(head - d) * 4);
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
  constexpr bool kScaled = sizeof(Stored) == 1;
  constexpr bool kWidened = kScaled && !std::is_same<Cache, Stored>::value;
  const CacheLayout& layout = args.layout;
  const int64_t slots = layout.block_size, padded = padded_slots(layout), head = layout.head_size;
  const int64_t wide = padded_head(layout), elements = padded * head;
  const int64_t split_pages = pages_of_split(layout);
  const int64_t scored_pages = std::max<int64_t>(1, Math::kGroups * 16 / padded);
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
  const int64_t copies = kWidened ? split_pages + scored_pages : kScaled ? 0 : slots == padded ? 1 : split_pages;
  const int64_t own_bytes = Math::own_bytes(w, wide);
  // Tiles, two of rows in steps of two dimensions at worst, or rows of floats.
  const int64_t query_bytes = std::max(head * 1024, kQueryRows * wide * 4);
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
    for (int64_t first = 0; first < pages; first += scored_pages) {
      const int64_t last = std::min(first + scored_pages, pages);
      for (int64_t i = first; kScaled && i < last; ++i) {
        const auto* keys = static_cast<const Stored*>(w.keys[i]);
        copy_scales(w.key_scales + i * padded, keys + elements, used_slots(seen.begin + i), padded);
        if constexpr (kWidened) {
          auto* copy = reinterpret_cast<Bf16*>(page_copies + (split_pages + i - first) * page_bytes);
          widen_keys(copy, keys, elements, Fetch(w.values[i], bytes));
          w.keys[i] = copy;
        }
      }
      math.scores(w, first, last, kWidened || last == pages ? nullptr : w.keys[last], kWidened ? nullptr : w.values);
    }
    for (int64_t i = 0; kScaled && i < pages; ++i)
      copy_scales(w.value_scales + i * padded, static_cast<const Stored*>(w.values[i]) + elements,
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

}  // namespace
}  // namespace qr
