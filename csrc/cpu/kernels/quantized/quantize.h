// A row of a weight as integers with scales. Plain loops, which the compiler turns into vectors of the instruction set.
#pragma once

#include <algorithm>
#include <cstring>

#include "../../elements.h"
#include "../../kernels.h"

namespace qr {
namespace {

// Inputs read at a time: the largest group.
constexpr int64_t kChunk = 128;

void read_floats(float* __restrict out, const void* row, int32_t dtype, int64_t begin, int64_t count) {
  const auto* words = static_cast<const uint16_t*>(row) + begin;
  if (dtype == QR_FLOAT32) {
    std::memcpy(out, static_cast<const float*>(row) + begin, size_t(count) * 4);
  } else if (dtype == QR_BFLOAT16) {
    for (int64_t i = 0; i < count; ++i) out[i] = from_bfloat16(words[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) out[i] = from_half(words[i]);
  }
}

// The bits of |x| are in the order of the numbers themselves, and their largest one does not depend on the order of sums.
int32_t magnitude(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits & 0x7fffffff;
}

int32_t largest_magnitude(const float* x, int64_t count) {
  int32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) largest = magnitude(x[i]) > largest ? magnitude(x[i]) : largest;
  return largest;
}

// To the nearest integer, halves to the even one, of numbers below 2^22: the sum has no room for fractions.
float nearest(float x) {
  constexpr float kNoFractions = 12582912.0f;  // 1.5 * 2^23
  return (x + kNoFractions) - kNoFractions;
}

// -127 .. 127, and a scale for the whole row.
void row_to_int8(const IntegersArgs& args) {
  alignas(64) float chunk[kChunk];
  int32_t bits = 0;
  for (int64_t begin = 0; begin < args.k; begin += kChunk) {
    const int64_t count = std::min(kChunk, args.k - begin);
    read_floats(chunk, args.row, args.dtype, begin, count);
    bits = std::max(bits, largest_magnitude(chunk, count));
  }
  float largest;
  std::memcpy(&largest, &bits, 4);
  const float scale = std::max(largest / 127.0f, 1e-30f);
  *static_cast<float*>(args.scales) = scale;
  for (int64_t begin = 0; begin < args.k; begin += kChunk) {
    const int64_t count = std::min(kChunk, args.k - begin);
    read_floats(chunk, args.row, args.dtype, begin, count);
    int8_t* __restrict out = args.integers + begin;
    for (int64_t i = 0; i < count; ++i) out[i] = int8_t(int32_t(nearest(chunk[i] / scale)));
  }
}

// -8 .. 7, and a float16 scale for each group: its element of largest magnitude becomes -8 scales.
void row_to_int4(const IntegersArgs& args) {
  alignas(64) float chunk[kChunk];
  auto* scales = static_cast<uint16_t*>(args.scales);
  for (int64_t begin = 0; begin < args.k; begin += args.group, scales += kPanel) {
    const int64_t count = std::min(args.group, args.k - begin);
    read_floats(chunk, args.row, args.dtype, begin, count);
    const int32_t bits = largest_magnitude(chunk, count);
    const float* largest = std::find_if(chunk, chunk + count, [&](float x) { return magnitude(x) == bits; });
    *scales = to_half(*largest / -8.0f);
    const float scale = from_half(*scales), inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
    int8_t* __restrict out = args.integers + begin;
    for (int64_t i = 0; i < count; ++i) {
      const float value = nearest(chunk[i] * inverse);
      out[i] = int8_t(int32_t(value < -8.0f ? -8.0f : value > 7.0f ? 7.0f : value));
    }
  }
}

}  // namespace
}  // namespace qr
