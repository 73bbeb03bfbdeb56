// A background thread that computes in short bursts.
//
// A low priority alone does not keep such a thread out of the way. Where the kernel switches threads at its clock ticks
// only, 4 ms apart on many machines, a thread that has just been given a core keeps it until the next one, whoever
// wakes up for it meanwhile. A sleep is a switch at once: whoever waits for the core has it 1 ms later at most.
#include "quire_cpu.h"

#if defined(__linux__)

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include "system.h"

namespace qr {
namespace {

constexpr int64_t kBurstNs = 1'000'000;
constexpr int64_t kRestNs = 50'000;
constexpr int kSignal = 7;  // after SIGRTMIN, which is no constant

// One alarm at a time, set again after each rest. A periodic one would run out while the thread waits for a core, and
// the thread would rest as soon as it got one.
struct Alarm {
  timer_t timer = nullptr;
  bool is_made = false;

  bool make() {
    sigevent event{};
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = SIGRTMIN + kSignal;
    event.sigev_value.sival_ptr = this;
    event._sigev_un._tid = pid_t(syscall(SYS_gettid));
    is_made = timer_create(CLOCK_MONOTONIC, &event, &timer) == 0;
    return is_made && set();
  }

  bool set() {
    itimerspec once{{0, 0}, {0, kBurstNs}};
    return timer_settime(timer, 0, &once, nullptr) == 0;
  }

  ~Alarm() {
    if (is_made) timer_delete(timer);
  }
};
thread_local Alarm own_alarm;

void rest(int, siginfo_t* info, void*) {
  const int error = errno;
  timespec time{0, kRestNs};
  nanosleep(&time, nullptr);
  if (info->si_code == SI_TIMER) static_cast<Alarm*>(info->si_value.sival_ptr)->set();
  errno = error;
}

// False where somebody else has the signal.
bool take_signal() {
  struct sigaction before {};
  struct sigaction ours {};
  if (sigaction(SIGRTMIN + kSignal, nullptr, &before) != 0) return false;
  if ((before.sa_flags & SA_SIGINFO) != 0 && before.sa_sigaction == rest) return true;
  if (before.sa_handler != SIG_DFL) return false;
  ours.sa_sigaction = rest;
  ours.sa_flags = SA_SIGINFO | SA_RESTART;
  return sigaction(SIGRTMIN + kSignal, &ours, nullptr) == 0;
}

bool begin() {
  if (own_alarm.is_made) return true;
  sigset_t signal;
  sigemptyset(&signal);
  sigaddset(&signal, SIGRTMIN + kSignal);
  return take_signal() && pthread_sigmask(SIG_UNBLOCK, &signal, nullptr) == 0 && own_alarm.make();
}

}  // namespace
}  // namespace qr

extern "C" int32_t qr_compute_in_bursts(void) { return qr::begin() ? QR_OK : QR_EUNSUPPORTED; }

#else

extern "C" int32_t qr_compute_in_bursts(void) { return QR_EUNSUPPORTED; }

#endif
