// Attention over the tokens that an indexer chooses: scores, the choice, and attention over what was gathered.
//
// Tokens that see no more than may be chosen attend to the pages where they are. For others the chosen slots are copied
// into pages of their own, in order, and `qr_paged_attention` takes these for a context: so its bits are those of any
// context that holds the same tokens.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "../arguments.h"
#include "steps.h"

using namespace qr;

namespace {

// Copies slots of one page's worth of chosen positions; see kernels/cache.h for the layouts.
struct Gather {
  CacheLayout from, to;
  int64_t size;  // bytes of an element

  // Elements of a slot that lie together: in keys, with those of fifteen other slots; in values, one of each slot.
  int64_t unit() const { return has_scales(from.dtype) ? 4 : from.dtype == QR_BFLOAT16 ? 2 : 1; }
  int64_t padded() const { return padded_slots(from); }

  void copy(char* out, const char* cache, const int32_t* blocks, const int32_t* positions, int64_t count,
            int64_t page) const {
    for (int64_t first = 0; first < count; first += 16)
      copy_keys(out + key_page(to, page, 0) * size, cache, blocks, positions, first, std::min(first + 16, count));
    char* values = out + value_page(to, page, 0) * size;
    if (from.dtype == QR_BFLOAT16)
      copy_pairs(values, cache, blocks, positions, count);
    else
      for (int64_t i = 0; i < count; ++i) copy_value(values, i, at(cache, blocks, positions[i], true), slot(positions[i]));
    for (int64_t i = 0; has_scales(from.dtype) && i < count; ++i) {
      copy_scale(out + key_page(to, page, 0), i, at(cache, blocks, positions[i], false), slot(positions[i]));
      copy_scale(values, i, at(cache, blocks, positions[i], true), slot(positions[i]));
    }
  }

 private:
  int64_t slot(int64_t position) const { return position % from.block_size; }
  const char* at(const char* cache, const int32_t* blocks, int64_t position, bool is_value) const {
    const int64_t block = blocks[position / from.block_size];
    return cache + (is_value ? value_page(from, block, 0) : key_page(from, block, 0)) * size;
  }

  template <class Unit>
  void copy_units(char* out, const char* const* in, int64_t first, int64_t end) const {
    auto* group = reinterpret_cast<Unit*>(out) + first / 16 * (from.head_size / unit()) * 16;
    for (int64_t row = 0; row < from.head_size / unit(); ++row)
      for (int64_t i = 0; i < end - first; ++i)
        group[row * 16 + i] = reinterpret_cast<const Unit*>(in[i])[row * 16];
  }
  void copy_keys(char* out, const char* cache, const int32_t* blocks, const int32_t* positions, int64_t first,
                 int64_t end) const {
    const char* in[16];
    const int64_t bytes = unit() * size;
    for (int64_t i = first; i < end; ++i) {
      const int64_t s = slot(positions[i]);
      in[i - first] = at(cache, blocks, positions[i], false) + s / 16 * 16 * from.head_size * size + s % 16 * bytes;
    }
    bytes == 4 ? copy_units<uint32_t>(out, in, first, end) : copy_units<uint16_t>(out, in, first, end);
  }

  void copy_value(char* out, int64_t to_slot, const char* in, int64_t from_slot) const {
    const int64_t head = from.head_size, n = unit();
    if (n == 1) {
      std::memcpy(out + to_slot * head * size, in + from_slot * head * size, size_t(head * size));
      return;
    }
    out += to_slot / n * n * head + to_slot % n;  // 8 bits
    in += from_slot / n * n * head + from_slot % n;
    for (int64_t d = 0; d < head; ++d) out[d * n] = in[d * n];
  }
  // Pairs of slots of bf16, each from half of a pair.
  void copy_pairs(char* out, const char* cache, const int32_t* blocks, const int32_t* positions, int64_t count) const {
    const int64_t head = from.head_size;
    for (int64_t i = 0; i < count; i += 2) {
      const int32_t low = positions[i], high = positions[i + 1 < count ? i + 1 : i];
      const auto* a = reinterpret_cast<const uint32_t*>(at(cache, blocks, low, true)) + slot(low) / 2 * head;
      const auto* b = reinterpret_cast<const uint32_t*>(at(cache, blocks, high, true)) + slot(high) / 2 * head;
      const uint32_t down = uint32_t(slot(low) % 2 * 16), up = uint32_t(slot(high) % 2 * 16);
      auto* pair = reinterpret_cast<uint32_t*>(out) + i / 2 * head;
      for (int64_t d = 0; d < head; ++d) pair[d] = (a[d] >> down & 0xffffu) | b[d] >> up << 16;
    }
  }
  void copy_scale(char* out, int64_t to_slot, const char* in, int64_t from_slot) const {
    const int64_t behind = padded() * from.head_size;
    std::memcpy(out + behind + to_slot * 4, in + behind + from_slot * 4, 4);
  }
};

bool is_cache(const void* cache, int32_t dtype, int64_t num_blocks, int64_t block_size, int64_t page, int64_t block,
              int64_t head_size) {
  return cache != nullptr && dtype >= QR_FLOAT32 && dtype < kNumCacheTypes &&
         page == qr_cache_page(dtype, block_size, head_size) && are_blocks(num_blocks, 1, page, block);
}

}  // namespace

