// The table of kernels that each instruction set fills: what runs on one thread, on one piece of work.
//
// The op files (gemm.cpp, attention.cpp, ...) are compiled for any processor of the kind, split the work and call through
// `kernels()`; the isa/*.cpp files compile the templates of kernels/ with their own flags.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "quire_cpu.h"

namespace qr {

// Columns (output features) of one packed panel of a weight; every instruction set uses the same layout.
constexpr int64_t kPanel = 32;
// Weights are padded with zeros to a multiple of this along K when they are 16 bits wide (the depth of an AMX tile).
constexpr int64_t kDepth = 32;
// Inputs that may share a scale of a quantised weight: 16, 32, 64 or 128.
constexpr int64_t kLeastGroup = 16, kNumGroups = 4, kNumSmallGroups = 2, kNumLargeGroups = 3;
constexpr int64_t kFloat8Group = 128, kTernaryGroup = 128;
// Inputs whose groups have nested scales under one float16.
constexpr int64_t kNestedBlock = 256;
// Weights with nested scales: those of GGUF's Q6_K, Q5_K, Q4_K, Q3_K, Q2_K and IQ4_XS.
enum NestedKind {
  kNestedInt6,
  kNestedInt5,
  kNestedInt4,
  kNestedInt3,
  kNestedInt2,
  kNestedLevels,
  kNumNested
};
// Rows of x that one piece of work multiplies at most.
constexpr int64_t kBlockRows = 256;

inline int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }
inline int64_t divide_up(int64_t value, int64_t by) { return (value + by - 1) / by; }
// Of the nested scales of a panel's block; see qr_weight.
inline int64_t nested_bytes(int64_t kinds, int64_t group) { return kinds * (2 + kNestedBlock / group) * kPanel; }
// Of activations.
inline bool is_dtype(int32_t dtype) { return dtype >= QR_FLOAT32 && dtype <= QR_FLOAT16; }
// Of a cache whose tokens have scales.
inline bool has_scales(int32_t dtype) { return dtype == QR_CACHE_INT8 || dtype == QR_CACHE_FLOAT8; }
inline int64_t bytes_of(int32_t dtype) { return dtype == QR_FLOAT32 ? 4 : has_scales(dtype) ? 1 : 2; }
// Of one element, wherever it stands.
inline int32_t element_of(int32_t dtype) { return dtype == QR_BFLOAT16_TILES ? int32_t(QR_BFLOAT16) : dtype; }

// Whether an op whose elements are of `dtype` may write its output of so many columns as `out_dtype`.
inline bool is_output_of(int32_t out_dtype, int32_t dtype, int64_t columns) {
  return out_dtype == dtype || (element_of(out_dtype) == dtype && columns % 32 == 0);
}

// Where the elements of activations [rows, columns] stand: one row after the other, or in tiles of 32 x 32.
struct Places {
  int64_t columns, step;  // step: from 32 columns of a row to the next 32

  Places(int64_t columns, int32_t dtype) : columns(columns), step(dtype == QR_BFLOAT16_TILES ? 32 * 32 : 32) {}
  int64_t row(int64_t r) const { return step == 32 ? r * columns : r / 32 * 32 * columns + r % 32 * 32; }
  int64_t column(int64_t c) const { return c / 32 * step + c % 32; }
};

// What becomes of the outputs of a product of which only the largest of each row is wanted: of each row and panel, the
// largest value and its column in the panel, as `find_largest` has them. Rows lie `stride` panels apart.
struct PanelMaxima {
  float* values;  // null: the outputs themselves are wanted
  uint8_t* columns;
  int64_t stride;
  float soft_cap;  // of the outputs, before; 0: none
};

struct GemmArgs {
  const void* x;  // [rows, k], as the kernel's `prepare` left it, or in tiles
  const void* packed;
  int64_t rows, n, k;  // n: columns of the output (f of a gated layer)
  int64_t panel_bytes;
  bool compact;       // bf16 panels are compact ones (compact.h)
  int64_t up_panels;  // gated: panels between a gate panel and its up panel; 0: not gated
  const float* bias;
  int32_t activation;
  const void* residual;
  int32_t residual_dtype;
  void* out;
  int32_t out_dtype;
  int64_t out_columns;  // of the rows of out and residual, where they are more than n; else 0
  bool past_caches;     // the output outgrows the caches and its rows are whole cache lines
  PanelMaxima maxima;   // instead of out; activation, residual and gates are not computed then
  // quantised weights only; see qr_weight
  const void* scales;
  const int8_t* zero_points;
  const uint16_t* offsets;
  const int8_t* levels;
  const int32_t* order;
  float unit;
  int64_t group;
};

