/* The C ABI of quire's CPU kernels.
 *
 * Every function returns QR_OK or a negative QR_E* status unless its comment says otherwise; nothing throws. Sizes are
 * in elements unless called bytes. Null where memory is needed, sizes that are negative or exceed any memory, ids and
 * slots that do not exist and numbers that are none give QR_EINVAL before anything is written. The caller owns all
 * memory named here; outputs must not alias inputs unless a
 * comment allows it. Call qr_init once before any kernel. Kernels may be called from any thread; while one thread uses
 * the pool of its number of threads, calls of others with the same number run on their own thread alone.
 *
 * Row invariance: within one instruction set, the result for one row does not depend on the number of rows, the row's
 * position, the number of threads, or chunking. Bit for bit.
 */
#ifndef QUIRE_CPU_H
#define QUIRE_CPU_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define QR_API __attribute__((visibility("default")))
#define QR_ABI_VERSION 21

enum {
  QR_OK = 0,
  QR_EINVAL = -1,       /* an argument is out of range */
  QR_ENOMEM = -2,       /* scratch memory could not be allocated */
  QR_EUNSUPPORTED = -3, /* this combination of dtypes or this instruction set is not available */
  QR_ESTATE = -4        /* qr_init was not called */
};

/* QR_CACHE_INT8 and QR_CACHE_FLOAT8 are for caches only: int8 or float8_e4m3fn with a float32 scale for each token and
 * kv head. QR_BFLOAT16_COMPACT is for packed weights only: the same numbers as QR_BFLOAT16, in 12 bits.
 * QR_BFLOAT16_TILES is for activations on their way from one op to the next: QR_BFLOAT16 laid out as
 * [rows / 32][columns / 32][32][32], rows rounded up (the last ones need no values), columns a multiple of 32. */
typedef enum {
  QR_FLOAT32 = 0,
  QR_BFLOAT16 = 1,
  QR_FLOAT16 = 2,
  QR_CACHE_INT8 = 3,
  QR_CACHE_FLOAT8 = 4,
  QR_BFLOAT16_COMPACT = 5,
  QR_BFLOAT16_TILES = 6
} qr_dtype;
typedef enum { QR_NONE = 0, QR_SILU = 1, QR_GELU = 2, QR_GELU_TANH = 3, QR_RELU = 4, QR_RELU2 = 5 } qr_activation;
typedef enum { QR_INT8 = 1, QR_INT4 = 2, QR_LEVELS = 3, QR_FLOAT8 = 4, QR_INT5 = 5, QR_INT6 = 6, QR_INT2 = 7 } qr_format;
/* A library has those of one kind of processor: the first six (x86-64) or the last three (64-bit ARM; QR_NEON_BF16 has
 * the matrix products of bytes, i8mm, too). Each contains those of its kind before it, but for QR_AVX_VNNI, which adds to
 * QR_AVX2 what processors with AVX-512 need not have. */
typedef enum {
  QR_AVX2 = 1,
  QR_AVX_VNNI = 2,
  QR_AVX512 = 3,
  QR_AVX512_VNNI = 4,
  QR_AVX512_BF16 = 5,
  QR_AMX = 6,
  QR_NEON = 7,
  QR_NEON_DOTPROD = 8,
  QR_NEON_BF16 = 9
} qr_isa;

/* ---- start-up ---- */

/* QR_ABI_VERSION of the library. */
QR_API int32_t qr_abi_version(void);

/* What this machine and its operating system run: the bit 1 << isa of each qr_isa, 0 if none; the highest is the best.
 * Each is what the system reports first (CPUID and XGETBV; HWCAP or sysctl); AMX is also executed once in a child process,
 * since kernels and hypervisors exist that advertise it and then fault. */
QR_API uint32_t qr_isas(void);

/* Choose the instruction set (0: the best; QR_EUNSUPPORTED if it is none of qr_isas) and the number of threads (1 to 512,
 * the calling one included) of every thread that has set no number of its own; this one forgets its own. May be called
 * again, also while kernels run: each goes on as it began. */
QR_API int32_t qr_init(int32_t isa, int32_t num_threads);

/* The number of threads of kernels that the calling thread starts from now on. */
QR_API int32_t qr_set_num_threads(int32_t num_threads);

/* The qr_isa in use and the number of threads of the calling thread's kernels, 0 before qr_init. */
QR_API int32_t qr_isa_in_use(void);
QR_API int32_t qr_num_threads(void);

/* Have pages that nobody has touched yet come from these NUMA nodes in turn, so that threads on all of them read at the
 * bandwidth of all. nodes: a bit each, `words` (1 to 16) words of 64. A policy that the process was started with
 * (numactl) stays. memory: whole pages. QR_EUNSUPPORTED where the system refuses. */
QR_API int32_t qr_interleave(void* memory, int64_t bytes, const uint64_t* nodes, int64_t words);

/* Run num_pieces calls of piece(context, index) on the pool and return when all are done. For tests. */
QR_API int32_t qr_parallel(int64_t num_pieces, void (*piece)(void* context, int64_t index), void* context);

/* Have the calling thread sleep for a moment in each millisecond from now until it ends, so that threads which wait for
 * its core need not wait for the end of its time slice: for work beside the model. It uses a timer and a real-time
 * signal of the thread. QR_EUNSUPPORTED where there are none, or the process uses that signal. */
QR_API int32_t qr_compute_in_bursts(void);

