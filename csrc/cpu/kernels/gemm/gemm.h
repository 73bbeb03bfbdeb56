// Matrix products over packed panels of 32 output features: the parts every instruction set shares, and the float ones.
//
// A panel holds its 32 columns for all of K, in the order in which they are read, so that a small batch streams the
// weight exactly once at the speed of memory:
//   float32, float16   [K][32]
//   bfloat16           [K/32][2 tiles][16 pairs of k][16 columns][2]: AMX tiles, which every other set reads as well
//
// Row invariance: each output element is one chain of products in order of k, whatever the number of rows. Blocking
// along K spills the float32 accumulator and continues with it, which changes no bit.
#pragma once

#include <type_traits>

#include "../../kernels.h"
#include "../../runtime/threads.h"
#include "compact.h"
#include "../sampling.h"
#include "../simd.h"

namespace qr {
namespace {

// ---- activations ----

// erfc by exp(-x^2) * t * P(t), t = 1 / (1 + 0.3275911 x); coefficients fitted over [0, 6], relative error 6e-8.
QR_INLINE vf erfc_positive(vf x) {
  vf t = div(set1(1.0f), fma(set1(0.3275911f), x, set1(1.0f)));
  vf p = set1(-0.143813977f);
  p = fma(p, t, set1(0.50782746f));
  p = fma(p, t, set1(-0.424973449f));
  p = fma(p, t, set1(0.470618609f));
  p = fma(p, t, set1(0.0163871678f));
  p = fma(p, t, set1(0.2085511f));
  p = fma(p, t, set1(0.180326552f));
  p = fma(p, t, set1(0.185076484f));
  return mul(mul(p, t), exp(sub(zero(), mul(x, x))));
}

// kShort: the result is rounded to bf16.
template <bool kShort>
QR_INLINE vf activate(vf x, int32_t activation) {
  const auto sigmoid_of = [](vf v) __attribute__((always_inline)) { return kShort ? short_sigmoid(v) : sigmoid(v); };
  switch (activation) {
    case QR_SILU:
      return mul(x, sigmoid_of(x));
    case QR_GELU: {
      // x * Phi(x); Phi(-|x|) = erfc(|x| / sqrt 2) / 2 keeps its relative accuracy in the tail
      vf tail = mul(set1(0.5f), erfc_positive(mul(abs(x), set1(0.70710678118654752f))));
      return mul(x, where_less(x, zero(), tail, sub(set1(1.0f), tail)));
    }
    case QR_GELU_TANH: {
      // 0.5 * (1 + tanh u) = sigmoid(2u)
      vf u = mul(mul(set1(0.79788456080286536f), x), fma(mul(set1(0.044715f), x), x, set1(1.0f)));
      return mul(x, sigmoid_of(add(u, u)));
    }
    case QR_RELU:
      return max(zero(), x);
    case QR_RELU2:
      return mul(max(zero(), x), max(zero(), x));
    default:
      return x;
  }
}

// ---- epilogue: the float32 sums of one panel become output ----

// Where a panel's sums lie: columns 0-15 of a row, the next row, and columns 16-31. kLines: output may be written past
// the caches, by whole lines; who uses it fences at the end of a piece of work.
struct RowSums {
  static constexpr int64_t kNext = kPanel, kSecond = 16;
  static constexpr bool kLines = false;
};
struct TileSums {
  static constexpr int64_t kNext = 16, kSecond = 256;
  static constexpr bool kLines = true;
};

// kWhole: all columns of the panel exist.
template <class Out, bool kWhole, class Layout>
void finish_rows(const GemmArgs& g, int64_t row_begin, int64_t row_end, int64_t panel, const float* sums,
                 const float* up_sums) {
  const int64_t column = panel * kPanel;
  const int64_t columns = kWhole ? kPanel : g.n - column;
  const float* bias = g.bias == nullptr ? nullptr : g.bias + column;
  const float* up_bias = g.bias == nullptr ? nullptr : g.bias + g.n + column;
  const int64_t all_columns = g.out_columns != 0 ? g.out_columns : g.n;
  const Places places(all_columns, g.out_dtype);
  for (int64_t row = row_begin; row < row_end; ++row, sums += Layout::kNext, up_sums += Layout::kNext) {
    const int64_t at = row * all_columns + column;
    Out* out = static_cast<Out*>(g.out) + places.row(row) + places.column(column);
    const auto value_at = [&](int64_t i, int n) __attribute__((always_inline)) {
      const int64_t in_row = i < 16 ? i : i - 16 + Layout::kSecond;
      vf value = load(sums + in_row);
      if (bias != nullptr) value = add(value, load_some(bias + i, n));
      value = activate<std::is_same<Out, Bf16>::value>(value, g.activation);
      if (g.up_panels != 0) {
        vf up = load(up_sums + in_row);
        if (bias != nullptr) up = add(up, load_some(up_bias + i, n));
        value = mul(value, up);
      }
      if (g.residual != nullptr) {
        vf residual;
        if (g.residual_dtype == QR_FLOAT32)
          residual = load_some(static_cast<const float*>(g.residual) + at + i, n);
        else if (g.residual_dtype == QR_BFLOAT16)
          residual = load_some(static_cast<const Bf16*>(g.residual) + at + i, n);
        else
          residual = load_some(static_cast<const Fp16*>(g.residual) + at + i, n);
        value = add(value, residual);
      }
      return value;
    };
    if constexpr (kWhole && Layout::kLines && sizeof(Out) == 2) {
      if (g.past_caches) {
        store_line(out, value_at(0, W), value_at(W, W));
        continue;
      }
    }
    each_vector(columns, [&](int64_t i, int n)
                             __attribute__((always_inline)) { store_some(out + i, value_at(i, n), n); });
  }
}

template <class Out, class Layout>
void finish_to(const GemmArgs& g, int64_t row_begin, int64_t row_end, int64_t panel, const float* sums,
               const float* up_sums) {
  if ((panel + 1) * kPanel <= g.n)
    finish_rows<Out, true, Layout>(g, row_begin, row_end, panel, sums, up_sums);
  else
    finish_rows<Out, false, Layout>(g, row_begin, row_end, panel, sums, up_sums);
}

constexpr int kVectors = int(kPanel) / W;  // vectors in a row of a panel

// The largest of a row of a whole panel. A vector that has one element not below the largest has no NaN and no tie.
QR_INLINE Largest largest_of_panel(const vf (&values)[kVectors]) {
  vf top = values[0];
  for (int v = 1; v < kVectors; ++v) top = max(top, values[v]);
  const float best = largest(top);
  uint32_t bits = 0;
  for (int v = 0; v < kVectors; ++v) bits |= bits_not_less(values[v], set1(best)) << (v * W);
  if ((bits & (bits - 1)) == 0) return {best, __builtin_ctz(bits)};
  alignas(64) float all[kPanel];
  for (int v = 0; v < kVectors; ++v) store(all + v * W, values[v]);
  return find_largest(all, kPanel);
}

// kWhole: all columns of the panel exist.
template <bool kWhole, class Layout>
void find_maxima(const GemmArgs& g, int64_t row_begin, int64_t row_end, int64_t panel, const float* sums) {
  const int64_t column = panel * kPanel, columns = kWhole ? kPanel : g.n - column;
  const PanelMaxima& maxima = g.maxima;
  for (int64_t row = row_begin; row < row_end; ++row, sums += Layout::kNext) {
    const auto value_at = [&](int64_t i, int n) __attribute__((always_inline)) {
      vf value = load(sums + (i < 16 ? i : i - 16 + Layout::kSecond));
      if (g.bias != nullptr) value = add(value, load_some(g.bias + column + i, n));
      return maxima.soft_cap == 0 ? value : soft_capped(value, maxima.soft_cap);
    };
    Largest found;
    if constexpr (kWhole) {
      vf values[kVectors];
      for (int v = 0; v < kVectors; ++v) values[v] = value_at(v * W, W);
      found = largest_of_panel(values);
    } else {
      alignas(64) float values[kPanel];
      each_vector(columns, [&](int64_t i, int n)
                               __attribute__((always_inline)) { store_some(values + i, value_at(i, n), n); });
      found = find_largest(values, columns);
    }
    maxima.values[row * maxima.stride + panel] = found.value;
    maxima.columns[row * maxima.stride + panel] = uint8_t(found.index);
  }
}

template <class Layout = RowSums>
void finish(const GemmArgs& g, int64_t row_begin, int64_t row_end, int64_t panel, const float* sums,
            const float* up_sums) {
  if (g.maxima.values != nullptr && (panel + 1) * kPanel <= g.n)
    find_maxima<true, Layout>(g, row_begin, row_end, panel, sums);
  else if (g.maxima.values != nullptr)
    find_maxima<false, Layout>(g, row_begin, row_end, panel, sums);
  else if (g.out_dtype == QR_FLOAT32)
    finish_to<float, Layout>(g, row_begin, row_end, panel, sums, up_sums);
  else if (element_of(g.out_dtype) == QR_BFLOAT16)
    finish_to<Bf16, Layout>(g, row_begin, row_end, panel, sums, up_sums);
  else
    finish_to<Fp16, Layout>(g, row_begin, row_end, panel, sums, up_sums);
}

// Limits come first in min and max, so that a NaN stays one.
template <class Out>
void gate_to(Out* out, const float* gate, const float* up, int64_t n, const Gating& gating) {
  const vf limit = set1(gating.limit), least = set1(-gating.limit), slope = set1(gating.slope);
  each_vector(n, [&](int64_t i, int count) __attribute__((always_inline)) {
    vf value = load_some(gate + i, count);
    if (up != nullptr) value = min(limit, value);
    value = div(activate<std::is_same<Out, Bf16>::value>(mul(slope, value), gating.activation), slope);
    if (up != nullptr)
      value = mul(value, add(max(least, min(limit, load_some(up + i, count))), set1(gating.offset)));
    store_some(out + i, value, count);
  });
}

void gate(void* out, int32_t out_dtype, const float* gate, const float* up, int64_t n, const Gating& gating) {
  if (out_dtype == QR_FLOAT32)
    gate_to(static_cast<float*>(out), gate, up, n, gating);
  else if (out_dtype == QR_BFLOAT16)
    gate_to(static_cast<Bf16*>(out), gate, up, n, gating);
  else
    gate_to(static_cast<Fp16*>(out), gate, up, n, gating);
}

// ---- the loop over panels ----

// A panel as the kernels read it: where it is, or expanded.
const char* panel_at(const GemmArgs& g, int64_t panel, char* expanded) {
  const char* packed = static_cast<const char*>(g.packed) + panel * g.panel_bytes;
  if (!g.compact) return packed;
  Expander expander(packed, g.k, 0);
  for (int64_t step = 0; step * kDepth < g.k; ++step) expander.expand(step, expanded + step * kExpandedStep);
  return expanded;
}

// Micro::multiply fills sums[rows][32] for one panel.
template <class Micro>
void run_gemm(const GemmArgs& g, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end) {
  const int64_t rows = round_up(row_end - row_begin, 32);
  auto* sums = static_cast<float*>(scratch(0, 2 * rows * kPanel * 4));
  float* up_sums = sums + rows * kPanel;
  auto* expanded = static_cast<char*>(scratch(4, g.compact ? divide_up(g.k, kDepth) * kExpandedStep : 1));
  if (sums == nullptr || expanded == nullptr) return;
  const Micro micro(g);
  for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
    micro.multiply(g, row_begin, row_end, panel_at(g, panel, expanded), sums);
    if (g.up_panels != 0)
      micro.multiply(g, row_begin, row_end, panel_at(g, panel + g.up_panels, expanded), up_sums);
    finish(g, row_begin, row_end, panel, sums, up_sums);
  }
}

// The same for a Micro that fetches the panel it will be given next while it works on one, and may expand it itself.
template <class Micro>
void run_streamed(const GemmArgs& g, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end) {
  const int64_t rows = row_end - row_begin, halves = g.up_panels != 0 ? 2 : 1;
  auto* sums = static_cast<float*>(scratch(0, 2 * rows * kPanel * 4));
  auto* expanded = static_cast<char*>(scratch(4, g.compact && !Micro::kExpands ? divide_up(g.k, kDepth) * kExpandedStep : 1));
  if (sums == nullptr || expanded == nullptr) return;
  const Micro micro(g);
  const auto at = [&](int64_t panel, int64_t half) {
    return static_cast<const char*>(g.packed) + (panel + half * g.up_panels) * g.panel_bytes;
  };
  for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
    for (int64_t half = 0; half < halves; ++half) {
      const char* next = half + 1 < halves ? at(panel, half + 1) : at(panel + 1, 0);
      const char* own = Micro::kExpands ? at(panel, half) : panel_at(g, panel + half * g.up_panels, expanded);
      micro.multiply(g, row_begin, row_end, own, next, sums + half * rows * kPanel);
    }
    finish(g, row_begin, row_end, panel, sums, sums + rows * kPanel);
  }
}

