// bfloat16 in 12 bits, exactly: panels of QR_BFLOAT16_COMPACT.
//
// The upper byte of a bfloat16 is the sign and all of the exponent but one bit. Nearly all numbers of a trained weight
// lie within a factor of 2^16, so these bytes take eight values, signs aside. A panel has a table of them; a number is
// its lower byte and a nibble that picks the upper one, and the few numbers that do not fit are patched. A quarter of
// the bytes is not read, and no product changes. (DFloat11, Zhang et al. 2025, saves a little more with Huffman codes;
// codes of one length are looked up sixty-four at a time.)
//
//   panel   [CompactHeader][patches], then the steps of 32 k in four parts of two groups: [K/32 steps][4 parts], or
//           [4 parts][K/32 steps], which are read side by side as four streams. Those keep more of memory busy than one
//           on Intel, less on Zen 4 (benchmarks/cpu.md); the header tells.
//   group   four lines of 32 numbers of the bf16 panel (kernels/gemm/gemm.h) as three; those of a step are 0 to 7 in order:
//           [64 x 2 nibbles][64 lower bytes of lines 0 and 1][64 lower bytes of lines 2 and 3]
//           byte i: lane i / 16, and in it eight numbers of the even line, then eight of the odd one; lines 0 and 1
//           have the low nibbles
//   patch   number in the panel << 8 | upper byte, in ascending order
#pragma once

#include "../kernels.h"

namespace qr {

constexpr int64_t kCompactGroup = 192, kCompactParts = 4;
constexpr int64_t kCompactPart = 2 * kCompactGroup, kCompactStep = kCompactParts * kCompactPart;

struct CompactHeader {
  uint8_t upper[16];  // by nibble: the sign, and which of eight values
  uint32_t patches;
  uint32_t streams;  // 1 or kCompactParts
  uint8_t unused[40];
};

// Room for one number in five hundred; of a normal distribution one in ten thousand does not fit.
inline int64_t compact_patches(int64_t k) { return divide_up(k, 256) * 16; }
inline int64_t compact_begin(int64_t k) { return int64_t(sizeof(CompactHeader)) + compact_patches(k) * 4; }
inline int64_t compact_bytes(int64_t k) { return compact_begin(k) + divide_up(k, kDepth) * kCompactStep; }

// Where the groups of a panel are.
struct CompactPlaces {
  int64_t begin, part, step;  // of the first one; bytes from one part of a step to the next, and from step to step

  CompactPlaces(int64_t k, uint32_t streams)
      : begin(compact_begin(k)),
        part(streams == 1 ? kCompactPart : divide_up(k, kDepth) * kCompactPart),
        step(streams == 1 ? kCompactStep : kCompactPart) {}
  static CompactPlaces of(const char* panel, int64_t k) {
    return {k, reinterpret_cast<const CompactHeader*>(panel)->streams};
  }
  int64_t group(int64_t index) const {
    return begin + index / 8 * step + index % 8 / 2 * part + index % 2 * kCompactGroup;
  }
};

// A header's table: the eight most frequent upper bytes without sign, as far as a sample tells.
void choose_uppers(uint8_t upper[16], const uint16_t* panel, int64_t numbers);

// Number `at` (in the order of the bf16 panel) of a compact one, patches aside.
uint16_t compact_number(const char* panel, int64_t k, int64_t at);

}  // namespace qr
