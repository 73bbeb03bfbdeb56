// Weights in the blocks of GGUF files: straight to panels, or to numbers. Each type's layout: kernels/quantized/blocks.h.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "../arguments.h"
#include "../elements.h"
#include "gemm.h"
#include "panels.h"

namespace qr {
namespace {

// Rows that a thread takes at a time.
constexpr int64_t kRowsOfPiece = 32;

// The type, if rows of it may be in_features long and lie src_stride bytes apart; else null.
const BlockType* type_of_rows(int32_t id, int64_t num_rows, int64_t src_stride, int64_t in_features) {
  const BlockType* type = kernels()->block_type(id);
  if (type == nullptr || num_rows < 0 || in_features <= 0 || in_features % type->elements != 0) return nullptr;
  if (!are_sizes(num_rows, in_features) || !are_sizes(num_rows, src_stride)) return nullptr;
  return num_rows > 1 && src_stride < in_features / type->elements * type->bytes ? nullptr : type;
}

// Call body(k, blocks, count) for stretches of up to kBlockElements elements of a row.
template <class Body>
void for_each_stretch(const BlockType& type, const uint8_t* row, int64_t in_features, const Body& body) {
  for (int64_t k = 0; k < in_features; k += kBlockElements) {
    const int64_t count = std::min(kBlockElements, in_features - k) / type.elements;
    body(k, row + k / type.elements * type.bytes, count);
  }
}

// Of the scales and offsets of some rows: the bits of the largest magnitude, and whether float16 has all of them.
struct Range {
  int32_t largest = 0;
  bool are_halves = true;

  void add(const float* numbers, int64_t count, bool are_known_halves) {
    for (int64_t i = 0; i < count; ++i) {
      int32_t bits;
      std::memcpy(&bits, numbers + i, 4);
      largest = std::max(largest, bits & 0x7fffffff);
    }
    for (int64_t i = 0; i < count && are_halves && !are_known_halves; ++i)
      are_halves = from_half(to_half(numbers[i])) == numbers[i];
  }
};

// Of a block of a type whose scales are nested: what codes are multiplied with, and codes.
struct NestedScales {
  float units[2];
  int8_t codes[2 * kMostBlockGroups];

  NestedScales(const BlockType& type, const uint8_t* block) {
    uint16_t halves[2] = {};
    type.codes(halves, codes, block);
    for (int i = 0; i < 2; ++i) units[i] = from_half(halves[i]);
  }
};

Range range_of_row(const BlockType& type, const uint8_t* row, int64_t in_features, Range range) {
  for_each_stretch(type, row, in_features, [&](int64_t, const uint8_t* blocks, int64_t count) {
    if (type.nested != 0) {
      range.add(NestedScales(type, blocks).units, type.nested, true);
      return;
    }
    float scales[kMostBlockGroups], offsets[kMostBlockGroups];
    const int64_t groups = count * type.elements / type.group;
    type.scales(scales, offsets, blocks, count);
    range.add(scales, groups, type.has_halves);
    if (type.has_offsets) range.add(offsets, groups, false);
  });
  return range;
}

void raise_to(std::atomic<int32_t>& largest, int32_t value) {
  int32_t before = largest.load();
  while (before < value && !largest.compare_exchange_weak(before, value)) {
  }
}

// A weight that is being packed from blocks.
struct BlocksTarget {
  const BlockType& type;
  char* packed;
  void* scales;
  uint16_t* offsets;
  float unit;
  int64_t in_features;

  // Stretches outside, rows inside: the lines of a panel that a stretch goes to stay in L1.
  void pack_panel(int64_t panel, int64_t column, int64_t num_rows, const uint8_t* rows, int64_t stride) const {
    char* out = packed + panel * quantized_panel_bytes(type.format, in_features);
    const PackRow pack = pack_row_of(type.format);
    for_each_stretch(type, rows, in_features, [&](int64_t k, const uint8_t* blocks, int64_t count) {
      alignas(64) int8_t values[kBlockElements];
      for (int64_t row = 0; row < num_rows; ++row, blocks += stride) {
        type.values(values, blocks, count);
        pack(out, column + row, k, count * type.elements, values);
        if (type.nested != 0)
          put_nested(panel, column + row, k, blocks);
        else
          put_scales(panel, column + row, k, blocks, count);
      }
    });
  }

  void put_scales(int64_t panel, int64_t column, int64_t k, const uint8_t* blocks, int64_t count) const {
    float numbers[2][kMostBlockGroups];
    const int64_t groups = count * type.elements / type.group;
    const int64_t at = (panel * (in_features / type.group) + k / type.group) * kPanel + column;
    type.scales(numbers[0], numbers[1], blocks, count);
    put(static_cast<uint16_t*>(scales) + at, numbers[0], groups);
    if (type.has_offsets) put(offsets + at, numbers[1], groups);
  }

