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

#include "quire_cpu/attention.h"
#include "quire_cpu/base.h"
#include "quire_cpu/elementwise.h"
#include "quire_cpu/products.h"
#include "quire_cpu/recurrent.h"
#include "quire_cpu/runtime.h"
#include "quire_cpu/sampling.h"

#endif
