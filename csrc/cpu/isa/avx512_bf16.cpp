// What AVX512-BF16 adds to AVX512-VNNI.
#include "../kernels/attention/attention_bf16.h"
#include "../kernels/gemm/gemm_bf16_widened.h"
#include "../kernels/quantized/gemm_float8_bf16.h"
#include "../kernels/norm.h"
#include "../kernels/attention/rotary.h"

namespace qr {

void fill_avx512_bf16(Kernels& kernels, bool slow_pairs) {
  kernels.name = "avx512_bf16";
  kernels.gemm_bf16 = slow_pairs ? widened_gemm() : bf16_gemm();
  kernels.gemm_bf16_compact = slow_pairs ? widened_compact_gemm() : compact_gemm();
  kernels.gemm_float8 = float8_bf16_gemm(slow_pairs);
  kernels.rms_norm = rms_norm;
  kernels.layer_norm = layer_norm;
  kernels.rope_and_cache = rope_and_cache;
  slow_pairs ? fill_bf16_attention<WidenedPairs>(kernels) : fill_bf16_attention<PairedProducts>(kernels);
}

}  // namespace qr
