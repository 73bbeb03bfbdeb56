// What a processor and its operating system run.
#pragma once

#include <cstdint>

#include "../kernels.h"

namespace qr {

// The best qr_isa of this machine, 0 if none.
int32_t probe();

// The first of the instruction sets that this library has; the others follow, each a superset of the one before.
extern const int32_t kFirstIsa;
constexpr int32_t kNumIsas = QR_NEON_BF16 + 1;

// The kernels of one.
void fill(Kernels& kernels, int32_t isa);

}  // namespace qr
