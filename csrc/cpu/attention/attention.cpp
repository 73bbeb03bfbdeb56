// Paged attention: a unit for each sequence, kv head and tile of query rows; long contexts are divided further, so that
// one sequence keeps every thread busy.
#include <atomic>

#include "../arguments.h"
#include "../kernels/attention/cache.h"
#include "../runtime/threads.h"

using namespace qr;

namespace {

// Pieces that a thread should find: enough that nobody waits long for the last one.
constexpr int64_t kPiecesPerThread = 8;
constexpr int64_t kMostBlocksInRow = 8;
// Divided units leave each split's sums in memory; past this many bytes of them nothing is divided.
constexpr int64_t kMostPartialBytes = int64_t(1) << 28;

// The units of one sequence, and where they begin among all.
struct Units {
  int64_t rows;         // of each but the last
  int64_t tiles;        // for each kv head
  int64_t splits;       // of the longest
  int64_t ranges;       // that each unit is divided into
  int64_t first_piece;  // units * ranges before
  int64_t first_unit;   // divided ones before
  int64_t first_split;  // of divided units before
};

// Which part of its context a tile of rows sees: splits [begin, end).
struct SplitRange {
  int64_t begin, end;
};

SplitRange splits_of(const AttentionArgs& args, int64_t sequence, int64_t row_begin, int64_t row_end) {
  const int64_t group = args.heads / args.layout.kv_heads;
  const int64_t tokens = pages_of_split(args.layout) * args.layout.block_size;
  const int64_t first = args.seq_lens[sequence] - (args.query_start[sequence + 1] - args.query_start[sequence]);
  const int64_t from = first + row_begin / group - args.window + 1;
  return {args.window > 0 && from > 0 ? from / tokens : 0, (first + (row_end - 1) / group) / tokens + 1};
}

// Whether a sequence's tokens do not go backwards, and lie in blocks that there are.
bool is_sequence(const int32_t* query_start, int64_t length, const int32_t* blocks, int64_t stride, int64_t block_size,
                 int64_t num_blocks) {
  const int64_t tokens = int64_t(query_start[1]) - query_start[0], count = divide_up(length, block_size);
  if (tokens < 0 || tokens > length || count > stride) return false;
  uint32_t largest = 0;  // a negative id is larger than any other
  for (int64_t i = 0; i < count; ++i) largest = largest < uint32_t(blocks[i]) ? uint32_t(blocks[i]) : largest;
  return count == 0 || int64_t(largest) < num_blocks;
}

}  // namespace

