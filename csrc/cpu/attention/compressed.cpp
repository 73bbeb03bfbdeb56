// Attention over the last tokens and over entries that stand for earlier ones: which entries, and attention over rows.
//
// What a token sees is copied into pages of its own, tokens first, in order, and `qr_paged_attention` takes these for a
// context of as many slots: so its bits follow from these rows alone.
#include <atomic>
#include <cstring>

#include "rows.h"

using namespace qr;

namespace {

// Slots of a page of a token's own, whose count is a matter of taste: softmaxes are taken of kSplitTokens anyway.
constexpr int64_t kOwnSlots = 128;
// Features that one piece rotates, at least.
constexpr int64_t kRotated = 4096;

// What a token attends to: positions from `first_position` on, then entries.
struct Seen {
  int64_t first_position, positions, entries;

  int64_t rows() const { return positions + entries; }
};

struct Attention {
  const Rows& last;
  const Rows* entries;
  const int32_t* selected;
  int64_t num_selected, window;

  Seen of(const Token& token) const {
    const int64_t positions = std::min(window, token.position + 1);
    int64_t count = entries == nullptr ? 0 : (token.position + 1) / entries->rate;
    if (selected != nullptr) count = std::min(count, num_selected);
    return {token.position + 1 - positions, positions, count};
  }
  // Of entry i of those that a token sees; negative where `selected` names none.
  int64_t number(const Token& token, int64_t i) const {
    if (selected == nullptr) return i;
    const int64_t chosen = selected[token.index * num_selected + i];
    return chosen < (token.position + 1) / entries->rate ? chosen : -1;
  }
  // Rows [first, end) of what a token sees; false where an entry is none.
  bool read(char* out, const Token& token, int64_t first, int64_t end, int64_t features) const {
    const Seen seen = of(token);
    for (int64_t i = first; i < end; ++i, out += features * last.size()) {
      if (i < seen.positions) {
        last.read(out, token.sequence, seen.first_position + i, 0, features);
        continue;
      }
      const int64_t entry = number(token, i - seen.positions);
      if (entry < 0) return false;
      entries->read(out, token.sequence, entry, 0, features);
    }
    return true;
  }
};

// What an indexer scores: keys of `size` features, the last ones of rows of row_size. In pages, and for queries, they have
// zeros behind them, up to a multiple of four.
struct Keys {
  const Rows& rows;
  int64_t row_size, size;

  int64_t padded() const { return round_up(size, 4); }
  // Of entries [first, first + count) of a sequence, in pages without values.
  void gather(char* pages, int64_t page_bytes, int64_t sequence, int64_t first, int64_t count,
              std::atomic<int32_t>& status) const {
    const int64_t bytes = padded() * rows.size(), own_bytes = size * rows.size();
    parallel_for(divide_up(count, kOwnSlots), [&](int64_t index) {
      auto* own = static_cast<char*>(scratch(2, kOwnSlots * bytes));
      if (own == nullptr) return status.store(QR_ENOMEM);
      const int64_t begin = index * kOwnSlots, keys = std::min(kOwnSlots, count - begin);
      for (int64_t i = 0; i < keys; ++i) {
        rows.read(own + i * bytes, sequence, first + begin + i, row_size - size, size);
        std::memset(own + i * bytes + own_bytes, 0, size_t(bytes - own_bytes));
      }
      kernels()->write_slots(pages + index * page_bytes, nullptr, rows.dtype, padded(), own, keys);
    });
  }
  // Rows of queries; null without memory.
  const void* queries(const void* query, int64_t count, int64_t element) const {
    if (padded() == size) return query;
    auto* out = static_cast<char*>(scratch(3, count * padded() * element));
    if (out == nullptr) return nullptr;
    for (int64_t i = 0; i < count; ++i) {
      std::memcpy(out + i * padded() * element, static_cast<const char*>(query) + i * size * element, size_t(size * element));
      std::memset(out + (i * padded() + size) * element, 0, size_t((padded() - size) * element));
    }
    return out;
  }
};

}  // namespace

