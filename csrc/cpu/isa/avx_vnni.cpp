// What dot products of bytes (AVX-VNNI) add to AVX2: Alder Lake and later, Zen 5.
#include "../kernels/attention/attention_vnni.h"
#include "../kernels/quantized/gemm_quantized.h"

namespace qr {

void fill_avx_vnni(Kernels& kernels) {
  kernels.name = "avx_vnni";
  fill_quantized<ByVectors>(kernels);
  kernels.attend_bf16[QR_CACHE_INT8] = attend<VnniInt8Math, int8_t>;
}

}  // namespace qr
