// The gated delta rule, lightning attention and the RG-LRU.
#include "states.h"

using namespace qr;

extern "C" {

int32_t qr_gated_delta_scan(float* x, const void* rate, int64_t rate_stride, const void* time, int64_t time_stride,
                            int32_t dtype, int32_t by_channel, const float* time_bias, const float* decay,
                            float most_rate, float bound, int64_t tokens, int64_t heads, int64_t key_heads,
                            int64_t key_size, int64_t value_size, int64_t first, float* states, int64_t num_pages, int64_t half,
                            const int32_t* query_start, const int32_t* reads, const int32_t* writes,
                            int64_t sequences) {
  if (kernels() == nullptr) return QR_ESTATE;
  if (!is_dtype(dtype) || key_heads <= 0 || heads <= 0 || heads % key_heads != 0 || key_size <= 0 || value_size <= 0 ||
      !are_sizes(first) || !are_sizes(heads, value_size, key_size) || rate_stride < heads ||
      time_stride < heads * (by_channel ? key_size : 1) || !are_sizes(tokens, rate_stride) ||
      !are_sizes(tokens, time_stride) || !are_sizes(tokens, heads, value_size) ||
      !are_sizes(tokens, 2, key_heads, key_size) || !are_there(time_bias, decay) ||
      !(most_rate > 0.0f && most_rate <= 2.0f) || !(bound <= 0.0f) || (bound < 0.0f && !by_channel) || (tokens > 0 && !are_there(x, rate, time)))
    return QR_EINVAL;
  const States all{states, num_pages, half, query_start, reads, writes, sequences};
  if (!all.are_valid(tokens, first + heads * value_size * key_size)) return QR_EINVAL;
  const int64_t stride = 2 * key_heads * key_size + heads * value_size;
  const DeltaArgs args{x,         stride, rate,      time,  rate_stride, time_stride, dtype,     by_channel != 0,
                       time_bias, decay,  most_rate, bound, heads,       key_heads,   key_size,  value_size};
  return scan(all, Units{first, heads, value_size * key_size, 1, kStepTokens * args.room_of_token()},
              [&](const ScanPiece& piece) { kernels()->gated_delta_scan(args, piece); });
}

int32_t qr_lightning_scan(float* out, const void* x, int32_t dtype, int64_t stride, const float* decay, int64_t tokens,
                          int64_t heads, int64_t head_size, int64_t first, float* states, int64_t num_pages,
                          int64_t half, const int32_t* query_start, const int32_t* reads, const int32_t* writes,
                          int64_t sequences) {
  if (kernels() == nullptr) return QR_ESTATE;
  if (!is_dtype(dtype) || heads <= 0 || head_size <= 0 || !are_sizes(first) || !are_sizes(3, heads, head_size) ||
      stride < 3 * heads * head_size || !are_sizes(tokens, stride) || !are_sizes(heads, head_size, head_size) ||
      !are_there(decay) || (tokens > 0 && !are_there(out, x)))
    return QR_EINVAL;
  const States all{states, num_pages, half, query_start, reads, writes, sequences};
  if (!all.are_valid(tokens, first + heads * head_size * head_size)) return QR_EINVAL;
  const LightningArgs args{out, x, dtype, stride, decay, heads, head_size};
  return scan(all, Units{first, heads, head_size * head_size, 1, 3 * kStepTokens * head_size},
              [&](const ScanPiece& piece) { kernels()->lightning_scan(args, piece); });
}

int32_t qr_rg_lru_scan(void* out, int32_t dtype, const float* x, const float* gates, const void* gate,
                       const float* decay, int64_t tokens, int64_t channels, int64_t block, int64_t first,
                       float* states, int64_t num_pages, int64_t half, const int32_t* query_start,
                       const int32_t* reads, const int32_t* writes, int64_t sequences) {
  if (kernels() == nullptr) return QR_ESTATE;
  if (!is_dtype(dtype) || channels <= 0 || block <= 0 || channels % block != 0 || !are_sizes(first) ||
      !are_sizes(tokens, 2, channels) || !are_there(decay) || (tokens > 0 && !are_there(out, x, gates, gate)))
    return QR_EINVAL;
  const States all{states, num_pages, half, query_start, reads, writes, sequences};
  if (!all.are_valid(tokens, first + channels)) return QR_EINVAL;
  const RgLruArgs args{out, dtype, x, gates, gate, decay, tokens, channels, block};
  return scan(all, Units{first, channels, 1, kScanChannels},
              [&](const ScanPiece& piece) { kernels()->rg_lru_scan(args, piece); });
}

}  // extern "C"