// One way to multiply: a (weight dtype, activation dtype) pair on one instruction set.
struct Gemm {
  // Bytes of the prepared form of `rows` rows of length k; 0: x is used as it is.
  int64_t (*prepared_bytes)(int64_t rows, int64_t k, int32_t x_dtype);
  // Prepare rows [begin, end) of x, unless it lies in tiles. Of integer weights that have an order, it is x[order].
  void (*prepare)(void* prepared, const void* x, int32_t x_dtype, int64_t rows, int64_t k, int64_t begin, int64_t end,
                  const int32_t* order);
  // Rows [row_begin, row_end) (row_begin a multiple of 32) of panels [panel_begin, panel_end).
  void (*run)(const GemmArgs& args, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end);
  bool reads_tiles = false;  // of more than 32 rows and a k of whole tiles
};

// A row of a mixture of experts: total + weights[0] * (outputs of places[0]) + ... in this order, then the residual.
struct WeighedSum {
  void* out;  // [n]
  int32_t dtype;
  const float* total;  // of what came before; null: nothing did
  const float* outputs;  // [places, n]
  const int32_t* places;
  const float* weights;
  int64_t count, n;
  const void* residual;  // of dtype, or null
};

// What stands between a gate and its product with the up half (`qr_gating`).
struct Gating {
  int32_t activation;
  float limit = HUGE_VALF, slope = 1.0f, offset = 0.0f;

  bool is_plain() const { return limit == HUGE_VALF && slope == 1.0f && offset == 0.0f; }
};

struct NormArgs {
  void* out;
  int32_t out_dtype;  // dtype, or that in tiles
  const void* x;
  int32_t dtype;
  const void* residual;  // of dtype, or null
  const float* weight;
  const float* bias;  // layer norm only, or null
  int64_t cols;
  float eps;
};

// How one layer's cache is laid out; see kernels/cache.h.
struct CacheLayout {
  int32_t dtype;
  int64_t num_blocks, kv_heads, block_size, head_size;
  int64_t page;   // elements between the pages of two heads
  int64_t block;  // elements between two blocks: those of the pages, or more where layers of others lie between them
};

// Always inline: what an instruction set's unit makes of it must not become the symbol that others call.
#define QR_INLINE_MEMBER inline __attribute__((always_inline))

// How a cache of rows is laid out (qr_store_rows); in elements.
struct RowLayout {
  int64_t num_blocks, of_block, width, block;

  // From the first half of a row to the second.
  QR_INLINE_MEMBER int64_t half() const { return num_blocks * block; }
  // Row `index` of a sequence that has these blocks.
  QR_INLINE_MEMBER int64_t row(const int32_t* blocks, int64_t index) const {
    return blocks[index / of_block] * block + index % of_block * width;
  }
  // Elements [first, first + count), of `size` bytes each, of the row that begins at `row`.
  QR_INLINE_MEMBER void copy(void* out, const void* row, int64_t first, int64_t count, int64_t size) const {
    const int64_t left = width - first, in_first = left < 0 ? 0 : left < count ? left : count;
    const char* from = static_cast<const char*>(row) + first * size;
    copy_bytes(static_cast<char*>(out), from, in_first * size);
    copy_bytes(static_cast<char*>(out) + in_first * size, from + (half() + in_first - width) * size,
               (count - in_first) * size);
  }

 private:
  // Halves of rows are short: a call for each takes three times as long.
  static QR_INLINE_MEMBER void copy_bytes(char* out, const char* in, int64_t count) {
    int64_t i = 0;
    for (; i + 32 <= count; i += 32) std::memcpy(out + i, in + i, 32);
    if (i < count) std::memcpy(out + i, in + i, size_t(count - i));
  }
};

