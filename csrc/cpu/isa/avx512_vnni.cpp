// What dot products of bytes (VNNI) add to AVX-512: Cascade Lake, Ice Lake and all that have AVX512-BF16.
#include "../kernels/quantized/gemm_quantized.h"

namespace qr {

void fill_avx512_vnni(Kernels& kernels) {
  kernels.name = "avx512_vnni";
  fill_integers<ByVectors>(kernels);
  fill_avx512_vnni_codes(kernels);
}

}  // namespace qr
