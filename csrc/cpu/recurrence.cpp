// Recurrent layers: pieces are (sequence, block of channels or head), each with its part of the sequence's state.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "arguments.h"
#include "kernels.h"
#include "threads.h"

namespace qr {
namespace {

constexpr int64_t kPieceElements = 16 * 1024;

bool is_dtype(int32_t dtype) { return dtype >= QR_FLOAT32 && dtype <= QR_FLOAT16; }

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

// Weights [channels, width] of a block of channels, column by column; zeros beside the last channel.
void columns_of(float* columns, const float* weight, int64_t begin, int64_t end, int64_t width) {
  if (end - begin < kConvChannels) std::memset(columns, 0, size_t(width * kConvChannels) * 4);
  for (int64_t channel = begin; channel < end; ++channel)
    for (int64_t column = 0; column < width; ++column)
      columns[column * kConvChannels + channel - begin] = weight[channel * width + column];
}

// Some tokens of a sequence.
struct Chunk {
  int64_t sequence, begin, end;
};

// Cut every sequence into chunks; one without tokens is a chunk, too, for its state moves on. Null when memory is short.
Chunk* cut(const States& states, int64_t& num_chunks) {
  const auto chunks_of = [&](int64_t r) {
    return std::max(int64_t(1), divide_up(states.query_start[r + 1] - states.query_start[r], kConvTokens));
  };
  num_chunks = 0;
  for (int64_t r = 0; r < states.sequences; ++r) num_chunks += chunks_of(r);
  auto* chunks = static_cast<Chunk*>(scratch(1, std::max(int64_t(1), num_chunks) * int64_t(sizeof(Chunk))));
  if (chunks == nullptr) return nullptr;
  Chunk* next = chunks;
  for (int64_t r = 0; r < states.sequences; ++r)
    for (int64_t i = 0; i < chunks_of(r); ++i) {
      const int64_t begin = states.query_start[r] + i * kConvTokens;
      *next++ = Chunk{r, begin, std::min(int64_t(states.query_start[r + 1]), begin + kConvTokens)};
    }
  return chunks;
}

int32_t convolve(const ConvArgs& args, const States& states, const float* weight, const Chunk& chunk, int64_t begin,
                 int64_t end) {
  auto* columns = static_cast<float*>(scratch(0, 3 * args.width * kConvChannels * 4));
  if (columns == nullptr) return QR_ENOMEM;
  float *past = columns + args.width * kConvChannels, *last = past + args.width * kConvChannels;
  columns_of(columns, weight, begin, end, args.width);
  const int64_t num_past = args.width - 1, num_before = chunk.begin - states.query_start[chunk.sequence];
  const bool is_last = chunk.end == states.query_start[chunk.sequence + 1];
  for (int64_t i = num_before; i < num_past; ++i)
    states.get_before(past + i * kConvChannels, chunk.sequence, i * args.channels + begin, end - begin);
  kernels()->causal_conv(
      args, ConvPiece{chunk.begin, chunk.end, begin, end, num_before, columns, past, is_last ? last : nullptr});
  for (int64_t i = 0; is_last && i < num_past; ++i)
    states.put(last + i * kConvChannels, states.writes[chunk.sequence], i * args.channels + begin, end - begin);
  return QR_OK;
}

// Run kernel(piece) on all (sequence, block) pairs; a block of `size` numbers of the state, the last one shorter.
template <class Kernel>
int32_t scan(const States& states, int64_t first, int64_t units, int64_t units_at_once, int64_t numbers_of_unit,
             const Kernel& kernel) {
  const int64_t blocks = divide_up(units, units_at_once);
  std::atomic<int32_t> status{QR_OK};
  parallel_for(states.sequences * blocks, [&](int64_t index) {
    const int64_t r = index / blocks, begin = index % blocks * units_at_once;
    const int64_t end = std::min(units, begin + units_at_once);
    const int32_t result = states.advance(
        r, first + begin * numbers_of_unit, (end - begin) * numbers_of_unit, [&](const float* before, float* after) {
          kernel(ScanPiece{states.query_start[r], states.query_start[r + 1], begin, end, before, after});
        });
    if (result != QR_OK) status.store(result);
  });
  return status.load();
}

template <class Args>
void for_rows(void (*kernel)(const Args&, int64_t, int64_t), const Args& args, int64_t rows, int64_t cols) {
  const int64_t step = std::max(int64_t(1), kPieceElements / cols);
  parallel_for(divide_up(rows, step),
               [&](int64_t index) { kernel(args, index * step, std::min(rows, (index + 1) * step)); });
}

}  // namespace
}  // namespace qr

using namespace qr;

