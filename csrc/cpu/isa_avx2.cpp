// The kernels on AVX2 with FMA: floats only, bf16 by shifting.
#include "kernels/gemm.h"

namespace qr {

void fill_avx2(Kernels& kernels) {
  kernels.name = "avx2";
  kernels.gemm_fp32 = float_gemm<FloatPanel<float>>();
  kernels.gemm_fp16 = float_gemm<FloatPanel<Fp16>>();
  kernels.gemm_bf16 = kernels.gemm_bf16_float = float_gemm<PairedPanel>();
  kernels.gate = gate;
  kernels.read_sum = read_sum;
}

}  // namespace qr