  // Of one block.
  void put_nested(int64_t panel, int64_t column, int64_t k, const uint8_t* block) const {
    const int64_t at = panel * (in_features / kNestedBlock) + k / kNestedBlock;
    char* out = static_cast<char*>(scales) + at * nested_bytes(type.nested, type.group);
    const NestedScales nested(type, block);
    auto* halves = reinterpret_cast<uint16_t*>(out) + column;
    auto* codes = reinterpret_cast<int8_t*>(out) + type.nested * 2 * kPanel + column;
    put(halves, nested.units, type.nested);
    for (int64_t i = 0; i < type.nested * (kNestedBlock / type.group); ++i) codes[i * kPanel] = nested.codes[i];
  }

  void put(uint16_t* out, const float* numbers, int64_t count) const {
    uint16_t halves[kMostBlockGroups];
    kernels()->to_halves(halves, numbers, unit, count);
    for (int64_t i = 0; i < count; ++i) out[i * kPanel] = halves[i];
  }
};

bool are_rows_of(const int64_t* ids, int64_t rows, int64_t table_rows) {
  if (ids == nullptr) return rows <= table_rows;
  return std::all_of(ids, ids + rows, [&](int64_t id) { return id >= 0 && id < table_rows; });
}

}  // namespace
}  // namespace qr

using namespace qr;

extern "C" {

int32_t qr_block_range(float* largest, int32_t* are_halves, int32_t type_id, const void* src, int64_t num_rows,
                       int64_t src_stride, int64_t in_features) {
  if (kernels() == nullptr) return QR_ESTATE;
  const BlockType* type = type_of_rows(type_id, num_rows, src_stride, in_features);
  if (type == nullptr || !are_there(largest, are_halves) || (num_rows > 0 && src == nullptr)) return QR_EINVAL;
  std::atomic<int32_t> bits{0};
  std::atomic<bool> halves{true};
  parallel_for(divide_up(num_rows, kRowsOfPiece), [&](int64_t piece) {
    Range range{0, halves.load()};
    const int64_t end = std::min(num_rows, (piece + 1) * kRowsOfPiece);
    for (int64_t row = piece * kRowsOfPiece; row < end; ++row)
      range = range_of_row(*type, static_cast<const uint8_t*>(src) + row * src_stride, in_features, range);
    raise_to(bits, range.largest);
    if (!range.are_halves) halves.store(false);
  });
  // Infinity and everything above it are no numbers.
  const int32_t found = bits.load() >= 0x7f800000 ? 0x7fc00000 : bits.load();
  std::memcpy(largest, &found, 4);
  *are_halves = halves.load();
  return QR_OK;
}

int32_t qr_pack_blocks(void* packed, void* scales, uint16_t* offsets, double unit, int32_t type_id,
                       int64_t out_features, int64_t in_features, const void* src, int64_t num_rows,
                       int64_t src_stride, int64_t row_offset) {
  if (kernels() == nullptr) return QR_ESTATE;
  const BlockType* type = type_of_rows(type_id, num_rows, src_stride, in_features);
  if (type == nullptr || !is_weight(out_features, in_features) || row_offset < 0 || num_rows > out_features ||
      row_offset > out_features - num_rows || !are_there(packed, scales, src) || !is_aligned(packed) ||
      (type->has_offsets && type->nested == 0) != (offsets != nullptr) || !is_finite(float(unit)) ||
      !(float(unit) > 0))
    return QR_EINVAL;
  const BlocksTarget target{*type, static_cast<char*>(packed), scales, offsets, float(unit), in_features};
  for_each_panel(row_offset, num_rows, [&](int64_t panel, int64_t begin, int64_t end) {
    const uint8_t* rows = static_cast<const uint8_t*>(src) + (begin - row_offset) * src_stride;
    target.pack_panel(panel, begin - panel * kPanel, end - begin, rows, src_stride);
  });
  return QR_OK;
}

int32_t qr_block_rows(void* out, int32_t out_dtype, int32_t type_id, const void* table, int64_t table_rows,
                      int64_t src_stride, int64_t in_features, const int8_t* levels, const int64_t* ids,
                      int64_t rows) {
  if (kernels() == nullptr) return QR_ESTATE;
  const BlockType* type = type_of_rows(type_id, table_rows, src_stride, in_features);
  if (type == nullptr || rows < 0 || !are_sizes(rows, in_features) || !is_dtype(out_dtype)) return QR_EINVAL;
  if ((type->format == QR_LEVELS) != (levels != nullptr)) return QR_EINVAL;
  if (rows > 0 && (!are_there(out, table) || !are_rows_of(ids, rows, table_rows))) return QR_EINVAL;
  const int64_t element = bytes_of(out_dtype);
  const int64_t rows_of_piece = ids == nullptr ? kRowsOfPiece : 4;
  parallel_for(divide_up(rows, rows_of_piece), [&](int64_t piece) {
    const int64_t end = std::min(rows, (piece + 1) * rows_of_piece);
    for (int64_t row = piece * rows_of_piece; row < end; ++row) {
      const auto* from = static_cast<const uint8_t*>(table) + (ids == nullptr ? row : ids[row]) * src_stride;
      char* to = static_cast<char*>(out) + row * in_features * element;
      for_each_stretch(*type, from, in_features, [&](int64_t k, const uint8_t* blocks, int64_t count) {
        kernels()->read_blocks(to + k * element, out_dtype, *type, blocks, count, levels);
      });
    }
  });
  return QR_OK;
}
}
