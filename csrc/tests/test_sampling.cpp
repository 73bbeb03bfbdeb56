#include <algorithm>
#include <cmath>
#include <numeric>

#include "check.h"
#include "quire_cpu.h"

TEST(row_max_is_the_first_of_the_largest) {
  for (int64_t vocab : {1, 5, 100, 40000}) {
    std::vector<float> logits = random_floats(3 * vocab);
    if (vocab > 50) logits[size_t(vocab + 17)] = logits[size_t(2 * vocab - 2)] = 9.0f;
    if (vocab > 50) logits[size_t(2 * vocab + 40)] = NAN;
    float values[3];
    int64_t ids[3];
    CHECK(qr_row_max(values, ids, logits.data(), 3, vocab) == QR_OK);
    CHECK(ids[0] == std::max_element(logits.begin(), logits.begin() + vocab) - logits.begin());
    CHECK(values[0] == logits[size_t(ids[0])]);
    if (vocab > 50) CHECK(ids[1] == 17 && values[1] == 9.0f && ids[2] == 40 && std::isnan(values[2]));
  }
}

TEST(top_logprobs_are_a_sorted_log_softmax) {
  const int64_t vocab = 3000;
  std::vector<float> logits = random_floats(vocab, 3.0f);
  for (float& x : logits) x = std::round(x * 4) / 4;  // many ties
  std::vector<int64_t> order(static_cast<size_t>(vocab));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return logits[size_t(a)] > logits[size_t(b)]; });
  double sum = 0;
  for (float x : logits) sum += std::exp(double(x));
  for (int64_t k : {0, 1, 20, 64, 65, 3000}) {
    int64_t chosen = 1234, rank = 0;
    float logprob = 0;
    std::vector<int64_t> ids(static_cast<size_t>(k));
    std::vector<float> top(static_cast<size_t>(k));
    CHECK(qr_top_logprobs(&logprob, &rank, ids.data(), top.data(), logits.data(), &chosen, 1, vocab, k) == QR_OK);
    CHECK(std::fabs(logprob - (logits[1234] - std::log(sum))) < 1e-5);
    CHECK(order[size_t(rank - 1)] == chosen, "rank %ld", long(rank));
    for (int64_t i = 0; i < k; ++i) {
      CHECK(ids[size_t(i)] == order[size_t(i)], "k %ld place %ld", long(k), long(i));
      CHECK(std::fabs(top[size_t(i)] - (logits[size_t(order[size_t(i)])] - std::log(sum))) < 1e-5);
    }
  }
}

TEST(draws_follow_the_distribution_and_its_limits) {
  const int64_t vocab = 50, draws = 20000;
  std::vector<float> logits = random_floats(vocab, 2.0f);
  std::vector<double> uniforms(static_cast<size_t>(draws));
  for (int64_t i = 0; i < draws; ++i) uniforms[size_t(i)] = (double(i) + 0.5) / double(draws);
  std::vector<int64_t> ids(static_cast<size_t>(draws));
  const float one = 1.0f, none = 0.0f, half = 0.5f;
  const int64_t all = 0, three = 3;
  CHECK(qr_sample(ids.data(), logits.data(), 1, vocab, &one, &all, &one, &none, uniforms.data(), draws, nullptr,
                  nullptr, 0) == QR_OK);
  double sum = 0;
  for (float x : logits) sum += std::exp(double(x));
  for (int64_t id = 0; id < vocab; ++id) {
    const double share = double(std::count(ids.begin(), ids.end(), id)) / double(draws);
    CHECK(std::fabs(share - std::exp(double(logits[size_t(id)])) / sum) <= 1.01 / double(draws), "token %ld", long(id));
  }
  std::vector<int64_t> order(static_cast<size_t>(vocab));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return logits[size_t(a)] > logits[size_t(b)]; });
  CHECK(qr_sample(ids.data(), logits.data(), 1, vocab, &one, &three, &one, &none, uniforms.data(), draws, nullptr,
                  nullptr, 0) == QR_OK);
  for (int64_t id = 0; id < vocab; ++id) {
    const bool kept = std::find(order.begin(), order.begin() + 3, id) != order.begin() + 3;
    CHECK((std::count(ids.begin(), ids.end(), id) > 0) == kept, "token %ld", long(id));
  }
  CHECK(qr_sample(ids.data(), logits.data(), 1, vocab, &one, &all, &half, &none, uniforms.data(), draws, nullptr,
                  nullptr, 0) == QR_OK);
  double before = 0;
  for (int64_t id : order) {  // kept while what is before it is less than half
    CHECK((std::count(ids.begin(), ids.end(), id) > 0) == (before < 0.5), "token %ld", long(id));
    before += std::exp(double(logits[size_t(id)])) / sum;
  }
}