// ---- float32 activations: x as it is, or converted ----

int64_t float_rows_bytes(int64_t rows, int64_t k, int32_t x_dtype) {
  return x_dtype == QR_FLOAT32 ? 0 : rows * k * 4;
}

template <class T>
void widen(float* out, const T* x, int64_t n) {
  each_vector(n, [&](int64_t i, int count) __attribute__((always_inline)) {
    store_some(out + i, load_some(x + i, count), count);
  });
}

void float_rows(void* prepared, const void* x, int32_t x_dtype, int64_t /*rows*/, int64_t k, int64_t begin,
                int64_t end, const int32_t* = nullptr) {
  float* out = static_cast<float*>(prepared) + begin * k;
  if (x_dtype == QR_BFLOAT16)
    widen(out, static_cast<const Bf16*>(x) + begin * k, (end - begin) * k);
  else
    widen(out, static_cast<const Fp16*>(x) + begin * k, (end - begin) * k);
}

constexpr int kRowBlock = W == 16 ? 12 : 3;        // rows whose accumulators fit the register file
constexpr int64_t kPrefetchBytes = 1024;           // ahead of the stream; 1-2 KiB measure best

// One step of k of R rows. Registers hold all weights and one number of x, or, where there are 16, the reverse.
template <int R, class WeightAt, class XAt>
QR_INLINE void add_products(vf (&acc)[R][kVectors], const WeightAt& weight_at, const XAt& x_at) {
  if constexpr (W == 16) {
    vf weights[kVectors];
    for (int v = 0; v < kVectors; ++v) weights[v] = weight_at(v);
    for (int r = 0; r < R; ++r) {
      const vf value = set1(x_at(r));
      for (int v = 0; v < kVectors; ++v) acc[r][v] = fma(weights[v], value, acc[r][v]);
    }
  } else {
    for (int v = 0; v < kVectors; ++v) {
      const vf weight = weight_at(v);
      for (int r = 0; r < R; ++r) acc[r][v] = fma(weight, set1(x_at(r)), acc[r][v]);
    }
  }
}

