// Products with quantised weights against loops in double precision over the integers that x becomes.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "check.h"
#include "quire_cpu.h"

namespace {

enum Shift { kNone, kZeroPoints, kOffsets };

// A weight [n, k] of integers, and what they stand for.
struct Layer {
  int64_t n, k, group;  // group: of inputs that are rounded together; the weight's scale may be for all
  qr_weight weight{};
  std::vector<float> scales, offsets;  // [groups of scales][n]
  std::vector<int8_t> numbers, zero_points, levels;
  std::vector<char> packed_scales, packed_offsets;
  std::vector<int8_t> packed_zero_points;
  std::vector<int32_t> order;
  char* packed;

  Layer(int32_t format, int64_t n, int64_t k, int64_t group, Shift shift = kNone, bool has_order = false)
      : n(n), k(k), group(group != 0 ? group : format == QR_INT2 ? k : 128), numbers(size_t(n * k)) {
    std::uniform_int_distribution<int> eight(-128, 127), any(low(format), high(format));
    for (int8_t& number : numbers) number = int8_t(any(rng()));
    if (format == QR_LEVELS)
      for (int i = 0; i < 16; ++i) levels.push_back(int8_t(eight(rng())));
    const int64_t groups = group == 0 ? 1 : (k + group - 1) / group, columns = (n + 31) / 32 * 32;
    const int32_t dtype = group == 0 ? QR_FLOAT32 : QR_FLOAT16;
    for (float value : random_floats(groups * n, 0.01f)) scales.push_back(std::fabs(value));
    scales = decode(encode(scales, dtype), dtype);
    offsets.assign(scales.size(), 0.0f);
    if (shift == kOffsets) offsets = decode(encode(random_floats(groups * n, 0.1f), dtype), dtype);
    zero_points.assign(scales.size(), 0);
    if (shift == kZeroPoints)
      for (int8_t& zero : zero_points) zero = int8_t(any(rng()));
    const auto in_panels = [&](const auto& values) {
      auto out = values;
      out.assign(size_t(groups * columns), 0);
      for (int64_t g = 0; g < groups; ++g)
        for (int64_t c = 0; c < n; ++c) out[size_t((c / 32 * groups + g) * 32 + c % 32)] = values[size_t(g * n + c)];
      return out;
    };
    packed_scales = encode(in_panels(scales), dtype);
    packed_offsets = encode(in_panels(offsets), QR_FLOAT16);
    packed_zero_points = in_panels(zero_points);
    for (int64_t i = 0; i < k; ++i) order.push_back(int32_t(i));
    if (has_order) std::shuffle(order.begin(), order.end(), rng());
    packed = aligned_zeros(qr_quantized_bytes(format, n, k));
    pack(format);
    weight.packed = packed;
    weight.scales = packed_scales.data();
    if (shift == kZeroPoints) weight.zero_points = packed_zero_points.data();
    if (shift == kOffsets) weight.offsets = reinterpret_cast<const uint16_t*>(packed_offsets.data());
    if (format == QR_LEVELS) weight.levels = levels.data();
    if (has_order) weight.order = order.data();
    weight.format = format;
    weight.group = group;
    weight.outputs = n;
    weight.unit = 1.0;
  }
  ~Layer() { std::free(packed); }
  Layer(const Layer&) = delete;
  Layer& operator=(const Layer&) = delete;

  static int low(int64_t format) { return format == QR_LEVELS ? 0 : format == QR_INT2 ? -1 : -1 - high(format); }
  static int high(int64_t format) {
    switch (format) {
      case QR_INT8: return 127;
      case QR_INT6: return 31;
      case QR_INT4: return 7;
      case QR_INT3: return 3;
      case QR_INT2: return 2;
      default: return 15;
    }
  }
  static bool has_group(int64_t format, int64_t group) {
    if (format == QR_INT2 || format == QR_INT3) return group >= 32;
    return group <= 32 || (format != QR_INT5 && format != QR_INT6);
  }
  void pack(int32_t format) {
    CHECK(qr_pack_quantized(packed, format, n, k, numbers.data(), n, k, 0) == QR_OK);
  }
  void pack_again(int32_t format) {
    std::free(packed);
    weight.format = format;
    weight.packed = packed = aligned_zeros(qr_quantized_bytes(format, n, k));
    pack(format);
  }
  int64_t groups() const { return (k + group - 1) / group; }

