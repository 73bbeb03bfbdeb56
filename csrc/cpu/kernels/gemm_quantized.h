// Products with int8 and int4 weights. Activations are quantised too, each group of k in a row by its largest
// magnitude; products are summed as integers within a group, exactly, and over groups in float32 in order of k. So
// every instruction set and every number of rows give the same sums, and nothing is widened on the way from memory.
//
//   int8  [K/64][2 halves of 16 columns][16 rows of 4 k][16 columns][4]: AMX tiles
//   int4  [K/64][2 halves][8 rows of 8 k][16 columns][4]: k 0..3 of a row in the low nibbles, k 4..7 in the high ones,
//         in two's complement; shifted into the upper half of a byte, a nibble is 16 times its value
#pragma once

#include "gemm.h"

namespace qr {
namespace {

constexpr int64_t kQuantizedDepth = 64;

// A line that is read now: fetch those that follow, soon ones to L1 and later ones to L2, so that memory stays busy
// while sums are scaled.
constexpr int64_t kFarBytes = 6144;
QR_INLINE void prefetch_stream(const char* p) {
  prefetch(p + kPrefetchBytes);
  prefetch_to_l2(p + kFarBytes);
}

// ---- activations ----

struct RowGroup {
  float scale, sum;  // sum of the integers
};

// x prepared: a RowGroup for each row and group, then integers [rows / height][K / 64][height][64].
template <int Group>
struct QuantizedRows {
  int64_t groups, steps, height;
  RowGroup* row_groups;
  int8_t* values;

  QuantizedRows(const void* prepared, int64_t rows, int64_t k)
      : groups(divide_up(k, Group)), steps(divide_up(k, kQuantizedDepth)), height(rows < 16 ? rows : 16),
        row_groups(static_cast<RowGroup*>(const_cast<void*>(prepared))),
        values(reinterpret_cast<int8_t*>(row_groups) + values_at(rows, k)) {}

  int64_t step_bytes() const { return height * kQuantizedDepth; }
  int8_t* line(int64_t row, int64_t step) const {
    return values + (row / height * steps + step) * step_bytes() + row % height * kQuantizedDepth;
  }

  static int64_t values_at(int64_t rows, int64_t k) {
    return round_up(rows * divide_up(k, Group) * int64_t(sizeof(RowGroup)), 64);
  }
  static int64_t bytes(int64_t rows, int64_t k, int32_t) {
    return values_at(rows, k) + round_up(rows, 16) * round_up(k, kQuantizedDepth);
  }
};

#if !defined(__ARM_NEON)
QR_INLINE void store_int8(int8_t* out, vf v) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(v)));
#else
  const __m256i words = _mm256_cvtps_epi32(v);
  const __m128i half = _mm_packs_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm_packs_epi16(half, half));
#endif
}
#endif

template <class Format, class T>
void quantize_row(const QuantizedRows<Format::kGroup>& out, const T* x, int64_t row, int64_t k) {
  for (int64_t group = 0; group < out.groups; ++group) {
    const int64_t begin = group * Format::kGroup, end = begin + Format::kGroup < k ? begin + Format::kGroup : k;
    vf top = zero(), invalid = zero();
    each_vector(end - begin, [&](int64_t i, int n) __attribute__((always_inline)) {
      const vf value = load_some(x + begin + i, n);
      top = max(abs(value), top);
      invalid = fma(value, zero(), invalid);  // NaN once there is an infinity or a NaN
    });
    const float magnitude = largest(top);
    const vf inverse = set1(magnitude > 1e-30f ? 127.0f / magnitude : 0.0f);
    vf total = zero();
    const int64_t stop = begin + Format::kGroup < out.steps * 64 ? begin + Format::kGroup : out.steps * 64;
    for (int64_t i = begin; i < stop; i += W) {
      const int64_t left = end - i;
      const vf value = left >= W ? load(x + i) : left > 0 ? load(x + i, int(left)) : zero();
      const vf rounded = round(mul(value, inverse));
      total = add(total, rounded);
      store_int8(out.line(row, i / 64) + i % 64, rounded);
    }
    out.row_groups[row * out.groups + group] = {magnitude / 127.0f * Format::kUnit + sum(invalid), sum(total)};
  }
}

template <class Format>
void quantize_rows(void* prepared, const void* x, int32_t x_dtype, int64_t rows, int64_t k, int64_t begin,
                   int64_t end) {
  const QuantizedRows<Format::kGroup> out(prepared, rows, k);
  for (int64_t row = begin; row < end; ++row) {
    if (x_dtype == QR_FLOAT32)
      quantize_row<Format>(out, static_cast<const float*>(x) + row * k, row, k);
    else if (x_dtype == QR_BFLOAT16)
      quantize_row<Format>(out, static_cast<const Bf16*>(x) + row * k, row, k);
    else
      quantize_row<Format>(out, static_cast<const Fp16*>(x) + row * k, row, k);
  }
}

// ---- integers ----

