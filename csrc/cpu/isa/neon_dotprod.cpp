// What dot products of bytes add to NEON.
#include "../kernels/quantized/gemm_quantized.h"

namespace qr {

void fill_neon_dotprod(Kernels& kernels) {
  kernels.name = "neon_dotprod";
  fill_quantized<ByVectors>(kernels);
}

}  // namespace qr
