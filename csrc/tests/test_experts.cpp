// A mixture against its experts multiplied one by one with the functions of gemm, bit for bit.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <numeric>

#include "check.h"
#include "quire_cpu.h"

namespace {

const float kNan = std::numeric_limits<float>::quiet_NaN();

// What packed memory and scales there are, freed in the end.
class Weights {
 public:
  ~Weights() {
    for (char* memory : all) std::free(memory);
  }
  Weights() = default;
  Weights(const Weights&) = delete;
  Weights& operator=(const Weights&) = delete;

  // format 0: dense, of dtype.
  qr_weight draw(int64_t n, int64_t k, int32_t dtype, int32_t format, int64_t group, bool has_bias) {
    qr_weight weight{};
    weight.dtype = dtype;
    weight.format = format;
    weight.group = group;
    weight.outputs = n;
    weight.unit = 1.0;
    if (has_bias) weight.bias = keep(random_floats(n));
    if (format == 0) {
      std::vector<char> raw = encode(random_floats(n * k, 1.0f / std::sqrt(float(k))), dtype);
      char* packed = aligned(qr_packed_bytes(dtype, n, k));
      CHECK(qr_pack_linear(packed, dtype, n, k, raw.data(), dtype, n, k, 0) == QR_OK);
      weight.packed = packed;
      return weight;
    }
    std::vector<int8_t> numbers(size_t(n * k));
    std::uniform_int_distribution<int> any(format == QR_INT8 ? -127 : format == QR_INT4 ? -8 : 0, format == QR_INT8 ? 127 : 7);
    for (int8_t& number : numbers) number = int8_t(any(rng()));
    char* packed = aligned(qr_quantized_bytes(format, n, k));
    CHECK(qr_pack_quantized(packed, format, n, k, numbers.data(), n, k, 0) == QR_OK);
    weight.packed = packed;
    const int64_t columns = (n + 31) / 32 * 32, groups = group == 0 ? 1 : (k + group - 1) / group;
    std::vector<float> scales = random_floats(columns * groups, 0.001f);
    std::vector<char> halves = encode(scales, group == 0 || format == QR_FLOAT8 ? QR_FLOAT32 : QR_FLOAT16);
    char* kept = aligned(int64_t(halves.size()));
    std::memcpy(kept, halves.data(), halves.size());
    weight.scales = kept;
    return weight;
  }

  float* keep(const std::vector<float>& values) {
    char* memory = aligned(int64_t(values.size()) * 4);
    std::memcpy(memory, values.data(), values.size() * 4);
    return reinterpret_cast<float*>(memory);
  }

 private:
  char* aligned(int64_t bytes) { return all.emplace_back(aligned_zeros(bytes)); }
  std::vector<char*> all;
};

struct Kind {
  int32_t dtype, format;
  int64_t group;
  bool has_bias;
};
const Kind kKinds[] = {{QR_FLOAT32, 0, 0, false},  {QR_BFLOAT16, 0, 0, true}, {QR_FLOAT16, 0, 0, false},
                       {QR_BFLOAT16, QR_INT8, 0, true}, {QR_FLOAT32, QR_INT4, 32, false}, {QR_BFLOAT16, QR_INT4, 128, false},
                       {QR_BFLOAT16, QR_INT8, 16, false},
                       {QR_BFLOAT16, QR_FLOAT8, 128, true},
                       {QR_FLOAT32, QR_FLOAT8, 0, false}};

qr_routing routing_of(int64_t num_chosen) {
  return {num_chosen, QR_SOFTMAX, 0, 0, 0, 1, 0, 0.0, 0.0, 1.5, 0.5, -1.0, -HUGE_VAL};
}

const qr_gating kSilu{1, QR_SILU, HUGE_VAL, 1.0, 0.0};

struct Case {
  Kind kind;
  int64_t k, n, num_experts;
  Weights weights;
  std::vector<qr_expert> experts;
  qr_mixture mixture;
  qr_routing routing = routing_of(3);
  qr_gating gating;
  const int32_t* given = nullptr;
  int64_t size_of() const { return kind.dtype == QR_FLOAT32 ? 4 : 2; }
  int64_t first_outputs(int64_t size) const { return gating.is_gated != 0 ? 2 * size : size; }

