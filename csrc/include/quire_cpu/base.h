/* Statuses, and what dtypes, activations, formats and instruction sets are called. */
#ifndef QUIRE_CPU_BASE_H
#define QUIRE_CPU_BASE_H

#include <stdint.h>

#define QR_API __attribute__((visibility("default")))
#define QR_ABI_VERSION 23

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
typedef enum { QR_INT8 = 1, QR_INT4 = 2, QR_LEVELS = 3, QR_FLOAT8 = 4, QR_INT5 = 5, QR_INT6 = 6, QR_INT2 = 7, QR_INT3 = 8 } qr_format;
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

#endif
