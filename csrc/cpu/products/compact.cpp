// The table of a compact panel, and single numbers of it; kernels/compact.h makes and expands whole ones.
#include "compact.h"

#include <algorithm>

namespace qr {

void choose_uppers(uint8_t upper[16], const uint16_t* panel, int64_t numbers) {
  constexpr int64_t kLine = 32, kSample = 8192;
  const int64_t stride = (numbers < 2 * kSample ? 1 : numbers / kSample) * kLine;
  uint32_t counts[4][128] = {};  // four, since counting one value twice in a row waits for the first
  for (int64_t line = 0; line < numbers; line += stride)
    for (int64_t i = 0; i < kLine; i += 4)
      for (int64_t j = 0; j < 4; ++j) ++counts[j][panel[line + i + j] >> 8 & 0x7f];
  for (int i = 0; i < 128; ++i) counts[0][i] += counts[1][i] + counts[2][i] + counts[3][i];
  uint8_t order[128];
  for (int i = 0; i < 128; ++i) order[i] = uint8_t(i);
  std::stable_sort(order, order + 128, [&](uint8_t a, uint8_t b) { return counts[0][a] > counts[0][b]; });
  for (int i = 0; i < 8; ++i) {
    upper[i] = order[i];
    upper[i + 8] = order[i] | 0x80;
  }
}

uint16_t compact_number(const char* panel, int64_t k, int64_t at) {
  const int64_t line = at / 32 % 4, i = at % 32, byte = i / 8 * 16 + line % 2 * 8 + i % 8, pair = line / 2;
  const auto* group = reinterpret_cast<const uint8_t*>(panel) + CompactPlaces::of(panel, k).group(at / 128);
  const uint8_t code = group[byte] >> (pair * 4) & 15;
  const uint8_t upper = reinterpret_cast<const CompactHeader*>(panel)->upper[code];
  return uint16_t(upper << 8 | group[64 + pair * 64 + byte]);
}

}  // namespace qr
