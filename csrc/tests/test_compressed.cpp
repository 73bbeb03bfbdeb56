// Compressed attention and streams against loops in double precision, and a token alone against the whole.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <numeric>

#include "check.h"
#include "quire_cpu.h"
#include "rows.h"

namespace {

constexpr int64_t kHeads = 3, kHead = 26, kIndexHeads = 5, kIndex = 9, kBlock = 60, kLength = 300, kWindow = 20;
constexpr int64_t kEntry = kHead + kIndex;  // elements of an entry

struct Sequence {
  int32_t dtype;
  int64_t rate, most;  // most: entries that are chosen
  Store last, entries;
  std::vector<char> query, index_query;
  std::vector<float> weights = random_floats(kLength * kIndexHeads), sinks = random_floats(kHeads);

  Sequence(int32_t dtype, int64_t rate, int64_t most)
      : dtype(dtype), rate(rate), most(most), last(dtype, kHead, 1, kLength, kBlock), entries(dtype, kEntry, rate, kLength, kBlock),
        query(encode(random_floats(kLength * kHeads * kHead), dtype)),
        index_query(encode(random_floats(kLength * kIndexHeads * kIndex), dtype)) {}

  int64_t size() const { return dtype == QR_FLOAT32 ? 4 : 2; }

  // Tokens [begin, end) as one step.
  std::vector<int32_t> select(int64_t begin, int64_t end) const {
    std::vector<int32_t> out(size_t((end - begin) * most), 7);
    const int32_t starts[] = {0, int32_t(end - begin)}, lengths[] = {int32_t(end)};
    CHECK(qr_select_entries(out.data(), most, index_query.data() + begin * kIndexHeads * kIndex * size(), dtype,
                            weights.data() + begin * kIndexHeads, kIndexHeads, kIndex, kEntry, entries.data, dtype,
                            entries.num_blocks, entries.of_block, entries.width, entries.block(), entries.table.data(),
                            entries.num_blocks, kBlock, starts, lengths, 1, rate) == QR_OK);
    return out;
  }
  std::vector<float> attend(int64_t begin, int64_t end, const std::vector<int32_t>& selected) const {
    std::vector<char> out(size_t((end - begin) * kHeads * kHead * size()));
    const int32_t starts[] = {0, int32_t(end - begin)}, lengths[] = {int32_t(end)};
    CHECK(qr_compressed_attention(out.data(), query.data() + begin * kHeads * kHead * size(), dtype, sinks.data(),
                                  last.data, dtype, last.num_blocks, last.of_block, last.width, last.block(),
                                  last.table.data(), last.num_blocks, kBlock, entries.data, entries.num_blocks,
                                  entries.of_block, entries.width, entries.block(), entries.table.data(),
                                  entries.num_blocks, kBlock, starts, lengths, 1, selected.data(), most, kHeads, kHead,
                                  0.3f, kWindow, rate) == QR_OK);
    return decode(out, dtype);
  }

  double score(int64_t token, int64_t entry) const {
    const std::vector<float> queries = decode(index_query, dtype);
    double total = 0;
    for (int64_t head = 0; head < kIndexHeads; ++head) {
      const float *q = queries.data() + (token * kIndexHeads + head) * kIndex, *k = entries.rows.data() + entry * kEntry + kHead;
      const double product = std::inner_product(q, q + kIndex, k, 0.0);
      total += weights[size_t(token * kIndexHeads + head)] * std::max(product, 0.0);
    }
    return total;
  }
  std::vector<double> attended(int64_t token, int64_t head, const int32_t* selected) const {
    std::vector<const float*> context;
    for (int64_t p = std::max<int64_t>(0, token - kWindow + 1); p <= token; ++p) context.push_back(last.rows.data() + p * kHead);
    for (int64_t i = 0; i < most && selected[i] >= 0; ++i) context.push_back(entries.rows.data() + selected[i] * kEntry);
    const std::vector<float> queries = decode(query, dtype);
    const float* q = queries.data() + (token * kHeads + head) * kHead;
    double total = std::exp(double(sinks[size_t(head)]));
    std::vector<double> out(size_t(kHead), 0.0);
    for (const float* row : context) {
      const double weight = std::exp(0.3 * std::inner_product(q, q + kHead, row, 0.0));
      total += weight;
      for (int64_t d = 0; d < kHead; ++d) out[size_t(d)] += weight * row[d];
    }
    for (double& value : out) value /= total;
    return out;
  }
};

}  // namespace

