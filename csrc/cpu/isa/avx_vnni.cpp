// What dot products of bytes (AVX-VNNI) add to AVX2: Alder Lake and later, Zen 5.
#include "../kernels/quantized/gemm_quantized.h"

namespace qr {

void fill_avx_vnni(Kernels& kernels) {
  kernels.name = "avx_vnni";
  fill_quantized<ByVectors>(kernels);
}

}  // namespace qr
