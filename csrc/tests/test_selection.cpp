#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <numeric>

#include "check.h"
#include "quire_cpu.h"

namespace {

constexpr int64_t kHeads = 3, kHead = 36, kIndexHeads = 11, kIndex = 12;

// One sequence in a cache of one kv head, blocks in reverse order, NaN where nothing was written.
struct Context {
  int32_t dtype, cache_dtype;
  int64_t length, block_size, page, num_blocks;
  std::vector<float> keys, values, index;  // as the dtype has them
  std::vector<float> weights;
  std::vector<char> index_query, query;
  std::vector<int32_t> table;
  char* cache;

  Context(int32_t dtype, int32_t cache_dtype, int64_t length, int64_t block_size)
      : dtype(dtype), cache_dtype(cache_dtype), length(length), block_size(block_size),
        page(qr_cache_page(cache_dtype, block_size, kHead)), num_blocks((length + block_size - 1) / block_size + 1),
        weights(random_floats(length * kIndexHeads)), index_query(encode(random_floats(length * kIndexHeads * kIndex), dtype)),
        query(size_t(length * kHeads * kHead * size())) {
    cache = aligned_zeros(2 * num_blocks * page * 4 + 128);
    std::memset(cache, 0xff, size_t(2 * num_blocks * page * 4));
    for (int64_t i = 0; i < num_blocks; ++i) table.push_back(int32_t(num_blocks - 1 - i));
    const std::vector<char> qkv = encode(random_floats(length * (kHeads + 2) * kHead), dtype);
    const std::vector<float> rows = decode(qkv, dtype);
    std::vector<int64_t> slots;
    for (int64_t p = 0; p < length; ++p) {
      slots.push_back(table[size_t(p / block_size)] * block_size + p % block_size);
      const float* key = rows.data() + (p * (kHeads + 2) + kHeads) * kHead;
      keys.insert(keys.end(), key, key + kHead);
      values.insert(values.end(), key + kHead, key + 2 * kHead);
    }
    index = decode(index_query, dtype);
    CHECK(qr_rope_and_cache(query.data(), qkv.data(), dtype, slots.data(), nullptr, nullptr, nullptr, cache, cache_dtype,
                            num_blocks, block_size, page, page, slots.data(), length, kHeads, 1, kHead, 0, 0, 1e-6f,
                            nullptr, nullptr) == QR_OK);
  }
  ~Context() { std::free(cache); }
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  int64_t size() const { return dtype == QR_FLOAT32 ? 4 : 2; }

  // Tokens [begin, end) as one step.
  std::vector<int32_t> select(int64_t begin, int64_t end, int64_t num_selected) const {
    std::vector<int32_t> out(size_t((end - begin) * num_selected), 7);
    const int32_t starts[] = {0, int32_t(end - begin)}, lengths[] = {int32_t(end)};
    CHECK(qr_select_tokens(out.data(), num_selected, index_query.data() + begin * kIndexHeads * kIndex * size(), dtype,
                           weights.data() + begin * kIndexHeads, kIndexHeads, kIndex, cache, cache_dtype, num_blocks,
                           block_size, page, page, kHead, starts, lengths, 1, table.data(), num_blocks) == QR_OK);
    return out;
  }
  std::vector<char> attend(int64_t begin, int64_t end, const std::vector<int32_t>& selected,
                           const float* sinks = nullptr) const {
    std::vector<char> out(size_t((end - begin) * kHeads * kHead * size()), char(0xff));
    const int32_t starts[] = {0, int32_t(end - begin)}, lengths[] = {int32_t(end)};
    CHECK(qr_selected_attention(out.data(), query.data() + begin * kHeads * kHead * size(), dtype, cache, cache_dtype,
                                num_blocks, block_size, page, page, starts, lengths, 1, table.data(), num_blocks,
                                selected.data(), int64_t(selected.size()) / (end - begin), kHeads, kHead, 0.2f,
                                sinks) == QR_OK);
    return out;
  }

  double score(int64_t token, int64_t position) const {
    double total = 0;
    for (int64_t h = 0; h < kIndexHeads; ++h) {
      double product = 0;
      for (int64_t i = 0; i < kIndex; ++i)
        product += double(index[size_t((token * kIndexHeads + h) * kIndex + i)]) *
                   keys[size_t(position * kHead + kHead - kIndex + i)];
      total += weights[size_t(token * kIndexHeads + h)] * std::max(product, 0.0);
    }
    return total;
  }
};

struct Kinds {
  int32_t dtype, cache_dtype;
};
const Kinds kKinds[] = {{QR_FLOAT32, QR_FLOAT32}, {QR_BFLOAT16, QR_BFLOAT16}, {QR_FLOAT16, QR_FLOAT16},
                        {QR_FLOAT32, QR_BFLOAT16}, {QR_BFLOAT16, QR_CACHE_INT8}, {QR_BFLOAT16, QR_CACHE_FLOAT8}};

}  // namespace