extern "C" {

int32_t qr_causal_conv(float* out, void* rounded, const void* x, const void* factor, const void* gate, int32_t dtype,
                       int64_t stride, const float* weight, const float* bias, int32_t activation, int64_t tokens,
                       int64_t channels, int64_t width, float* states, int64_t num_pages, int64_t half,
                       const int32_t* query_start, const int32_t* reads, const int32_t* writes, int64_t sequences) {
  if (kernels() == nullptr) return QR_ESTATE;
  if (!is_dtype(dtype) || (activation != QR_NONE && activation != QR_SILU) || channels <= 0 || width <= 0 ||
      width > kConvWidth || stride < channels || !are_sizes(tokens, stride) || !are_sizes(width, channels) ||
      weight == nullptr || (tokens > 0 && (x == nullptr || (out == nullptr && rounded == nullptr))))
    return QR_EINVAL;
  const States all{states, num_pages, half, query_start, reads, writes, sequences};
  if (!all.are_valid(tokens, (width - 1) * channels)) return QR_EINVAL;
  const ConvArgs args{out, rounded, x, factor, gate, dtype, stride, bias, activation == QR_SILU, channels, width};
  int64_t num_chunks = 0;
  const Chunk* chunks = cut(all, num_chunks);
  if (chunks == nullptr) return QR_ENOMEM;
  const int64_t blocks = divide_up(channels, kConvChannels);
  std::atomic<int32_t> status{QR_OK};
  parallel_for(num_chunks * blocks, [&](int64_t index) {
    const int64_t begin = index % blocks * kConvChannels;
    const int32_t result =
        convolve(args, all, weight, chunks[index / blocks], begin, std::min(channels, begin + kConvChannels));
    if (result != QR_OK) status.store(result);
  });
  return status.load();
}

int32_t qr_mamba_derived(void* time, int32_t dtype, float* derived, int64_t tokens, int64_t rank, int64_t state_size,
                         const float* time_norm, const float* write_norm, const float* read_norm, int32_t is_normed,
                         float eps) {
  if (kernels() == nullptr) return QR_ESTATE;
  if (!is_dtype(dtype) || rank <= 0 || state_size <= 0 || !are_sizes(tokens, rank) ||
      !are_sizes(tokens, 2, state_size) || !is_epsilon(eps) || (tokens > 0 && !are_there(time, derived)))
    return QR_EINVAL;
  const DerivedArgs args{time, dtype, derived, rank, state_size, {time_norm, write_norm, read_norm}, is_normed != 0, eps};
  for_rows(kernels()->mamba_derived, args, tokens, rank + 2 * state_size);
  return QR_OK;
}

int32_t qr_mamba_scan(void* out, int32_t dtype, const float* x, const float* time, const void* gate,
                      int64_t gate_stride, const float* write, const float* read, int64_t derived_stride,
                      const float* decay, const float* skip, int64_t tokens, int64_t channels, int64_t state_size,
                      int64_t first, float* states, int64_t num_pages, int64_t half, const int32_t* query_start,
                      const int32_t* reads, const int32_t* writes, int64_t sequences) {
  if (kernels() == nullptr) return QR_ESTATE;
  if (!is_dtype(dtype) || channels <= 0 || state_size <= 0 || !are_sizes(first) || gate_stride < channels ||
      derived_stride < state_size || !are_sizes(tokens, gate_stride) || !are_sizes(tokens, derived_stride) ||
      !are_sizes(channels, state_size) || !are_there(decay, skip) ||
      (tokens > 0 && !are_there(out, x, time, gate, write, read)))
    return QR_EINVAL;
  const States all{states, num_pages, half, query_start, reads, writes, sequences};
  if (!all.are_valid(tokens, first + channels * state_size)) return QR_EINVAL;
  const MambaArgs args{out,  dtype, x,    time,     gate,      gate_stride, write, read, derived_stride,
                       decay, skip,  channels, state_size};
  return scan(all, first, channels, kScanChannels, state_size,
              [&](const ScanPiece& piece) { kernels()->mamba_scan(args, piece); });
}

int32_t qr_mamba2_scan(float* x, const void* time, int32_t dtype, int64_t time_stride, const float* time_bias,
                       const float* decay, const float* skip, int64_t tokens, int64_t heads, int64_t groups,
                       int64_t head_size, int64_t state_size, int64_t first, float* states, int64_t num_pages,
                       int64_t half, const int32_t* query_start, const int32_t* reads, const int32_t* writes,
                       int64_t sequences) {
  if (kernels() == nullptr) return QR_ESTATE;
  if (!is_dtype(dtype) || heads <= 0 || groups <= 0 || heads % groups != 0 || head_size <= 0 || state_size <= 0 ||
      !are_sizes(first) || time_stride < heads || !are_sizes(tokens, time_stride) ||
      !are_sizes(heads, head_size, state_size) || !are_sizes(tokens, heads, head_size) ||
      !are_sizes(tokens, 2, groups, state_size) || !are_there(time_bias, decay, skip) ||
      (tokens > 0 && !are_there(x, time)))
    return QR_EINVAL;
  const States all{states, num_pages, half, query_start, reads, writes, sequences};
  if (!all.are_valid(tokens, first + heads * head_size * state_size)) return QR_EINVAL;
  const int64_t stride = heads * head_size + 2 * groups * state_size;
  const Mamba2Args args{x,     stride, time,  dtype,  time_stride, time_bias,
                        decay, skip,   heads, groups, head_size,   state_size};
  return scan(all, first, heads, 1, head_size * state_size,
              [&](const ScanPiece& piece) { kernels()->mamba2_scan(args, piece); });
}

int32_t qr_gated_norm(void* out, int32_t dtype, float* x, int64_t x_stride, const void* gate, int64_t gate_stride,
                      const float* weight, int64_t tokens, int64_t groups, int64_t cols, float eps,
                      int32_t norms_before_gate) {
  if (kernels() == nullptr) return QR_ESTATE;
  if (!is_dtype(dtype) || groups <= 0 || cols <= 0 || !are_sizes(tokens, groups, cols) || x_stride < groups * cols ||
      gate_stride < groups * cols || !are_sizes(tokens, x_stride) || !are_sizes(tokens, gate_stride) ||
      !is_epsilon(eps) || (tokens > 0 && !are_there(out, x, gate)))
    return QR_EINVAL;
  const GatedNormArgs args{out, dtype, x, x_stride, gate, gate_stride, weight, groups, cols, eps, norms_before_gate != 0};
  for_rows(kernels()->gated_norm, args, tokens * groups, cols);
  return QR_OK;
}

}  // extern "C"