  Case(Kind kind, int64_t k, int64_t n, std::vector<int64_t> sizes, bool has_shared, qr_gating gating = kSilu)
      : kind(kind), k(k), n(n), num_experts(int64_t(sizes.size()) - has_shared), gating(gating) {
    for (int64_t size : sizes)
      experts.push_back({weights.draw(first_outputs(size), k, kind.dtype, kind.format, kind.group, kind.has_bias),
                         weights.draw(n, size, kind.dtype, kind.format, kind.group, kind.has_bias), size});
    mixture = {weights.draw(num_experts + has_shared, k, QR_FLOAT32, 0, 0, false), nullptr, nullptr, experts.data(),
               num_experts, has_shared, has_shared, k, n, 0, 0, k};
  }

  // The router reads `routed`, from the same row on, where there is one.
  int32_t run(std::vector<char>& out, const char* x, const char* residual, int64_t rows, const char* routed = nullptr) {
    out.assign(size_t(rows * n * size_of()), 0);
    return qr_mixture_of_experts(out.data(), x, routed, kind.dtype, given, kind.dtype, residual, rows, &mixture, &routing,
                                 &gating);
  }

  void bias_to(const std::vector<float>& bias) { mixture.choice_bias = weights.keep(bias); }
  void scale_by(const std::vector<float>& scales) { mixture.scales = weights.keep(scales); }
  bool is_plain() const { return gating.limit == HUGE_VAL && gating.slope == 1.0 && gating.offset == 0.0; }
  void product(void* out, int32_t out_dtype, const qr_weight& w, const char* x, int64_t n, int64_t k) const;
  std::vector<char> inner_of(const qr_expert& expert, const char* x) const;
  std::vector<float> apply(const qr_expert& expert, const char* x) const;
  std::vector<char> times(const char* x, float weight) const;
  std::vector<char> expected(const char* x, const char* residual, const char* routed) const;
};

// One row.
void Case::product(void* out, int32_t out_dtype, const qr_weight& w, const char* x, int64_t n, int64_t k) const {
  const int32_t after = is_plain() && out_dtype == kind.dtype ? int32_t(gating.activation) : int32_t(QR_NONE);
  CHECK((kind.format == 0 ? qr_linear(out, out_dtype, x, kind.dtype, w.packed, kind.dtype, 1, n, k, w.bias, after,
                                      nullptr)
                          : qr_linear_quantized(out, out_dtype, x, kind.dtype, &w, 1, 1, n, k, w.bias, after,
                                                nullptr)) == QR_OK);
}

// What the second product reads. Of gates that are not plain, in double.
std::vector<char> Case::inner_of(const qr_expert& e, const char* x) const {
  std::vector<char> inner(size_t(e.size * size_of()));
  const qr_weight& up = e.gate_up;
  if (!is_plain()) {
    std::vector<float> sums(size_t(first_outputs(e.size))), values(static_cast<size_t>(e.size));
    std::vector<char> own(sums.size() * 4);
    product(own.data(), QR_FLOAT32, up, x, first_outputs(e.size), k);
    std::memcpy(sums.data(), own.data(), own.size());
    for (size_t i = 0; i < values.size(); ++i) {
      const double opened = gating.is_gated != 0 ? std::min(double(sums[i]), gating.limit) : double(sums[i]);
      double value = opened / (1 + std::exp(-gating.slope * opened));
      if (gating.is_gated != 0)
        value *= std::clamp(double(sums[i + values.size()]), -gating.limit, gating.limit) + gating.offset;
      values[i] = float(value);
    }
    return encode(values, kind.dtype);
  }
  if (gating.is_gated == 0) {
    product(inner.data(), kind.dtype, up, x, e.size, k);
  } else if (kind.format == 0) {
    CHECK(qr_gated_linear(inner.data(), kind.dtype, x, kind.dtype, up.packed, kind.dtype, 1, e.size, k, up.bias,
                          int32_t(gating.activation)) == QR_OK);
  } else {
    CHECK(qr_gated_linear_quantized(inner.data(), x, kind.dtype, &up, 1, 1, e.size, k, up.bias,
                                    int32_t(gating.activation)) == QR_OK);
  }
  return inner;
}

// One row through one expert.
std::vector<float> Case::apply(const qr_expert& e, const char* x) const {
  std::vector<float> out(static_cast<size_t>(n));
  const std::vector<char> inner = inner_of(e, x);
  const qr_weight& down = e.down;
  CHECK((kind.format == 0 ? qr_linear(out.data(), QR_FLOAT32, inner.data(), kind.dtype, down.packed, kind.dtype, 1, n,
                                      e.size, down.bias, QR_NONE, nullptr)
                          : qr_linear_quantized(out.data(), QR_FLOAT32, inner.data(), kind.dtype, &down, 1, 1, n,
                                                e.size, down.bias, QR_NONE, nullptr)) == QR_OK);
  return out;
}

std::vector<char> Case::times(const char* x, float weight) const {
  std::vector<float> values = decode(std::vector<char>(x, x + k * size_of()), kind.dtype);
  for (float& value : values) value *= weight;
  return encode(values, kind.dtype);
}

std::vector<char> Case::expected(const char* x, const char* residual, const char* routed) const {
  std::vector<float> logits(size_t(num_experts + mixture.has_shared_gate)), total(size_t(n), 0.0f);
  CHECK(qr_linear(logits.data(), QR_FLOAT32, routed == nullptr ? x : routed, kind.dtype, mixture.router.packed, QR_FLOAT32, 1,
                  int64_t(logits.size()), k, nullptr, QR_NONE, nullptr) == QR_OK);
  std::vector<int32_t> chosen(size_t(routing.num_chosen));
  std::vector<float> weights(chosen.size());
  CHECK(qr_route(chosen.data(), weights.data(), logits.data(), mixture.choice_bias, 1, num_experts, &routing) == QR_OK);
  std::vector<std::pair<int32_t, float>> order;
  for (size_t i = 0; i < chosen.size(); ++i)
    order.emplace_back(chosen[i], weights[i] * (mixture.scales == nullptr ? 1.0f : mixture.scales[chosen[i]]));
  std::sort(order.begin(), order.end());
  if (mixture.has_shared != 0)
    order.emplace_back(int32_t(num_experts), 1.0f / (1.0f + std::exp(-logits.back())) * float(routing.shared_factor));
  for (auto [index, weight] : order) {
    const bool is_weighed = routing.weighs_input != 0 && index < num_experts;
    const std::vector<char> read = is_weighed ? times(x, weight) : std::vector<char>(x, x + k * size_of());
    const std::vector<float> out = apply(experts[size_t(index)], read.data());
    for (size_t i = 0; i < total.size(); ++i) total[i] += is_weighed ? out[i] : out[i] * weight;
  }
  const std::vector<char> raw(residual, residual + n * size_of());
  const std::vector<float> more = decode(raw, kind.dtype);
  for (size_t i = 0; i < total.size(); ++i) total[i] += more[i];
  return encode(total, kind.dtype);
}

// Of gates that the test computes itself, rounded other numbers than the library's.
bool are_close(const std::vector<char>& own, const std::vector<char>& want, const Kind& kind) {
  const std::vector<float> a = decode(own, kind.dtype), b = decode(want, kind.dtype);
  float largest = 0.0f, error = 0.0f;
  for (size_t i = 0; i < a.size(); ++i) {
    largest = std::max(largest, std::fabs(b[i]));
    error = std::max(error, std::fabs(a[i] - b[i]));
  }
  return error <= (kind.format != 0 || kind.dtype == QR_BFLOAT16 ? 2e-2f : kind.dtype == QR_FLOAT16 ? 2e-3f : 1e-5f) * largest;
}

// All rows at once and in parts, with some numbers of threads, against each row alone.
void check_rows(Case& c, int64_t rows, const char* what, bool has_routed = false) {
  std::vector<char> x = encode(random_floats(rows * c.k), c.kind.dtype), all, some;
  std::vector<char> residual = encode(random_floats(rows * c.n), c.kind.dtype);
  const std::vector<char> other = encode(random_floats(rows * c.k), c.kind.dtype);
  const auto routed = [&](int64_t row) { return has_routed ? other.data() + row * c.k * c.size_of() : nullptr; };
  const int64_t in_bytes = c.k * c.size_of(), out_bytes = c.n * c.size_of();
  for (int32_t threads : {1, 2, 3}) {
    if (!runs_case(5)) continue;
    qr_init(qr_isa_in_use(), threads);
    CHECK(c.run(all, x.data(), residual.data(), rows, routed(0)) == QR_OK);
    for (int64_t row = 0; row < rows; row += rows > 50 ? 17 : 1) {
      const std::vector<char> want = c.expected(x.data() + row * in_bytes, residual.data() + row * out_bytes, routed(row));
      const char* own = all.data() + row * out_bytes;
      const bool is_right = c.is_plain() ? std::memcmp(own, want.data(), want.size()) == 0
                                         : are_close({own, own + out_bytes}, want, c.kind);
      CHECK(is_right, "%s, dtype %d format %d: row %ld", what, c.kind.dtype, c.kind.format, long(row));
    }
    for (auto [first, count] : {std::pair<int64_t, int64_t>{0, 1}, {1, 2}, {0, 5}, {3, rows - 3}}) {
      CHECK(c.run(some, x.data() + first * in_bytes, residual.data() + first * out_bytes, count, routed(first)) == QR_OK);
      CHECK(std::memcmp(some.data(), all.data() + first * out_bytes, some.size()) == 0, "%s, rows %ld from %ld", what,
            long(count), long(first));
    }
  }
  qr_init(qr_isa_in_use(), 2);
}

}  // namespace

