// The states of a step's sequences, and scans over them: pieces are (sequence, block of channels or head), each with its
// part of the sequence's state.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>

#include "../arguments.h"
#include "../kernels.h"
#include "../runtime/threads.h"

namespace qr {

struct States {
  float* numbers;
  int64_t num_pages, half;
  const int32_t *query_start, *reads, *writes;
  int64_t sequences;

  // Whether a page holds so many numbers, and all that sequences name exists.
  bool are_valid(int64_t tokens, int64_t num_numbers) const {
    if (!are_sizes(2, num_pages, half) || !are_sizes(sequences) || num_numbers > 2 * half) return false;
    if (sequences == 0) return tokens == 0;
    if (!are_there(numbers, query_start, reads, writes)) return false;
    if (query_start[0] != 0 || query_start[sequences] != tokens) return false;
    for (int64_t r = 0; r < sequences; ++r)
      if (query_start[r + 1] < query_start[r] || reads[r] < -1 || reads[r] >= num_pages || writes[r] < 0 ||
          writes[r] >= num_pages)
        return false;
    return true;
  }
  float* at(int64_t page, int64_t number) const {
    return number < half ? numbers + page * half + number : numbers + (num_pages + page) * half + number - half;
  }
  bool in_one_half(int64_t first, int64_t count) const { return first >= half || first + count <= half; }

  void get(float* to, int64_t page, int64_t first, int64_t count) const {
    const int64_t low = in_one_half(first, count) ? count : half - first;
    std::memcpy(to, at(page, first), size_t(low) * 4);
    if (low < count) std::memcpy(to + low, at(page, half), size_t(count - low) * 4);
  }
  void put(const float* from, int64_t page, int64_t first, int64_t count) const {
    const int64_t low = in_one_half(first, count) ? count : half - first;
    std::memcpy(at(page, first), from, size_t(low) * 4);
    if (low < count) std::memcpy(at(page, half), from + low, size_t(count - low) * 4);
  }
  // Numbers [first, first + count) of a sequence's state, as the step found them.
  void get_before(float* to, int64_t sequence, int64_t first, int64_t count) const {
    if (reads[sequence] < 0)
      std::memset(to, 0, size_t(count) * 4);
    else
      get(to, reads[sequence], first, count);
  }

  // Run body(before, after) on numbers [first, first + count) of a sequence's state: where they lie, or in a copy
  // where they lie in both halves.
  template <class Body>
  int32_t advance(int64_t sequence, int64_t first, int64_t count, const Body& body) const {
    const int64_t read = reads[sequence], write = writes[sequence];
    const bool is_split = !in_one_half(first, count);
    float* after = is_split ? static_cast<float*>(scratch(0, count * 4)) : at(write, first);
    if (after == nullptr) return QR_ENOMEM;
    if (query_start[sequence] == query_start[sequence + 1] || is_split || read < 0) {
      get_before(after, sequence, first, count);
      if (query_start[sequence] < query_start[sequence + 1]) body(after, after);
    } else {
      body(at(read, first), after);
    }
    if (is_split) put(after, write, first, count);
    return QR_OK;
  }
};

// The channels or heads of a state, each of so many numbers from number `first` of a page on, and how many of them a
// piece takes.
struct Units {
  int64_t first, count, numbers, at_once = 1;
  int64_t room = 0;  // floats that a piece works with
};

// Run kernel(piece) on all (sequence, block of units) pairs, the last block shorter.
template <class Kernel>
int32_t scan(const States& states, const Units& units, const Kernel& kernel) {
  const int64_t blocks = divide_up(units.count, units.at_once);
  std::atomic<int32_t> status{QR_OK};
  parallel_for(states.sequences * blocks, [&](int64_t index) {
    const int64_t r = index / blocks, begin = index % blocks * units.at_once;
    const int64_t end = std::min(units.count, begin + units.at_once);
    auto* room = static_cast<float*>(scratch(1, std::max(int64_t(1), units.room) * 4));
    if (room == nullptr) return status.store(QR_ENOMEM);
    const int32_t result = states.advance(
        r, units.first + begin * units.numbers, (end - begin) * units.numbers, [&](const float* before, float* after) {
          kernel(ScanPiece{states.query_start[r], states.query_start[r + 1], begin, end, before, after,
                           states.reads[r] < 0, room});
        });
    if (result != QR_OK) status.store(result);
  });
  return status.load();
}

constexpr int64_t kPieceElements = 16 * 1024;

template <class Args>
void for_rows(void (*kernel)(const Args&, int64_t, int64_t), const Args& args, int64_t rows, int64_t cols) {
  const int64_t step = std::max(int64_t(1), kPieceElements / cols);
  parallel_for(divide_up(rows, step),
               [&](int64_t index) { kernel(args, index * step, std::min(rows, (index + 1) * step)); });
}

}  // namespace qr
