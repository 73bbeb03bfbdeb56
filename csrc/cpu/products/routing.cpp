// Routing of a mixture of experts, each row by itself; as quire/ops/reference/experts.py, which names the sources.
#include "routing.h"

#include <cmath>
#include <limits>

#include "../arguments.h"
#include "../runtime/threads.h"

namespace qr {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

bool is_better(float a, float b) { return std::isnan(a) ? !std::isnan(b) : a > b; }

// Indices of the highest scores, best first, the lower one where two are equal.
void choose_best(int32_t* chosen, int64_t count, const float* scores, int64_t n) {
  int64_t held = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (held == count && !is_better(scores[i], scores[chosen[count - 1]])) continue;
    int64_t at = held < count ? held++ : count - 1;
    for (; at > 0 && is_better(scores[i], scores[chosen[at - 1]]); --at) chosen[at] = chosen[at - 1];
    chosen[at] = int32_t(i);
  }
}

void softmax(float* values, int64_t n) {
  float highest = -kInfinity, total = 0.0f;
  for (int64_t i = 0; i < n; ++i)
    if (values[i] > highest) highest = values[i];
  for (int64_t i = 0; i < n; ++i) total += values[i] = std::exp(values[i] - highest);
  for (int64_t i = 0; i < n; ++i) values[i] /= total;
}

// Above 20 a softplus is its argument, as torch has it.
float sqrt_softplus(float logit) { return std::sqrt(logit > 20.0f ? logit : std::log1p(std::exp(logit))); }

void score(float* scores, const float* logits, int64_t n, int64_t kind) {
  for (int64_t i = 0; i < n; ++i)
    scores[i] = kind == QR_SIGMOID ? sigmoid_of(logits[i]) : kind == QR_SQRT_SOFTPLUS ? sqrt_softplus(logits[i]) : logits[i];
  if (kind == QR_SOFTMAX) softmax(scores, n);
}

// `left_out` to all that are not in the best groups.
void keep_best_groups(float* ranked, int64_t n, const qr_routing& routing, float* of_groups, int32_t* chosen) {
  const int64_t size = n / routing.groups;
  for (int64_t group = 0; group < routing.groups; ++group) {
    const float* own = ranked + group * size;
    choose_best(chosen, routing.best_of_group, own, size);
    of_groups[group] = own[chosen[0]];
    for (int64_t i = 1; i < routing.best_of_group; ++i) of_groups[group] += own[chosen[i]];
  }
  choose_best(chosen, routing.chosen_groups, of_groups, routing.groups);
  for (int64_t group = 0; group < routing.groups; ++group) {
    bool is_kept = false;
    for (int64_t i = 0; i < routing.chosen_groups; ++i) is_kept |= chosen[i] == group;
    for (int64_t i = group * size; !is_kept && i < (group + 1) * size; ++i) ranked[i] = float(routing.left_out);
  }
}

// One after the other; `left` are the logits of those not chosen yet.
void choose_by_nearness(int32_t* chosen, float* weights, const float* logits, int64_t n, const qr_routing& routing,
                        float* left) {
  for (int64_t i = 0; i < n; ++i) left[i] = logits[i];
  for (int64_t choice = 0; choice < routing.num_chosen; ++choice) {
    choose_best(chosen + choice, 1, left, n);
    const float highest = left[chosen[choice]];
    float total = 0.0f;
    for (int64_t i = 0; i < n; ++i) {
      const float size = std::fabs(logits[i]), scale = size < highest ? highest : size;
      if (!((highest - logits[i]) / scale > float(routing.near))) total += std::exp(left[i] - highest);
    }
    weights[choice] = 1.0f / total;
    left[chosen[choice]] = -kInfinity;
  }
}

