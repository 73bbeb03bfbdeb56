// What dot products of bytes (VNNI) add to AVX-512: Cascade Lake, Ice Lake and all that have AVX512-BF16.
#include "../kernels/attention/attention_vnni.h"
#include "../kernels/quantized/gemm_quantized.h"

namespace qr {

void fill_avx512_vnni(Kernels& kernels) {
  kernels.name = "avx512_vnni";
  fill_integers<ByVectors>(kernels);
  fill_avx512_vnni_codes(kernels);
  kernels.attend_bf16[QR_CACHE_INT8] = attend<VnniInt8Math, int8_t>;
}

}  // namespace qr
