// The gated delta rule, lightning attention and the RG-LRU against naive loops in double precision, and their bits
// however sequences are cut and placed.
#include <array>
#include <cstring>
#include <functional>

#include "check.h"
#include "pages.h"
#include "quire_cpu.h"

namespace {

constexpr int64_t kTokens = 37, kFirst = 3;  // kFirst: the number of a page at which a state begins
constexpr int32_t kDtypes[] = {QR_FLOAT32, QR_BFLOAT16, QR_FLOAT16};

int64_t item(int32_t dtype) { return dtype == QR_FLOAT32 ? 4 : 2; }

// Rows `begin` to `end` of something, twice where two sequences have the same tokens.
std::vector<char> rows_of(const std::vector<char>& all, int64_t row_bytes, int64_t begin, int64_t end, int64_t copies) {
  std::vector<char> rows;
  for (int64_t copy = 0; copy < copies; ++copy)
    rows.insert(rows.end(), all.begin() + begin * row_bytes, all.begin() + end * row_bytes);
  return rows;
}

// Tokens [begin, end) as a sequence of its own, or in the company of another; gives its outputs.
using Run = std::function<std::vector<float>(Pages& pages, const Step& step, int64_t begin, int64_t end, int64_t copies)>;

std::vector<float> last_copy(const std::vector<float>& all, int64_t copies) {
  return {all.end() - int64_t(all.size()) / copies, all.end()};
}

std::vector<float> run_tokens(const Run& run, Pages& pages, int64_t begin, int64_t end, int32_t read, int32_t write,
                              bool in_company) {
  const auto count = int32_t(end - begin);
  if (!in_company) return run(pages, Step{{0, count}, {read}, {write}}, begin, end, 1);
  return last_copy(run(pages, Step{{0, count, 2 * count}, {read, read}, {4, write}}, begin, end, 2), 2);
}

void check(const Run& run, const std::vector<double>& want, int64_t numbers, int32_t dtype, double tolerance) {
  Pages pages((kFirst + numbers + 1) / 2);
  const std::vector<float> whole = run_tokens(run, pages, 0, kTokens, -1, 1, false);
  CHECK(whole.size() == want.size());
  for (size_t i = 0; i < want.size(); ++i)
    CHECK(std::fabs(whole[i] - want[i]) <= tolerance * allowed(dtype, want[i]), "[%zu] %g, not %g", i, double(whole[i]),
          want[i]);
  for (int64_t half : {kFirst + numbers, (kFirst + numbers + 1) / 2, (kFirst + numbers + 1) / 2 + 13}) {
    Pages cut(half);
    std::vector<float> got = run_tokens(run, cut, 0, 4, -1, 1, true);
    for (auto [begin, end, read] : {std::array<int64_t, 3>{4, 5, 1}, {5, 22, 2}, {22, kTokens, 3}}) {
      const auto write = int32_t(read == 3 ? 1 : read + 1);
      const std::vector<float> more = run_tokens(run, cut, begin, end, int32_t(read), write, begin == 5);
      got.insert(got.end(), more.begin(), more.end());
    }
    CHECK(got.size() == whole.size() && std::memcmp(got.data(), whole.data(), got.size() * 4) == 0,
          "dtype %d half %ld: a cut changed bits", dtype, long(half));
    for (int64_t i = 0; i < numbers; ++i) {
      const int64_t at = kFirst + i;
      const auto number = [&](const Pages& from) {
        return from.numbers[size_t(at < from.half ? from.half + at : (from.num_pages + 1) * from.half + at - from.half)];
      };
      CHECK(number(cut) == number(pages), "a cut changed the state");
    }
    for (int64_t i = 0; i < half; ++i) CHECK(std::isnan(cut.numbers[size_t(i)]));  // page 0 is nobody's
  }
}

const float* floats(const std::vector<char>& bytes) { return reinterpret_cast<const float*>(bytes.data()); }
std::vector<char> bytes_of_floats(const std::vector<float>& values) { return encode(values, QR_FLOAT32); }
double silu(double x) { return x * sigmoid(x); }

}  // namespace

