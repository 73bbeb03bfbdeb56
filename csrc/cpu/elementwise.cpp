// Elementwise ops, cut into pieces of 64 KiB or less.
#include "arguments.h"
#include "kernels.h"
#include "runtime/threads.h"

namespace qr {
namespace {

constexpr int64_t kPieceElements = 16 * 1024;

template <class Body>
void for_each_piece(int64_t n, const Body& body) {
  parallel_for(divide_up(n, kPieceElements), [&](int64_t index) {
    const int64_t begin = index * kPieceElements;
    body(begin, begin + kPieceElements < n ? kPieceElements : n - begin);
  });
}

}  // namespace
}  // namespace qr

using namespace qr;

extern "C" {

int32_t qr_scale_add(void* out, const void* x, const void* residual, int32_t dtype, float scale, int64_t n) {
  if (kernels() == nullptr) return QR_ESTATE;
  if (dtype < QR_FLOAT32 || dtype > QR_FLOAT16 || !are_sizes(n) || (n > 0 && !are_there(out, x)))
    return QR_EINVAL;
  for_each_piece(n, [&](int64_t begin, int64_t count) {
    const int64_t at = begin * bytes_of(dtype);
    kernels()->scale_add(static_cast<char*>(out) + at, static_cast<const char*>(x) + at,
                         residual == nullptr ? nullptr : static_cast<const char*>(residual) + at, dtype, scale, count);
  });
  return QR_OK;
}

int32_t qr_soft_cap(float* x, float cap, int64_t n) {
  if (kernels() == nullptr) return QR_ESTATE;
  if (!(cap > 0 && is_finite(cap)) || !are_sizes(n) || (n > 0 && x == nullptr)) return QR_EINVAL;
  for_each_piece(n, [&](int64_t begin, int64_t count) { kernels()->soft_cap(x + begin, cap, count); });
  return QR_OK;
}

}  // extern "C"
