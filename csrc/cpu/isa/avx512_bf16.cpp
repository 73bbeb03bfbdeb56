// What AVX512-BF16 adds to AVX512-VNNI.
#include "../kernels/attention/attention_bf16.h"
#include "../kernels/gemm/gemm_bf16_compact.h"
#include "../kernels/quantized/gemm_float8_bf16.h"
#include "../kernels/norm.h"
#include "../kernels/attention/rotary.h"

namespace qr {

void fill_avx512_bf16(Kernels& kernels) {
  kernels.name = "avx512_bf16";
  kernels.gemm_bf16 = bf16_gemm();
  kernels.gemm_bf16_compact = compact_gemm();
  kernels.gemm_float8 = float8_bf16_gemm();
  kernels.rms_norm = rms_norm;
  kernels.layer_norm = layer_norm;
  kernels.rope_and_cache = rope_and_cache;
  kernels.attend_bf16[QR_BFLOAT16] = attend<Bf16Math, Bf16>;
  kernels.attend_bf16[QR_CACHE_INT8] = attend<Bf16Math, int8_t>;
  kernels.attend_bf16[QR_CACHE_FLOAT8] = attend<Bf16Math, Float8>;
}

}  // namespace qr
