// Linear layers over quantised weights, and over several weights side by side; layouts: kernels/quantized/gemm_quantized.h,
// kernels/quantized/gemm_float8.h.
#include "../arguments.h"
#include "gemm.h"

#include <algorithm>

namespace qr {
namespace {

// 16, 32, 64, 128 as 0, 1, 2, 3.
int64_t index_of_group(int64_t group) { return group == 128 ? 3 : group / 32; }

// kNumNested where there is none.
NestedKind nested_kind(const qr_weight& w) {
  struct Known {
    int64_t format, group, nested;
  };
  constexpr Known known[kNumNested] = {{QR_INT6, 16, 1}, {QR_INT5, 32, 2}, {QR_INT4, 32, 2},
                                       {QR_INT3, 16, 1}, {QR_INT2, 16, 2}, {QR_LEVELS, 32, 1}};
  const auto* found = std::find_if(known, known + kNumNested, [&](const Known& kind) {
    return kind.format == w.format && kind.group == w.group && kind.nested == w.nested;
  });
  return NestedKind(found - known);
}

const Gemm* gemm_of(const qr_weight& w, int32_t x_dtype) {
  const Kernels* table = kernels();
  if (w.nested != 0) return &table->gemm_nested[nested_kind(w)];
  if (w.format == QR_FLOAT8) return x_dtype == QR_BFLOAT16 ? &table->gemm_float8 : &table->gemm_float8_float;
  if (w.group == 0) return w.format == QR_INT2 ? &table->gemm_int2 : &table->gemm_int8;
  if (w.format == QR_INT2) return table->gemm_int2_groups + index_of_group(w.group) - 1;
  if (w.format == QR_INT3) return table->gemm_int3 + index_of_group(w.group) - 1;
  const Gemm* groups = w.format == QR_INT8   ? table->gemm_int8_groups
                       : w.format == QR_INT6 ? table->gemm_int6
                       : w.format == QR_INT5 ? table->gemm_int5
                       : w.format == QR_INT4 ? table->gemm_int4
                                             : table->gemm_levels;
  return groups + index_of_group(w.group);
}

bool is_order(const int32_t* order, int64_t k) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < k; ++i) largest = std::max(largest, uint32_t(order[i]));
  return int64_t(largest) < k;
}

// Whether the weights side by side give n outputs.
bool are_weights(const qr_weight* weights, int64_t count, int64_t n, int64_t k) {
  if (weights == nullptr || count < 1 || count > kMostWeights) return false;
  int64_t total = 0;
  for (int64_t i = 0; i < count; total += weights[i++].outputs)
    if (weights[i].outputs > n || !is_weight_of(weights[i], weights[i].outputs, k)) return false;
  return total == n;
}

// All that is computed of x, each weight's outputs beside those of the one before.
int32_t linear(const qr_weight* weights, int64_t count, void* out, int32_t out_dtype, const void* x, int32_t x_dtype,
               int64_t rows, int64_t n, int64_t k, const float* bias, int32_t activation, const void* residual) {
  if (count == 1)
    return linear(weight_of(weights[0], x_dtype, k), out, out_dtype, x, x_dtype, rows, n, k, bias, activation,
                  residual);
  Product products[kMostWeights];
  int64_t first = 0;
  for (int64_t i = 0; i < count; first += weights[i++].outputs) {
    const Weight weight = weight_of(weights[i], x_dtype, k);
    GemmArgs args = weight.args;
    args.x = x;
    args.rows = rows;
    args.n = weights[i].outputs;
    args.bias = bias == nullptr ? nullptr : bias + first;
    args.activation = activation;
    args.residual = residual == nullptr ? nullptr : static_cast<const char*>(residual) + first * bytes_of(x_dtype);
    args.residual_dtype = x_dtype;
    args.out = static_cast<char*>(out) + first * bytes_of(out_dtype);
    args.out_dtype = out_dtype;
    args.out_columns = n;
    products[i] = {weight.gemm, args, 0, 0};
  }
  return prepare_and_run(products, count, x_dtype);
}

// The largest output of each row: first of each panel of each weight, then of all panels, which lie side by side.
int32_t linear_max(float* values, int64_t* ids, const void* x, int32_t x_dtype, const qr_weight* weights, int64_t count,
                   int64_t rows, int64_t k, const float* bias, float soft_cap) {
  Product products[kMostWeights];
  int64_t panels = 0, outputs = 0, first_panel[kMostWeights], first_output[kMostWeights];
  for (int64_t i = 0; i < count; outputs += weights[i].outputs, panels += divide_up(weights[i++].outputs, kPanel)) {
    first_panel[i] = panels;
    first_output[i] = outputs;
  }
  const int64_t stride = (divide_up(panels, 64) | 1) * 64;  // no power of two: rows do not fall on one set of a cache
  auto* maxima = static_cast<float*>(scratch(2, rows * stride * 5 + 1));
  if (maxima == nullptr) return QR_ENOMEM;
  auto* columns = reinterpret_cast<uint8_t*>(maxima + rows * stride);
  for (int64_t i = 0; i < count; ++i) {
    const Weight weight = weight_of(weights[i], x_dtype, k);
    GemmArgs args = weight.args;
    args.x = x;
    args.rows = rows;
    args.n = weights[i].outputs;
    args.bias = bias == nullptr ? nullptr : bias + first_output[i];
    args.maxima = {maxima + first_panel[i], columns + first_panel[i], stride, soft_cap};
    products[i] = {weight.gemm, args, 0, 0};
  }
  const int32_t status = prepare_and_run(products, count, x_dtype);
  if (status != QR_OK) return status;
  parallel_for(rows, [&](int64_t row) {
    const Largest found = kernels()->find_largest(maxima + row * stride, panels);
    const int64_t own = std::upper_bound(first_panel, first_panel + count, found.index) - first_panel - 1;
    values[row] = found.value;
    ids[row] = first_output[own] + (found.index - first_panel[own]) * kPanel + columns[row * stride + found.index];
  });
  return QR_OK;
}

}  // namespace

