#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "check.h"
#include "quire_cpu.h"

static int64_t run_job(int64_t pieces) {
  std::atomic<int64_t> sum{0};
  qr_parallel(
      pieces, [](void* context, int64_t i) { static_cast<std::atomic<int64_t>*>(context)->fetch_add(i + 1); }, &sum);
  return sum.load();
}

TEST(every_piece_runs_once) {
  for (int32_t threads : {1, 2, 3, 8}) {
    qr_init(qr_isa_in_use(), threads);
    for (int64_t pieces : {0, 1, 2, 3, 17, 1000})
      for (int turn = 0; turn < 200; ++turn)
        CHECK(run_job(pieces) == pieces * (pieces + 1) / 2, "threads %d pieces %ld", threads, long(pieces));
  }
  qr_init(qr_isa_in_use(), 2);
}

TEST(two_callers_do_not_disturb_each_other) {
  std::thread other([] {
    for (int turn = 0; turn < 5000; ++turn) CHECK(run_job(20) == 210);
  });
  for (int turn = 0; turn < 5000; ++turn) CHECK(run_job(30) == 465);
  other.join();
}

TEST(a_nested_job_runs_on_its_thread) {
  std::atomic<int64_t> total{0};
  qr_parallel(
      10, [](void* context, int64_t) { static_cast<std::atomic<int64_t>*>(context)->fetch_add(run_job(10)); }, &total);
  CHECK(total.load() == 550);
}

TEST(a_forked_child_has_a_pool_of_its_own) {
  run_job(100);
  pid_t child = fork();
  if (child == 0) _exit(run_job(100) == 5050 ? 0 : 1);
  int status = -1;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK(run_job(100) == 5050);
}

TEST(an_idle_pool_uses_no_cpu) {
  run_job(100);
  usleep(5000);
  timespec before, after;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
  usleep(200000);
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after);
  double used = double(after.tv_sec - before.tv_sec) + double(after.tv_nsec - before.tv_nsec) * 1e-9;
  CHECK(used < 0.002, "%.4f s of CPU in 0.2 s", used);
}

TEST(another_number_of_threads_takes_no_pool_away) {
  std::atomic<bool> ended{false};
  std::thread other([&] {
    for (int32_t turn = 0; !ended.load(); ++turn) {
      qr_set_num_threads(2 + turn % 3);
      CHECK(run_job(50) == 1275);
    }
  });
  for (int32_t turn = 0; turn < 3000; ++turn) {
    qr_init(qr_isa_in_use(), 1 + turn % 4);
    CHECK(run_job(30) == 465);
  }
  ended.store(true);
  other.join();
  qr_init(qr_isa_in_use(), 2);
}

TEST(each_thread_has_its_own_number_of_threads) {
  qr_init(qr_isa_in_use(), 3);
  CHECK(qr_set_num_threads(2) == QR_OK);
  std::thread other([] {
    CHECK(qr_num_threads() == 3);
    qr_set_num_threads(5);
    CHECK(qr_num_threads() == 5);
  });
  other.join();
  CHECK(qr_num_threads() == 2);
  qr_init(qr_isa_in_use(), 2);
}

#if defined(__linux__)
TEST(a_thread_in_bursts_leaves_its_core_again_and_again) {
  long sleeps[2] = {};
  for (bool in_bursts : {false, true}) {
    std::thread([&] {
      if (in_bursts) CHECK(qr_compute_in_bursts() == QR_OK && qr_compute_in_bursts() == QR_OK);
      rusage before, after;
      getrusage(RUSAGE_THREAD, &before);
      auto used = [&] {
        getrusage(RUSAGE_THREAD, &after);
        return (after.ru_utime.tv_sec - before.ru_utime.tv_sec) * 1'000'000 + after.ru_utime.tv_usec - before.ru_utime.tv_usec;
      };
      while (used() < 50'000) run_job(1);
      sleeps[in_bursts] = after.ru_nvcsw - before.ru_nvcsw;
    }).join();
  }
  CHECK(sleeps[0] < 10 && sleeps[1] > 25, "%ld and %ld sleeps", sleeps[0], sleeps[1]);
}

TEST(threads_in_bursts_leave_no_timers_behind) {
  rlimit before;
  getrlimit(RLIMIT_SIGPENDING, &before);
  rlimit few{200, before.rlim_max};  // of signals and timers
  setrlimit(RLIMIT_SIGPENDING, &few);
  for (int turn = 0; turn < 1000; ++turn) std::thread([] { CHECK(qr_compute_in_bursts() == QR_OK); }).join();
  setrlimit(RLIMIT_SIGPENDING, &before);
}

TEST(a_signal_that_the_process_uses_is_left_alone) {
  const int number = SIGRTMIN + 7;
  struct sigaction before {};
  struct sigaction own {};
  own.sa_handler = [](int) {};
  sigaction(number, &own, &before);
  std::thread([] { CHECK(qr_compute_in_bursts() == QR_EUNSUPPORTED); }).join();
  sigaction(number, &before, nullptr);
}

TEST(jobs_end_where_all_threads_share_a_core) {
  cpu_set_t before, one;
  CHECK(sched_getaffinity(0, sizeof before, &before) == 0);
  CPU_ZERO(&one);
  CPU_SET(sched_getcpu(), &one);
  std::thread([&] {  // workers inherit the core of whoever starts the pool
    CHECK(sched_setaffinity(0, sizeof one, &one) == 0);
    qr_set_num_threads(4);
    for (int turn = 0; turn < 2000; ++turn) CHECK(run_job(1 + turn % 40) == (1 + turn % 40) * (2 + turn % 40) / 2);
    CHECK(sched_setaffinity(0, sizeof before, &before) == 0);
    for (int turn = 0; turn < 2000; ++turn) CHECK(run_job(30) == 465);
  }).join();
}
#endif
