// What weights of 8 to 2 bits are made of, and how the kernels take them apart; layouts: gemm_quantized.h.
#pragma once

#include "../gemm/gemm.h"
#include "../integers.h"

namespace qr {
namespace {

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

// Bits of codes that lie in lines of 64 bytes, from the lowest bits of a byte upwards: those of k 0..3 of a row, of its
// k 4..7, of k 0..3 of the next row ...
template <int Bits>
struct CodeBits {
  static constexpr int kBits = Bits, kRowsOfLine = 4 / Bits;
  static constexpr int64_t kHalfBytes = 128 * Bits;

  // As the bits of codes from kTo on. begin: a multiple of kTogether; row: less than that.
  template <int kTo, int kTogether>
  QR_INLINE void read(const char* half, int64_t begin, int row, Bytes& first, Bytes& second) {
    // where lines begin with rows, the place of a row's bits is a constant if `row` is
    constexpr bool kStartsLine = kTogether % kRowsOfLine == 0;
    const int64_t in_lines = kStartsLine ? row : begin + row;
    const char* lines = half + (kStartsLine ? begin / kRowsOfLine * 64 : 0);
    const Bytes line = load_bytes_of(lines + in_lines / kRowsOfLine * 64);
    const int place = int(in_lines % kRowsOfLine) * 2 * Bits;
    first = moved<kTo>(line, place);
    second = moved<kTo>(line, place + Bits);
  }

  template <int kTo>
  QR_INLINE Bytes moved(Bytes line, int place) {
    return bits_of(place < kTo ? words_left(line, kTo - place) : words_right(line, place - kTo), ((1 << Bits) - 1) << kTo);
  }
};

// Codes in lines: those with the low bits, then those with the high ones, if there are any.
template <int Low, int High, int Group>
struct Planes {
  using LowBits = CodeBits<Low>;
  using HighBits = CodeBits<High == 0 ? Low : High>;
  static constexpr int kGroup = Group, kRounded = Group;
  static constexpr bool kGrouped = true, kNested = false, kRoundsRows = false;
  static constexpr int kBits = Low + High, kCodeShift = 0, kBias = kBits == 2 ? 1 : 1 << (kBits - 1);
  static constexpr int kRowsTogether = HighBits::kRowsOfLine < Group / 8 ? HighBits::kRowsOfLine : Group / 8;
  static constexpr int64_t kHalfBytes = 128 * kBits;
  static constexpr float kUnit = 1.0f;
  explicit Planes(const GemmArgs&) {}

  // begin: a multiple of kRowsTogether
  __attribute__((always_inline)) void codes_of_row(const char* half, int64_t begin, int row, Bytes& first,
                                                   Bytes& second) const {
    LowBits::template read<0, kRowsTogether>(half, begin, row, first, second);
    if constexpr (High > 0) {
      Bytes high_first, high_second;
      HighBits::template read<Low, kRowsTogether>(half + LowBits::kHalfBytes, begin, row, high_first, high_second);
      first = either(first, high_first);
      second = either(second, high_second);
    }
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
};
template <int Group>
using Int6 = Planes<4, 2, Group>;
template <int Group>
using Int5 = Planes<4, 1, Group>;
template <int Group>
using Int3 = Planes<2, 1, Group>;
template <int Group>
using Int2Groups = Planes<2, 0, Group>;
// With one scale for a column; rows are rounded as a whole, as models of ternary weights are trained.
struct Int2 : Planes<2, 0, int(kTernaryGroup)> {
  static constexpr bool kGrouped = false, kRoundsRows = true;
  using Planes::Planes;
};

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