Weight quantized_weight(const qr_weight& w, int32_t x_dtype, int64_t k) {
  Weight weight{};
  weight.gemm = gemm_of(w, x_dtype);
  weight.args.packed = w.packed;
  weight.args.panel_bytes = quantized_panel_bytes(int32_t(w.format), k);
  weight.args.scales = w.scales;
  weight.args.zero_points = w.zero_points;
  weight.args.offsets = w.offsets;
  weight.args.levels = w.levels;
  weight.args.order = w.order;
  weight.args.unit = float(w.unit);
  weight.args.group = w.group;
  return weight;
}

bool is_quantized_weight(const qr_weight& w, int64_t k) {
  const bool has_floats = w.group == 0 || w.format == QR_FLOAT8;
  if (w.format < QR_INT8 || w.format > QR_INT3 || !is_group(int32_t(w.format), w.group) || w.scales == nullptr)
    return false;
  if (w.nested == 0 && must_be_nested(int32_t(w.format), w.group)) return false;
  if (has_floats && (w.zero_points != nullptr || w.offsets != nullptr || w.unit != 1.0)) return false;
  if (w.zero_points != nullptr && w.offsets != nullptr) return false;
  if (w.nested != 0 && (nested_kind(w) == kNumNested || k % kNestedBlock != 0)) return false;
  if (w.nested != 0 && (w.zero_points != nullptr || w.offsets != nullptr)) return false;
  if (!is_finite(float(w.unit)) || !(float(w.unit) > 0) || (w.format == QR_LEVELS && w.levels == nullptr)) return false;
  return w.order == nullptr || (w.format != QR_FLOAT8 && is_order(w.order, k));
}

}  // namespace qr

using namespace qr;

extern "C" {

int32_t qr_linear_quantized(void* out, int32_t out_dtype, const void* x, int32_t x_dtype, const qr_weight* weights,
                            int64_t count, int64_t rows, int64_t n, int64_t k, const float* bias, int32_t activation,
                            const void* residual) {
  if (kernels() == nullptr) return QR_ESTATE;
  if (!are_products(out, x, rows, n, k) || !are_weights(weights, count, n, k) || !is_output(out_dtype, n) ||
      (count > 1 && out_dtype == QR_BFLOAT16_TILES) || !is_dtype(x_dtype) || !is_activation(activation))
    return QR_EINVAL;
  return linear(weights, count, out, out_dtype, x, x_dtype, rows, n, k, bias, activation, residual);
}

int32_t qr_gated_linear_quantized(void* out, const void* x, int32_t x_dtype, const qr_weight* weights, int64_t count,
                                  int64_t rows, int64_t f, int64_t k, const float* bias, int32_t activation) {
  if (kernels() == nullptr) return QR_ESTATE;
  if (!are_sizes(2, f) || !are_products(out, x, rows, 2 * f, k) || !are_weights(weights, count, 2 * f, k) ||
      !is_dtype(x_dtype) || !is_activation(activation))
    return QR_EINVAL;
  if (count == 1)
    return gated_linear(weight_of(weights[0], x_dtype, k), out, x_dtype, x, x_dtype, rows, f, k, bias, activation);
  return gated_in_two_steps(out, x_dtype, rows, f, activation, [&](float* both) {
    return linear(weights, count, both, QR_FLOAT32, x, x_dtype, rows, 2 * f, k, bias, QR_NONE, nullptr);
  });
}

int32_t qr_linear_max(float* values, int64_t* ids, const void* x, int32_t x_dtype, const qr_weight* weights,
                      int64_t count, int64_t rows, int64_t n, int64_t k, const float* bias, float soft_cap) {
  if (kernels() == nullptr) return QR_ESTATE;
  if (!are_products(values, x, rows, n, k) || (rows > 0 && ids == nullptr) || !are_weights(weights, count, n, k) ||
      !is_dtype(x_dtype) || !(soft_cap >= 0 && is_finite(soft_cap)))
    return QR_EINVAL;
  return linear_max(values, ids, x, x_dtype, weights, count, rows, k, bias, soft_cap);
}
}
