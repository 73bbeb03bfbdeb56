// Compact bf16 panels (compact.h) made of plain ones, and expanded again, a step of 32 k at a time.
#pragma once

#include <cstring>

#include "../../products/compact.h"
#include "../simd.h"

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
// Of the words of two lines, in the order that pairs them again.
QR_INLINE Bytes lower_bytes(Bytes a, Bytes b) {
  const Bytes mask = _mm512_set1_epi16(0xff);
  return _mm512_packus_epi16(_mm512_and_si512(a, mask), _mm512_and_si512(b, mask));
}
QR_INLINE Bytes upper_bytes(Bytes a, Bytes b) {
  return _mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8));
}
QR_INLINE Bytes all_bytes(int value) { return _mm512_set1_epi8(char(value)); }
QR_INLINE Bytes where_equal(Bytes a, Bytes b, Bytes then, Bytes otherwise) {
  return _mm512_mask_mov_epi8(otherwise, _mm512_cmpeq_epi8_mask(a, b), then);
}
QR_INLINE Bytes bits_of(Bytes a, int mask) { return _mm512_and_si512(a, all_bytes(mask)); }
QR_INLINE Bytes either(Bytes a, Bytes b) { return _mm512_or_si512(a, b); }
QR_INLINE Bytes words_left(Bytes a, int bits) { return _mm512_slli_epi16(a, unsigned(bits)); }
QR_INLINE Bytes words_right(Bytes a, int bits) { return _mm512_srli_epi16(a, unsigned(bits)); }
#elif defined(__AVX2__)
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
QR_INLINE Bytes lower_bytes(Bytes a, Bytes b) {
  const Bytes mask = _mm256_set1_epi16(0xff);
  return _mm256_packus_epi16(_mm256_and_si256(a, mask), _mm256_and_si256(b, mask));
}
QR_INLINE Bytes upper_bytes(Bytes a, Bytes b) {
  return _mm256_packus_epi16(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8));
}
QR_INLINE Bytes all_bytes(int value) { return _mm256_set1_epi8(char(value)); }
QR_INLINE Bytes where_equal(Bytes a, Bytes b, Bytes then, Bytes otherwise) {
  return _mm256_blendv_epi8(otherwise, then, _mm256_cmpeq_epi8(a, b));
}
QR_INLINE Bytes bits_of(Bytes a, int mask) { return _mm256_and_si256(a, all_bytes(mask)); }
QR_INLINE Bytes either(Bytes a, Bytes b) { return _mm256_or_si256(a, b); }
QR_INLINE Bytes words_left(Bytes a, int bits) { return _mm256_slli_epi16(a, bits); }
QR_INLINE Bytes words_right(Bytes a, int bits) { return _mm256_srli_epi16(a, bits); }
#endif

constexpr int64_t kExpandedStep = kDepth * kPanel * 2;

// The nibbles of upper bytes; kNoCode for those that the table lacks.
constexpr int kNoCode = 0xff;
QR_INLINE Bytes codes_of(const uint8_t* upper, Bytes bytes) {
  const Bytes magnitude = bits_of(bytes, 0x7f);
  Bytes codes = all_bytes(kNoCode);
  for (int code = 0; code < 8; ++code)
    codes = where_equal(magnitude, all_bytes(upper[code]), all_bytes(code), codes);
  return either(codes, bits_of(words_right(bits_of(bytes, 0x80), 4), 8));
}

