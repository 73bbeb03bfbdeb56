// int8 weights times int8 activations, quantised for each row on the way in: integer sums, exact in any order, so every
// instruction set gives the same bits. No widening, so weights stream at the speed of memory.
//
//   panel  [K/64][2 halves of 16 columns][16 rows of 4 k][16 columns][4]: AMX tiles; K is padded with zeros
#pragma once

#include "gemm.h"

namespace qr {
namespace {

constexpr int64_t kInt8Depth = 64;

// Prepared x: the rows' scales (float32, to a whole cache line), then their values.
//   tiles: [rows/16][K/64][16][64]; otherwise [rows][K padded to 64]
QR_INLINE int64_t int8_values_at(int64_t rows) { return round_up(rows * 4, 64); }

int64_t int8_rows_bytes(int64_t rows, int64_t k, int32_t) {
  return int8_values_at(rows) + round_up(rows, 32) * round_up(k, kInt8Depth);
}

template <class T>
void quantize_row(const T* x, int64_t k, float* scale, int8_t* out, int64_t depth_stride) {
  vf largest = zero();
  each_vector(k, [&](int64_t i, int n) __attribute__((always_inline)) {
    largest = max(abs(load_some(x + i, n)), largest);
  });
  const float top = qr::largest(largest);
  *scale = top / 127.0f;
  const vf inverse = set1(top > 0.0f ? 127.0f / top : 0.0f);
  alignas(64) float values[kInt8Depth];
  for (int64_t begin = 0; begin < k; begin += kInt8Depth, out += depth_stride) {
    const int64_t count = k - begin < kInt8Depth ? k - begin : kInt8Depth;
    for (int64_t i = 0; i < kInt8Depth; i += W) store(values + i, zero());
    each_vector(count, [&](int64_t i, int n) __attribute__((always_inline)) {
      store_some(values + i, round(mul(load_some(x + begin + i, n), inverse)), n);
    });
    for (int64_t i = 0; i < kInt8Depth; ++i) out[i] = int8_t(values[i]);
  }
}

template <bool Tiles>
void int8_rows(void* prepared, const void* x, int32_t x_dtype, int64_t rows, int64_t k, int64_t begin, int64_t end) {
  const int64_t padded = round_up(k, kInt8Depth);
  auto* scales = static_cast<float*>(prepared);
  auto* values = static_cast<int8_t*>(prepared) + int8_values_at(rows);
  for (int64_t row = begin; row < end; ++row) {
    int8_t* out = Tiles ? values + row / 16 * 16 * padded + row % 16 * 64 : values + row * padded;
    const int64_t stride = Tiles ? 1024 : kInt8Depth;
    if (x_dtype == QR_FLOAT32)
      quantize_row(static_cast<const float*>(x) + row * k, k, scales + row, out, stride);
    else if (x_dtype == QR_BFLOAT16)
      quantize_row(static_cast<const Bf16*>(x) + row * k, k, scales + row, out, stride);
    else
      quantize_row(static_cast<const Fp16*>(x) + row * k, k, scales + row, out, stride);
  }
}

// Integer sums of 32 rows at a time become floats, then output. Micro::multiply fills sums[rows][32].
template <class Micro>
void run_int8(const GemmArgs& g, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end) {
  alignas(64) int32_t sums[32 * kPanel];
  alignas(64) float scaled[2][32 * kPanel];
  const Micro micro(g);
  const auto* x_scales = static_cast<const float*>(g.x);
  auto product = [&](int64_t row, int64_t rows, int64_t panel, float* out) {
    const char* weight = static_cast<const char*>(g.packed) + panel * g.panel_bytes;
    micro.multiply(g, row, rows, weight, sums);
    const float* scales = static_cast<const float*>(g.scales) + panel * kPanel;
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < kPanel; ++c)
        out[r * kPanel + c] = float(sums[r * kPanel + c]) * (x_scales[row + r] * scales[c]);
  };
  for (int64_t panel = panel_begin; panel < panel_end; ++panel)
    for (int64_t row = row_begin; row < row_end; row += 32) {
      const int64_t end = row + 32 < row_end ? row + 32 : row_end;
      product(row, end - row, panel, scaled[0]);
      if (g.up_panels != 0) product(row, end - row, panel + g.up_panels, scaled[1]);
      finish(g, row, end, panel, scaled[0], scaled[1]);
    }
}

// 16-bit products of sign-extended bytes, added in pairs to 32 bits: every instruction set has them.
struct MaddMicro {
#if defined(__AVX512F__)
  using vi = __m512i;
  QR_INLINE vi bytes(const char* p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  QR_INLINE vi quad(int64_t x) { return _mm512_set1_epi64(x); }
  QR_INLINE vi madd(vi acc, vi a, vi b) { return _mm512_add_epi32(acc, _mm512_madd_epi16(a, b)); }
  QR_INLINE vi none() { return _mm512_setzero_si512(); }
#else
  using vi = __m256i;
  QR_INLINE vi bytes(const char* p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  QR_INLINE vi quad(int64_t x) { return _mm256_set1_epi64x(x); }
  QR_INLINE vi madd(vi acc, vi a, vi b) { return _mm256_add_epi32(acc, _mm256_madd_epi16(a, b)); }
  QR_INLINE vi none() { return _mm256_setzero_si256(); }
#endif
  static constexpr int kColumns = W / 2;  // in a vector: two sums for each

  explicit MaddMicro(const GemmArgs&) {}

  // Four bytes as four words.
  QR_INLINE int64_t words(const int8_t* p) {
    int32_t four;
    std::memcpy(&four, p, 4);
    return _mm_cvtsi128_si64(_mm_cvtepi8_epi16(_mm_cvtsi32_si128(four)));
  }

  void multiply(const GemmArgs& g, int64_t row_begin, int64_t rows, const char* panel, int32_t* sums) const {
    const int64_t padded = round_up(g.k, kInt8Depth);
    const auto* x = static_cast<const int8_t*>(g.x) + int8_values_at(g.rows) + row_begin * padded;
    for (int64_t row = 0; row < rows; ++row)
      for (int column = 0; column < kPanel; column += 2 * kColumns) {
        vi acc[2] = {none(), none()};
        for (int64_t i = 0; i < padded; i += 4) {
          const char* w = panel + i / 64 * 2048 + column / 16 * 1024 + i % 64 / 4 * 64 + column % 16 * 4;
          const vi value = quad(words(x + row * padded + i));
          prefetch(w + kPrefetchBytes);
          acc[0] = madd(acc[0], bytes(w), value);
          acc[1] = madd(acc[1], bytes(w + kColumns * 4), value);
        }
        alignas(64) int32_t lanes[4 * kColumns];
        std::memcpy(lanes, acc, sizeof(acc));
        for (int c = 0; c < 2 * kColumns; ++c) sums[row * kPanel + column + c] = lanes[2 * c] + lanes[2 * c + 1];
      }
  }
};

}  // namespace
}  // namespace qr
