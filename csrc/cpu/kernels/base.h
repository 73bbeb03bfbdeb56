// The whole table from templates that need no more than vectors; wider instruction sets replace entries.
#pragma once

#include "attention/attention_float.h"
#include "quantized/blocks.h"
#include "attention/block_selection.h"
#include "elementwise.h"
#include "attention/entries.h"
#include "recurrent/gated_recurrence.h"
#include "gemm/gemm.h"
#include "hyper.h"
#include "quantized/gemm_float8.h"
#include "quantized/gemm_quantized.h"
#include "norm.h"
#include "quantized/quantize.h"
#include "recurrent/recurrence.h"
#include "attention/rotary.h"
#include "sampling.h"
#include "attention/selection.h"

namespace qr {
namespace {

void fill_base(Kernels& kernels) {
  kernels.gemm_fp32 = float_gemm<FloatPanel<float>>();
  kernels.gemm_fp16 = float_gemm<FloatPanel<Fp16>>();
  kernels.gemm_bf16 = Gemm{stretched_rows_bytes, stretched_rows, run_streamed<StretchMicro>};
  kernels.gemm_bf16_compact = kernels.gemm_bf16_float = kernels.gemm_bf16;
  kernels.compact_panel = compact_panel;
  kernels.compact_streams = 1;
  kernels.rms_norm = rms_norm;
  kernels.layer_norm = layer_norm;
  kernels.scale_add = scale_add;
  kernels.soft_cap = soft_cap;
  kernels.weighed_sum = weighed_sum;
  kernels.rope_and_cache = rope_and_cache;
  kernels.attend[QR_FLOAT32] = attend<FloatMath<float>, float>;
  kernels.attend[QR_BFLOAT16] = attend<FloatMath<Bf16>, Bf16>;
  kernels.attend[QR_FLOAT16] = attend<FloatMath<Fp16>, Fp16>;
  kernels.attend[QR_CACHE_INT8] = attend<FloatMath<Bf16>, int8_t>;
  kernels.attend[QR_CACHE_FLOAT8] = attend<FloatMath<Bf16>, Float8>;
  for (int cache = 0; cache < kNumCacheTypes; ++cache) kernels.attend_bf16[cache] = kernels.attend[cache];
  kernels.merge_splits = merge_splits;
  kernels.index_scores[QR_FLOAT32] = index_scores<float>;
  kernels.index_scores[QR_BFLOAT16] = index_scores<Bf16>;
  kernels.index_scores[QR_FLOAT16] = index_scores<Fp16>;
  kernels.index_scores[QR_CACHE_INT8] = index_scores<int8_t>;
  kernels.index_scores[QR_CACHE_FLOAT8] = index_scores<Float8>;
  kernels.block_scores = block_scores;
  kernels.compress = compress;
  kernels.write_slots = write_slots;
  kernels.rotate_last = rotate_last;
  kernels.read_streams = read_streams;
  kernels.write_streams = write_streams;
  kernels.causal_conv = causal_conv;
  kernels.mamba_derived = mamba_derived;
  kernels.mamba_scan = mamba_scan;
  kernels.mamba2_scan = mamba2_scan;
  kernels.gated_norm = gated_norm;
  kernels.gated_delta_scan = gated_delta_scan;
  kernels.lightning_scan = lightning_scan;
  kernels.rg_lru_scan = rg_lru_scan;
  kernels.find_largest = find_largest;
  kernels.sum_exponentials = sum_exponentials;
  kernels.sample_weights = sample_weights;
  kernels.count_not_below = count_not_below;
  kernels.next_above = next_above;
  kernels.gather_allowed = gather_allowed;
  kernels.gemm_float8 = kernels.gemm_float8_float = float8_gemm();
  fill_quantized<ByVectors>(kernels);
  kernels.row_to_int8 = row_to_int8;
  kernels.row_to_int4 = row_to_int4;
  kernels.block_type = block_type;
  kernels.to_halves = to_halves;
  kernels.read_blocks = read_blocks;
  kernels.gate = gate;
  kernels.read_sum = read_sum;
}

}  // namespace
}  // namespace qr