/* Sum of `bytes` bytes (a multiple of 256) read as fast as the pool can: the yardstick of benchmarks. */
QR_API int32_t qr_read_bandwidth(const void* data, int64_t bytes, uint64_t* sum);

/* ---- linear layers (gemm.cpp) ---- */

/* Bytes of a packed weight [out_features, in_features], or a negative status. */
QR_API int64_t qr_packed_bytes(int32_t dtype, int64_t out_features, int64_t in_features);

/* Lay rows [row_offset, row_offset + num_rows) of a weight out for streaming, converting src_dtype to dtype. `packed`
 * is 64-byte aligned and was zero before the first part (padding stays zero). src_stride: elements between rows.
 * QR_BFLOAT16_COMPACT: QR_EUNSUPPORTED where the numbers spread too far, or a part ends within a group of 32 rows that
 * another continues; QR_BFLOAT16 takes any. */
QR_API int32_t qr_pack_linear(void* packed, int32_t dtype, int64_t out_features, int64_t in_features, const void* src,
                              int32_t src_dtype, int64_t num_rows, int64_t src_stride, int64_t row_offset);

/* 1 if linear layers over such a weight read x[rows, k] fastest as QR_BFLOAT16_TILES; otherwise they do not take it. */
QR_API int32_t qr_reads_tiles(int32_t weight_dtype, int64_t rows, int64_t k);

/* out[rows, n] = activation(x[rows, k] . weight[n, k] + bias[n]) + residual[rows, n]. bias (float32) and residual (of
 * x_dtype; of QR_BFLOAT16 beside tiles) may be null. */
QR_API int32_t qr_linear(void* out, int32_t out_dtype, const void* x, int32_t x_dtype, const void* packed,
                         int32_t weight_dtype, int64_t rows, int64_t n, int64_t k, const float* bias,
                         int32_t activation, const void* residual);

/* out[rows, f] = activation(gate) * up with [gate, up] = x[rows, k] . weight[2 f, k] + bias[2 f]; out is of x_dtype,
 * either of the two being in tiles or not. */
QR_API int32_t qr_gated_linear(void* out, int32_t out_dtype, const void* x, int32_t x_dtype, const void* packed,
                               int32_t weight_dtype, int64_t rows, int64_t f, int64_t k, const float* bias,
                               int32_t activation);

/* ---- linear layers over quantised weights (gemm_quantized.cpp, quantize.cpp) ----
 * A weight is value * scale, less zero_point * scale or plus offset, of its group: the `group` inputs of one output that
 * share them. Values are
 *   QR_INT8    -128 .. 127
 *   QR_INT2    -1 .. 2
 *   QR_INT4    -8 .. 7
 *   QR_INT5    -16 .. 15
 *   QR_INT6    -32 .. 31
 *   QR_LEVELS  0 .. 15, which stand for levels[0 .. 15]
 *   QR_FLOAT8  float8_e4m3fn, none of which is NaN
 * Activations are rounded to int8 on the way in, each group of a row (128 where an output has one scale, 256 where
 * scales are nested) by its largest magnitude; not beside QR_FLOAT8. Beside QR_INT2 with one scale for an output a whole
 * row is rounded by its largest magnitude, or by 1e-5 if that is more. */

/* Bytes of packed values, or a negative status. */
QR_API int64_t qr_quantized_bytes(int32_t format, int64_t out_features, int64_t in_features);

/* As qr_pack_linear, from one byte for each value. QR_EUNSUPPORTED: a value is none of the format's. */
QR_API int32_t qr_pack_quantized(void* packed, int32_t format, int64_t out_features, int64_t in_features,
                                 const int8_t* src, int64_t num_rows, int64_t src_stride, int64_t row_offset);

/* As qr_pack_quantized, from numbers, without zero points. int8: a scale is the largest magnitude of its row / 127,
 * `group` is not read. int4: the element of largest magnitude of a group becomes -8, so that all sixteen values are
 * used; its sign goes to the scale. */
QR_API int32_t qr_quantize_linear(void* packed, void* scales, int32_t format, int64_t group, int64_t out_features,
                                  int64_t in_features, const void* src, int32_t src_dtype, int64_t num_rows,
                                  int64_t src_stride, int64_t row_offset);

/* A weight of `outputs` rows; every member has 8 bytes. format 0: packed as qr_linear takes it, of `dtype`; what is
 * between packed and bias is not read. bias (float32) may be null.
 *
 * group: 16, 32, 64 or 128; 0 (QR_INT8, QR_INT2 and QR_FLOAT8): an output has one scale. QR_INT2 and QR_FLOAT8: 128 or
 * 0. QR_INT5 and QR_INT6: 16 or 32.
 * scales: float16 [panels of 32 outputs][groups][32], of which `unit` is 1; float32 where group is 0, and of
 * QR_FLOAT8, unit being 1. zero_points (int8), offsets (float16, in units): like scales; only where those are float16,
 * at most one of the two, null for none. levels: of QR_LEVELS, int8[16]. order: input m is x[order[m]], int32; not of
 * QR_FLOAT8; null: x[m]. All cover whole panels.
 *
 * nested: 1 or 2, where a group has so many codes under a float16 of 256 inputs, of which in_features is a multiple;
 * else 0. Of QR_INT6 in groups of 16 and QR_LEVELS in groups of 32: 1. Of QR_INT5 in groups of 32: 2. Of QR_INT4: 2,
 * or 1 in groups of 16. Then scales are [panels][blocks of 256 inputs], each float16 [nested][32], of which `unit` is 1,
 * and int8 [groups][nested][32]. A scale is the first code times the first float16; an offset is 2^(bits - 1) times the
 * scale less the second code times the second float16, bits being those of the format. Where there are two, codes are 0
 * to 63. zero_points and offsets are null, and activations are rounded in blocks of 256. */
