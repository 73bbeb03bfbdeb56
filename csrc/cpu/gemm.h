// What linear layers over dense weights (gemm.cpp) and over quantised ones (gemm_quantized.cpp) share.
#pragma once

#include "kernels.h"
#include "threads.h"

namespace qr {

struct Weight {
  const Gemm* gemm;
  GemmArgs args;  // what is known of the weight
};

inline bool is_dtype(int32_t dtype) { return dtype >= QR_FLOAT32 && dtype <= QR_FLOAT16; }
// Whether a layer of n outputs may write this dtype.
inline bool is_output(int32_t out_dtype, int64_t n) {
  return is_dtype(element_of(out_dtype)) && is_output_of(out_dtype, element_of(out_dtype), n);
}
// Whether x may be of this dtype.
inline bool takes(const Weight& weight, int32_t x_dtype, int64_t rows, int64_t k) {
  return is_dtype(x_dtype) ||
         (x_dtype == QR_BFLOAT16_TILES && weight.gemm->reads_tiles && rows > 32 && k % kDepth == 0);
}
inline bool is_activation(int32_t activation) { return activation >= QR_NONE && activation <= QR_RELU; }

// See qr_linear and qr_gated_linear.
int32_t linear(const Weight& weight, void* out, int32_t out_dtype, const void* x, int32_t x_dtype, int64_t rows,
               int64_t n, int64_t k, const float* bias, int32_t activation, const void* residual);
int32_t gated_linear(const Weight& weight, void* out, int32_t out_dtype, const void* x, int32_t x_dtype, int64_t rows,
                     int64_t f, int64_t k, const float* bias, int32_t activation);

// Call body(panel, begin, end) for each panel and the rows of a part that fall on it.
template <class Body>
void for_each_panel(int64_t row_offset, int64_t num_rows, const Body& body) {
  const int64_t first = row_offset / kPanel, last = divide_up(row_offset + num_rows, kPanel);
  parallel_for(last - first, [&](int64_t index) {
    const int64_t panel = first + index;
    int64_t begin = panel * kPanel, end = begin + kPanel;
    if (begin < row_offset) begin = row_offset;
    if (end > row_offset + num_rows) end = row_offset + num_rows;
    body(panel, begin, end);
  });
}

}  // namespace qr
