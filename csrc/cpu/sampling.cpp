// From logits to tokens. What decides a draw is an integer, as in the reference: sums of integers do not depend on their
// order, so the same numbers draw the same tokens everywhere.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "arguments.h"
#include "kernels.h"
#include "runtime/threads.h"

namespace qr {
namespace {

constexpr int kIdBits = 22;
constexpr int64_t kLastId = (int64_t(1) << kIdBits) - 1;
constexpr double kWeightOne = double(int64_t(1) << 40);
constexpr int64_t kChunk = 16 * 1024;  // elements of one piece where a row is shared

// Larger weight first, then lower id: keys have no ties.
int64_t key_of(int64_t weight, int64_t id) { return (weight << kIdBits) | (kLastId - id); }

// Weights by magnitude: the exponent and the next four bits. Order of buckets is order of weights.
constexpr int kBuckets = 42 * 16;
int bucket_of(int64_t weight) {
  if (weight < 16) return int(weight);
  const int exponent = 63 - __builtin_clzll(uint64_t(weight));
  return (exponent - 3) * 16 + int((weight >> (exponent - 4)) & 15);
}

struct Histogram {
  int64_t counts[kBuckets] = {};
  int64_t sums[kBuckets] = {};
};

// The keys of one bucket, descending.
int64_t* keys_of_bucket(const int64_t* weights, int64_t n, int bucket, int64_t count) {
  auto* keys = static_cast<int64_t*>(scratch(3, (count > 0 ? count : 1) * 8));
  if (keys == nullptr) return nullptr;
  int64_t found = 0;
  for (int64_t id = 0; id < n && found < count; ++id)
    if (bucket_of(weights[id]) == bucket) keys[found++] = key_of(weights[id], id);
  std::sort(keys, keys + found, [](int64_t a, int64_t b) { return a > b; });
  return keys;
}

// The smallest key that top-k, then top-p keep. Buckets are summed from the top down to the one where the limit falls;
// only that one is sorted.
bool smallest_kept(const int64_t* weights, int64_t n, int64_t total, int64_t top_k, double top_p, int64_t* smallest) {
  Histogram h;
  for (int64_t id = 0; id < n; ++id) {
    const int bucket = bucket_of(weights[id]);
    ++h.counts[bucket];
    h.sums[bucket] += weights[id];
  }
  int64_t kept_total = total;
  if (top_k > 0) {
    const int64_t limit = top_k < n ? top_k : n;
    int64_t above = 0, reached = 0;
    int bucket = kBuckets - 1;
    for (; above + h.counts[bucket] < limit; --bucket) {
      above += h.counts[bucket];
      reached += h.sums[bucket];
    }
    const int64_t* keys = keys_of_bucket(weights, n, bucket, h.counts[bucket]);
    if (keys == nullptr) return false;
    for (int64_t i = 0; i < limit - above; ++i) reached += keys[i] >> kIdBits;
    kept_total = reached;
  }
  const double wanted = std::ceil(top_p * double(kept_total));
  const int64_t share = wanted < double(kept_total) ? int64_t(wanted) : kept_total;
  int64_t reached = 0;
  int bucket = kBuckets - 1;
  for (; bucket > 0 && reached + h.sums[bucket] < share; --bucket) reached += h.sums[bucket];
  while (bucket > 0 && h.counts[bucket] == 0) --bucket;
  const int64_t* keys = keys_of_bucket(weights, n, bucket, h.counts[bucket]);
  if (keys == nullptr) return false;
  *smallest = 0;
  for (int64_t i = 0; i < h.counts[bucket]; ++i) {
    reached += keys[i] >> kIdBits;
    *smallest = keys[i];
    if (reached >= share) break;
  }
  return true;
}

// Which tokens rows may draw. A row whose number of a mask is negative may draw any.
struct Masks {
  const int64_t* mask_of;  // null: no row has one
  const uint32_t* words;
  int64_t vocab;

