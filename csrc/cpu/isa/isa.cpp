// The kernel table in use, of the instruction sets that this machine runs.
#include <atomic>

#include "probe.h"
#include "../runtime/threads.h"

namespace qr {
namespace {

Kernels tables[kNumIsas];  // by qr_isa; each is written once, so that choosing another disturbs no kernel that runs
std::atomic<const Kernels*> in_use{nullptr};
std::atomic<int32_t> isa_in_use{0};

bool fill_tables() {
  for (int32_t isa = 0; isa < kNumIsas; ++isa)
    if ((qr_isas() & bit_of(isa)) != 0) fill(tables[isa], isa);
  return true;
}

int32_t best_isa() {
  int32_t best = kNumIsas - 1;
  while (best > 0 && (qr_isas() & bit_of(best)) == 0) --best;
  return best;
}

}  // namespace

const Kernels* kernels() { return in_use.load(std::memory_order_acquire); }

}  // namespace qr

extern "C" {

int32_t qr_abi_version(void) { return QR_ABI_VERSION; }

uint32_t qr_isas(void) {
  static const uint32_t isas = qr::probe();
  return isas;
}

int32_t qr_init(int32_t isa, int32_t num_threads) {
  if (isa == 0) isa = qr::best_isa();
  if (isa < 0 || isa >= qr::kNumIsas || (qr_isas() & qr::bit_of(isa)) == 0) return QR_EUNSUPPORTED;
  if (!qr::is_num_threads(num_threads)) return QR_EINVAL;
  static const bool filled = qr::fill_tables();
  (void)filled;
  qr::isa_in_use.store(isa);
  qr::in_use.store(&qr::tables[isa], std::memory_order_release);
  qr::set_default_num_threads(num_threads);
  return QR_OK;
}

int32_t qr_set_num_threads(int32_t num_threads) {
  if (qr_isa_in_use() == 0) return QR_ESTATE;
  if (!qr::is_num_threads(num_threads)) return QR_EINVAL;
  qr::set_num_threads(num_threads);
  return QR_OK;
}

int32_t qr_isa_in_use(void) { return qr::isa_in_use.load(); }

int32_t qr_num_threads(void) { return qr_isa_in_use() == 0 ? 0 : qr::num_threads(); }
}
