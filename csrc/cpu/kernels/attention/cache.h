// The layout of one layer's cache: [keys, values][block][kv head][page]. Blocks may have other layers' between them.
//
// A page holds S slots, padded to a multiple of 16 (P), of D elements. Nothing is assumed of what was never written.
//   keys, bf16             [P/16][D/2][16 slots][2]: tiles of AMX, scores of 16 tokens in one vector
//   keys, float32/float16  [P/16][D][16 slots]
//   values, bf16           [P/2][D][2]: pairs of slots interleaved, the other operand of AMX
//   values, others         [P][D]
//   keys, 8 bits           [P/16][D/4][16 slots][4], and
//   values, 8 bits         [P/4][D][4]: as bf16 with four in place of two, since tiles of integers take four at a time;
//                          then P float32, the scale of each slot. So a page is all that copying and sharing need.
// Writing one token's key touches a cache line for each pair of elements: lines that attention is about to read.
// Values are read in whole vectors and tiles, up to kCacheSlack bytes past a page.
#pragma once

#include "../../kernels.h"

namespace qr {

// Elements of a head: a latent of 1024 and 64 that rotate, with room for an indexer's key of 64.
constexpr int64_t kMostHead = 1152;
// Pages whose softmax is taken at once.
inline int64_t pages_of_split(const CacheLayout& layout) {
  return layout.block_size < kSplitTokens ? kSplitTokens / layout.block_size : 1;
}
inline int64_t padded_slots(const CacheLayout& layout) { return round_up(layout.block_size, 16); }
// Head size of the sums, in whole tiles.
inline int64_t padded_head(const CacheLayout& layout) { return round_up(layout.head_size, 32); }
constexpr int64_t kCacheSlack = 128;
// Floats that one split of one piece comes to: maxima, totals, weighted values.
inline int64_t partial_floats(const CacheLayout& layout) { return kQueryRows * (2 + padded_head(layout)); }

// Offsets in elements.
inline int64_t key_page(const CacheLayout& layout, int64_t block, int64_t kv_head) {
  return block * layout.block + kv_head * layout.page;
}
inline int64_t value_page(const CacheLayout& layout, int64_t block, int64_t kv_head) {
  return (layout.num_blocks + block) * layout.block + kv_head * layout.page;
}

// Whether a token's key shares its cache lines with the one before: the next slot of the same 16.
inline bool shares_group(const RopeArgs& args, int64_t token) {
  const int64_t slot = args.slots[token];
  return slot == args.slots[token - 1] + 1 && slot % args.layout.block_size % 16 != 0;
}

}  // namespace qr
