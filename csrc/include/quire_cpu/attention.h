/* Pages of keys and values, and attention to them. */
#ifndef QUIRE_CPU_ATTENTION_H
#define QUIRE_CPU_ATTENTION_H

#include "products.h"

#ifdef __cplusplus
extern "C" {
#endif

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

/* Within each cache, copy block pairs[2 i] to pairs[2 i + 1], in order. block_bytes: of one half (keys or values). */
QR_API int32_t qr_copy_blocks(void* const* caches, int64_t num_caches, int64_t num_blocks, int64_t block_bytes,
                              const int64_t* pairs, int64_t num_pairs);

#ifdef __cplusplus
}
#endif
#endif
