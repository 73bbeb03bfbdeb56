// Memory of machines with several NUMA nodes.
#include "quire_cpu.h"

#if defined(__linux__)
#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

extern "C" {

int32_t qr_interleave([[maybe_unused]] void* memory, int64_t bytes, [[maybe_unused]] const uint64_t* nodes,
                      int64_t words) {
  if (memory == nullptr || nodes == nullptr || bytes <= 0 || words <= 0 || words > 16) return QR_EINVAL;
#if defined(__linux__)
  int mode = MPOL_DEFAULT;
  if (syscall(SYS_get_mempolicy, &mode, nullptr, 0, nullptr, 0) != 0) return QR_EUNSUPPORTED;
  if (mode != MPOL_DEFAULT) return QR_OK;
  const long status = syscall(SYS_mbind, memory, bytes, MPOL_INTERLEAVE, nodes, words * 64 + 1, 0);
  return status == 0 ? QR_OK : QR_EUNSUPPORTED;
#else
  return QR_EUNSUPPORTED;
#endif
}
}
