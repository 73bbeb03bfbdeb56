// What AVX512-BF16 and VNNI add to AVX-512.
#include "kernels/gemm_bf16.h"

namespace qr {

void fill_avx512_bf16(Kernels& kernels) {
  kernels.name = "avx512_bf16";
  kernels.gemm_bf16 = bf16_gemm();
}

}  // namespace qr
