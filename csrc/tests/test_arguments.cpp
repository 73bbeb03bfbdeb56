// What the engine never sends: every function refuses it, and writes nothing.
#include <climits>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>

#include "check.h"
#include "quire_cpu.h"

namespace {

constexpr int64_t kHuge = int64_t(1) << 62;
constexpr int64_t kWrongSizes[] = {-1, INT64_MIN, kHuge, INT64_MAX};
const float kNan = std::numeric_limits<float>::quiet_NaN(), kInfinite = std::numeric_limits<float>::infinity();

// One memory for every pointer: small, aligned, and watched.
struct Memory {
  char* bytes = aligned_zeros(kSize);
  static constexpr int64_t kSize = 1 << 20;
  Memory() { std::memset(bytes, 0x11, kSize); }
  ~Memory() { std::free(bytes); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  bool is_untouched() const {
    for (int64_t i = 0; i < kSize; ++i)
      if (bytes[i] != 0x11) return false;
    return true;
  }
};

// A call with its arguments by number, so that each can be replaced by what is wrong.
struct Call {
  const char* name;
  std::vector<int64_t> sizes;     // right ones
  std::vector<bool> is_optional;  // of pointers
  std::function<int64_t(const std::vector<void*>& pointers, const std::vector<int64_t>& sizes)> run;
};

void check_refused(const Call& call, const Memory& memory, const std::vector<void*>& pointers,
                   const std::vector<int64_t>& sizes, const char* what, long which, long value) {
  const int64_t status = call.run(pointers, sizes);
  CHECK(status < 0, "%s: %s %ld = %ld gives %ld", call.name, what, which, value, long(status));
  CHECK(memory.is_untouched(), "%s: %s %ld = %ld wrote", call.name, what, which, value);
}

void sweep(const Call& call) {
  Memory memory;
  const std::vector<void*> there(call.is_optional.size(), memory.bytes);
  for (size_t i = 0; i < there.size(); ++i) {
    if (call.is_optional[i]) continue;
    std::vector<void*> pointers = there;
    pointers[i] = nullptr;
    check_refused(call, memory, pointers, call.sizes, "pointer", long(i), 0);
  }
  for (size_t i = 0; i < call.sizes.size(); ++i)
    for (int64_t wrong : kWrongSizes) {
      std::vector<int64_t> sizes = call.sizes;
      sizes[i] = wrong;
      check_refused(call, memory, there, sizes, "size", long(i), long(wrong));
    }
}

using P = const std::vector<void*>&;
using S = const std::vector<int64_t>&;
template <class T>
T* as(void* pointer) {
  return static_cast<T*>(pointer);
}

qr_weight int8_weight(const void* packed, const void* scales, int64_t outputs) {
  return {packed, scales, nullptr, nullptr, nullptr, nullptr, nullptr, 0, QR_INT8, 0, outputs, 1.0, 0};
}

// The integers in memory are 0x1111...: out of range as ids, slots and lengths, which the calls below must see first.
const Call kCalls[] = {
    {"qr_read_bandwidth", {256}, {false, false},
     [](P p, S s) { return qr_read_bandwidth(p[0], s[0], as<uint64_t>(p[1])); }},
    {"qr_packed_bytes", {64, 64}, {}, [](P, S s) { return qr_packed_bytes(QR_FLOAT32, s[0], s[1]); }},
    {"qr_pack_linear", {64, 64, 64, 64, 0}, {false, false},
     [](P p, S s) { return qr_pack_linear(p[0], QR_FLOAT32, s[0], s[1], p[1], QR_FLOAT32, s[2], s[3], s[4]); }},
    {"qr_linear", {4, 32, 32}, {false, false, false, true, true},
     [](P p, S s) {
       return qr_linear(p[0], QR_FLOAT32, p[1], QR_FLOAT32, p[2], QR_FLOAT32, s[0], s[1], s[2], as<float>(p[3]),
                        QR_NONE, p[4]);
     }},
    {"qr_gated_linear", {4, 32, 32}, {false, false, false, true},
     [](P p, S s) {
       return qr_gated_linear(p[0], QR_FLOAT32, p[1], QR_FLOAT32, p[2], QR_FLOAT32, s[0], s[1], s[2], as<float>(p[3]),
                              QR_SILU);
     }},
    {"qr_quantized_bytes", {64, 64}, {}, [](P, S s) { return qr_quantized_bytes(QR_INT8, s[0], s[1]); }},
    {"qr_pack_quantized", {64, 64, 64, 64, 0}, {false, false},
     [](P p, S s) { return qr_pack_quantized(p[0], QR_INT8, s[0], s[1], as<int8_t>(p[1]), s[2], s[3], s[4]); }},
    {"qr_quantize_linear", {64, 64, 64, 64, 0}, {false, false, false},
     [](P p, S s) {
       return qr_quantize_linear(p[0], p[1], QR_INT8, 0, s[0], s[1], p[2], QR_FLOAT32, s[2], s[3], s[4]);
     }},
    {"qr_block_range", {32, 36, 64}, {false, false, false},
     [](P p, S s) {
       return qr_block_range(as<float>(p[0]), as<int32_t>(p[1]), QR_Q4_0, p[2], s[0], s[1], s[2]);
     }},
    {"qr_pack_blocks", {64, 64, 64, 36, 0}, {false, false, false},
     [](P p, S s) {
       return qr_pack_blocks(p[0], as<uint16_t>(p[1]), nullptr, 1.0, QR_Q4_0, s[0], s[1], p[2], s[2], s[3], s[4]);
     }},
    {"qr_block_rows", {64, 36, 64, 4}, {false, false, true},
     [](P p, S s) {
       return qr_block_rows(p[0], QR_FLOAT32, QR_Q4_0, p[1], s[0], s[1], s[2], nullptr, as<int64_t>(p[2]), s[3]);
     }},
    {"qr_linear_quantized", {4, 32, 64, 1}, {false, false, false, false, true, true},
     [](P p, S s) {
       const qr_weight weight = int8_weight(p[2], p[3], 32);
       return qr_linear_quantized(p[0], QR_FLOAT32, p[1], QR_FLOAT32, &weight, s[3], s[0], s[1], s[2], as<float>(p[4]),
                                  QR_NONE, p[5]);
     }},
    {"qr_linear_max", {4, 32, 64, 1}, {false, false, false, false, false, true},
     [](P p, S s) {
       const qr_weight weight = int8_weight(p[3], p[4], 32);
       return qr_linear_max(as<float>(p[0]), as<int64_t>(p[1]), p[2], QR_FLOAT32, &weight, s[3], s[0], s[1], s[2],
                            as<float>(p[5]), 0.0f);
     }},
    {"qr_gated_linear_quantized", {4, 32, 64, 1}, {false, false, false, false, true},
     [](P p, S s) {
       const qr_weight weight = int8_weight(p[2], p[3], 64);
       return qr_gated_linear_quantized(p[0], p[1], QR_FLOAT32, &weight, s[3], s[0], s[1], s[2], as<float>(p[4]),
                                        QR_SILU);
     }},
    {"qr_route", {4, 8, 2}, {false, false, false, true},
     [](P p, S s) {
       const qr_routing routing{s[2], QR_SOFTMAX, 0, 0, 0, 0, 0, 0, 0, 1, 1, -1, 0};
       return qr_route(as<int32_t>(p[0]), as<float>(p[1]), as<float>(p[2]), as<float>(p[3]), s[0], s[1], &routing);
     }},
    {"qr_mixture_of_experts", {4, 2, 32, 32, 32}, {false, false, false, true, true, true},
     [](P p, S s) {
       const auto weight = [&](int64_t n) {
         return qr_weight{p[2], nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, QR_FLOAT32, 0, 0, n, 1.0, 0};
       };
       const qr_expert experts[] = {{weight(64), weight(32), s[4]}, {weight(64), weight(32), 32}};
       const qr_mixture mixture{weight(2), nullptr, as<float>(p[4]), experts, s[1], 0, 0, s[2], s[3], 0, 0, s[2]};
       const qr_routing routing{1, QR_SOFTMAX, 0, 0, 0, 0, 0, 0, 0, 1, 1, -1, 0};
       const qr_gating gating{1, QR_SILU, HUGE_VAL, 1, 0};
       return qr_mixture_of_experts(p[0], p[1], p[5], QR_FLOAT32, nullptr, QR_FLOAT32, p[3], s[0], &mixture, &routing, &gating);
     }},
    {"qr_rms_norm", {4, 32}, {false, false, true, false},
     [](P p, S s) {
       return qr_rms_norm(p[0], QR_FLOAT32, p[1], QR_FLOAT32, p[2], as<float>(p[3]), s[0], s[1], 1e-5f);
     }},
    {"qr_layer_norm", {4, 32}, {false, false, false, true},
     [](P p, S s) {
       return qr_layer_norm(p[0], QR_FLOAT32, p[1], QR_FLOAT32, as<float>(p[2]), as<float>(p[3]), s[0], s[1], 1e-5f);
     }},
    {"qr_cache_page", {16, 64}, {}, [](P, S s) { return qr_cache_page(QR_FLOAT32, s[0], s[1]); }},
    {"qr_rope_and_cache", {8, 16, 1024, 1024, 4, 2, 1, 64, 64}, {false, false, false, true, true, true, false, false},
     [](P p, S s) {
       return qr_rope_and_cache(p[0], p[1], QR_FLOAT32, as<int64_t>(p[2]), as<float>(p[3]), as<float>(p[4]),
                                as<float>(p[5]), p[6], QR_FLOAT32, s[0], s[1], s[2], s[3], as<int64_t>(p[7]), s[4],
                                s[5], s[6], s[7], s[8], 0, 1e-5f, nullptr, nullptr);
     }},
    {"qr_paged_attention", {8, 16, 1024, 1024, 2, 4, 2, 1, 64, 0}, {false, false, false, false, false, false, true, true},
     [](P p, S s) {
       return qr_paged_attention(p[0], QR_FLOAT32, p[1], QR_FLOAT32, p[2], QR_FLOAT32, s[0], s[1], s[2],
                                 s[3], as<int32_t>(p[3]), as<int32_t>(p[4]), s[4], as<int32_t>(p[5]), s[5], s[6], s[7],
                                 s[8], 0.1f, 0.0f, s[9] == kHuge || s[9] == INT64_MAX ? -1 : s[9],  // a window may be huge
                                 as<float>(p[6]), as<float>(p[7]));
     }},
    {"qr_select_tokens", {8, 2, 16, 8, 16, 1024, 1024, 64, 2, 4}, {false, false, false, false, false, false, false},
     [](P p, S s) {
       return qr_select_tokens(as<int32_t>(p[0]), s[0], p[1], QR_FLOAT32, as<float>(p[2]), s[1], s[2], p[3], QR_FLOAT32,
                               s[3], s[4], s[5], s[6], s[7], as<int32_t>(p[4]), as<int32_t>(p[5]), s[8],
                               as<int32_t>(p[6]), s[9]);
     }},
    {"qr_selected_attention", {8, 16, 1024, 1024, 2, 4, 8, 2, 64}, {false, false, false, false, false, false, false, true},
     [](P p, S s) {
       return qr_selected_attention(p[0], p[1], QR_FLOAT32, p[2], QR_FLOAT32, s[0], s[1], s[2], s[3],
                                    as<int32_t>(p[3]), as<int32_t>(p[4]), s[4], as<int32_t>(p[5]), s[5],
                                    as<int32_t>(p[6]), s[6], s[7], s[8], 0.1f, as<float>(p[7]));
     }},
    {"qr_rotate_last", {16, 4, 2, 32, 8}, {false, false, false},
     [](P p, S s) {
       return qr_rotate_last(p[0], QR_FLOAT32, as<int64_t>(p[1]), as<float>(p[2]), s[0], s[1], s[2], s[3], s[4], 0);
     }},
    {"qr_store_rows", {4, 8, 8, 64, 16, 2}, {false, false, false},
     [](P p, S s) {
       return qr_store_rows(p[0], QR_FLOAT32, s[0], s[1], s[2], s[3], p[1], s[4], as<int64_t>(p[2]), s[5]);
     }},
    {"qr_select_blocks", {8, 2, 16, 4, 8, 8, 64, 2, 2, 16, 1}, {false, false, false, false, false, false},
     [](P p, S s) {
       return qr_select_blocks(as<int32_t>(p[0]), s[0], p[1], QR_FLOAT32, s[1], s[2], p[2], QR_FLOAT32, s[3], s[4], s[5],
                               s[6], as<int32_t>(p[3]), s[7], as<int32_t>(p[4]), as<int32_t>(p[5]), s[8], s[9], s[10]);
     }},
    {"qr_compress", {4, 2, 8, 16, 2, 8, 4, 8, 32, 256, 2, 8, 2, 4, 8, 10, 6, 64, 4},
     {false, false, false, false, false, false, false, false, false, false},
     [](P p, S s) {
       return qr_compress(p[0], QR_FLOAT32, s[0], s[1], s[2], s[3], as<int32_t>(p[1]), s[4], s[5], p[2], QR_FLOAT32, s[6],
                          s[7], s[8], s[9], as<int32_t>(p[3]), s[10], s[11], as<int32_t>(p[4]), as<int32_t>(p[5]), s[12],
                          as<float>(p[6]), s[13], s[14], as<float>(p[7]), s[15], as<float>(p[8]), s[16], 1e-6f,
                          as<float>(p[9]), s[17], s[18]);
     }},
    {"qr_select_entries", {8, 2, 16, 16, 8, 4, 8, 32, 2, 16, 4, 4}, {false, false, false, false, false, false, false},
     [](P p, S s) {
       return qr_select_entries(as<int32_t>(p[0]), s[0], p[1], QR_FLOAT32, as<float>(p[2]), s[1], s[2], s[3], p[3],
                                QR_FLOAT32, s[4], s[5], s[6], s[7], as<int32_t>(p[4]), s[8], s[9], as<int32_t>(p[5]),
                                as<int32_t>(p[6]), s[10], s[11]);
     }},
    {"qr_compressed_attention", {8, 16, 8, 128, 2, 16, 8, 4, 8, 32, 2, 16, 4, 8, 2, 16, 8, 4},
     {false, false, false, false, false, true, true, false, false, true},
     [](P p, S s) {
       return qr_compressed_attention(p[0], p[1], QR_FLOAT32, as<float>(p[2]), p[3], QR_FLOAT32, s[0], s[1], s[2], s[3],
                                      as<int32_t>(p[4]), s[4], s[5], p[5], s[6], s[7], s[8], s[9], as<int32_t>(p[6]),
                                      s[10], s[11], as<int32_t>(p[7]), as<int32_t>(p[8]), s[12], as<int32_t>(p[9]),
                                      s[13], s[14], s[15], 0.1f, s[16], s[17]);
     }},
    {"qr_read_streams", {2, 4, 64, 3}, {false, true, false, false, false, false},
     [](P p, S s) {
       return qr_read_streams(p[0], as<float>(p[1]), p[2], QR_FLOAT32, as<float>(p[3]), as<float>(p[4]),
                              as<float>(p[5]), s[0], s[1], s[2], 1e-6f, 1e-6f, 2.0f, 0.0f, s[3]);
     }},
    {"qr_write_streams", {2, 4, 64}, {false, false, false, false},
     [](P p, S s) {
       return qr_write_streams(p[0], p[1], QR_FLOAT32, p[2], as<float>(p[3]), s[0], s[1], s[2], 1);
     }},
    {"qr_causal_conv", {96, 8, 32, 32, 4, 4, 512, 2}, {true, false, false, true, true, false, true, false, false, false, false},
     [](P p, S s) {
       return qr_causal_conv(as<float>(p[0]), p[1], p[2], p[3], p[4], QR_FLOAT32, s[0], as<float>(p[5]),
                             as<float>(p[6]), QR_SILU, s[1], s[2], s[3], s[4], as<float>(p[7]), s[5], s[6],
                             as<int32_t>(p[8]), as<int32_t>(p[9]), as<int32_t>(p[10]), s[7]);
     }},
    {"qr_mamba_derived", {8, 4, 16}, {false, false, true, true, true},
     [](P p, S s) {
       return qr_mamba_derived(p[0], QR_FLOAT32, as<float>(p[1]), s[0], s[1], s[2], as<float>(p[2]), as<float>(p[3]),
                               as<float>(p[4]), 1, 1e-5f);
     }},
    {"qr_mamba_scan", {64, 36, 8, 32, 16, 96, 4, 512, 2},
     {false, false, false, false, false, false, false, false, false, false, false, false},
     [](P p, S s) {
       return qr_mamba_scan(p[0], QR_FLOAT32, as<float>(p[1]), as<float>(p[2]), p[3], s[0], as<float>(p[4]),
                            as<float>(p[5]), s[1], as<float>(p[6]), as<float>(p[7]), s[2], s[3], s[4], s[5],
                            as<float>(p[8]), s[6], s[7], as<int32_t>(p[9]), as<int32_t>(p[10]), as<int32_t>(p[11]),
                            s[8]);
     }},
    {"qr_mamba2_scan", {64, 8, 4, 2, 8, 16, 96, 4, 512, 2},
     {false, false, false, false, false, false, false, false, false},
     [](P p, S s) {
       return qr_mamba2_scan(as<float>(p[0]), p[1], QR_FLOAT32, s[0], as<float>(p[2]), as<float>(p[3]),
                             as<float>(p[4]), s[1], s[2], s[3], s[4], s[5], s[6], as<float>(p[5]), s[7], s[8],
                             as<int32_t>(p[6]), as<int32_t>(p[7]), as<int32_t>(p[8]), s[9]);
     }},
    {"qr_gated_norm", {96, 64, 8, 2, 32}, {false, false, false, true},
     [](P p, S s) {
       return qr_gated_norm(p[0], QR_FLOAT32, as<float>(p[1]), s[0], p[2], s[1], as<float>(p[3]), 0, s[2], s[3],
                            s[4], 1e-5f, 0, 0);
     }},
    {"qr_gated_delta_scan", {4, 32, 8, 4, 2, 8, 16, 96, 4, 512, 2},
     {false, false, false, false, false, false, false, false, false},
     [](P p, S s) {
       return qr_gated_delta_scan(as<float>(p[0]), p[1], s[0], p[2], s[1], QR_FLOAT32, 1, as<float>(p[3]),
                                  as<float>(p[4]), 1.0f, 0.0f, s[2], s[3], s[4], s[5], s[6], s[7], as<float>(p[5]), s[8],
                                  s[9], as<int32_t>(p[6]), as<int32_t>(p[7]), as<int32_t>(p[8]), s[10]);
     }},
    {"qr_lightning_scan", {96, 8, 4, 8, 96, 4, 512, 2}, {false, false, false, false, false, false, false},
     [](P p, S s) {
       return qr_lightning_scan(as<float>(p[0]), p[1], QR_FLOAT32, s[0], as<float>(p[2]), s[1], s[2], s[3], s[4],
                                as<float>(p[3]), s[5], s[6], as<int32_t>(p[4]), as<int32_t>(p[5]), as<int32_t>(p[6]),
                                s[7]);
     }},
    {"qr_rg_lru_scan", {8, 32, 16, 96, 4, 512, 2}, {false, false, false, false, false, false, false, false, false},
     [](P p, S s) {
       return qr_rg_lru_scan(p[0], QR_FLOAT32, as<float>(p[1]), as<float>(p[2]), p[3], as<float>(p[4]), s[0], s[1], s[2],
                             s[3], as<float>(p[5]), s[4], s[5], as<int32_t>(p[6]), as<int32_t>(p[7]), as<int32_t>(p[8]),
                             s[6]);
     }},
    {"qr_copy_blocks", {1, 8, 64, 1}, {false, false},
     [](P p, S s) { return qr_copy_blocks(as<void*>(p[0]), s[0], s[1], s[2], as<int64_t>(p[1]), s[3]); }},
    {"qr_packed_rows", {64, 64, 2}, {false, false, false},
     [](P p, S s) { return qr_packed_rows(p[0], p[1], QR_FLOAT32, s[0], s[1], as<int64_t>(p[2]), s[2]); }},
    {"qr_embedding", {256, 64, 2}, {false, false, false},
     [](P p, S s) { return qr_embedding(p[0], p[1], s[0], s[1], as<int64_t>(p[2]), s[2]); }},
    {"qr_row_max", {2, 64}, {false, false, false},
     [](P p, S s) { return qr_row_max(as<float>(p[0]), as<int64_t>(p[1]), as<float>(p[2]), s[0], s[1]); }},
    {"qr_allowed_max", {2, 64, 1}, {false, false, false, false, false},
     [](P p, S s) {
       return qr_allowed_max(as<float>(p[0]), as<int64_t>(p[1]), as<float>(p[2]), s[0], s[1], as<int64_t>(p[3]),
                             as<int32_t>(p[4]), s[2]);
     }},
    {"qr_top_logprobs", {2, 64, 3}, {false, false, false, false, false, false},
     [](P p, S s) {
       return qr_top_logprobs(as<float>(p[0]), as<int64_t>(p[1]), as<int64_t>(p[2]), as<float>(p[3]), as<float>(p[4]),
                              as<int64_t>(p[5]), s[0], s[1], s[2]);
     }},
    {"qr_apply_penalties", {2, 64, 3}, {false, false, false, false, false, false, false, false},
     [](P p, S s) {
       return qr_apply_penalties(as<float>(p[0]), s[0], s[1], as<int64_t>(p[1]), as<int64_t>(p[2]), as<uint8_t>(p[3]),
                                 as<int64_t>(p[4]), s[2], as<float>(p[5]), as<float>(p[6]), as<float>(p[7]));
     }},
    {"qr_sample", {2, 64, 1, 1}, {false, false, false, false, false, false, false, true, true},
     [](P p, S s) {
       return qr_sample(as<int64_t>(p[0]), as<float>(p[1]), s[0], s[1], as<float>(p[2]), as<int64_t>(p[3]),
                        as<float>(p[4]), as<float>(p[5]), as<double>(p[6]), s[2], as<int64_t>(p[7]),
                        as<int32_t>(p[8]), s[3]);
     }},
    {"qr_scale_add", {32}, {false, false, true},
     [](P p, S s) { return qr_scale_add(p[0], p[1], p[2], QR_FLOAT32, 1.0f, s[0]); }},
    {"qr_soft_cap", {32}, {false}, [](P p, S s) { return qr_soft_cap(as<float>(p[0]), 1.0f, s[0]); }},
};

struct Attention {
  Memory memory;
  std::vector<float> out = std::vector<float>(4 * 2 * 64, 7.0f), query = std::vector<float>(4 * 2 * 64, 0.5f);
  std::vector<int32_t> starts{0, 1, 3}, lengths{17, 5}, blocks{0, 1, 2, 3};
  float scale = 0.1f, soft_cap = 0.0f;
  int64_t window = 0, stride = 2, sequences = 2, block = qr_cache_page(QR_FLOAT32, 16, 64);

