// What every function of the C ABI asks of its arguments. Nothing is read, written or computed before it holds.
#pragma once

#include <cstdint>
#include <initializer_list>

namespace qr {

// More elements than any memory holds; products below it leave room for bytes and padding in 64 bits.
constexpr int64_t kMostElements = int64_t(1) << 46;

// Whether none of these sizes is negative and their product may be that of something in memory.
template <class... Sizes>
inline bool are_sizes(Sizes... sizes) {
  int64_t product = 1;
  for (int64_t size : {int64_t(sizes)...})
    if (size < 0 || size > kMostElements || __builtin_mul_overflow(product, size, &product) || product > kMostElements)
      return false;
  return true;
}

template <class... Pointers>
inline bool are_there(Pointers... pointers) {
  return ((pointers != nullptr) && ...);
}

// Whether a cache may have so many blocks: each in two halves, of a page for each kv head, `block` elements apart.
inline bool are_blocks(int64_t num_blocks, int64_t kv_heads, int64_t page, int64_t block) {
  return are_sizes(2, num_blocks, block) && are_sizes(kv_heads, page) && kv_heads * page <= block;
}

inline bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 64 == 0; }

// False for NaN, too.
inline bool is_finite(float value) { return value - value == 0.0f; }
inline bool is_epsilon(float eps) { return eps >= 0.0f && is_finite(eps); }

}  // namespace qr
