// bfloat16 times bfloat16 on ARM: bfmmla takes two rows and two columns 4 k deep, bfdot a single row's pairs. A sum of
// bfmmla is by definition that of two bfdot in order of k, so that a row has the same bits in a pair and alone.
#pragma once

#include "gemm.h"

namespace qr {
namespace {

// x as [rows / 2][K / 4][2 rows][4], K padded with zeros.
struct PairedRows {
  int64_t quads;
  explicit PairedRows(int64_t k) : quads(divide_up(k, 4)) {}
  int64_t at(int64_t row) const { return row / 2 * quads * 8 + row % 2 * 4; }  // its first four; the next are 8 further
};

int64_t paired_rows_bytes(int64_t rows, int64_t k, int32_t) { return divide_up(rows, 2) * PairedRows(k).quads * 16; }

void paired_rows(void* prepared, const void* x, int32_t, int64_t, int64_t k, int64_t begin, int64_t end, const int32_t*) {
  const PairedRows rows(k);
  for (int64_t row = begin; row < end; ++row) {
    const uint16_t* in = static_cast<const uint16_t*>(x) + row * k;
    uint16_t* out = static_cast<uint16_t*>(prepared) + rows.at(row);
    for (int64_t i = 0; i < k / 4; ++i) std::memcpy(out + i * 8, in + i * 4, 8);
    if (k % 4 == 0) continue;
    uint16_t last[4] = {};
    std::memcpy(last, in + k / 4 * 4, size_t(k % 4) * 2);
    std::memcpy(out + k / 4 * 8, last, 8);
  }
}

// Four k of 16 columns: the line of their first pairs and, behind it, that of their second ones.
QR_INLINE const char* quad_of(const char* panel, int64_t quad, int half) {
  return panel + quad / 8 * 2048 + half * 1024 + quad % 8 * 128;
}
QR_INLINE bfloat16x8_t load_bf16(const void* p) { return vld1q_bf16(static_cast<const bfloat16_t*>(p)); }

// P pairs of rows times halves [first, first + Halves) of a panel.
template <int P, int Halves>
void multiply_pairs(const uint16_t* x, const PairedRows& rows, const char* panel, int first, float* sums) {
  float32x4_t acc[P][Halves][8];
  for (auto& pair : acc)
    for (auto& half : pair)
      for (auto& two : half) two = vdupq_n_f32(0.0f);
  for (int64_t quad = 0; quad < rows.quads; ++quad) {
    bfloat16x8_t pairs[P];
    for (int p = 0; p < P; ++p) pairs[p] = load_bf16(x + (p * rows.quads + quad) * 8);
    for (int half = 0; half < Halves; ++half) {
      const char* lines = quad_of(panel, quad, first + half);
      prefetch(lines + kPrefetchBytes);
      prefetch(lines + kPrefetchBytes + 64);
      for (int four = 0; four < 4; ++four) {
        asm volatile("" ::: "memory");  // weights are read when they are due: read ahead, they would crowd out sums
        const auto* at = reinterpret_cast<const uint32_t*>(lines + four * 16);
        const uint32x4_t a = vld1q_u32(at), b = vld1q_u32(at + 16);
        const bfloat16x8_t left = vreinterpretq_bf16_u32(vzip1q_u32(a, b));
        const bfloat16x8_t right = vreinterpretq_bf16_u32(vzip2q_u32(a, b));
        for (int p = 0; p < P; ++p) {
          acc[p][half][2 * four] = vbfmmlaq_f32(acc[p][half][2 * four], pairs[p], left);
          acc[p][half][2 * four + 1] = vbfmmlaq_f32(acc[p][half][2 * four + 1], pairs[p], right);
        }
      }
    }
  }
  for (int p = 0; p < P; ++p)
    for (int half = 0; half < Halves; ++half)
      for (int four = 0; four < 4; ++four) {
        const float64x2_t left = vreinterpretq_f64_f32(acc[p][half][2 * four]);
        const float64x2_t right = vreinterpretq_f64_f32(acc[p][half][2 * four + 1]);
        float* out = sums + 2 * p * kPanel + (first + half) * 16 + four * 4;
        vst1q_f32(out, vreinterpretq_f32_f64(vzip1q_f64(left, right)));
        vst1q_f32(out + kPanel, vreinterpretq_f32_f64(vzip2q_f64(left, right)));
      }
}

// One row times a panel.
void multiply_row(const uint16_t* x, const PairedRows& rows, const char* panel, float* sums) {
  float32x4_t acc[8];
  for (auto& four : acc) four = vdupq_n_f32(0.0f);
  for (int64_t quad = 0; quad < rows.quads; ++quad) {
    const bfloat16x4_t own = vld1_bf16(reinterpret_cast<const bfloat16_t*>(x + quad * 8));
    for (int four = 0; four < 8; ++four) {
      const char* lines = quad_of(panel, quad, four / 4);
      if (four % 4 == 0) prefetch(lines + kPrefetchBytes), prefetch(lines + kPrefetchBytes + 64);
      acc[four] = vbfdotq_lane_f32(acc[four], load_bf16(lines + four % 4 * 16), own, 0);
      acc[four] = vbfdotq_lane_f32(acc[four], load_bf16(lines + four % 4 * 16 + 64), own, 1);
    }
  }
  for (int four = 0; four < 8; ++four) vst1q_f32(sums + four * 4, acc[four]);
}

struct PairedMicro {
  explicit PairedMicro(const GemmArgs&) {}

  template <int P>
  static void by_halves(const uint16_t* x, const PairedRows& rows, const char* panel, float* sums) {
    for (int half = 0; half < 2; ++half) multiply_pairs<P, 1>(x, rows, panel, half, sums);
  }

  void multiply(const GemmArgs& g, int64_t row_begin, int64_t row_end, const char* panel, float* sums) const {
    const PairedRows rows(g.k);
    const auto* x = static_cast<const uint16_t*>(g.x);
    const auto at = [&](int64_t row) { return x + rows.at(row); };
    const auto to = [&](int64_t row) { return sums + (row - row_begin) * kPanel; };
    int64_t row = row_begin;
    for (; row + 6 <= row_end; row += 6) by_halves<3>(at(row), rows, panel, to(row));
    if (row + 4 <= row_end) {
      by_halves<2>(at(row), rows, panel, to(row));
      row += 4;
    }
    if (row + 2 <= row_end) {
      multiply_pairs<1, 2>(at(row), rows, panel, 0, to(row));
      row += 2;
    }
    if (row < row_end) multiply_row(at(row), rows, panel, to(row));
  }
};

Gemm paired_gemm() { return Gemm{paired_rows_bytes, paired_rows, run_gemm<PairedMicro>}; }

}  // namespace
}  // namespace qr
