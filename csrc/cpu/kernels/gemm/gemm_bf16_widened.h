// bfloat16 times bfloat16 by products of floats, with the bits of vdpbf16ps, for processors that need two cycles for that
// one and half of one for sixteen products and sums of floats: Intel's with AMX, where the tiles are not to be had.
//
// vdpbf16ps adds the product of the second numbers of a pair, then that of the first ones, rounds each sum once, and takes
// denormal numbers for zeros (Intel's manual of instructions, VDPBF16PS). Few rows of weights that are taken apart first
// are left to it, for memory bounds them.
#pragma once

#include "bf16_pairs.h"
#include "gemm_bf16_compact.h"

namespace qr {
namespace {

// In its scope denormal numbers are zeros, as operands and as results. What is computed there is read from memory, and
// written there.
class NoDenormals {
 public:
  NoDenormals() : before(_mm_getcsr()) {
    _mm_setcsr(before | 0x8040);  // denormals are zeros; flush to zero
    memory_order();
  }
  ~NoDenormals() {
    memory_order();
    _mm_setcsr(before);
  }
  NoDenormals(const NoDenormals&) = delete;
  NoDenormals& operator=(const NoDenormals&) = delete;

 private:
  static void memory_order() { asm volatile("" ::: "memory"); }
  const unsigned before;
};

// A bf16 as a float.
struct WideBf16 {
  float value;
};
QR_INLINE void store(WideBf16* p, vf v) {
  const __m512i wide = _mm512_cvtepu16_epi32(bf16_of(v));
  _mm512_storeu_si512(p, _mm512_slli_epi32(wide, 16));
}

// The second product of a pair, then the first one; see PairedProducts.
struct WidenedPairs {
  static constexpr int kTerms = 2, kRows = 16;
  using Number = WideBf16;
  using Scope = NoDenormals;
  QR_INLINE void take(Number* pair, const Bf16* in) {
    for (int i = 0; i < 2; ++i) {
      const uint32_t wide = uint32_t(in[i].bits) << 16;
      std::memcpy(&pair[i].value, &wide, 4);
    }
  }
  QR_INLINE vf load(const Bf16* line, int term) {
    const char* at = reinterpret_cast<const char*>(line);
    return term == 0 ? high_half(at) : low_half(at);
  }
  QR_INLINE vf same(const Number* pair, int term) { return set1(pair[1 - term].value); }
  QR_INLINE vf add(vf sums, vf a, vf b) { return fma(a, b, sums); }
};

// A row's inputs [begin, begin + steps) as floats, each pair swapped; zero beyond the row.
QR_INLINE void widen_swapped(float* out, const Bf16* x, int64_t steps) {
  each_vector(steps, [&](int64_t i, int n) __attribute__((always_inline)) {
    store_some(out + i, _mm512_permute_ps(load_some(x + i, n), 0xb1), (n + 1) / 2 * 2);
  });
}

// x as [K / kStretch][rows][kStretch]; of up to kFew rows as vdpbf16ps takes it.
template <int64_t kFew, int64_t kPairedStretch>
struct WidenedRows {
  static int64_t bytes(int64_t rows, int64_t k, int32_t dtype) {
    return rows > kFew ? stretched_floats(rows, k) * 4 : bf16_rows_bytes(rows, k, dtype);
  }
  static void prepare(void* prepared, const void* x, int32_t dtype, int64_t rows, int64_t k, int64_t begin, int64_t end,
                      const int32_t* order) {
    if (rows <= kFew) return bf16_rows<kPairedStretch>(prepared, x, dtype, rows, k, begin, end, order);
    auto* out = static_cast<float*>(prepared);
    for (int64_t first = 0; first < k; first += kStretch) {
      const int64_t steps = first + kStretch < k ? kStretch : k - first;
      for (int64_t row = begin; row < end; ++row)
        widen_swapped(out + first * rows + row * kStretch, static_cast<const Bf16*>(x) + row * k + first, steps);
    }
  }
};

// What stretches of a panel are widened from, in ascending order; they tell where the next one lies.
struct PlainStretches {
  const char *panel, *next;
  PlainStretches(const GemmArgs&, const char* panel, const char* next) : panel(panel), next(next) {}
  const char* widen(float* out, int64_t begin, int64_t end, int64_t k) {
    widen_panel<true>(out, panel, begin, end);
    return end < k ? panel + end * kPanel * 2 : next;
  }
};
class CompactStretches {
 public:
  CompactStretches(const GemmArgs& g, const char* panel, const char* next)
      : places(CompactPlaces::of(panel, g.k)), panel(panel), next(next), expander(panel, g.k) {}
  const char* widen(float* out, int64_t begin, int64_t end, int64_t k) {
    alignas(64) char tiles[kExpandedStep];
    int64_t step = begin / kDepth;
    for (int64_t at = begin; at < end; at += kDepth, ++step, out += kDepth * kPanel) {
      expander.expand(step, tiles);
      widen_panel<true>(out, tiles, 0, end - at < kDepth ? end - at : kDepth);
    }
    return end < k ? panel + places.begin + step * places.step : next;
  }

 private:
  CompactPlaces places;
  const char *panel, *next;
  Expander expander;
};

template <class Stretches>
struct WidenedMicro {
  static constexpr bool kExpands = true;
  explicit WidenedMicro(const GemmArgs&) {}
  void multiply(const GemmArgs& g, int64_t row_begin, int64_t row_end, const char* panel, const char* next,
                float* sums) const {
    const NoDenormals scope;
    const float* x = static_cast<const float*>(g.x);
    alignas(64) float weights[kStretch * kPanel];
    Stretches stretches(g, panel, next);
    for (int64_t begin = 0; begin < g.k; begin += kStretch) {
      const int64_t end = begin + kStretch < g.k ? begin + kStretch : g.k;
      const char* ahead = stretches.widen(weights, begin, end, g.k);
      multiply_stretch(x + begin * g.rows + row_begin * kStretch, row_end - row_begin, 2 * pairs_of(end - begin), weights,
                       ahead, begin == 0, sums);
    }
  }
};

struct WidenedCompactMicro {
  static constexpr bool kExpands = true;
  explicit WidenedCompactMicro(const GemmArgs& g) : few(g), many(g) {}
  void multiply(const GemmArgs& g, int64_t row_begin, int64_t row_end, const char* panel, const char* next,
                float* sums) const {
    if (g.rows <= kStreamedRows)
      few.multiply(g, row_begin, row_end, panel, next, sums);
    else
      many.multiply(g, row_begin, row_end, panel, next, sums);
  }

 private:
  CompactMicro few;
  WidenedMicro<CompactStretches> many;
};

Gemm widened_gemm() {
  using Rows = WidenedRows<0, 0>;
  return Gemm{Rows::bytes, Rows::prepare, run_streamed<WidenedMicro<PlainStretches>>};
}

Gemm widened_compact_gemm() {
  using Rows = WidenedRows<kStreamedRows, kCompactStretch>;
  return Gemm{Rows::bytes, Rows::prepare, run_streamed<WidenedCompactMicro>};
}

}  // namespace
}  // namespace qr