extern "C" int32_t qr_paged_attention(void* out, int32_t out_dtype, const void* query, int32_t dtype,
                                      const void* cache, int32_t cache_dtype, int64_t num_blocks, int64_t block_size,
                                      int64_t page, int64_t block, const int32_t* query_start, const int32_t* seq_lens,
                                      int64_t sequences, const int32_t* block_tables, int64_t table_stride,
                                      int64_t heads, int64_t kv_heads, int64_t head_size, float scale, float soft_cap,
                                      int64_t window, const float* slopes, const float* sinks) {
  const Kernels* table = kernels();
  if (table == nullptr) return QR_ESTATE;
  if (dtype < QR_FLOAT32 || dtype > QR_FLOAT16 || cache_dtype < QR_FLOAT32 || cache_dtype >= kNumCacheTypes ||
      page != qr_cache_page(cache_dtype, block_size, head_size) || kv_heads <= 0 || heads <= 0 ||
      heads % kv_heads != 0 || !are_blocks(num_blocks, kv_heads, page, block) || !are_sizes(heads, head_size) ||
      !is_output_of(out_dtype, dtype, heads * head_size) || !are_sizes(sequences, table_stride) || window < 0 ||
      !(scale > 0.0f && is_finite(scale)) || !(soft_cap >= 0.0f && is_finite(soft_cap)))
    return QR_EINVAL;
  if (sequences == 0) return QR_OK;
  if (!are_there(out, query, cache, query_start, seq_lens, block_tables) || query_start[0] < 0) return QR_EINVAL;
  for (int64_t r = 0; r < sequences; ++r)
    if (!is_sequence(query_start + r, seq_lens[r], block_tables + r * table_stride, table_stride, block_size,
                     num_blocks))
      return QR_EINVAL;
  const AttentionArgs args{out,
                           out_dtype,
                           query,
                           dtype,
                           cache,
                           CacheLayout{cache_dtype, num_blocks, kv_heads, block_size, head_size, page, block},
                           query_start,
                           seq_lens,
                           block_tables,
                           table_stride,
                           heads,
                           scale,
                           soft_cap,
                           window,
                           slopes,
                           sinks};
  const int64_t group = heads / kv_heads;
  auto* units = static_cast<Units*>(scratch(2, (sequences + 1) * int64_t(sizeof(Units))));
  if (units == nullptr) return QR_ENOMEM;
  int64_t work = 0, blocks = 0;
  for (int64_t r = 0; r < sequences; ++r) {
    const int64_t rows = (int64_t(query_start[r + 1]) - query_start[r]) * group;
    const int64_t last_tile = rows > 0 ? (rows - 1) / kQueryRows * kQueryRows : 0;
    const SplitRange longest = splits_of(args, r, last_tile, rows);
    units[r].rows = kQueryRows;
    units[r].tiles = divide_up(rows, kQueryRows);
    units[r].splits = longest.end - longest.begin + 2;  // an earlier tile's window may touch two more
    blocks += units[r].tiles * kv_heads;
    work += units[r].tiles * kv_heads * units[r].splits;
  }
  if (work == 0) return QR_OK;  // no sequence has a token
  const int64_t fair = divide_up(work, num_threads() * kPiecesPerThread);
  const int64_t enough = blocks / (num_threads() * kPiecesPerThread);
  const int64_t together = enough < 1 ? 1 : enough < kQueryBlocks ? enough : kQueryBlocks;
  const int64_t split_floats = partial_floats(args.layout);
  for (int64_t r = 0; r <= sequences; ++r) {
    units[r].first_piece = units[r].first_unit = units[r].first_split = 0;
    if (r == 0) continue;
    Units& before = units[r - 1];
    int64_t own = before.tiles * kv_heads;
    const int64_t wanted = num_threads() == 1 ? 1 : divide_up(before.splits, fair);
    const bool fits = (before.first_split + own * before.splits) * split_floats * 4 <= kMostPartialBytes;
    before.ranges = fits ? wanted : 1;
    const bool divided = before.ranges > 1;
    if (!divided) {  // blocks of rows that share pages
      before.rows = together * kQueryRows;
      before.tiles = divide_up(before.tiles, together);
      own = before.tiles * kv_heads;
    }
    units[r].first_piece = before.first_piece + own * before.ranges;
    units[r].first_unit = before.first_unit + (divided ? own : 0);
    units[r].first_split = before.first_split + (divided ? own * before.splits : 0);
  }
  const Units& all = units[sequences];
  float* partials = nullptr;
  std::atomic<int64_t>* left = nullptr;  // pieces to come of each divided unit: whoever ends the last one merges
  if (all.first_unit > 0) {
    auto* memory = static_cast<char*>(scratch(3, all.first_split * split_floats * 4 + all.first_unit * 8));
    if (memory == nullptr) return QR_ENOMEM;
    partials = reinterpret_cast<float*>(memory);
    left = reinterpret_cast<std::atomic<int64_t>*>(memory + all.first_split * split_floats * 4);
    for (int64_t r = 0; r < sequences; ++r)
      for (int64_t u = units[r].first_unit; u < units[r + 1].first_unit; ++u) left[u].store(units[r].ranges);
  }

  const bool plain = slopes == nullptr && sinks == nullptr;
  const AttendFn attend = (dtype == QR_BFLOAT16 && plain ? table->attend_bf16 : table->attend)[cache_dtype];
  const auto sequence_of = [&](int64_t index) {
    int64_t low = 0, high = sequences;  // the last sequence whose first piece is not beyond index
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (units[middle].first_piece <= index ? low : high) = middle;
    }
    return low;
  };
  const auto piece_at = [&](int64_t index) {
    AttentionPiece piece;
    piece.sequence = sequence_of(index);
    const Units& own = units[piece.sequence];
    const int64_t range = (index - own.first_piece) % own.ranges, unit = (index - own.first_piece) / own.ranges;
    const int64_t rows = (int64_t(query_start[piece.sequence + 1]) - query_start[piece.sequence]) * group;
    piece.kv_head = unit / own.tiles;  // tiles of one head follow each other: they share its pages
    piece.row_begin = unit % own.tiles * own.rows;
    piece.row_end = piece.row_begin + own.rows < rows ? piece.row_begin + own.rows : rows;
    const SplitRange seen = splits_of(args, piece.sequence, piece.row_begin, piece.row_end);
    const int64_t count = seen.end - seen.begin;
    piece.split_begin = seen.begin + count * range / own.ranges;
    piece.split_end = seen.begin + count * (range + 1) / own.ranges;
    piece.partials = nullptr;
    if (own.ranges > 1)
      piece.partials =
          partials + (own.first_split + unit * own.splits + piece.split_begin - seen.begin) * split_floats;
    piece.next = nullptr;
    return piece;
  };
  const auto merge = [&](int64_t index, AttentionPiece piece) {
    const Units& own = units[piece.sequence];
    const int64_t unit = (index - own.first_piece) / own.ranges;
    if (left[own.first_unit + unit].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    const SplitRange seen = splits_of(args, piece.sequence, piece.row_begin, piece.row_end);
    piece.split_begin = seen.begin;
    piece.split_end = seen.end;
    piece.partials = partials + (own.first_split + unit * own.splits) * split_floats;
    table->merge_splits(args, piece);
  };
  // A thread takes a few pieces in a row, so that memory is not idle from one to the next.
  const int64_t most = all.first_piece / (num_threads() * kPiecesPerThread);
  const int64_t limit = blocks > all.first_piece ? kMostBlocksInRow * all.first_piece / blocks : kMostBlocksInRow;
  const int64_t run = most < 1 || limit < 1 ? 1 : most < limit ? most : limit;
  parallel_for(divide_up(all.first_piece, run), [&](int64_t ticket) {
    const int64_t end = (ticket + 1) * run < all.first_piece ? (ticket + 1) * run : all.first_piece;
    AttentionPiece next = piece_at(ticket * run);
    for (int64_t index = ticket * run; index < end; ++index) {
      AttentionPiece piece = next;
      if (index + 1 < end) {
        next = piece_at(index + 1);
        piece.next = &next;
      }
      attend(args, piece);
      if (piece.partials != nullptr) merge(index, piece);
    }
  });
  return QR_OK;
}
