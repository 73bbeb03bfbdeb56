// The kernels on AVX-512 (F, BW, DQ, VL): the same templates with twice the width.
#include "../kernels/base.h"

namespace qr {

void fill_avx512(Kernels& kernels) {
  kernels.name = "avx512";
  fill_base(kernels);
}

}  // namespace qr