// A row with a mask is what the row is in which the other tokens are impossible.
TEST(what_a_mask_forbids_is_never_drawn_and_changes_nothing_else) {
  const int64_t draws = 64;
  std::vector<double> uniforms(static_cast<size_t>(draws));
  for (int64_t i = 0; i < draws; ++i) uniforms[size_t(i)] = (double(i) + 0.5) / double(draws);
  for (int64_t vocab : {1, 31, 33, 100, 4096, 20003})
    for (int every : {1, 2, 7, 40, 5000}) {
      std::vector<float> logits = random_floats(vocab, 2.0f), masked = logits;
      std::vector<int32_t> words(size_t((vocab + 31) / 32), 0);
      for (int64_t id = 0; id < vocab; ++id) {
        if (id % every == 0) {
          words[size_t(id / 32)] |= int32_t(1u << (id % 32));
        } else {
          masked[size_t(id)] = -INFINITY;
        }
      }
      if (every != 1) words.back() |= int32_t(vocab % 32 == 0 ? 0u : 0xffffffffu << (vocab % 32));  // no tokens
      const int64_t row = 0;
      float value = 0, expected_value = 0;
      int64_t id = 0, expected_id = 0;
      CHECK(qr_allowed_max(&value, &id, logits.data(), 1, vocab, &row, words.data(), 1) == QR_OK);
      CHECK(qr_row_max(&expected_value, &expected_id, masked.data(), 1, vocab) == QR_OK);
      CHECK(value == expected_value && id == expected_id);
      const float warm = 0.9f, one = 1.0f, most = 0.8f, none = 0.0f, some = 0.01f;
      for (int64_t top_k : {0, 3, 30000})
        for (float top_p : {one, most})
          for (float min_p : {none, some}) {
            std::vector<int64_t> ids(static_cast<size_t>(draws)), expected(static_cast<size_t>(draws));
            CHECK(qr_sample(ids.data(), logits.data(), 1, vocab, &warm, &top_k, &top_p, &min_p, uniforms.data(), draws,
                            &row, words.data(), 1) == QR_OK);
            CHECK(qr_sample(expected.data(), masked.data(), 1, vocab, &warm, &top_k, &top_p, &min_p, uniforms.data(),
                            draws, nullptr, nullptr, 0) == QR_OK);
            CHECK(ids == expected, "vocab %ld every %d top_k %ld", long(vocab), every, long(top_k));
          }
    }
}

TEST(a_row_that_may_draw_nothing_draws_the_first_token) {
  std::vector<float> logits = random_floats(100);
  const std::vector<int32_t> words(4, 0);
  const int64_t row = 0, off = 0;
  const float one = 1.0f, none = 0.0f;
  const double half = 0.5;
  float value = 0;
  int64_t id = 7;
  CHECK(qr_allowed_max(&value, &id, logits.data(), 1, 100, &row, words.data(), 1) == QR_OK);
  CHECK(value == -INFINITY && id == 0);
  id = 7;
  CHECK(qr_sample(&id, logits.data(), 1, 100, &one, &off, &one, &none, &half, 1, &row, words.data(), 1) == QR_OK);
  CHECK(id == 0);
}
