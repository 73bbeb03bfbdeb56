// An indexer's scores of the context: sum over heads of weight * max(query . key, 0), in float32 whatever the dtypes.
//
// Sixteen slots of a page are scored at once, head by head: a position's bits do not depend on the others, nor on which
// piece it is in. The key is the end of the cached one. Of a cache of 8 bits it is widened to bf16, which holds its
// numbers exactly, and the slot's scale multiplies the sum, which it may, being above zero.
#pragma once

#include "attention_float.h"

namespace qr {
namespace {

// The scores of sixteen slots, of which `group` has the keys.
template <class T>
void score_group(float* out, const T* group, const float* query, const float* weights, int64_t heads, int64_t size) {
  constexpr int kVectors = FloatMath<T>::kVectorsOfGroup;
  vf total[kVectors];
  for (vf& part : total) part = zero();
  alignas(64) float products[FloatMath<T>::kKeyRows * 16];
  each_row_block<FloatMath<T>::kKeyRows>(heads, [&](auto count, int64_t head) __attribute__((always_inline)) {
    FloatMath<T>::template score_rows<count.value>(query + head * size, size, size, group, products, 16);
    for (int64_t r = 0; r < count.value; ++r)
      for (int v = 0; v < kVectors; ++v)
        total[v] = fma(set1(weights[head + r]), max(load(products + r * 16 + v * W), zero()), total[v]);
  });
  for (int v = 0; v < kVectors; ++v) store(out + v * W, total[v]);
}

template <class Stored>
void index_scores(const IndexArgs& args, const IndexPiece& piece) {
  constexpr bool kScaled = sizeof(Stored) == 1;
  const CacheLayout& layout = args.layout;
  const int64_t size = args.size, row = args.heads * size, slots = layout.block_size, padded = padded_slots(layout);
  char* memory = static_cast<char*>(scratch(0, row * 4 + size * 16 * 2 + 128));
  if (memory == nullptr) return;
  auto* query = reinterpret_cast<float*>(memory);
  auto* widened = reinterpret_cast<Bf16*>(memory + round_up(row * 4, 64));
  each_vector(row, [&](int64_t i, int n) __attribute__((always_inline)) {
    store_some(query + i, load_as(args.query, args.dtype, piece.token * row + i, n), n);
  });
  const float* weights = args.weights + piece.token * args.heads;
  const int64_t first = (layout.head_size - size) * 16;  // of a group's elements, in every layout
  for (int64_t page = piece.page_begin; page < piece.page_end; ++page) {
    const auto* keys = static_cast<const Stored*>(args.cache) + key_page(layout, piece.blocks[page], 0);
    const auto* scales = reinterpret_cast<const float*>(keys + padded * layout.head_size);
    for (int64_t slot = 0; slot < slots; slot += 16) {
      alignas(64) float scores[16];
      const Stored* group = keys + slot * layout.head_size + first;
      if constexpr (kScaled) {
        widen_keys(widened, group, size * 16, Fetch(nullptr, 0));
        score_group(scores, widened, query, weights, args.heads, size);
        for (int64_t i = 0; i < 16; i += W) store(scores + i, mul(load(scores + i), load(scales + slot + i)));
      } else {
        score_group(scores, group, query, weights, args.heads, size);
      }
      const int64_t count = slots - slot < 16 ? slots - slot : 16;
      std::memcpy(piece.scores + page * slots + slot, scores, size_t(count) * 4);
    }
  }
}

}  // namespace
}  // namespace qr
