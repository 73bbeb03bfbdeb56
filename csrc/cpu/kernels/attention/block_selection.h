// An indexer's scores of blocks of tokens: the largest product of a query with a key of a block, in float32 whatever the
// dtypes.
//
// Sixteen keys at a time, which are rows, are laid out as slots of a page, and meet the queries of all tokens that see
// them: a product's bits depend on nothing but query and key.
#pragma once

#include "attention_float.h"
#include "slots.h"

namespace qr {
namespace {

// The largest of some of the products of sixteen keys; NaN is none.
QR_INLINE float largest_product(const float* products, int64_t begin, int64_t end) {
  float top = -__builtin_inff();
  if (end - begin == kGroup) {
    vf tops = set1(top);
    for (int64_t i = 0; i < kGroup; i += W) tops = max(load(products + i), tops);
    return largest(tops);
  }
  for (int64_t i = begin; i < end; ++i) top = products[i] > top ? products[i] : top;
  return top;
}

// Keys of a sequence as groups of slots, one at a time.
template <class T>
struct KeyGroup {
  const BlockScoreArgs& args;
  const int32_t* pages;
  int64_t padded;  // features, a multiple of two
  T *rows, *group;

  // Of `count` positions from `first` on. What was in the other slots stays.
  void take(int64_t first, int64_t count) const {
    for (int64_t i = 0; i < count; ++i) {
      const T* row = static_cast<const T*>(args.keys) + args.layout.row(pages, first + i);
      args.layout.copy(rows + i * padded, row, 0, args.size, sizeof(T));
    }
    write_keys(group, padded, 0, rows, kGroup);
  }
};

// Rows of queries, those of a token one behind the other, as floats.
struct WideQueries {
  const BlockScoreArgs& args;
  const BlockScorePiece& piece;
  int64_t padded;
  float* rows;

  int64_t count() const { return piece.tokens * args.heads; }
  void take() const {
    for (int64_t row = 0; row < count(); ++row) {
      const int64_t from = (piece.first_token * args.heads + row) * args.size;
      each_vector(args.size, [&](int64_t i, int n) __attribute__((always_inline)) {
        store_some(rows + row * padded + i, load_as(args.query, args.dtype, from + i, n), n);
      });
    }
  }
  // Scores of the blocks that a token has in positions [first, end) become no less than its products with them.
  void raise(float* scores, const float* products, int64_t first, int64_t end, int64_t block) const {
    for (int64_t from = first, to; from < end; from = to, ++block) {
      to = (block + 1) * args.run < end ? (block + 1) * args.run : end;
      const float top = largest_product(products, from - first, to - first);
      scores[block] = top > scores[block] ? top : scores[block];
    }
  }
  // With the keys of positions [first, end).
  template <class T>
  void meet(const T* group, int64_t first, int64_t end) const {
    const int64_t block = first / args.run, blind = first > piece.first_position ? first - piece.first_position : 0;
    int64_t head = 0, sees = piece.first_position + blind + 1;  // of the next row
    each_row_block<FloatMath<T>::kKeyRows>(count() - blind * args.heads, [&](auto together, int64_t at) {
      alignas(64) float products[together.value * kGroup];
      const int64_t row = blind * args.heads + at;
      FloatMath<T>::template score_rows<together.value>(rows + row * padded, padded, padded, group, products, kGroup);
      for (int64_t r = 0; r < together.value; ++r) {
        raise(piece.scores + (row + r) * piece.stride, products + r * kGroup, first, end < sees ? end : sees, block);
        if (++head < args.heads) continue;
        head = 0;
        ++sees;
      }
    });
  }
};

template <class T>
void block_scores_of(const BlockScoreArgs& args, const BlockScorePiece& piece) {
  const int64_t padded = round_up(args.size, 2), num_rows = piece.tokens * args.heads;
  const int64_t query_bytes = round_up(num_rows * padded * 4, 64);
  const int64_t group_bytes = round_up(kGroup * padded * int64_t(sizeof(T)), 64);
  char* memory = static_cast<char*>(scratch(0, query_bytes + 2 * group_bytes));
  if (memory == nullptr) return;
  std::memset(memory, 0, size_t(query_bytes + 2 * group_bytes));
  auto* rows = reinterpret_cast<T*>(memory + query_bytes);
  auto* group = reinterpret_cast<T*>(memory + query_bytes + group_bytes);
  const KeyGroup<T> keys{args, piece.pages, padded, rows, group};
  const WideQueries queries{args, piece, padded, reinterpret_cast<float*>(memory)};
  queries.take();
  for (int64_t row = 0; row < num_rows; ++row)
    for (int64_t block = piece.begin; block < piece.end; ++block)
      piece.scores[row * piece.stride + block] = -__builtin_inff();
  // Positions that the last token sees, and that are this piece's.
  const int64_t longest = piece.first_position + piece.tokens;
  const int64_t last = piece.end * args.run < longest ? piece.end * args.run : longest;
  for (int64_t first = piece.begin * args.run; first < last; first += kGroup) {
    const int64_t end = first + kGroup < last ? first + kGroup : last;
    keys.take(first, end - first);
    queries.meet(group, first, end);
  }
}

void block_scores(const BlockScoreArgs& args, const BlockScorePiece& piece) {
  if (args.keys_dtype == QR_FLOAT32)
    block_scores_of<float>(args, piece);
  else if (args.keys_dtype == QR_BFLOAT16)
    block_scores_of<Bf16>(args, piece);
  else
    block_scores_of<Fp16>(args, piece);
}

}  // namespace
}  // namespace qr
