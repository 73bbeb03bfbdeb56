// What bf16 and matrix products of bytes (i8mm) add to NEON.
#include "../kernels/attention/attention_bf16.h"
#include "../kernels/gemm/gemm_bf16_neon.h"
#include "../kernels/quantized/gemm_quantized.h"
#include "../kernels/norm.h"
#include "../kernels/attention/rotary.h"

namespace qr {

void fill_neon_bf16(Kernels& kernels) {
  kernels.name = "neon_bf16";
  kernels.gemm_bf16 = kernels.gemm_bf16_compact = paired_gemm();
  fill_quantized<ByVectors>(kernels);
  kernels.rms_norm = rms_norm;
  kernels.layer_norm = layer_norm;
  kernels.rope_and_cache = rope_and_cache;
  fill_bf16_attention<PairedProducts>(kernels);
  kernels.attend_bf16[QR_CACHE_INT8] = attend<Bf16Math<PairedProducts>, int8_t>;
}

}  // namespace qr
