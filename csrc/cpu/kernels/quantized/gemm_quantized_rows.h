// Rows times a panel in blocks of a few, whose sums stay in registers all along K.
#pragma once

#include "nested.h"

namespace qr {
namespace {

constexpr int kRowsAtOnce = W == 16 ? 8 : 4;  // whose sums fit the register file; divides the height of a block of x

// R rows of one block of x times a panel.
template <class Format, int R>
void multiply_rows(const GemmArgs& g, const QuantizedRows<Format::kGroup>& x, int64_t row, int64_t panel, float* sums);

template <class Format, int R>
QR_INLINE void multiply_at_most(const GemmArgs& g, const QuantizedRows<Format::kGroup>& x, int64_t row, int64_t rows,
                                int64_t panel, float* sums) {
  if constexpr (R > 0) {
    if (rows >= R)
      multiply_rows<Format, R>(g, x, row, panel, sums);
    else
      multiply_at_most<Format, R - 1>(g, x, row, rows, panel, sums);
  }
}

template <class Format>
void multiply_panel(const GemmArgs& g, const QuantizedRows<Format::kGroup>& x, int64_t row_begin, int64_t row_end,
                    int64_t panel, float* sums) {
  for (int64_t row = row_begin; row < row_end; row += kRowsAtOnce)
    multiply_at_most<Format, kRowsAtOnce>(g, x, row, row_end - row, panel, sums + (row - row_begin) * kPanel);
}

}  // namespace
}  // namespace qr
