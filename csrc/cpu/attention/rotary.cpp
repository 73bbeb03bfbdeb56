// From QKV to query and cache: tokens are independent, but those that write the same cache lines are one piece.
#include "../arguments.h"
#include "../kernels/attention/cache.h"
#include "../runtime/threads.h"

using namespace qr;

namespace {

// Whether they may be given for such a cache.
bool are_scales(const float* scales, int32_t cache_dtype, int64_t kv_heads) {
  if (scales == nullptr) return true;
  for (int64_t head = 0; head < kv_heads; ++head)
    if (!(scales[head] > 0.0f && is_finite(scales[head]))) return false;
  return has_scales(cache_dtype);
}

}  // namespace

extern "C" int32_t qr_rope_and_cache(void* query, const void* qkv, int32_t qkv_dtype, const int64_t* positions,
                                     const float* cos_sin, const float* q_norm, const float* k_norm, void* cache,
                                     int32_t cache_dtype, int64_t num_blocks, int64_t block_size, int64_t page,
                                     int64_t block, const int64_t* slots, int64_t tokens, int64_t heads,
                                     int64_t kv_heads, int64_t head_size, int64_t rotary_dim, int32_t interleaved, float eps,
                                     const float* key_scales, const float* value_scales) {
  if (kernels() == nullptr) return QR_ESTATE;
  const int32_t dtype = element_of(qkv_dtype);
  if (dtype < QR_FLOAT32 || dtype > QR_FLOAT16 || cache_dtype < QR_FLOAT32 || cache_dtype >= kNumCacheTypes ||
      (kv_heads != 0 && page != qr_cache_page(cache_dtype, block_size, head_size)) || heads <= 0 || kv_heads < 0 ||
      !are_sizes(tokens, heads, head_size) || !are_sizes(tokens, kv_heads, head_size) ||
      !are_blocks(num_blocks, kv_heads, page, block) || rotary_dim < 0 || rotary_dim > head_size || rotary_dim % 2 != 0 ||
      ((q_norm != nullptr || k_norm != nullptr) && !is_epsilon(eps)) || (qkv_dtype != dtype && head_size % 32 != 0) ||
      !are_scales(key_scales, cache_dtype, kv_heads) || !are_scales(value_scales, cache_dtype, kv_heads))
    return QR_EINVAL;
  if (tokens == 0) return QR_OK;
  const bool rotates = rotary_dim > 0 && cos_sin != nullptr;
  if (!are_there(query, qkv, cache, slots) || (rotates && positions == nullptr)) return QR_EINVAL;
  for (int64_t token = 0; rotates && token < tokens; ++token)
    if (positions[token] < 0) return QR_EINVAL;
  for (int64_t token = 0; token < tokens; ++token)
    if (slots[token] < 0 || slots[token] >= num_blocks * block_size) return QR_EINVAL;
  const RopeArgs args{query,
                      qkv,
                      qkv_dtype,
                      dtype,
                      positions,
                      rotary_dim > 0 ? cos_sin : nullptr,
                      q_norm,
                      k_norm,
                      cache,
                      CacheLayout{cache_dtype, num_blocks, kv_heads, block_size, head_size, page, block},
                      slots,
                      heads,
                      rotary_dim,
                      interleaved != 0,
                      eps,
                      key_scales,
                      value_scales};
  constexpr int64_t kTokens = 4;  // some 5 us
  auto* begins = static_cast<int64_t*>(scratch(2, (divide_up(tokens, kTokens) + 1) * 8));
  if (begins == nullptr) return QR_ENOMEM;
  int64_t pieces = 0;
  for (int64_t token = 0; token < tokens; ++token)
    if (token == 0 || (token - begins[pieces - 1] >= kTokens && !shares_group(args, token))) begins[pieces++] = token;
  begins[pieces] = tokens;
  parallel_for(pieces, [&](int64_t index) { kernels()->rope_and_cache(args, begins[index], begins[index + 1]); });
  return QR_OK;
}