typedef struct {
  const void* packed;
  const void* scales;
  const int8_t* zero_points;
  const uint16_t* offsets;
  const int8_t* levels;
  const int32_t* order;
  const float* bias;
  int64_t dtype, format, group, outputs;
  double unit;
  int64_t nested;
} qr_weight;

/* As qr_linear and qr_gated_linear. The outputs are those of `count` (1 to 16) weights side by side, whose own biases
 * are not read. x is never in tiles, out only where count is 1. */
QR_API int32_t qr_linear_quantized(void* out, int32_t out_dtype, const void* x, int32_t x_dtype,
                                   const qr_weight* weights, int64_t count, int64_t rows, int64_t n, int64_t k,
                                   const float* bias, int32_t activation, const void* residual);

QR_API int32_t qr_gated_linear_quantized(void* out, const void* x, int32_t x_dtype, const qr_weight* weights,
                                         int64_t count, int64_t rows, int64_t f, int64_t k, const float* bias,
                                         int32_t activation);

/* The largest of the outputs that qr_linear_quantized gives in float32, of each row, and the first index that holds it, a
 * NaN counting as the largest, as qr_row_max finds them. soft_cap: outputs are soft_cap * tanh(output / soft_cap)
 * first; 0: as they are. Weights of format 0 included. x is never in tiles. */
QR_API int32_t qr_linear_max(float* values, int64_t* ids, const void* x, int32_t x_dtype, const qr_weight* weights,
                             int64_t count, int64_t rows, int64_t n, int64_t k, const float* bias, float soft_cap);

/* ---- weights in the blocks of GGUF files (blocks.cpp) ----
 * A row of in_features elements, a multiple of those of a block, is its blocks one after the other. src_stride: bytes
 * between rows. Any bytes are blocks; what is read is num_rows times the blocks of a row. */

/* By their ids in files (ggml, include/ggml.h). */
typedef enum {
  QR_Q4_0 = 2,
  QR_Q4_1 = 3,
  QR_Q5_0 = 6,
  QR_Q5_1 = 7,
  QR_Q8_0 = 8,
  QR_Q2_K = 10,
  QR_Q3_K = 11,
  QR_Q4_K = 12,
  QR_Q5_K = 13,
  QR_Q6_K = 14,
  QR_IQ4_NL = 20,
  QR_IQ4_XS = 23,
  QR_TQ1_0 = 34,
  QR_TQ2_0 = 35,
  QR_MXFP4 = 39
} qr_blocks;

/* largest: the largest magnitude of all scales and offsets, or of the float16 of those that are nested; NaN where one of
 * them is not finite. are_halves: 1 where float16 has all of them exactly. */
QR_API int32_t qr_block_range(float* largest, int32_t* are_halves, int32_t type, const void* src, int64_t num_rows,
                              int64_t src_stride, int64_t in_features);

/* As qr_pack_quantized, with scales and offsets as qr_weight has them, in units: those of the rows are written. The
 * format is QR_INT4 (Q4_0, Q4_1, Q2_K, Q3_K, Q4_K), QR_INT5 (Q5_0, Q5_1, Q5_K), QR_INT6 (Q6_K), QR_INT8 (Q8_0),
 * QR_INT2 (TQ1_0, TQ2_0) or QR_LEVELS, in groups of 32 (Q2_K, Q3_K, Q6_K: 16; TQ1_0, TQ2_0: 128). Other blocks of 256
 * elements have nested scales, with two codes of a group in Q2_K, Q4_K and Q5_K. offsets: of Q4_1 and Q5_1; else null. */
QR_API int32_t qr_pack_blocks(void* packed, void* scales, uint16_t* offsets, double unit, int32_t type,
                              int64_t out_features, int64_t in_features, const void* src, int64_t num_rows,
                              int64_t src_stride, int64_t row_offset);

/* out[rows, in_features]: the numbers of rows ids[0 .. rows) of a table of table_rows rows; of its first rows where
 * ids is null. levels: int8[16], what codes stand for, of types of QR_LEVELS. */
QR_API int32_t qr_block_rows(void* out, int32_t out_dtype, int32_t type, const void* table, int64_t table_rows,
                             int64_t src_stride, int64_t in_features, const int8_t* levels, const int64_t* ids,
                             int64_t rows);

/* ---- mixtures of experts (experts.cpp); every member of these structures has 8 bytes ---- */

/* gate_up: [2 size, in_features], gates first; without gates [size, in_features]. down: [out_features, size]. */
typedef struct {
  qr_weight gate_up, down;
  int64_t size;
} qr_expert;

/* router: [num_candidates + has_shared_gate, router_features], of candidates that are experts, identities and skips.
 * choice_bias: [num_candidates], or null. scales: [num_experts], by which the weights of the experts that were chosen
 * are multiplied in the end, or null. experts: [num_experts], and behind them the one that every row passes, if
 * has_shared. num_identities: so many more to choose from give what they read; then out_features is in_features.
 * num_skips: so many more behind those give nothing. With either there are no scales and no shared expert, and weights
 * do not multiply what experts read. router_features: what the router reads of a row, in_features unless it is given
 * something else. */