void weigh(float* weights, const int32_t* chosen, const float* scores, const qr_routing& routing) {
  const int64_t count = routing.num_chosen;
  for (int64_t i = 0; i < count; ++i) weights[i] = scores[chosen[i]];
  if (routing.scores == QR_LOGITS) softmax(weights, count);
  if (routing.scores == QR_LOGITS_SIGMOID)
    for (int64_t i = 0; i < count; ++i) weights[i] = sigmoid_of(weights[i]);
  if (routing.renormalized != 0) {
    float total = weights[0];
    for (int64_t i = 1; i < count; ++i) total += weights[i];
    if (total < float(routing.least_sum)) total = float(routing.least_sum);
    total += float(routing.added_to_sum);
    for (int64_t i = 0; i < count; ++i) weights[i] /= total;
  }
  for (int64_t i = 0; i < count; ++i) weights[i] *= float(routing.factor);
}

bool are_groups(const qr_routing& routing, int64_t num_experts) {
  if (routing.groups < 0 || routing.groups > num_experts) return false;
  if (routing.groups == 0) return true;
  const int64_t size = num_experts / routing.groups;
  return num_experts % routing.groups == 0 && routing.best_of_group >= 1 && routing.best_of_group <= size &&
         routing.chosen_groups >= 1 && routing.chosen_groups <= routing.groups &&
         routing.num_chosen <= routing.chosen_groups * size;
}

}  // namespace

float sigmoid_of(float logit) { return 1.0f / (1.0f + std::exp(-logit)); }

bool is_routing(const qr_routing& routing, int64_t num_experts) {
  for (const double number :
       {routing.least_sum, routing.added_to_sum, routing.factor, routing.shared_factor, routing.near})
    if (!is_finite(float(number))) return false;
  if (std::isnan(routing.left_out)) return false;
  return routing.num_chosen >= 1 && routing.num_chosen <= num_experts && routing.scores >= QR_SOFTMAX &&
         routing.scores <= QR_SQRT_SOFTPLUS && are_groups(routing, num_experts);
}

void route_row(int32_t* chosen, float* weights, const float* logits, const float* choice_bias, int64_t num_experts,
               const qr_routing& routing, void* scratch) {
  auto *scores = static_cast<float*>(scratch), *ranked = scores + num_experts, *of_groups = ranked + num_experts;
  if (routing.near >= 0) return choose_by_nearness(chosen, weights, logits, num_experts, routing, scores);
  score(scores, logits, num_experts, routing.scores);
  for (int64_t i = 0; i < num_experts; ++i) ranked[i] = choice_bias == nullptr ? scores[i] : scores[i] + choice_bias[i];
  if (routing.groups != 0)
    keep_best_groups(ranked, num_experts, routing, of_groups, reinterpret_cast<int32_t*>(of_groups + num_experts));
  choose_best(chosen, routing.num_chosen, ranked, num_experts);
  weigh(weights, chosen, scores, routing);
}

void weigh_given(float* weights, const int32_t* given, const float* logits, int64_t num_experts,
                 const qr_routing& routing, void* scratch) {
  auto* scores = static_cast<float*>(scratch);
  score(scores, logits, num_experts, routing.scores);
  weigh(weights, given, scores, routing);
}

}  // namespace qr

using namespace qr;

extern "C" int32_t qr_route(int32_t* chosen, float* weights, const float* logits, const float* choice_bias,
                            int64_t rows, int64_t num_experts, const qr_routing* routing) {
  if (!are_sizes(rows, num_experts) || num_experts == 0 || num_experts > INT32_MAX || routing == nullptr ||
      !is_routing(*routing, num_experts) || (rows > 0 && !are_there(chosen, weights, logits)))
    return QR_EINVAL;
  void* memory = scratch(2, num_experts * 16);
  if (memory == nullptr) return QR_ENOMEM;
  for (int64_t row = 0; row < rows; ++row)
    route_row(chosen + row * routing->num_chosen, weights + row * routing->num_chosen, logits + row * num_experts,
              choice_bias, num_experts, *routing, memory);
  return QR_OK;
}
