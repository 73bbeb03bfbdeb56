// What weights of 8, 6, 5, 4 and 2 bits are made of, and how the kernels take them apart; layouts: gemm_quantized.h.
#pragma once

#include "../gemm/gemm.h"

namespace qr {
namespace {

// ---- integers ----

#if defined(__AVX512F__)
using vi = __m512i;
QR_INLINE vi none() { return _mm512_setzero_si512(); }
QR_INLINE vi load_bytes(const char* p) { return _mm512_loadu_si512(p); }
QR_INLINE vi four_bytes(const int8_t* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  return _mm512_set1_epi32(four);
}
QR_INLINE vi flip(vi v, int byte) { return _mm512_xor_si512(v, _mm512_set1_epi8(int8_t(byte))); }
QR_INLINE vi upper_nibbles(vi v) { return _mm512_and_si512(v, _mm512_set1_epi8(int8_t(0xf0))); }
QR_INLINE vi lower_nibbles(vi v) { return upper_nibbles(_mm512_slli_epi16(v, 4)); }
QR_INLINE vi add(vi a, vi b) { return _mm512_add_epi32(a, b); }
QR_INLINE vi sub(vi a, vi b) { return _mm512_sub_epi32(a, b); }
QR_INLINE vi mul(vi a, vi b) { return _mm512_mullo_epi32(a, b); }
QR_INLINE vi same(int32_t value) { return _mm512_set1_epi32(value); }
QR_INLINE vi widened(const int8_t* p) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
QR_INLINE vf floats(vi v) { return _mm512_cvtepi32_ps(v); }
#elif defined(__AVX2__)
using vi = __m256i;
QR_INLINE vi none() { return _mm256_setzero_si256(); }
QR_INLINE vi load_bytes(const char* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
QR_INLINE vi four_bytes(const int8_t* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  return _mm256_set1_epi32(four);
}
QR_INLINE vi flip(vi v, int byte) { return _mm256_xor_si256(v, _mm256_set1_epi8(int8_t(byte))); }
QR_INLINE vi upper_nibbles(vi v) { return _mm256_and_si256(v, _mm256_set1_epi8(int8_t(0xf0))); }
QR_INLINE vi lower_nibbles(vi v) { return upper_nibbles(_mm256_slli_epi16(v, 4)); }
QR_INLINE vi add(vi a, vi b) { return _mm256_add_epi32(a, b); }
QR_INLINE vi sub(vi a, vi b) { return _mm256_sub_epi32(a, b); }
QR_INLINE vi mul(vi a, vi b) { return _mm256_mullo_epi32(a, b); }
QR_INLINE vi same(int32_t value) { return _mm256_set1_epi32(value); }
QR_INLINE vi widened(const int8_t* p) {
  return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
QR_INLINE vf floats(vi v) { return _mm256_cvtepi32_ps(v); }
#endif

// Two numbers of 16 bits in each of 32; not negative.
#if defined(__AVX512F__)
QR_INLINE vi two_in_one(vi low, vi high) { return _mm512_or_si512(low, _mm512_slli_epi32(high, 16)); }
#elif defined(__AVX2__)
QR_INLINE vi two_in_one(vi low, vi high) { return _mm256_or_si256(low, _mm256_slli_epi32(high, 16)); }
#endif
// acc + the products of two such pairs
#if defined(__AVX512VNNI__)
QR_INLINE vi add_pairs(vi acc, vi a, vi b) { return _mm512_dpwssd_epi32(acc, a, b); }
#elif defined(__AVX512F__)
QR_INLINE vi add_pairs(vi acc, vi a, vi b) { return _mm512_add_epi32(acc, _mm512_madd_epi16(a, b)); }
#elif defined(__AVX2__)
QR_INLINE vi add_pairs(vi acc, vi a, vi b) { return _mm256_add_epi32(acc, _mm256_madd_epi16(a, b)); }
#endif

// ---- weights ----

// What a row of 8 k of one half is made of, for one vector of columns: integers of k 0..3 and of k 4..7. `unsigned_row`
// gives kBias more than they are (in sixteenths of int4), `signed_row` what they are, `signed_four` one of the two.
// Formats of fewer than 8 bits have `codes_of_row`, too, of the row begin + row: what `unsigned_row` gives, shifted right
// by kCodeShift.
// kRounded: inputs that are rounded together; kRoundsRows: all inputs of a row are.
template <int Group, bool Grouped>
struct Int8Of {
  static constexpr int kGroup = Group, kRounded = Group;
  static constexpr bool kNested = false, kRoundsRows = false;
  static constexpr bool kGrouped = Grouped;  // or one scale for a column; activations keep groups, which hold an outlier
  static constexpr int kBits = 8, kCodeShift = 0, kBias = 128;
  static constexpr int kRowsTogether = 1;      // rows of 8 k that are unpacked best side by side
  static constexpr int64_t kHalfBytes = 1024;  // 64 k of 16 columns
  static constexpr float kUnit = 1.0f;         // value of an integer 1
  explicit Int8Of(const GemmArgs&) {}
#if !defined(__ARM_NEON)
  __attribute__((always_inline)) void unsigned_row(const char* half, int64_t begin, int row, vi& first,
                                                   vi& second) const {
    first = flip(load_bytes(half + (begin + row) * 128), 0x80);
    second = flip(load_bytes(half + (begin + row) * 128 + 64), 0x80);
  }
  __attribute__((always_inline)) vi signed_four(const char* line, int four) const {
    return load_bytes(line + four * 64);
  }
#endif
};
using Int8 = Int8Of<128, false>;
template <int Group>
using Int8Groups = Int8Of<Group, true>;

template <int Group>
struct Int4 {
  static constexpr int kGroup = Group, kRounded = Group;
  static constexpr bool kGrouped = true, kNested = false, kRoundsRows = false;
  static constexpr int kBits = 4, kCodeShift = 4, kBias = 128;
  static constexpr int kRowsTogether = 1;
  static constexpr int64_t kHalfBytes = 512;
  static constexpr float kUnit = 1.0f / 16;
  explicit Int4(const GemmArgs&) {}
#if !defined(__ARM_NEON)
  __attribute__((always_inline)) void codes_of_row(const char* half, int64_t begin, int row, vi& first,
                                                   vi& second) const {
    const vi both = flip(load_bytes(half + (begin + row) * 64), 0x88);
    first = low_nibbles(both);
    second = high_nibbles(both);
  }
  __attribute__((always_inline)) void unsigned_row(const char* half, int64_t begin, int row, vi& first,
                                                   vi& second) const {
    const vi both = flip(load_bytes(half + (begin + row) * 64), 0x88);
    first = lower_nibbles(both);
    second = upper_nibbles(both);
  }
#endif
#if defined(__AVX512F__)
  __attribute__((always_inline)) void signed_row(const char* half, int64_t begin, int row, vi& first,
                                                 vi& second) const {
    const vi both = load_bytes(half + (begin + row) * 64);
    first = lower_nibbles(both);
    second = upper_nibbles(both);
  }
#endif
};

template <int Bits, int Group>
struct Planes {
  static constexpr int kGroup = Group, kRounded = Group;
  static constexpr bool kGrouped = true, kNested = false, kRoundsRows = false;
  static constexpr int kBits = Bits, kCodeShift = 0, kBias = 1 << (Bits - 1);
  static constexpr int kHigh = Bits - 4;         // bits of a code above its nibble
  static constexpr int kRowsOfLine = 4 / kHigh;  // rows of 8 k whose high bits share 64 bytes
  static constexpr int kRowsTogether = kRowsOfLine < Group / 8 ? kRowsOfLine : Group / 8;
  static constexpr int64_t kHalfBytes = 128 * Bits;
  static constexpr float kUnit = 1.0f;
  explicit Planes(const GemmArgs&) {}

  // begin: a multiple of kRowsTogether
  __attribute__((always_inline)) void codes_of_row(const char* half, int64_t begin, int row, Bytes& first,
                                                   Bytes& second) const {
    // where lines begin with rows, the place of a row's bits is a constant if `row` is
    constexpr bool kStartsLine = kRowsTogether == kRowsOfLine;
    const int64_t in_lines = kStartsLine ? row : begin + row;
    const char* lines = half + 512 + (kStartsLine ? begin / kRowsOfLine * 64 : 0);
    const Bytes both = load_bytes_of(half + begin * 64 + row * 64);
    const Bytes line = load_bytes_of(lines + in_lines / kRowsOfLine * 64);
    const int place = int(in_lines % kRowsOfLine) * 2 * kHigh;
    first = either(low_nibbles(both), high_bits(line, place));
    second = either(high_nibbles(both), high_bits(line, place + kHigh));
  }
  __attribute__((always_inline)) void unsigned_row(const char* half, int64_t begin, int row, Bytes& first,
                                                   Bytes& second) const {
    codes_of_row(half, begin, row, first, second);
  }
#if defined(__AVX512F__)
  __attribute__((always_inline)) void signed_row(const char* half, int64_t begin, int row, vi& first,
                                                 vi& second) const {
    codes_of_row(half, begin, row, first, second);
    first = _mm512_sub_epi8(first, _mm512_set1_epi8(int8_t(kBias)));
    second = _mm512_sub_epi8(second, _mm512_set1_epi8(int8_t(kBias)));
  }
#endif

 private:
  QR_INLINE Bytes high_bits(Bytes line, int place) {
    return bits_of(place < 4 ? words_left(line, 4 - place) : words_right(line, place - 4), (1 << Bits) - 16);
  }
};
template <int Group>
using Int5 = Planes<5, Group>;
template <int Group>
using Int6 = Planes<6, Group>;

template <int Group>
struct Levels {
  static constexpr int kGroup = Group, kRounded = Group;
  static constexpr bool kGrouped = true, kNested = false, kRoundsRows = false;
  static constexpr int kBits = 8, kCodeShift = 0, kBias = 128;
  static constexpr int kRowsTogether = 1;
  static constexpr int64_t kHalfBytes = 512;
  static constexpr float kUnit = 1.0f;
  Bytes levels;
  explicit Levels(const GemmArgs& g) : levels(sixteen_bytes(reinterpret_cast<const uint8_t*>(g.levels))) {}
#if !defined(__ARM_NEON)
  __attribute__((always_inline)) void unsigned_row(const char* half, int64_t begin, int row, vi& first,
                                                   vi& second) const {
    const vi both = load_bytes(half + (begin + row) * 64), above = flip(levels, 0x80);
    first = look_up(above, low_nibbles(both));
    second = look_up(above, high_nibbles(both));
  }
  __attribute__((always_inline)) void signed_row(const char* half, int64_t begin, int row, vi& first,
                                                 vi& second) const {
    const vi both = load_bytes(half + (begin + row) * 64);
    first = look_up(levels, low_nibbles(both));
    second = look_up(levels, high_nibbles(both));
  }
  __attribute__((always_inline)) vi signed_four(const char* line, int four) const {
    const vi both = load_bytes(line);
    return look_up(levels, four == 0 ? low_nibbles(both) : high_nibbles(both));
  }
#endif
};

// With one scale for a column rows are rounded as a whole, as models of ternary weights are trained.
template <int Group, bool Grouped>
struct Int2Of {
  static constexpr int kGroup = Group, kRounded = Group;
  static constexpr bool kGrouped = Grouped, kNested = false, kRoundsRows = !Grouped;
  static constexpr int kBits = 2, kCodeShift = 0, kBias = 1;
  static constexpr int kRowsTogether = 2;  // which share a line
  static constexpr int64_t kHalfBytes = 256;
  static constexpr float kUnit = 1.0f;
  explicit Int2Of(const GemmArgs&) {}

  // begin: a multiple of kRowsTogether
  __attribute__((always_inline)) void codes_of_row(const char* half, int64_t begin, int row, Bytes& first,
                                                   Bytes& second) const {
    const Bytes line = load_bytes_of(half + begin * 32 + row / 2 * 64);
    first = bits_of(words_right(line, row % 2 * 4), 3);
    second = bits_of(words_right(line, row % 2 * 4 + 2), 3);
  }
  __attribute__((always_inline)) void unsigned_row(const char* half, int64_t begin, int row, Bytes& first,
                                                   Bytes& second) const {
    codes_of_row(half, begin, row, first, second);
  }
#if defined(__AVX512F__)
  __attribute__((always_inline)) void signed_row(const char* half, int64_t begin, int row, vi& first,
                                                 vi& second) const {
    codes_of_row(half, begin, row, first, second);
    first = _mm512_sub_epi8(first, _mm512_set1_epi8(kBias));
    second = _mm512_sub_epi8(second, _mm512_set1_epi8(kBias));
  }
#endif
};
using Int2 = Int2Of<int(kTernaryGroup), false>;
using Int2Groups = Int2Of<int(kTernaryGroup), true>;

// Four bits as Int4 has them, as codes of 0 .. 15.
template <int Group>
struct Codes4 : Int4<Group> {
  static constexpr int kCodeShift = 0, kBias = 8;
  static constexpr float kUnit = 1.0f;
  using Int4<Group>::Int4;
  __attribute__((always_inline)) void codes_of_row(const char* half, int64_t begin, int row, Bytes& first,
                                                   Bytes& second) const {
    const Bytes both = flip(load_bytes_of(half + (begin + row) * 64), 0x88);
    first = low_nibbles(both);
    second = high_nibbles(both);
  }
  __attribute__((always_inline)) void unsigned_row(const char* half, int64_t begin, int row, Bytes& first,
                                                   Bytes& second) const {
    codes_of_row(half, begin, row, first, second);
  }
};

// Groups with Kinds codes of 8 bits for scales (qr_weight: nested). With two of them a group is scale * code - least, so
// codes are meant as they are, without a bias.
template <class Stored, int Kinds>
struct Nested : Stored {
  static constexpr bool kNested = true;
  static constexpr int kKinds = Kinds, kRounded = kNestedBlock, kGroups = kNestedBlock / Stored::kGroup;
  static constexpr int kBias = Kinds == 2 ? 0 : Stored::kBias;
  using Stored::Stored;
};

}  // namespace
}  // namespace qr
