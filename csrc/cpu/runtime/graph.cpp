// Replaying a recorded run of ops: one call instead of some hundred, so that the host's working set is touched once a
// step and not between any two ops, when the weights that stream by have just pushed it out of the caches.
#include <cstring>
#include <utility>

#include "quire_cpu.h"

namespace qr {
namespace {

// An argument as it was recorded: integers and pointers as they are, floats as the bits of a double.
template <class T>
T from_word(int64_t word) {
  if constexpr (std::is_pointer_v<T>) {
    return reinterpret_cast<T>(word);
  } else if constexpr (std::is_floating_point_v<T>) {
    double value;
    std::memcpy(&value, &word, 8);
    return T(value);
  } else {
    return T(word);
  }
}

template <class... A, size_t... I>
int32_t call(int32_t (*function)(A...), const int64_t* words, std::index_sequence<I...>) {
  return function(from_word<A>(words[I])...);
}

template <class... A>
constexpr int64_t count_of(int32_t (*)(A...)) {
  return sizeof...(A);
}

template <auto function>
struct Replayed;
template <class... A, int32_t (*function)(A...)>
struct Replayed<function> {
  static int32_t run(const int64_t* words) { return call(function, words, std::index_sequence_for<A...>()); }
};

struct Entry {
  const char* name;
  int64_t num_arguments;
  int32_t (*run)(const int64_t* words);
};

#define QR_ENTRY(function) Entry{#function, count_of(function), Replayed<function>::run}
constexpr Entry kEntries[] = {
    QR_ENTRY(qr_embedding),          QR_ENTRY(qr_packed_rows),
    QR_ENTRY(qr_block_rows),
    QR_ENTRY(qr_linear),             QR_ENTRY(qr_gated_linear),
    QR_ENTRY(qr_linear_quantized),   QR_ENTRY(qr_gated_linear_quantized),
    QR_ENTRY(qr_linear_max),
    QR_ENTRY(qr_rms_norm),           QR_ENTRY(qr_layer_norm),
    QR_ENTRY(qr_scale_add),          QR_ENTRY(qr_soft_cap),
    QR_ENTRY(qr_rope_and_cache),     QR_ENTRY(qr_paged_attention),
    QR_ENTRY(qr_mixture_of_experts),
    QR_ENTRY(qr_causal_conv),        QR_ENTRY(qr_mamba_derived),
    QR_ENTRY(qr_mamba_scan),         QR_ENTRY(qr_mamba2_scan),
    QR_ENTRY(qr_gated_delta_scan),   QR_ENTRY(qr_lightning_scan),
    QR_ENTRY(qr_rg_lru_scan),        QR_ENTRY(qr_gated_norm),
    QR_ENTRY(qr_latent_qkv),         QR_ENTRY(qr_latent_values),
    QR_ENTRY(qr_select_tokens),      QR_ENTRY(qr_selected_attention),
    QR_ENTRY(qr_select_blocks),      QR_ENTRY(qr_compress),
    QR_ENTRY(qr_select_entries),     QR_ENTRY(qr_compressed_attention),
    QR_ENTRY(qr_rotate_last),        QR_ENTRY(qr_store_rows),
    QR_ENTRY(qr_read_streams),       QR_ENTRY(qr_write_streams),
};
constexpr int64_t kNumEntries = sizeof(kEntries) / sizeof(Entry);

}  // namespace
}  // namespace qr

using namespace qr;

extern "C" {

int32_t qr_op_code(const char* name) {
  if (name == nullptr) return QR_EINVAL;
  for (int64_t i = 0; i < kNumEntries; ++i)
    if (std::strcmp(kEntries[i].name, name) == 0) return int32_t(i);
  return QR_EINVAL;
}

int32_t qr_replay(const int64_t* words, int64_t num_words) {
  if (num_words < 0 || (num_words > 0 && words == nullptr)) return QR_EINVAL;
  const int64_t* end = words + num_words;
  while (words < end) {
    if (*words < 0 || *words >= kNumEntries) return QR_EINVAL;
    const Entry& entry = kEntries[*words++];
    if (end - words < entry.num_arguments) return QR_EINVAL;
    const int32_t status = entry.run(words);
    if (status != QR_OK) return status;
    words += entry.num_arguments;
  }
  return QR_OK;
}

}  // extern "C"
