#include <cmath>

#include "check.h"
#include "quire_cpu.h"

TEST(scaling_and_adding_match_naive_loops) {
  for (int32_t dtype : {QR_FLOAT32, QR_BFLOAT16, QR_FLOAT16})
    for (int64_t n : {1, 7, 8, 17, 1000})
      for (bool adds : {false, true}) {
        const std::vector<char> x = encode(random_floats(n), dtype), residual = encode(random_floats(n), dtype);
        const std::vector<float> xs = decode(x, dtype), rs = decode(residual, dtype);
        std::vector<char> out(x.size());
        CHECK(qr_scale_add(out.data(), x.data(), adds ? residual.data() : nullptr, dtype, 0.7f, n) == QR_OK);
        const std::vector<float> got = decode(out, dtype);
        for (size_t i = 0; i < got.size(); ++i) {
          const double want = double(xs[i]) * 0.7f + (adds ? rs[i] : 0.0f);
          const double allowed = std::fabs(want) * (dtype == QR_FLOAT32 ? 1e-6 : dtype == QR_BFLOAT16 ? 0.005 : 0.001);
          CHECK(std::fabs(got[i] - want) <= 1e-6 + allowed, "dtype %d: %g, not %g", dtype, got[i], want);
        }
      }
}

TEST(soft_caps_match_naive_loops) {
  for (int64_t n : {1, 7, 8, 17, 1000}) {
    const std::vector<float> x = random_floats(n, 40.0f);
    std::vector<float> got = x;
    CHECK(qr_soft_cap(got.data(), 30.0f, n) == QR_OK);
    for (size_t i = 0; i < x.size(); ++i) {
      const double want = 30 * std::tanh(double(x[i]) / 30);
      CHECK(std::fabs(got[i] - want) <= 1e-5, "%g, not %g", got[i], want);
    }
  }
}