// Panels [K][32] of T.
template <class T>
struct FloatPanel {
  template <int R>
  QR_INLINE void block(const float* x, int64_t k, const char* panel, float* sums) {
    vf acc[R][kVectors];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kVectors; ++v) acc[r][v] = zero();
    const T* w = reinterpret_cast<const T*>(panel);
    for (int64_t i = 0; i < k; ++i, w += kPanel) {
      for (size_t line = 0; line < sizeof(T) * kPanel; line += 64)
        prefetch(reinterpret_cast<const char*>(w) + kPrefetchBytes + line);
      add_products<R>(
          acc, [&](int v) __attribute__((always_inline)) { return load(w + v * W); },
          [&](int r) __attribute__((always_inline)) { return x[r * k + i]; });
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kVectors; ++v) store(sums + r * kPanel + v * W, acc[r][v]);
  }
};

// Panels of bfloat16 tiles: a bf16 is the upper half of a float, so even k are shifted up and odd k masked. Read in order
// of address: Zen 4 reads two parts of a page in turn at half the speed of memory (benchmarks/cpu.md).
struct PairedPanel {
  template <int R>
  QR_INLINE void block(const float* x, int64_t k, const char* panel, float* sums) {
    constexpr int kHalf = kVectors / 2;  // vectors in a row of a tile
    vf acc[R][kVectors];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kVectors; ++v) acc[r][v] = zero();
    const auto add = [&](const char* tile, int first, const float* at, int count) __attribute__((always_inline)) {
      for (int i = 0; i < count; i += 2)
        for (int v = 0; v < kHalf; ++v) {
          const vf even = low_half(tile + i * 32 + v * W * 4);
          for (int r = 0; r < R; ++r) acc[r][first + v] = fma(even, set1(at[r * k + i]), acc[r][first + v]);
          if (i + 1 == count) continue;
          const vf odd = high_half(tile + i * 32 + v * W * 4);
          for (int r = 0; r < R; ++r) acc[r][first + v] = fma(odd, set1(at[r * k + i + 1]), acc[r][first + v]);
        }
    };
    for (int64_t i = 0; i < k; i += kDepth, panel += 2 * 1024) {
      const int count = k - i < kDepth ? int(k - i) : int(kDepth);
      add(panel, 0, x + i, count);
      add(panel + 1024, kHalf, x + i, count);
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kVectors; ++v) store(sums + r * kPanel + v * W, acc[r][v]);
  }
};