bool compact_panel(char* out, const uint16_t* panel, int64_t k, uint32_t streams) {
  const int64_t numbers = divide_up(k, kDepth) * kDepth * kPanel, room = compact_patches(k);
  if (numbers > int64_t(1) << 24) return false;  // more than a patch can name
  auto* header = reinterpret_cast<CompactHeader*>(out);
  auto* patches = reinterpret_cast<uint32_t*>(header + 1);
  header->streams = streams;
  choose_uppers(header->upper, panel, numbers);
  const CompactPlaces places(k, streams);
  int64_t count = 0;
  for (int64_t first = 0; first < numbers; first += 128) {
    char* group = out + places.group(first / 128);
    const char* lines = reinterpret_cast<const char*>(panel + first);
    Bytes missing = all_bytes(0);
    for (int64_t at = 0; at < 64; at += int64_t(sizeof(Bytes))) {
      const Bytes line0 = load_bytes_of(lines + at), line1 = load_bytes_of(lines + 64 + at);
      const Bytes line2 = load_bytes_of(lines + 128 + at), line3 = load_bytes_of(lines + 192 + at);
      const Bytes codes01 = codes_of(header->upper, upper_bytes(line0, line1));
      const Bytes codes23 = codes_of(header->upper, upper_bytes(line2, line3));
      missing = either(missing, either(codes01, codes23));
      store_bytes(group + at, either(bits_of(codes01, 15), words_left(bits_of(codes23, 15), 4)));
      store_bytes(group + 64 + at, lower_bytes(line0, line1));
      store_bytes(group + 128 + at, lower_bytes(line2, line3));
    }
    alignas(64) uint8_t seen[sizeof(Bytes)];
    store_bytes(reinterpret_cast<char*>(seen), bits_of(missing, 0x80));
    if (std::memchr(seen, 0x80, sizeof(seen)) == nullptr) continue;
    for (int64_t i = 0; i < 128; ++i) {
      const uint8_t upper = uint8_t(panel[first + i] >> 8);
      if (std::memchr(header->upper, upper, 16) != nullptr) continue;
      if (count == room) return false;
      patches[count++] = uint32_t((first + i) << 8 | upper);
    }
  }
  header->patches = uint32_t(count);
  return true;
}

// Expands steps of one panel in ascending order, from `step` on.
class Expander {
 public:
  Expander() = default;
  explicit Expander(const char* panel, int64_t k, int64_t step = 0) : places(CompactPlaces::of(panel, k)) {
    first = panel + places.begin;
    const auto* header = reinterpret_cast<const CompactHeader*>(panel);
    table = sixteen_bytes(header->upper);
    patch = reinterpret_cast<const uint32_t*>(header + 1);
    end = patch + header->patches;
    while (patch < end && *patch < first_of(step)) ++patch;
  }

  // Tells where the step's first part lies.
  __attribute__((always_inline)) const char* expand(int64_t step, char* out) {
    const Bytes uppers = table;  // which no store to `out` changes
    const char *begin = first + step * places.step, *part = begin;
    for (int64_t i = 0; i < kCompactParts; ++i, part += places.part)
      for (int64_t group = 0; group < 2; ++group)
        expand_group(uppers, part + group * kCompactGroup, out + (2 * i + group) * 256);
    for (; patch < end && *patch < first_of(step + 1); ++patch)
      out[((*patch >> 8) - step * kDepth * kPanel) * 2 + 1] = char(*patch);
    return begin;
  }

 private:
  // Four lines of three.
  QR_INLINE void expand_group(Bytes uppers, const char* in, char* out) {
    for (int64_t at = 0; at < 64; at += int64_t(sizeof(Bytes))) {
      const Bytes codes = load_bytes_of(in + at);
      const Bytes upper01 = look_up(uppers, low_nibbles(codes)), upper23 = look_up(uppers, high_nibbles(codes));
      const Bytes lower01 = load_bytes_of(in + 64 + at), lower23 = load_bytes_of(in + 128 + at);
      store_bytes(out + at, first_pairs(lower01, upper01));
      store_bytes(out + at + 64, second_pairs(lower01, upper01));
      store_bytes(out + at + 128, first_pairs(lower23, upper23));
      store_bytes(out + at + 192, second_pairs(lower23, upper23));
    }
  }
  static uint32_t first_of(int64_t step) { return uint32_t(step * kDepth * kPanel) << 8; }

  const char* first = nullptr;
  CompactPlaces places{0, 1};
  Bytes table{};
  const uint32_t *patch = nullptr, *end = nullptr;
};

}  // namespace
}  // namespace qr