typedef struct {
  qr_weight router;
  const float *choice_bias, *scales;
  const qr_expert* experts;
  int64_t num_experts, has_shared, has_shared_gate, in_features, out_features, num_identities, num_skips;
  int64_t router_features;
} qr_mixture;

/* QR_SQRT_SOFTPLUS: sqrt(log(1 + exp(logit))). */
typedef enum { QR_SOFTMAX = 0, QR_SIGMOID = 1, QR_LOGITS = 2, QR_LOGITS_SIGMOID = 3, QR_SQRT_SOFTPLUS = 4 } qr_scores;

/* How rows choose experts and weigh them: the num_chosen of the highest scores + choice_bias, the lower index first
 * where two are equal; NaN counts as the highest. Of `groups` groups of neighbours (0: no groups), only those in the
 * chosen_groups whose best_of_group highest scores have the highest sums; all others have the score left_out (-infinity
 * or a number). Weights are the scores (QR_LOGITS: the
 * softmax over the chosen; QR_LOGITS_SIGMOID: the sigmoid of each), divided by their sum, or least_sum if that is more,
 * plus added_to_sum, where renormalized, times factor. near (negative: none): experts are chosen one after the other,
 * each weighed by the softmax over the logits that are left and no further from it than this share of it.
 * shared_factor: of the shared expert, beside the sigmoid of its gate. weighs_input: the weights of chosen experts
 * multiply what they read, rounded to its dtype, not what they give. */
typedef struct {
  int64_t num_chosen, scores, groups, chosen_groups, best_of_group, renormalized, weighs_input;
  double least_sum, added_to_sum, factor, shared_factor, near, left_out;
} qr_routing;

/* What stands between the two products of an expert, with f(v) = activation(slope * v) / slope:
 * f(min(gate, limit)) * (min(max(up, -limit), limit) + offset), or f(up) where experts have no gates. A limit of
 * infinity, a slope of 1 and an offset of 0 are those of a plain gate. */
typedef struct {
  int64_t is_gated, activation;
  double limit, slope, offset;
} qr_gating;

/* chosen[rows, num_chosen], best first, and their weights, from logits[rows, num_experts]. For tests. */
QR_API int32_t qr_route(int32_t* chosen, float* weights, const float* logits, const float* choice_bias, int64_t rows,
                        int64_t num_experts, const qr_routing* routing);

/* out[rows, out_features] = the sum of weight * output in the order of the experts' indices, the shared one last, in
 * float32, plus x times the sum of the weights of identities, plus residual (of dtype, may be null). out and x are of
 * dtype; the router's logits are float32. The router reads routed[rows, router_features] of routed_dtype, or x where
 * that is null. given[rows, num_chosen] (may be null; not beside near): the experts of each row, which the router then
 * only weighs; one may be there twice. Each expert reads its weights once for every 512 of its rows. */
QR_API int32_t qr_mixture_of_experts(void* out, const void* x, const void* routed, int32_t routed_dtype,
                                     const int32_t* given, int32_t dtype, const void* residual, int64_t rows,
                                     const qr_mixture* mixture, const qr_routing* routing, const qr_gating* gating);

/* ---- norms (norm.cpp) ----
 * out is of x_dtype, or that in tiles; where it is not in tiles it may alias x. */

/* out[rows, cols] = x / sqrt(mean(x^2) + eps) * weight + residual; residual may be null. */
QR_API int32_t qr_rms_norm(void* out, int32_t out_dtype, const void* x, int32_t x_dtype, const void* residual,
                           const float* weight, int64_t rows, int64_t cols, float eps);

/* out[rows, cols] = (x - mean) / sqrt(var + eps) * weight + bias; bias may be null. */
QR_API int32_t qr_layer_norm(void* out, int32_t out_dtype, const void* x, int32_t x_dtype, const float* weight,
                             const float* bias, int64_t rows, int64_t cols, float eps);

/* ---- the paged cache (cache.cpp, rotary.cpp, attention.cpp) ----
 * One layer's cache is [2 (keys, values)][num_blocks][kv_heads][page] elements, with 128 readable
 * bytes past it. Blocks are `block` elements apart: kv_heads * page, or more where a pool has those of other layers
 * between them. What was never written is never used. */

/* Elements of a page: a multiple of block_size, padding included. Negative where head_size is odd (of 8 bits: no
   multiple of 4) or above 1152. */
QR_API int64_t qr_cache_page(int32_t dtype, int64_t block_size, int64_t head_size);

/* query[tokens, heads, head_size] and the cache's slots from qkv[tokens, (heads + 2 kv_heads) head_size]: RMS norm of
 * query and key heads (q_norm, k_norm may be null), rotation by cos_sin[position, rotary_dim] (may be null). qkv may be
 * in tiles where head_size is a multiple of 32. key_scales and value_scales[kv_heads], of a cache of 8 bits, are what
 * all tokens are divided by, those too large becoming the largest (int8: -128..127; float8: 448); null: each token's
 * head by its own largest magnitude over 127 or 448. With kv_heads 0 nothing is written to the cache, and
 * head_size need not be that of its pages. */
QR_API int32_t qr_rope_and_cache(void* query, const void* qkv, int32_t qkv_dtype, const int64_t* positions,
                                 const float* cos_sin, const float* q_norm, const float* k_norm, void* cache,
                                 int32_t cache_dtype, int64_t num_blocks, int64_t block_size, int64_t page,
                                 int64_t block, const int64_t* slots, int64_t tokens, int64_t heads, int64_t kv_heads,
                                 int64_t head_size, int64_t rotary_dim, int32_t interleaved, float eps,
                                 const float* key_scales, const float* value_scales);