TEST(a_mixture_has_the_bits_of_its_experts_one_by_one) {
  for (const Kind& kind : kKinds) {
    Case whole(kind, 96, 70, {64, 64, 32, 64, 96, 64, 64, 64}, false);
    check_rows(whole, 33, "whole panels");
    Case odd(kind, 72, 64, {20, 20, 20, 20, 45}, true);
    check_rows(odd, 19, "halves within a panel, and a shared expert");
  }
}

TEST(gates_are_clamped_or_not_there_and_what_experts_read_is_weighed) {
  const qr_gating clamped{1, QR_SILU, 0.7, 1.702, 1.0}, squares{0, QR_RELU2, HUGE_VAL, 1.0, 0.0},
      sloped{0, QR_SILU, HUGE_VAL, 1.702, 0.0};
  for (const Kind& kind : kKinds)
    for (const qr_gating& gating : {kSilu, clamped, squares, sloped})
      for (bool weighs : {false, true}) {
        Case c(kind, 96, 70, {64, 64, 64, 20, 64}, true, gating);
        c.routing.weighs_input = weighs;
        c.routing.scores = QR_LOGITS_SIGMOID;
        check_rows(c, 19, "gates and weighed inputs");
      }
}

TEST(a_router_may_read_something_else_and_experts_have_scales) {
  for (const Kind& kind : kKinds) {
    Case c(kind, 96, 70, {64, 64, 32, 64}, false);
    c.scale_by({0.25f, 1.5f, 0.0f, -2.0f});
    check_rows(c, 19, "scaled experts of another router", true);
  }
}

