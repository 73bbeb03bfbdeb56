// Recurrent layers against naive loops in double precision, and their bits however sequences are cut and placed.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "check.h"
#include "pages.h"
#include "quire_cpu.h"

namespace {

struct Sizes {
  int64_t units, rows, state_size;  // Mamba: channels, 1; Mamba 2: heads, channels of a head
  int64_t state() const { return units * rows * state_size; }
};
const Sizes kMamba[] = {{1, 1, 1}, {12, 1, 5}, {64, 1, 16}, {200, 1, 16}, {70, 1, 33}};
const Sizes kMamba2[] = {{1, 1, 1}, {6, 2, 5}, {4, 64, 128}, {2, 7, 20}};

// Rows [begin, end) of inputs for some tokens, scanned; the state is numbers 3 .. of a page.
struct Scan {
  int32_t dtype;
  Sizes size;
  bool heads;
  int64_t groups, tokens, stride;
  std::vector<float> x, time, decay, skip, bias;
  std::vector<char> gate, narrow_time;

  Scan(Sizes size, bool heads, int64_t tokens, int32_t dtype)
      : dtype(dtype), size(size), heads(heads), groups(heads && size.units % 2 == 0 ? 2 : 1), tokens(tokens) {
    const int64_t channels = size.units * size.rows;
    stride = channels + 2 * groups * size.state_size;
    x = random_floats(tokens * stride);
    decay = random_floats(heads ? size.units : size.state());
    for (float& value : decay) value = -std::fabs(value);
    time = random_floats(tokens * size.units, 4.0f);
    narrow_time = encode(time, dtype);
    if (heads) time = decode(narrow_time, dtype);
    skip = random_floats(size.units), bias = random_floats(size.units);
    gate = encode(random_floats(tokens * channels), dtype);
  }
  int64_t channels() const { return size.units * size.rows; }

  // Tokens [begin, end) as one sequence beside, perhaps, another of the same tokens.
  std::vector<float> run(Pages& pages, int64_t begin, int64_t end, int32_t read, int32_t write, bool in_company) const {
    const int64_t count = end - begin, item = dtype == QR_FLOAT32 ? 4 : 2, copies = in_company ? 2 : 1;
    Step step{{0, int32_t(count)}, {read}, {write}};
    if (in_company) step = {{0, int32_t(count), int32_t(2 * count)}, {read, read}, {4, write}};
    const auto twice = [&](const char* from, int64_t row_bytes) {
      std::vector<char> rows;
      for (int64_t copy = 0; copy < copies; ++copy) rows.insert(rows.end(), from + begin * row_bytes, from + end * row_bytes);
      return rows;
    };
    std::vector<char> xs = twice(reinterpret_cast<const char*>(x.data()), stride * 4);
    auto* inputs = reinterpret_cast<float*>(xs.data());
    std::vector<float> all;
    if (heads) {
      const std::vector<char> times = twice(narrow_time.data(), size.units * item);
      CHECK(qr_mamba2_scan(inputs, times.data(), dtype, size.units, bias.data(), decay.data(), skip.data(),
                           copies * count, size.units, groups, size.rows, size.state_size, 3, pages.numbers.data(),
                           pages.num_pages, pages.half, step.starts.data(), step.reads.data(), step.writes.data(),
                           step.sequences()) == QR_OK);
      for (int64_t row = 0; row < copies * count; ++row)
        all.insert(all.end(), inputs + row * stride, inputs + row * stride + channels());
    } else {
      const std::vector<char> times = twice(reinterpret_cast<const char*>(time.data()), size.units * 4),
                              gates = twice(gate.data(), size.units * item);
      std::vector<float> own;
      for (int64_t row = 0; row < copies * count; ++row)
        own.insert(own.end(), inputs + row * stride, inputs + row * stride + channels());
      std::vector<char> out(own.size() * size_t(item));
      CHECK(qr_mamba_scan(out.data(), dtype, own.data(), reinterpret_cast<const float*>(times.data()), gates.data(),
                          size.units, inputs + channels(), inputs + channels() + size.state_size, stride, decay.data(),
                          skip.data(), copies * count, size.units, size.state_size, 3, pages.numbers.data(),
                          pages.num_pages, pages.half, step.starts.data(), step.reads.data(), step.writes.data(),
                          step.sequences()) == QR_OK);
      all = decode(out, dtype);
    }
    return {all.end() - count * channels(), all.end()};
  }

