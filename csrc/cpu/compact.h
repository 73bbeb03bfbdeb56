// bfloat16 in 12 bits, exactly: panels of QR_BFLOAT16_COMPACT.
//
// The upper byte of a bfloat16 is the sign and all of the exponent but one bit. Nearly all numbers of a trained weight
// lie within a factor of 2^16, so these bytes take eight values, signs aside. A panel has a table of them; a number is
// its lower byte and a nibble that picks the upper one, and the few numbers that do not fit are patched. A quarter of
// the bytes is not read, and no product changes. (DFloat11, Zhang et al. 2025, saves a little more with Huffman codes;
// codes of one length are looked up sixty-four at a time.)
//
//   panel   [CompactHeader][patches][4 streams][K/32 steps][2 groups]: read side by side, the streams keep more of
//           memory busy than one would
//   group   four lines of 32 numbers of the bf16 panel (kernels/gemm/gemm.h) as three; those of a step are 0 to 7 in order:
//           [64 x 2 nibbles][64 lower bytes of lines 0 and 1][64 lower bytes of lines 2 and 3]
//           byte i: lane i / 16, and in it eight numbers of the even line, then eight of the odd one; lines 0 and 1
//           have the low nibbles
//   patch   number in the panel << 8 | upper byte, in ascending order
#pragma once

#include "kernels.h"

namespace qr {

constexpr int64_t kCompactGroup = 192, kCompactStreams = 4;
constexpr int64_t kCompactStep = 2 * kCompactGroup;  // of a stream

struct CompactHeader {
  uint8_t upper[16];  // by nibble: the sign, and which of eight values
  uint32_t patches;
  uint8_t unused[44];
};

// Room for one number in five hundred; of a normal distribution one in ten thousand does not fit.
inline int64_t compact_patches(int64_t k) { return divide_up(k, 256) * 16; }
inline int64_t compact_begin(int64_t k) { return int64_t(sizeof(CompactHeader)) + compact_patches(k) * 4; }
inline int64_t compact_stream(int64_t k) { return divide_up(k, kDepth) * kCompactStep; }
inline int64_t compact_bytes(int64_t k) { return compact_begin(k) + kCompactStreams * compact_stream(k); }
// Where group `index` of the panel begins.
inline int64_t compact_group(int64_t k, int64_t index) {
  const int64_t step = index / 8, stream = index % 8 / 2;
  return compact_begin(k) + stream * compact_stream(k) + step * kCompactStep + index % 2 * kCompactGroup;
}

// A header's table: the eight most frequent upper bytes without sign, as far as a sample tells.
void choose_uppers(uint8_t upper[16], const uint16_t* panel, int64_t numbers);

// Number `at` (in the order of the bf16 panel) of a compact one, patches aside.
uint16_t compact_number(const char* panel, int64_t k, int64_t at);

}  // namespace qr