/* out[tokens, heads, head_size]: causal attention of each sequence's tokens over its pages. scale is above 0; soft_cap
 * 0 and window 0 mean none. slopes[heads] (may be null) times the distance in tokens is taken from scores (ALiBi);
 * sinks[heads] (may be null) are scores of no token, which add nothing. out is of query_dtype, or that in tiles. */
QR_API int32_t qr_paged_attention(void* out, int32_t out_dtype, const void* query, int32_t query_dtype,
                                  const void* cache, int32_t cache_dtype, int64_t num_blocks, int64_t block_size,
                                  int64_t page, int64_t block, const int32_t* query_start, const int32_t* seq_lens,
                                  int64_t sequences, const int32_t* block_tables, int64_t table_stride, int64_t heads,
                                  int64_t kv_heads, int64_t head_size, float scale, float soft_cap, int64_t window,
                                  const float* slopes, const float* sinks);

/* ---- attention over latents (latent.cpp) ---- */

/* qkv[tokens, (heads + 2) head_size], as qr_rope_and_cache takes it for one kv head, from query[tokens, heads (nope_size
 * + rope_size)] and compressed[tokens, latent_size + rope_size]; all of dtype. Of each query head [its last rope_size
 * features | its others . to_latents[head] | zeros], the key [the last rope_size features | latent | zeros] and the
 * value [zeros | latent | zeros], latent being the RMS norm of the first latent_size features. to_latents: heads
 * weights [latent_size, nope_size], without bias. index_key[tokens, index_size] (may be null) takes the place of the
 * key's last zeros. */
QR_API int32_t qr_latent_qkv(void* qkv, const void* query, const void* compressed, int32_t dtype, const float* norm,
                             float eps, const qr_weight* to_latents, int64_t tokens, int64_t heads, int64_t rope_size,
                             int64_t nope_size, int64_t latent_size, int64_t head_size, const void* index_key,
                             int64_t index_size);

/* values[tokens, heads value_size] from attended[tokens, heads head_size], of whose heads the latent_size features
 * behind the first rope_size are multiplied. to_values: heads weights [value_size, latent_size], without bias. */
QR_API int32_t qr_latent_values(void* values, const void* attended, int32_t dtype, const qr_weight* to_values,
                                int64_t tokens, int64_t heads, int64_t rope_size, int64_t latent_size,
                                int64_t value_size, int64_t head_size);

/* ---- attention over chosen tokens (selection.cpp): a cache of one kv head, whose keys end with the indexer's ---- */

/* selected[tokens, num_selected]: the positions of the context that each token attends to, ascending, then -1. All that
 * it sees where these are no more than num_selected, else those of the highest scores, the first ones of equal scores.
 * A score is the sum of weights[token, head] max(query[token, head] . key, 0) over the heads, in float32, of the last
 * `size` features of the position's key. size and head_size are multiples of 4. */
QR_API int32_t qr_select_tokens(int32_t* selected, int64_t num_selected, const void* query, int32_t dtype,
                                const float* weights, int64_t heads, int64_t size, const void* cache,
                                int32_t cache_dtype, int64_t num_blocks, int64_t block_size, int64_t page,
                                int64_t block, int64_t head_size, const int32_t* query_start, const int32_t* seq_lens,
                                int64_t sequences, const int32_t* block_tables, int64_t table_stride);

/* out[tokens, heads, head_size], of dtype: attention of each token over the positions that qr_select_tokens gave. sinks
 * as in qr_paged_attention. */
QR_API int32_t qr_selected_attention(void* out, const void* query, int32_t dtype, const void* cache,
                                     int32_t cache_dtype, int64_t num_blocks, int64_t block_size, int64_t page,
                                     int64_t block, const int32_t* query_start, const int32_t* seq_lens,
                                     int64_t sequences, const int32_t* block_tables, int64_t table_stride,
                                     const int32_t* selected, int64_t num_selected, int64_t heads, int64_t head_size,
                                     float scale, const float* sinks);

/* ---- caches of rows: blocks that an indexer chooses (block_selection.cpp), attention over the last tokens and over
 * entries (compressed.cpp, entries.cpp), and streams (hyper.cpp) ----
 *
 * A cache of rows is [2 halves][num_blocks][rows_of_block][width], blocks `block` elements apart; a row has 2 * width
 * elements. Row i of a sequence is of its tokens from i * rate on, and a block of block_size = rows_of_block * rate tokens. */

/* Turn the last `rotated` features of each head of x[tokens, heads, size], pairs of neighbours, by the position; the other
 * way round backward (1). cos_sin[num_positions, rotated]: cosines, then sines. */
QR_API int32_t qr_rotate_last(void* x, int32_t dtype, const int64_t* positions, const float* cos_sin,
                              int64_t num_positions, int64_t tokens, int64_t heads, int64_t size, int64_t rotated,
                              int32_t backward);

/* Write rows[tokens, row_size], of 2 * width elements or one less, which is zero then, to slots[tokens]: block *
 * rows_of_block + row. */
QR_API int32_t qr_store_rows(void* cache, int32_t dtype, int64_t num_blocks, int64_t rows_of_block, int64_t width,
                             int64_t block, const void* rows, int64_t row_size, const int64_t* slots, int64_t tokens);