#if defined(__AVX512F__)
using vi = __m512i;
QR_INLINE vi none() { return _mm512_setzero_si512(); }
QR_INLINE vi load_bytes(const char* p) { return _mm512_loadu_si512(p); }
QR_INLINE vi four_bytes(const int8_t* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  return _mm512_set1_epi32(four);
}
QR_INLINE vi flip(vi v, int byte) { return _mm512_xor_si512(v, _mm512_set1_epi8(int8_t(byte))); }
QR_INLINE vi upper_nibbles(vi v) { return _mm512_and_si512(v, _mm512_set1_epi8(int8_t(0xf0))); }
QR_INLINE vi lower_nibbles(vi v) { return upper_nibbles(_mm512_slli_epi16(v, 4)); }
QR_INLINE vi add(vi a, vi b) { return _mm512_add_epi32(a, b); }
QR_INLINE vf floats(vi v) { return _mm512_cvtepi32_ps(v); }
#elif defined(__AVX2__)
using vi = __m256i;
QR_INLINE vi none() { return _mm256_setzero_si256(); }
QR_INLINE vi load_bytes(const char* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
QR_INLINE vi four_bytes(const int8_t* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  return _mm256_set1_epi32(four);
}
QR_INLINE vi flip(vi v, int byte) { return _mm256_xor_si256(v, _mm256_set1_epi8(int8_t(byte))); }
QR_INLINE vi add(vi a, vi b) { return _mm256_add_epi32(a, b); }
QR_INLINE vf floats(vi v) { return _mm256_cvtepi32_ps(v); }
#endif

// ---- weights ----

// One scale for a column. Activations keep groups, which hold what an outlier among them costs.
struct Int8 {
  static constexpr int kGroup = 128;
  static constexpr bool kGrouped = false;
  static constexpr int64_t kHalfBytes = 1024;  // 64 k of 16 columns
  static constexpr float kUnit = 1.0f;         // value of an integer 1
#if defined(__AVX512F__)
  // Unsigned (128 more) integers of k 8 row .. 8 row + 7 of one half.
  QR_INLINE void row(const char* half, int row, vi& first, vi& second) {
    first = flip(load_bytes(half + row * 128), 0x80);
    second = flip(load_bytes(half + row * 128 + 64), 0x80);
  }
#endif
};

// A scale, and optionally a zero point, for each Group of k in a column.
template <int Group>
struct Int4 {
  static constexpr int kGroup = Group;
  static constexpr bool kGrouped = true;
  static constexpr int64_t kHalfBytes = 512;
  static constexpr float kUnit = 1.0f / 16;
#if defined(__AVX512F__)
  QR_INLINE void row(const char* half, int row, vi& first, vi& second) {
    const vi both = flip(load_bytes(half + row * 64), 0x88);
    first = lower_nibbles(both);
    second = upper_nibbles(both);
  }
#endif
};

// What turns the integer sums of one group of a panel into floats.
template <class Format>
struct GroupScales {
  vf scale[kVectors], correction[kVectors];
  bool corrected;

  QR_INLINE GroupScales of(const GemmArgs& g, int64_t panel, int64_t groups, int64_t group) {
    GroupScales out;
    out.corrected = Format::kGrouped && g.corrections != nullptr;
    if (!Format::kGrouped) return out;
    const int64_t at = (panel * groups + group) * kPanel;
    const Fp16* scales = static_cast<const Fp16*>(g.scales) + at;
    prefetch(scales + 8 * kPanel);
    for (int v = 0; v < kVectors; ++v) {
      out.scale[v] = load(scales + v * W);
      if (!out.corrected) continue;
      alignas(64) float values[W];
      for (int i = 0; i < W; ++i) values[i] = float(g.corrections[at + v * W + i]) / Format::kUnit;
      out.correction[v] = load(values);
    }
    return out;
  }

  // total + integers * scales; all but the last operation are exact or, for the scale, one rounding
  __attribute__((always_inline)) vf add(vf total, vf integers, RowGroup x, int v) const {
    if (Format::kGrouped) {
      if (corrected) integers = fma(correction[v], set1(x.sum), integers);
      integers = mul(integers, scale[v]);
    }
    return fma(integers, set1(x.scale), total);
  }
};

// ---- products ----

template <class Format>
QR_INLINE void scale_columns(const GemmArgs& g, int64_t panel, int64_t rows, float* sums) {
  if (Format::kGrouped) return;
  const float* scales = static_cast<const float*>(g.scales) + panel * kPanel;
  for (int64_t row = 0; row < rows; ++row)
    for (int v = 0; v < kVectors; ++v)
      store(sums + row * kPanel + v * W, mul(load(sums + row * kPanel + v * W), load(scales + v * W)));
}

// Rows [row_begin, row_end) of x times a panel, without the scales of columns.
template <class Format>
void multiply_panel(const GemmArgs& g, const QuantizedRows<Format::kGroup>& x, int64_t row_begin, int64_t row_end,
                    int64_t panel, float* sums);

template <class Format>
struct QuantizedMicro {
  QuantizedRows<Format::kGroup> x;

  explicit QuantizedMicro(const GemmArgs& g) : x(g.x, g.rows, g.k) {}

  int64_t panel_of(const GemmArgs& g, const char* packed) const {
    return (packed - static_cast<const char*>(g.packed)) / g.panel_bytes;
  }

  void multiply(const GemmArgs& g, int64_t row_begin, int64_t row_end, const char* packed, float* sums) const {
    const int64_t panel = panel_of(g, packed);
    multiply_panel<Format>(g, x, row_begin, row_end, panel, sums);
    scale_columns<Format>(g, panel, row_end - row_begin, sums);
  }
};

template <class Format>
Gemm quantized_gemm() {
  return Gemm{QuantizedRows<Format::kGroup>::bytes, quantize_rows<Format>, run_gemm<QuantizedMicro<Format>>};
}

void fill_quantized(Kernels& kernels) {
  kernels.gemm_int8 = quantized_gemm<Int8>();
  kernels.gemm_int4[0] = quantized_gemm<Int4<32>>();
  kernels.gemm_int4[1] = quantized_gemm<Int4<64>>();
  kernels.gemm_int4[2] = quantized_gemm<Int4<128>>();
}

}  // namespace
}  // namespace qr

#if defined(__ARM_NEON)
#include "gemm_quantized_neon.h"
#elif defined(__AVX512VNNI__)
#include "gemm_quantized_vnni.h"
#else
#include "gemm_quantized_pairs.h"
#endif
