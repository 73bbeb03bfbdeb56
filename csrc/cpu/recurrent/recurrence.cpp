// Causal convolutions, the scans of Mamba and Mamba 2, and the norm behind a scan.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "states.h"

namespace qr {
namespace {

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

}  // namespace
}  // namespace qr

using namespace qr;

extern "C" {

int32_t qr_causal_conv(float* out, void* rounded, const void* x, const void* factor, const void* gate, int32_t dtype,
                       int64_t stride, const float* weight, const float* bias, int32_t activation, int64_t tokens,
                       int64_t channels, int64_t block, int64_t width, float* states, int64_t num_pages, int64_t half,
                       const int32_t* query_start, const int32_t* reads, const int32_t* writes, int64_t sequences) {
  if (kernels() == nullptr) return QR_ESTATE;
  if (!is_dtype(dtype) || (activation != QR_NONE && activation != QR_SILU) || channels <= 0 || width <= 0 ||
      block <= 0 || channels % block != 0 || width > kConvWidth || stride < channels || !are_sizes(tokens, stride) || !are_sizes(width, channels) ||
      weight == nullptr || (tokens > 0 && (x == nullptr || (out == nullptr && rounded == nullptr))))
    return QR_EINVAL;
  const States all{states, num_pages, half, query_start, reads, writes, sequences};
  if (!all.are_valid(tokens, (width - 1) * channels)) return QR_EINVAL;
  const ConvArgs args{out, rounded, x, factor, gate, dtype, stride, bias, activation == QR_SILU, channels, width,
                      tokens, block};
  int64_t num_chunks = 0;
  const Chunk* chunks = cut(all, num_chunks);
  if (chunks == nullptr) return QR_ENOMEM;
  const int64_t parts = divide_up(block, kConvChannels), pieces = channels / block * parts;
  std::atomic<int32_t> status{QR_OK};
  parallel_for(num_chunks * pieces, [&](int64_t index) {
    const int64_t first = index % pieces / parts * block, begin = first + index % parts * kConvChannels;
    const int32_t result = convolve(args, all, weight, chunks[index / pieces], begin,
                                    std::min(first + block, begin + kConvChannels));
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
  return scan(all, Units{first, channels, state_size, kScanChannels},
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
  return scan(all, Units{first, heads, head_size * state_size},
              [&](const ScanPiece& piece) { kernels()->mamba2_scan(args, piece); });
}

int32_t qr_gated_norm(void* out, int32_t dtype, float* x, int64_t x_stride, const void* gate, int64_t gate_stride,
                      const float* weight, int32_t shares_weight, int64_t tokens, int64_t groups, int64_t cols,
                      float eps, int32_t norms_before_gate, int32_t by_sigmoid) {
  if (kernels() == nullptr) return QR_ESTATE;
  if (!is_dtype(dtype) || groups <= 0 || cols <= 0 || !are_sizes(tokens, groups, cols) || x_stride < groups * cols ||
      gate_stride < groups * cols || !are_sizes(tokens, x_stride) || !are_sizes(tokens, gate_stride) ||
      !is_epsilon(eps) || (tokens > 0 && !are_there(out, x, gate)))
    return QR_EINVAL;
  const GatedNormArgs args{out, dtype, x, x_stride, gate, gate_stride, weight, groups, cols, eps,
                           norms_before_gate != 0, shares_weight != 0, by_sigmoid != 0};
  for_rows(kernels()->gated_norm, args, tokens * groups, cols);
  return QR_OK;
}

}  // extern "C"