  // out[rows, n] in float32
  int32_t run(float* out, const void* x, int32_t dtype, int64_t rows, const float* bias) const {
    return qr_linear_quantized(out, QR_FLOAT32, x, dtype, &weight, 1, rows, n, k, bias, QR_NONE, nullptr);
  }

  double product(const float* x, int64_t column) const {
    double total = 0;
    for (int64_t g = 0; g < groups(); ++g) {
      const int64_t begin = g * group, end = std::min(begin + group, k);
      float largest = 0;
      for (int64_t i = begin; i < end; ++i) largest = std::max(largest, std::fabs(x[order[size_t(i)]]));
      const float inverse = largest > 1e-30f ? 127.0f / largest : 0.0f;
      const size_t own = size_t((weight.group == 0 ? 0 : g) * n + column);
      double sum = 0;
      for (int64_t i = begin; i < end; ++i) {
        const int8_t number = numbers[size_t(column * k + i)];
        const double value = weight.format == QR_LEVELS ? levels[size_t(number)] : number - zero_points[own];
        sum += double(std::nearbyint(x[order[size_t(i)]] * inverse)) * (value * scales[own] + offsets[own]);
      }
      total += sum * largest / 127;
    }
    return total;
  }
};

void check_values(const Layer& layer, int32_t dtype, int64_t rows) {
  const std::vector<char> x = encode(random_floats(rows * layer.k), dtype);
  const std::vector<float> xs = decode(x, dtype), bias = random_floats(layer.n);
  std::vector<float> got(size_t(rows * layer.n));
  CHECK(layer.run(got.data(), x.data(), dtype, rows, bias.data()) == QR_OK);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < layer.n; ++c) {
      const double want = layer.product(xs.data() + r * layer.k, c) + bias[size_t(c)];
      const float value = got[size_t(r * layer.n + c)];
      CHECK(std::fabs(value - want) <= 1e-4 + 1e-5 * std::fabs(want),
            "format %ld group %ld n %ld k %ld rows %ld: [%ld, %ld] %g, not %g", long(layer.weight.format),
            long(layer.weight.group), long(layer.n), long(layer.k), long(rows), long(r), long(c), value, want);
    }
}

void check_bits(const Layer& layer, int64_t most) {
  const std::vector<char> x = encode(random_floats(most * layer.k), QR_BFLOAT16);
  std::vector<float> all(size_t(most * layer.n)), some(all.size());
  CHECK(layer.run(all.data(), x.data(), QR_BFLOAT16, most, nullptr) == QR_OK);
  for (int64_t rows : {1, 2, 3, 4, 5, 7, 8, 16, 17, 33})
    for (int64_t first : {0L, 1L, 6L}) {
      CHECK(layer.run(some.data(), x.data() + first * layer.k * 2, QR_BFLOAT16, rows, nullptr) == QR_OK);
      CHECK(std::memcmp(some.data(), all.data() + first * layer.n, size_t(rows * layer.n) * 4) == 0,
            "format %ld group %ld: rows %ld from %ld", long(layer.weight.format), long(layer.weight.group), long(rows),
            long(first));
    }
}

}  // namespace