extern "C" {

int32_t qr_rotate_last(void* x, int32_t dtype, const int64_t* positions, const float* cos_sin, int64_t num_positions,
                       int64_t tokens, int64_t heads, int64_t size, int64_t rotated, int32_t backward) {
  if (kernels() == nullptr) return QR_ESTATE;
  if (!is_dtype(dtype) || heads <= 0 || rotated <= 0 || rotated % 2 != 0 || rotated > size || backward < 0 ||
      backward > 1 || !are_sizes(tokens, heads, size) || !are_sizes(num_positions, rotated))
    return QR_EINVAL;
  if (tokens == 0) return QR_OK;
  if (!are_there(x, positions, cos_sin)) return QR_EINVAL;
  for (int64_t i = 0; i < tokens; ++i)
    if (positions[i] < 0 || positions[i] >= num_positions) return QR_EINVAL;
  const RotateArgs args{x, dtype, positions, cos_sin, heads, size, rotated, backward != 0};
  const int64_t each = divide_up(kRotated, heads * rotated);
  parallel_for(divide_up(tokens, each), [&](int64_t piece) {
    kernels()->rotate_last(args, piece * each, std::min(piece * each + each, tokens));
  });
  return QR_OK;
}

int32_t qr_store_rows(void* cache, int32_t dtype, int64_t num_blocks, int64_t rows_of_block, int64_t width,
                      int64_t block, const void* rows, int64_t row_size, const int64_t* slots, int64_t tokens) {
  if (!is_dtype(dtype) || rows_of_block <= 0 || width <= 0 || !are_sizes(rows_of_block, width) ||
      !are_blocks(num_blocks, 1, rows_of_block * width, block) || row_size > 2 * width || row_size < 2 * width - 1 ||
      !are_sizes(tokens, row_size))
    return QR_EINVAL;
  if (tokens == 0) return QR_OK;
  if (!are_there(cache, rows, slots)) return QR_EINVAL;
  for (int64_t i = 0; i < tokens; ++i)
    if (slots[i] < 0 || slots[i] / rows_of_block >= num_blocks) return QR_EINVAL;
  const int64_t size = bytes_of(dtype), rest = row_size - width;
  for (int64_t i = 0; i < tokens; ++i) {
    const char* in = static_cast<const char*>(rows) + i * row_size * size;
    const int64_t at = slots[i] / rows_of_block * block + slots[i] % rows_of_block * width;
    char *first = static_cast<char*>(cache) + at * size, *second = first + num_blocks * block * size;
    std::memcpy(first, in, size_t(width * size));
    std::memcpy(second, in + width * size, size_t(rest * size));
    std::memset(second + rest * size, 0, size_t((width - rest) * size));
  }
  return QR_OK;
}

int32_t qr_select_entries(int32_t* selected, int64_t num_selected, const void* query, int32_t dtype,
                          const float* weights, int64_t heads, int64_t size, int64_t row_size, const void* entries,
                          int32_t entries_dtype, int64_t num_blocks, int64_t rows_of_block, int64_t width, int64_t block,
                          const int32_t* block_tables, int64_t table_stride, int64_t block_size,
                          const int32_t* query_start, const int32_t* seq_lens, int64_t sequences, int64_t rate) {
  if (kernels() == nullptr) return QR_ESTATE;
  if (!is_dtype(dtype) || heads <= 0 || size <= 0 || rate <= 0 || num_selected <= 0 ||
      num_selected > INT32_MAX || row_size < size || !are_sizes(heads, size) || !are_sizes(num_selected, rate) ||
      !are_sizes(rows_of_block, rate) || !are_sizes(width, 2) || row_size > 2 * width)
    return QR_EINVAL;
  if (sequences == 0) return QR_OK;
  if (!are_there(selected, query, weights, query_start, seq_lens)) return QR_EINVAL;
  const Steps steps{query_start, seq_lens, sequences, block_tables, table_stride, block_size, num_blocks};
  const RowLayout row_layout{num_blocks, rows_of_block, width, block};
  const Rows rows{static_cast<const char*>(entries), entries_dtype, row_layout, steps, rate};
  if (!rows.are_valid() || !are_sizes(steps.tokens(), heads, size) || !are_sizes(steps.tokens(), num_selected))
    return QR_EINVAL;
  const int64_t most = (num_selected + 1) * rate - 1;  // positions before it see no more entries than that
  each_whole(steps, most, [&](const Token& token) {
    choose_all(selected + token.index * num_selected, num_selected, (token.position + 1) / rate);
  });
  const Keys all{rows, row_size, size};
  const int64_t page = qr_cache_page(entries_dtype, kOwnSlots, all.padded());
  if (page < 0) return QR_EINVAL;
  const void* queries = all.queries(query, steps.tokens() * heads, bytes_of(dtype));
  if (queries == nullptr) return QR_ENOMEM;
  const int64_t page_bytes = page * bytes_of(entries_dtype), row = round_up(steps.longest() / rate, kOwnSlots);
  const int64_t pages = std::clamp(kWaveBytes / page_bytes, int64_t(1), std::max(int64_t(1), row / kOwnSlots));
  const int64_t some = kWaveBytes / std::max(int64_t(1), row * 4);
  const int64_t together = std::clamp(some, int64_t(1), std::max(int64_t(1), steps.tokens()));
  std::atomic<int32_t> status{QR_OK};
  return each_wave(steps, most, together, [&](const Token* tokens, int64_t count) {
    auto* scores = static_cast<float*>(scratch(6, together * row * 4));
    auto* keys = static_cast<char*>(scratch(4, round_up(pages * page_bytes + kCacheSlack, 64) + pages * 4));
    if (scores == nullptr || keys == nullptr) return int32_t(QR_ENOMEM);
    auto* table = reinterpret_cast<int32_t*>(keys + round_up(pages * page_bytes + kCacheSlack, 64));
    for (int64_t i = 0; i < pages; ++i) table[i] = int32_t(i);
    const CacheLayout layout{entries_dtype, pages, 1, kOwnSlots, all.padded(), page, page};
    const IndexArgs args{queries, dtype, weights, keys, layout, heads, all.padded()};
    each_sequence(tokens, count, [&](const Token* own, int64_t own_count) {
      float* own_scores = scores + (own - tokens) * row;
      const int64_t seen = (own[own_count - 1].position + 1) / rate;
      for (int64_t first = 0; first < seen; first += pages * kOwnSlots) {
        const int64_t taken = std::min(pages * kOwnSlots, seen - first);
        all.gather(keys, page_bytes, own->sequence, first, taken, status);
        const int64_t own_pages = divide_up(taken, kOwnSlots), each = kPiecePositions / kOwnSlots;
        const int64_t ranges = divide_up(own_pages, each);
        parallel_for(own_count * ranges, [&](int64_t piece) {
          const int64_t token = piece / ranges, from = piece % ranges * each;
          kernels()->index_scores[entries_dtype](
              args, IndexPiece{own[token].index, table, from, std::min(from + each, own_pages),
                               own_scores + token * row + first});
        });
      }
    });
    parallel_for(count, [&](int64_t i) {
      auto* sorted = static_cast<float*>(scratch(1, row * 4));
      if (sorted == nullptr) return status.store(QR_ENOMEM);
      choose(selected + tokens[i].index * num_selected, num_selected, scores + i * row, (tokens[i].position + 1) / rate,
             sorted);
    });
    return int32_t(status.load());
  });
}

int32_t qr_compressed_attention(void* out, const void* query, int32_t dtype, const float* sinks, const void* last,
                                int32_t cache_dtype, int64_t num_blocks, int64_t rows_of_block, int64_t width,
                                int64_t block, const int32_t* block_tables, int64_t table_stride, int64_t block_size,
                                const void* entries, int64_t entry_blocks, int64_t entries_of_block,
                                int64_t entry_width, int64_t entry_block, const int32_t* entry_tables,
                                int64_t entry_table_stride, int64_t entry_block_size, const int32_t* query_start,
                                const int32_t* seq_lens, int64_t sequences, const int32_t* selected,
                                int64_t num_selected, int64_t heads, int64_t head_size, float scale, int64_t window,
                                int64_t rate) {
  if (kernels() == nullptr) return QR_ESTATE;
  if (!is_dtype(dtype) || heads <= 0 || head_size <= 0 || window <= 0 || rate <= 0 || num_selected < 0 ||
      num_selected > INT32_MAX || !are_sizes(heads, head_size) || !are_sizes(rows_of_block) || !are_sizes(width, 2) ||
      !are_sizes(entries_of_block, rate) || !are_sizes(entry_width, 2) || !(scale > 0.0f && is_finite(scale)))
    return QR_EINVAL;
  if (sequences == 0) return QR_OK;
  if (!are_there(out, query, sinks, query_start, seq_lens)) return QR_EINVAL;
  const Steps steps{query_start, seq_lens, sequences, block_tables, table_stride, block_size, num_blocks};
  const RowLayout row_layout{num_blocks, rows_of_block, width, block};
  const Rows rows{static_cast<const char*>(last), cache_dtype, row_layout, steps, 1};
  const Steps of_entries{query_start, seq_lens, sequences, entry_tables, entry_table_stride, entry_block_size, entry_blocks};
  const RowLayout entry_layout{entry_blocks, entries_of_block, entry_width, entry_block};
  const Rows others{static_cast<const char*>(entries), cache_dtype, entry_layout, of_entries, rate};
  if (!rows.are_valid() || head_size > 2 * width || !are_sizes(steps.tokens(), heads, head_size)) return QR_EINVAL;
  if (entries != nullptr && (!others.are_valid() || head_size > 2 * entry_width)) return QR_EINVAL;
  if (selected != nullptr && (entries == nullptr || !are_sizes(steps.tokens(), num_selected))) return QR_EINVAL;
  const int64_t page = qr_cache_page(cache_dtype, kOwnSlots, head_size), size = bytes_of(cache_dtype);
  if (page < 0) return QR_EINVAL;

  const Attention attention{rows, entries == nullptr ? nullptr : &others, selected, num_selected, window};
  int64_t most = 0;
  for (int64_t r = 0; r < sequences; ++r)
    if (seq_lens[r] > 0) most = std::max(most, attention.of(Token{0, r, seq_lens[r] - 1}).rows());
  const int64_t own_pages = divide_up(most, kOwnSlots), token_bytes = 2 * own_pages * page * size;
  const int64_t together =
      std::clamp(kWaveBytes / std::max(int64_t(1), token_bytes), int64_t(1), std::max(int64_t(1), steps.tokens()));
  const CacheLayout layout{cache_dtype, together * own_pages, 1, kOwnSlots, head_size, page, page};
  const int64_t row_bytes = heads * head_size * bytes_of(dtype);
  return each_wave(steps, 0, together, [&](const Token* tokens, int64_t count) {
    const OwnPages own(together, own_pages, page * size);
    if (own.data == nullptr) return int32_t(QR_ENOMEM);
    std::atomic<int32_t> status{QR_OK};
    parallel_for(count * own_pages, [&](int64_t piece) {
      const Token& token = tokens[piece / own_pages];
      const int64_t seen = attention.of(token).rows(), first = piece % own_pages * kOwnSlots;
      const int64_t end = std::min(first + kOwnSlots, seen);
      if (first == 0) own.lengths[piece / own_pages] = int32_t(seen);
      if (first >= end) return;
      auto* read = static_cast<char*>(scratch(2, kOwnSlots * head_size * size));
      if (read == nullptr) return status.store(QR_ENOMEM);
      if (!attention.read(read, token, first, end, head_size)) return status.store(QR_EINVAL);
      kernels()->write_slots(own.data + key_page(layout, piece, 0) * size, own.data + value_page(layout, piece, 0) * size,
                             cache_dtype, head_size, read, end - first);
    });
    if (status.load() != QR_OK) return int32_t(status.load());
    const int64_t at = tokens[0].index * row_bytes;  // tokens of a wave follow each other
    return qr_paged_attention(static_cast<char*>(out) + at, dtype, static_cast<const char*>(query) + at, dtype, own.data,
                              cache_dtype, own.count, kOwnSlots, page, page, own.starts, own.lengths, count, own.tables,
                              own_pages, heads, 1, head_size, scale, 0.0f, 0, nullptr, sinks);
  });
}
}
