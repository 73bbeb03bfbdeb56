// A cache of rows, as tests of what reads rows need it.
#pragma once

#include <cstring>

#include "check.h"
#include "quire_cpu.h"

// Rows of one sequence in blocks in reverse order, NaN where nothing was written; random ones, or none yet.
struct Store {
  int32_t dtype;
  int64_t row_size, of_block, width = (row_size + 1) / 2, num_blocks;
  std::vector<int32_t> table;
  std::vector<float> rows;  // as the dtype has them
  char* data;

  Store(int32_t dtype, int64_t row_size, int64_t rate, int64_t length, int64_t block_size, bool is_filled = true)
      : dtype(dtype), row_size(row_size), of_block(block_size / rate), num_blocks((length + block_size - 1) / block_size + 1) {
    data = aligned_zeros(bytes());
    std::memset(data, 0xff, size_t(bytes()));
    for (int64_t i = 0; i < num_blocks; ++i) table.push_back(int32_t(num_blocks - 1 - i));
    if (!is_filled) return;
    const int64_t count = length / rate;
    std::vector<int64_t> slots;
    for (int64_t i = 0; i < count; ++i) slots.push_back(table[size_t(i / of_block)] * of_block + i % of_block);
    const std::vector<char> stored = encode(random_floats(count * row_size), dtype);
    rows = decode(stored, dtype);
    CHECK(qr_store_rows(data, dtype, num_blocks, of_block, width, block(), stored.data(), row_size, slots.data(), count) ==
          QR_OK);
  }
  ~Store() { std::free(data); }
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  int64_t block() const { return of_block * width; }
  int64_t bytes() const { return 2 * num_blocks * block() * (dtype == QR_FLOAT32 ? 4 : 2); }
  // All elements of a row, as the cache has them.
  std::vector<float> row(int64_t index) const {
    const std::vector<float> all = decode({data, data + bytes()}, dtype);
    const float* first = all.data() + table[size_t(index / of_block)] * block() + index % of_block * width;
    std::vector<float> out(first, first + width);
    out.insert(out.end(), first + num_blocks * block(), first + num_blocks * block() + width);
    return out;
  }
};