  int32_t run() {
    return qr_paged_attention(out.data(), QR_FLOAT32, query.data(), QR_FLOAT32, memory.bytes, QR_FLOAT32, 4, 16,
                              qr_cache_page(QR_FLOAT32, 16, 64), block, starts.data(), lengths.data(), sequences,
                              blocks.data(), stride, 2, 1, 64, scale, soft_cap, window, nullptr, nullptr);
  }
};

void check_attention(const char* what, const std::function<void(Attention&)>& change) {
  Attention wrong;
  change(wrong);
  CHECK(wrong.run() == QR_EINVAL, "%s", what);
  for (float value : wrong.out) CHECK(value == 7.0f, "%s wrote", what);
}

}  // namespace

TEST(every_function_refuses_missing_memory_and_impossible_sizes) {
  for (const Call& call : kCalls) sweep(call);
  CHECK(qr_touch(nullptr, 1) == QR_EINVAL);
  CHECK(qr_touch(nullptr, -1) == QR_EINVAL);
  CHECK(qr_parallel(3, nullptr, nullptr) == QR_EINVAL);
  CHECK(qr_op_code(nullptr) == QR_EINVAL);
  CHECK(qr_route(nullptr, nullptr, nullptr, nullptr, 0, 1, nullptr) == QR_EINVAL);
  CHECK(qr_mixture_of_experts(nullptr, nullptr, nullptr, QR_FLOAT32, nullptr, QR_FLOAT32, nullptr, 0, nullptr, nullptr, nullptr) == QR_EINVAL);
  CHECK(qr_replay(nullptr, 3) == QR_EINVAL);
  CHECK(qr_replay(nullptr, -1) == QR_EINVAL);
}

TEST(memory_of_no_nodes_is_refused) {
  uint64_t nodes[16] = {1};
  CHECK(qr_interleave(nullptr, 4096, nodes, 1) == QR_EINVAL);
  CHECK(qr_interleave(nodes, 4096, nullptr, 1) == QR_EINVAL);
  for (int64_t bytes : {int64_t(0), int64_t(-1)}) CHECK(qr_interleave(nodes, bytes, nodes, 1) == QR_EINVAL);
  for (int64_t words : {0, -1, 17}) CHECK(qr_interleave(nodes, 4096, nodes, words) == QR_EINVAL);
}

TEST(impossible_numbers_of_threads_are_refused) {
  const int32_t before = qr_num_threads();
  for (int32_t wrong : {0, -1, INT_MIN, 513, INT_MAX}) {
    CHECK(qr_init(qr_isa_in_use(), wrong) == QR_EINVAL);
    CHECK(qr_set_num_threads(wrong) == QR_EINVAL);
  }
  CHECK(qr_num_threads() == before);
}

TEST(packed_weights_must_be_aligned) {
  Memory memory;
  std::vector<float> x(64);
  CHECK(qr_pack_linear(memory.bytes + 4, QR_FLOAT32, 4, 4, x.data(), QR_FLOAT32, 4, 4, 0) == QR_EINVAL);
  CHECK(qr_linear(x.data(), QR_FLOAT32, x.data(), QR_FLOAT32, memory.bytes + 4, QR_FLOAT32, 1, 4, 4, nullptr, QR_NONE,
                  nullptr) == QR_EINVAL);
  CHECK(memory.is_untouched());
}

TEST(norms_refuse_an_epsilon_that_is_no_number) {
  std::vector<float> x(32, 1.0f), out(32, 7.0f);
  for (float wrong : {kNan, kInfinite, -1.0f}) {
    CHECK(qr_rms_norm(out.data(), QR_FLOAT32, x.data(), QR_FLOAT32, nullptr, x.data(), 1, 32, wrong) == QR_EINVAL);
    CHECK(qr_layer_norm(out.data(), QR_FLOAT32, x.data(), QR_FLOAT32, x.data(), nullptr, 1, 32, wrong) == QR_EINVAL);
  }
  for (float wrong : {kNan, kInfinite, -1.0f}) {
    CHECK(qr_gated_norm(out.data(), QR_FLOAT32, x.data(), 32, x.data(), 32, x.data(), 0, 1, 1, 32, wrong, 0, 0) ==
          QR_EINVAL);
    CHECK(qr_mamba_derived(out.data(), QR_FLOAT32, x.data(), 1, 16, 8, nullptr, nullptr, nullptr, 1, wrong) ==
          QR_EINVAL);
  }
  for (float value : out) CHECK(value == 7.0f);
  CHECK(qr_soft_cap(x.data(), kNan, 32) == QR_EINVAL);
  CHECK(qr_soft_cap(x.data(), kInfinite, 32) == QR_EINVAL);
}

TEST(attention_refuses_what_the_scheduler_never_sends) {
  check_attention("rows that go backwards", [](Attention& a) { a.starts = {0, 3, 1}; });
  check_attention("rows before the first", [](Attention& a) { a.starts = {-2, 1, 3}; });
  check_attention("more rows than tokens", [](Attention& a) { a.lengths = {17, 1}; });
  check_attention("a negative length", [](Attention& a) { a.lengths = {-17, 5}; });
  check_attention("a context longer than its table", [](Attention& a) { a.lengths = {33, 5}; });
  check_attention("a block that is not there", [](Attention& a) { a.blocks = {0, 4, 2, 3}; });
  check_attention("a negative block", [](Attention& a) { a.blocks = {0, -1, 2, 3}; });
  for (float wrong : {kNan, kInfinite, -kInfinite, -1.0f}) {
    check_attention("scale", [&](Attention& a) { a.scale = wrong; });
    check_attention("soft cap", [&](Attention& a) { a.soft_cap = wrong; });
  }
  check_attention("blocks nearer than their pages", [](Attention& a) { --a.block; });
  check_attention("window", [](Attention& a) { a.window = -1; });
  Attention right;
  right.blocks[3] = 1 << 30;  // beyond what the second sequence has
  CHECK(right.run() == QR_OK);
}

TEST(attention_over_no_rows_is_nothing_to_do) {
  for (int32_t threads : {1, 2, 3}) {
    qr_init(qr_isa_in_use(), threads);
    Attention none;
    none.starts = {0, 0, 0};
    CHECK(none.run() == QR_OK);
    none.lengths = {0, 0};
    CHECK(none.run() == QR_OK);
    none.sequences = 0;
    CHECK(none.run() == QR_OK);
    for (float value : none.out) CHECK(value == 7.0f);
    none.starts = {0, 0, 1};  // one among them that has
    none.lengths = {5, 1};
    none.sequences = 2;
    CHECK(none.run() == QR_OK);
    CHECK(none.out[0] != 7.0f);
  }
  qr_init(qr_isa_in_use(), 2);
}

TEST(ids_slots_and_draws_out_of_range_are_refused) {
  Memory memory;
  std::vector<float> x(64, 0.5f), out(64, 7.0f), one{1.0f};
  std::vector<int64_t> ids(4, 7), zero{0};
  for (int64_t wrong : {int64_t(-1), int64_t(4), INT64_MAX, INT64_MIN}) {
    CHECK(qr_embedding(out.data(), x.data(), 64, 4, &wrong, 1) == QR_EINVAL);
    CHECK(qr_packed_rows(out.data(), memory.bytes, QR_FLOAT32, 4, 4, &wrong, 1) == QR_EINVAL);
    const int64_t pair[] = {0, wrong}, slot = wrong < 0 ? wrong : wrong * 16;
    void* cache = memory.bytes;
    CHECK(qr_copy_blocks(&cache, 1, 4, 16, pair, 1) == QR_EINVAL);
    CHECK(qr_rope_and_cache(out.data(), x.data(), QR_FLOAT32, zero.data(), nullptr, nullptr, nullptr, memory.bytes,
                            QR_FLOAT32, 4, 16, qr_cache_page(QR_FLOAT32, 16, 16), qr_cache_page(QR_FLOAT32, 16, 16), &slot, 1, 1, 1, 16, 0, 0, 1e-5f,
                            nullptr, nullptr) == QR_EINVAL);
    CHECK(qr_rope_and_cache(out.data(), x.data(), QR_FLOAT32, zero.data(), nullptr, nullptr, nullptr, memory.bytes,
                            QR_FLOAT32, 4, 16, qr_cache_page(QR_FLOAT32, 16, 16), qr_cache_page(QR_FLOAT32, 16, 16), &slot, 1, 1, 0, 16, 0, 0, 1e-5f,
                            nullptr, nullptr) == QR_EINVAL);  // queries alone, but of a slot that is not there
    CHECK(qr_top_logprobs(out.data(), ids.data(), ids.data(), out.data(), x.data(), &wrong, 1, 4, 1) == QR_EINVAL);
    const uint8_t in_prompt = 1;
    const int64_t tokens[] = {0, wrong}, rows[] = {0, 0}, counts[] = {1, 1};
    const uint8_t both[] = {in_prompt, in_prompt};
    CHECK(qr_apply_penalties(out.data(), 1, 4, rows, tokens, both, counts, 2, x.data(), x.data(), x.data()) ==
          QR_EINVAL);  // the first pair is right, and is not applied either
  }
  const double half = 0.5;
  const auto sample = [&](float temperature, int64_t top_k, float top_p, float min_p, double uniform) {
    return qr_sample(ids.data(), x.data(), 1, 4, &temperature, &top_k, &top_p, &min_p, &uniform, 1, nullptr, nullptr, 0);
  };
  for (float wrong : {0.0f, -1.0f, kNan, kInfinite}) CHECK(sample(wrong, 0, 1, 0, half) == QR_EINVAL);
  for (float wrong : {-1.0f, kNan, 1.5f}) {
    CHECK(sample(1, 0, wrong, 0, half) == QR_EINVAL);
    CHECK(sample(1, 0, 1, wrong, half) == QR_EINVAL);
    CHECK(sample(1, 0, 1, 0, double(wrong)) == QR_EINVAL);
  }
  CHECK(sample(1, -1, 1, 0, half) == QR_EINVAL);
  for (int64_t wrong : {int64_t(-2), int64_t(1), INT64_MAX, INT64_MIN}) {
    const int32_t mask = -1;
    const float warm = 1, all_of_it = 1, none = 0;
    const int64_t off = 0;
    CHECK(qr_sample(ids.data(), x.data(), 1, 4, &warm, &off, &all_of_it, &none, &half, 1, &wrong, &mask, 1) ==
          QR_EINVAL);
    CHECK(qr_allowed_max(out.data(), ids.data(), x.data(), 1, 4, &wrong, &mask, 1) == QR_EINVAL);
  }
  for (float value : out) CHECK(value == 7.0f);
  for (int64_t id : ids) CHECK(id == 7);
  CHECK(memory.is_untouched());
}
