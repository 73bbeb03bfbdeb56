// Integers of a row of a weight into its column of a panel; layouts: kernels/quantized/gemm_quantized.h.
#pragma once

#include <cstring>

#include "gemm.h"

namespace qr {

constexpr uint64_t each_byte(uint64_t byte) { return byte * 0x0101010101010101; }

// Eight values, the first in the lowest byte; zeros behind `count`.
inline uint64_t eight_values(const int8_t* values, int64_t count) {
  uint64_t eight = 0;
  if (count >= 8)
    std::memcpy(&eight, values, 8);
  else
    std::memcpy(&eight, values, size_t(count));
  return eight;
}

// A number below 128 added to each byte, modulo 256.
inline uint64_t add_to_bytes(uint64_t bytes, uint64_t number) {
  return ((bytes & each_byte(0x7f)) + each_byte(number)) ^ (bytes & each_byte(0x80));
}

// The low four bits of eight bytes: those of the first four, and above them those of the others.
inline uint32_t nibbles_of(uint64_t eight) {
  eight &= each_byte(15);
  return uint32_t(eight) | uint32_t(eight >> 32) << 4;
}

// Each of these takes `count` values from k = begin on, a multiple of 64, up to the end of K or a multiple of 64, and
// gives bits that are set where a value is not one of the format's.

inline uint64_t pack_bytes(char* panel, int64_t column, int64_t begin, int64_t count, const int8_t* values) {
  char* out = panel + (begin / 64 * 2 + column / 16) * 1024 + column % 16 * 4;
  for (int64_t i = 0; i < count; i += 8) {
    const uint64_t eight = eight_values(values + i, count - i);
    char* line = out + i / 64 * 2048 + i % 64 * 16;
    std::memcpy(line, &eight, 4);
    std::memcpy(line + 64, reinterpret_cast<const char*>(&eight) + 4, 4);
  }
  return 0;
}

// kBias: what makes the values 0 .. 15.
template <int kBias>
uint64_t pack_nibbles(char* panel, int64_t column, int64_t begin, int64_t count, const int8_t* values) {
  char* out = panel + (begin / 64 * 2 + column / 16) * 512 + column % 16 * 4;
  uint64_t outside = 0;
  for (int64_t i = 0; i < count; i += 8) {
    const uint64_t eight = eight_values(values + i, count - i);
    const uint32_t nibbles = nibbles_of(eight);
    outside |= add_to_bytes(eight, kBias) & each_byte(0xf0);
    std::memcpy(out + i / 64 * 1024 + i % 64 * 8, &nibbles, 4);
  }
  return outside;
}

// Some bits of codes, in lines that the rows of 8 k fill one after the other.
template <int kBits>
struct CodeLines {
  static constexpr int kRowsOfLine = 4 / kBits;
  char* out;
  uint32_t line = 0;

  void put(int row, uint64_t codes) {
    const uint64_t own = codes & each_byte((1 << kBits) - 1);
    line |= (uint32_t(own) | uint32_t(own >> 32) << kBits) << row % kRowsOfLine * 2 * kBits;
    if (row % kRowsOfLine != kRowsOfLine - 1) return;
    std::memcpy(out + row / kRowsOfLine * 64, &line, 4);
    line = 0;
  }
};

// Bits of codes in lines, the low ones, and the high ones apart, if there are any. kBias: what makes the values codes.
template <int kLow, int kHigh, int kBias>
uint64_t pack_planes(char* panel, int64_t column, int64_t begin, int64_t count, const int8_t* values) {
  constexpr int kBits = kLow + kHigh, kHalfBytes = kBits * 128;
  char* out = panel + (begin / 64 * 2 + column / 16) * kHalfBytes + column % 16 * 4;
  uint64_t outside = 0;
  for (int64_t i = 0; i < count; i += 64, out += 2 * kHalfBytes) {
    CodeLines<kLow> low{out};
    CodeLines<kHigh == 0 ? kLow : kHigh> high{out + kLow * 128};
    for (int row = 0; row < 8; ++row) {
      const int64_t at = i + row * 8, left = count - at;
      const uint64_t codes = add_to_bytes(eight_values(values + (left > 0 ? at : 0), left > 0 ? left : 0), kBias);
      outside |= codes & each_byte(uint8_t(~((1 << kBits) - 1)));
      low.put(row, codes);
      if constexpr (kHigh > 0) high.put(row, codes >> kLow);
    }
  }
  return outside;
}

// The function for a format, but not QR_FLOAT8.
using PackRow = uint64_t (*)(char* panel, int64_t column, int64_t begin, int64_t count, const int8_t* values);
inline PackRow pack_row_of(int32_t format) {
  switch (format) {
    case QR_INT8: return pack_bytes;
    case QR_INT6: return pack_planes<4, 2, 32>;
    case QR_INT5: return pack_planes<4, 1, 16>;
    case QR_INT4: return pack_nibbles<8>;
    case QR_INT3: return pack_planes<2, 1, 4>;
    case QR_INT2: return pack_planes<2, 0, 1>;
    default: return pack_nibbles<0>;
  }
}

// Values of a row that are packed at a time: a panel's lines for them stay in L1 while its rows take turns.
constexpr int64_t kPackedAtATime = 256;

}  // namespace qr
