// Products with weights whose scales are nested, against integer loops: activations are rounded in blocks of 256.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "check.h"
#include "quire_cpu.h"

namespace {

constexpr int64_t kBlock = 256;

struct Kind {
  int32_t format;
  int64_t group, nested;
  int low, high;  // of integers
  const char* name;
};
const Kind kinds[] = {{QR_INT6, 16, 1, -32, 31, "Q6_K"}, {QR_INT5, 32, 2, -16, 15, "Q5_K"}, {QR_INT4, 32, 2, -8, 7, "Q4_K"},
                      {QR_INT3, 16, 1, -4, 3, "Q3_K"},   {QR_INT2, 16, 2, -1, 2, "Q2_K"},   {QR_LEVELS, 32, 1, 0, 15, "IQ4_XS"}};

struct Layer {
  Kind kind;
  int64_t n, k;
  std::vector<int8_t> numbers, levels, codes;  // numbers: [n, k]; codes: [n][k / group][nested]
  std::vector<float> halves;                   // [n][k / 256][nested]
  std::vector<char> scales;
  char* packed;

  Layer(const Kind& kind, int64_t n, int64_t k)
      : kind(kind), n(n), k(k), numbers(size_t(n * k)), levels(16), codes(size_t(n * k / kind.group * kind.nested)),
        packed(aligned_zeros(qr_quantized_bytes(kind.format, n, k))) {
    fill(numbers, kind.low, kind.high);
    fill(levels, -128, 127);
    fill(codes, kind.nested == 2 ? 0 : -128, kind.nested == 2 ? 63 : 127);
    halves = decode(encode(random_floats(n * k / kBlock * kind.nested, 0.01f), QR_FLOAT16), QR_FLOAT16);
  }
  ~Layer() { std::free(packed); }
  Layer(const Layer&) = delete;
  Layer& operator=(const Layer&) = delete;

  static void fill(std::vector<int8_t>& values, int low, int high) {
    std::uniform_int_distribution<int> any(low, high);
    for (int8_t& value : values) value = int8_t(any(rng()));
  }

  int64_t groups_of_block() const { return kBlock / kind.group; }
  int code(int64_t column, int64_t group, int64_t which) const {
    return codes[size_t((column * (k / kind.group) + group) * kind.nested + which)];
  }
  float half(int64_t column, int64_t block, int64_t which) const {
    return halves[size_t((column * (k / kBlock) + block) * kind.nested + which)];
  }

  qr_weight weight() {
    CHECK(qr_pack_quantized(packed, kind.format, n, k, numbers.data(), n, k, 0) == QR_OK);
    const int64_t blocks = k / kBlock, bytes = kind.nested * (2 + groups_of_block()) * 32;
    scales.assign(size_t((n + 31) / 32 * blocks * bytes), 0);
    for (int64_t c = 0; c < n; ++c)
      for (int64_t b = 0; b < blocks; ++b) {
        char* block = scales.data() + (c / 32 * blocks + b) * bytes;
        for (int64_t i = 0; i < kind.nested; ++i) {
          std::memcpy(block + (i * 32 + c % 32) * 2, encode({half(c, b, i)}, QR_FLOAT16).data(), 2);
          for (int64_t g = 0; g < groups_of_block(); ++g)
            block[kind.nested * 64 + (g * kind.nested + i) * 32 + c % 32] = char(code(c, b * groups_of_block() + g, i));
        }
      }
    qr_weight weight{};
    weight.packed = packed;
    weight.scales = scales.data();
    weight.levels = kind.format == QR_LEVELS ? levels.data() : nullptr;
    weight.format = kind.format;
    weight.group = kind.group;
    weight.nested = kind.nested;
    weight.outputs = n;
    weight.unit = 1.0;
    return weight;
  }

  // What x becomes in a block, and what the block adds to a column.
  double block_of(const float* x, int64_t column, int64_t block) const {
    float largest = 0;
    for (int64_t i = 0; i < kBlock; ++i) largest = std::max(largest, std::fabs(x[block * kBlock + i]));
    int64_t integers = 0, least = 0;
    for (int64_t i = 0; i < kBlock; ++i) {
      const int64_t at = block * kBlock + i, group = at / kind.group;
      const auto rounded = int64_t(largest > 1e-30f ? std::nearbyint(x[at] * (127.0f / largest)) : 0.0f);
      const int64_t number = numbers[size_t(column * k + at)];
      const int64_t value = kind.format == QR_LEVELS ? levels[size_t(number)] : kind.nested == 2 ? number - kind.low : number;
      integers += rounded * value * code(column, group, 0);
      if (kind.nested == 2) least += rounded * code(column, group, 1);
    }
    const double all = double(integers) * half(column, block, 0);
    return (kind.nested == 2 ? all - double(least) * half(column, block, 1) : all) * largest / 127;
  }
};

int32_t run(const qr_weight& weight, const std::vector<char>& x, int32_t dtype, int64_t rows, int64_t k,
            std::vector<float>& out) {
  out.assign(size_t(rows * weight.outputs), 7.0f);
  return qr_linear_quantized(out.data(), QR_FLOAT32, x.data(), dtype, &weight, 1, rows, weight.outputs, k, nullptr, QR_NONE,
                             nullptr);
}

void check_values(Layer& layer, const std::vector<float>& values, int32_t dtype) {
  const qr_weight weight = layer.weight();
  const int64_t rows = int64_t(values.size()) / layer.k;
  const std::vector<char> x = encode(values, dtype);
  const std::vector<float> xs = decode(x, dtype);
  std::vector<float> got;
  CHECK(run(weight, x, dtype, rows, layer.k, got) == QR_OK);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < layer.n; ++c) {
      double want = 0, size = 0;
      for (int64_t b = 0; b < layer.k / kBlock; ++b) {
        const double own = layer.block_of(xs.data() + r * layer.k, c, b);
        want += own;
        size += std::fabs(own);
      }
      const float value = got[size_t(r * layer.n + c)];
      CHECK(std::fabs(value - want) <= 1e-6 * size + 1e-5, "%s n %ld k %ld rows %ld: [%ld, %ld] %g, not %g", layer.kind.name,
            long(layer.n), long(layer.k), long(rows), long(r), long(c), value, want);
    }
}