TEST(experts_without_rows_and_one_with_all_of_them) {
  for (const Kind& kind : {kKinds[1], kKinds[3]}) {
    Case c(kind, 64, 64, {32, 32, 32, 32, 32}, false);
    c.routing = routing_of(1);
    c.bias_to({-9, 9, -9, 0, 0});
    check_rows(c, 40, "one for all");
    c.routing = routing_of(5);
    check_rows(c, 12, "all of them");
  }
}

// One wave after the other, and more rows than an expert takes at once.
TEST(many_rows_have_the_bits_of_few) {
  if (is_emulated()) return;
  for (const Kind& kind : {kKinds[0], kKinds[1], kKinds[4]}) {
    Case c(kind, 544, 2080, {320, 320, 320, 320}, true);
    c.routing = routing_of(2);
    check_rows(c, 1100, "many rows");
  }
}

TEST(a_row_that_is_not_a_number_fails_alone) {
  Case c(kKinds[1], 64, 64, {32, 32, 32, 32, 32}, true);
  const int64_t rows = 9;
  std::vector<float> numbers = random_floats(rows * c.k);
  std::vector<char> x = encode(numbers, QR_BFLOAT16), residual = encode(random_floats(rows * c.n), QR_BFLOAT16);
  std::vector<char> clean, mixed;
  CHECK(c.run(clean, x.data(), residual.data(), rows) == QR_OK);
  const uint16_t nan = 0x7fc0;
  std::memcpy(x.data() + (4 * c.k + 3) * 2, &nan, 2);
  CHECK(c.run(mixed, x.data(), residual.data(), rows) == QR_OK);
  for (int64_t row = 0; row < rows; ++row) {
    const size_t at = size_t(row * c.n * 2), bytes = size_t(c.n * 2);
    if (row != 4) CHECK(std::memcmp(clean.data() + at, mixed.data() + at, bytes) == 0, "row %ld", long(row));
  }
  const std::vector<float> values = decode(mixed, QR_BFLOAT16);
  for (int64_t i = 4 * c.n; i < 5 * c.n; ++i) CHECK(std::isnan(values[size_t(i)]));
}