TEST(compressed_attention_matches_naive_loops_and_a_token_has_the_same_bits_alone) {
  for (int32_t dtype : {QR_FLOAT32, QR_BFLOAT16, QR_FLOAT16})
    for (int64_t rate : {4, 5}) {
      const Sequence sequence(dtype, rate, 7);
      const std::vector<int32_t> selected = sequence.select(0, kLength);
      const std::vector<float> got = sequence.attend(0, kLength, selected);
      for (int64_t token : {0L, 3L, 19L, 44L, 130L, 299L}) {
        const int32_t* own = selected.data() + token * 7;
        CHECK(sequence.select(token, token + 1) == std::vector<int32_t>(own, own + 7), "token %ld chooses", long(token));
        const std::vector<float> alone = sequence.attend(token, token + 1, {own, own + 7});
        CHECK(std::equal(alone.begin(), alone.end(), got.begin() + token * kHeads * kHead), "token %ld alone", long(token));
        const int64_t seen = (token + 1) / rate;
        for (int64_t i = 0; i < 7; ++i) CHECK((own[i] >= 0) == (i < seen) && (seen > 7 || own[i] == (i < seen ? i : -1)));
        for (int64_t entry = 0; seen > 7 && entry < seen; ++entry) {
          if (std::find(own, own + 7, entry) != own + 7) continue;
          for (int64_t i = 0; i < 7; ++i)
            CHECK(sequence.score(token, own[i]) >= sequence.score(token, entry) - 1e-4, "token %ld entry %ld", long(token),
                  long(entry));
        }
        for (int64_t head = 0; head < kHeads; ++head) {
          const std::vector<double> want = sequence.attended(token, head, own);
          for (int64_t d = 0; d < kHead; ++d) {
            const float value = got[size_t((token * kHeads + head) * kHead + d)];
            const double tolerance = dtype == QR_FLOAT32 ? 1e-5 : dtype == QR_FLOAT16 ? 4e-3 : 3e-2;
            CHECK(std::fabs(value - want[size_t(d)]) <= tolerance, "dtype %d token %ld: %g, not %g", dtype, long(token), value,
                  want[size_t(d)]);
          }
        }
      }
    }
}

namespace {

// Makes entries of the tokens of one sequence.
struct Compressor {
  int64_t rate, times;  // times: 2 where entries overlap
  int32_t dtype;
  int64_t index_size, rotated = 6, features = times * (kHead + index_size);
  Store tail{dtype, 2 * features, 1, kLength, kBlock};
  std::vector<float> bias = random_floats(rate * features), norms = random_floats(kHead + index_size), cos_sin;

  Compressor(int64_t rate, int64_t times, int32_t dtype, int64_t index_size)
      : rate(rate), times(times), dtype(dtype), index_size(index_size) {
    for (int64_t position = 0; position < kLength; ++position)
      for (int64_t i = 0; i < rotated; ++i) {
        const double angle = double(position) * std::pow(0.3, double(i % 3));
        cos_sin.push_back(float(i < 3 ? std::cos(angle) : std::sin(angle)));
      }
  }
  int64_t size() const { return kHead + index_size; }