TEST(quantised_products_match_naive_loops_and_rows_have_the_same_bits_in_every_batch) {
  for (auto [n, k] : {std::pair<int64_t, int64_t>{32, 64}, {40, 72}, {96, 320}, {7, 45}}) {
    for (int32_t format : {QR_INT8, QR_INT6, QR_INT5, QR_INT4, QR_INT3, QR_INT2, QR_LEVELS})
      for (int64_t group : {16, 32, 64, 128})
        for (Shift shift : {kNone, kZeroPoints, kOffsets}) {
          if ((format == QR_LEVELS && shift == kZeroPoints) || !Layer::has_group(format, group) || !runs_case(5)) continue;
          const Layer layer(format, n, k, group, shift, group == 32);
          for (int64_t rows : {1, 2, 3, 4, 7, 18}) check_values(layer, QR_BFLOAT16, rows);
          check_bits(layer, 40);
        }
    for (int32_t format : {QR_INT8, QR_INT2}) {
      const Layer layer(format, n, k, 0, kNone, n == 40);
      for (int32_t dtype : {QR_FLOAT32, QR_BFLOAT16, QR_FLOAT16})
        for (int64_t rows : {1, 2, 3, 4, 7, 18}) check_values(layer, dtype, rows);
      check_bits(layer, 40);
    }
  }
}

TEST(quantised_products_of_the_largest_integers_do_not_overflow) {
  for (int32_t format : {QR_INT8, QR_INT6, QR_INT5, QR_INT4, QR_INT3, QR_INT2}) {
    Layer layer(format, 32, 256, format == QR_INT6 || format == QR_INT5 ? 32 : 128);
    for (int8_t sign : {1, -1}) {
      for (int8_t& number : layer.numbers) number = int8_t(sign > 0 ? Layer::high(format) : Layer::low(format));
      layer.pack(format);
      std::vector<float> x(size_t(3 * layer.k), 2.0f), got(size_t(3 * layer.n));
      CHECK(layer.run(got.data(), x.data(), QR_FLOAT32, 3, nullptr) == QR_OK);
      for (int64_t i = 0; i < 3 * layer.n; ++i) {
        const double want = layer.product(x.data(), i % layer.n);
        CHECK(std::fabs(got[size_t(i)] - want) <= 1e-5 * std::fabs(want), "format %d: %g, not %g", format,
              got[size_t(i)], want);
      }
    }
  }
}

TEST(integers_of_fewer_bits_give_the_bits_of_the_same_ones_in_four_and_in_eight) {
  for (int32_t format : {QR_INT2, QR_INT3, QR_INT4, QR_INT5, QR_INT6})
    for (int64_t group : {16, 32, 64, 128})
      for (Shift shift : {kNone, kZeroPoints, kOffsets}) {
        if (!Layer::has_group(format, group)) continue;
        Layer small(format, 72, 200, group, shift);
        const std::vector<char> x = encode(random_floats(40 * small.k), QR_BFLOAT16);
        std::vector<float> got(size_t(40 * small.n)), want(got.size());
        CHECK(small.run(got.data(), x.data(), QR_BFLOAT16, 40, nullptr) == QR_OK);
        for (int32_t wide : {QR_INT4, QR_INT8}) {
          if (Layer::high(format) >= Layer::high(wide)) continue;
          small.pack_again(wide);
          CHECK(small.run(want.data(), x.data(), QR_BFLOAT16, 40, nullptr) == QR_OK);
          CHECK(std::memcmp(got.data(), want.data(), got.size() * 4) == 0, "format %d, not %d, group %ld", format, wide,
                long(group));
        }
      }
}

TEST(rows_without_large_numbers_are_rounded_by_ten_to_the_minus_five_for_ternary_weights) {
  const Layer layer(QR_INT2, 32, 64, 0);
  std::vector<float> x(64, 2e-8f), got(32);  // 0.254 of an integer
  x[5] = 9e-8f;                              // 1.143 of one
  CHECK(layer.run(got.data(), x.data(), QR_FLOAT32, 1, nullptr) == QR_OK);
  for (int64_t i = 0; i < 32; ++i) {
    const double want = double(layer.numbers[size_t(i * 64 + 5)]) * layer.scales[size_t(i)] * 1e-5 / 127;
    CHECK(std::fabs(got[size_t(i)] - want) <= 1e-5 * std::fabs(want), "%g, not %g", got[size_t(i)], want);
  }
}