TEST(gated_delta_rules_match_naive_loops_whole_cut_and_in_company) {
  struct Sizes {
    int64_t heads, key_heads, key_size, value_size;
    bool by_channel = false;
    float bound = 0.0f;
  };
  for (const Sizes& size :
       {Sizes{1, 1, 1, 1}, {4, 2, 5, 3}, {2, 1, 128, 64}, {3, 3, 32, 21}, {2, 2, 70, 9}, {1, 1, 1, 1, true},
        {4, 2, 5, 3, true}, {2, 2, 128, 64, true}, {3, 3, 70, 21, true}, {4, 2, 37, 3, true, -5.0f}})
    for (int32_t dtype : kDtypes) {
      const auto [heads, key_heads, keys, values, by_channel, bound] = size;
      const int64_t times = by_channel ? heads * keys : heads;
      const int64_t stride = 2 * key_heads * keys + heads * values, narrow = heads + times + 1;
      const float most_rate = heads == 2 ? 2.0f : 1.0f;
      const std::vector<float> x = random_floats(kTokens * stride), bias = random_floats(times);
      std::vector<float> decay = random_floats(heads);
      for (float& value : decay) value = -std::fabs(value);
      const std::vector<char> xs = bytes_of_floats(x), rates = encode(random_floats(kTokens * narrow, 2.0f), dtype);
      const std::vector<float> rate = decode(rates, dtype);
      const Run run = [&](Pages& pages, const Step& step, int64_t begin, int64_t end, int64_t copies) {
        std::vector<char> own = rows_of(xs, stride * 4, begin, end, copies);
        const std::vector<char> numbers = rows_of(rates, narrow * item(dtype), begin, end, copies);
        const int64_t count = copies * (end - begin);
        CHECK(qr_gated_delta_scan(reinterpret_cast<float*>(own.data()), numbers.data(), narrow,
                                  numbers.data() + heads * item(dtype), narrow, dtype, by_channel, bias.data(),
                                  decay.data(), most_rate, bound, count, heads, key_heads, keys, values, kFirst,
                                  pages.numbers.data(), pages.num_pages, pages.half, step.starts.data(),
                                  step.reads.data(), step.writes.data(), step.sequences()) == QR_OK);
        std::vector<float> out;
        for (int64_t t = 0; t < count; ++t)
          out.insert(out.end(), floats(own) + (t + 1) * stride - heads * values, floats(own) + (t + 1) * stride);
        return out;
      };
      std::vector<double> state(size_t(heads * values * keys)), want;
      for (int64_t t = 0; t < kTokens; ++t) {
        const float* row = &x[size_t(t * stride)];
        const auto unit = [&](int64_t first) {
          double squares = 1e-6;
          for (int64_t n = 0; n < keys; ++n) squares += double(row[first + n]) * row[first + n];
          std::vector<double> out;
          for (int64_t n = 0; n < keys; ++n) out.push_back(row[first + n] / std::sqrt(squares));
          return out;
        };
        for (int64_t h = 0; h < heads; ++h) {
          const int64_t of = h / (heads / key_heads) * keys;
          const std::vector<double> query = unit(of), key = unit(key_heads * keys + of);
          const auto kept = [&](int64_t n) {
            const int64_t own = by_channel ? h * keys + n : h;
            const double time = double(rate[size_t(t * narrow + heads + own)]) + bias[size_t(own)];
            return std::exp(bound < 0 ? bound * sigmoid(-time * decay[size_t(h)]) : softplus(time) * decay[size_t(h)]);
          };
          for (int64_t p = 0; p < values; ++p) {
            double* own = &state[size_t((h * values + p) * keys)];
            double known = 0, y = 0;
            for (int64_t n = 0; n < keys; ++n) known += (own[n] *= kept(n)) * key[size_t(n)];
            const double change = most_rate * sigmoid(rate[size_t(t * narrow + h)]) *
                                  (row[2 * key_heads * keys + h * values + p] - known);
            for (int64_t n = 0; n < keys; ++n) y += (own[n] += change * key[size_t(n)]) * query[size_t(n)];
            want.push_back(y / std::sqrt(double(keys)));
          }
        }
      }
      check(run, want, heads * values * keys, QR_FLOAT32, 1);
    }
}

TEST(lightning_attention_matches_naive_loops_whole_cut_and_in_company) {
  for (auto [heads, size] : {std::pair<int64_t, int64_t>{1, 1}, {3, 5}, {2, 64}, {2, 70}})
    for (int32_t dtype : kDtypes) {
      const int64_t stride = 4 * heads * size;
      const std::vector<char> xs = encode(random_floats(kTokens * stride), dtype);
      const std::vector<float> x = decode(xs, dtype);
      std::vector<float> decay = random_floats(heads);
      for (float& value : decay) value = std::exp(-std::fabs(value));  // as models have them: below one
      const Run run = [&, heads = heads, size = size](Pages& pages, const Step& step, int64_t begin, int64_t end,
                                                      int64_t copies) {
        const std::vector<char> own = rows_of(xs, stride * item(dtype), begin, end, copies);
        const int64_t count = copies * (end - begin);
        std::vector<float> out(size_t(count * heads * size));
        CHECK(qr_lightning_scan(out.data(), own.data(), dtype, stride, decay.data(), count, heads, size, kFirst,
                                pages.numbers.data(), pages.num_pages, pages.half, step.starts.data(),
                                step.reads.data(), step.writes.data(), step.sequences()) == QR_OK);
        return out;
      };
      std::vector<double> state(size_t(heads * size * size)), want;
      for (int64_t t = 0; t < kTokens; ++t)
        for (int64_t h = 0; h < heads; ++h) {
          const float *query = &x[size_t(t * stride + h * 3 * size)], *key = query + size, *value = key + size;
          for (int64_t p = 0; p < size; ++p) {
            double* own = &state[size_t((h * size + p) * size)];
            double y = 0;
            for (int64_t n = 0; n < size; ++n) {
              own[n] = own[n] * decay[size_t(h)] + silu(value[p]) * silu(key[n]);
              y += own[n] * silu(query[n]);
            }
            want.push_back(y);
          }
        }
      check(run, want, heads * size * size, QR_FLOAT32, 10);
    }
}

