// Which experts a row passes, and by how much each counts.
#pragma once

#include "quire_cpu.h"

namespace qr {

bool is_routing(const qr_routing& routing, int64_t num_experts);

// Of one row, best first. scratch: room for 4 num_experts numbers of 4 bytes.
void route_row(int32_t* chosen, float* weights, const float* logits, const float* choice_bias, int64_t num_experts,
               const qr_routing& routing, void* scratch);

// Of a row whose experts are given. scratch: as above.
void weigh_given(float* weights, const int32_t* given, const float* logits, int64_t num_experts,
                 const qr_routing& routing, void* scratch);

float sigmoid_of(float logit);

}  // namespace qr
