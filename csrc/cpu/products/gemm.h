// What linear layers over dense weights (gemm.cpp) and over quantised ones (gemm_quantized.cpp, quantize.cpp) share.
#pragma once

#include "../arguments.h"
#include "../kernels.h"
#include "../runtime/threads.h"

namespace qr {

struct Weight {
  const Gemm* gemm;
  GemmArgs args;  // what is known of the weight
};

// One of several products, and where its pieces begin among theirs. A piece is a block of rows and a group of panels.
struct Product {
  const Gemm* gemm;
  GemmArgs args;
  int64_t group, first;  // `run` sets them
};

inline bool is_weight_dtype(int32_t dtype) { return is_dtype(dtype) || dtype == QR_BFLOAT16_COMPACT; }
inline bool is_format(int32_t format) { return format >= QR_INT8 && format <= QR_INT3; }
inline bool is_group(int32_t format, int64_t group) {
  if (group == 0) return format == QR_INT8 || format == QR_INT2 || format == QR_FLOAT8;
  if (format == QR_FLOAT8) return group == kFloat8Group;
  return group == 16 || group == 32 || (format != QR_INT5 && format != QR_INT6 && (group == 64 || group == 128));
}
// Whether such groups have nested scales, and no others.
inline bool must_be_nested(int32_t format, int64_t group) {
  return (format == QR_INT3 || format == QR_INT2) && group == 16;
}
// Whether a layer of n outputs may write this dtype.
inline bool is_output(int32_t out_dtype, int64_t n) {
  return is_dtype(element_of(out_dtype)) && is_output_of(out_dtype, element_of(out_dtype), n);
}
// Whether x may be of this dtype.
inline bool takes(const Weight& weight, int32_t x_dtype, int64_t rows, int64_t k) {
  return is_dtype(x_dtype) ||
         (x_dtype == QR_BFLOAT16_TILES && weight.gemm->reads_tiles && rows > 32 && k % kDepth == 0);
}
// Whether [out_features, in_features] may be a weight, and its part [row_offset, row_offset + num_rows) come from src.
inline bool is_weight(int64_t out_features, int64_t in_features) {
  return out_features > 0 && in_features > 0 && are_sizes(out_features, in_features);
}
inline bool is_part(int64_t out_features, int64_t in_features, int64_t num_rows, int64_t src_stride,
                    int64_t row_offset) {
  return row_offset >= 0 && num_rows >= 0 && num_rows <= out_features && row_offset <= out_features - num_rows &&
         are_sizes(num_rows, src_stride) && (num_rows < 2 || src_stride >= in_features);
}
// Whether there is all that out[rows, n] = x[rows, k] . weight[n, k] needs, but for the weight.
inline bool are_products(const void* out, const void* x, int64_t rows, int64_t n, int64_t k) {
  return is_weight(n, k) && are_sizes(rows, n) && are_sizes(rows, k) && (rows == 0 || are_there(out, x));
}
inline bool is_product(const void* out, const void* x, const void* packed, int64_t rows, int64_t n, int64_t k) {
  return are_products(out, x, rows, n, k) && packed != nullptr && is_aligned(packed);
}
inline bool is_activation(int32_t activation) { return activation >= QR_NONE && activation <= QR_RELU2; }

Weight dense_weight(const void* packed, int32_t dtype, int32_t x_dtype, int64_t k);
// Of a value.
inline int64_t bits_of(int32_t format) {
  switch (format) {
    case QR_INT6: return 6;
    case QR_INT5: return 5;
    case QR_INT4:
    case QR_LEVELS: return 4;
    case QR_INT3: return 3;
    case QR_INT2: return 2;
    default: return 8;
  }
}
inline int64_t quantized_panel_bytes(int32_t format, int64_t k) {
  if (format == QR_FLOAT8) return round_up(k, kDepth) * kPanel;
  return round_up(k, 64) * kPanel / 8 * bits_of(format);
}
Weight quantized_weight(const qr_weight& w, int32_t x_dtype, int64_t k);
bool is_quantized_weight(const qr_weight& w, int64_t k);

// A weight as the structures of the interface name it, and whether [n, k] may be one.
Weight weight_of(const qr_weight& w, int32_t x_dtype, int64_t k);
bool is_weight_of(const qr_weight& w, int64_t n, int64_t k);

// Weights side by side that one x is multiplied with, at most.
constexpr int64_t kMostWeights = 16;

// Compute products whose x is prepared, all pieces of all of them on the pool at once.
void run(Product* products, int64_t count);
// The same, whose x of one dtype is still to be prepared; up to kMostWeights of them.
int32_t prepare_and_run(Product* products, int64_t count, int32_t x_dtype);

// See qr_linear and qr_gated_linear.
int32_t linear(const Weight& weight, void* out, int32_t out_dtype, const void* x, int32_t x_dtype, int64_t rows,
               int64_t n, int64_t k, const float* bias, int32_t activation, const void* residual);
int32_t gated_linear(const Weight& weight, void* out, int32_t out_dtype, const void* x, int32_t x_dtype, int64_t rows,
                     int64_t f, int64_t k, const float* bias, int32_t activation);

// activation(gate) * up, where products(both) fills both[rows, 2 f] with gates and ups first.
template <class Products>
int32_t gated_in_two_steps(void* out, int32_t out_dtype, int64_t rows, int64_t f, int32_t activation,
                           const Products& products) {
  auto* both = static_cast<float*>(scratch(2, rows * 2 * f * 4));
  if (both == nullptr) return QR_ENOMEM;
  const int32_t status = products(both);
  if (status != QR_OK) return status;
  parallel_for(rows, [&](int64_t row) {
    kernels()->gate(static_cast<char*>(out) + row * f * bytes_of(out_dtype), out_dtype, both + row * 2 * f,
                    both + row * 2 * f + f, f, Gating{activation});
  });
  return QR_OK;
}

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