struct RopeArgs {
  void* query;
  const void* qkv;
  int32_t qkv_dtype;  // dtype, or that in tiles
  int32_t dtype;
  const int64_t* positions;
  const float* cos_sin;  // or null
  const float* q_norm;   // or null
  const float* k_norm;   // or null
  void* cache;
  CacheLayout layout;
  const int64_t* slots;
  int64_t heads, rotary_dim;
  bool interleaved;
  float eps;
  const float* key_scales;    // [kv_heads], or null
  const float* value_scales;  // [kv_heads], or null
};

// Kinds of elements that a cache may have.
constexpr int32_t kNumCacheTypes = QR_CACHE_FLOAT8 + 1;

struct AttentionArgs {
  void* out;
  int32_t out_dtype;  // dtype, or that in tiles
  const void* query;
  int32_t dtype;
  const void* cache;
  CacheLayout layout;
  const int32_t* query_start;
  const int32_t* seq_lens;
  const int32_t* block_tables;
  int64_t table_stride;
  int64_t heads;
  float scale, soft_cap;  // soft_cap 0: none
  int64_t window;         // 0: none
  const float* slopes;    // [heads], or null
  const float* sinks;     // [heads], or null
};

// Rows of queries that attention works on at once: (token, query head) pairs of one kv head, two AMX tiles of them.
constexpr int64_t kQueryRows = 32;
// Such blocks of rows that one piece of attention takes at most: the pages of a split stay in L2 for all of them.
constexpr int64_t kQueryBlocks = 4;
// Context tokens whose softmax is taken at once. Fixed in tokens, so that how a context was computed leaves no trace.
constexpr int64_t kSplitTokens = 256;

struct AttentionPiece {
  int64_t sequence, kv_head, row_begin, row_end;  // row = token of the sequence in this step * group + head of the group
  int64_t split_begin, split_end;
  float* partials;  // where each split is left for `merge_splits`; null: all splits are here, out is written
  const AttentionPiece* next;  // what this thread takes up after it; null: not known
};

using AttendFn = void (*)(const AttentionArgs& args, const AttentionPiece& piece);

struct IndexArgs {
  const void* query;  // [tokens, heads, size]
  int32_t dtype;
  const float* weights;  // [tokens, heads]
  const void* cache;
  CacheLayout layout;  // of one kv head
  int64_t heads, size;
};

// Pages [page_begin, page_end) of what one token sees.
struct IndexPiece {
  int64_t token;
  const int32_t* blocks;
  int64_t page_begin, page_end;
  float* scores;  // by position, of whole pages
};

using IndexFn = void (*)(const IndexArgs& args, const IndexPiece& piece);

// The largest product of a query with a key of each block of `run` tokens; keys are rows.
struct BlockScoreArgs {
  const void* query;  // [tokens, heads, size]
  int32_t dtype;
  const void* keys;
  int32_t keys_dtype;
  RowLayout layout;
  int64_t heads, size, run;
};

// Blocks [begin, end) of a sequence, as far as some tokens see them, which follow each other.
struct BlockScorePiece {
  const int32_t* pages;
  int64_t first_token, first_position, tokens;
  int64_t begin, end;
  float* scores;  // [tokens, heads, stride]
  int64_t stride;
};

// Entries of compressed attention; see qr_compress.
struct CompressArgs {
  void* entries;
  int32_t dtype;
  RowLayout layout;
  const void* tail;
  int32_t tail_dtype;
  RowLayout tail_layout;
  const float* bias;  // [rate, features of the products]
  int64_t rate, reach;
  const float* norms[2];  // of the parts
  int64_t sizes[2];       // 0: there is no second part
  float eps;
  const float* cos_sin;
  int64_t rotated;
};

// One entry of a sequence, and where the sequence's rows are.
struct CompressPiece {
  const int32_t *pages, *tail_pages;
  int64_t entry;
};

// The last `rotated` features of each head, pairs of neighbours, turned by the token's position; see qr_rotate_last.
struct RotateArgs {
  void* x;  // [tokens, heads, size]
  int32_t dtype;
  const int64_t* positions;
  const float* cos_sin;  // [positions, rotated], cosines first
  int64_t heads, size, rotated;
  bool backward;
};

