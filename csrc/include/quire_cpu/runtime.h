/* Starting, threads, memory, and recorded runs. */
#ifndef QUIRE_CPU_RUNTIME_H
#define QUIRE_CPU_RUNTIME_H

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

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

/* Have the operating system put memory behind `bytes` bytes that may not have been written yet, on this thread. What
 * they hold stays as it is, even while others write it. */
QR_API int32_t qr_touch(void* begin, int64_t bytes);

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
