#include <cmath>
#include <cstdlib>
#include <cstring>
#include <tuple>

#include "check.h"
#include "quire_cpu.h"

namespace {

double activate(double x, int32_t activation) {
  switch (activation) {
    case QR_SILU:
      return x / (1 + std::exp(-x));
    case QR_GELU:
      return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
    case QR_GELU_TANH:
      return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    case QR_RELU:
      return x > 0 ? x : 0;
    default:
      return x;
  }
}

struct Layer {
  int64_t n, k;
  int32_t dtype;
  std::vector<float> weight;
  char* packed;

  Layer(int64_t n, int64_t k, int32_t dtype) : n(n), k(k), dtype(dtype) {
    std::vector<char> raw = encode(random_floats(n * k, 1.0f / std::sqrt(float(k))), dtype);
    weight = decode(raw, dtype);
    packed = aligned_zeros(qr_packed_bytes(dtype, n, k));
    // in two parts that meet inside a panel
    const int64_t first = n / 3;
    const int64_t size = dtype == QR_FLOAT32 ? 4 : 2;
    CHECK(qr_pack_linear(packed, dtype, n, k, raw.data(), dtype, first, k, 0) == QR_OK);
    CHECK(qr_pack_linear(packed, dtype, n, k, raw.data() + first * k * size, dtype, n - first, k, first) == QR_OK);
  }
  ~Layer() { std::free(packed); }
  Layer(const Layer&) = delete;
  Layer& operator=(const Layer&) = delete;
};

double tolerance(int32_t dtype, double value) {
  return 2e-5 + std::fabs(value) * (dtype == QR_FLOAT32 ? 2e-6 : dtype == QR_BFLOAT16 ? 1.0 / 250 : 1.0 / 2000);
}

void check_linear(int64_t rows, int64_t n, int64_t k, int32_t x_dtype, int32_t w_dtype, int32_t out_dtype,
                  int32_t activation, bool with_bias, bool with_residual) {
  Layer layer(n, k, w_dtype);
  std::vector<char> x = encode(random_floats(rows * k), x_dtype), residual = encode(random_floats(rows * n), x_dtype);
  std::vector<float> bias = random_floats(n), xs = decode(x, x_dtype), rs = decode(residual, x_dtype);
  std::vector<char> out(size_t(rows * n) * (out_dtype == QR_FLOAT32 ? 4 : 2));
  CHECK(qr_linear(out.data(), out_dtype, x.data(), x_dtype, layer.packed, w_dtype, rows, n, k,
                  with_bias ? bias.data() : nullptr, activation, with_residual ? residual.data() : nullptr) == QR_OK);
  std::vector<float> got = decode(out, out_dtype);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < n; ++c) {
      double sum = 0;
      for (int64_t i = 0; i < k; ++i) sum += double(xs[size_t(r * k + i)]) * layer.weight[size_t(c * k + i)];
      if (with_bias) sum += bias[size_t(c)];
      double want = activate(sum, activation) + (with_residual ? rs[size_t(r * n + c)] : 0);
      CHECK(std::fabs(got[size_t(r * n + c)] - want) <= tolerance(out_dtype, want),
            "rows %ld n %ld k %ld x %d w %d out %d act %d: [%ld, %ld] %g, not %g", long(rows), long(n), long(k),
            x_dtype, w_dtype, out_dtype, activation, long(r), long(c), got[size_t(r * n + c)], want);
    }
}

}  // namespace

TEST(linear_matches_naive_loops) {
  for (int32_t dtype : {QR_FLOAT32, QR_BFLOAT16, QR_FLOAT16}) {
    for (int64_t rows : {1, 2, 15, 16, 17, 33, 70})
      for (auto [n, k] : {std::pair<int64_t, int64_t>{32, 32}, {96, 64}, {100, 72}, {7, 45}, {64, 1100}})
        check_linear(rows, n, k, dtype, dtype, dtype, QR_NONE, rows % 2 == 0, rows % 3 == 0);
    for (int32_t activation : {QR_SILU, QR_GELU, QR_GELU_TANH, QR_RELU})
      check_linear(3, 50, 64, dtype, dtype, QR_FLOAT32, activation, true, true);
  }
  if (!is_emulated()) check_linear(300, 40, 530, QR_BFLOAT16, QR_BFLOAT16, QR_BFLOAT16, QR_NONE, true, true);
  check_linear(5, 40, 70, QR_FLOAT32, QR_BFLOAT16, QR_FLOAT32, QR_NONE, true, true);
}