/* selected[tokens, heads, num_selected]: the blocks of `run` tokens that each head of a token attends to, ascending, then
 * -1. A token at position p sees blocks 0 .. p / run, the last one up to itself. It chooses all where these are no more
 * than num_selected, else the last num_local, and beside them those of the highest scores, num_selected together, the
 * first ones of equal scores. A score is the largest query[token, head] . key, in float32, of what the token sees of a
 * block. A key is the first `size` elements of a token's row (of rate 1). */
QR_API int32_t qr_select_blocks(int32_t* selected, int64_t num_selected, const void* query, int32_t dtype,
                                int64_t heads, int64_t size, const void* keys, int32_t keys_dtype, int64_t num_blocks,
                                int64_t rows_of_block, int64_t width, int64_t block, const int32_t* block_tables,
                                int64_t table_stride, const int32_t* query_start, const int32_t* seq_lens,
                                int64_t sequences, int64_t run, int64_t num_local);

/* Write the entries of which one of this step's tokens is the last. Entry i is of tokens [i * rate, (i + 1) * rate), and
 * with a reach of 2 * rate, which else is rate, of as many before them, as far as there are any. A token's row in `tail`
 * (of rate 1) is products[F], then gates[F]; F is tail_width, `size` and index_size times reach / rate. A feature is the
 * sum of products, weighed by the softmax over the tokens of gate + bias[position % rate, F]. With 2 * rate the features
 * of a part are given twice: what a token gives the entry behind its own, then what it gives its own. A part of an entry,
 * `size` features and index_size ones (index_norm may be null: there are none), is normed, multiplied by its norm, and
 * its last features are turned as qr_rotate_last does by position i * rate. */
QR_API int32_t qr_compress(void* entries, int32_t dtype, int64_t num_blocks, int64_t rows_of_block, int64_t width,
                           int64_t block, const int32_t* block_tables, int64_t table_stride, int64_t block_size,
                           const void* tail, int32_t tail_dtype, int64_t tail_blocks, int64_t tail_of_block,
                           int64_t tail_width, int64_t tail_block, const int32_t* tail_tables,
                           int64_t tail_table_stride, int64_t tail_block_size, const int32_t* query_start,
                           const int32_t* seq_lens, int64_t sequences, const float* bias, int64_t rate, int64_t reach,
                           const float* norm, int64_t size, const float* index_norm, int64_t index_size, float eps,
                           const float* cos_sin, int64_t num_positions, int64_t rotated);

/* As qr_select_tokens, of entries: a token at position p sees the first (p + 1) / rate. A key is the last `size` of the
 * row_size elements of an entry. */
QR_API int32_t qr_select_entries(int32_t* selected, int64_t num_selected, const void* query, int32_t dtype,
                                 const float* weights, int64_t heads, int64_t size, int64_t row_size,
                                 const void* entries, int32_t entries_dtype, int64_t num_blocks, int64_t rows_of_block,
                                 int64_t width, int64_t block, const int32_t* block_tables, int64_t table_stride,
                                 int64_t block_size, const int32_t* query_start, const int32_t* seq_lens,
                                 int64_t sequences, int64_t rate);

/* out[tokens, heads, head_size], of dtype: attention over the last `window` tokens, whose rows are `last` (of rate 1), and
 * over those entries that `selected` [tokens, num_selected] names, or without it all that a token sees; entries may be
 * null. The first head_size elements of a row are key and value. sinks as in qr_paged_attention, of every head. */
QR_API int32_t qr_compressed_attention(void* out, const void* query, int32_t dtype, const float* sinks,
                                       const void* last, int32_t cache_dtype, int64_t num_blocks, int64_t rows_of_block,
                                       int64_t width, int64_t block, const int32_t* block_tables, int64_t table_stride,
                                       int64_t block_size, const void* entries, int64_t entry_blocks,
                                       int64_t entries_of_block, int64_t entry_width, int64_t entry_block,
                                       const int32_t* entry_tables, int64_t entry_table_stride,
                                       int64_t entry_block_size, const int32_t* query_start, const int32_t* seq_lens,
                                       int64_t sequences, const int32_t* selected, int64_t num_selected, int64_t heads,
                                       int64_t head_size, float scale, int64_t window, int64_t rate);

/* out[tokens, size] from streams[tokens, count, size]. With m = products / rms(streams) * scale + base, the sum over
 * streams of (sigmoid(m[stream]) + eps) * stream. writing[tokens, count (1 + count)] (may be null, products are [tokens,
 * count] then, else [tokens, count (2 + count)]): magnitude sigmoid(m[count + stream]) + least_added, and the matrix of
 * the others: softmax of its rows + eps, columns divided by their sums + eps, and so rows and columns iterations - 1
 * times more. Without iterations (0) there is no matrix: writing is [tokens, count], products are [tokens, 2 count]. */
QR_API int32_t qr_read_streams(void* out, float* writing, const void* streams, int32_t dtype, const float* products,
                               const float* scale, const float* base, int64_t tokens, int64_t count, int64_t size,
                               float eps, float norm_eps, float magnitude, float least_added, int64_t iterations);

/* out[tokens, count, size]: writing[k] * added + the sum over j of matrix[j, k] * stream j, for each stream k; + stream k
 * where there is no matrix (has_matrix 0). */
QR_API int32_t qr_write_streams(void* out, const void* streams, int32_t dtype, const void* added, const float* writing,
                                int64_t tokens, int64_t count, int64_t size, int32_t has_matrix);