  std::vector<double> naive() const {
    std::vector<double> state(size_t(size.state())), out;
    const std::vector<float> gates = decode(gate, dtype);
    for (int64_t t = 0; t < tokens; ++t) {
      const float* row = &x[size_t(t * stride)];
      for (int64_t c = 0; c < channels(); ++c) {
        const int64_t unit = c / size.rows, group = unit / (size.units / groups);
        const double step = softplus(double(time[size_t(t * size.units + unit)]) + (heads ? bias[size_t(unit)] : 0.0f));
        double y = double(skip[size_t(unit)]) * row[c];
        for (int64_t n = 0; n < size.state_size; ++n) {
          double& h = state[size_t(c * size.state_size + n)];
          const double rate = heads ? decay[size_t(unit)] : decay[size_t(c * size.state_size + n)];
          h = h * std::exp(step * rate) + step * row[c] * row[channels() + group * size.state_size + n];
          y += h * row[channels() + (groups + group) * size.state_size + n];
        }
        const double z = gates[size_t(t * channels() + c)];
        out.push_back(heads ? y : y * z * sigmoid(z));
      }
    }
    return out;
  }
};

}  // namespace

TEST(scans_match_naive_loops_whole_cut_in_company_and_wherever_a_page_is_halved) {
  for (bool heads : {false, true})
    for (const Sizes& size : heads ? std::vector<Sizes>(kMamba2, kMamba2 + 4) : std::vector<Sizes>(kMamba, kMamba + 5))
      for (int32_t dtype : {QR_FLOAT32, QR_BFLOAT16, QR_FLOAT16}) {
        if (!runs_case(7)) continue;
        const Scan scan(size, heads, 21, dtype);
        const int64_t numbers = 3 + size.state();
        Pages pages(numbers);
        const std::vector<float> whole = scan.run(pages, 0, 21, -1, 1, false);
        const std::vector<double> want = scan.naive();
        for (size_t i = 0; i < whole.size(); ++i)
          CHECK(std::fabs(whole[i] - want[i]) <= 5 * allowed(heads ? QR_FLOAT32 : dtype, want[i]),
                "heads %d dtype %d [%ld] %g, not %g", int(heads), dtype, long(i), double(whole[i]), want[i]);
        for (int64_t half : {numbers, (numbers + 1) / 2, (numbers + 1) / 2 + 7}) {
          Pages cut(half);
          std::vector<float> got = scan.run(cut, 0, 4, -1, 1, true);
          for (auto [begin, end, read] : {std::array<int64_t, 3>{4, 5, 1}, {5, 21, 2}}) {
            const std::vector<float> more = scan.run(cut, begin, end, int32_t(read), int32_t(read + 1), begin == 5);
            got.insert(got.end(), more.begin(), more.end());
          }
          CHECK(got.size() == whole.size() && std::memcmp(got.data(), whole.data(), got.size() * 4) == 0,
                "heads %d dtype %d half %ld: a cut changed bits", int(heads), dtype, long(half));
          for (int64_t i = 0; i < half * cut.num_pages; ++i)  // page 0 is nobody's
            if (i < half) CHECK(std::isnan(cut.numbers[size_t(i)]));
        }
      }
}

