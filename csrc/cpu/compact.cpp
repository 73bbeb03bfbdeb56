// Making bf16 panels compact, and reading single numbers of them; kernels/compact.h expands them for products.
#include "compact.h"

#include <algorithm>
#include <cstring>

namespace qr {
namespace {

constexpr int64_t kMostNumbers = 1 << 24;  // that a patch can name

// The eight most frequent upper bytes without sign.
void choose_uppers(uint8_t upper[16], const uint16_t* panel, int64_t numbers) {
  uint32_t counts[4][128] = {};  // four, since counting one value twice in a row waits for the first
  for (int64_t i = 0; i < numbers; i += 4)
    for (int64_t j = 0; j < 4; ++j) ++counts[j][panel[i + j] >> 8 & 0x7f];
  for (int i = 0; i < 128; ++i) counts[0][i] += counts[1][i] + counts[2][i] + counts[3][i];
  uint8_t order[128];
  for (int i = 0; i < 128; ++i) order[i] = uint8_t(i);
  std::stable_sort(order, order + 128, [&](uint8_t a, uint8_t b) { return counts[0][a] > counts[0][b]; });
  for (int i = 0; i < 8; ++i) {
    upper[i] = order[i];
    upper[i + 8] = order[i] | 0x80;
  }
}

struct Place {
  int64_t group, byte, pair;  // which byte of a group's lines, and which pair of lines it stands for
};

Place place_of(int64_t at) {
  const int64_t line = at / 32 % 4, i = at % 32;
  return {at / 128, i / 8 * 16 + line % 2 * 8 + i % 8, line / 2};
}

}  // namespace

bool compact_panel(char* out, const uint16_t* panel, int64_t k) {
  const int64_t numbers = divide_up(k, kDepth) * kDepth * kPanel;
  if (numbers > kMostNumbers) return false;
  auto* header = reinterpret_cast<CompactHeader*>(out);
  auto* patches = reinterpret_cast<uint32_t*>(header + 1);
  choose_uppers(header->upper, panel, numbers);
  constexpr uint8_t kNone = 0xff;
  uint8_t code_of[256];
  std::memset(code_of, kNone, sizeof(code_of));
  for (uint8_t code = 0; code < 16; ++code) code_of[header->upper[code]] = code;

  int64_t count = 0;
  const int64_t room = compact_patches(k);
  for (int64_t first = 0; first < numbers; first += 128) {
    auto* group = reinterpret_cast<uint8_t*>(out) + compact_group(k, first / 128);
    const uint16_t* in = panel + first;
    uint8_t codes[128], none = 0;
    for (int64_t i = 0; i < 128; ++i) {
      codes[i] = code_of[in[i] >> 8];
      none |= codes[i];
    }
    if (none == kNone) {
      for (int64_t i = 0; i < 128; ++i) {
        if (codes[i] != kNone) continue;
        if (count == room) return false;
        patches[count++] = uint32_t((first + i) << 8 | in[i] >> 8);
        codes[i] = 0;
      }
    }
    for (int64_t line = 0; line < 2; ++line)
      for (int64_t i = 0; i < 32; ++i) {
        const int64_t at = line * 32 + i, byte = place_of(at).byte;
        group[byte] = uint8_t(codes[at] | codes[at + 64] << 4);
        group[64 + byte] = uint8_t(in[at]);
        group[128 + byte] = uint8_t(in[at + 64]);
      }
  }
  header->patches = uint32_t(count);
  return true;
}

uint16_t compact_number(const char* panel, int64_t k, int64_t at) {
  const Place place = place_of(at);
  const auto* group = reinterpret_cast<const uint8_t*>(panel) + compact_group(k, place.group);
  const uint8_t code = group[place.byte] >> (place.pair * 4) & 15;
  const uint8_t upper = reinterpret_cast<const CompactHeader*>(panel)->upper[code];
  return uint16_t(upper << 8 | group[64 + place.pair * 64 + place.byte]);
}

}  // namespace qr
