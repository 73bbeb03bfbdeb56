#include "threads.h"

#include <pthread.h>

#include <atomic>
#include <climits>
#include <cstdlib>
#include <new>

#include "quire_cpu.h"
#include "system.h"

namespace qr {
namespace {

// How long a thread spins before it sleeps. A worker covers the host's work between two ops of a step (some 20-60 us in
// Python); the caller covers stragglers of a piece (10-20 us). Waking a sleeper costs about 50 us on a virtual machine.
constexpr int64_t kWorkerSpinNs = 100'000;
constexpr int64_t kCallerSpinNs = 30'000;

// Spin until done(), in_vain() or the time is up; tells whether done.
template <class Done, class InVain>
bool spin(int64_t limit_ns, const Done& done, const InVain& in_vain) {
  int64_t deadline = 0;
  for (int turn = 0;; ++turn) {
    if (done()) return true;
    pause_cpu();
    if ((turn & 15) == 15) {
      if (in_vain()) return false;
      int64_t now = now_ns();
      if (deadline == 0) deadline = now + limit_ns;
      if (now >= deadline) return false;
    }
  }
}

// Of jobs that this thread starts; 0 is the process's number.
thread_local int32_t own_threads = 0;
std::atomic<int32_t> default_threads{1};

struct Pool {
  explicit Pool(int32_t count) : size(count) {
    for (int32_t i = 1; i < count; ++i) {
      if (pthread_create(&workers[num_workers], nullptr, &Pool::enter, this) != 0) break;  // fewer threads, same results
      ++num_workers;
    }
  }

  static constexpr int32_t kMaxThreads = 512;

  // The job. `ticket` packs (epoch << 32 | next piece) so that a late worker cannot take a piece of a later job with
  // the arguments of an earlier one: its compare-and-swap fails on the epoch.
  alignas(64) std::atomic<uint64_t> ticket{0};
  alignas(64) std::atomic<uint32_t> epoch{0};  // what sleeping workers wait for
  std::atomic<uint32_t> sleepers{0};
  // Where others compute, too, a worker can find itself on the caller's core. Then whoever spins keeps the other from
  // what it is spinning for, so both sleep at once.
  std::atomic<int32_t> caller_cpu{-1};
  std::atomic<bool> shares_cpu{false};
  alignas(64) std::atomic<uint32_t> done{0};  // what the caller waits for
  std::atomic<bool> caller_sleeps{false};
  alignas(64) PieceFn piece = nullptr;
  void* context = nullptr;
  std::atomic<uint32_t> num_pieces{0};

  std::atomic<bool> busy{false};
  int32_t size;
  int32_t num_workers = 0;
  pthread_t workers[kMaxThreads];

