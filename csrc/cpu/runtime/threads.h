// Fork-join pools for every kernel.
//
// Work is handed out in small pieces by an atomic counter and the caller works too, so a thread that is not scheduled
// (a neighbour took its core) holds up at most the piece it has in hand. Workers spin briefly between jobs, because
// the ops of one step follow each other within microseconds, then sleep on a futex: an idle engine uses no CPU.
//
// Threads are not pinned. When a neighbour takes a core, the caller runs out of pieces, sleeps for the last one, and
// the scheduler moves the thread that holds it to the core just freed; pinned, it would wait for its time slice.
// Measured with bf16 streaming on two cores, one taken at a higher priority: two threads keep the rate of one alone.
//
// A worker that finds itself on the caller's core does not spin, nor does the caller: each would keep the other from
// what it spins for, 100 us in every op (benchmarks/cpu.md, "Threads that meet on one core").
#pragma once

#include <cstdint>

namespace qr {

using PieceFn = void (*)(void* context, int64_t index);

// Run piece(context, 0..num_pieces-1), in any order, on the pool; returns when all are done. Nested or concurrent
// calls run on the calling thread alone.
void parallel(int64_t num_pieces, PieceFn piece, void* context);

template <class Body>
void parallel_for(int64_t num_pieces, const Body& body) {
  parallel(
      num_pieces, [](void* context, int64_t index) { (*static_cast<const Body*>(context))(index); },
      const_cast<Body*>(&body));
}

// Threads of a job, the caller included: this thread's own number, else the process's. Each number has a pool of its
// own, so that engines with different numbers do not meet.
int32_t num_threads();
bool is_num_threads(int32_t count);
void set_num_threads(int32_t count);
void set_default_num_threads(int32_t count);

// 64-byte aligned memory of the calling thread, at least `bytes` long, kept until the thread ends. Slots (0..6) live
// side by side; asking a slot again may move it. Null when memory is short.
void* scratch(int slot, int64_t bytes);

}  // namespace qr