TEST(gated_linear_is_gate_times_up) {
  for (int32_t dtype : {QR_FLOAT32, QR_BFLOAT16, QR_FLOAT16})
    for (auto [rows, f] : {std::pair<int64_t, int64_t>{1, 96}, {16, 64}, {40, 96}, {3, 20}}) {
      const int64_t k = 80;
      Layer layer(2 * f, k, dtype);
      std::vector<char> x = encode(random_floats(rows * k), dtype);
      std::vector<float> bias = random_floats(2 * f), both(size_t(rows * 2 * f));
      std::vector<char> out(size_t(rows * f) * (dtype == QR_FLOAT32 ? 4 : 2));
      CHECK(qr_linear(both.data(), QR_FLOAT32, x.data(), dtype, layer.packed, dtype, rows, 2 * f, k, bias.data(),
                      QR_NONE, nullptr) == QR_OK);
      CHECK(qr_gated_linear(out.data(), dtype, x.data(), dtype, layer.packed, dtype, rows, f, k, bias.data(),
                            QR_SILU) == QR_OK);
      std::vector<float> got = decode(out, dtype);
      for (int64_t i = 0; i < rows * f; ++i) {
        const size_t gate = size_t(i / f * 2 * f + i % f);
        double want = activate(both[gate], QR_SILU) * both[gate + size_t(f)];
        CHECK(std::fabs(got[size_t(i)] - want) <= tolerance(dtype, want), "%g, not %g", got[size_t(i)], want);
      }
    }
}

TEST(a_row_has_the_same_bits_in_every_batch) {
  const int64_t n = 200, k = is_emulated() ? 150 : 1200, most = 600;
  for (int32_t dtype : {QR_FLOAT32, QR_BFLOAT16, QR_FLOAT16}) {
    Layer layer(n, k, dtype);
    const size_t size = dtype == QR_FLOAT32 ? 4 : 2;
    std::vector<char> x = encode(random_floats(most * k), dtype);
    std::vector<float> all(size_t(most * n)), some(size_t(most * n));
    auto run = [&](std::vector<float>& out, int64_t first, int64_t rows) {
      CHECK(qr_linear(out.data(), QR_FLOAT32, x.data() + size_t(first * k) * size, dtype, layer.packed, dtype, rows, n,
                      k, nullptr, QR_NONE, nullptr) == QR_OK);
    };
    run(all, 0, most);
    for (int32_t threads : {1, 2, 5}) {
      qr_init(qr_isa_in_use(), threads);
      for (int64_t rows : {1, 2, 3, 5, 11, 12, 13, 15, 16, 17, 25, 31, 32, 33, 47, 48, 49, 64, 100, 257, 300})
        for (int64_t first : {0L, 1L, 13L, 260L}) {
          if (!runs_case(11)) continue;
          run(some, first, rows);
          CHECK(std::memcmp(some.data(), all.data() + first * n, size_t(rows * n) * 4) == 0,
                "dtype %d threads %d rows %ld from %ld", dtype, threads, long(rows), long(first));
        }
    }
    qr_init(qr_isa_in_use(), 2);
  }
}

// Large enough that K is cut into stretches and that the output passes the caches by.
TEST(a_large_product_has_the_bits_of_small_ones) {
  if (is_emulated()) return;
  const int64_t n = 1024, k = 1200, rows = 1030, few = 32;
  for (int32_t dtype : {QR_BFLOAT16, QR_FLOAT16}) {
    Layer layer(n, k, dtype);
    std::vector<char> x = encode(random_floats(rows * k), dtype), residual = encode(random_floats(rows * n), dtype);
    std::vector<float> bias = random_floats(n);
    char *all = aligned_zeros(rows * n * 2), *some = aligned_zeros(few * n * 2);
    for (bool gated : {false, true}) {
      const int64_t row_bytes = (gated ? n / 2 : n) * 2;
      auto run = [&](char* out, int64_t first, int64_t count) {
        const char* from = x.data() + first * k * 2;
        const int32_t status = gated ? qr_gated_linear(out, dtype, from, dtype, layer.packed, dtype, count, n / 2, k,
                                                       bias.data(), QR_SILU)
                                     : qr_linear(out, dtype, from, dtype, layer.packed, dtype, count, n, k, bias.data(),
                                                 QR_RELU, residual.data() + first * n * 2);
        CHECK(status == QR_OK);
      };
      run(all, 0, rows);
      for (int64_t first = 0; first < rows; first += few) {
        const int64_t count = first + few < rows ? few : rows - first;
        run(some, first, count);
        CHECK(std::memcmp(some, all + first * row_bytes, size_t(count * row_bytes)) == 0,
              "dtype %d gated %d rows from %ld", dtype, int(gated), long(first));
      }
    }
    std::free(all);
    std::free(some);
  }
}

namespace {

// A weight whose numbers are nearly all of one size: some zeros, some tiny, some huge ones, infinities and a NaN.
std::vector<uint16_t> trained_weight(int64_t n, int64_t k) {
  std::vector<char> raw = encode(random_floats(n * k, 0.02f), QR_BFLOAT16);
  std::vector<uint16_t> weight(size_t(n * k));
  std::memcpy(weight.data(), raw.data(), raw.size());
  std::uniform_int_distribution<size_t> anywhere(0, weight.size() - 1);
  const uint16_t rare[] = {0x0000, 0x8000, 0x0001, 0x2f80, 0x4780, 0xc7ff, 0x7f80, 0xff80, 0x7fc1};
  for (size_t i = 0; i < weight.size() / 4000; ++i) weight[anywhere(rng())] = rare[i % 9];
  return weight;
}

}  // namespace