TEST(the_unit_of_a_quantised_weight_multiplies_its_outputs) {
  Layer layer(QR_INT4, 40, 96, 32, kOffsets);
  const std::vector<float> x = random_floats(3 * layer.k);
  std::vector<float> whole(size_t(3 * layer.n)), small(whole.size());
  CHECK(layer.run(whole.data(), x.data(), QR_FLOAT32, 3, nullptr) == QR_OK);
  layer.weight.unit = std::ldexp(1.0, -20);
  CHECK(layer.run(small.data(), x.data(), QR_FLOAT32, 3, nullptr) == QR_OK);
  for (size_t i = 0; i < whole.size(); ++i) CHECK(small[i] == std::ldexp(whole[i], -20));
}

namespace {

double from_float8(uint8_t byte) {
  const int exponent = byte >> 3 & 15, fraction = byte & 7;
  const double size = exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 10);
  return byte & 0x80 ? -size : size;
}

}  // namespace

TEST(float8_weights_are_multiplied_exactly) {
  const int64_t n = 32 * 8, k = 40;  // every number in every place of a step
  std::vector<int8_t> bytes(size_t(n * k));
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = int8_t((i * 7 + i / 256) % 256);
  for (int8_t& byte : bytes)
    if ((byte & 0x7f) == 0x7f) byte = 0;
  char* packed = aligned_zeros(qr_quantized_bytes(QR_FLOAT8, n, k));
  CHECK(qr_pack_quantized(packed, QR_FLOAT8, n, k, bytes.data(), n, k, 0) == QR_OK);
  const std::vector<float> scales(size_t(n), 2.0f);
  qr_weight weight{packed, scales.data(), nullptr, nullptr, nullptr, nullptr, nullptr, 0, QR_FLOAT8, 0, n, 1.0, 0};
  for (int64_t group : {0, 128})
    for (int32_t dtype : {QR_BFLOAT16, QR_FLOAT32}) {
      weight.group = group;
      std::vector<float> unit(size_t(k * k)), got(size_t(k * n));
      for (int64_t i = 0; i < k; ++i) unit[size_t(i * k + i)] = 1.0f;
      const std::vector<char> x = encode(unit, dtype);
      for (int64_t rows : {int64_t(1), int64_t(3), k}) {
        CHECK(qr_linear_quantized(got.data(), QR_FLOAT32, x.data(), dtype, &weight, 1, rows, n, k, nullptr, QR_NONE,
                                  nullptr) == QR_OK);
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t c = 0; c < n; ++c) {
            const double want = 2 * from_float8(uint8_t(bytes[size_t(c * k + r)]));
            CHECK(double(got[size_t(r * n + c)]) == want, "byte %d: %g, not %g", bytes[size_t(c * k + r)],
                  got[size_t(r * n + c)], want);
          }
      }
    }
  bytes[5] = 0x7f;
  CHECK(qr_pack_quantized(packed, QR_FLOAT8, n, k, bytes.data(), n, k, 0) == QR_EUNSUPPORTED);
  std::free(packed);
}

TEST(weights_side_by_side_are_computed_as_each_alone) {
  const int64_t k = 200, rows = 37;
  const Layer first(QR_INT4, 40, k, 32, kOffsets), second(QR_INT8, 7, k, 16), third(QR_INT4, 96, k, 32, kNone, true);
  const Layer* layers[] = {&first, &second, &third};
  const qr_weight weights[] = {first.weight, second.weight, third.weight};
  const int64_t n = first.n + second.n + third.n;
  const std::vector<char> x = encode(random_floats(rows * k), QR_BFLOAT16);
  std::vector<float> all(size_t(rows * n)), alone(size_t(rows * n));
  CHECK(qr_linear_quantized(all.data(), QR_FLOAT32, x.data(), QR_BFLOAT16, weights, 3, rows, n, k, nullptr, QR_NONE,
                            nullptr) == QR_OK);
  int64_t begin = 0;
  for (const Layer* layer : layers) {
    CHECK(layer->run(alone.data(), x.data(), QR_BFLOAT16, rows, nullptr) == QR_OK);
    for (int64_t r = 0; r < rows; ++r)
      CHECK(std::memcmp(all.data() + r * n + begin, alone.data() + r * layer->n, size_t(layer->n) * 4) == 0);
    begin += layer->n;
  }
  for (int64_t wrong : {n - 1, n + 32})
    CHECK(qr_linear_quantized(all.data(), QR_FLOAT32, x.data(), QR_BFLOAT16, weights, 3, rows, wrong, k, nullptr,
                              QR_NONE, nullptr) == QR_EINVAL);
}