TEST(rg_lrus_match_naive_loops_whole_cut_and_in_company) {
  for (auto [blocks, block] : {std::pair<int64_t, int64_t>{1, 1}, {3, 5}, {2, 64}, {2, 200}})
    for (int32_t dtype : kDtypes) {
      const int64_t channels = blocks * block;
      const std::vector<float> x = random_floats(kTokens * channels), gates = random_floats(kTokens * 2 * channels);
      const std::vector<char> gate = encode(random_floats(kTokens * channels), dtype), xs = bytes_of_floats(x);
      const std::vector<float> opened = decode(gate, dtype);
      std::vector<float> decay = random_floats(channels, 4.0f);
      for (float& value : decay) value = -std::fabs(value) * 0.01f;  // 1 - a^2 is small: its digits must stay
      const Run run = [&, blocks = blocks, block = block](Pages& pages, const Step& step, int64_t begin, int64_t end,
                                                          int64_t copies) {
        const std::vector<char> own = rows_of(xs, channels * 4, begin, end, copies),
                                last = rows_of(gate, channels * item(dtype), begin, end, copies);
        std::vector<float> by_block;  // of all tokens [blocks][tokens][2 block]
        for (int64_t b = 0; b < blocks; ++b)
          for (int64_t copy = 0; copy < copies; ++copy)
            by_block.insert(by_block.end(), gates.begin() + (b * kTokens + begin) * 2 * block,
                            gates.begin() + (b * kTokens + end) * 2 * block);
        std::vector<char> out(last.size());
        CHECK(qr_rg_lru_scan(out.data(), dtype, floats(own), by_block.data(), last.data(), decay.data(),
                             copies * (end - begin), channels, block, kFirst, pages.numbers.data(), pages.num_pages,
                             pages.half, step.starts.data(), step.reads.data(), step.writes.data(),
                             step.sequences()) == QR_OK);
        return decode(out, dtype);
      };
      std::vector<double> state(static_cast<size_t>(channels)), want;
      for (int64_t t = 0; t < kTokens; ++t)
        for (int64_t c = 0; c < channels; ++c) {
          const float* of = &gates[size_t((c / block * kTokens + t) * 2 * block + c % block)];
          const double logarithm = sigmoid(of[block]) * decay[size_t(c)];
          const double root = t == 0 ? 1 : std::sqrt(-std::expm1(2 * logarithm));
          double& h = state[size_t(c)];
          h = std::exp(logarithm) * h + root * sigmoid(of[0]) * x[size_t(t * channels + c)];
          want.push_back(h * opened[size_t(t * channels + c)]);
        }
      check(run, want, channels, dtype, 1);
    }
}

TEST(gated_recurrences_refuse_pages_that_are_not_there) {
  std::vector<float> x(4096, 1.0f), out(512, 7.0f);
  const Step step{{0, 2}, {0}, {1}}, beyond{{0, 2}, {0}, {5}};
  for (const bool is_wrong_page : {false, true}) {
    Pages pages(64);
    const Step& own = is_wrong_page ? beyond : step;
    const int64_t half = is_wrong_page ? 64 : 3;
    CHECK(qr_gated_delta_scan(out.data(), x.data(), 2, x.data(), 2, QR_FLOAT32, 0, x.data(), x.data(), 1.0f, 0.0f, 2, 2, 1, 4,
                              4, 0, pages.numbers.data(), 5, half, own.starts.data(), own.reads.data(),
                              own.writes.data(), 1) == QR_EINVAL);
    CHECK(qr_lightning_scan(out.data(), x.data(), QR_FLOAT32, 24, x.data(), 2, 2, 4, 0, pages.numbers.data(), 5, half,
                            own.starts.data(), own.reads.data(), own.writes.data(), 1) == QR_EINVAL);
    CHECK(qr_rg_lru_scan(out.data(), QR_FLOAT32, x.data(), x.data(), x.data(), x.data(), 2, 16, 8, 0,
                         pages.numbers.data(), 5, half, own.starts.data(), own.reads.data(), own.writes.data(),
                         1) == QR_EINVAL);
    for (float value : out) CHECK(value == 7.0f);
  }
}
