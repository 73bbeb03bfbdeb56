// The layout of one layer's cache: [keys, values][block][kv head][page].
//
// A page holds S slots, padded to a multiple of 16 (P), of D elements. Nothing is assumed of what was never written.
//   keys, bf16             [P/16][D/2][16 slots][2]: tiles of AMX, scores of 16 tokens in one vector
//   keys, float32/float16  [P/16][D][16 slots]
//   values, bf16           [P/2][D][2]: pairs of slots interleaved, the other operand of AMX
//   values, others         [P][D]
// Writing one token's key touches a cache line for each pair of elements: lines that attention is about to read.
// Values are read in whole vectors and tiles, up to kCacheSlack bytes past a page.
#pragma once

#include "../kernels.h"

namespace qr {

inline int64_t padded_slots(const CacheLayout& layout) { return round_up(layout.block_size, 16); }
// Head size of the sums, in whole tiles.
inline int64_t padded_head(const CacheLayout& layout) { return round_up(layout.head_size, 32); }
constexpr int64_t kCacheSlack = 128;

// Offsets in elements.
inline int64_t key_page(const CacheLayout& layout, int64_t block, int64_t kv_head) {
  return (block * layout.kv_heads + kv_head) * layout.page;
}
inline int64_t value_page(const CacheLayout& layout, int64_t block, int64_t kv_head) {
  return ((layout.num_blocks + block) * layout.kv_heads + kv_head) * layout.page;
}

}  // namespace qr