TEST(compact_weights_give_the_bits_of_plain_ones) {
  for (auto [n, k] : {std::pair<int64_t, int64_t>{32, 32}, {96, 64}, {100, 72}, {7, 45}, {64, 1100}, {512, 2048}})
    for (int32_t x_dtype : {QR_BFLOAT16, QR_FLOAT32}) {
      std::vector<uint16_t> weight = trained_weight(n, k);
      for (uint16_t& value : weight)
        if ((value & 0x7f80) == 0x7f80) value = 0x4123;  // a row of NaN would compare nothing
      char *plain = aligned_zeros(qr_packed_bytes(QR_BFLOAT16, n, k));
      char *compact = aligned_zeros(qr_packed_bytes(QR_BFLOAT16_COMPACT, n, k));
      CHECK(qr_pack_linear(plain, QR_BFLOAT16, n, k, weight.data(), QR_BFLOAT16, n, k, 0) == QR_OK);
      CHECK(qr_pack_linear(compact, QR_BFLOAT16_COMPACT, n, k, weight.data(), QR_BFLOAT16, n, k, 0) == QR_OK);
      for (int64_t rows : {1, 2, 5, 12, 13, 16, 17, 32, 33, 64, 97, 600}) {
        if (!runs_case(5) || (is_emulated() && rows * n * k > 10'000'000)) continue;
        // sums of tiny numbers are denormal, which vdpbf16ps takes for zeros
        std::vector<char> x = encode(random_floats(rows * k, rows % 3 == 1 ? 1e-36f : 1.0f), x_dtype);
        std::vector<float> want(size_t(rows * n)), got(size_t(rows * n));
        for (auto [packed, dtype, out] : {std::tuple<char*, int32_t, float*>{plain, QR_BFLOAT16, want.data()},
                                          {compact, QR_BFLOAT16_COMPACT, got.data()}})
          CHECK(qr_linear(out, QR_FLOAT32, x.data(), x_dtype, packed, dtype, rows, n, k, nullptr, QR_NONE, nullptr) ==
                QR_OK);
        CHECK(std::memcmp(want.data(), got.data(), want.size() * 4) == 0, "rows %ld n %ld k %ld", rows, n, k);
        if (n % 2 != 0) continue;
        std::vector<char> gated(size_t(rows * n * 2)), gated_compact(gated.size());
        CHECK(qr_gated_linear(gated.data(), x_dtype, x.data(), x_dtype, plain, QR_BFLOAT16, rows, n / 2, k, nullptr,
                              QR_SILU) == QR_OK);
        CHECK(qr_gated_linear(gated_compact.data(), x_dtype, x.data(), x_dtype, compact, QR_BFLOAT16_COMPACT, rows,
                              n / 2, k, nullptr, QR_SILU) == QR_OK);
        CHECK(gated == gated_compact, "gated, rows %ld n %ld k %ld", rows, n, k);
      }
      std::free(plain);
      std::free(compact);
    }
}

TEST(compact_rows_are_the_rows_that_were_packed) {
  for (auto [n, k] : {std::pair<int64_t, int64_t>{64, 1024}, {40, 70}}) {
    std::vector<uint16_t> weight = trained_weight(n, k), got(weight.size());
    char* packed = aligned_zeros(qr_packed_bytes(QR_BFLOAT16_COMPACT, n, k));
    CHECK(qr_pack_linear(packed, QR_BFLOAT16_COMPACT, n, k, weight.data(), QR_BFLOAT16, n, k, 0) == QR_OK);
    std::vector<int64_t> ids(size_t(n), 0);
    for (int64_t row = 0; row < n; ++row) ids[size_t(row)] = row;
    CHECK(qr_packed_rows(got.data(), packed, QR_BFLOAT16_COMPACT, n, k, ids.data(), n) == QR_OK);
    CHECK(got == weight);
    std::free(packed);
  }
}

TEST(a_weight_that_does_not_fit_is_refused) {
  const int64_t n = 64, k = 256;
  char* packed = aligned_zeros(qr_packed_bytes(QR_BFLOAT16_COMPACT, n, k));
  std::vector<uint16_t> weight(size_t(n * k));
  std::uniform_int_distribution<int> any(0, 0xffff);
  for (uint16_t& value : weight) value = uint16_t(any(rng()));
  const auto pack = [&](int64_t rows, int64_t offset) {
    return qr_pack_linear(packed, QR_BFLOAT16_COMPACT, n, k, weight.data(), QR_BFLOAT16, rows, k, offset);
  };
  CHECK(pack(n, 0) == QR_EUNSUPPORTED);
  for (uint16_t& value : weight) value = 0x3f80;
  CHECK(pack(n, 0) == QR_OK);
  CHECK(pack(20, 0) == QR_EUNSUPPORTED);
  CHECK(pack(20, 44) == QR_EUNSUPPORTED);
  std::free(packed);
}