extern "C" {

int32_t qr_select_tokens(int32_t* selected, int64_t num_selected, const void* query, int32_t dtype,
                         const float* weights, int64_t heads, int64_t size, const void* cache, int32_t cache_dtype,
                         int64_t num_blocks, int64_t block_size, int64_t page, int64_t block, int64_t head_size,
                         const int32_t* query_start, const int32_t* seq_lens, int64_t sequences,
                         const int32_t* block_tables, int64_t table_stride) {
  if (kernels() == nullptr) return QR_ESTATE;
  if (!is_dtype(dtype) || heads <= 0 || size <= 0 || size % 4 != 0 || size > head_size || head_size % 4 != 0 ||
      num_selected <= 0 || num_selected > INT32_MAX || !are_sizes(heads, size) || !are_sizes(sequences, table_stride))
    return QR_EINVAL;
  if (sequences == 0) return QR_OK;
  if (!are_there(selected, query, weights, query_start, seq_lens, block_tables) ||
      !is_cache(cache, cache_dtype, num_blocks, block_size, page, block, head_size))
    return QR_EINVAL;
  const Steps steps{query_start, seq_lens, sequences, block_tables, table_stride, block_size, num_blocks};
  if (!steps.are_valid() || !are_sizes(steps.tokens(), heads, size) || !are_sizes(steps.tokens(), num_selected))
    return QR_EINVAL;
  each_whole(steps, num_selected, [&](const Token& token) {
    choose_all(selected + token.index * num_selected, num_selected, token.position + 1);
  });
  const CacheLayout layout{cache_dtype, num_blocks, 1, block_size, head_size, page, block};
  const IndexArgs args{query, dtype, weights, cache, layout, heads, size};
  const int64_t pages = std::max(int64_t(1), kPiecePositions / block_size);  // of a piece
  const int64_t row = round_up(steps.longest(), block_size), ranges = divide_up(row, pages * block_size);
  const int64_t together = std::clamp(kWaveBytes / (row * 4), int64_t(1), std::max(int64_t(1), steps.tokens()));
  std::atomic<int32_t> status{QR_OK};
  return each_wave(steps, num_selected, together, [&](const Token* tokens, int64_t count) {
    auto* scores = static_cast<float*>(scratch(6, together * row * 4));
    if (scores == nullptr) return int32_t(QR_ENOMEM);
    parallel_for(count * ranges, [&](int64_t piece) {
      const Token& token = tokens[piece / ranges];
      const int64_t begin = piece % ranges * pages, end = token.position / block_size + 1;
      if (begin >= end) return;
      kernels()->index_scores[cache_dtype](
          args, IndexPiece{token.index, steps.blocks(token.sequence), begin, std::min(begin + pages, end),
                           scores + piece / ranges * row});
    });
    parallel_for(count, [&](int64_t i) {
      auto* sorted = static_cast<float*>(scratch(1, row * 4));
      if (sorted == nullptr) return status.store(QR_ENOMEM);
      choose(selected + tokens[i].index * num_selected, num_selected, scores + i * row, tokens[i].position + 1, sorted);
    });
    return int32_t(status.load());
  });
}

int32_t qr_selected_attention(void* out, const void* query, int32_t dtype, const void* cache, int32_t cache_dtype,
                              int64_t num_blocks, int64_t block_size, int64_t page, int64_t block,
                              const int32_t* query_start, const int32_t* seq_lens, int64_t sequences,
                              const int32_t* block_tables, int64_t table_stride, const int32_t* selected,
                              int64_t num_selected, int64_t heads, int64_t head_size, float scale,
                              const float* sinks) {
  if (kernels() == nullptr) return QR_ESTATE;
  if (!is_dtype(dtype) || heads <= 0 || head_size <= 0 || num_selected <= 0 || num_selected > INT32_MAX ||
      !are_sizes(heads, head_size) || !are_sizes(sequences, table_stride) || !(scale > 0.0f && is_finite(scale)))
    return QR_EINVAL;
  if (sequences == 0) return QR_OK;
  if (!are_there(out, query, query_start, seq_lens, block_tables, selected) ||
      !is_cache(cache, cache_dtype, num_blocks, block_size, page, block, head_size))
    return QR_EINVAL;
  const Steps steps{query_start, seq_lens, sequences, block_tables, table_stride, block_size, num_blocks};
  if (!steps.are_valid() || !are_sizes(steps.tokens(), heads, head_size)) return QR_EINVAL;
  const int64_t row_bytes = heads * head_size * bytes_of(dtype);
  const auto attend = [&](int64_t first_token, const void* pages, int64_t count_blocks, int64_t apart,
                          const int32_t* starts, const int32_t* lengths, int64_t count, const int32_t* tables,
                          int64_t stride) {
    return qr_paged_attention(static_cast<char*>(out) + first_token * row_bytes, dtype,
                              static_cast<const char*>(query) + first_token * row_bytes, dtype, pages, cache_dtype,
                              count_blocks, block_size, page, apart, starts, lengths, count, tables, stride, heads, 1,
                              head_size, scale, 0.0f, 0, nullptr, sinks);
  };

  // 1. tokens that attend to all that they see, in runs of sequences that follow each other
  auto* arrays = static_cast<int32_t*>(scratch(1, (2 * sequences + 1) * 4));
  if (arrays == nullptr) return QR_ENOMEM;
  for (int64_t r = 0; r < sequences;) {
    int32_t *starts = arrays, *lengths = arrays + sequences + 1;
    const int64_t first = r;
    starts[0] = 0;
    for (bool is_whole = true; is_whole && r < sequences; ++r) {
      const int64_t count = steps.count_whole(r, num_selected);
      starts[r - first + 1] = starts[r - first] + int32_t(count);
      lengths[r - first] = count == 0 ? 0 : int32_t(steps.first_position(r) + count);
      is_whole = count == steps.count(r);
    }
    if (starts[r - first] == 0) continue;
    const int32_t status = attend(query_start[first], cache, num_blocks, block, starts, lengths, r - first,
                                  steps.blocks(first), table_stride);
    if (status != QR_OK) return status;
  }

  // 2. the others, whose tokens are gathered
  const int64_t size = bytes_of(cache_dtype), own_pages = divide_up(num_selected, block_size);
  const int64_t token_bytes = 2 * own_pages * page * size;
  const int64_t together = std::clamp(kWaveBytes / token_bytes, int64_t(1), std::max(int64_t(1), steps.tokens()));
  return each_wave(steps, num_selected, together, [&](const Token* tokens, int64_t count) {
    const OwnPages own(together, own_pages, page * size);
    if (own.data == nullptr) return int32_t(QR_ENOMEM);
    for (int64_t i = 0; i < together; ++i) own.lengths[i] = int32_t(num_selected);
    std::atomic<bool> are_positions{true};
    const Gather gather{CacheLayout{cache_dtype, num_blocks, 1, block_size, head_size, page, block},
                        CacheLayout{cache_dtype, own.count, 1, block_size, head_size, page, page}, size};
    parallel_for(count * own_pages, [&](int64_t piece) {
      const Token& token = tokens[piece / own_pages];
      const int64_t first = piece % own_pages * block_size, end = std::min(first + block_size, num_selected);
      const int32_t* positions = selected + token.index * num_selected;
      for (int64_t i = first; i < end; ++i)
        if (positions[i] < 0 || positions[i] > token.position) return are_positions.store(false);
      gather.copy(own.data, static_cast<const char*>(cache), steps.blocks(token.sequence), positions + first,
                  end - first, piece);
    });
    if (!are_positions.load()) return int32_t(QR_EINVAL);
    for (int64_t i = 0; i < count;) {  // tokens that follow each other
      int64_t next = i + 1;
      while (next < count && tokens[next].index == tokens[next - 1].index + 1) ++next;
      const int32_t status = attend(tokens[i].index, own.data, own.count, page, own.starts, own.lengths,
                                    next - i, own.tables + i * own_pages, own_pages);
      if (status != QR_OK) return status;
      i = next;
    }
    return int32_t(QR_OK);
  });
}
}
