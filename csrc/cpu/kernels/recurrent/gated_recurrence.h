// The gated delta rule, lightning attention and the RG-LRU, token by token; see recurrence.h for row invariance.
#pragma once

#include "recurrence.h"

namespace qr {
namespace {

// ---- the gated delta rule ----

constexpr int kDeltaRows = 8;
constexpr float kUnitEps = 1e-6f;

// out = x / sqrt(sum of squares + eps) * scale
QR_INLINE void unit(float* out, const float* x, float scale, int64_t n) {
  const float squares = row_sum(n, [&](int64_t i, int count) __attribute__((always_inline)) {
    const vf value = load_some(x + i, count);
    return mul(value, value);
  });
  const vf factor = set1(inverse_root(squares + kUnitEps) * scale);
  each_vector(n, [&](int64_t i, int count) __attribute__((always_inline)) {
    store_some(out + i, mul(load_some(x + i, count), factor), count);
  });
}

// What a token leaves of a head's state, the same of all channels: (h decay) . key = decay (h . key).
struct HeadDecay {
  float factor;
  vf factors;
  explicit HeadDecay(float of_all) : factor(of_all), factors(set1(of_all)) {}
  __attribute__((always_inline)) vf at(int64_t, int) const { return factors; }
  __attribute__((always_inline)) vf of_key(vf keys, int64_t, int) const { return keys; }
  __attribute__((always_inline)) float of_sum(float sum) const { return factor * sum; }
};

// Of each channel of the key: (h decay) . key = h . (decay key).
struct ChannelDecay {
  const float* factors;
  __attribute__((always_inline)) vf at(int64_t i, int n) const { return load_some(factors + i, n); }
  __attribute__((always_inline)) vf of_key(vf keys, int64_t i, int n) const { return mul(keys, at(i, n)); }
  __attribute__((always_inline)) float of_sum(float sum) const { return sum; }
};

// So many rows of a head's state and one token: h = h * decay + rate * (value - (h * decay) . key) key; values become
// h . query.
template <class R, class Decay>
QR_INLINE void delta_rows(R, float* values, float* after, const float* before, const Decay& decay, float rate,
                          const float* query, const float* key, int64_t size) {
  constexpr int kRows = R::count;
  vf totals[kRows], changes[kRows];
  for (int row = 0; row < kRows; ++row) totals[row] = zero();
  each_vector(size, [&](int64_t i, int n) __attribute__((always_inline)) {
    const vf keys = decay.of_key(load_some(key + i, n), i, n);
    for (int row = 0; row < kRows; ++row) totals[row] = fma(load_some(before + row * size + i, n), keys, totals[row]);
  });
  for (int row = 0; row < kRows; ++row) {
    changes[row] = set1(rate * (values[row] - decay.of_sum(sum(totals[row]))));
    totals[row] = zero();
  }
  each_vector(size, [&](int64_t i, int n) __attribute__((always_inline)) {
    const vf keys = load_some(key + i, n), queries = load_some(query + i, n), kept = decay.at(i, n);
    for (int row = 0; row < kRows; ++row) {
      const vf state = fma(changes[row], keys, mul(load_some(before + row * size + i, n), kept));
      R::put(after + row * size + i, state, n);
      totals[row] = fma(state, queries, totals[row]);
    }
  });
  for (int row = 0; row < kRows; ++row) values[row] = sum(totals[row]);
}

// What one token leaves of each channel of a head: no less than exp(bound), if there is a bound.
template <class T>
QR_INLINE void channel_decays(float* out, const T* time, const float* bias, float decay, float bound, int64_t n) {
  each_vector(n, [&](int64_t i, int count) __attribute__((always_inline)) {
    const vf step = add(load_some(time + i, count), load_some(bias + i, count));
    const vf power = bound < 0.0f ? mul(sigmoid(mul(step, set1(-decay))), set1(bound))
                                  : mul(softplus(step), set1(decay));
    store_some(out + i, exp(power), count);
  });
}

void channel_decays(float* out, const DeltaArgs& args, int64_t token, int64_t head) {
  const int64_t n = args.key_size, at = token * args.time_stride + head * n;
  const float *bias = args.time_bias + head * n, decay = args.decay[head];
  if (args.dtype == QR_FLOAT32)
    channel_decays(out, static_cast<const float*>(args.time) + at, bias, decay, args.bound, n);
  else if (args.dtype == QR_BFLOAT16)
    channel_decays(out, static_cast<const Bf16*>(args.time) + at, bias, decay, args.bound, n);
  else
    channel_decays(out, static_cast<const Fp16*>(args.time) + at, bias, decay, args.bound, n);
}

// Some tokens of a head: their rates, and the decays of a head that decays as one. Queries, keys and the decays of each
// channel are in `room`, one token after the other.
struct DeltaSteps {
  HeadSteps time;
  alignas(64) float rate[kStepTokens];