  // Of tokens [begin, end) as one step.
  int32_t run(Store& entries, int64_t begin, int64_t end) const {
    const int32_t starts[] = {0, int32_t(end - begin)}, lengths[] = {int32_t(end)};
    return qr_compress(entries.data, dtype, entries.num_blocks, entries.of_block, entries.width, entries.block(),
                       entries.table.data(), entries.num_blocks, kBlock, tail.data, dtype, tail.num_blocks,
                       tail.of_block, tail.width, tail.block(), tail.table.data(), tail.num_blocks, kBlock, starts,
                       lengths, 1, bias.data(), rate, times * rate, norms.data(), kHead,
                       index_size == 0 ? nullptr : norms.data() + kHead, index_size, 1e-5f, cos_sin.data(), kLength,
                       rotated);
  }

  double gate(int64_t position, int64_t column) const {
    return double(tail.rows[size_t(position * 2 * features + features + column)]) +
           bias[size_t(position % rate * features + column)];
  }
  double feature(int64_t entry, int64_t column, int64_t own_column) const {
    const int64_t own = entry * rate, first = std::max<int64_t>(0, own - (times - 1) * rate);
    double total = 0, out = 0;
    for (int64_t position = first; position < own + rate; ++position) {
      const int64_t at = position < own ? column : own_column;
      const double weight = std::exp(gate(position, at));
      total += weight;
      out += weight * tail.rows[size_t(position * 2 * features + at)];
    }
    return out / total;
  }
  std::vector<double> part(int64_t entry, int64_t column, int64_t size, const float* norm) const {
    std::vector<double> out;
    double squares = 0;
    for (int64_t d = 0; d < size; ++d) {
      out.push_back(feature(entry, column + d, column + (times - 1) * size + d));
      squares += out.back() * out.back();
    }
    for (int64_t d = 0; d < size; ++d) out[size_t(d)] *= norm[d] / std::sqrt(squares / double(size) + 1e-5);
    for (int64_t pair = 0; pair < rotated / 2; ++pair) {
      double &even = out[size_t(size - rotated + 2 * pair)], &odd = out[size_t(size - rotated + 2 * pair + 1)];
      const double angle = double(entry * rate) * std::pow(0.3, double(pair)), x = even;
      even = x * std::cos(angle) - odd * std::sin(angle);
      odd = odd * std::cos(angle) + x * std::sin(angle);
    }
    return out;
  }
  std::vector<double> entry(int64_t number) const {
    std::vector<double> out = part(number, 0, kHead, norms.data());
    if (index_size == 0) return out;
    const std::vector<double> more = part(number, times * kHead, index_size, norms.data() + kHead);
    out.insert(out.end(), more.begin(), more.end());
    return out;
  }
};

}  // namespace

TEST(entries_are_weighed_sums_whatever_finishes_them) {
  for (int32_t dtype : {QR_FLOAT32, QR_BFLOAT16, QR_FLOAT16})
    for (int64_t rate : {4, 30})
      for (int64_t times : {1, 2})
        for (int64_t index_size : {kIndex, int64_t(0)}) {
          if (!runs_case(5)) continue;
          const Compressor compressor(rate, times, dtype, index_size);
          Store whole(dtype, compressor.size(), rate, kLength, kBlock, false), chunks(dtype, compressor.size(), rate, kLength,
                                                                                      kBlock, false);
          CHECK(compressor.run(whole, 0, kLength) == QR_OK);
          for (int32_t threads : {1, 3}) {
            qr_init(qr_isa_in_use(), threads);
            for (int64_t begin = 0, end; begin < kLength; begin = end) {
              end = std::min(begin + 1 + begin % 37, kLength);
              CHECK(compressor.run(chunks, begin, end) == QR_OK);
            }
            CHECK(std::memcmp(whole.data, chunks.data, size_t(whole.bytes())) == 0, "rate %ld threads %d", long(rate), threads);
          }
          qr_init(qr_isa_in_use(), 2);
          for (int64_t number : {int64_t(0), int64_t(1), kLength / rate - 1}) {
            const std::vector<float> got = whole.row(number);
            const std::vector<double> want = compressor.entry(number);
            for (size_t d = 0; d < want.size(); ++d)
              CHECK(std::fabs(got[d] - want[d]) <= (dtype == QR_FLOAT32 ? 2e-5 : dtype == QR_FLOAT16 ? 2e-3 : 1e-2) *
                                                       (1 + std::fabs(want[d])),
                    "dtype %d rate %ld entry %ld [%zu]: %g, not %g", dtype, long(rate), long(number), d, got[d], want[d]);
            for (size_t d = want.size(); d < got.size(); ++d) CHECK(got[d] == 0.0f, "behind the row");
          }
        }
}

