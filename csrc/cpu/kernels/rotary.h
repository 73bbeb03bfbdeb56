// From the QKV projection to query and cache, one token at a time: head norms, rotation, and the write to the pages.
#pragma once

#include "cache.h"
#include "norm.h"

namespace qr {
namespace {

constexpr int64_t kMaxHead = 1024;

void read_head(float* out, const void* data, int32_t dtype, int64_t at, int64_t n) {
  each_vector(n, [&](int64_t i, int count) __attribute__((always_inline)) {
    vf v;
    if (dtype == QR_FLOAT32)
      v = load_some(static_cast<const float*>(data) + at + i, count);
    else if (dtype == QR_BFLOAT16)
      v = load_some(static_cast<const Bf16*>(data) + at + i, count);
    else
      v = load_some(static_cast<const Fp16*>(data) + at + i, count);
    store_some(out + i, v, count);
  });
}

void write_head(void* data, int32_t dtype, int64_t at, const float* in, int64_t n) {
  each_vector(n, [&](int64_t i, int count) __attribute__((always_inline)) {
    vf v = load_some(in + i, count);
    if (dtype == QR_FLOAT32)
      store_some(static_cast<float*>(data) + at + i, v, count);
    else if (dtype == QR_BFLOAT16)
      store_some(static_cast<Bf16*>(data) + at + i, v, count);
    else
      store_some(static_cast<Fp16*>(data) + at + i, v, count);
  });
}

void norm_head(float* x, const float* weight, int64_t n, float eps) {
  const float squares = row_sum(n, [&](int64_t i, int count) __attribute__((always_inline)) {
    vf v = load_some(x + i, count);
    return mul(v, v);
  });
  const vf factor = set1(inverse_root(squares / float(n) + eps));
  each_vector(n, [&](int64_t i, int count) __attribute__((always_inline)) {
    store_some(x + i, mul(mul(load_some(x + i, count), factor), load_some(weight + i, count)), count);
  });
}

void rotate_head(float* x, const float* cos_sin, int64_t rotary_dim, bool interleaved) {
  const int64_t half = rotary_dim / 2;
  const float *cosines = cos_sin, *sines = cos_sin + half;
  if (interleaved) {
    for (int64_t i = 0; i < half; ++i) {
      const float first = x[2 * i], second = x[2 * i + 1];
      x[2 * i] = first * cosines[i] - second * sines[i];
      x[2 * i + 1] = second * cosines[i] + first * sines[i];
    }
    return;
  }
  each_vector(half, [&](int64_t i, int count) __attribute__((always_inline)) {
    const vf first = load_some(x + i, count), second = load_some(x + half + i, count);
    const vf c = load_some(cosines + i, count), s = load_some(sines + i, count);
    store_some(x + i, sub(mul(first, c), mul(second, s)), count);
    store_some(x + half + i, add(mul(second, c), mul(first, s)), count);
  });
}

void write_key(const RopeArgs& args, int64_t block, int64_t slot, int64_t kv_head, const float* key) {
  const int64_t n = args.layout.head_size;
  const int64_t at = key_page(args.layout, block, kv_head) + slot / 16 * n * 16;
  if (args.layout.dtype == QR_FLOAT32) {
    float* out = static_cast<float*>(args.cache) + at + slot % 16;
    for (int64_t i = 0; i < n; ++i) out[i * 16] = key[i];
    return;
  }
  alignas(64) uint16_t narrow[kMaxHead];
  write_head(narrow, args.layout.dtype, 0, key, n);
  auto* out = static_cast<uint16_t*>(args.cache) + at;
  if (args.layout.dtype == QR_FLOAT16) {
    for (int64_t i = 0; i < n; ++i) out[i * 16 + slot % 16] = narrow[i];
    return;
  }
  for (int64_t i = 0; i < n; i += 2) std::memcpy(out + i * 16 + slot % 16 * 2, narrow + i, 4);
}

void write_value(const RopeArgs& args, int64_t block, int64_t slot, int64_t kv_head, const float* value) {
  const int64_t n = args.layout.head_size;
  const int64_t at = value_page(args.layout, block, kv_head);
  if (args.layout.dtype != QR_BFLOAT16) {
    write_head(args.cache, args.layout.dtype, at + slot * n, value, n);
    return;
  }
  alignas(64) uint16_t narrow[kMaxHead];
  write_head(narrow, QR_BFLOAT16, 0, value, n);
  auto* out = static_cast<uint16_t*>(args.cache) + at + slot / 2 * n * 2 + slot % 2;
  for (int64_t i = 0; i < n; ++i) out[i * 2] = narrow[i];
}

void rope_and_cache(const RopeArgs& args, int64_t token_begin, int64_t token_end) {
  const int64_t n = args.layout.head_size, kv_heads = args.layout.kv_heads;
  alignas(64) float head[kMaxHead];
  for (int64_t token = token_begin; token < token_end; ++token) {
    const int64_t row = token * (args.heads + 2 * kv_heads) * n;
    const float* cos_sin = args.cos_sin == nullptr ? nullptr : args.cos_sin + args.positions[token] * args.rotary_dim;
    const int64_t block = args.slots[token] / args.layout.block_size, slot = args.slots[token] % args.layout.block_size;
    for (int64_t h = 0; h < args.heads + kv_heads; ++h) {
      const bool is_query = h < args.heads;
      const float* norm = is_query ? args.q_norm : args.k_norm;
      read_head(head, args.qkv, args.dtype, row + h * n, n);
      if (norm != nullptr) norm_head(head, norm, n, args.eps);
      if (cos_sin != nullptr) rotate_head(head, cos_sin, args.rotary_dim, args.interleaved);
      if (is_query)
        write_head(args.query, args.dtype, (token * args.heads + h) * n, head, n);
      else
        write_key(args, block, slot, h - args.heads, head);
    }
    for (int64_t h = 0; h < kv_heads; ++h) {
      read_head(head, args.qkv, args.dtype, row + (args.heads + kv_heads + h) * n, n);
      write_value(args, block, slot, h, head);
    }
  }
}

}  // namespace
}  // namespace qr
