// Quantised weights as they are stored: numbers to integers with scales, and integers to panels.
#include "../arguments.h"
#include "gemm.h"
#include "panels.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

namespace qr {
namespace {

// One row into its column of a panel, 4 k at a time; false where there is NaN. See kernels/quantized/gemm_float8.h.
bool pack_float8_row(char* panel, int64_t column, int64_t k, const int8_t* row) {
  char* begin = panel + column / 16 * 512 + column % 16 / 4 * 16 + column % 4 * 2;
  bool has_nan = false;
  for (int64_t i = 0; i < k; i += 4) {
    int8_t four[4] = {};
    std::memcpy(four, row + i, size_t(k - i < 4 ? k - i : 4));
    for (int8_t byte : four) has_nan |= (byte & 0x7f) == 0x7f;
    char* out = begin + i / 32 * 1024 + i % 32 / 4 * 64;
    std::memcpy(out, four, 2);
    std::memcpy(out + 8, four + 2, 2);
  }
  return !has_nan;
}

bool pack_float8_rows(char* panel, int64_t column, int64_t count, int64_t k, const int8_t* rows, int64_t stride) {
  bool fits = true;
  for (int64_t row = 0; row < count; ++row) fits &= pack_float8_row(panel, column + row, k, rows + row * stride);
  return fits;
}

// Rows into the columns from `column` on; false where a value is not one of the format's.
bool pack_rows(char* panel, int32_t format, int64_t column, int64_t count, int64_t k, const int8_t* rows,
               int64_t stride) {
  const PackRow pack = pack_row_of(format);
  uint64_t outside = 0;
  for (int64_t begin = 0; begin < k; begin += kPackedAtATime) {
    const int64_t values = std::min(kPackedAtATime, k - begin);
    for (int64_t row = 0; row < count; ++row)
      outside |= pack(panel, column + row, begin, values, rows + row * stride + begin);
  }
  return outside == 0;
}

}  // namespace
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
  std::atomic<int32_t> status{QR_OK};
  for_each_panel(row_offset, num_rows, [&](int64_t panel, int64_t begin, int64_t end) {
    char* out = static_cast<char*>(packed) + panel * bytes;
    const int64_t first = begin - panel * kPanel, count = end - begin;
    const int8_t* rows = src + (begin - row_offset) * src_stride;
    const bool fits = format == QR_FLOAT8 ? pack_float8_rows(out, first, count, in_features, rows, src_stride)
                                          : pack_rows(out, format, first, count, in_features, rows, src_stride);
    if (!fits) status.store(QR_EUNSUPPORTED);
  });
  return status.load();
}

int32_t qr_quantize_linear(void* packed, void* scales, int32_t format, int64_t group, int64_t out_features,
                           int64_t in_features, const void* src, int32_t src_dtype, int64_t num_rows,
                           int64_t src_stride, int64_t row_offset) {
  if (kernels() == nullptr) return QR_ESTATE;
  const bool is_right = format == QR_INT8 || (format == QR_INT4 && is_group(format, group));
  if (!is_right || !is_weight(out_features, in_features) || !is_dtype(src_dtype) ||
      !is_part(out_features, in_features, num_rows, src_stride, row_offset) || !are_there(packed, scales, src) ||
      !is_aligned(packed))
    return QR_EINVAL;
  const PackRow pack = pack_row_of(format);
  const auto to_integers = format == QR_INT8 ? kernels()->row_to_int8 : kernels()->row_to_int4;
  const int64_t bytes = quantized_panel_bytes(format, in_features);
  const int64_t scale_bytes = format == QR_INT8 ? 4 : 2, groups = format == QR_INT8 ? 1 : divide_up(in_features, group);
  for_each_panel(row_offset, num_rows, [&](int64_t panel, int64_t begin, int64_t end) {
    std::vector<int8_t> integers(static_cast<size_t>(in_features));
    for (int64_t row = begin; row < end; ++row) {
      const int64_t column = row - panel * kPanel, scale = panel * groups * kPanel + column;
      const char* from = static_cast<const char*>(src) + (row - row_offset) * src_stride * bytes_of(src_dtype);
      char* scale_at = static_cast<char*>(scales) + scale * scale_bytes;
      to_integers({integers.data(), scale_at, group, from, src_dtype, in_features});
      pack(static_cast<char*>(packed) + panel * bytes, column, 0, in_features, integers.data());
    }
  });
  return QR_OK;
}
}