// Streams of tokens, read: out = the sum over them of (sigmoid + eps) * stream; see qr_read_streams.
struct HyperArgs {
  void* out;       // [tokens, size]
  float* writing;  // [tokens, count (1 + count)], without iterations [tokens, count], or null
  const void* streams;
  int32_t dtype;
  const float* products;  // [tokens, count + those of writing]
  const float *scale, *base;
  int64_t count, size;
  float eps, norm_eps, magnitude, least_added;
  int64_t iterations;

  int64_t num_written() const { return writing == nullptr ? 0 : iterations == 0 ? count : count * (1 + count); }
};
struct StreamWriteArgs {
  void* out;
  const void* streams;
  int32_t dtype;
  const void* added;  // [tokens, size]
  const float* writing;
  int64_t count, size;
  bool has_matrix;
};

// Channels and tokens that one piece of a convolution takes: long stretches of few rows, which prefetchers follow.
constexpr int64_t kConvChannels = 256;
constexpr int64_t kConvTokens = 32;
// Channels of a piece of a Mamba scan, whose state stays in L1.
constexpr int64_t kScanChannels = 64;
// Tokens that a convolution sees at most, which bounds the weights of a piece.
constexpr int64_t kConvWidth = 64;

struct ConvArgs {
  float* out;     // [tokens, channels], or null
  void* rounded;  // the same in dtype, [channels / block][tokens][block], or null
  const void *x, *factor, *gate;  // rows `stride` apart; out = silu?(conv(x * factor)) * gate; factor, gate may be null
  int32_t dtype;
  int64_t stride;
  const float* bias;  // or null
  bool silu;
  int64_t channels, width;
  int64_t tokens, block;
};

// Some tokens of one sequence, and some channels of one block.
struct ConvPiece {
  int64_t token_begin, token_end, channel_begin, channel_end;
  int64_t num_before;   // of the sequence's tokens that x has before the first
  const float* weight;  // [width][kConvChannels]
  const float* past;    // [width - 1][kConvChannels]: the inputs before all that x has
  float* last;          // [width - 1][kConvChannels]: those up to the last token; or null
};

struct DerivedArgs {
  void* time;  // [tokens, rank]
  int32_t dtype;
  float* derived;  // [tokens, rank + 2 state_size]
  int64_t rank, state_size;
  const float* norms[3];  // each may be null: ones
  bool is_normed;
  float eps;
};

struct MambaArgs {
  void* out;  // [tokens, channels]
  int32_t dtype;
  const float *x, *time;  // [tokens, channels]; time before softplus
  const void* gate;
  int64_t gate_stride;
  const float *write, *read;  // rows `derived_stride` apart
  int64_t derived_stride;
  const float *decay, *skip;  // [channels, state_size], [channels]
  int64_t channels, state_size;
};

struct Mamba2Args {
  float* x;  // rows `stride` apart: channels of all heads, which become the output; writing and reading vectors
  int64_t stride;
  const void* time;
  int32_t dtype;
  int64_t time_stride;
  const float *time_bias, *decay, *skip;  // [heads]
  int64_t heads, groups, head_size, state_size;
};

// One sequence's channels [begin, end), or head `begin`, with their state before its first token and after its last.
// There is a token, at least.
struct ScanPiece {
  int64_t token_begin, token_end, begin, end;
  const float* before;  // may be `after`
  float* after;
  bool begins;  // the sequence: its state before is zero
  float* room;
};

// Tokens whose decays, and what a head's state is written and read by, are computed at once.
constexpr int64_t kStepTokens = 16;

struct DeltaArgs {
  float* x;  // rows `stride` apart: queries and keys of the key heads, values of all heads, which become the output
  int64_t stride;
  const void *rate, *time;  // rows so many apart
  int64_t rate_stride, time_stride;
  int32_t dtype;
  bool by_channel;         // times are of each channel of a head's key, not of the head
  const float* time_bias;  // as many as times of a token
  const float* decay;      // [heads]
  float most_rate;         // times the sigmoid of a rate
  float bound;             // of the logarithms of what a token leaves of each channel, below 0; 0 for none
  int64_t heads, key_heads, key_size, value_size;

  // Floats that a piece has at hand for each token: query, key, and what the token leaves of each channel.
  int64_t room_of_token() const { return (2 + by_channel) * key_size; }
};

