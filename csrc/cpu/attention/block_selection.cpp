// The blocks of tokens that each query of an indexer chooses, by the largest product with a key in each of them.
#include <atomic>

#include "rows.h"

using namespace qr;

namespace {

// Tokens of a sequence that one piece scores: their queries stay in L2.
constexpr int64_t kPieceTokens = 64;

}  // namespace

extern "C" int32_t qr_select_blocks(int32_t* selected, int64_t num_selected, const void* query, int32_t dtype,
                                    int64_t heads, int64_t size, const void* keys, int32_t keys_dtype,
                                    int64_t num_blocks, int64_t rows_of_block, int64_t width, int64_t block,
                                    const int32_t* block_tables, int64_t table_stride, const int32_t* query_start,
                                    const int32_t* seq_lens, int64_t sequences, int64_t run, int64_t num_local) {
  if (kernels() == nullptr) return QR_ESTATE;
  if (!is_dtype(dtype) || heads <= 0 || size <= 0 || num_selected <= 0 || num_selected > INT32_MAX || run <= 0 ||
      num_local < 0 || !are_sizes(heads, size) || !are_sizes(num_selected, run) || !are_sizes(num_local) ||
      !are_sizes(width, 2) || size > 2 * width)
    return QR_EINVAL;
  if (sequences == 0) return QR_OK;
  if (!are_there(selected, query, query_start, seq_lens)) return QR_EINVAL;
  const Steps steps{query_start, seq_lens, sequences, block_tables, table_stride, rows_of_block, num_blocks};
  const RowLayout layout{num_blocks, rows_of_block, width, block};
  const Rows rows{static_cast<const char*>(keys), keys_dtype, layout, steps, 1};
  if (!rows.are_valid() || !are_sizes(steps.tokens(), heads, size) || !are_sizes(steps.tokens(), heads, num_selected))
    return QR_EINVAL;
  const int64_t most = num_selected * run;
  each_whole(steps, most, [&](const Token& token) {
    for (int64_t head = 0; head < heads; ++head)
      choose_all(selected + (token.index * heads + head) * num_selected, num_selected, token.position / run + 1);
  });
  const BlockScoreArgs args{query, dtype, keys, keys_dtype, layout, heads, size, run};
  const int64_t row = divide_up(steps.longest(), run), each = std::max(int64_t(1), kPiecePositions / run);
  const int64_t some = kWaveBytes / std::max(int64_t(1), heads * row * 4);
  const int64_t together = std::clamp(some, int64_t(1), std::max(int64_t(1), steps.tokens()));
  std::atomic<int32_t> status{QR_OK};
  return each_wave(steps, most, together, [&](const Token* tokens, int64_t count) {
    auto* scores = static_cast<float*>(scratch(6, together * heads * row * 4));
    if (scores == nullptr) return int32_t(QR_ENOMEM);
    each_sequence(tokens, count, [&](const Token* own, int64_t own_count) {
      const int64_t ranges = divide_up(own[own_count - 1].position / run + 1, each);
      parallel_for(divide_up(own_count, kPieceTokens) * ranges, [&](int64_t piece) {
        const Token& first = own[piece / ranges * kPieceTokens];
        const int64_t taken = std::min(kPieceTokens, own + own_count - &first), begin = piece % ranges * each;
        const int64_t end = std::min(begin + each, (first.position + taken - 1) / run + 1);
        kernels()->block_scores(args, BlockScorePiece{steps.blocks(first.sequence), first.index, first.position, taken,
                                                      begin, end, scores + (&first - tokens) * heads * row, row});
      });
    });
    parallel_for(count, [&](int64_t i) {
      auto* sorted = static_cast<float*>(scratch(1, row * 4));
      if (sorted == nullptr) return status.store(QR_ENOMEM);
      const int64_t seen = tokens[i].position / run + 1;
      for (int64_t head = 0; head < heads; ++head) {
        float* own = scores + (i * heads + head) * row;
        std::fill(own + std::max(int64_t(0), seen - num_local), own + seen, std::numeric_limits<float>::infinity());
        choose(selected + (tokens[i].index * heads + head) * num_selected, num_selected, own, seen, sorted);
      }
    });
    return int32_t(status.load());
  });
}
