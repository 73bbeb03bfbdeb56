// What tests of recurrent layers share: pages of states, steps over them, and functions in double precision.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "quire_cpu.h"

inline double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
inline double softplus(double x) { return x > 0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x)); }
inline double allowed(int32_t dtype, double value) {
  return 2e-5 + std::fabs(value) * (dtype == QR_FLOAT32 ? 2e-5 : dtype == QR_BFLOAT16 ? 0.005 : 0.001);
}

// Pages of NaN, and what a step does with them.
struct Pages {
  int64_t half, num_pages = 5;
  std::vector<float> numbers;
  explicit Pages(int64_t half) : half(half), numbers(size_t(2 * half * num_pages), NAN) {}
};

struct Step {
  std::vector<int32_t> starts, reads, writes;
  int64_t sequences() const { return int64_t(reads.size()); }
};
