#include <cmath>
#include <cstdlib>
#include <cstring>
#include <tuple>

#include "check.h"
#include "quire_cpu.h"

namespace {

struct Sizes {
  int64_t heads, rope, nope, latent, value, head_size;
};

constexpr float kEps = 1e-5f;

// A weight of each head, packed, and the numbers that it holds.
struct Weights {
  int64_t n, k;
  std::vector<std::vector<float>> values;
  std::vector<qr_weight> heads;

  Weights(int32_t dtype, int64_t count, int64_t n, int64_t k) : n(n), k(k) {
    for (int64_t head = 0; head < count; ++head) {
      const std::vector<char> data = encode(random_floats(n * k, 0.2f), dtype);
      values.push_back(decode(data, dtype));
      char* packed = aligned_zeros(qr_packed_bytes(dtype, n, k) + 4096);
      CHECK(qr_pack_linear(packed, dtype, n, k, data.data(), dtype, n, k, 0) == QR_OK);
      heads.push_back(qr_weight{packed, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, dtype, 0, 0, n, 1.0, 0});
    }
  }
  ~Weights() {
    for (const qr_weight& head : heads) std::free(const_cast<void*>(head.packed));
  }
  Weights(const Weights&) = delete;
  Weights& operator=(const Weights&) = delete;

  double product(int64_t head, const float* x, int64_t row) const {
    double sum = 0;
    for (int64_t i = 0; i < k; ++i) sum += double(x[i]) * values[size_t(head)][size_t(row * k + i)];
    return sum;
  }
};

struct Latents {
  Sizes s;
  int32_t dtype;
  int64_t tokens;
  std::vector<float> norm;
  std::vector<char> query, compressed, attended;
  Weights to_latents, to_values;

  Latents(Sizes s, int32_t dtype, int64_t tokens)
      : s(s), dtype(dtype), tokens(tokens), norm(random_floats(s.latent)),
        query(encode(random_floats(tokens * s.heads * (s.nope + s.rope)), dtype)),
        compressed(encode(random_floats(tokens * (s.latent + s.rope)), dtype)),
        attended(encode(random_floats(tokens * s.heads * s.head_size), dtype)),
        to_latents(dtype, s.heads, s.latent, s.nope), to_values(dtype, s.heads, s.value, s.latent) {}

  int64_t size() const { return dtype == QR_FLOAT32 ? 4 : 2; }

  // Of tokens [begin, end), as bytes.
  std::vector<char> qkv(int64_t begin, int64_t end) const {
    std::vector<char> out(size_t((end - begin) * (s.heads + 2) * s.head_size * size()), char(0xff));
    CHECK(qr_latent_qkv(out.data(), query.data() + begin * s.heads * (s.nope + s.rope) * size(),
                        compressed.data() + begin * (s.latent + s.rope) * size(), dtype, norm.data(), kEps,
                        to_latents.heads.data(), end - begin, s.heads, s.rope, s.nope, s.latent,
                        s.head_size, nullptr, 0) == QR_OK);
    return out;
  }
  std::vector<char> values(int64_t begin, int64_t end) const {
    std::vector<char> out(size_t((end - begin) * s.heads * s.value * size()), char(0xff));
    CHECK(qr_latent_values(out.data(), attended.data() + begin * s.heads * s.head_size * size(), dtype,
                           to_values.heads.data(), end - begin, s.heads, s.rope, s.latent, s.value,
                           s.head_size) == QR_OK);
    return out;
  }
};

void check_close(double got, double want, int32_t dtype, const char* what, int64_t token, int64_t at) {
  const double tolerance = dtype == QR_FLOAT32 ? 2e-5 : dtype == QR_BFLOAT16 ? 0.03 : 0.004;
  CHECK(std::fabs(got - want) <= tolerance * (1 + std::fabs(want)), "%s dtype %d [%ld, %ld]: %g, not %g", what, dtype,
        long(token), long(at), got, want);
}

const int32_t kDtypes[] = {QR_FLOAT32, QR_BFLOAT16, QR_FLOAT16};
// Sizes that fill no vector and no panel; one head; those of a real model, few heads of it.
const Sizes kSizes[] = {{3, 6, 12, 18, 7, 24}, {1, 2, 5, 33, 65, 36}, {5, 64, 128, 512, 128, 576}};

}  // namespace

TEST(latents_match_naive_loops) {
  for (int32_t dtype : kDtypes)
    for (const Sizes& s : kSizes) {
      if (!runs_case(5)) continue;
      const int64_t tokens = 70;
      const Latents own(s, dtype, tokens);
      const std::vector<float> qkv = decode(own.qkv(0, tokens), dtype), values = decode(own.values(0, tokens), dtype);
      const std::vector<float> query = decode(own.query, dtype), compressed = decode(own.compressed, dtype);
      const std::vector<float> attended = decode(own.attended, dtype);
      for (int64_t token : {0L, 1L, 63L, 64L, 69L}) {
        const float* raw = compressed.data() + token * (s.latent + s.rope);
        double squares = 0;
        for (int64_t i = 0; i < s.latent; ++i) squares += double(raw[i]) * raw[i];
        const double factor = 1 / std::sqrt(squares / double(s.latent) + kEps);
        for (int64_t head = 0; head < s.heads + 2; ++head) {
          const float* row = qkv.data() + (token * (s.heads + 2) + head) * s.head_size;
          const float* in = query.data() + (token * s.heads + head) * (s.nope + s.rope);
          for (int64_t i = 0; i < s.head_size; ++i) {
            double want = 0;
            const int64_t at = i - s.rope;
            if (i < s.rope)
              want = head < s.heads ? in[s.nope + i] : head == s.heads ? raw[s.latent + i] : 0;
            else if (at < s.latent)
              want = head < s.heads ? own.to_latents.product(head, in, at) : raw[at] * factor * own.norm[size_t(at)];
            check_close(row[i], want, dtype, "qkv", token, head * s.head_size + i);
          }
        }
        for (int64_t head = 0; head < s.heads; ++head)
          for (int64_t i = 0; i < s.value; ++i) {
            const float* in = attended.data() + (token * s.heads + head) * s.head_size + s.rope;
            check_close(values[size_t((token * s.heads + head) * s.value + i)], own.to_values.product(head, in, i),
                        dtype, "values", token, head * s.value + i);
          }
      }
    }
}