template <class Panel, int R>
struct RowTail {
  QR_INLINE void run(int64_t rows, const float* x, int64_t k, const char* panel, float* sums) {
    if (rows == R)
      Panel::template block<R>(x, k, panel, sums);
    else
      RowTail<Panel, R - 1>::run(rows, x, k, panel, sums);
  }
};
template <class Panel>
struct RowTail<Panel, 0> {
  QR_INLINE void run(int64_t, const float*, int64_t, const char*, float*) {}
};

template <class Panel>
struct FloatMicro {
  explicit FloatMicro(const GemmArgs&) {}
  void multiply(const GemmArgs& g, int64_t row_begin, int64_t row_end, const char* panel, float* sums) const {
    const float* x = static_cast<const float*>(g.x);
    int64_t row = row_begin;
    for (; row + kRowBlock <= row_end; row += kRowBlock)
      Panel::template block<kRowBlock>(x + row * g.k, g.k, panel, sums + (row - row_begin) * kPanel);
    RowTail<Panel, kRowBlock - 1>::run(row_end - row, x + row * g.k, g.k, panel, sums + (row - row_begin) * kPanel);
  }
};

template <class Panel>
Gemm float_gemm() {
  return Gemm{float_rows_bytes, float_rows, run_gemm<FloatMicro<Panel>>};
}