struct LightningArgs {
  float* out;     // [tokens, heads * head_size]
  const void* x;  // rows `stride` apart: query, key and value of each head, before SiLU
  int32_t dtype;
  int64_t stride;
  const float* decay;  // [heads]
  int64_t heads, head_size;
};

struct RgLruArgs {
  void* out;  // [tokens, channels]
  int32_t dtype;
  const float *x, *gates;  // [tokens, channels]; [channels / block][tokens][of the input, of the recurrence][block]
  const void* gate;        // [tokens, channels]
  const float* decay;      // [channels]
  int64_t tokens, channels, block;
};

struct GatedNormArgs {
  void* out;  // [tokens, groups * cols]
  int32_t dtype;
  float* x;  // becomes x * silu(gate) where that is normed
  int64_t x_stride;
  const void* gate;
  int64_t gate_stride;
  const float* weight;  // [groups * cols], or [cols] for every group; null: no norm
  int64_t groups, cols;
  float eps;
  bool norms_before_gate, shares_weight, by_sigmoid;
};

struct Largest {
  float value;
  int64_t index;
};

// One row of a weight, to be integers with scales.
struct IntegersArgs {
  int8_t* integers;  // [k]: -127 .. 127, or -8 .. 7
  void* scales;      // int8: a float32; int4: a float16 for each group, kPanel apart
  int64_t group;
  const void* row;
  int32_t dtype;
  int64_t k;
};

// What blocks of a type hold (kernels/quantized/blocks.h), up to kBlockElements elements of a row at a time.
constexpr int64_t kBlockElements = 256, kMostBlockGroups = kBlockElements / 16;
struct BlockType {
  int32_t id, format;            // of qr_blocks; the qr_format that its values need
  int64_t elements, bytes;       // of a block
  int64_t group;                 // elements that share a scale
  bool has_offsets, has_halves;  // offsets beside scales; scales that are float16 in the file
  int64_t nested;                // of qr_weight
  void (*values)(int8_t* out, const uint8_t* blocks, int64_t count);
  // offsets stay as they are where there are none.
  void (*scales)(float* scales, float* offsets, const uint8_t* blocks, int64_t count);
  // Of one block of a type with nested scales: its halves, and the codes of its groups, as qr_weight has them.
  void (*codes)(uint16_t* halves, int8_t* codes, const uint8_t* block);
};