namespace {

// qr_linear_max of every number of rows against qr_row_max of the outputs, which are equal, infinite or NaN in places.
void check_largest(const std::vector<qr_weight>& weights, int64_t k, int32_t dtype) {
  const int64_t count = int64_t(weights.size());
  int64_t n = 0;
  for (const qr_weight& weight : weights) n += weight.outputs;
  for (int64_t rows : {1, 2, 5, 13, 16, 31, 32, 33, 100})
    for (int kind = 0; kind < 5; ++kind) {
      if (!runs_case(7)) continue;
      std::vector<float> values = random_floats(rows * k), bias = random_floats(n), all(size_t(rows * n));
      if (kind == 1) std::fill_n(values.begin(), k, 0.0f);  // the bias alone, with the largest twice
      if (kind == 1) bias[size_t(n / 3)] = bias[size_t(n - 1)] = 90.0f;
      if (kind == 2) bias[size_t(n / 2)] = bias[size_t(n - 1)] = NAN;
      if (kind == 3) bias[size_t(n - 1)] = INFINITY;
      if (kind == 3) bias[0] = -INFINITY;
      const std::vector<char> x = encode(values, dtype);
      const float* own_bias = kind == 4 ? nullptr : bias.data();
      CHECK(qr_linear_quantized(all.data(), QR_FLOAT32, x.data(), dtype, weights.data(), count, rows, n, k, own_bias,
                                QR_NONE, nullptr) == QR_OK);
      for (float soft_cap : {0.0f, 30.0f}) {
        if (soft_cap > 0) CHECK(qr_soft_cap(all.data(), soft_cap, rows * n) == QR_OK);
        std::vector<float> got(size_t(rows), 7.0f), want = got;
        std::vector<int64_t> got_ids(size_t(rows), -7), want_ids = got_ids;
        CHECK(qr_row_max(want.data(), want_ids.data(), all.data(), rows, n) == QR_OK);
        CHECK(qr_linear_max(got.data(), got_ids.data(), x.data(), dtype, weights.data(), count, rows, n, k, own_bias,
                            soft_cap) == QR_OK);
        for (size_t r = 0; r < size_t(rows); ++r)
          CHECK((got[r] == want[r] || (std::isnan(got[r]) && std::isnan(want[r]))) && got_ids[r] == want_ids[r],
                "format %ld dtype %d n %ld rows %ld kind %d cap %g: row %ld has %g at %ld, not %g at %ld",
                long(weights[0].format), dtype, long(n), long(rows), kind, soft_cap, long(r), got[r], long(got_ids[r]),
                want[r], long(want_ids[r]));
      }
    }
}

}  // namespace

TEST(the_largest_output_is_found_without_the_others) {
  const int64_t k = 72;
  for (int64_t n : {1, 31, 32, 33, 300, 2050}) {
    const std::vector<char> numbers = encode(random_floats(n * k, 0.2f), QR_BFLOAT16);
    for (int32_t dtype : {QR_FLOAT32, QR_BFLOAT16, QR_FLOAT16}) {
      for (int32_t stored : {QR_FLOAT32, QR_BFLOAT16, QR_FLOAT16, QR_BFLOAT16_COMPACT}) {
        char* packed = aligned_zeros(qr_packed_bytes(stored, n, k));
        CHECK(qr_pack_linear(packed, stored, n, k, numbers.data(), QR_BFLOAT16, n, k, 0) == QR_OK);
        check_largest({{packed, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, stored, 0, 0, n, 1.0, 0}}, k, dtype);
        std::free(packed);
      }
      const Layer whole(QR_INT8, n, k, 0), groups(QR_INT4, n, k, 32, kZeroPoints), levels(QR_LEVELS, n, k, 16);
      const Layer ternary(QR_INT2, n, k, 0);
      for (const Layer* layer : {&whole, &groups, &levels, &ternary}) check_largest({layer->weight}, k, dtype);
    }
  }
  const Layer first(QR_INT4, 40, k, 32, kOffsets), second(QR_INT8, 7, k, 16), third(QR_INT6, 96, k, 32);
  check_largest({first.weight, second.weight, third.weight}, k, QR_BFLOAT16);
  check_largest({third.weight, second.weight, second.weight, first.weight}, k, QR_FLOAT32);
}