TEST(entries_that_are_not_finished_stay_as_they_are) {
  const Compressor compressor(30, 2, QR_FLOAT32, kIndex);
  Store entries(QR_FLOAT32, compressor.size(), 30, kLength, kBlock, false);
  CHECK(compressor.run(entries, 30, 59) == QR_OK);
  for (float value : entries.row(1)) CHECK(std::isnan(value), "no token ends it");
  CHECK(compressor.run(entries, 59, 60) == QR_OK);
  for (float value : entries.row(1)) CHECK(!std::isnan(value));
  for (float value : entries.row(0)) CHECK(std::isnan(value), "its tokens are not this step's");
}

TEST(rotations_turn_pairs_and_turn_them_back) {
  const int64_t tokens = 5, rotated = 6;
  std::vector<float> x = random_floats(tokens * kHeads * kHead), turned = x, cos_sin;
  for (int64_t position = 0; position < 40; ++position)
    for (int64_t i = 0; i < rotated; ++i) {
      const double angle = double(position) * std::pow(0.3, double(i % 3));
      cos_sin.push_back(float(i < 3 ? std::cos(angle) : std::sin(angle)));
    }
  const std::vector<int64_t> positions{39, 3, 0, 17, 8};
  const auto rotate = [&](int32_t backward) {
    return qr_rotate_last(turned.data(), QR_FLOAT32, positions.data(), cos_sin.data(), 40, tokens, kHeads, kHead, rotated,
                          backward);
  };
  CHECK(rotate(0) == QR_OK);
  for (int64_t row = 0; row < tokens * kHeads; ++row)
    for (int64_t d = 0; d < kHead; ++d) {
      const int64_t pair = (d - (kHead - rotated)) / 2, at = row * kHead + d;
      double want = x[size_t(at)];
      if (d >= kHead - rotated) {
        const double angle = double(positions[size_t(row / kHeads)]) * std::pow(0.3, double(pair));
        const bool is_even = d % 2 == 0;
        want = want * std::cos(angle) + x[size_t(is_even ? at + 1 : at - 1)] * std::sin(angle) * (is_even ? -1 : 1);
      }
      CHECK(std::fabs(turned[size_t(at)] - want) <= 1e-5, "[%ld, %ld]", long(row), long(d));
    }
  CHECK(rotate(1) == QR_OK);
  for (size_t i = 0; i < x.size(); ++i) CHECK(std::fabs(turned[i] - x[i]) <= 1e-5);
}