  const uint32_t* of(int64_t row) const {
    return mask_of == nullptr || mask_of[row] < 0 ? nullptr : words + mask_of[row] * divide_up(vocab, 32);
  }
};

// The allowed logits of x[0 .. n), one after the other; null where there is no memory. Order is that of ids, so equal
// weights keep their order among them.
const float* gather(const float* x, const uint32_t* bits, int64_t n, int64_t* count) {
  auto* values = static_cast<float*>(scratch(1, (n + 16) * 4));
  if (values != nullptr) *count = kernels()->gather_allowed(values, x, bits, n);
  return values;
}

// The id of the allowed token number `index`, counted from 0.
int64_t allowed_id(const uint32_t* bits, int64_t index) {
  int64_t word = 0;
  for (int64_t here; (here = __builtin_popcount(bits[word])) <= index; ++word) index -= here;
  uint32_t rest = bits[word];
  for (; index > 0; --index) rest &= rest - 1;
  return word * 32 + __builtin_ctz(rest);
}

// The largest allowed logit of a row and its id; -inf and 0 where nothing is allowed.
bool allowed_largest(Largest* found, const float* x, const uint32_t* bits, int64_t n) {
  int64_t count = 0;
  const float* values = gather(x, bits, n, &count);
  if (values == nullptr) return false;
  *found = Largest{-INFINITY, 0};
  if (count == 0) return true;
  *found = kernels()->find_largest(values, count);
  found->index = allowed_id(bits, found->index);
  return true;
}

struct SampleArgs {
  int64_t* ids;
  const float* logits;
  int64_t vocab;
  const float* temperature;
  const int64_t* top_k;
  const float* top_p;
  const float* min_p;
  const double* uniforms;
  int64_t draws;
};

// The first index whose running sum of weights exceeds the uniform's share.
int64_t invert(const int64_t* weights, int64_t n, int64_t total, double uniform) {
  int64_t target = int64_t(uniform * double(total));
  if (target > total - 1) target = total - 1;
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) {
    int64_t part = 0;
    for (int64_t j = 0; j < 64; ++j) part += weights[i + j];
    if (target < part) break;
    target -= part;
  }
  for (; i < n - 1 && target >= weights[i]; ++i) target -= weights[i];
  return i;
}

// A truncated row by its few best tokens alone: the limit of what is looked at is the k-th largest of the maxima of
// blocks, which at least k tokens reach. False where these do not decide; then the whole row does, to the same token.
bool sample_narrow(const SampleArgs& args, int64_t row, const float* logits, int64_t n, const Largest& largest) {
  constexpr int64_t kBlock = 256, kMost = 4096, kMostBlocks = 2048;
  const int64_t blocks = divide_up(n, kBlock), top_k = args.top_k[row];
  const int64_t wanted = top_k > 0 ? top_k : 256;
  if (blocks < wanted || blocks > kMostBlocks || largest.value != largest.value) return false;
  const Kernels* table = kernels();
  const double temperature = double(args.temperature[row]);
  // 1. candidates, with a margin that keeps tokens apart whose weights could round to the same integer
  float maxima[kMostBlocks];
  for (int64_t b = 0; b < blocks; ++b)
    maxima[b] = table->find_largest(logits + b * kBlock, (b + 1) * kBlock < n ? kBlock : n - b * kBlock).value;
  std::nth_element(maxima, maxima + wanted - 1, maxima + blocks, [](float a, float b) { return a > b; });
  const float limit = maxima[wanted - 1];
  const float margin = std::nextafter(float(double(limit) - temperature * 1e-4), -INFINITY);
  int64_t ids[kMost], weights[kMost + 1], keys[kMost], count = 0;
  float values[kMost + 1];
  for (int64_t i = table->next_above(logits, n, 0, margin); i < n; i = table->next_above(logits, n, i + 1, margin)) {
    if (count == kMost) return false;
    values[count] = logits[i];
    ids[count++] = i;
  }
  values[count] = limit;
  table->sample_weights(weights, values, count + 1, double(largest.value), temperature);
  const int64_t least_certain = weights[count];
  if (least_certain < (int64_t(1) << 20)) return false;
  const double least = double(args.min_p[row]) * kWeightOne;
  auto after_min_p = [&](int64_t weight) { return args.min_p[row] > 0 && double(weight) < least ? 0 : weight; };
  // 2. what top-k leaves
  for (int64_t i = 0; i < count; ++i) keys[i] = key_of(weights[i], ids[i]);
  std::sort(keys, keys + count, [](int64_t a, int64_t b) { return a > b; });
  int64_t kept_total = 0;
  if (top_k > 0) {
    for (int64_t i = 0; i < top_k; ++i) kept_total += after_min_p(keys[i] >> kIdBits);
  } else {
    auto* all = static_cast<int64_t*>(scratch(0, n * 8));
    if (all == nullptr) return false;
    table->sample_weights(all, logits, n, double(largest.value), temperature);
    for (int64_t i = 0; i < n; ++i) kept_total += after_min_p(all[i]);
  }
  // 3. what top-p leaves of it
  const double share_of = std::ceil(double(args.top_p[row]) * double(kept_total));
  const int64_t share = share_of < double(kept_total) ? int64_t(share_of) : kept_total;
  int64_t reached = 0, last = 0;
  for (;; ++last) {
    if (last == count || (keys[last] >> kIdBits) < least_certain) return false;
    reached += after_min_p(keys[last] >> kIdBits);
    if (reached >= share) break;
  }
  // 4. draws, in order of ids
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) {
    weights[i] = key_of(weights[i], ids[i]) < keys[last] ? 0 : after_min_p(weights[i]);
    total += weights[i];
  }
  for (int64_t draw = 0; draw < args.draws; ++draw)
    args.ids[row * args.draws + draw] = ids[invert(weights, count, total, args.uniforms[row * args.draws + draw])];
  return true;
}

