// What AMX tiles add to AVX512-BF16.
#include "../kernels/attention/attention_amx_int8.h"
#include "../kernels/gemm/gemm_amx.h"
#include "../kernels/quantized/nested_amx.h"

namespace qr {

// One instruction of each kind, for the probe.
int32_t execute_amx();
int32_t execute_amx() {
  TileConfig config;
  for (int tile = 0; tile < 3; ++tile) config.set(tile, 16, 64);
  config.use();
  alignas(64) static uint8_t ones[1024];
  alignas(64) static int32_t sums[256];
  for (uint8_t& one : ones) one = 1;
  memory_barrier();
  _tile_loadd(1, ones, 64);
  _tile_stream_loadd(2, ones, 64);
  _tile_zero(0);
  _tile_dpbf16ps(0, 1, 2);
  _tile_zero(0);
  _tile_dpbssd(0, 1, 2);
  _tile_dpbusd(0, 1, 2);
  _tile_stored(0, sums, 64);
  memory_barrier();
  _tile_release();
  return sums[255] == 128 ? 1 : 0;
}

void fill_amx(Kernels& kernels) {
  kernels.name = "amx";
  kernels.gemm_bf16 = kernels.gemm_bf16_compact = amx_gemm();
  kernels.compact_streams = kCompactParts;
  fill_quantized<ByAmx>(kernels);
  kernels.attend_bf16[QR_BFLOAT16] = attend<AmxMath, Bf16>;
  kernels.attend_bf16[QR_CACHE_INT8] = attend<AmxInt8Math, int8_t>;
  kernels.attend_bf16[QR_CACHE_FLOAT8] = attend<AmxMath, Float8>;
}

}  // namespace qr
