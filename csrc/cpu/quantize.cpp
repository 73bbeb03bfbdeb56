// Quantised weights as they are stored: numbers to integers with scales, and integers to panels.
#include "arguments.h"
#include "gemm.h"

#include <atomic>
#include <cstring>
#include <vector>

namespace qr {
namespace {

// One row into its column of a panel, 4 k at a time; false where there is NaN. See kernels/gemm_float8.h.
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

// One row of 5 or 6 bits into its column of a panel, 64 k at a time; false where a number does not fit. See Planes in
// kernels/gemm_quantized.h.
bool pack_planes_row(char* panel, int32_t format, int64_t column, int64_t k, const int8_t* row) {
  const int bits = int(bits_of(format)), high = bits - 4, rows_of_line = 4 / high, bias = 1 << (bits - 1);
  const int64_t half_bytes = bits * 128;
  char* out = panel + column / 16 * half_bytes + column % 16 * 4;
  int outside = 0;
  for (int64_t i = 0; i < k; i += 64, out += 2 * half_bytes) {
    int8_t values[64] = {};
    std::memcpy(values, row + i, size_t(k - i < 64 ? k - i : 64));
    uint8_t nibbles[8][4], lines[4][4] = {};
    for (int at = 0; at < 64; ++at) {
      const int code = values[at] + bias, eight = at / 8, four = at / 4 % 2;
      outside |= code;
      uint8_t& both = nibbles[eight][at % 4];
      both = uint8_t(four == 0 ? code & 15 : both | (code & 15) << 4);
      const int place = eight % rows_of_line * 2 * high + four * high;
      lines[eight / rows_of_line][at % 4] |= uint8_t((code >> 4 & (1 << high) - 1) << place);
    }
    for (int eight = 0; eight < 8; ++eight) std::memcpy(out + eight * 64, nibbles[eight], 4);
    for (int line = 0; line < 2 * high; ++line) std::memcpy(out + 512 + line * 64, lines[line], 4);
  }
  return (outside & ~(2 * bias - 1)) == 0;
}

// One row into its column of a panel, 8 k at a time; false where a number does not fit four bits.
bool pack_row(char* panel, int32_t format, int64_t column, int64_t k, const int8_t* row) {
  if (is_in_planes(format)) return pack_planes_row(panel, format, column, k, row);
  const int bias = format == QR_INT4 ? 8 : 0;
  int outside = 0;
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
      for (int j = 0; j < 8; ++j) outside |= eight[j] + bias;
      for (int j = 0; j < 4; ++j) nibbles[j] = uint8_t((eight[j] & 15) | (eight[j + 4] & 15) << 4);
      std::memcpy(panel + half * 512 + line * 64 + at, nibbles, 4);
    }
  }
  return (outside & ~15) == 0;
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
    for (int64_t row = begin; row < end; ++row) {
      const int8_t* values = src + (row - row_offset) * src_stride;
      const int64_t column = row - panel * kPanel;
      const bool fits = format == QR_FLOAT8 ? pack_float8_row(out, column, in_features, values)
                                            : pack_row(out, format, column, in_features, values);
      if (!fits) status.store(QR_EUNSUPPORTED);
    }
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
