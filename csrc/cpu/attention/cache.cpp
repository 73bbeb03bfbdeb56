// Pages of keys and values, and rows of tables: memory that is moved, not computed with.
#include <cstring>

#include "../arguments.h"
#include "../kernels/attention/cache.h"
#include "../runtime/threads.h"

using namespace qr;

constexpr int64_t kMostBlockSize = int64_t(1) << 30;

extern "C" {

int64_t qr_cache_page(int32_t dtype, int64_t block_size, int64_t head_size) {
  if (dtype < QR_FLOAT32 || dtype >= kNumCacheTypes || block_size <= 0 ||
      block_size > kMostBlockSize || head_size <= 0 || head_size > kMostHead ||
      head_size % (has_scales(dtype) ? 4 : 2) != 0)
    return QR_EINVAL;
  const CacheLayout layout{dtype, 0, 0, block_size, head_size, 0, 0};
  const int64_t slot = head_size + (has_scales(dtype) ? 4 : 0);  // elements, with the scale
  // A multiple of the slots, so that a page is [S, X] of a tensor; without padding, X is the slot.
  if (padded_slots(layout) == block_size) return block_size * slot;
  return round_up(divide_up(padded_slots(layout) * slot, block_size), 32) * block_size;
}

int32_t qr_embedding(void* out, const void* table, int64_t row_bytes, int64_t table_rows, const int64_t* ids,
                     int64_t rows) {
  if (!are_sizes(rows, row_bytes) || !are_sizes(table_rows, row_bytes)) return QR_EINVAL;
  if (rows > 0 && !are_there(ids, table, out)) return QR_EINVAL;
  for (int64_t row = 0; row < rows; ++row)
    if (ids[row] < 0 || ids[row] >= table_rows) return QR_EINVAL;
  auto copy = [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      std::memcpy(static_cast<char*>(out) + row * row_bytes, static_cast<const char*>(table) + ids[row] * row_bytes,
                  size_t(row_bytes));
  };
  constexpr int64_t kRows = 64;
  parallel_for(divide_up(rows, kRows), [&](int64_t index) {
    copy(index * kRows, (index + 1) * kRows < rows ? (index + 1) * kRows : rows);
  });
  return QR_OK;
}

int32_t qr_touch(void* begin, int64_t bytes) {
  if (!are_sizes(bytes) || (bytes > 0 && begin == nullptr)) return QR_EINVAL;
  auto* first = static_cast<uint8_t*>(begin);
  constexpr int64_t kPage = 4096;
  for (int64_t at = 0; at < bytes; at += kPage) __atomic_fetch_or(first + at, uint8_t(0), __ATOMIC_RELAXED);
  if (bytes > 0) __atomic_fetch_or(first + bytes - 1, uint8_t(0), __ATOMIC_RELAXED);
  return QR_OK;
}

int32_t qr_copy_blocks(void* const* caches, int64_t num_caches, int64_t num_blocks, int64_t block_bytes,
                       const int64_t* pairs, int64_t num_pairs) {
  if (!are_sizes(2, num_caches) || !are_sizes(2, num_pairs) || !are_sizes(2, num_blocks, block_bytes)) return QR_EINVAL;
  if (num_caches == 0 || num_pairs == 0) return QR_OK;
  if (!are_there(caches, pairs)) return QR_EINVAL;
  for (int64_t i = 0; i < num_caches; ++i)
    if (caches[i] == nullptr) return QR_EINVAL;
  for (int64_t i = 0; i < 2 * num_pairs; ++i)
    if (pairs[i] < 0 || pairs[i] >= num_blocks) return QR_EINVAL;
  // Pairs in order, since one may read what another wrote; layers and halves do not meet.
  parallel_for(2 * num_caches, [&](int64_t index) {
    char* half = static_cast<char*>(caches[index / 2]) + index % 2 * num_blocks * block_bytes;
    for (int64_t i = 0; i < num_pairs; ++i)
      std::memmove(half + pairs[2 * i + 1] * block_bytes, half + pairs[2 * i] * block_bytes, size_t(block_bytes));
  });
  return QR_OK;
}
}
