// Products with float8_e4m3fn weights. x is not quantised; a group of weights becomes bf16, exactly, and is multiplied
// as bf16 panels are. Sums of a group are float32, and so are its scales and the sum over groups, in order of k.
//
//   float8  [K/32][2 halves of 16 columns][8 lines of 4 k][4 quarters of 4 columns][k 0 and 1 of each, k 2 and 3 of each]
#pragma once

#include "../float8.h"
#include "../gemm/gemm.h"

namespace qr {
namespace {

constexpr int64_t kFloat8Line = 64, kFloat8Step = 1024;  // bytes of 4 k of a half, and of 32 k of a panel
constexpr int64_t kFloat8Bytes = kFloat8Group * kPanel;  // of a group of a panel

// Steps of 32 k of a panel as bf16 tiles; what is read some groups later is fetched.
QR_INLINE void widen_float8_steps(char* out, const char* packed, int64_t steps) {
  for (int64_t line = 0; line < steps * kFloat8Step; line += kFloat8Line) {
    prefetch(packed + line + kFloat8Bytes);
    for (int64_t at = 0; at < kFloat8Line; at += int64_t(sizeof(Bytes))) {
      Bytes first, second;
      widen_float8(load_bytes_of(packed + line + at), first, second);
      store_bytes(out + 2 * line + at, first);
      store_bytes(out + 2 * line + kFloat8Line + at, second);
    }
  }
}

// sums = before + products * scales, before being 0 where it is null. scales: of 32 columns, or null for ones.
QR_INLINE void add_scaled(int64_t rows, const float* products, const float* scales, const float* before, float* sums) {
  vf scale[kVectors];
  for (int v = 0; v < kVectors; ++v) scale[v] = scales == nullptr ? set1(1.0f) : load(scales + v * W);
  for (int64_t i = 0; i < rows * kPanel; i += kPanel)
    for (int v = 0; v < kVectors; ++v)
      store(sums + i + v * W,
            fma(load(products + i + v * W), scale[v], before == nullptr ? zero() : load(before + i + v * W)));
}

// Math::multiply(g, row_begin, row_end, packed, group, products) multiplies a group of a panel.
template <class Math>
struct Float8Micro {
  explicit Float8Micro(const GemmArgs&) {}
  void multiply(const GemmArgs& g, int64_t row_begin, int64_t row_end, const char* packed, float* sums) const {
    const int64_t panel = (packed - static_cast<const char*>(g.packed)) / g.panel_bytes, rows = row_end - row_begin;
    const int64_t groups = divide_up(g.k, kFloat8Group);
    const float* scales = static_cast<const float*>(g.scales) + panel * (g.group == 0 ? 1 : groups) * kPanel;
    alignas(64) float products[kBlockRows * kPanel];
    for (int64_t group = 0; group < groups; ++group, packed += kFloat8Bytes) {
      Math::multiply(g, row_begin, row_end, packed, group, products);
      add_scaled(rows, products, g.group == 0 ? nullptr : scales + group * kPanel, group == 0 ? nullptr : sums, sums);
    }
    if (g.group == 0) add_scaled(rows, sums, scales, nullptr, sums);
  }
};

// ---- float activations, as [K / kStretch][rows][kStretch] ----

static_assert(kFloat8Group == kStretch, "a group is a stretch");

struct Float8Floats {
  static void multiply(const GemmArgs& g, int64_t row_begin, int64_t row_end, const char* packed, int64_t group,
                       float* sums) {
    const int64_t begin = group * kStretch, steps = begin + kStretch < g.k ? kStretch : g.k - begin;
    const float* x = static_cast<const float*>(g.x) + begin * g.rows + row_begin * kStretch;
    alignas(64) char tiles[2 * kFloat8Bytes];
    alignas(64) float weights[(kStretch + 1) * kPanel];
    widen_float8_steps(tiles, packed, divide_up(steps, kDepth));
    const int64_t rows = row_end - row_begin;
    if (rows <= kDirectRows && steps == kStretch)
      return RowTail<PairedPanel, kDirectRows>::run(rows, x, kStretch, tiles, sums);
    widen_panel(weights, tiles, 0, steps);
    multiply_stretch(x, rows, steps, weights, packed, true, sums);
  }
};

int64_t float8_rows_bytes(int64_t rows, int64_t k, int32_t) { return stretched_floats(rows, k) * 4; }

Gemm float8_gemm() { return Gemm{float8_rows_bytes, stretch_rows, run_gemm<Float8Micro<Float8Floats>>}; }

}  // namespace
}  // namespace qr
