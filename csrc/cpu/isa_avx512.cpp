// The kernels on AVX-512 (F, BW, DQ, VL): the same templates with twice the width.
#include "kernels/gemm.h"

namespace qr {

void fill_avx512(Kernels& kernels) {
  kernels.name = "avx512";
  kernels.gemm_fp32 = float_gemm<FloatPanel<float>>();
  kernels.gemm_fp16 = float_gemm<FloatPanel<Fp16>>();
  kernels.gemm_bf16 = kernels.gemm_bf16_float = float_gemm<PairedPanel>();
  kernels.gate = gate;
  kernels.read_sum = read_sum;
}

}  // namespace qr
