// From the QKV projection to query and cache: head norms, rotation, and the write to the pages.
#pragma once

#include <type_traits>

#include "../float8.h"
#include "../gemm/gemm.h"
#include "../norm.h"
#include "slots.h"

namespace qr {
namespace {

// A head on its way: RMS-normed where there is a weight, rotated where there are cosines and sines.
template <class T>
struct Head {
  const T* in;
  int64_t n;
  const float* weight;   // or null
  const float* cos_sin;  // or null
  int64_t rotary_dim;
  bool interleaved;
  float eps;

  template <class Out>
  inline __attribute__((always_inline)) void write(Out* out) const {
    vf factor = set1(1.0f);
    if (weight != nullptr) {
      const float squares = row_sum(n, [&](int64_t i, int count) __attribute__((always_inline)) {
        vf v = load_some(in + i, count);
        return mul(v, v);
      });
      factor = set1(inverse_root(squares / float(n) + eps));
    }
    const auto normed = [&](int64_t i, int count) __attribute__((always_inline)) {
      const vf v = load_some(in + i, count);
      return weight == nullptr ? v : mul(mul(v, factor), load_some(weight + i, count));
    };
    const int64_t turned = cos_sin == nullptr ? 0 : rotary_dim, half = turned / 2;
    const float *cosines = cos_sin, *sines = cos_sin + half;
    if (interleaved && turned > 0) {
      alignas(64) float x[kMostHead];
      each_vector(turned, [&](int64_t i, int count) __attribute__((always_inline)) {
        store_some(x + i, normed(i, count), count);
      });
      for (int64_t i = 0; i < half; ++i) {
        const float first = x[2 * i], second = x[2 * i + 1];
        out[2 * i] = from_float<Out>(first * cosines[i] - second * sines[i]);
        out[2 * i + 1] = from_float<Out>(second * cosines[i] + first * sines[i]);
      }
    } else {
      each_vector(half, [&](int64_t i, int count) __attribute__((always_inline)) {
        const vf first = normed(i, count), second = normed(half + i, count);
        const vf c = load_some(cosines + i, count), s = load_some(sines + i, count);
        store_some(out + i, sub(mul(first, c), mul(second, s)), count);
        store_some(out + half + i, add(mul(second, c), mul(first, s)), count);
      });
    }
    each_vector(n - turned, [&](int64_t i, int count) __attribute__((always_inline)) {
      store_some(out + turned + i, normed(turned + i, count), count);
    });
  }
};

// Elements of 8 bits: the magnitude that a head's largest number gets, the bounds, and the nearest to a number.
struct Int8Codes {
  static constexpr float kTop = 127.0f, kLeast = -128.0f, kMost = 127.0f;
  QR_INLINE int8_t nearest(float x) { return int8_t(__builtin_nearbyintf(x)); }
};
struct Float8Codes {
  static constexpr float kTop = 448.0f, kLeast = -448.0f, kMost = 448.0f;
  QR_INLINE int8_t nearest(float x) { return int8_t(to_float8(x).bits); }
};

// A head in elements of 8 bits; gives their scale: `given`, or that of its largest magnitude where it is 0.
template <class Codes>
float quantize_head(int8_t* out, const float* in, int64_t n, float given) {
  vf largest = zero(), zeros = zero();
  each_vector(n, [&](int64_t i, int count) __attribute__((always_inline)) {
    const vf v = load_some(in + i, count);
    largest = max(abs(v), largest);
    zeros = fma(v, zero(), zeros);
  });
  const float broken = qr::sum(zeros);  // NaN where a number is none, which `largest` passes over
  const float top = qr::largest(largest);
  const float per_scale = given > 0.0f ? 1.0f / given : top > 0.0f ? Codes::kTop / top : 0.0f;
  for (int64_t i = 0; i < n; ++i) {
    const float x = in[i] * per_scale, low = x > Codes::kLeast ? x : Codes::kLeast;
    out[i] = Codes::nearest(low < Codes::kMost ? low : Codes::kMost);
  }
  return (given > 0.0f ? given : top / Codes::kTop) + broken;
}

// Where consecutive tokens, of one group of slots, go in the pages of a kv head.
struct Run {
  int64_t block, slot, count;
};

// Lines of the cache that a run will write are read first, and attention reads them soon: let them come.
void prefetch_run(const RopeArgs& args, const Run& run) {
  const int64_t n = args.layout.head_size, size = bytes_of(args.layout.dtype), together = size == 1 ? 4 : 2;
  for (int64_t h = 0; h < args.layout.kv_heads; ++h) {
    const char* keys = static_cast<const char*>(args.cache) + key_page(args.layout, run.block, h) * size;
    const char* values = static_cast<const char*>(args.cache) + value_page(args.layout, run.block, h) * size;
    for (int64_t i = 0; i < kGroup * n * size; i += 64) prefetch(keys + run.slot / kGroup * kGroup * n * size + i);
    const char* own = values + run.slot / together * together * n * size;
    for (int64_t i = 0; i < together * n * size; i += 64) prefetch(own + i);
  }
}

// The tokens of a run, from `begin` on: queries to query, keys and values to the cache, as Codes where it has scales.
template <class T, class Stored, class Codes = void>
void rope_run(const RopeArgs& args, int64_t begin, const Run& run) {
  const int64_t n = args.layout.head_size, kv_heads = args.layout.kv_heads, heads = args.heads;
  const auto* qkv = static_cast<const T*>(args.qkv);
  const Places places((heads + 2 * kv_heads) * n, args.qkv_dtype);
  alignas(64) Stored rows[kGroup * kMostHead];
  alignas(64) T copy[kMostHead];
  auto head_at = [&](int64_t token, int64_t h, const float* norm, bool turned) __attribute__((always_inline)) {
    const float* cos_sin =
        turned && args.cos_sin != nullptr ? args.cos_sin + args.positions[token] * args.rotary_dim : nullptr;
    const T* in = qkv + places.row(token) + places.column(h * n);
    if (args.qkv_dtype != args.dtype) {
      for (int64_t i = 0; i < n; i += 32)
        std::memcpy(static_cast<void*>(copy + i), in + places.column(i), 32 * sizeof(T));
      in = copy;
    }
    return Head<T>{in, n, norm, cos_sin, args.rotary_dim, args.interleaved, args.eps};
  };
  auto keep = [&](int64_t t, int64_t page, const Head<T>& head, const float* given) __attribute__((always_inline)) {
    if constexpr (!std::is_void<Codes>::value) {
      alignas(64) float floats[kMostHead];
      head.write(floats);
      const float scale = quantize_head<Codes>(rows + t * n, floats, n, given == nullptr ? 0.0f : *given);
      char* scales = static_cast<char*>(args.cache) + page + padded_slots(args.layout) * n;
      std::memcpy(scales + (run.slot + t) * 4, &scale, 4);
    } else {
      head.write(rows + t * n);
    }
  };
  for (int64_t t = 0; t < run.count; ++t)
    for (int64_t h = 0; h < heads; ++h)
      head_at(begin + t, h, args.q_norm, true).write(static_cast<T*>(args.query) + ((begin + t) * heads + h) * n);
  const auto scale_of = [](const float* scales, int64_t h) { return scales == nullptr ? nullptr : scales + h; };
  for (int64_t h = 0; h < kv_heads; ++h) {
    const float *key_scale = scale_of(args.key_scales, h), *value_scale = scale_of(args.value_scales, h);
    for (int64_t t = 0; t < run.count; ++t)
      keep(t, key_page(args.layout, run.block, h), head_at(begin + t, heads + h, args.k_norm, true), key_scale);
    auto* cache = static_cast<Stored*>(args.cache);
    write_keys(cache + key_page(args.layout, run.block, h), n, run.slot, rows, run.count);
    for (int64_t t = 0; t < run.count; ++t)
      keep(t, value_page(args.layout, run.block, h), head_at(begin + t, heads + kv_heads + h, nullptr, false),
           value_scale);
    write_values(cache + value_page(args.layout, run.block, h), n, run.slot, rows, run.count);
  }
}

template <class T>
void rope_tokens(const RopeArgs& args, int64_t begin, int64_t end) {
  const int64_t block_size = args.layout.block_size;
  auto run_at = [&](int64_t token) {
    Run run{args.slots[token] / block_size, args.slots[token] % block_size, 1};
    while (token + run.count < end && shares_group(args, token + run.count)) ++run.count;
    return run;
  };
  for (int64_t token = begin; token < end;) {
    const Run run = run_at(token);
    if (run.count < kGroup) prefetch_run(args, run);
    if (args.layout.dtype == QR_FLOAT32)
      rope_run<T, float>(args, token, run);
    else if (args.layout.dtype == QR_BFLOAT16)
      rope_run<T, Bf16>(args, token, run);
    else if (args.layout.dtype == QR_FLOAT16)
      rope_run<T, Fp16>(args, token, run);
    else if (args.layout.dtype == QR_CACHE_INT8)
      rope_run<T, int8_t, Int8Codes>(args, token, run);
    else
      rope_run<T, int8_t, Float8Codes>(args, token, run);
    token += run.count;
  }
}

void rope_and_cache(const RopeArgs& args, int64_t begin, int64_t end) {
  if (args.dtype == QR_FLOAT32)
    rope_tokens<float>(args, begin, end);
  else if (args.dtype == QR_BFLOAT16)
    rope_tokens<Bf16>(args, begin, end);
  else
    rope_tokens<Fp16>(args, begin, end);
}

template <class T>
void rotate_last_of(const RotateArgs& args, int64_t token) {
  const int64_t pairs = args.rotated / 2;
  const float* cos = args.cos_sin + args.positions[token] * args.rotated;
  const float* sin = cos + pairs;
  const float sign = args.backward ? -1.0f : 1.0f;
  T* x = static_cast<T*>(args.x) + token * args.heads * args.size + args.size - args.rotated;
  for (int64_t head = 0; head < args.heads; ++head, x += args.size)
    for (int64_t i = 0; i < pairs; ++i) {
      const float even = to_float(x[2 * i]), odd = to_float(x[2 * i + 1]), turn = sign * sin[i];
      x[2 * i] = from_float<T>(even * cos[i] - odd * turn);
      x[2 * i + 1] = from_float<T>(odd * cos[i] + even * turn);
    }
}

void rotate_last(const RotateArgs& args, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token) {
    if (args.dtype == QR_FLOAT32)
      rotate_last_of<float>(args, token);
    else if (args.dtype == QR_BFLOAT16)
      rotate_last_of<Bf16>(args, token);
    else
      rotate_last_of<Fp16>(args, token);
  }
}

}  // namespace
}  // namespace qr
