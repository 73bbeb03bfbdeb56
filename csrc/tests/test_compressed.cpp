// Compressed attention and streams against loops in double precision, and a token alone against the whole.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <numeric>

#include "check.h"
#include "quire_cpu.h"

namespace {

constexpr int64_t kHeads = 3, kHead = 26, kIndexHeads = 5, kIndex = 9, kBlock = 60, kLength = 300, kWindow = 20;
constexpr int64_t kEntry = kHead + kIndex;  // elements of an entry

// Rows of one sequence in blocks in reverse order, NaN where nothing was written.
struct Store {
  int32_t dtype;
  int64_t row_size, rate, of_block = kBlock / rate, width = (row_size + 1) / 2, num_blocks = kLength / kBlock + 1;
  std::vector<int32_t> table;
  std::vector<float> rows;  // as the dtype has them
  char* data;

  Store(int32_t dtype, int64_t row_size, int64_t rate) : dtype(dtype), row_size(row_size), rate(rate) {
    const int64_t count = kLength / rate;
    data = aligned_zeros(2 * num_blocks * block() * 4);
    std::memset(data, 0xff, size_t(2 * num_blocks * block() * 4));
    std::vector<int64_t> slots;
    for (int64_t i = 0; i < num_blocks; ++i) table.push_back(int32_t(num_blocks - 1 - i));
    for (int64_t i = 0; i < count; ++i) slots.push_back(table[size_t(i / of_block)] * of_block + i % of_block);
    const std::vector<char> stored = encode(random_floats(count * row_size), dtype);
    rows = decode(stored, dtype);
    CHECK(qr_store_rows(data, dtype, num_blocks, of_block, width, block(), stored.data(), row_size, slots.data(), count) ==
          QR_OK);
  }
  ~Store() { std::free(data); }
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;
  int64_t block() const { return of_block * width; }
};

struct Sequence {
  int32_t dtype;
  int64_t rate, most;  // most: entries that are chosen
  Store last, entries;
  std::vector<char> query, index_query;
  std::vector<float> weights = random_floats(kLength * kIndexHeads), sinks = random_floats(kHeads);

  Sequence(int32_t dtype, int64_t rate, int64_t most)
      : dtype(dtype), rate(rate), most(most), last(dtype, kHead, 1), entries(dtype, kEntry, rate),
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

TEST(streams_are_read_and_written_by_each_tokens_numbers) {
  const int64_t tokens = 6, size = 37;
  for (int64_t count : {1, 4, 7}) {
    const int64_t all = count * (2 + count);
    const std::vector<float> streams = random_floats(tokens * count * size), products = random_floats(tokens * all);
    const std::vector<float> scale = random_floats(all), base = random_floats(all), added = random_floats(tokens * size);
    std::vector<float> read(size_t(tokens * size)), writing(size_t(tokens * count * (1 + count))), written(streams.size());
    CHECK(qr_read_streams(read.data(), writing.data(), streams.data(), QR_FLOAT32, products.data(), scale.data(), base.data(),
                          tokens, count, size, 1e-3f, 1e-5f, 3) == QR_OK);
    CHECK(qr_write_streams(written.data(), streams.data(), QR_FLOAT32, added.data(), writing.data(), tokens, count, size) ==
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