TEST(convolutions_match_naive_loops_whole_and_cut) {
  for (auto [channels, width] : {std::pair<int64_t, int64_t>{1, 1}, {12, 3}, {70, 4}, {300, 2}, {64, 64}})
    for (int32_t dtype : {QR_FLOAT32, QR_BFLOAT16, QR_FLOAT16})
      for (bool gated : {false, true}) {
        const int64_t block = gated || channels % 4 != 0 ? channels : channels / 4, tokens = 70, stride = 3 * channels, item = dtype == QR_FLOAT32 ? 4 : 2;
        const std::vector<char> rows = encode(random_floats(tokens * stride), dtype);
        const std::vector<float> x = decode(rows, dtype), weight = random_floats(channels * width),
                                 bias = random_floats(channels);
        const auto run = [&](Pages& pages, int64_t begin, int64_t end, int32_t read, std::vector<char>& rounded) {
          std::vector<float> out(size_t((end - begin) * channels));
          rounded.resize(out.size() * size_t(item));
          const Step step{{0, int32_t(end - begin)}, {read}, {int32_t(read + 1)}};
          const char* at = rows.data() + begin * stride * item;
          CHECK(qr_causal_conv(out.data(), rounded.data(), at, gated ? at + channels * item : nullptr,
                               gated ? at + 2 * channels * item : nullptr, dtype, stride, weight.data(),
                               gated ? nullptr : bias.data(), gated ? QR_NONE : QR_SILU, end - begin, channels, block, width,
                               pages.numbers.data(), pages.num_pages, pages.half, step.starts.data(), step.reads.data(),
                               step.writes.data(), 1) == QR_OK);
          return out;
        };
        std::vector<char> rounded, part;
        Pages pages((width * channels + 1) / 2), cut((width * channels + 1) / 2);
        const std::vector<float> whole = run(pages, 0, tokens, -1, rounded);
        std::vector<float> by_block;
        for (int64_t first = 0; first < channels; first += block)
          for (int64_t t = 0; t < tokens; ++t)
            for (int64_t c = first; c < first + block; ++c) by_block.push_back(whole[size_t(t * channels + c)]);
        CHECK(rounded == encode(by_block, dtype));
        std::vector<float> got = run(cut, 0, 2, -1, part);
        for (auto [begin, end, read] : {std::array<int64_t, 3>{2, 3, 0}, {3, tokens, 1}}) {
          const std::vector<float> more = run(cut, begin, end, int32_t(read), part);
          got.insert(got.end(), more.begin(), more.end());
        }
        CHECK(std::memcmp(got.data(), whole.data(), got.size() * 4) == 0, "a cut changed bits");
        for (int64_t t = 0; t < tokens; ++t)
          for (int64_t c = 0; c < channels; ++c) {
            double want = gated ? 0.0 : bias[size_t(c)];
            for (int64_t k = 0; k < width; ++k) {
              const int64_t row = (t - width + 1 + k) * stride;
              if (row < 0) continue;
              const double input = double(x[size_t(row + c)]) * (gated ? x[size_t(row + channels + c)] : 1.0f);
              want += input * weight[size_t(c * width + k)];
            }
            want = gated ? want * x[size_t(t * stride + 2 * channels + c)] : want * sigmoid(want);
            const double actual = whole[size_t(t * channels + c)];
            CHECK(std::fabs(actual - want) <= 2 * allowed(QR_FLOAT32, want), "[%ld, %ld] %g, not %g", long(t), long(c), actual, want);
          }
      }
}

