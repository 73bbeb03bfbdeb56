// Caches of rows, as qr_store_rows writes them, and where those of the sequences of a step are.
#pragma once

#include <cstring>

#include "arguments.h"
#include "steps.h"

namespace qr {

struct Rows {
  const char* data;
  int32_t dtype;
  RowLayout layout;
  Steps steps;
  int64_t rate;  // tokens of a row

  int64_t size() const { return bytes_of(dtype); }
  bool are_valid() const {
    return is_dtype(dtype) && data != nullptr && layout.width > 0 && layout.of_block > 0 &&
           steps.block_tables != nullptr && layout.of_block * rate == steps.block_size &&
           are_blocks(layout.num_blocks, 1, layout.of_block * layout.width, layout.block) &&
           are_sizes(steps.sequences, steps.table_stride) && steps.are_valid();
  }
  // Features [first, first + count) of row `index` of a sequence.
  void read(char* out, int64_t sequence, int64_t index, int64_t first, int64_t count) const {
    const char* row = data + layout.row(steps.blocks(sequence), index) * size();
    const int64_t width = layout.width, in_first = std::clamp(width - first, int64_t(0), count);
    std::memcpy(out, row + first * size(), size_t(in_first * size()));
    std::memcpy(out + in_first * size(), row + (layout.half() + first + in_first - width) * size(),
                size_t((count - in_first) * size()));
  }
};

}  // namespace qr
