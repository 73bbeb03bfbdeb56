// Blocks that an indexer chooses, against loops in double precision, and a token alone against the whole.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "check.h"
#include "quire_cpu.h"
#include "rows.h"

namespace {

constexpr int64_t kHeads = 5;

struct Keys {
  int32_t dtype;
  int64_t length, size, page;
  Store rows;
  std::vector<char> query;

  Keys(int32_t dtype, int64_t length, int64_t size, int64_t page)
      : dtype(dtype), length(length), size(size), page(page), rows(dtype, size, 1, length, page),
        query(encode(random_floats(length * kHeads * size), dtype)) {}

  // What tokens [begin, end) choose, as one step.
  std::vector<int32_t> select(int64_t begin, int64_t end, int64_t most, int64_t run, int64_t num_local) const {
    std::vector<int32_t> out(size_t((end - begin) * kHeads * most), 7);
    const int32_t starts[] = {0, int32_t(end - begin)}, lengths[] = {int32_t(end)};
    const int64_t bytes = kHeads * size * (dtype == QR_FLOAT32 ? 4 : 2);
    CHECK(qr_select_blocks(out.data(), most, query.data() + begin * bytes, dtype, kHeads, size, rows.data, dtype,
                           rows.num_blocks, rows.of_block, rows.width, rows.block(), rows.table.data(), rows.num_blocks,
                           starts, lengths, 1, run, num_local) == QR_OK);
    return out;
  }

  std::vector<int32_t> expected(int64_t token, int64_t head, int64_t most, int64_t run, int64_t num_local) const {
    const std::vector<float> queries = decode(query, dtype);
    const float* own = queries.data() + (token * kHeads + head) * size;
    const int64_t count = token / run + 1;
    std::vector<double> scores(size_t(count), -std::numeric_limits<double>::infinity());
    for (int64_t position = 0; position <= token; ++position) {
      double& best = scores[size_t(position / run)];
      best = std::max(best, std::inner_product(own, own + size, rows.rows.data() + position * size, 0.0));
    }
    for (int64_t block = std::max<int64_t>(0, count - num_local); block < count; ++block)
      scores[size_t(block)] = std::numeric_limits<double>::infinity();
    std::vector<int32_t> wanted(static_cast<size_t>(count));
    std::iota(wanted.begin(), wanted.end(), 0);
    std::stable_sort(wanted.begin(), wanted.end(), [&](int32_t a, int32_t b) { return scores[size_t(a)] > scores[size_t(b)]; });
    wanted.resize(size_t(std::min(most, count)));
    std::sort(wanted.begin(), wanted.end());
    wanted.resize(size_t(most), -1);
    return wanted;
  }
};

}  // namespace

TEST(the_blocks_of_the_largest_products_are_chosen) {
  for (int32_t dtype : {QR_FLOAT32, QR_BFLOAT16, QR_FLOAT16})
    for (int64_t size : {10, 33, 128})
      for (int64_t run : {1, 12, 64}) {
        if (!runs_case(5)) continue;
        const Keys keys(dtype, 300, size, 24);
        for (int64_t num_local : {0, 1, 4}) {
          const std::vector<int32_t> got = keys.select(0, 300, 3, run, num_local);
          for (int64_t token : {0L, 11L, 12L, 35L, 36L, 200L, 299L})
            for (int64_t head = 0; head < kHeads; ++head) {
              const int32_t* own = got.data() + (token * kHeads + head) * 3;
              CHECK(std::vector<int32_t>(own, own + 3) == keys.expected(token, head, 3, run, num_local),
                    "dtype %d size %ld run %ld token %ld: %d %d %d", dtype, long(size), long(run), long(token), own[0], own[1],
                    own[2]);
            }
        }
      }
}

TEST(chosen_blocks_are_the_same_in_any_company) {
  for (int32_t dtype : {QR_FLOAT32, QR_BFLOAT16, QR_FLOAT16}) {
    const int64_t length = is_emulated() ? 200 : 5000, row = kHeads * 4;
    const Keys keys(dtype, length, 34, 16);
    const std::vector<int32_t> all = keys.select(0, length, 4, 16, 1);
    for (int32_t threads : {1, 2, 3, 16}) {
      qr_init(qr_isa_in_use(), threads);
      for (auto [begin, end] : {std::pair<int64_t, int64_t>{0, 1}, {60, 90}, {length - 40, length - 2}, {length - 1, length}}) {
        const std::vector<int32_t> some = keys.select(begin, end, 4, 16, 1);
        CHECK(std::equal(some.begin(), some.end(), all.begin() + begin * row), "dtype %d threads %d", dtype, threads);
      }
    }
    qr_init(qr_isa_in_use(), 2);
  }
}

TEST(the_first_of_equal_blocks_is_chosen) {
  Keys keys(QR_FLOAT32, 300, 10, 24);
  std::fill(keys.query.begin(), keys.query.end(), char(0));
  const std::vector<int32_t> got = keys.select(299, 300, 3, 12, 1);
  for (int64_t head = 0; head < kHeads; ++head)
    CHECK(got[size_t(head * 3)] == 0 && got[size_t(head * 3 + 1)] == 1 && got[size_t(head * 3 + 2)] == 24);
}