/* Within each cache, copy block pairs[2 i] to pairs[2 i + 1], in order. block_bytes: of one half (keys or values). */
QR_API int32_t qr_copy_blocks(void* const* caches, int64_t num_caches, int64_t num_blocks, int64_t block_bytes,
                              const int64_t* pairs, int64_t num_pairs);

/* Have the operating system put memory behind `bytes` bytes that may not have been written yet, on this thread. What
 * they hold stays as it is, even while others write it. */
QR_API int32_t qr_touch(void* begin, int64_t bytes);

/* out[rows, in_features] = rows `ids` of a packed weight, in its dtype: the embedding of a tied head. */
QR_API int32_t qr_packed_rows(void* out, const void* packed, int32_t dtype, int64_t out_features, int64_t in_features,
                              const int64_t* ids, int64_t rows);

/* out[rows] = table[ids]; rows of row_bytes. */
QR_API int32_t qr_embedding(void* out, const void* table, int64_t row_bytes, int64_t table_rows, const int64_t* ids,
                            int64_t rows);

/* ---- recurrent layers (recurrence.cpp, gated_recurrence.cpp) ----
 * states is float32 [2 (halves)][num_pages][half]: number i of a page stands in its first half where i < half, else at
 * i - half in its second. Sequence r owns tokens query_start[r] .. query_start[r + 1] of all tokens, and its state is
 * read from page reads[r] (-1: it is zero) and written to page writes[r], which no other sequence reads. Tokens are
 * taken one after the other, in float32. Strides are elements from row to row. */

/* A causal convolution of each channel: value = activation(bias + conv(x * factor)) * gate, activation being QR_NONE or
 * QR_SILU, written to out (float32), rounded (of dtype), or both; the other may be null, and so may bias, factor and
 * gate. weight is [channels, width], the last column for the token itself; width is at most 64. rounded is
 * [channels / block][tokens][block], block a divisor of channels. The state is the last width - 1 inputs x * factor,
 * oldest first, from number 0 of a page. */
QR_API int32_t qr_causal_conv(float* out, void* rounded, const void* x, const void* factor, const void* gate,
                              int32_t dtype, int64_t stride, const float* weight, const float* bias,
                              int32_t activation, int64_t tokens, int64_t channels, int64_t block, int64_t width,
                              float* states, int64_t num_pages, int64_t half, const int32_t* query_start,
                              const int32_t* reads, const int32_t* writes, int64_t sequences);

/* RMS norms of the three parts of derived[tokens, rank + 2 state_size] in place, unless is_normed is 0; a null weight
 * is ones. Then the first part as dtype: time[tokens, rank]. */
QR_API int32_t qr_mamba_derived(void* time, int32_t dtype, float* derived, int64_t tokens, int64_t rank,
                                int64_t state_size, const float* time_norm, const float* write_norm,
                                const float* read_norm, int32_t is_normed, float eps);

/* dt = softplus(time[tokens, channels]); for each channel h = h exp(dt decay) + (dt x) write, y = h . read;
 * out[tokens, channels] = (y + skip x) silu(gate). write and read point into rows derived_stride apart. The state h,
 * [channels, state_size], begins at number `first` of a page. */
QR_API int32_t qr_mamba_scan(void* out, int32_t dtype, const float* x, const float* time, const void* gate,
                             int64_t gate_stride, const float* write, const float* read, int64_t derived_stride,
                             const float* decay, const float* skip, int64_t tokens, int64_t channels,
                             int64_t state_size, int64_t first, float* states, int64_t num_pages, int64_t half,
                             const int32_t* query_start, const int32_t* reads, const int32_t* writes,
                             int64_t sequences);

/* x[tokens, heads head_size + 2 groups state_size]: channels of all heads, writing vectors, reading vectors. dt =
 * softplus(time + time_bias); for each head h = h exp(dt decay) + (dt x) write, and its channels become h . read +
 * skip x. The state h, [heads, head_size, state_size], begins at number `first` of a page. */
QR_API int32_t qr_mamba2_scan(float* x, const void* time, int32_t dtype, int64_t time_stride, const float* time_bias,
                              const float* decay, const float* skip, int64_t tokens, int64_t heads, int64_t groups,
                              int64_t head_size, int64_t state_size, int64_t first, float* states, int64_t num_pages,
                              int64_t half, const int32_t* query_start, const int32_t* reads, const int32_t* writes,
                              int64_t sequences);

/* x[tokens, key_heads 2 key_size + heads value_size]: queries and keys of the key heads, values of the heads. Queries
 * and keys are divided by sqrt(sum of squares + 1e-6), queries also by sqrt(key_size). Head h has those of key head
 * h key_heads / heads. dt = softplus(time + time_bias); for each head h = h exp(dt decay), h = h + most_rate
 * sigmoid(rate) (v - h . key) key, and its values become h . query. The state h, [heads, value_size, key_size], begins at number
 * `first` of a page. Rates and decays are of each head; so are times and their bias, or, where by_channel is not 0, of
 * each channel of a head's key: time[tokens, heads key_size]. With a bound below 0, which needs by_channel, exp(bound
 * sigmoid((time + time_bias) (-decay))) takes the place of exp(dt decay). Rows of rates and times are as far apart as
 * said. */