TEST(quantised_weights_that_are_none_are_refused) {
  Layer right(QR_INT4, 32, 64, 32, kZeroPoints, true);
  const std::vector<float> x = random_floats(right.k);
  std::vector<float> out(size_t(right.n), 7.0f);
  const std::vector<int32_t> order(size_t(right.k), 64);
  const auto check = [&](const char* what, auto change) {
    const qr_weight before = right.weight;
    change(right.weight);
    CHECK(right.run(out.data(), x.data(), QR_FLOAT32, 1, nullptr) == QR_EINVAL, "%s", what);
    right.weight = before;
  };
  const uint16_t offset = 0;
  check("both shifts", [&](qr_weight& w) { w.offsets = &offset; });
  check("no levels", [](qr_weight& w) { w.format = QR_LEVELS; });
  check("an input that is not there", [&](qr_weight& w) { w.order = order.data(); });
  check("a format", [](qr_weight& w) { w.format = 9; });
  check("a group", [](qr_weight& w) { w.group = 48; });
  check("a large group", [](qr_weight& w) { w.format = QR_INT6, w.group = 64; });
  check("one scale", [](qr_weight& w) { w.group = 0; });
  check("a small group of two bits", [](qr_weight& w) { w.format = QR_INT2, w.group = 16; });
  check("a small group of three bits", [](qr_weight& w) { w.format = QR_INT3, w.group = 16; });
  check("one scale for three bits", [](qr_weight& w) { w.format = QR_INT3, w.group = 0, w.zero_points = nullptr; });
  check("nested zero points", [](qr_weight& w) { w.nested = 1; });
  for (int64_t nested : {-1, 3})
    check("codes", [&](qr_weight& w) { w.nested = nested, w.zero_points = nullptr; });
  check("a large group with codes", [](qr_weight& w) { w.nested = 1, w.group = 64, w.zero_points = nullptr; });
  check("zero points of float8", [](qr_weight& w) { w.format = QR_FLOAT8, w.group = 128, w.order = nullptr; });
  for (double unit : {0.0, -1.0, HUGE_VAL, std::nan("")}) check("a unit", [&](qr_weight& w) { w.unit = unit; });
  for (float value : out) CHECK(value == 7.0f);
  std::vector<int8_t> numbers(64, 8);
  CHECK(qr_pack_quantized(right.packed, QR_INT4, 1, 64, numbers.data(), 1, 64, 0) == QR_EUNSUPPORTED);
  CHECK(qr_pack_quantized(right.packed, QR_LEVELS, 1, 64, numbers.data(), 1, 64, 0) == QR_OK);
  for (int32_t format : {QR_INT2, QR_INT3, QR_INT5, QR_INT6}) {
    char* packed = aligned_zeros(qr_quantized_bytes(format, 1, 64));
    numbers.assign(64, 0);
    for (int outside : {Layer::low(format) - 1, Layer::high(format) + 1}) {
      numbers[63] = int8_t(outside);
      CHECK(qr_pack_quantized(packed, format, 1, 64, numbers.data(), 1, 64, 0) == QR_EUNSUPPORTED);
    }
    numbers[63] = 0;
    CHECK(qr_pack_quantized(packed, format, 1, 64, numbers.data(), 1, 64, 0) == QR_OK);
    std::free(packed);
  }
}
