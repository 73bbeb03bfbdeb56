// Which instruction sets this ARM processor and its operating system run.
#include "probe.h"

#include <cstddef>

#if defined(__APPLE__)
#include <sys/sysctl.h>
#else
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace qr {
namespace {

struct Features {
  bool dotprod, bf16, i8mm;
};

#if defined(__APPLE__)
bool has(const char* name) {
  int32_t value = 0;
  size_t size = sizeof(value);
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
}

Features features() {
  return {has("hw.optional.arm.FEAT_DotProd"), has("hw.optional.arm.FEAT_BF16"), has("hw.optional.arm.FEAT_I8MM")};
}
#else
Features features() {
  const unsigned long first = getauxval(AT_HWCAP), second = getauxval(AT_HWCAP2);
  return {(first & HWCAP_ASIMDDP) != 0, (second & HWCAP2_BF16) != 0, (second & HWCAP2_I8MM) != 0};
}
#endif

}  // namespace

Core core() { return Core::kOther; }

uint32_t probe() {
  const Features has = features();
  uint32_t isas = bit_of(QR_NEON);
  if (has.dotprod) isas |= bit_of(QR_NEON_DOTPROD);
  if (has.dotprod && has.bf16 && has.i8mm) isas |= bit_of(QR_NEON_BF16);
  return isas;
}

void fill(Kernels& kernels, int32_t isa) {
  fill_neon(kernels);
  if (isa >= QR_NEON_DOTPROD) fill_neon_dotprod(kernels);
  if (isa >= QR_NEON_BF16) fill_neon_bf16(kernels);
}

}  // namespace qr
