#include <cmath>
#include <cstring>

#include "check.h"
#include "quire_cpu.h"

TEST(rms_norm_and_layer_norm_match_naive_loops) {
  for (int32_t dtype : {QR_FLOAT32, QR_BFLOAT16, QR_FLOAT16})
    for (auto [rows, cols] : {std::pair<int64_t, int64_t>{1, 1}, {3, 7}, {5, 64}, {2, 1000}, {40, 1024}}) {
      std::vector<char> x = encode(random_floats(rows * cols), dtype), out(x.size());
      std::vector<float> weight = random_floats(cols), bias = random_floats(cols), xs = decode(x, dtype);
      for (bool layer : {false, true}) {
        if (layer)
          CHECK(qr_layer_norm(out.data(), dtype, x.data(), dtype, weight.data(), bias.data(), rows, cols, 1e-5f) ==
                QR_OK);
        else
          CHECK(qr_rms_norm(out.data(), dtype, x.data(), dtype, x.data(), weight.data(), rows, cols, 1e-5f) == QR_OK);
        std::vector<float> got = decode(out, dtype);
        for (int64_t r = 0; r < rows; ++r) {
          double mean = 0, squares = 0;
          for (int64_t c = 0; layer && c < cols; ++c) mean += xs[size_t(r * cols + c)] / double(cols);
          for (int64_t c = 0; c < cols; ++c) squares += std::pow(xs[size_t(r * cols + c)] - mean, 2);
          for (int64_t c = 0; c < cols; ++c) {
            const size_t i = size_t(r * cols + c);
            double want = (xs[i] - mean) / std::sqrt(squares / double(cols) + 1e-5) * weight[size_t(c)] +
                          (layer ? bias[size_t(c)] : xs[i]);
            double allowed = 2e-5 + std::fabs(want) * (dtype == QR_FLOAT32 ? 1e-5 : dtype == QR_BFLOAT16 ? 0.005 : 0.001);
            CHECK(std::fabs(got[i] - want) <= allowed, "dtype %d layer %d [%ld, %ld] %g, not %g", dtype, int(layer),
                  long(r), long(c), got[i], want);
          }
        }
      }
    }
}

TEST(a_norm_may_write_over_its_input) {
  std::vector<float> x = random_floats(3 * 50), weight = random_floats(50), out(x.size());
  CHECK(qr_rms_norm(out.data(), QR_FLOAT32, x.data(), QR_FLOAT32, nullptr, weight.data(), 3, 50, 1e-6f) == QR_OK);
  CHECK(qr_rms_norm(x.data(), QR_FLOAT32, x.data(), QR_FLOAT32, nullptr, weight.data(), 3, 50, 1e-6f) == QR_OK);
  CHECK(std::memcmp(x.data(), out.data(), x.size() * 4) == 0);
}