TEST(experts_that_are_given_are_weighed_as_those_that_are_chosen) {
  Case c({QR_FLOAT32, 0, 0, false}, 40, 24, {16, 16, 16, 16, 16}, false);
  c.routing.scores = QR_SQRT_SOFTPLUS;
  const int64_t rows = 7;
  const std::vector<char> x = encode(random_floats(rows * c.k), QR_FLOAT32);
  std::vector<char> chosen_by_router, of_given;
  CHECK(c.run(chosen_by_router, x.data(), nullptr, rows) == QR_OK);
  std::vector<float> logits(size_t(rows * 5)), weights(size_t(rows * 3));
  std::vector<int32_t> chosen(size_t(rows * 3));
  CHECK(qr_linear(logits.data(), QR_FLOAT32, x.data(), QR_FLOAT32, c.mixture.router.packed, QR_FLOAT32, rows, 5, c.k,
                  nullptr, QR_NONE, nullptr) == QR_OK);
  CHECK(qr_route(chosen.data(), weights.data(), logits.data(), nullptr, rows, 5, &c.routing) == QR_OK);
  c.given = chosen.data();
  CHECK(c.run(of_given, x.data(), nullptr, rows) == QR_OK);
  CHECK(of_given == chosen_by_router);
  std::fill(chosen.begin(), chosen.end(), 4);  // one expert three times: its weights add up to the factor
  CHECK(c.run(of_given, x.data(), nullptr, rows) == QR_OK);
  chosen[5] = 5;
  CHECK(c.run(of_given, x.data(), nullptr, rows) == QR_EINVAL);
  chosen[5] = -1;
  CHECK(c.run(of_given, x.data(), nullptr, rows) == QR_EINVAL);
}

