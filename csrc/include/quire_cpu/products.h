/* Products with weights: linear layers, quantised ones, mixtures of experts, and rows of tables. */
#ifndef QUIRE_CPU_PRODUCTS_H
#define QUIRE_CPU_PRODUCTS_H

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

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
 *   QR_INT3    -4 .. 3
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
 * group: 16, 32, 64 or 128; 0 (QR_INT8, QR_INT2 and QR_FLOAT8): an output has one scale. QR_FLOAT8: 128 or 0. QR_INT5 and
 * QR_INT6: 16 or 32. Groups of 16 of QR_INT3 and QR_INT2 are nested.
 * scales: float16 [panels of 32 outputs][groups][32], of which `unit` is 1; float32 where group is 0, and of
 * QR_FLOAT8, unit being 1. zero_points (int8), offsets (float16, in units): like scales; only where those are float16,
 * at most one of the two, null for none. levels: of QR_LEVELS, int8[16]. order: input m is x[order[m]], int32; not of
 * QR_FLOAT8; null: x[m]. All cover whole panels.
 *
 * nested: 1 or 2, where a group has so many codes under a float16 of 256 inputs, of which in_features is a multiple;
 * else 0. Of QR_INT6 and QR_INT3 in groups of 16 and QR_LEVELS in groups of 32: 1. Of QR_INT5 and QR_INT4 in groups of
 * 32 and QR_INT2 in groups of 16: 2. Then scales are [panels][blocks of 256 inputs], each float16 [nested][32], of which
 * `unit` is 1, and int8 [groups][nested][32]. A scale is the first code times the first float16. An offset is the scale
 * times the number that takes the format's least value to zero, less the second code times the second float16. Where
 * there are two, codes are 0 to 63. zero_points and offsets are null, and activations are rounded in blocks of 256. */
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
 * format is QR_INT4 (Q4_0, Q4_1, Q4_K), QR_INT5 (Q5_0, Q5_1, Q5_K), QR_INT6 (Q6_K), QR_INT8 (Q8_0), QR_INT3 (Q3_K),
 * QR_INT2 (Q2_K, TQ1_0, TQ2_0) or QR_LEVELS, in groups of 32 (Q2_K, Q3_K, Q6_K: 16; TQ1_0, TQ2_0: 128). Other blocks of 256
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

/* out[rows, in_features] = rows `ids` of a packed weight, in its dtype: the embedding of a tied head. */
QR_API int32_t qr_packed_rows(void* out, const void* packed, int32_t dtype, int64_t out_features, int64_t in_features,
                              const int64_t* ids, int64_t rows);

/* out[rows] = table[ids]; rows of row_bytes. */
QR_API int32_t qr_embedding(void* out, const void* table, int64_t row_bytes, int64_t table_rows, const int64_t* ids,
                            int64_t rows);

#ifdef __cplusplus
}
#endif
#endif
