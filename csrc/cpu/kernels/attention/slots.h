// Rows [count][n] of keys or values as slots of a page, from `slot` on; see cache.h for the layout.
#pragma once

#include <type_traits>

#include "cache.h"
#include "../simd.h"

namespace qr {
namespace {

constexpr int64_t kGroup = 16;  // slots whose keys share cache lines

// Of one group, whose slots are written together.
template <class T>
void write_keys(T* page, int64_t n, int64_t slot, const T* rows, int64_t count) {
  constexpr int64_t kTogether = sizeof(T) == 1 ? 4 : std::is_same<T, Bf16>::value ? 2 : 1;
  constexpr int64_t kBytes = kTogether * sizeof(T);
  T* out = page + slot / kGroup * n * kGroup + slot % kGroup * kTogether;
  int64_t i = 0;
  if (kBytes == 4 && count == kGroup)
    for (; i + 16 * kTogether <= n; i += 16 * kTogether) transpose_16x16(out + i * kGroup, rows + i, n * sizeof(T));
  for (; i < n; i += kTogether)
    for (int64_t t = 0; t < count; ++t)
      std::memcpy(static_cast<void*>(out + i * kGroup + t * kTogether), rows + t * n + i, kBytes);
}

template <class T>
void write_values(T* page, int64_t n, int64_t slot, const T* rows, int64_t count) {
  std::memcpy(static_cast<void*>(page + slot * n), rows, size_t(count * n) * sizeof(T));
}
void write_values(Bf16* page, int64_t n, int64_t slot, const Bf16* rows, int64_t count) {
  const auto* in = reinterpret_cast<const uint16_t*>(rows);
  for (int64_t t = 0; t < count; ++t) {
    auto* pair = reinterpret_cast<uint16_t*>(page) + (slot + t) / 2 * n * 2;
    const uint16_t* own = in + t * n;
    if ((slot + t) % 2 == 0 && t + 1 < count) {
      for (int64_t i = 0; i < n; ++i) {
        const uint32_t both = own[i] | uint32_t(own[n + i]) << 16;
        std::memcpy(pair + 2 * i, &both, 4);
      }
      ++t;
    } else {
      for (int64_t i = 0; i < n; ++i) pair[2 * i + (slot + t) % 2] = own[i];
    }
  }
}
void write_values(int8_t* page, int64_t n, int64_t slot, const int8_t* rows, int64_t count) {
  for (int64_t t = 0; t < count; ++t) {
    int8_t* quad = page + (slot + t) / 4 * n * 4 + (slot + t) % 4;
    for (int64_t i = 0; i < n; ++i) quad[i * 4] = rows[t * n + i];
  }
}

template <class T>
void write_slots_of(void* keys, void* values, int64_t n, const void* from, int64_t count) {
  const auto* rows = static_cast<const T*>(from);
  for (int64_t slot = 0; slot < count; slot += kGroup)
    write_keys(static_cast<T*>(keys), n, slot, rows + slot * n, count - slot < kGroup ? count - slot : kGroup);
  if (values != nullptr) write_values(static_cast<T*>(values), n, 0, rows, count);
}

void write_slots(void* keys, void* values, int32_t dtype, int64_t n, const void* rows, int64_t count) {
  if (dtype == QR_FLOAT32)
    write_slots_of<float>(keys, values, n, rows, count);
  else if (dtype == QR_BFLOAT16)
    write_slots_of<Bf16>(keys, values, n, rows, count);
  else
    write_slots_of<Fp16>(keys, values, n, rows, count);
}

}  // namespace
}  // namespace qr