void check_bits(Layer& layer, int64_t most) {
  const qr_weight weight = layer.weight();
  const std::vector<float> values = random_floats(most * layer.k);
  std::vector<float> all, some;
  CHECK(run(weight, encode(values, QR_BFLOAT16), QR_BFLOAT16, most, layer.k, all) == QR_OK);
  for (int64_t rows : {1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 32, 33})
    for (int64_t first : {0L, 1L, 6L}) {
      const std::vector<float> part(values.begin() + first * layer.k, values.begin() + (first + rows) * layer.k);
      CHECK(run(weight, encode(part, QR_BFLOAT16), QR_BFLOAT16, rows, layer.k, some) == QR_OK);
      CHECK(std::memcmp(some.data(), all.data() + first * layer.n, size_t(rows * layer.n) * 4) == 0, "%s: rows %ld from %ld",
            layer.kind.name, long(rows), long(first));
    }
}

}  // namespace

TEST(nested_products_match_integer_loops_and_rows_have_the_same_bits_in_every_batch) {
  for (const Kind& kind : kinds)
    for (auto [n, k] : {std::pair<int64_t, int64_t>{32, 256}, {40, 512}, {7, 768}}) {
      if (!runs_case(3)) continue;
      Layer layer(kind, n, k);
      for (int32_t dtype : {QR_FLOAT32, QR_BFLOAT16, QR_FLOAT16})
        for (int64_t rows : {1, 2, 5, 8, 9, 18, 33})
          if (rows == 18 || dtype == QR_BFLOAT16) check_values(layer, random_floats(rows * k), dtype);
      check_bits(layer, 40);
    }
}

TEST(nested_products_of_the_largest_integers_and_codes_do_not_overflow) {
  for (const Kind& kind : kinds) {
    Layer layer(kind, 32, 512);
    for (int sign : {1, -1})
      for (int code_sign : {1, -1}) {
        if (kind.nested == 2 && code_sign < 0) continue;
        std::fill(layer.numbers.begin(), layer.numbers.end(), int8_t(sign > 0 ? kind.high : kind.low));
        layer.levels[0] = -128, layer.levels[15] = 127;
        std::fill(layer.codes.begin(), layer.codes.end(), int8_t(kind.nested == 2 ? 63 : code_sign > 0 ? 127 : -128));
        for (int64_t rows : {1, 9, 33}) check_values(layer, std::vector<float>(size_t(rows * layer.k), -2.0f), QR_FLOAT32);
      }
  }
}

TEST(a_row_with_a_number_that_is_none_gives_none_and_its_neighbours_what_they_gave) {
  for (const Kind& kind : kinds) {
    Layer layer(kind, 40, 512);
    const qr_weight weight = layer.weight();
    for (int64_t rows : {2, 7, 20}) {
      std::vector<float> values = random_floats(rows * layer.k), clean, got;
      CHECK(run(weight, encode(values, QR_FLOAT32), QR_FLOAT32, rows, layer.k, clean) == QR_OK);
      values[size_t(layer.k + 300)] = INFINITY;
      CHECK(run(weight, encode(values, QR_FLOAT32), QR_FLOAT32, rows, layer.k, got) == QR_OK);
      for (int64_t i = 0; i < rows * layer.n; ++i)
        CHECK(i / layer.n == 1 ? std::isnan(got[size_t(i)]) : got[size_t(i)] == clean[size_t(i)], "%s: row %ld",
              layer.kind.name, long(i / layer.n));
    }
  }
}

TEST(nested_weights_that_are_none_are_refused) {
  Layer layer(kinds[2], 32, 512);
  const qr_weight right = layer.weight();
  const std::vector<char> x = encode(random_floats(layer.k), QR_FLOAT32);
  std::vector<float> out;
  CHECK(run(right, x, QR_FLOAT32, 1, layer.k, out) == QR_OK);
  CHECK(run(right, x, QR_FLOAT32, 1, layer.k - 64, out) == QR_EINVAL);
  for (int64_t format : {QR_INT8, QR_INT6, QR_LEVELS}) {
    qr_weight wrong = right;
    wrong.levels = layer.levels.data();
    wrong.format = format;
    CHECK(run(wrong, x, QR_FLOAT32, 1, layer.k, out) == QR_EINVAL, "format %ld", long(format));
  }
}
