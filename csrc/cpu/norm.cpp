// Norms: rows are cut into pieces of some 64 KiB; a decode step's few rows run on the calling thread.
#include "arguments.h"
#include "kernels.h"
#include "runtime/threads.h"

namespace qr {
namespace {

constexpr int64_t kPieceElements = 16 * 1024;

int32_t run(void (*kernel)(const NormArgs&, int64_t, int64_t), const NormArgs& args, int64_t rows) {
  int64_t step = kPieceElements / args.cols;
  if (step < 1) step = 1;
  parallel_for(divide_up(rows, step), [&](int64_t index) {
    const int64_t begin = index * step;
    kernel(args, begin, begin + step < rows ? begin + step : rows);
  });
  return QR_OK;
}

bool valid(const void* out, int32_t out_dtype, const void* x, int32_t x_dtype, const float* weight, int64_t rows,
           int64_t cols, float eps) {
  return are_sizes(rows, cols) && is_epsilon(eps) && (rows == 0 || are_there(out, x, weight)) &&
          x_dtype >= QR_FLOAT32 && x_dtype <= QR_FLOAT16 && is_output_of(out_dtype, x_dtype, cols) && cols > 0;
}

}  // namespace
}  // namespace qr

using namespace qr;

extern "C" {

int32_t qr_rms_norm(void* out, int32_t out_dtype, const void* x, int32_t x_dtype, const void* residual,
                    const float* weight, int64_t rows, int64_t cols, float eps) {
  if (kernels() == nullptr) return QR_ESTATE;
  if (!valid(out, out_dtype, x, x_dtype, weight, rows, cols, eps)) return QR_EINVAL;
  return run(kernels()->rms_norm, NormArgs{out, out_dtype, x, x_dtype, residual, weight, nullptr, cols, eps}, rows);
}

int32_t qr_layer_norm(void* out, int32_t out_dtype, const void* x, int32_t x_dtype, const float* weight,
                      const float* bias, int64_t rows, int64_t cols, float eps) {
  if (kernels() == nullptr) return QR_ESTATE;
  if (!valid(out, out_dtype, x, x_dtype, weight, rows, cols, eps)) return QR_EINVAL;
  return run(kernels()->layer_norm, NormArgs{out, out_dtype, x, x_dtype, nullptr, weight, bias, cols, eps}, rows);
}
}