TEST(derived_parts_and_gated_outputs_are_normed) {
  for (int32_t dtype : {QR_FLOAT32, QR_BFLOAT16, QR_FLOAT16})
    for (auto [rank, size] : {std::pair<int64_t, int64_t>{1, 1}, {5, 7}, {96, 16}})
      for (bool is_normed : {false, true}) {
        const int64_t tokens = 3, width = rank + 2 * size;
        const std::vector<float> before = random_floats(tokens * width), norm = random_floats(std::max(rank, size));
        std::vector<float> derived = before;
        std::vector<char> time(size_t(tokens * rank * (dtype == QR_FLOAT32 ? 4 : 2)));
        CHECK(qr_mamba_derived(time.data(), dtype, derived.data(), tokens, rank, size, norm.data(), nullptr, norm.data(),
                               is_normed, 1e-5f) == QR_OK);
        const std::vector<float> times = decode(time, dtype);
        for (int64_t row = 0; row < tokens; ++row) {
          int64_t begin = 0, index = 0;
          for (int64_t count : {rank, size, size}) {
            double squares = 0;
            for (int64_t i = begin; i < begin + count; ++i) squares += std::pow(before[size_t(row * width + i)], 2);
            const double factor = is_normed ? 1 / std::sqrt(squares / double(count) + 1e-5) : 1;
            for (int64_t i = 0; i < count; ++i) {
              const size_t at = size_t(row * width + begin + i);
              const double want = before[at] * factor * (is_normed && index != 1 ? norm[size_t(i)] : 1);
              CHECK(std::fabs(derived[at] - want) <= allowed(QR_FLOAT32, want));
              if (index == 0) CHECK(std::fabs(times[size_t(row * rank + i)] - want) <= allowed(dtype, want));
            }
            begin += count, ++index;
          }
        }
        const int64_t groups = 2, x_stride = groups * rank + 3, gate_stride = groups * rank + 1;
        std::vector<float> x = random_floats(tokens * x_stride), weight = random_floats(groups * rank);
        const std::vector<char> gate = encode(random_floats(tokens * gate_stride), dtype);
        const std::vector<float> xs = x, gates = decode(gate, dtype);
        for (const bool norms_first : {false, true})
          for (const bool has_norm : {false, true}) {
            const bool shares = norms_first && rank != 5, by_sigmoid = norms_first && rank != 1;
            const float* norm_weight = has_norm ? weight.data() : nullptr;
            x = xs;
            std::vector<char> out(size_t(tokens * groups * rank * (dtype == QR_FLOAT32 ? 4 : 2)));
            CHECK(qr_gated_norm(out.data(), dtype, x.data(), x_stride, gate.data(), gate_stride, norm_weight, shares,
                                tokens, groups, rank, 1e-5f, norms_first, by_sigmoid) == QR_OK);
            const std::vector<float> got = decode(out, dtype);
            for (int64_t row = 0; row < tokens * groups; ++row) {
              const int64_t t = row / groups, first = row % groups * rank;
              const auto opened_of = [&](int64_t i) {
                const double z = gates[size_t(t * gate_stride + first + i)];
                return by_sigmoid ? sigmoid(z) : z * sigmoid(z);
              };
              const auto normed = [&](int64_t i) {
                return xs[size_t(t * x_stride + first + i)] * (norms_first ? 1 : opened_of(i));
              };
              double squares = 0;
              for (int64_t i = 0; i < rank; ++i) squares += std::pow(normed(i), 2);
              for (int64_t i = 0; i < rank; ++i) {
                const double scale =
                    norm_weight ? weight[size_t(shares ? i : first + i)] / std::sqrt(squares / double(rank) + 1e-5) : 1;
                const double want = xs[size_t(t * x_stride + first + i)] * opened_of(i) * scale;
                CHECK(std::fabs(got[size_t(row * rank + i)] - want) <= 2 * allowed(dtype, want));
              }
            }
          }
      }
}