  DeltaSteps(const DeltaArgs& args, const ScanPiece& piece, int64_t begin, int64_t end) {
    const int64_t head = piece.begin, size = args.key_size;
    if (!args.by_channel) {
      numbers_of_head(time.time, args.time, args.dtype, begin * args.time_stride + head, args.time_stride, end - begin);
      time_steps(time, args.time_bias[head], args.decay[head]);
    }
    numbers_of_head(rate, args.rate, args.dtype, begin * args.rate_stride + head, args.rate_stride, end - begin);
    for (int64_t i = 0; i < kStepTokens; i += W) store(rate + i, mul(sigmoid(load(rate + i)), set1(args.most_rate)));
    const float scale = inverse_root(float(size));
    for (int64_t token = begin; token < end; ++token) {
      const float* query = args.x + token * args.stride + head / (args.heads / args.key_heads) * size;
      float* to = piece.room + (token - begin) * args.room_of_token();
      unit(to, query, scale, size);
      unit(to + size, query + args.key_heads * size, 1.0f, size);
      if (args.by_channel) channel_decays(to + 2 * size, args, token, head);
    }
  }
};

// decay_of gives what a token leaves, from the steps, its place among them and its vectors in `room`.
template <class DecayOf>
QR_INLINE void gated_delta_scan_of(const DeltaArgs& args, const ScanPiece& piece, const DecayOf& decay_of) {
  const int64_t size = args.key_size, column = 2 * args.key_heads * size + piece.begin * args.value_size;
  for (int64_t begin = piece.token_begin; begin < piece.token_end; begin += kStepTokens) {
    const int64_t end = begin + kStepTokens < piece.token_end ? begin + kStepTokens : piece.token_end;
    const DeltaSteps steps(args, piece, begin, end);
    scan_rows<kDeltaRows>(
        piece, args.value_size, size, begin, end,
        [&](auto rows, int64_t token, int64_t p, float* after, const float* before) __attribute__((always_inline)) {
          const float* query = piece.room + (token - begin) * args.room_of_token();
          delta_rows(rows, args.x + token * args.stride + column + p, after, before,
                     decay_of(steps, token - begin, query), steps.rate[token - begin], query, query + size, size);
        });
  }
}

void gated_delta_scan(const DeltaArgs& args, const ScanPiece& piece) {
  if (args.by_channel)
    gated_delta_scan_of(args, piece, [&](const DeltaSteps&, int64_t, const float* room) __attribute__((always_inline)) {
      return ChannelDecay{room + 2 * args.key_size};
    });
  else
    gated_delta_scan_of(args, piece,
                        [&](const DeltaSteps& steps, int64_t index, const float*) __attribute__((always_inline)) {
                          return HeadDecay(steps.time.decay[index]);
                        });
}

// ---- lightning attention ----

template <class T>
void lightning_scan_of(const LightningArgs& args, const ScanPiece& piece) {
  const int64_t head = piece.begin, size = args.head_size, inputs = 3 * size;
  for (int64_t begin = piece.token_begin; begin < piece.token_end; begin += kStepTokens) {
    const int64_t end = begin + kStepTokens < piece.token_end ? begin + kStepTokens : piece.token_end;
    for (int64_t token = begin; token < end; ++token) {
      const T* x = static_cast<const T*>(args.x) + token * args.stride + head * inputs;
      each_vector(inputs, [&](int64_t i, int n) __attribute__((always_inline)) {
        store_some(piece.room + (token - begin) * inputs + i, silu(load_some(x + i, n)), n);
      });
    }
    scan_rows<kStateRows>(
        piece, size, size, begin, end,
        [&](auto rows, int64_t token, int64_t p, float* after, const float* before) __attribute__((always_inline)) {
          const float *query = piece.room + (token - begin) * inputs, *key = query + size, *value = key + size;
          step_rows(rows, args.out + (token * args.heads + head) * size + p, after, before, args.decay[head], value + p,
                    key, query, size);
        });
  }
}

void lightning_scan(const LightningArgs& args, const ScanPiece& piece) {
  if (args.dtype == QR_FLOAT32)
    lightning_scan_of<float>(args, piece);
  else if (args.dtype == QR_BFLOAT16)
    lightning_scan_of<Bf16>(args, piece);
  else
    lightning_scan_of<Fp16>(args, piece);
}

// ---- the RG-LRU ----

// 1 - e^x for x <= 0: by the series of e^x where it is near 1, for the difference would lose its digits.
QR_INLINE vf one_minus_exp(vf x) {
  vf p = set1(-1.0f / 5040);
  p = fma(p, x, set1(-1.0f / 720));
  p = fma(p, x, set1(-1.0f / 120));
  p = fma(p, x, set1(-1.0f / 24));
  p = fma(p, x, set1(-1.0f / 6));
  p = fma(p, x, set1(-0.5f));
  p = fma(p, x, set1(-1.0f));
  return where_less(x, set1(-0.35f), sub(set1(1.0f), exp(x)), mul(p, x));
}

// Channels [begin, end) of one block.
template <class T>
void rg_lru_channels(const RgLruArgs& args, const ScanPiece& piece, int64_t begin, int64_t end) {
  const int64_t block = begin / args.block, column = begin % args.block;
  for (int64_t token = piece.token_begin; token < piece.token_end; ++token) {
    const float* before = (token == piece.token_begin ? piece.before : piece.after) + begin - piece.begin;
    float* after = piece.after + begin - piece.begin;
    const bool has_root = !piece.begins || token != piece.token_begin;
    const float* opening = args.gates + (block * args.tokens + token) * 2 * args.block + column;
    const float* keeping = opening + args.block;
    const int64_t at = token * args.channels + begin;
    each_vector(end - begin, [&](int64_t i, int n) __attribute__((always_inline)) {
      const vf logarithm = mul(sigmoid(load_some(keeping + i, n)), load_some(args.decay + begin + i, n));
      vf added = mul(sigmoid(load_some(opening + i, n)), load_some(args.x + at + i, n));
      if (has_root) added = mul(added, sqrt(one_minus_exp(add(logarithm, logarithm))));
      const vf state = fma(load_some(before + i, n), exp(logarithm), added);
      store_some(after + i, state, n);
      const vf gate = load_some(static_cast<const T*>(args.gate) + at + i, n);
      store_some(static_cast<T*>(args.out) + at + i, mul(state, gate), n);
    });
  }
}

template <class T>
void rg_lru_scan_of(const RgLruArgs& args, const ScanPiece& piece) {
  for (int64_t begin = piece.begin, end; begin < piece.end; begin = end) {
    end = (begin / args.block + 1) * args.block;
    if (end > piece.end) end = piece.end;
    rg_lru_channels<T>(args, piece, begin, end);
  }
}

void rg_lru_scan(const RgLruArgs& args, const ScanPiece& piece) {
  if (args.dtype == QR_FLOAT32)
    rg_lru_scan_of<float>(args, piece);
  else if (args.dtype == QR_BFLOAT16)
    rg_lru_scan_of<Bf16>(args, piece);
  else
    rg_lru_scan_of<Fp16>(args, piece);
}

}  // namespace
}  // namespace qr
