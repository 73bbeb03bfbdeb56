// Caches of rows, as qr_store_rows writes them, and where those of the sequences of a step are.
#pragma once

#include "../arguments.h"
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
    layout.copy(out, data + layout.row(steps.blocks(sequence), index) * size(), first, count, size());
  }
};

}  // namespace qr
