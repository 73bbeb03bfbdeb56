/* Recurrent layers. */
#ifndef QUIRE_CPU_RECURRENT_H
#define QUIRE_CPU_RECURRENT_H

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

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

#ifdef __cplusplus
}
#endif
#endif
