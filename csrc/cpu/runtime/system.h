// What operating systems and processors do differently, beside vectors: waiting, large pages.
#pragma once

#include <time.h>

#include <atomic>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <new>

#if defined(__linux__)
#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <pthread.h>
#endif

namespace qr {

inline int64_t now_ns() {
  timespec ts;
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return int64_t(ts.tv_sec) * 1'000'000'000 + ts.tv_nsec;
}

// In a loop that waits: the other thread of the core, if it has one, goes first.
inline void pause_cpu() {
#if defined(__aarch64__)
  asm volatile("isb" ::: "memory");  // takes about as long as x86's pause; yield does nothing on most
#else
  __builtin_ia32_pause();
#endif
}

// The logical CPU that this thread is on at the moment; -1 where the system does not say.
inline int32_t this_cpu() {
#if defined(__linux__)
  return sched_getcpu();
#else
  return -1;
#endif
}

#if defined(__linux__)
// Sleep while `word` is `expected`; may return early.
inline void wait_while(std::atomic<uint32_t>& word, uint32_t expected) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}
inline void wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}
#else
// One lock for all words: sleepers are few, and look again at theirs when any is woken.
struct Sleepers {
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t woken = PTHREAD_COND_INITIALIZER;
};
inline Sleepers sleepers;

inline void wait_while(std::atomic<uint32_t>& word, uint32_t expected) {
  pthread_mutex_lock(&sleepers.mutex);
  while (word.load() == expected) pthread_cond_wait(&sleepers.woken, &sleepers.mutex);
  pthread_mutex_unlock(&sleepers.mutex);
}
inline void wake_all(std::atomic<uint32_t>&) {
  pthread_mutex_lock(&sleepers.mutex);  // who has seen the old word sleeps by now
  pthread_cond_broadcast(&sleepers.woken);
  pthread_mutex_unlock(&sleepers.mutex);
}
#endif

// After fork: nobody sleeps here, and a lock may be held for ever.
inline void forget_sleepers() {
#if !defined(__linux__)
  new (&sleepers) Sleepers;
#endif
}

// Ask for huge pages, where there are any to ask for.
inline void prefer_huge_pages([[maybe_unused]] void* memory, [[maybe_unused]] size_t bytes) {
#if defined(__linux__)
  madvise(memory, bytes, MADV_HUGEPAGE);
#endif
}

}  // namespace qr
