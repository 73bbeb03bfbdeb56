// Quantised weights as they are stored: numbers to integers with scales, and integers to panels.
#include "arguments.h"
#include "gemm.h"

#include <cstring>
#include <vector>

namespace qr {
namespace {

// One row into its column of a panel, 8 k at a time.
void pack_row(char* panel, int32_t format, int64_t column, int64_t k, const int8_t* row) {
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
      pack_row(static_cast<char*>(packed) + panel * bytes, format, row - panel * kPanel, in_features,
               src + (row - row_offset) * src_stride);
  });
  return QR_OK;
}

int32_t qr_quantize_linear(void* packed, void* scales, int32_t format, int64_t group, int64_t out_features,
                           int64_t in_features, const void* src, int32_t src_dtype, int64_t num_rows,
                           int64_t src_stride, int64_t row_offset) {
  if (kernels() == nullptr) return QR_ESTATE;
  if (!is_group(format, group) || !is_weight(out_features, in_features) || !is_dtype(src_dtype) ||
      !is_part(out_features, in_features, num_rows, src_stride, row_offset) || !are_there(packed, scales, src) ||
      !is_aligned(packed))
    return QR_EINVAL;
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
      pack_row(static_cast<char*>(packed) + panel * bytes, format, column, in_features, integers.data());
    }
  });
  return QR_OK;
}
}
