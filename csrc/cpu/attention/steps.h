// The tokens of a step in waves, and the choice of what each attends to.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "../kernels/attention/cache.h"
#include "../runtime/threads.h"

namespace qr {

// Positions that one piece scores, and bytes of scores, or of gathered pages, that a wave of tokens takes together.
constexpr int64_t kPiecePositions = 1024;
constexpr int64_t kWaveBytes = int64_t(1) << 23;

// The sequences of a step, as the ops are given them.
struct Steps {
  const int32_t *query_start, *seq_lens;
  int64_t sequences;
  const int32_t* block_tables;
  int64_t table_stride, block_size, num_blocks;

  int64_t tokens() const { return query_start[sequences]; }
  int64_t count(int64_t sequence) const { return int64_t(query_start[sequence + 1]) - query_start[sequence]; }
  int64_t first_position(int64_t sequence) const { return seq_lens[sequence] - count(sequence); }
  const int32_t* blocks(int64_t sequence) const { return block_tables + sequence * table_stride; }
  int64_t longest() const {
    int64_t length = 0;
    for (int64_t r = 0; r < sequences; ++r) length = std::max(length, int64_t(seq_lens[r]));
    return length;
  }
  // Of its tokens, the first ones, which see no more than `most` positions.
  int64_t count_whole(int64_t sequence, int64_t most) const {
    return std::clamp(most - first_position(sequence), int64_t(0), count(sequence));
  }

  bool are_valid() const {
    if (query_start[0] != 0) return false;
    for (int64_t r = 0; r < sequences; ++r) {
      const int64_t pages = divide_up(seq_lens[r], block_size);
      if (count(r) < 0 || count(r) > seq_lens[r] || pages > table_stride) return false;
      for (int64_t i = 0; i < pages; ++i)
        if (blocks(r)[i] < 0 || blocks(r)[i] >= num_blocks) return false;
    }
    return true;
  }
};

// A token that chooses, or attends to what it has chosen.
struct Token {
  int64_t index, sequence, position;
};

// Calls run(token) with each that sees no more than `most` positions.
template <class Run>
void each_whole(const Steps& steps, int64_t most, const Run& run) {
  for (int64_t r = 0; r < steps.sequences; ++r)
    for (int64_t i = 0; i < steps.count_whole(r, most); ++i)
      run(Token{steps.query_start[r] + i, r, steps.first_position(r) + i});
}

// Calls run(tokens, count) with all tokens that see more than `most` positions, no more than `together` at a time.
template <class Run>
int32_t each_wave(const Steps& steps, int64_t most, int64_t together, const Run& run) {
  auto* tokens = static_cast<Token*>(scratch(5, together * int64_t(sizeof(Token))));
  if (tokens == nullptr) return QR_ENOMEM;
  int64_t count = 0;
  for (int64_t r = 0; r < steps.sequences; ++r)
    for (int64_t i = steps.count_whole(r, most); i < steps.count(r); ++i) {
      tokens[count++] = Token{steps.query_start[r] + i, r, steps.first_position(r) + i};
      if (count < together) continue;
      if (const int32_t status = run(tokens, count); status != QR_OK) return status;
      count = 0;
    }
  return count == 0 ? QR_OK : run(tokens, count);
}

// Calls run(tokens, count) with those of each sequence among some tokens, in order.
template <class Run>
void each_sequence(const Token* tokens, int64_t count, const Run& run) {
  for (int64_t begin = 0, end; begin < count; begin = end) {
    for (end = begin + 1; end < count && tokens[end].sequence == tokens[begin].sequence;) ++end;
    run(tokens + begin, end - begin);
  }
}

// Pages of their own for each of some tokens, in scratch memory, and the sequences that they look like: one of each token,
// whose length the caller writes.
struct OwnPages {
  int64_t count;  // of all tokens
  char* data;     // null without memory
  int32_t *tables = nullptr, *starts = nullptr, *lengths = nullptr;

  OwnPages(int64_t tokens, int64_t pages_of_token, int64_t page_bytes) : count(tokens * pages_of_token) {
    const int64_t bytes = round_up(2 * count * page_bytes + kCacheSlack, 64);
    data = static_cast<char*>(scratch(6, bytes + (count + 2 * tokens + 1) * 4));
    if (data == nullptr) return;
    tables = reinterpret_cast<int32_t*>(data + bytes);
    starts = tables + count;
    lengths = starts + tokens + 1;
    for (int64_t i = 0; i < count; ++i) tables[i] = int32_t(i);
    for (int64_t i = 0; i <= tokens; ++i) starts[i] = int32_t(i);
  }
};

// All of the first `count`, no more than `most` of them, then -1.
inline void choose_all(int32_t* selected, int64_t most, int64_t count) {
  for (int64_t i = 0; i < most; ++i) selected[i] = i < count ? int32_t(i) : -1;
}

// The positions of the `most` highest of `count` scores, ascending; of equal ones the first. NaN is the lowest.
inline void choose(int32_t* selected, int64_t most, float* scores, int64_t count, float* sorted) {
  for (int64_t i = 0; i < count; ++i) {
    if (std::isnan(scores[i])) scores[i] = -std::numeric_limits<float>::infinity();
    sorted[i] = scores[i];
  }
  std::nth_element(sorted, sorted + most - 1, sorted + count, [](float a, float b) { return a > b; });
  const float least = sorted[most - 1];
  int64_t equal = most - std::count_if(sorted, sorted + most, [&](float score) { return score > least; });
  for (int32_t position = 0; position < count; ++position)
    if (scores[position] > least || (scores[position] == least && equal-- > 0)) *selected++ = position;
}

}  // namespace qr
