// Linear layers over int8 and int4 weights; layouts: kernels/gemm_quantized.h.
#include "arguments.h"
#include "gemm.h"

namespace qr {

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