TEST(routing_takes_the_best_and_the_lower_index_first) {
  const float logits[] = {1, 3, 3, 2, 3, 2, kNan, 0, 0, 0, 0, 0};
  int32_t chosen[8];
  float weights[8];
  qr_routing routing = routing_of(4);
  for (int64_t scores : {QR_SOFTMAX, QR_SIGMOID, QR_LOGITS, QR_LOGITS_SIGMOID, QR_SQRT_SOFTPLUS}) {
    routing.scores = scores;
    CHECK(qr_route(chosen, weights, logits, nullptr, 2, 6, &routing) == QR_OK);
    const int32_t want[] = {1, 2, 4, 3, 0, 1, 2, 3};
    CHECK(std::isnan(weights[4]));
    CHECK(std::memcmp(chosen, want, sizeof(want)) == 0, "scores %ld", long(scores));
    CHECK(weights[0] == weights[1] && weights[1] == weights[2] && weights[2] > weights[3]);
  }
  routing.groups = 3;
  routing.chosen_groups = routing.best_of_group = 2;
  CHECK(qr_route(chosen, weights, logits, nullptr, 1, 6, &routing) == QR_OK);
  CHECK(chosen[0] == 2 && chosen[1] == 4 && chosen[2] == 3 && chosen[3] == 5);  // groups 1 (3 + 2) and 2 (3 + 2)
  routing.left_out = 1.6;  // the scores of 2 and 3 are 1.46 and 1.75
  CHECK(qr_route(chosen, weights, logits, nullptr, 1, 6, &routing) == QR_OK);
  CHECK(chosen[0] == 2 && chosen[1] == 4 && chosen[2] == 0 && chosen[3] == 1);  // those left out, before the twos
}

TEST(a_mixture_that_cannot_be_is_refused) {
  Case c(kKinds[0], 64, 64, {32, 32, 32, 32}, false);
  std::vector<char> x = encode(random_floats(2 * 64), QR_FLOAT32), out;
  const auto refuses = [&](const char* what, auto change) {
    const qr_mixture mixture = c.mixture;
    const qr_routing routing = c.routing;
    const qr_gating gating = c.gating;
    const std::vector<qr_expert> experts = c.experts;
    change();
    CHECK(c.run(out, x.data(), nullptr, 2) == QR_EINVAL, "%s", what);
    CHECK(std::all_of(out.begin(), out.end(), [](char byte) { return byte == 0; }), "%s wrote", what);
    c.mixture = mixture;
    c.routing = routing;
    c.gating = gating;
    std::copy(experts.begin(), experts.end(), c.experts.begin());
  };
  refuses("no experts", [&] { c.mixture.num_experts = 0; });
  refuses("identities that the router has no rows of", [&] { c.mixture.num_identities = 1; });
  refuses("fewer identities than none", [&] { c.mixture.num_identities = -1; });
  refuses("skips that the router has no rows of", [&] { c.mixture.num_skips = 1; });
  refuses("fewer skips than none", [&] { c.mixture.num_skips = -1; });
  refuses("a router of more than there is to read", [&] { c.mixture.router_features = 65; });
  refuses("a gate of nothing", [&] { c.mixture.has_shared_gate = 1; });
  refuses("a size", [&] { c.experts[2].size = -1; });
  refuses("a weight that is not there", [&] { c.experts[3].down.packed = nullptr; });
  refuses("a dtype", [&] { c.experts[0].gate_up.dtype = 9; });
  refuses("a format", [&] { c.experts[1].gate_up.format = 5; });
  refuses("no scales", [&] { c.experts[1].gate_up.format = QR_INT8; });
  refuses("more choices than experts", [&] { c.routing.num_chosen = 5; });
  refuses("no choice", [&] { c.routing.num_chosen = 0; });
  refuses("scores", [&] { c.routing.scores = QR_SQRT_SOFTPLUS + 1; });
  refuses("groups that do not divide", [&] { c.routing.groups = 3; });
  refuses("groups too few for the choices", [&] {
    c.routing.groups = 4;
    c.routing.chosen_groups = c.routing.best_of_group = 1;
  });
  refuses("a factor", [&] { c.routing.factor = double(kNan); });
  refuses("a nearness", [&] { c.routing.near = HUGE_VAL; });
  refuses("a score of those left out", [&] { c.routing.left_out = double(kNan); });
  refuses("an activation", [&] { c.gating.activation = 6; });
  refuses("half a gate", [&] { c.gating.is_gated = 2; });
  refuses("a limit", [&] { c.gating.limit = double(kNan); });
  refuses("a slope", [&] { c.gating.slope = 0.0; });
  refuses("an offset", [&] { c.gating.offset = HUGE_VAL; });
  CHECK(c.run(out, x.data(), nullptr, 0) == QR_OK);
  CHECK(c.run(out, x.data(), nullptr, 2) == QR_OK);
}