TEST(latents_of_a_token_have_the_same_bits_in_any_company) {
  for (int32_t dtype : kDtypes)
    for (const Sizes& s : kSizes) {
      if (!runs_case(5) || (is_emulated() && s.latent > 100)) continue;
      const int64_t tokens = 130;
      const Latents own(s, dtype, tokens);
      const std::vector<char> qkv = own.qkv(0, tokens), values = own.values(0, tokens);
      const int64_t qkv_row = int64_t(qkv.size()) / tokens, value_row = int64_t(values.size()) / tokens;
      for (int32_t threads : {1, 2, 3, 16}) {
        qr_init(qr_isa_in_use(), threads);
        for (auto [begin, end] : {std::pair<int64_t, int64_t>{0, 1}, {5, 12}, {60, 70}, {1, 130}, {129, 130}}) {
          const std::vector<char> some = own.qkv(begin, end), other = own.values(begin, end);
          CHECK(std::memcmp(some.data(), qkv.data() + begin * qkv_row, some.size()) == 0, "qkv dtype %d threads %d",
                dtype, threads);
          CHECK(std::memcmp(other.data(), values.data() + begin * value_row, other.size()) == 0,
                "values dtype %d threads %d", dtype, threads);
        }
      }
      qr_init(qr_isa_in_use(), 2);
    }
}

TEST(latents_refuse_impossible_sizes) {
  const Latents own(kSizes[0], QR_FLOAT32, 2);
  std::vector<float> out(1000, 7.0f);
  const auto qkv = [&](int64_t tokens, int64_t heads, int64_t rope, int64_t nope, int64_t latent, int64_t head_size,
                       const qr_weight* weights) {
    return qr_latent_qkv(out.data(), own.query.data(), own.compressed.data(), QR_FLOAT32, own.norm.data(), kEps, weights,
                         tokens, heads, rope, nope, latent, head_size, nullptr, 0);
  };
  const auto values = [&](int64_t tokens, int64_t heads, int64_t rope, int64_t latent, int64_t value,
                          int64_t head_size, const qr_weight* weights) {
    return qr_latent_values(out.data(), own.attended.data(), QR_FLOAT32, weights, tokens, heads, rope, latent, value,
                            head_size);
  };
  const qr_weight *a = own.to_latents.heads.data(), *b = own.to_values.heads.data();
  for (auto [tokens, heads, rope, nope, latent, head_size] :
       {std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>{-1, 3, 6, 12, 18, 24}, {2, 0, 6, 12, 18, 24},
        {2, -3, 6, 12, 18, 24}, {2, 3, -6, 12, 18, 24}, {2, 3, 6, 0, 18, 24}, {2, 3, 6, 12, 0, 24},
        {2, 3, 6, 12, 18, 23}, {int64_t(1) << 60, 3, 6, 12, 18, 24}, {2, 3, INT64_MAX, 12, 18, 24}})
    CHECK(qkv(tokens, heads, rope, nope, latent, head_size, a) == QR_EINVAL, "%ld heads %ld", long(tokens),
          long(heads));
  for (auto [tokens, heads, rope, latent, value, head_size] :
       {std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>{-1, 3, 6, 18, 7, 24}, {2, 0, 6, 18, 7, 24},
        {2, 3, 7, 18, 7, 24}, {2, 3, 6, 18, 0, 24}, {2, 3, 6, 18, -7, 24}, {2, 3, 6, 18, INT64_MAX, 24}})
    CHECK(values(tokens, heads, rope, latent, value, head_size, b) == QR_EINVAL, "%ld heads %ld", long(tokens),
          long(heads));
  qr_weight wrong[3] = {a[0], a[1], a[2]};
  wrong[2].packed = nullptr;
  CHECK(qkv(2, 3, 6, 12, 18, 24, wrong) == QR_EINVAL);
  wrong[2] = a[2];
  wrong[1].format = QR_INT8;  // without scales
  CHECK(qkv(2, 3, 6, 12, 18, 24, wrong) == QR_EINVAL);
  wrong[1].format = 9;
  CHECK(qkv(2, 3, 6, 12, 18, 24, wrong) == QR_EINVAL);
  CHECK(qkv(2, 3, 6, 12, 18, 24, nullptr) == QR_EINVAL);
  for (float value : out) CHECK(value == 7.0f, "wrote");
}
