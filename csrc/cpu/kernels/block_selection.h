// An indexer's scores of blocks of tokens: the largest product of a query with a key of a block, in float32 whatever the
// dtypes. Keys are read where they are, as rows in two halves.
//
// A product is summed in lanes over the features, then over the lanes: its bits depend on nothing but query and key.
#pragma once

#include "attention/attention_float.h"

namespace qr {
namespace {

// Rows of queries, and keys, whose products are summed at once.
constexpr int kScoredRows = 4, kScoredKeys = 2;

// Adds what a half of the features gives to the products of R queries, `wide` apart, with K keys.
template <int R, int K, class T>
QR_INLINE void add_products(vf (&total)[R][K], const float* query, int64_t wide, const T* const* keys, int64_t offset,
                            int64_t count) {
  each_vector(count, [&](int64_t i, int n) __attribute__((always_inline)) {
    vf key[K];
    for (int k = 0; k < K; ++k) key[k] = load_some(keys[k] + offset + i, n);
    for (int r = 0; r < R; ++r) {
      const vf part = load(query + r * wide + i);
      for (int k = 0; k < K; ++k) total[r][k] = fma(part, key[k], total[r][k]);
    }
  });
}

// Queries as floats, each half of each with zeros behind it.
struct WideQueries {
  int64_t first, second, wide_first, wide;  // features of the halves, as they are and in whole vectors

  WideQueries(int64_t size, int64_t width)
      : first(size < width ? size : width), second(size - first), wide_first(round_up(first, W)),
        wide(wide_first + round_up(second, W)) {}

  void take(float* out, const BlockScoreArgs& args, int64_t row, int64_t count) const {
    for (int64_t end = row + count; row < end; ++row, out += wide) {
      std::memset(out, 0, size_t(wide) * 4);
      const int64_t at = row * args.size;
      each_vector(first, [&](int64_t i, int n) __attribute__((always_inline)) {
        store_some(out + i, load_as(args.query, args.dtype, at + i, n), n);
      });
      each_vector(second, [&](int64_t i, int n) __attribute__((always_inline)) {
        store_some(out + wide_first + i, load_as(args.query, args.dtype, at + first + i, n), n);
      });
    }
  }
};

template <int R, int K, class T>
QR_INLINE void raise(float* best, const WideQueries& queries, const float* query, const T* const* keys, int64_t half) {
  vf total[R][K];
  for (int r = 0; r < R; ++r)
    for (int k = 0; k < K; ++k) total[r][k] = zero();
  add_products<R, K>(total, query, queries.wide, keys, 0, queries.first);
  add_products<R, K>(total, query + queries.wide_first, queries.wide, keys, half, queries.second);
  for (int r = 0; r < R; ++r)
    for (int k = 0; k < K; ++k) {
      const float product = sum(total[r][k]);
      best[r] = product > best[r] ? product : best[r];
    }
}

// The largest products of R queries with `count` keys; NaN is none.
template <int R, class T>
void largest_products(float* out, int64_t stride, const WideQueries& queries, const float* query, const T* const* keys,
                      int64_t count, int64_t half) {
  float best[R];
  for (float& each : best) each = -__builtin_inff();
  int64_t k = 0;
  for (; k + kScoredKeys <= count; k += kScoredKeys)
    raise<R, kScoredKeys>(best, queries, query, keys + k, half);
  for (; k < count; ++k) raise<R, 1>(best, queries, query, keys + k, half);
  for (int r = 0; r < R; ++r) out[r * stride] = best[r];
}

template <class T>
void block_scores_of(const BlockScoreArgs& args, const BlockScorePiece& piece) {
  const RowLayout& layout = args.layout;
  const WideQueries queries(args.size, layout.width);
  const int64_t run = args.run, rows = piece.tokens * args.heads;
  const int64_t longest = piece.first_position + piece.tokens;  // tokens that the last one sees
  const int64_t most = run < longest ? run : longest;
  char* memory = static_cast<char*>(scratch(0, round_up(rows * queries.wide * 4, 64) + most * int64_t(sizeof(T*))));
  if (memory == nullptr) return;
  auto* query = reinterpret_cast<float*>(memory);
  auto* keys = reinterpret_cast<const T**>(memory + round_up(rows * queries.wide * 4, 64));
  queries.take(query, args, piece.first_token * args.heads, rows);
  for (int64_t block = piece.begin; block < piece.end; ++block) {
    const int64_t begin = block * run, count = longest - begin < run ? longest - begin : run;
    for (int64_t i = 0; i < count; ++i)
      keys[i] = static_cast<const T*>(args.keys) + layout.row(piece.pages, begin + i);
    for (int64_t token = 0; token < piece.tokens; ++token) {
      const int64_t seen = piece.first_position + token + 1 - begin;
      if (seen <= 0) continue;
      each_row_block<kScoredRows>(args.heads, [&](auto size, int64_t head) __attribute__((always_inline)) {
        const int64_t row = token * args.heads + head;
        largest_products<size.value>(piece.scores + row * piece.stride + block, piece.stride, queries,
                                     query + row * queries.wide, keys, seen < count ? seen : count, layout.half());
      });
    }
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
