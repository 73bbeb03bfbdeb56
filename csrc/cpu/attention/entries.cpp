// Entries of compressed attention: which ones the tokens of a step finish, each of them a piece of work.
#include "rows.h"

using namespace qr;

namespace {

// Tokens among which those that finish an entry are looked for at a time.
constexpr int64_t kTokensTogether = 4096;

}  // namespace

extern "C" int32_t qr_compress(void* entries, int32_t dtype, int64_t num_blocks, int64_t rows_of_block, int64_t width,
                               int64_t block, const int32_t* block_tables, int64_t table_stride, int64_t block_size,
                               const void* tail, int32_t tail_dtype, int64_t tail_blocks, int64_t tail_of_block,
                               int64_t tail_width, int64_t tail_block, const int32_t* tail_tables,
                               int64_t tail_table_stride, int64_t tail_block_size, const int32_t* query_start,
                               const int32_t* seq_lens, int64_t sequences, const float* bias, int64_t rate,
                               int64_t reach, const float* norm, int64_t size, const float* index_norm,
                               int64_t index_size, float eps, const float* cos_sin, int64_t num_positions,
                               int64_t rotated) {
  if (kernels() == nullptr) return QR_ESTATE;
  const int64_t least = index_norm == nullptr ? size : std::min(size, index_size);
  if (rate <= 0 || !are_sizes(2, rate) || (reach != rate && reach != 2 * rate) || size <= 0 ||
      (index_norm == nullptr) != (index_size == 0) || rotated <= 0 || rotated % 2 != 0 || rotated > least ||
      !is_epsilon(eps) || !are_sizes(reach, tail_width) || !are_sizes(size) || !are_sizes(index_size) ||
      !are_sizes(width, 2) || !are_sizes(rows_of_block, rate) || !are_sizes(tail_of_block) ||
      !are_sizes(num_positions, rotated))
    return QR_EINVAL;
  const int64_t row = size + index_size;
  if (tail_width != row * (reach / rate) || row > 2 * width || row < 2 * width - 1) return QR_EINVAL;
  if (sequences == 0) return QR_OK;
  if (!are_there(query_start, seq_lens, bias, norm, cos_sin)) return QR_EINVAL;
  const Steps steps{query_start, seq_lens, sequences, block_tables, table_stride, block_size, num_blocks};
  const Rows out{static_cast<const char*>(entries), dtype, {num_blocks, rows_of_block, width, block}, steps, rate};
  const Steps of_tail{query_start, seq_lens, sequences, tail_tables, tail_table_stride, tail_block_size, tail_blocks};
  const RowLayout tail_layout{tail_blocks, tail_of_block, tail_width, tail_block};
  const Rows in{static_cast<const char*>(tail), tail_dtype, tail_layout, of_tail, 1};
  if (!out.are_valid() || !in.are_valid() || (steps.longest() / rate - 1) * rate >= num_positions) return QR_EINVAL;
  const CompressArgs args{entries, dtype, out.layout, tail, tail_dtype, tail_layout, bias, rate, reach,
                          {norm, index_norm}, {size, index_size}, eps, cos_sin, rotated};
  const int64_t together = std::clamp(steps.tokens(), int64_t(1), kTokensTogether);
  return each_wave(steps, 0, together, [&](const Token* tokens, int64_t count) {
    auto* last = static_cast<const Token**>(scratch(4, together * int64_t(sizeof(Token*))));
    if (last == nullptr) return int32_t(QR_ENOMEM);
    int64_t found = 0;
    for (int64_t i = 0; i < count; ++i)
      if ((tokens[i].position + 1) % rate == 0) last[found++] = tokens + i;
    parallel_for(found, [&](int64_t i) {
      const int64_t sequence = last[i]->sequence;
      kernels()->compress(args, CompressPiece{steps.blocks(sequence), of_tail.blocks(sequence),
                                              last[i]->position / rate});
    });
    return int32_t(QR_OK);
  });
}
