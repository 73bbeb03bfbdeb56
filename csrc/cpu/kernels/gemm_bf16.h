// bfloat16 times bfloat16 by vdpbf16ps: a pair of products per lane and instruction, summed in float32.
#pragma once

#include "gemm.h"

namespace qr {
namespace {

// x as it is when rows hold whole pairs; otherwise each row is padded with one zero.
int64_t bf16_rows_bytes(int64_t rows, int64_t k, int32_t) { return k % 2 == 0 ? 0 : rows * (k + 1) * 2; }

void bf16_rows(void* prepared, const void* x, int32_t, int64_t, int64_t k, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    auto* out = static_cast<uint16_t*>(prepared) + row * (k + 1);
    std::memcpy(out, static_cast<const uint16_t*>(x) + row * k, size_t(k) * 2);
    out[k] = 0;
  }
}

QR_INLINE __m512bh as_bf16(__m512i v) { return reinterpret_cast<__m512bh>(v); }

struct Bf16Panel {
  // x: pairs of bf16, `pairs` in a row
  template <int R>
  QR_INLINE void block(const int32_t* x, int64_t pairs, const char* panel, float* sums) {
    __m512 acc[R][2];
    for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = _mm512_setzero_ps();
    auto step = [&](const char* w, int64_t i) __attribute__((always_inline)) {
      prefetch(w + kPrefetchBytes);
      prefetch(w + 1024 + kPrefetchBytes);
      const __m512bh w0 = as_bf16(_mm512_loadu_si512(w)), w1 = as_bf16(_mm512_loadu_si512(w + 1024));
      for (int r = 0; r < R; ++r) {
        const __m512bh value = as_bf16(_mm512_set1_epi32(x[r * pairs + i]));
        acc[r][0] = _mm512_dpbf16_ps(acc[r][0], w0, value);
        acc[r][1] = _mm512_dpbf16_ps(acc[r][1], w1, value);
      }
    };
    int64_t i = 0;
    for (; i + 16 <= pairs; i += 16)
      for (int j = 0; j < 16; ++j) step(panel + i * 128 + j * 64, i + j);
    for (int j = 0; i + j < pairs; ++j) step(panel + i * 128 + j * 64, i + j);
    for (int r = 0; r < R; ++r) {
      _mm512_storeu_ps(sums + r * kPanel, acc[r][0]);
      _mm512_storeu_ps(sums + r * kPanel + 16, acc[r][1]);
    }
  }
};

template <int R>
QR_INLINE void bf16_tail(int64_t rows, const int32_t* x, int64_t pairs, const char* panel, float* sums) {
  if constexpr (R > 0) {
    if (rows == R)
      Bf16Panel::block<R>(x, pairs, panel, sums);
    else
      bf16_tail<R - 1>(rows, x, pairs, panel, sums);
  }
}

struct Bf16Micro {
  explicit Bf16Micro(const GemmArgs&) {}
  void multiply(const GemmArgs& g, int64_t row_begin, int64_t row_end, const char* panel, float* sums) const {
    const int64_t pairs = (g.k + 1) / 2;
    const int32_t* x = static_cast<const int32_t*>(g.x);
    int64_t row = row_begin;
    for (; row + 12 <= row_end; row += 12)
      Bf16Panel::block<12>(x + row * pairs, pairs, panel, sums + (row - row_begin) * kPanel);
    bf16_tail<11>(row_end - row, x + row * pairs, pairs, panel, sums + (row - row_begin) * kPanel);
  }
};

Gemm bf16_gemm() { return Gemm{bf16_rows_bytes, bf16_rows, run_gemm<Bf16Micro>}; }

}  // namespace
}  // namespace qr