// Of the n logits, all or those that are allowed: writes their indices.
bool sample_logits(const SampleArgs& args, int64_t row, const float* logits, int64_t n) {
  const Largest largest = kernels()->find_largest(logits, n);
  if (!is_finite(largest.value)) {  // no distribution: its weights would be no numbers
    for (int64_t draw = 0; draw < args.draws; ++draw) args.ids[row * args.draws + draw] = largest.index;
    return true;
  }
  if ((args.top_k[row] > 0 || args.top_p[row] < 1) && sample_narrow(args, row, logits, n, largest)) return true;
  auto* weights = static_cast<int64_t*>(scratch(0, n * 8));
  if (weights == nullptr) return false;
  // 1. weights
  kernels()->sample_weights(weights, logits, n, double(largest.value), double(args.temperature[row]));
  // 2. min-p
  if (args.min_p[row] > 0) {
    const double least = double(args.min_p[row]) * kWeightOne;
    for (int64_t id = 0; id < n; ++id) weights[id] = double(weights[id]) < least ? 0 : weights[id];
  }
  // 3. top-k and top-p
  int64_t total = 0;
  for (int64_t id = 0; id < n; ++id) total += weights[id];
  if (args.top_k[row] > 0 || args.top_p[row] < 1) {
    int64_t smallest;
    if (!smallest_kept(weights, n, total, args.top_k[row], double(args.top_p[row]), &smallest)) return false;
    total = 0;
    for (int64_t id = 0; id < n; ++id) {
      weights[id] = key_of(weights[id], id) < smallest ? 0 : weights[id];
      total += weights[id];
    }
  }
  // 4. the first token whose running sum exceeds the target
  for (int64_t draw = 0; draw < args.draws; ++draw)
    args.ids[row * args.draws + draw] = invert(weights, n, total, args.uniforms[row * args.draws + draw]);
  return true;
}

bool sample_row(const SampleArgs& args, const Masks& masks, int64_t row) {
  const float* logits = args.logits + row * args.vocab;
  const uint32_t* bits = masks.of(row);
  if (bits == nullptr) return sample_logits(args, row, logits, args.vocab);
  int64_t count = 0;
  const float* values = gather(logits, bits, args.vocab, &count);
  if (values == nullptr) return false;
  int64_t* ids = args.ids + row * args.draws;
  std::fill(ids, ids + args.draws, 0);
  if (count == 0) return true;
  if (!sample_logits(args, row, values, count)) return false;
  for (int64_t draw = 0; draw < args.draws; ++draw) ids[draw] = allowed_id(bits, ids[draw]);
  return true;
}

bool are_below(const int64_t* numbers, int64_t count, int64_t first, int64_t end) {
  return std::all_of(numbers, numbers + count, [&](int64_t number) { return number >= first && number < end; });
}

