// Linear layers over int8 and int4 weights; layouts: kernels/gemm_quantized.h.
#include <cstring>

#include "arguments.h"
#include "gemm.h"

namespace qr {
namespace {

int64_t quantized_panel_bytes(int32_t format, int64_t k) {
  return round_up(k, 64) * kPanel / (format == QR_INT8 ? 1 : 2);
}

// One row into its column of a panel, 8 k at a time.
void pack_quantized_row(char* panel, int32_t format, int64_t column, int64_t k, const int8_t* row) {
  for (int64_t i = 0; i < k; i += 8) {
    int8_t eight[8] = {};
    std::memcpy(eight, row + i, size_t(k - i < 8 ? k - i : 8));
    const int64_t half = i / 64 * 2 + column / 16, line = i % 64 / 8, at = column % 16 * 4;
    if (format == QR_INT8) {
      char* out = panel + half * 1024 + line * 128 + at;
      std::memcpy(out, eight, 4);
      std::memcpy(out + 64, eight + 4, 4);
    } else {
      uint8_t nibbles[4];
      for (int j = 0; j < 4; ++j) nibbles[j] = uint8_t((((eight[j] & 15) | (eight[j + 4] & 15) << 4)) ^ 0x88);
      std::memcpy(panel + half * 512 + line * 64 + at, nibbles, 4);
    }
  }
}

}  // namespace

Weight quantized_weight(const void* packed, int32_t format, int64_t group, const void* scales,
                        const int8_t* corrections, int64_t k) {
  const Kernels* table = kernels();
  Weight weight{};
  weight.gemm = format == QR_INT8 ? &table->gemm_int8 : &table->gemm_int4[group / 64];
  weight.args.packed = packed;
  weight.args.panel_bytes = quantized_panel_bytes(format, k);
  weight.args.scales = scales;
  weight.args.corrections = corrections;
  return weight;
}

}  // namespace qr

using namespace qr;

extern "C" {

int64_t qr_quantized_bytes(int32_t format, int64_t out_features, int64_t in_features) {
  if (!is_format(format) || !is_weight(out_features, in_features)) return QR_EINVAL;
  return divide_up(out_features, kPanel) * quantized_panel_bytes(format, in_features);
}

int32_t qr_pack_quantized(void* packed, int32_t format, int64_t out_features, int64_t in_features, const int8_t* src,
                          int64_t num_rows, int64_t src_stride, int64_t row_offset) {
  if (!is_format(format) || !is_weight(out_features, in_features) ||
      !is_part(out_features, in_features, num_rows, src_stride, row_offset) || !are_there(packed, src) ||
      !is_aligned(packed))
    return QR_EINVAL;
  const int64_t bytes = quantized_panel_bytes(format, in_features);
  for_each_panel(row_offset, num_rows, [&](int64_t panel, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      pack_quantized_row(static_cast<char*>(packed) + panel * bytes, format, row - panel * kPanel, in_features,
                         src + (row - row_offset) * src_stride);
  });
  return QR_OK;
}

int32_t qr_linear_quantized(void* out, int32_t out_dtype, const void* x, int32_t x_dtype, const void* packed,
                            int32_t format, int64_t group, const void* scales, const int8_t* corrections, int64_t rows,
                            int64_t n, int64_t k, const float* bias, int32_t activation, const void* residual) {
  if (kernels() == nullptr) return QR_ESTATE;
  if (!is_product(out, x, packed, rows, n, k) || scales == nullptr || !is_output(out_dtype, n) || !is_dtype(x_dtype) ||
      !is_group(format, group) || !is_activation(activation))
    return QR_EINVAL;
  return linear(quantized_weight(packed, format, group, scales, corrections, k), out, out_dtype, x, x_dtype, rows, n, k,
                bias, activation, residual);
}

int32_t qr_gated_linear_quantized(void* out, const void* x, int32_t x_dtype, const void* packed, int32_t format,
                                  int64_t group, const void* scales, const int8_t* corrections, int64_t rows,
                                  int64_t f, int64_t k, const float* bias, int32_t activation) {
  if (kernels() == nullptr) return QR_ESTATE;
  if (!are_sizes(2, f) || !is_product(out, x, packed, rows, 2 * f, k) || scales == nullptr || !is_dtype(x_dtype) ||
      !is_group(format, group) || !is_activation(activation))
    return QR_EINVAL;
  return gated_linear(quantized_weight(packed, format, group, scales, corrections, k), out, x_dtype, x, x_dtype, rows,
                      f, k, bias, activation);
}
}
