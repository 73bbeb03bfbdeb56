// The kernels on AVX2 with FMA: floats only, bf16 by shifting.
#include "../kernels/base.h"

namespace qr {

void fill_avx2(Kernels& kernels) {
  kernels.name = "avx2";
  fill_base(kernels);
}

}  // namespace qr