TEST(the_highest_scores_are_chosen_and_attended_to) {
  for (const Kinds& kinds : kKinds)
    for (int64_t block_size : {1L, 16L, 24L}) {
      if (!runs_case(5) || kinds.cache_dtype != kinds.dtype) continue;
      const int64_t length = 150, most = 37;
      const Context own(kinds.dtype, kinds.cache_dtype, length, block_size);
      const std::vector<int32_t> selected = own.select(0, length, most);
      const std::vector<float> attended = decode(own.attend(0, length, selected), kinds.dtype);
      const std::vector<float> sinks = random_floats(kHeads);
      const std::vector<float> drained = decode(own.attend(0, length, selected, sinks.data()), kinds.dtype);
      const std::vector<float> query = decode(own.query, kinds.dtype);
      for (int64_t token : {0L, 36L, 37L, 100L, 149L}) {
        std::vector<int32_t> wanted(size_t(token + 1));
        std::iota(wanted.begin(), wanted.end(), 0);
        std::stable_sort(wanted.begin(), wanted.end(),
                         [&](int32_t a, int32_t b) { return own.score(token, a) > own.score(token, b); });
        wanted.resize(size_t(std::min(most, token + 1)));
        std::sort(wanted.begin(), wanted.end());
        const int32_t* row = selected.data() + token * most;
        for (int64_t i = 0; i < most; ++i)
          CHECK(row[i] == (i < int64_t(wanted.size()) ? wanted[size_t(i)] : -1), "dtype %d token %ld: %d at %ld",
                kinds.dtype, long(token), row[i], long(i));
        for (int64_t h = 0; h < kHeads; ++h) {
          double total = 0, sums[kHead] = {};
          for (int32_t position : wanted) {
            double product = 0;
            for (int64_t d = 0; d < kHead; ++d)
              product += double(query[size_t((token * kHeads + h) * kHead + d)]) * own.keys[size_t(position * kHead + d)];
            const double weight = std::exp(0.2 * product);
            total += weight;
            for (int64_t d = 0; d < kHead; ++d) sums[d] += weight * own.values[size_t(position * kHead + d)];
          }
          for (int64_t d = 0; d < kHead; ++d) {
            const double got = attended[size_t((token * kHeads + h) * kHead + d)], want = sums[d] / total;
            const double tolerance = (kinds.dtype == QR_FLOAT32 ? 1e-5 : 0.03) * (1 + std::fabs(want));
            CHECK(std::fabs(got - want) <= tolerance, "dtype %d token %ld: %g, not %g", kinds.dtype, long(token), got, want);
            const double less = sums[d] / (total + std::exp(double(sinks[size_t(h)])));
            const double left = drained[size_t((token * kHeads + h) * kHead + d)];
            CHECK(std::fabs(left - less) <= tolerance, "dtype %d token %ld with sinks: %g, not %g", kinds.dtype, long(token),
                  left, less);
          }
        }
      }
    }
}

TEST(chosen_tokens_are_the_same_in_any_company) {
  for (const Kinds& kinds : kKinds) {
    if (!runs_case(5)) continue;
    const int64_t length = is_emulated() ? 60 : 1500, most = 40;
    const Context own(kinds.dtype, kinds.cache_dtype, length, 16);
    const std::vector<int32_t> selected = own.select(0, length, most);
    const std::vector<char> attended = own.attend(0, length, selected);
    const int64_t row = int64_t(attended.size()) / length;
    for (int32_t threads : {1, 2, 3, 16}) {
      qr_init(qr_isa_in_use(), threads);
      for (auto [begin, end] : {std::pair<int64_t, int64_t>{0, 1}, {30, 45}, {39, 41}, {length - 1, length}}) {
        const std::vector<int32_t> some = own.select(begin, end, most);
        CHECK(std::equal(some.begin(), some.end(), selected.begin() + begin * most), "cache %d threads %d",
              kinds.cache_dtype, threads);
        const std::vector<char> other = own.attend(begin, end, some);
        CHECK(std::memcmp(other.data(), attended.data() + begin * row, other.size()) == 0, "cache %d threads %d",
              kinds.cache_dtype, threads);
      }
    }
    qr_init(qr_isa_in_use(), 2);
  }
}

TEST(positions_that_a_token_does_not_see_are_refused) {
  const Context own(QR_FLOAT32, QR_FLOAT32, 30, 16);
  std::vector<int32_t> selected = own.select(29, 30, 8);
  for (int32_t wrong : {30, -1, INT32_MAX}) {
    std::vector<int32_t> other = selected;
    other[3] = wrong;
    std::vector<float> out(kHeads * kHead, 7.0f);
    const int32_t starts[] = {0, 1}, lengths[] = {30};
    CHECK(qr_selected_attention(out.data(), own.query.data(), QR_FLOAT32, own.cache, QR_FLOAT32, own.num_blocks, 16,
                                own.page, own.page, starts, lengths, 1, own.table.data(), own.num_blocks, other.data(),
                                8, kHeads, kHead, 0.2f, nullptr) == QR_EINVAL);
    for (float value : out) CHECK(value == 7.0f, "wrote");
  }
}