TEST(time_steps_keep_their_relative_accuracy) {
  const std::vector<float> times{-80.0f, -30.0f, -10.0f, -3.0f, -1e-3f, 0.0f, 0.5f, 3.0f, 19.0f, 21.0f, 90.0f};
  const int64_t n = int64_t(times.size());
  const std::vector<float> ones(size_t(n), 1.0f), zeros(size_t(n), 0.0f), wide(size_t(n), 100.0f);
  std::vector<float> out(static_cast<size_t>(n));
  Pages pages(n);
  const Step step{{0, 1}, {-1}, {0}};
  const float one = 1.0f;  // y = dt * 1 * 1 * 1, times silu(100) = 100
  CHECK(qr_mamba_scan(out.data(), QR_FLOAT32, ones.data(), times.data(), wide.data(), n, &one, &one, 1, zeros.data(),
                      zeros.data(), 1, n, 1, 0, pages.numbers.data(), pages.num_pages, pages.half, step.starts.data(),
                      step.reads.data(), step.writes.data(), 1) == QR_OK);
  for (int64_t i = 0; i < n; ++i) {
    const double want = 100 * softplus(times[size_t(i)]), got = out[size_t(i)];
    CHECK(std::fabs(got - want) <= 1e-6 * want, "softplus(%g): %g, not %g", double(times[size_t(i)]), got, want);
  }
}

TEST(recurrent_layers_refuse_pages_and_sequences_that_are_not_there) {
  const std::vector<float> x(64, 1.0f), weight(16, 1.0f);
  std::vector<float> out(16, 7.0f);
  const auto run = [&](Step step, int64_t half, int64_t width = 2) {
    Pages pages(64);
    const int32_t conv = qr_causal_conv(out.data(), nullptr, x.data(), nullptr, nullptr, QR_FLOAT32, 8, weight.data(),
                                        nullptr, QR_SILU, 2, 8, 8, width, pages.numbers.data(), 5, half, step.starts.data(),
                                        step.reads.data(), step.writes.data(), step.sequences());
    const int32_t scan =
        qr_mamba_scan(out.data(), QR_FLOAT32, x.data(), x.data(), x.data(), 8, x.data(), x.data(), 1, weight.data(),
                      weight.data(), 2, 8, 1, 0, pages.numbers.data(), 5, half, step.starts.data(), step.reads.data(),
                      step.writes.data(), step.sequences());
    std::vector<float> heads(2 * 10, 1.0f);
    const int32_t scan2 = qr_mamba2_scan(heads.data(), x.data(), QR_FLOAT32, 4, weight.data(), weight.data(),
                                         weight.data(), 2, 4, 1, 2, 1, 0, pages.numbers.data(), 5, half,
                                         step.starts.data(), step.reads.data(), step.writes.data(), step.sequences());
    for (float value : pages.numbers) CHECK(conv == QR_OK || std::isnan(value));
    CHECK(scan == scan2);
    return std::make_pair(conv, scan);
  };
  const auto refused = std::make_pair(int32_t(QR_EINVAL), int32_t(QR_EINVAL));
  const auto wrong = [&](std::vector<int32_t> starts, std::vector<int32_t> reads, std::vector<int32_t> writes) {
    CHECK(run(Step{starts, reads, writes}, 8) == refused);
  };
  wrong({0, 2}, {-2}, {1}), wrong({0, 2}, {5}, {1}), wrong({0, 2}, {0}, {5}), wrong({0, 2}, {0}, {-1});
  wrong({1, 2}, {0}, {1}), wrong({0, 1}, {0}, {1}), wrong({0, 3}, {0}, {1}), wrong({0, 3, 2}, {0, 1}, {2, 3});
  wrong({-1, 2}, {0}, {1}), wrong({0}, {}, {});
  CHECK(run(Step{{0, 2}, {0}, {1}}, 3) == refused);  // a state larger than its page
  for (float value : out) CHECK(value == 7.0f);
  CHECK(run(Step{{0, 2}, {0}, {1}}, 8, 65).first == QR_EINVAL);
  CHECK(run(Step{{0, 2}, {-1}, {1}}, 8) == std::make_pair(int32_t(QR_OK), int32_t(QR_OK)));
  CHECK(run(Step{{0, 0, 2}, {0, -1}, {2, 1}}, 8) == std::make_pair(int32_t(QR_OK), int32_t(QR_OK)));
}
