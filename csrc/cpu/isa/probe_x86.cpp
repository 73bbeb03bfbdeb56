// Which instruction sets this x86 processor and its operating system run.
#include <cpuid.h>
#include <csignal>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <initializer_list>

#include "probe.h"

namespace qr {

int32_t execute_amx();  // amx.cpp: one instruction of each kind; 1 when the products are right

namespace {

struct Cpuid {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
  Cpuid(uint32_t leaf, uint32_t subleaf) { __get_cpuid_count(leaf, subleaf, &eax, &ebx, &ecx, &edx); }
};

bool bit(uint32_t word, int index) { return (word >> index) & 1u; }

uint64_t xgetbv() {
  uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t(high) << 32) | low;
}

constexpr int kArchRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
constexpr int kTileData = 18;                   // XFEATURE_XTILEDATA

// Whether kernels for AVX-VNNI run: in their own encoding, or in that of AVX512-VNNI, in which tests may have them.
bool has_avx_vnni([[maybe_unused]] bool vex, [[maybe_unused]] bool evex) {
#if defined(QR_EVEX)
  return evex;
#else
  return vex;
#endif
}

[[maybe_unused]] bool request_tiles() { return syscall(SYS_arch_prctl, kArchRequestPermission, kTileData) == 0; }

// Run AMX once in a child, because flags are not enough: hosts exist whose guests fault. The child is cloned without
// an exit signal and without fork handlers, so the program around us sees nothing of it; it reports through shared
// memory, since a program that ignores SIGCHLD leaves no exit status.
[[maybe_unused]] bool survives_amx() {
  void* memory = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return false;
  auto* flag = static_cast<volatile int32_t*>(memory);
  *flag = 0;
  long child = syscall(SYS_clone, 0, nullptr, nullptr, nullptr, nullptr);
  if (child == 0) {
    rlimit no_core{0, 0};
    setrlimit(RLIMIT_CORE, &no_core);
    for (int sig : {SIGILL, SIGSEGV, SIGBUS, SIGFPE, SIGTRAP}) signal(sig, SIG_DFL);
    if (request_tiles() && execute_amx() == 1) *flag = 1;
    syscall(SYS_exit_group, 0);
  }
  if (child > 0) {
    int status;
    while (waitpid(pid_t(child), &status, __WALL) < 0 && errno == EINTR) {
    }
  }
  bool survived = *flag == 1;
  munmap(memory, 4096);
  return survived;
}

// Whether kernels for tiles run, on a processor that has all else they use: in tiles of its own, or of emulated ones.
bool has_tiles([[maybe_unused]] bool real) {
#if defined(QR_EMULATED_TILES)
  return execute_amx() == 1;
#else
  return real && survives_amx() && request_tiles();
#endif
}

bool is_made_by(uint32_t start_of_name) { return Cpuid(0, 0).ebx == start_of_name; }

// Zen 5 is the first of AMD's that has AVX-VNNI.
[[maybe_unused]] Core find_core() {
  if (is_made_by(0x756e6547)) return Core::kIntel;  // "Genu"ineIntel
  const bool is_amd = is_made_by(0x68747541);       // "Auth"enticAMD
  return is_amd && Cpuid(7, 0).eax >= 1 && bit(Cpuid(7, 1).eax, 4) ? Core::kZen5 : Core::kOther;
}

// Whether vdpbf16ps takes as long as four multiplications and additions of floats: on Intel's processors since the first
// with AMX, which are those with float16 in 512 bits.
bool has_slow_pairs() {
#if defined(QR_AS_CORE)
  return core() == Core::kIntel;
#else
  return core() == Core::kIntel && bit(Cpuid(7, 0).edx, 23);
#endif
}

}  // namespace

Core core() {
#if defined(QR_AS_CORE)  // for tests
  return Core::QR_AS_CORE;
#else
  static const Core found = find_core();
  return found;
#endif
}

uint32_t probe() {
  if (__get_cpuid_max(0, nullptr) < 7) return 0;
  const Cpuid one(1, 0), seven(7, 0);
  const Cpuid more(7, seven.eax >= 1 ? 1 : 0);
  const bool has_more = seven.eax >= 1, osxsave = bit(one.ecx, 27);
  const uint64_t enabled = osxsave ? xgetbv() : 0;
  const bool ymm = (enabled & 0x6) == 0x6, zmm = (enabled & 0xe6) == 0xe6, tiles = (enabled & 0x60000) == 0x60000;
  const bool fma = bit(one.ecx, 12), f16c = bit(one.ecx, 29);
  if (!ymm || !fma || !f16c || !bit(seven.ebx, 5)) return 0;
  uint32_t isas = bit_of(QR_AVX2);
  // F, DQ, BW, VL
  const bool avx512 = zmm && bit(seven.ebx, 16) && bit(seven.ebx, 17) && bit(seven.ebx, 30) && bit(seven.ebx, 31);
  const bool vnni = bit(seven.ecx, 11);
  if (has_avx_vnni(has_more && bit(more.eax, 4), avx512 && vnni)) isas |= bit_of(QR_AVX_VNNI);
  if (!avx512) return isas;
  isas |= bit_of(QR_AVX512);
  if (!vnni) return isas;
  isas |= bit_of(QR_AVX512_VNNI);
  if (!has_more || !bit(more.eax, 5)) return isas;
  isas |= bit_of(QR_AVX512_BF16);
  const bool vbmi = bit(seven.ecx, 1);
  const bool amx = bit(seven.edx, 22) && bit(seven.edx, 24) && bit(seven.edx, 25);  // bf16, tile, int8
  if (vbmi && has_tiles(tiles && amx)) isas |= bit_of(QR_AMX);
  return isas;
}

void fill(Kernels& kernels, int32_t isa) {
  fill_avx2(kernels);
  if (isa == QR_AVX_VNNI) return fill_avx_vnni(kernels);
  if (isa >= QR_AVX512) fill_avx512(kernels);
  if (isa >= QR_AVX512_VNNI) fill_avx512_vnni(kernels);
  if (isa >= QR_AVX512_BF16) fill_avx512_bf16(kernels, has_slow_pairs());
  if (isa >= QR_AMX) fill_amx(kernels);
}

}  // namespace qr
