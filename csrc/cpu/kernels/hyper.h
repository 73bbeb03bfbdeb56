// Hyper-connections: what a half of a layer reads of a token's streams, and how it writes them. In float32; sums over
// streams are added one after the other.
#pragma once

#include "norm.h"

namespace qr {
namespace {

// Rows of exponentials that add up to one, then columns and rows by turns. matrix: [count][count]
void balance(float* matrix, int64_t count, float eps, int64_t iterations) {
  const auto scale = [&](int64_t first, int64_t step, float more) {
    float total = 0.0f;
    for (int64_t i = 0; i < count; ++i) total += matrix[first + i * step];
    for (int64_t i = 0; i < count; ++i) matrix[first + i * step] /= total + more;
  };
  const auto rows = [&](float more) {
    for (int64_t row = 0; row < count; ++row) scale(row * count, 1, more);
  };
  const auto columns = [&] {
    for (int64_t column = 0; column < count; ++column) scale(column, count, eps);
  };
  for (int64_t row = 0; row < count; ++row) {
    float* own = matrix + row * count;
    float top = own[0];
    for (int64_t i = 1; i < count; ++i) top = own[i] > top ? own[i] : top;
    for (int64_t i = 0; i < count; ++i) own[i] -= top;
  }
  each_vector(count * count, [&](int64_t i, int n) __attribute__((always_inline)) {
    store_some(matrix + i, exp(load_some(matrix + i, n)), n);
  });
  rows(0.0f);
  for (int64_t i = 0; i < count * count; ++i) matrix[i] += eps;
  columns();
  for (int64_t i = 1; i < iterations; ++i) {
    rows(eps);
    columns();
  }
}

// Of one token.
template <class T>
void read_streams_of(const HyperArgs& args, int64_t token, float* numbers) {
  const int64_t count = args.count, size = args.size, width = count * size;
  const int64_t num_products = count + args.num_written();
  const T* streams = static_cast<const T*>(args.streams) + token * width;
  T* out = static_cast<T*>(args.out) + token * size;
  const float squares = row_sum(width, [&](int64_t i, int n) __attribute__((always_inline)) {
    const vf v = load_some(streams + i, n);
    return mul(v, v);
  });
  const float rms = __builtin_sqrtf(squares / float(width) + args.norm_eps);
  const float* products = args.products + token * num_products;
  for (int64_t i = 0; i < num_products; ++i) numbers[i] = products[i] / rms * args.scale[i] + args.base[i];
  each_vector(args.writing == nullptr ? count : 2 * count, [&](int64_t i, int n) __attribute__((always_inline)) {
    store_some(numbers + i, sigmoid(load_some(numbers + i, n)), n);
  });
  for (int64_t i = 0; i < count; ++i) numbers[i] += args.eps;
  each_vector(size, [&](int64_t i, int n) __attribute__((always_inline)) {
    vf total = mul(load_some(streams + i, n), set1(numbers[0]));
    for (int64_t s = 1; s < count; ++s) total = fma(load_some(streams + s * size + i, n), set1(numbers[s]), total);
    store_some(out + i, total, n);
  });
  if (args.writing == nullptr) return;
  float* writing = args.writing + token * args.num_written();
  for (int64_t i = 0; i < count; ++i) writing[i] = args.magnitude * numbers[count + i] + args.least_added;
  if (args.iterations == 0) return;
  for (int64_t i = 0; i < count * count; ++i) writing[count + i] = numbers[2 * count + i];
  balance(writing + count, count, args.eps, args.iterations);
}

template <class T>
void add_to_streams_of(const StreamWriteArgs& args, int64_t token) {
  const int64_t count = args.count, size = args.size;
  const T* added = static_cast<const T*>(args.added) + token * size;
  for (int64_t stream = 0; stream < count; ++stream) {
    const int64_t first = (token * count + stream) * size;
    const T* own = static_cast<const T*>(args.streams) + first;
    T* out = static_cast<T*>(args.out) + first;
    each_vector(size, [&](int64_t i, int n) __attribute__((always_inline)) {
      const vf share = set1(args.writing[token * count + stream]);
      store_some(out + i, fma(load_some(added + i, n), share, load_some(own + i, n)), n);
    });
  }
}

template <class T>
void write_streams_of(const StreamWriteArgs& args, int64_t token) {
  if (!args.has_matrix) return add_to_streams_of<T>(args, token);
  const int64_t count = args.count, size = args.size;
  const T* streams = static_cast<const T*>(args.streams) + token * count * size;
  const T* added = static_cast<const T*>(args.added) + token * size;
  T* out = static_cast<T*>(args.out) + token * count * size;
  const float* writing = args.writing + token * count * (1 + count);
  for (int64_t stream = 0; stream < count; ++stream)
    each_vector(size, [&](int64_t i, int n) __attribute__((always_inline)) {
      vf total = mul(load_some(added + i, n), set1(writing[stream]));
      for (int64_t source = 0; source < count; ++source)
        total = fma(load_some(streams + source * size + i, n), set1(writing[count * (1 + source) + stream]), total);
      store_some(out + stream * size + i, total, n);
    });
}

void read_streams(const HyperArgs& args, int64_t begin, int64_t end) {
  auto* numbers = static_cast<float*>(scratch(0, args.count * (2 + args.count) * 4));
  if (numbers == nullptr) return;
  for (int64_t token = begin; token < end; ++token) {
    if (args.dtype == QR_FLOAT32)
      read_streams_of<float>(args, token, numbers);
    else if (args.dtype == QR_BFLOAT16)
      read_streams_of<Bf16>(args, token, numbers);
    else
      read_streams_of<Fp16>(args, token, numbers);
  }
}

void write_streams(const StreamWriteArgs& args, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token) {
    if (args.dtype == QR_FLOAT32)
      write_streams_of<float>(args, token);
    else if (args.dtype == QR_BFLOAT16)
      write_streams_of<Bf16>(args, token);
    else
      write_streams_of<Fp16>(args, token);
  }
}

}  // namespace
}  // namespace qr