// The k largest of x in order, ties by lower id: a sorted list where k is small, a selection of keys otherwise.
bool largest_ids(int64_t* ids, const float* x, int64_t n, int64_t k) {
  if (k == 0) return true;
  if (k <= 64) {
    float values[64];
    int64_t count = 0, i = 0;
    while (i < n) {
      if (count == k) i = kernels()->next_above(x, n, i, values[k - 1]);
      if (i >= n) break;
      int64_t at = count < k ? count++ : k - 1;
      for (; at > 0 && values[at - 1] < x[i]; --at) {
        values[at] = values[at - 1];
        ids[at] = ids[at - 1];
      }
      values[at] = x[i];
      ids[at] = i++;
    }
    return true;
  }
  auto* order = static_cast<int64_t*>(scratch(0, n * 8));
  if (order == nullptr) return false;
  for (int64_t i = 0; i < n; ++i) order[i] = i;
  auto before = [x](int64_t a, int64_t b) { return x[a] != x[b] ? x[a] > x[b] : a < b; };
  if (k < n) std::nth_element(order, order + k, order + n, before);
  std::sort(order, order + k, before);
  std::memcpy(ids, order, size_t(k) * 8);
  return true;
}

}  // namespace
}  // namespace qr

using namespace qr;

extern "C" {

int32_t qr_row_max(float* values, int64_t* ids, const float* logits, int64_t rows, int64_t vocab) {
  const Kernels* table = kernels();
  if (table == nullptr) return QR_ESTATE;
  if (vocab <= 0 || !are_sizes(rows, vocab) || (rows > 0 && !are_there(values, ids, logits))) return QR_EINVAL;
  const int64_t chunks = divide_up(vocab, kChunk);
  auto* found = static_cast<Largest*>(scratch(2, rows * chunks * int64_t(sizeof(Largest)) + 1));
  if (found == nullptr) return QR_ENOMEM;
  parallel_for(rows * chunks, [&](int64_t index) {
    const int64_t begin = index % chunks * kChunk, end = begin + kChunk < vocab ? begin + kChunk : vocab;
    found[index] = table->find_largest(logits + index / chunks * vocab + begin, end - begin);
    found[index].index += begin;
  });
  for (int64_t row = 0; row < rows; ++row) {
    Largest best = found[row * chunks];
    for (int64_t chunk = 1; chunk < chunks && best.value == best.value; ++chunk) {
      const Largest& next = found[row * chunks + chunk];
      if (next.value > best.value || next.value != next.value) best = next;
    }
    values[row] = best.value;
    ids[row] = best.index;
  }
  return QR_OK;
}

int32_t qr_allowed_max(float* values, int64_t* ids, const float* logits, int64_t rows, int64_t vocab,
                       const int64_t* row_of, const int32_t* masks, int64_t num_masks) {
  if (kernels() == nullptr) return QR_ESTATE;
  if (vocab <= 0 || !are_sizes(rows, vocab) || !are_sizes(num_masks, divide_up(vocab, 32))) return QR_EINVAL;
  if (num_masks == 0) return QR_OK;
  if (!are_there(values, ids, logits, row_of, masks) || !are_below(row_of, num_masks, 0, rows)) return QR_EINVAL;
  const auto* words = reinterpret_cast<const uint32_t*>(masks);
  std::atomic<int32_t> status{QR_OK};
  parallel_for(num_masks, [&](int64_t index) {
    Largest found;
    const uint32_t* bits = words + index * divide_up(vocab, 32);
    if (!allowed_largest(&found, logits + row_of[index] * vocab, bits, vocab)) {
      status.store(QR_ENOMEM);
      return;
    }
    values[index] = found.value;
    ids[index] = found.index;
  });
  return status.load();
}

int32_t qr_top_logprobs(float* chosen_logprobs, int64_t* ranks, int64_t* top_ids, float* top, const float* logits,
                        const int64_t* chosen, int64_t rows, int64_t vocab, int64_t k) {
  const Kernels* table = kernels();
  if (table == nullptr) return QR_ESTATE;
  if (vocab <= 0 || !are_sizes(rows, vocab) || k < 0 || k > vocab ||
      (rows > 0 && !are_there(chosen_logprobs, ranks, logits, chosen)) || (rows > 0 && k > 0 && !are_there(top_ids, top)))
    return QR_EINVAL;
  for (int64_t row = 0; row < rows; ++row)
    if (chosen[row] < 0 || chosen[row] >= vocab) return QR_EINVAL;
  std::atomic<int32_t> status{QR_OK};
  parallel_for(rows, [&](int64_t row) {
    const float* x = logits + row * vocab;
    const float shift = table->find_largest(x, vocab).value;
    const float log_sum = float(std::log(table->sum_exponentials(x, vocab, shift)));
    chosen_logprobs[row] = x[chosen[row]] - shift - log_sum;
    ranks[row] = table->count_not_below(x, vocab, x[chosen[row]], chosen[row]);
    if (!largest_ids(top_ids + row * k, x, vocab, k)) status.store(QR_ENOMEM);
    for (int64_t i = 0; i < k; ++i) top[row * k + i] = x[top_ids[row * k + i]] - shift - log_sum;
  });
  return status.load();
}

int32_t qr_apply_penalties(float* logits, int64_t rows, int64_t vocab, const int64_t* pair_rows,
                           const int64_t* token_ids, const uint8_t* in_prompt, const int64_t* output_counts,
                           int64_t pairs, const float* repetition, const float* presence, const float* frequency) {
  if (vocab <= 0 || !are_sizes(rows, vocab) || !are_sizes(pairs)) return QR_EINVAL;
  if (pairs == 0) return QR_OK;
  if (!are_there(logits, pair_rows, token_ids, in_prompt, output_counts, repetition, presence, frequency))
    return QR_EINVAL;
  for (int64_t i = 0; i < pairs; ++i)
    if (pair_rows[i] < 0 || pair_rows[i] >= rows || token_ids[i] < 0 || token_ids[i] >= vocab) return QR_EINVAL;
  for (int64_t i = 0; i < pairs; ++i) {
    const int64_t row = pair_rows[i];
    float& logit = logits[row * vocab + token_ids[i]];
    const float count = float(output_counts[i]);
    float value = logit;
    if (in_prompt[i] != 0 || count > 0) value = value > 0 ? value / repetition[row] : value * repetition[row];
    value = value - frequency[row] * count;
    logit = value - presence[row] * (count > 0 ? 1.0f : 0.0f);
  }
  return QR_OK;
}

int32_t qr_sample(int64_t* ids, const float* logits, int64_t rows, int64_t vocab, const float* temperature,
                  const int64_t* top_k, const float* top_p, const float* min_p, const double* uniforms,
                  int64_t draws, const int64_t* mask_of, const int32_t* masks, int64_t num_masks) {
  if (kernels() == nullptr) return QR_ESTATE;
  if (vocab <= 0 || vocab > kLastId + 1 || !are_sizes(rows, vocab) || !are_sizes(rows, draws) ||
      !are_sizes(num_masks, divide_up(vocab, 32)))
    return QR_EINVAL;
  if (rows == 0 || draws == 0) return QR_OK;
  if (!are_there(ids, logits, temperature, top_k, top_p, min_p, uniforms)) return QR_EINVAL;
  for (int64_t row = 0; row < rows; ++row)
    if (!(temperature[row] > 0 && is_finite(temperature[row])) || top_k[row] < 0 ||
        !(top_p[row] >= 0 && top_p[row] <= 1) || !(min_p[row] >= 0 && min_p[row] <= 1))
      return QR_EINVAL;
  for (int64_t i = 0; i < rows * draws; ++i)
    if (!(uniforms[i] >= 0 && uniforms[i] < 1)) return QR_EINVAL;
  if (mask_of != nullptr && (!are_below(mask_of, rows, -1, num_masks) || (num_masks > 0 && masks == nullptr)))
    return QR_EINVAL;
  const SampleArgs args{ids, logits, vocab, temperature, top_k, top_p, min_p, uniforms, draws};
  const Masks allowed{mask_of, reinterpret_cast<const uint32_t*>(masks), vocab};
  std::atomic<int32_t> status{QR_OK};
  parallel_for(rows, [&](int64_t row) {
    if (!sample_row(args, allowed, row)) status.store(QR_ENOMEM);
  });
  return status.load();
}
}
