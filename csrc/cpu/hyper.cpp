// Hyper-connections: the streams of each token, read and written around the halves of a layer.
#include "arguments.h"
#include "kernels.h"
#include "runtime/threads.h"

using namespace qr;

namespace {

// Elements that one piece takes, at least (3-5 us).
constexpr int64_t kPieceElements = 16 * 1024;

template <class Run>
void each_piece(int64_t tokens, int64_t elements_of_token, const Run& run) {
  const int64_t each = divide_up(kPieceElements, elements_of_token);
  parallel_for(divide_up(tokens, each), [&](int64_t piece) {
    const int64_t begin = piece * each, end = begin + each < tokens ? begin + each : tokens;
    run(begin, end);
  });
}

constexpr int64_t kMostIterations = 10000;

// Several streams of each token, whose matrix has `count` squared numbers.
bool are_streams(int64_t tokens, int64_t count, int64_t size, int32_t dtype) {
  return is_dtype(dtype) && count > 0 && size > 0 && are_sizes(tokens, count, size) && are_sizes(tokens, count, count + 2);
}

}  // namespace

extern "C" {

int32_t qr_read_streams(void* out, float* writing, const void* streams, int32_t dtype, const float* products,
                        const float* scale, const float* base, int64_t tokens, int64_t count, int64_t size, float eps,
                        float norm_eps, float magnitude, float least_added, int64_t iterations) {
  if (kernels() == nullptr) return QR_ESTATE;
  if (!are_streams(tokens, count, size, dtype) || !is_epsilon(eps) || !is_epsilon(norm_eps) ||
      (writing != nullptr && (iterations < 0 || iterations > kMostIterations || !is_finite(magnitude) ||
                              !is_finite(least_added))) ||
      !are_there(scale, base) || (tokens > 0 && !are_there(out, streams, products)))
    return QR_EINVAL;
  const HyperArgs args{out,  writing, streams,  dtype,     products,    scale,     base,
                       count, size,    eps,      norm_eps,  magnitude,   least_added, iterations};
  each_piece(tokens, count * size, [&](int64_t begin, int64_t end) { kernels()->read_streams(args, begin, end); });
  return QR_OK;
}

int32_t qr_write_streams(void* out, const void* streams, int32_t dtype, const void* added, const float* writing,
                         int64_t tokens, int64_t count, int64_t size, int32_t has_matrix) {
  if (kernels() == nullptr) return QR_ESTATE;
  if (!are_streams(tokens, count, size, dtype) || (tokens > 0 && !are_there(out, streams, added, writing)))
    return QR_EINVAL;
  const StreamWriteArgs args{out, streams, dtype, added, writing, count, size, has_matrix != 0};
  each_piece(tokens, count * size, [&](int64_t begin, int64_t end) { kernels()->write_streams(args, begin, end); });
  return QR_OK;
}
}