QR_API int32_t qr_gated_delta_scan(float* x, const void* rate, int64_t rate_stride, const void* time, int64_t time_stride,
                                   int32_t dtype, int32_t by_channel, const float* time_bias, const float* decay,
                                   float most_rate, float bound, int64_t tokens, int64_t heads, int64_t key_heads,
                                   int64_t key_size, int64_t value_size, int64_t first, float* states, int64_t num_pages, int64_t half,
                                   const int32_t* query_start, const int32_t* reads, const int32_t* writes,
                                   int64_t sequences);

/* silu(x[tokens, heads 3 head_size]) is the query, the key and the value v of each head, whose h = h decay + v key;
 * out[tokens, heads head_size] = h . query. The state h, [heads, head_size, head_size], begins at number `first` of a
 * page. */
QR_API int32_t qr_lightning_scan(float* out, const void* x, int32_t dtype, int64_t stride, const float* decay,
                                 int64_t tokens, int64_t heads, int64_t head_size, int64_t first, float* states,
                                 int64_t num_pages, int64_t half, const int32_t* query_start, const int32_t* reads,
                                 const int32_t* writes, int64_t sequences);

/* gates is [channels / block][tokens][2 block]: those of the input, i, and of the recurrence, r, before sigmoid. a =
 * exp(r decay); for each channel h = a h + sqrt(1 - a^2) i x, without the root for the first token of a sequence;
 * out[tokens, channels] = h gate. The state h, [channels], begins at number `first` of a page. */
QR_API int32_t qr_rg_lru_scan(void* out, int32_t dtype, const float* x, const float* gates, const void* gate,
                              const float* decay, int64_t tokens, int64_t channels, int64_t block, int64_t first,
                              float* states, int64_t num_pages, int64_t half, const int32_t* query_start,
                              const int32_t* reads, const int32_t* writes, int64_t sequences);

/* x = x silu(gate), in place; out[tokens, groups cols] = x / sqrt(mean(x^2) + eps) weight, the mean taken over each
 * group of cols. norms_before_gate: the norm comes first. by_sigmoid: x sigmoid(gate) instead. weight may be null: no
 * norm; shares_weight: it is [cols], the same for every group. */
QR_API int32_t qr_gated_norm(void* out, int32_t dtype, float* x, int64_t x_stride, const void* gate,
                             int64_t gate_stride, const float* weight, int32_t shares_weight, int64_t tokens,
                             int64_t groups, int64_t cols, float eps, int32_t norms_before_gate, int32_t by_sigmoid);

/* ---- sampling (sampling.cpp): logits[rows, vocab] float32 ---- */

/* The largest logit of each row and the first index that holds it; a NaN counts as the largest. */
QR_API int32_t qr_row_max(float* values, int64_t* ids, const float* logits, int64_t rows, int64_t vocab);

/* The same among allowed tokens, for num_masks rows: row row_of[i] may have token 32 w + b where bit b of
 * masks[i, w] is set, masks being [num_masks, ceil(vocab / 32)]. A row without any has -inf at 0. */
QR_API int32_t qr_allowed_max(float* values, int64_t* ids, const float* logits, int64_t rows, int64_t vocab,
                              const int64_t* row_of, const int32_t* masks, int64_t num_masks);

/* Log-softmax of the chosen token and its rank (1 = best, ties by lower id), and the k best: [rows], [rows], [rows, k],
 * [rows, k]. 0 <= k <= vocab. */
QR_API int32_t qr_top_logprobs(float* chosen_logprobs, int64_t* ranks, int64_t* top_ids, float* top,
                               const float* logits, const int64_t* chosen, int64_t rows, int64_t vocab, int64_t k);

/* Repetition, frequency and presence penalties at `pairs` (row, token) pairs without repeats; changes logits. */
QR_API int32_t qr_apply_penalties(float* logits, int64_t rows, int64_t vocab, const int64_t* pair_rows,
                                  const int64_t* token_ids, const uint8_t* in_prompt, const int64_t* output_counts,
                                  int64_t pairs, const float* repetition, const float* presence,
                                  const float* frequency);

/* ids[rows, draws] by inversion over integer weights round(2^40 exp((logit - largest) / temperature)), after top-k
 * (0: off), top-p and min-p. vocab is at most 2^22. A row whose largest logit is not finite draws that one.
 * mask_of[rows] may be null; else a row draws what masks[mask_of[row]] allows, anything where the number is -1. */
QR_API int32_t qr_sample(int64_t* ids, const float* logits, int64_t rows, int64_t vocab, const float* temperature,
                         const int64_t* top_k, const float* top_p, const float* min_p, const double* uniforms,
                         int64_t draws, const int64_t* mask_of, const int32_t* masks, int64_t num_masks);

/* ---- elementwise (elementwise.cpp) ---- */

/* out = x * scale + residual (or null), n elements of dtype, rounded once. out may be x. */
QR_API int32_t qr_scale_add(void* out, const void* x, const void* residual, int32_t dtype, float scale, int64_t n);

/* x = cap * tanh(x / cap), in place; cap > 0. */
QR_API int32_t qr_soft_cap(float* x, float cap, int64_t n);

/* ---- recorded runs (graph.cpp) ---- */

/* The code of an op that can be replayed, by the name of its function; QR_EINVAL for any other. */
QR_API int32_t qr_op_code(const char* name);

/* Call recorded ops in order, each [code, argument, ...]: integers and pointers as they are, floats as the bits of a
 * double. Stops at the first that fails and returns its status. */
QR_API int32_t qr_replay(const int64_t* words, int64_t num_words);

#ifdef __cplusplus
}
#endif
#endif
