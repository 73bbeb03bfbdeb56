// Recurrent layers, token by token: causal convolutions, the scans of Mamba and Mamba 2, and a gated norm.
//
// Row invariance: a token's numbers follow from the state before it by one fixed order of operations, and states are
// kept in float32 between tokens as between steps, so that no cut of a sequence leaves a trace.
#pragma once

#include "../../kernels.h"
#include "../norm.h"
#include "../simd.h"

namespace qr {
namespace {

// log(1 + u) for 0 <= u <= 1: twice the inverse hyperbolic tangent of s = u / (2 + u) <= 1/3, by its series. Its
// relative error is a few ulp also where u is small.
QR_INLINE vf log_of_one_plus(vf u) {
  const vf s = div(u, add(set1(2.0f), u)), square = mul(s, s);
  vf p = set1(1.0f / 15);
  p = fma(p, square, set1(1.0f / 13));
  p = fma(p, square, set1(1.0f / 11));
  p = fma(p, square, set1(1.0f / 9));
  p = fma(p, square, set1(1.0f / 7));
  p = fma(p, square, set1(1.0f / 5));
  p = fma(p, square, set1(1.0f / 3));
  p = fma(p, square, set1(1.0f));
  return mul(add(s, s), p);
}

// log(1 + e^x) = max(x, 0) + log(1 + e^-|x|)
QR_INLINE vf softplus(vf x) { return add(max(zero(), x), log_of_one_plus(exp(sub(zero(), abs(x))))); }

QR_INLINE vf silu(vf x) { return mul(x, sigmoid(x)); }

// ---- the causal convolution ----

template <class T>
void causal_conv_of(const ConvArgs& args, const ConvPiece& piece) {
  const int64_t num_past = args.width - 1, tokens = piece.token_end - piece.token_begin;
  const int64_t begin = piece.token_begin * args.stride + piece.channel_begin;
  const T* x = static_cast<const T*>(args.x) + begin;
  const T* factor = args.factor == nullptr ? nullptr : static_cast<const T*>(args.factor) + begin;
  const T* gate = args.gate == nullptr ? nullptr : static_cast<const T*>(args.gate) + begin;
  const float* bias = args.bias == nullptr ? nullptr : args.bias + piece.channel_begin;
  float* out =
      args.out == nullptr ? nullptr : args.out + piece.token_begin * args.channels + piece.channel_begin;
  const int64_t block = piece.channel_begin / args.block, column = piece.channel_begin % args.block;
  T* rounded = args.rounded == nullptr
                   ? nullptr
                   : static_cast<T*>(args.rounded) + (block * args.tokens + piece.token_begin) * args.block + column;
  const int64_t channels = piece.channel_end - piece.channel_begin;

  const auto input_at = [&](int64_t token, int64_t i, int n) __attribute__((always_inline)) {
    if (token < -piece.num_before)
      return load_some(piece.past + (num_past + token + piece.num_before) * kConvChannels + i, n);
    const vf value = load_some(x + token * args.stride + i, n);
    return factor == nullptr ? value : mul(value, load_some(factor + token * args.stride + i, n));
  };
  for (int64_t token = 0; token < tokens; ++token)
    each_vector(channels, [&](int64_t i, int n) __attribute__((always_inline)) {
      vf value = bias == nullptr ? zero() : load_some(bias + i, n);
      for (int64_t column = 0; column <= num_past; ++column)
        value = fma(input_at(token - num_past + column, i, n), load(piece.weight + column * kConvChannels + i), value);
      if (args.silu) value = silu(value);
      if (gate != nullptr) value = mul(value, load_some(gate + token * args.stride + i, n));
      if (out != nullptr) store_some(out + token * args.channels + i, value, n);
      if (rounded != nullptr) store_some(rounded + token * args.block + i, value, n);
    });
  for (int64_t past = 0; piece.last != nullptr && past < num_past; ++past)
    each_vector(channels, [&](int64_t i, int n) __attribute__((always_inline)) {
      store_some(piece.last + past * kConvChannels + i, input_at(tokens - num_past + past, i, n), n);
    });
}

void causal_conv(const ConvArgs& args, const ConvPiece& piece) {
  if (args.dtype == QR_FLOAT32)
    causal_conv_of<float>(args, piece);
  else if (args.dtype == QR_BFLOAT16)
    causal_conv_of<Bf16>(args, piece);
  else
    causal_conv_of<Fp16>(args, piece);
}

// ---- what a Mamba layer derives from its input ----

template <class T>
void mamba_derived_rows(const DerivedArgs& args, int64_t row_begin, int64_t row_end) {
  const int64_t sizes[] = {args.rank, args.state_size, args.state_size};
  for (int64_t row = row_begin; row < row_end; ++row) {
    float* part = args.derived + row * (args.rank + 2 * args.state_size);
    const float* time = part;
    for (int i = 0; args.is_normed && i < 3; part += sizes[i++]) {
      const float squares = row_sum(sizes[i], [&](int64_t at, int n) __attribute__((always_inline)) {
        const vf value = load_some(part + at, n);
        return mul(value, value);
      });
      const vf factor = set1(inverse_root(squares / float(sizes[i]) + args.eps));
      each_vector(sizes[i], [&](int64_t at, int n) __attribute__((always_inline)) {
        vf value = mul(load_some(part + at, n), factor);
        if (args.norms[i] != nullptr) value = mul(value, load_some(args.norms[i] + at, n));
        store_some(part + at, value, n);
      });
    }
    T* out = static_cast<T*>(args.time) + row * args.rank;
    each_vector(args.rank, [&](int64_t at, int n) __attribute__((always_inline)) {
      store_some(out + at, load_some(time + at, n), n);
    });
  }
}

void mamba_derived(const DerivedArgs& args, int64_t begin, int64_t end) {
  if (args.dtype == QR_FLOAT32)
    mamba_derived_rows<float>(args, begin, end);
  else if (args.dtype == QR_BFLOAT16)
    mamba_derived_rows<Bf16>(args, begin, end);
  else
    mamba_derived_rows<Fp16>(args, begin, end);
}

// ---- Mamba: each number of a state decays by itself ----

// One channel and token: h = h * exp(time * decay) + added * write; gives h . read.
QR_INLINE float step_channel(float* after, const float* before, const float* decay, float time, float added,
                             const float* write, const float* read, int64_t size) {
  const vf all_time = set1(time), all_added = set1(added);
  vf total = zero();
  each_vector(size, [&](int64_t i, int n) __attribute__((always_inline)) {
    const vf kept = mul(load_some(before + i, n), exp(mul(all_time, load_some(decay + i, n))));
    const vf state = fma(all_added, load_some(write + i, n), kept);
    store_some(after + i, state, n);
    total = fma(state, load_some(read + i, n), total);
  });
  return sum(total);
}

template <class T>
void mamba_scan_of(const MambaArgs& args, const ScanPiece& piece) {
  const int64_t size = args.state_size, count = piece.end - piece.begin;
  alignas(64) float time[kScanChannels], added[kScanChannels], y[kScanChannels];
  const float* before = piece.before;
  for (int64_t token = piece.token_begin; token < piece.token_end; ++token, before = piece.after) {
    const int64_t at = token * args.channels + piece.begin;
    const float* x = args.x + at;
    each_vector(count, [&](int64_t i, int n) __attribute__((always_inline)) {
      const vf step = softplus(load_some(args.time + at + i, n));
      store(time + i, step);
      store(added + i, mul(step, load_some(x + i, n)));
    });
    const float* write = args.write + token * args.derived_stride;
    const float* read = args.read + token * args.derived_stride;
    for (int64_t c = 0; c < count; ++c)
      y[c] = step_channel(piece.after + c * size, before + c * size, args.decay + (piece.begin + c) * size, time[c],
                          added[c], write, read, size);
    const T* gate = static_cast<const T*>(args.gate) + token * args.gate_stride + piece.begin;
    each_vector(count, [&](int64_t i, int n) __attribute__((always_inline)) {
      const vf value = fma(load_some(x + i, n), load_some(args.skip + piece.begin + i, n), load(y + i));
      store_some(static_cast<T*>(args.out) + at + i, mul(value, silu(load_some(gate + i, n))), n);
    });
  }
}

void mamba_scan(const MambaArgs& args, const ScanPiece& piece) {
  if (args.dtype == QR_FLOAT32)
    mamba_scan_of<float>(args, piece);
  else if (args.dtype == QR_BFLOAT16)
    mamba_scan_of<Bf16>(args, piece);
  else
    mamba_scan_of<Fp16>(args, piece);
}

// ---- Mamba 2: a head's state decays as one ----

// Of kStepTokens tokens, whose writing and reading vectors stay in L1 beside some rows of a state.
struct HeadSteps {
  alignas(64) float time[kStepTokens], decay[kStepTokens];
};

// The numbers of one head, and zeros behind the last; rows `stride` apart.
template <class T>
void numbers_of_head(float* numbers, const T* from, int64_t stride, int64_t count) {
  for (int64_t i = 0; i < kStepTokens; ++i) numbers[i] = i < count ? to_float(from[i * stride]) : 0.0f;
}

void numbers_of_head(float* numbers, const void* from, int32_t dtype, int64_t first, int64_t stride, int64_t count) {
  if (dtype == QR_FLOAT32)
    numbers_of_head(numbers, static_cast<const float*>(from) + first, stride, count);
  else if (dtype == QR_BFLOAT16)
    numbers_of_head(numbers, static_cast<const Bf16*>(from) + first, stride, count);
  else
    numbers_of_head(numbers, static_cast<const Fp16*>(from) + first, stride, count);
}

// softplus(time + bias), and exp of it times a head's decay.
QR_INLINE void time_steps(HeadSteps& steps, float bias, float decay) {
  for (int64_t i = 0; i < kStepTokens; i += W) {
    const vf step = softplus(add(load(steps.time + i), set1(bias)));
    store(steps.time + i, step);
    store(steps.decay + i, exp(mul(step, set1(decay))));
  }
}

// How many rows of a head's state a step changes at once, and whether it writes them past the caches.
template <int kCount, bool kIsPast = false>
struct StateRows {
  static constexpr int count = kCount;
  static void put(float* to, vf state, int n) {
    if (kIsPast)
      store_past(to, state);
    else
      store_some(to, state, n);
  }
};

// Run step(StateRows, token, row, after, before) on `rows` rows of `size` numbers for tokens [begin, end), in any order
// that takes a row through its tokens one by one. Rows at once are chains of sums that do not wait for each other. What comes
// from memory is read row by row, in one stream; a state that no further token reads is written past the caches.
template <int kRows, class Step>
QR_INLINE void scan_rows(const ScanPiece& piece, int64_t rows, int64_t size, int64_t begin, int64_t end,
                         const Step& step) {
  const bool is_one_token = piece.token_end - piece.token_begin == 1;
  if (is_one_token && size % W == 0 && reinterpret_cast<uintptr_t>(piece.after) % 64 == 0) {
    for (int64_t row = 0; row < rows; ++row)
      step(StateRows<1, true>(), begin, row, piece.after + row * size, piece.before + row * size);
    settle_stores();
    return;
  }
  int64_t next = 0;
  for (int64_t first = 0; first < rows; first = next) {
    const bool is_whole = first + kRows <= rows;
    next = first + (is_whole ? kRows : 1);
    float* after = piece.after + first * size;
    int64_t token = begin;
    if (token == piece.token_begin) {
      for (int64_t row = first; row < next; ++row)
        step(StateRows<1>(), token, row, piece.after + row * size, piece.before + row * size);
      ++token;
    }
    for (; token < end; ++token)
      if (is_whole)
        step(StateRows<kRows>(), token, first, after, after);
      else
        step(StateRows<1>(), token, first, after, after);
  }
}

// So many rows of a head's state and one token: h = h * decay + added * write; gives h . read of each row.
template <class R>
QR_INLINE void step_rows(R, float* y, float* after, const float* before, float decay, const float* added,
                         const float* write, const float* read, int64_t size) {
  const vf kept = set1(decay);
  vf totals[R::count], all_added[R::count];
  for (int row = 0; row < R::count; ++row) totals[row] = zero(), all_added[row] = set1(added[row]);
  each_vector(size, [&](int64_t i, int n) __attribute__((always_inline)) {
    const vf writing = load_some(write + i, n), reading = load_some(read + i, n);
    for (int row = 0; row < R::count; ++row) {
      const vf state = fma(all_added[row], writing, mul(load_some(before + row * size + i, n), kept));
      R::put(after + row * size + i, state, n);
      totals[row] = fma(state, reading, totals[row]);
    }
  });
  for (int row = 0; row < R::count; ++row) y[row] = sum(totals[row]);
}

constexpr int kStateRows = 4;

void mamba2_scan(const Mamba2Args& args, const ScanPiece& piece) {
  const int64_t head = piece.begin, size = args.state_size, inner = args.heads * args.head_size;
  const int64_t vectors = inner + head / (args.heads / args.groups) * size;
  HeadSteps steps;
  for (int64_t begin = piece.token_begin; begin < piece.token_end; begin += kStepTokens) {
    const int64_t end = begin + kStepTokens < piece.token_end ? begin + kStepTokens : piece.token_end;
    numbers_of_head(steps.time, args.time, args.dtype, begin * args.time_stride + head, args.time_stride, end - begin);
    time_steps(steps, args.time_bias[head], args.decay[head]);
    scan_rows<kStateRows>(
        piece, args.head_size, size, begin, end,
        [&](auto rows, int64_t token, int64_t p, float* after, const float* before) __attribute__((always_inline)) {
          float* all = args.x + token * args.stride;
          float *x = all + head * args.head_size + p, *write = all + vectors;
          float added[rows.count], y[rows.count];
          for (int i = 0; i < rows.count; ++i) added[i] = x[i] * steps.time[token - begin];
          step_rows(rows, y, after, before, steps.decay[token - begin], added, write, write + args.groups * size, size);
          for (int i = 0; i < rows.count; ++i) x[i] = y[i] + x[i] * args.skip[head];
        });
  }
}

// ---- the norm behind a scan ----

template <class T>
void gated_norm_rows(const GatedNormArgs& args, int64_t row_begin, int64_t row_end) {
  const int64_t n = args.cols;
  for (int64_t row = row_begin; row < row_end; ++row) {
    const int64_t token = row / args.groups, column = row % args.groups * n;
    float* x = args.x + token * args.x_stride + column;
    const T* gate = static_cast<const T*>(args.gate) + token * args.gate_stride + column;
    T* out = static_cast<T*>(args.out) + row * n;
    const auto opened = [&](vf value, int64_t i, int count) __attribute__((always_inline)) {
      const vf z = load_some(gate + i, count);
      return mul(value, args.by_sigmoid ? sigmoid(z) : silu(z));
    };
    const auto gated = [&](int64_t i, int count) __attribute__((always_inline)) {
      return opened(load_some(x + i, count), i, count);
    };
    if (args.weight == nullptr) {
      each_vector(n, [&](int64_t i, int count) __attribute__((always_inline)) {
        store_some(out + i, gated(i, count), count);
      });
      continue;
    }
    const float* weight = args.weight + (args.shares_weight ? 0 : column);
    if (!args.norms_before_gate)
      each_vector(n, [&](int64_t i, int count) __attribute__((always_inline)) {
        store_some(x + i, gated(i, count), count);
      });
    const float squares = row_sum(n, [&](int64_t i, int count) __attribute__((always_inline)) {
      const vf value = load_some(x + i, count);
      return mul(value, value);
    });
    const vf factor = set1(inverse_root(squares / float(n) + args.eps));
    each_vector(n, [&](int64_t i, int count) __attribute__((always_inline)) {
      vf value = mul(mul(load_some(x + i, count), factor), load_some(weight + i, count));
      if (args.norms_before_gate) value = opened(value, i, count);
      store_some(out + i, value, count);
    });
  }
}

void gated_norm(const GatedNormArgs& args, int64_t begin, int64_t end) {
  if (args.dtype == QR_FLOAT32)
    gated_norm_rows<float>(args, begin, end);
  else if (args.dtype == QR_BFLOAT16)
    gated_norm_rows<Bf16>(args, begin, end);
  else
    gated_norm_rows<Fp16>(args, begin, end);
}

}  // namespace
}  // namespace qr
