// The kernels on any 64-bit ARM: floats only, bf16 by shifting.
#include "../kernels/base.h"

namespace qr {

void fill_neon(Kernels& kernels) {
  kernels.name = "neon";
  fill_base(kernels);
}

}  // namespace qr
