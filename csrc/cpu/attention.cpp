// Paged attention: one piece for each sequence, kv head and tile of query rows.
#include "kernels.h"
#include "threads.h"

using namespace qr;

extern "C" int32_t qr_paged_attention(void* out, const void* query, int32_t dtype, const void* cache,
                                      int32_t cache_dtype, int64_t num_blocks, int64_t block_size, int64_t page,
                                      const int32_t* query_start, const int32_t* seq_lens, int64_t sequences,
                                      const int32_t* block_tables, int64_t table_stride, int64_t heads,
                                      int64_t kv_heads, int64_t head_size, float scale, float soft_cap,
                                      int64_t window) {
  const Kernels* table = kernels();
  if (table == nullptr) return QR_ESTATE;
  if (dtype < QR_FLOAT32 || dtype > QR_FLOAT16 || cache_dtype < QR_FLOAT32 || cache_dtype > QR_FLOAT16 ||
      page != qr_cache_page(cache_dtype, block_size, head_size) || kv_heads <= 0 || heads % kv_heads != 0 ||
      sequences < 0)
    return QR_EINVAL;
  const AttentionArgs args{out,
                           query,
                           dtype,
                           cache,
                           CacheLayout{cache_dtype, num_blocks, kv_heads, block_size, head_size, page},
                           query_start,
                           seq_lens,
                           block_tables,
                           table_stride,
                           heads,
                           scale,
                           soft_cap,
                           window};
  const int64_t group = heads / kv_heads;
  // first_piece[r]: pieces of the sequences before r
  auto* first_piece = static_cast<int64_t*>(scratch(2, (sequences + 1) * 8));
  if (first_piece == nullptr) return QR_ENOMEM;
  first_piece[0] = 0;
  for (int64_t r = 0; r < sequences; ++r) {
    const int64_t rows = (int64_t(query_start[r + 1]) - query_start[r]) * group;
    if (rows < 0 || seq_lens[r] < query_start[r + 1] - query_start[r] ||
        divide_up(seq_lens[r], block_size) > table_stride)
      return QR_EINVAL;
    first_piece[r + 1] = first_piece[r] + divide_up(rows, kQueryRows) * kv_heads;
  }
  const AttendFn attend =
      cache_dtype == QR_BFLOAT16 && dtype == QR_BFLOAT16 ? table->attend_bf16 : table->attend[cache_dtype];
  parallel_for(first_piece[sequences], [&](int64_t index) {
    int64_t low = 0, high = sequences;  // the last sequence whose first piece is not beyond index
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (first_piece[middle] <= index ? low : high) = middle;
    }
    const int64_t tiles = (first_piece[low + 1] - first_piece[low]) / kv_heads, own = index - first_piece[low];
    const int64_t rows = (int64_t(query_start[low + 1]) - query_start[low]) * group;
    AttentionPiece piece;
    piece.sequence = low;
    piece.kv_head = own / tiles;  // tiles of one head follow each other: they share its pages
    piece.row_begin = own % tiles * kQueryRows;
    piece.row_end = piece.row_begin + kQueryRows < rows ? piece.row_begin + kQueryRows : rows;
    attend(args, piece);
  });
  return QR_OK;
}