TEST(streams_that_are_not_mixed_gain_a_share_of_what_is_added) {
  const int64_t tokens = 5, size = 37;
  const float magnitude = 1.7f, least = 0.25f;
  for (int64_t count : {1, 4, 7}) {
    const std::vector<float> streams = random_floats(tokens * count * size), products = random_floats(tokens * 2 * count);
    const std::vector<float> scale = random_floats(2 * count), base = random_floats(2 * count), added = random_floats(tokens * size);
    std::vector<float> read(size_t(tokens * size)), writing(size_t(tokens * count)), written(streams.size());
    CHECK(qr_read_streams(read.data(), writing.data(), streams.data(), QR_FLOAT32, products.data(), scale.data(), base.data(),
                          tokens, count, size, 1e-3f, 1e-5f, magnitude, least, 0) == QR_OK);
    CHECK(qr_write_streams(written.data(), streams.data(), QR_FLOAT32, added.data(), writing.data(), tokens, count, size, 0) ==
          QR_OK);
    for (int64_t t = 0; t < tokens; ++t) {
      const float* own = streams.data() + t * count * size;
      const double rms = std::sqrt(std::inner_product(own, own + count * size, own, 0.0) / double(count * size) + 1e-5);
      const auto sigmoid = [&](int64_t i) {
        return 1 / (1 + std::exp(-(products[size_t(t * 2 * count + i)] / rms * scale[size_t(i)] + base[size_t(i)])));
      };
      for (int64_t d = 0; d < size; ++d) {
        double want = 0;
        for (int64_t s = 0; s < count; ++s) want += (sigmoid(s) + 1e-3) * own[s * size + d];
        CHECK(std::fabs(read[size_t(t * size + d)] - want) <= 1e-5 * double(count));
        for (int64_t s = 0; s < count; ++s) {
          const double out = (magnitude * sigmoid(count + s) + least) * added[size_t(t * size + d)] + own[s * size + d];
          CHECK(std::fabs(written[size_t((t * count + s) * size + d)] - out) <= 1e-5);
        }
      }
    }
  }
}

TEST(streams_are_read_and_written_by_each_tokens_numbers) {
  const int64_t tokens = 6, size = 37;
  for (int64_t count : {1, 4, 7}) {
    const int64_t all = count * (2 + count);
    const std::vector<float> streams = random_floats(tokens * count * size), products = random_floats(tokens * all);
    const std::vector<float> scale = random_floats(all), base = random_floats(all), added = random_floats(tokens * size);
    std::vector<float> read(size_t(tokens * size)), writing(size_t(tokens * count * (1 + count))), written(streams.size());
    CHECK(qr_read_streams(read.data(), writing.data(), streams.data(), QR_FLOAT32, products.data(), scale.data(), base.data(),
                          tokens, count, size, 1e-3f, 1e-5f, 2.0f, 0.0f, 3) == QR_OK);
    CHECK(qr_write_streams(written.data(), streams.data(), QR_FLOAT32, added.data(), writing.data(), tokens, count, size, 1) ==
          QR_OK);
    for (int64_t t = 0; t < tokens; ++t) {
      const float *own = streams.data() + t * count * size, *numbers = writing.data() + t * count * (1 + count);
      const double rms = std::sqrt(std::inner_product(own, own + count * size, own, 0.0) / double(count * size) + 1e-5);
      const auto number = [&](int64_t i) { return products[size_t(t * all + i)] / rms * scale[size_t(i)] + base[size_t(i)]; };
      const auto sigmoid = [](double x) { return 1 / (1 + std::exp(-x)); };
      for (int64_t s = 0; s < count; ++s) CHECK(std::fabs(numbers[s] - 2 * sigmoid(number(count + s))) <= 1e-5);
      for (int64_t column = 0; column < count; ++column) {
        double total = 0;
        for (int64_t row = 0; row < count; ++row) total += numbers[count * (1 + row) + column];
        CHECK(std::fabs(total - 1) <= 2e-2, "columns end the balance: %g", total);
      }
      for (int64_t d = 0; d < size; ++d) {
        double want = 0;
        for (int64_t s = 0; s < count; ++s) want += (sigmoid(number(s)) + 1e-3) * own[s * size + d];
        CHECK(std::fabs(read[size_t(t * size + d)] - want) <= 1e-5 * double(count));
        for (int64_t s = 0; s < count; ++s) {
          double out = double(numbers[s]) * added[size_t(t * size + d)];
          for (int64_t j = 0; j < count; ++j) out += double(numbers[count * (1 + j) + s]) * own[j * size + d];
          CHECK(std::fabs(written[size_t((t * count + s) * size + d)] - out) <= 1e-5 * double(count));
        }
      }
    }
  }
}