// ---- rows of bfloat16 weights: of more than a few, a stretch of K of a panel is widened once and stays in L1 ----

constexpr int64_t kStretch = 128;  // steps of k, 16 KiB of floats

// From how many rows on widening a panel by itself pays: on Intel's processors always, to which it comes faster asked for
// ahead, as a stretch is, than left to the hardware.
constexpr int kDirectRows = W == 16 ? 4 : 3;
bool are_many(int64_t rows) { return rows > kDirectRows || core() == Core::kIntel; }

// x as floats; of many rows as [K / kStretch][rows][kStretch], for rows whose distance is a power of two would displace
// each other from the caches. The last stretch may be shorter.
int64_t stretched_floats(int64_t rows, int64_t k) { return rows * round_up(k, kStretch); }

int64_t stretched_rows_bytes(int64_t rows, int64_t k, int32_t x_dtype) {
  return are_many(rows) ? stretched_floats(rows, k) * 4 : float_rows_bytes(rows, k, x_dtype);
}

template <class T>
void stretch_rows(float* out, const T* x, int64_t rows, int64_t k, int64_t begin, int64_t end) {
  for (int64_t first = 0; first < k; first += kStretch) {
    const int64_t steps = first + kStretch < k ? kStretch : k - first;
    for (int64_t row = begin; row < end; ++row)
      widen(out + first * rows + row * kStretch, x + row * k + first, steps);
  }
}

void stretch_rows(void* prepared, const void* x, int32_t x_dtype, int64_t rows, int64_t k, int64_t begin, int64_t end,
                  const int32_t*) {
  auto* out = static_cast<float*>(prepared);
  if (x_dtype == QR_FLOAT32)
    stretch_rows(out, static_cast<const float*>(x), rows, k, begin, end);
  else if (x_dtype == QR_BFLOAT16)
    stretch_rows(out, static_cast<const Bf16*>(x), rows, k, begin, end);
  else
    stretch_rows(out, static_cast<const Fp16*>(x), rows, k, begin, end);
}

void stretched_rows(void* prepared, const void* x, int32_t x_dtype, int64_t rows, int64_t k, int64_t begin,
                    int64_t end, const int32_t*) {
  if (are_many(rows))
    stretch_rows(prepared, x, x_dtype, rows, k, begin, end, nullptr);
  else
    float_rows(prepared, x, x_dtype, rows, k, begin, end);
}

// Steps [begin, end) of k of a panel of bfloat16 tiles; begin is a multiple of kDepth, and one step beyond an odd end is
// written. kSwapped: the second of each pair of steps comes first.
template <bool kSwapped = false>
QR_INLINE void widen_panel(float* out, const char* panel, int64_t begin, int64_t end) {
  for (int64_t depth = begin; depth < end; depth += kDepth, out += kDepth * kPanel)
    for (int64_t column = 0; column < kPanel; column += 16)
      for (int64_t i = 0; i < kDepth && depth + i < end; i += 2)
        for (int64_t v = 0; v < 16; v += W) {
          const char* at = panel + depth * 64 + column * 64 + i * 32 + v * 4;
          store(out + (i + kSwapped) * kPanel + column + v, low_half(at));
          store(out + (i + !kSwapped) * kPanel + column + v, high_half(at));
        }
}

