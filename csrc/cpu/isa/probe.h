// What a processor and its operating system run.
#pragma once

#include <cstdint>

#include "../kernels.h"

namespace qr {

// What this machine runs, as qr_isas tells it.
uint32_t probe();

constexpr int32_t kNumIsas = QR_NEON_BF16 + 1;
constexpr uint32_t bit_of(int32_t isa) { return 1u << isa; }

// The kernels of one.
void fill(Kernels& kernels, int32_t isa);

}  // namespace qr
