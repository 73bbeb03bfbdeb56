// Compact bf16 panels (compact.h) expanded to plain ones, a step of 32 k at a time.
#pragma once

#include "../compact.h"
#include "simd.h"

namespace qr {
namespace {

#if defined(__AVX512F__)
using Bytes = __m512i;
QR_INLINE Bytes load_bytes_of(const char* p) { return _mm512_loadu_si512(p); }
QR_INLINE void store_bytes(char* p, Bytes v) { _mm512_storeu_si512(p, v); }
QR_INLINE Bytes sixteen_bytes(const uint8_t* p) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
QR_INLINE Bytes low_nibbles(Bytes v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
QR_INLINE Bytes high_nibbles(Bytes v) { return low_nibbles(_mm512_srli_epi16(v, 4)); }
QR_INLINE Bytes look_up(Bytes table, Bytes at) { return _mm512_shuffle_epi8(table, at); }
QR_INLINE Bytes first_pairs(Bytes low, Bytes high) { return _mm512_unpacklo_epi8(low, high); }
QR_INLINE Bytes second_pairs(Bytes low, Bytes high) { return _mm512_unpackhi_epi8(low, high); }
#else
using Bytes = __m256i;
QR_INLINE Bytes load_bytes_of(const char* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
QR_INLINE void store_bytes(char* p, Bytes v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }
QR_INLINE Bytes sixteen_bytes(const uint8_t* p) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
QR_INLINE Bytes low_nibbles(Bytes v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
QR_INLINE Bytes high_nibbles(Bytes v) { return low_nibbles(_mm256_srli_epi16(v, 4)); }
QR_INLINE Bytes look_up(Bytes table, Bytes at) { return _mm256_shuffle_epi8(table, at); }
QR_INLINE Bytes first_pairs(Bytes low, Bytes high) { return _mm256_unpacklo_epi8(low, high); }
QR_INLINE Bytes second_pairs(Bytes low, Bytes high) { return _mm256_unpackhi_epi8(low, high); }
#endif

constexpr int64_t kExpandedStep = kDepth * kPanel * 2;

// Expands steps of one panel in ascending order, from `step` on.
class Expander {
 public:
  Expander() = default;
  Expander(const char* panel, int64_t k, int64_t step) : first(panel + compact_begin(k)), stream(compact_stream(k)) {
    const auto* header = reinterpret_cast<const CompactHeader*>(panel);
    table = sixteen_bytes(header->upper);
    patch = reinterpret_cast<const uint32_t*>(header + 1);
    end = patch + header->patches;
    while (patch < end && *patch < first_of(step)) ++patch;
  }

  __attribute__((always_inline)) void expand(int64_t step, char* out) {
    for (int64_t group = 0; group < 2 * kCompactStreams; ++group) {
      const char* in = first + group / 2 * stream + step * kCompactStep + group % 2 * kCompactGroup;
      for (int64_t at = 0; at < 64; at += int64_t(sizeof(Bytes))) {
        const Bytes codes = load_bytes_of(in + at);
        const Bytes upper01 = look_up(table, low_nibbles(codes)), upper23 = look_up(table, high_nibbles(codes));
        const Bytes lower01 = load_bytes_of(in + 64 + at), lower23 = load_bytes_of(in + 128 + at);
        char* lines = out + group * 256 + at;
        store_bytes(lines, first_pairs(lower01, upper01));
        store_bytes(lines + 64, second_pairs(lower01, upper01));
        store_bytes(lines + 128, first_pairs(lower23, upper23));
        store_bytes(lines + 192, second_pairs(lower23, upper23));
      }
    }
    for (; patch < end && *patch < first_of(step + 1); ++patch)
      out[((*patch >> 8) - step * kDepth * kPanel) * 2 + 1] = char(*patch);
  }

 private:
  static uint32_t first_of(int64_t step) { return uint32_t(step * kDepth * kPanel) << 8; }

  const char* first = nullptr;
  int64_t stream = 0;
  Bytes table{};
  const uint32_t *patch = nullptr, *end = nullptr;
};

}  // namespace
}  // namespace qr