// `steps` of a stretch of R rows; the sums of the stretch before are gone on with. kAhead: with each step what lies
// `stride` further on in `ahead` is fetched.
template <int R, bool kAhead>
QR_INLINE void stretch_block(const float* x, int64_t steps, const float* weights, const char* ahead, int64_t stride,
                             bool is_first, float* sums) {
  vf acc[R][kVectors];
  int64_t distance = kStretch;  // of rows
  if (W == 8) asm("" : "+r"(distance));  // known, it makes gcc 12 read each weight from memory for every row
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v) acc[r][v] = is_first ? zero() : load(sums + r * kPanel + v * W);
  for (int64_t i = 0; i < steps; ++i, weights += kPanel) {
    if (kAhead) prefetch_to_l2(ahead + i * stride);
    add_products<R>(
        acc, [&](int v) __attribute__((always_inline)) { return load(weights + v * W); },
        [&](int r) __attribute__((always_inline)) { return x[r * distance + i]; });
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v) store(sums + r * kPanel + v * W, acc[r][v]);
}

template <int R>
QR_INLINE void stretch_tail(int64_t rows, const float* x, int64_t steps, const float* weights, const char* ahead,
                            int64_t stride, bool is_first, float* sums) {
  if constexpr (R > 0) {
    if (rows != R)
      stretch_tail<R - 1>(rows, x, steps, weights, ahead, stride, is_first, sums);
    else
      stretch_block<R, true>(x, steps, weights, ahead, stride, is_first, sums);
  }
}

// Blocks of rows that share in fetching: enough to keep memory busy while few rows are multiplied.
constexpr int64_t kFetchingBlocks = 4;

// All rows of a stretch of widened weights, in blocks whose sums fill the registers. Meanwhile as many lines of `ahead`
// are fetched as there are steps.
QR_INLINE void multiply_stretch(const float* x, int64_t rows, int64_t steps, const float* weights, const char* ahead,
                                bool is_first, float* sums) {
  const int64_t blocks = divide_up(rows, kRowBlock);
  const int64_t stride = divide_up(64, blocks < kFetchingBlocks ? blocks : kFetchingBlocks);
  for (int64_t block = 0; block + 1 < blocks; ++block, x += kRowBlock * kStretch, sums += kRowBlock * kPanel) {
    if (block < kFetchingBlocks) {
      stretch_block<kRowBlock, true>(x, steps, weights, ahead, stride, is_first, sums);
      ahead += steps * stride;
    } else {
      stretch_block<kRowBlock, false>(x, steps, weights, nullptr, 0, is_first, sums);
    }
  }
  stretch_tail<kRowBlock>(rows - (blocks - 1) * kRowBlock, x, steps, weights, ahead, stride, is_first, sums);
}

struct StretchMicro {
  static constexpr bool kExpands = false;
  explicit StretchMicro(const GemmArgs&) {}
  // next: the panel that follows
  void multiply(const GemmArgs& g, int64_t row_begin, int64_t row_end, const char* panel, const char* next,
                float* sums) const {
    const float* x = static_cast<const float*>(g.x);
    if (!are_many(g.rows))
      return RowTail<PairedPanel, kDirectRows>::run(g.rows, x, g.k, panel, sums);
    alignas(64) float weights[(kStretch + 1) * kPanel];
    for (int64_t begin = 0; begin < g.k; begin += kStretch) {
      const int64_t steps = begin + kStretch < g.k ? kStretch : g.k - begin;
      const char* ahead = begin + kStretch < g.k ? panel + (begin + kStretch) * kPanel * 2 : next;
      widen_panel(weights, panel, begin, begin + steps);
      multiply_stretch(x + begin * g.rows + row_begin * kStretch, row_end - row_begin, steps, weights, ahead, begin == 0,
                       sums);
    }
  }
};

constexpr int64_t kReadAhead = 2048;

// Sum of 64-bit words: reads as fast as one core can.
uint64_t read_sum(const void* data, int64_t bytes) {
  const auto* p = static_cast<const char*>(data);
  constexpr int kEach = int(sizeof(Words));
  Words acc[4] = {};
  for (int64_t i = 0; i < bytes; i += 256) {
    for (int64_t line = 0; line < 256; line += 64) prefetch(p + i + kReadAhead + line);
    for (int j = 0; j < 256 / kEach; ++j) acc[j & 3] = add_words(acc[j & 3], load_words(p + i + j * kEach));
  }
  return sum_words(add_words(add_words(acc[0], acc[1]), add_words(acc[2], acc[3])));
}

}  // namespace
}  // namespace qr
