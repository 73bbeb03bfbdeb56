/* Norms, several hidden states of a token, and single elements. */
#ifndef QUIRE_CPU_ELEMENTWISE_H
#define QUIRE_CPU_ELEMENTWISE_H

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- norms (norm.cpp) ----
 * out is of x_dtype, or that in tiles; where it is not in tiles it may alias x. */

/* out[rows, cols] = x / sqrt(mean(x^2) + eps) * weight + residual; residual may be null. */
QR_API int32_t qr_rms_norm(void* out, int32_t out_dtype, const void* x, int32_t x_dtype, const void* residual,
                           const float* weight, int64_t rows, int64_t cols, float eps);

/* out[rows, cols] = (x - mean) / sqrt(var + eps) * weight + bias; bias may be null. */
QR_API int32_t qr_layer_norm(void* out, int32_t out_dtype, const void* x, int32_t x_dtype, const float* weight,
                             const float* bias, int64_t rows, int64_t cols, float eps);

/* ---- several hidden states of a token (hyper.cpp) ---- */

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

/* ---- elementwise (elementwise.cpp) ---- */

/* out = x * scale + residual (or null), n elements of dtype, rounded once. out may be x. */
QR_API int32_t qr_scale_add(void* out, const void* x, const void* residual, int32_t dtype, float scale, int64_t n);

/* x = cap * tanh(x / cap), in place; cap > 0. */
QR_API int32_t qr_soft_cap(float* x, float cap, int64_t n);

#ifdef __cplusplus
}
#endif
#endif