struct Kernels {
  const char* name;
  void (*rms_norm)(const NormArgs& args, int64_t row_begin, int64_t row_end);
  void (*layer_norm)(const NormArgs& args, int64_t row_begin, int64_t row_end);
  void (*scale_add)(void* out, const void* x, const void* residual, int32_t dtype, float scale, int64_t n);
  void (*soft_cap)(float* x, float cap, int64_t n);
  void (*weighed_sum)(const WeighedSum& args);
  void (*rope_and_cache)(const RopeArgs& args, int64_t token_begin, int64_t token_end);
  AttendFn attend[kNumCacheTypes];       // by cache dtype, computed in float32
  AttendFn attend_bf16[kNumCacheTypes];  // by cache dtype, for bf16 queries
  AttendFn merge_splits;
  IndexFn index_scores[kNumCacheTypes];  // by cache dtype
  void (*block_scores)(const BlockScoreArgs& args, const BlockScorePiece& piece);
  void (*compress)(const CompressArgs& args, const CompressPiece& piece);
  // Rows [count][n] as the first slots of a page's keys and of its values, which may be null.
  void (*write_slots)(void* keys, void* values, int32_t dtype, int64_t n, const void* rows, int64_t count);
  // A bf16 panel made compact (compact.h); false where too many numbers do not fit.
  bool (*compact_panel)(char* out, const uint16_t* panel, int64_t k, uint32_t streams);
  uint32_t compact_streams;  // in which this set reads them best
  Gemm gemm_bf16;          // bf16 weights, bf16 activations
  Gemm gemm_bf16_compact;  // compact bf16 weights (compact.h), bf16 activations
  Gemm gemm_bf16_float;    // bf16 weights, compact or not, float activations (any other dtype)
  Gemm gemm_fp32;
  Gemm gemm_fp16;
  Gemm gemm_int8;                        // a scale for each output
  Gemm gemm_int8_groups[kNumGroups];
  Gemm gemm_int2;                        // a scale for each output
  Gemm gemm_int2_groups[kNumLargeGroups];
  Gemm gemm_int3[kNumLargeGroups];
  Gemm gemm_int4[kNumGroups];
  Gemm gemm_int5[kNumSmallGroups];
  Gemm gemm_int6[kNumSmallGroups];
  Gemm gemm_levels[kNumGroups];
  Gemm gemm_nested[kNumNested];
  Gemm gemm_float8;        // e4m3 weights, bf16 activations
  Gemm gemm_float8_float;  // any other
  void (*row_to_int8)(const IntegersArgs& args);
  void (*row_to_int4)(const IntegersArgs& args);
  const BlockType* (*block_type)(int32_t id);  // null where there is none
  // out[n] in float16 = x / unit
  void (*to_halves)(uint16_t* out, const float* x, float unit, int64_t n);
  // The numbers that blocks of up to kBlockElements elements stand for. levels: what codes stand for, or null.
  void (*read_blocks)(void* out, int32_t dtype, const BlockType& type, const uint8_t* blocks, int64_t count,
                      const int8_t* levels);
  // What a product's own end does not compute: halves that do not fall on panels, gates that are not plain. up may be
  // null.
  void (*gate)(void* out, int32_t out_dtype, const float* gate, const float* up, int64_t n, const Gating& gating);
  void (*rotate_last)(const RotateArgs& args, int64_t begin, int64_t end);   // of tokens
  void (*read_streams)(const HyperArgs& args, int64_t begin, int64_t end);  // of tokens
  void (*write_streams)(const StreamWriteArgs& args, int64_t begin, int64_t end);
  void (*causal_conv)(const ConvArgs& args, const ConvPiece& piece);
  void (*mamba_derived)(const DerivedArgs& args, int64_t row_begin, int64_t row_end);
  void (*mamba_scan)(const MambaArgs& args, const ScanPiece& piece);
  void (*mamba2_scan)(const Mamba2Args& args, const ScanPiece& piece);
  void (*gated_delta_scan)(const DeltaArgs& args, const ScanPiece& piece);
  void (*lightning_scan)(const LightningArgs& args, const ScanPiece& piece);
  void (*rg_lru_scan)(const RgLruArgs& args, const ScanPiece& piece);
  void (*gated_norm)(const GatedNormArgs& args, int64_t row_begin, int64_t row_end);
  Largest (*find_largest)(const float* x, int64_t n);
  double (*sum_exponentials)(const float* x, int64_t n, float shift);
  // round(2^40 * exp((logit - largest) / temperature))
  void (*sample_weights)(int64_t* out, const float* logits, int64_t n, double largest, double temperature);
  int64_t (*count_not_below)(const float* x, int64_t n, float value, int64_t same_before);
  int64_t (*next_above)(const float* x, int64_t n, int64_t begin, float value);
  // Those of x[0 .. n) whose bit is set, one after the other; tells how many. `out` has room for n and 16 more.
  int64_t (*gather_allowed)(float* out, const float* x, const uint32_t* bits, int64_t n);
  uint64_t (*read_sum)(const void* data, int64_t bytes);
};

// Kinds of cores: where a kernel has several ways, which one is fastest depends on it (benchmarks/cpu.md), and all give the
// same bits. kZen5: AMD's since then. The same for all of a process.
enum class Core { kIntel, kZen5, kOther };
Core core();

// Filled by the isa/*.cpp files: of x86-64, and of ARM.
void fill_avx2(Kernels& kernels);
void fill_avx_vnni(Kernels& kernels);
void fill_avx512(Kernels& kernels);
void fill_avx512_vnni(Kernels& kernels);
void fill_avx512_vnni_codes(Kernels& kernels);
void fill_avx512_bf16(Kernels& kernels, bool slow_pairs);  // whether vdpbf16ps is slow there
void fill_amx(Kernels& kernels);
void fill_neon(Kernels& kernels);
void fill_neon_dotprod(Kernels& kernels);
void fill_neon_bf16(Kernels& kernels);

// The table in use; null before qr_init.
const Kernels* kernels();

}  // namespace qr
