/* From logits to tokens. */
#ifndef QUIRE_CPU_SAMPLING_H
#define QUIRE_CPU_SAMPLING_H

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

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

#ifdef __cplusplus
}
#endif
#endif