  // Take and run pieces of job `mine` until none is left.
  void work(uint32_t mine) {
    uint64_t seen = ticket.load(std::memory_order_acquire);
    for (;;) {
      if (uint32_t(seen >> 32) != mine) return;
      uint32_t limit = num_pieces.load(std::memory_order_acquire);
      uint32_t index = uint32_t(seen);
      if (index >= limit) return;
      if (!ticket.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
      piece(context, index);  // the job cannot end, nor its fields change, before this piece is counted
      if (done.fetch_add(1) + 1 == limit && caller_sleeps.load()) wake_all(done);
      seen = ticket.load(std::memory_order_acquire);
    }
  }

  void run(int64_t count, PieceFn fn, void* argument) {
    uint32_t mine = epoch.load(std::memory_order_relaxed) + 1;
    // Close the counter before the fields change: a worker that still holds the last job's ticket must not pass.
    ticket.store((uint64_t(mine) << 32) | UINT32_MAX);
    piece = fn;
    context = argument;
    num_pieces.store(uint32_t(count), std::memory_order_release);
    done.store(0);
    caller_cpu.store(this_cpu(), std::memory_order_relaxed);
    shares_cpu.store(false, std::memory_order_relaxed);
    ticket.store(uint64_t(mine) << 32, std::memory_order_release);
    epoch.store(mine);
    if (sleepers.load() != 0) wake_all(epoch);
    work(mine);
    const uint32_t all = uint32_t(count);
    auto ended = [&] { return done.load(std::memory_order_acquire) == all; };
    if (spin(kCallerSpinNs, ended, [&] { return shares_cpu.load(std::memory_order_relaxed); })) return;
    // Sleep rather than spin: the core goes to whoever holds the last piece, if it was waiting for one.
    caller_sleeps.store(true);
    for (uint32_t seen = done.load(); seen != all; seen = done.load()) wait_while(done, seen);
    caller_sleeps.store(false);
  }

  void loop() {
    uint32_t seen = 0;
    for (;;) {
      auto changed = [&] { return epoch.load(std::memory_order_acquire) != seen; };
      if (!spin(kWorkerSpinNs, changed, [&] { return is_on_callers_cpu(); })) {
        sleepers.fetch_add(1);
        while (epoch.load() == seen) wait_while(epoch, seen);
        sleepers.fetch_sub(1);
      }
      seen = epoch.load(std::memory_order_acquire);
      if (is_on_callers_cpu()) shares_cpu.store(true, std::memory_order_relaxed);
      work(seen);
    }
  }

  bool is_on_callers_cpu() const {
    const int32_t cpu = this_cpu();
    return cpu >= 0 && cpu == caller_cpu.load(std::memory_order_relaxed);
  }

  static void* enter(void* self) {
    own_threads = 1;  // a job that a piece starts runs on this thread alone
    static_cast<Pool*>(self)->loop();
    return nullptr;
  }

};

// One pool for each number of threads that was used, made with the first job that wants it and never freed: whoever
// sets another number cannot take a pool away from under a job, and threads that have none sleep.
std::atomic<Pool*> pools[Pool::kMaxThreads + 1];
pthread_mutex_t making = PTHREAD_MUTEX_INITIALIZER;

// After fork the child has no workers and perhaps a lock held for ever: forget the pools, the next job makes another.
void forget_in_child() {
  for (std::atomic<Pool*>& slot : pools) slot.store(nullptr);
  making = PTHREAD_MUTEX_INITIALIZER;
  forget_sleepers();
}

Pool* pool(int32_t count) {
  Pool* current = pools[count].load(std::memory_order_acquire);
  if (current != nullptr) return current;
  pthread_mutex_lock(&making);
  current = pools[count].load();
  if (current == nullptr) {
    static bool once = (pthread_atfork(nullptr, nullptr, forget_in_child), true);
    (void)once;
    current = new (std::nothrow) Pool(count);
    pools[count].store(current);
  }
  pthread_mutex_unlock(&making);
  return current;
}

struct Scratch {
  void* memory[7] = {};
  int64_t bytes[7] = {};
  ~Scratch() {
    for (void* slot : memory) std::free(slot);
  }
};
thread_local Scratch tls;

}  // namespace

void parallel(int64_t num_pieces, PieceFn piece, void* context) {
  const int32_t count = num_threads();
  if (num_pieces > 1 && num_pieces < INT_MAX && count > 1) {
    Pool* current = pool(count);
    if (current != nullptr && !current->busy.exchange(true, std::memory_order_acquire)) {
      current->run(num_pieces, piece, context);
      current->busy.store(false, std::memory_order_release);
      return;
    }
  }
  for (int64_t index = 0; index < num_pieces; ++index) piece(context, index);
}

bool is_num_threads(int32_t count) { return count >= 1 && count <= Pool::kMaxThreads; }

void set_default_num_threads(int32_t count) {
  default_threads.store(count);
  own_threads = 0;
}

void set_num_threads(int32_t count) { own_threads = count; }

int32_t num_threads() { return own_threads != 0 ? own_threads : default_threads.load(std::memory_order_relaxed); }

void* scratch(int slot, int64_t bytes) {
  if (tls.bytes[slot] < bytes) {
    std::free(tls.memory[slot]);
    // Large ones in huge pages: activations of a long prefill are read many times over.
    int64_t alignment = bytes >= (int64_t(1) << 18) ? int64_t(1) << 21 : 64;
    int64_t rounded = (bytes + bytes / 4 + alignment - 1) / alignment * alignment;
    tls.memory[slot] = std::aligned_alloc(size_t(alignment), size_t(rounded));
    tls.bytes[slot] = tls.memory[slot] == nullptr ? 0 : rounded;
    if (tls.memory[slot] != nullptr && alignment > 64) prefer_huge_pages(tls.memory[slot], size_t(rounded));
  }
  return tls.memory[slot];
}

}  // namespace qr

extern "C" int32_t qr_parallel(int64_t num_pieces, void (*piece)(void*, int64_t), void* context) {
  if (num_pieces < 0 || piece == nullptr) return QR_EINVAL;
  qr::parallel(num_pieces, piece, context);
  return QR_OK;
}
