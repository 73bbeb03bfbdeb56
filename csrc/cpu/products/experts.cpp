// A mixture of experts: rows are routed, sorted by expert, and multiplied expert by expert; the pieces of all experts
// are handed out together. A wave is as many experts as fit its memory, whose outputs are added before the next one's.
//
// Row invariance: a row is routed by itself, products keep its bits in any company, and what its experts give is added
// in the order of their indices in float32, whatever the waves.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "../arguments.h"
#include "../elements.h"
#include "gemm.h"
#include "../kernels.h"
#include "routing.h"
#include "../runtime/threads.h"

namespace qr {
namespace {

// What a wave works with, unless a single expert's rows take more.
constexpr int64_t kWaveBytes = 16 << 20;
// Rows of an expert that a wave takes at most: its weights are read again for those left, a hundredth of their products.
constexpr int64_t kMostRows = 512;
constexpr int64_t kRoutedRows = 16;            // of a piece
constexpr int64_t kPieceElements = 16 * 1024;  // prepared or added up (3-5 us)

// Up to so many rows of an expert are prepared one by one: pieces cut them into twos and threes, and it takes as long to
// turn two round together as sixteen.
constexpr int64_t kFewRows = 16;

// Memory cut into arrays, in order; without any, only their bytes are counted.
class Room {
 public:
  explicit Room(void* memory) : begin(static_cast<char*>(memory)) {}
  template <class T = char>
  T* take(int64_t count) {
    T* out = begin == nullptr ? nullptr : reinterpret_cast<T*>(begin + used);
    used += round_up(count * int64_t(sizeof(T)), 64);
    return out;
  }
  int64_t bytes() const { return used; }

 private:
  char* begin;
  int64_t used = 0;
};

struct Mixture {
  const qr_mixture& weights;
  const qr_routing& routing;
  const qr_gating& gating;
  void* out;
  const char* x;
  const void* routed;  // what the router reads, of routed_dtype
  const void* residual;
  const int32_t* given;  // [rows, num_chosen]: the experts of each row, where the router only weighs them
  int32_t dtype, routed_dtype;
  int64_t rows;

  int64_t num_experts() const { return weights.num_experts + (weights.has_shared != 0); }
  int64_t choices() const { return routing.num_chosen + (weights.has_shared != 0); }  // of a row
  int64_t places() const { return rows * choices(); }
  int64_t num_others() const { return weights.num_identities + weights.num_skips; }  // to choose from behind the experts
  int64_t num_candidates() const { return weights.num_experts + num_others(); }
  int64_t num_logits() const { return num_candidates() + (weights.has_shared_gate != 0); }
  bool weighs_input() const { return routing.weighs_input != 0; }

  Gating between() const {
    return {int32_t(gating.activation), float(gating.limit), float(gating.slope), float(gating.offset)};
  }
  int64_t first_outputs(int64_t size) const { return gating.is_gated != 0 ? 2 * size : size; }
};

// Rows [begin, begin + rows) of all that are sorted by expert, all of one expert.
struct Batch {
  const qr_expert* expert;
  int64_t begin, rows;
};

// Who goes where. A place is a (row, expert) pair in the order of experts, then rows.
struct Routed {
  float *logits, *weights;  // weights: [rows, choices], in the order of experts
  float* input_weights;      // the same of what experts read; where none is weighed, there are none
  int32_t *chosen, *places;  // [rows, choices]
  int32_t* choice_of;        // [places]: which one of [rows, choices]
  int64_t* ends;             // [candidates and the shared expert]: of their places
  Batch* batches;
  int64_t num_batches = 0;
  int64_t end = 0;  // of the places of experts; those of identities and skips come behind
  float* total;  // [rows, out_features]

  Routed(const Mixture& m, Room& room)
      : logits(room.take<float>(m.rows * m.num_logits())), weights(room.take<float>(m.places())),
        input_weights(m.weighs_input() ? room.take<float>(m.places()) : nullptr), chosen(room.take<int32_t>(m.places())), places(room.take<int32_t>(m.places())),
        choice_of(room.take<int32_t>(m.places())), ends(room.take<int64_t>(m.num_experts() + m.num_others())),
        batches(room.take<Batch>(std::min(m.places(), m.num_experts() + m.places() / kMostRows))),
        total(room.take<float>(m.rows * m.weights.out_features)) {}
};

// ---- routing ----

// A row's choices in the order of experts, the shared one last.
void finish_choice(const Mixture& m, int32_t* chosen, float* weights, const float* logits) {
  for (int64_t i = 1; i < m.routing.num_chosen; ++i)
    for (int64_t j = i; j > 0 && chosen[j] < chosen[j - 1]; --j) {
      std::swap(chosen[j], chosen[j - 1]);
      std::swap(weights[j], weights[j - 1]);
    }
  if (m.weights.has_shared == 0) return;
  chosen[m.routing.num_chosen] = int32_t(m.weights.num_experts);
  const float gate = m.weights.has_shared_gate != 0 ? sigmoid_of(logits[m.weights.num_experts]) : 1.0f;
  weights[m.routing.num_chosen] = gate * float(m.routing.shared_factor);
}

int32_t route(const Mixture& m, Routed& routed) {
  const qr_mixture& w = m.weights;
  const int32_t status = linear(weight_of(w.router, m.routed_dtype, w.router_features), routed.logits, QR_FLOAT32, m.routed,
                                m.routed_dtype, m.rows, m.num_logits(), w.router_features, w.router.bias, QR_NONE, nullptr);
  if (status != QR_OK) return status;
  std::atomic<int32_t> failed{QR_OK};
  parallel_for(divide_up(m.rows, kRoutedRows), [&](int64_t piece) {
    void* memory = scratch(2, m.num_candidates() * 16);
    if (memory == nullptr) return failed.store(QR_ENOMEM);
    for (int64_t row = piece * kRoutedRows; row < std::min(m.rows, (piece + 1) * kRoutedRows); ++row) {
      const float* logits = routed.logits + row * m.num_logits();
      int32_t* chosen = routed.chosen + row * m.choices();
      float* weights = routed.weights + row * m.choices();
      if (m.given != nullptr) std::copy_n(m.given + row * m.routing.num_chosen, m.routing.num_chosen, chosen);
      if (m.given == nullptr)
        route_row(chosen, weights, logits, w.choice_bias, m.num_candidates(), m.routing, memory);
      else
        weigh_given(weights, m.given + row * m.routing.num_chosen, logits, m.num_candidates(), m.routing, memory);
      for (int64_t i = 0; w.scales != nullptr && i < m.routing.num_chosen; ++i) weights[i] *= w.scales[chosen[i]];
      finish_choice(m, chosen, weights, logits);
      if (!m.weighs_input()) continue;
      std::fill_n(std::copy_n(weights, m.routing.num_chosen, routed.input_weights + row * m.choices()),
                  m.choices() - m.routing.num_chosen, 1.0f);
      std::fill_n(weights, m.routing.num_chosen, 1.0f);
    }
  });
  return failed.load();
}

// Sort the choices of all rows by expert, and cut each expert's rows into batches.
void sort_by_expert(const Mixture& m, Routed& routed) {
  const int64_t num_experts = m.num_experts(), num_all = num_experts + m.num_others();
  std::fill_n(routed.ends, num_all, 0);
  for (int64_t i = 0; i < m.places(); ++i) ++routed.ends[routed.chosen[i]];
  int64_t begin = 0;
  for (int64_t expert = 0; expert < num_all; ++expert) {
    const int64_t end = begin + routed.ends[expert];
    for (int64_t at = begin; expert < num_experts && at < end; at += kMostRows)
      routed.batches[routed.num_batches++] = {m.weights.experts + expert, at, std::min(kMostRows, end - at)};
    routed.ends[expert] = begin;
    begin = end;
    if (expert < num_experts) routed.end = end;
  }
  for (int64_t i = 0; i < m.places(); ++i) {
    const int64_t place = routed.ends[routed.chosen[i]]++;
    routed.places[i] = int32_t(place);
    routed.choice_of[place] = int32_t(i);
  }
}

// ---- one wave ----

// A batch at work: its two products, and the rows that they read and write.
struct Job {
  const Batch* batch;
  Product *gate_up, *down;
  bool is_direct;  // the first product ends with what stands between the two; otherwise its sums come first
  char *rows, *x, *inner, *prepared;  // rows: what x is prepared from; null: each piece gathers its own
  float* sums;

  Job() = default;
  Job(const Mixture& m, const Batch& batch, Room& room) : batch(&batch) {
    const int64_t size = batch.expert->size, depth = m.weights.in_features;
    const Gemm& first = *weight_of(batch.expert->gate_up, m.dtype, depth).gemm;
    const Gemm& second = *weight_of(batch.expert->down, m.dtype, size).gemm;
    is_direct = m.between().is_plain() && (m.gating.is_gated == 0 || size % kPanel == 0);
    const int64_t x_bytes = first.prepared_bytes(batch.rows, depth, m.dtype);
    rows = m.weighs_input() || x_bytes == 0 ? room.take(batch.rows * depth * bytes_of(m.dtype)) : nullptr;
    x = x_bytes != 0 ? room.take(x_bytes) : rows;
    sums = room.take<float>(is_direct ? 0 : batch.rows * m.first_outputs(size));
    inner = room.take(batch.rows * size * bytes_of(m.dtype));
    const int64_t inner_bytes = second.prepared_bytes(batch.rows, size, m.dtype);
    prepared = inner_bytes != 0 ? room.take(inner_bytes) : inner;
  }
};

struct Wave {
  const Mixture& m;
  const Routed& routed;
  int64_t first_batch, num_batches, begin, end;  // begin, end: places
  float* outputs;                                // [end - begin, out_features]
  Product* products;                             // gate_up of all batches, then down of all
  Job* jobs;

  Wave(const Mixture& m, const Routed& routed, int64_t first, int64_t count, Room& room)
      : m(m), routed(routed), first_batch(first), num_batches(count), begin(routed.batches[first].begin),
        end(last().begin + last().rows), outputs(room.take<float>((end - begin) * m.weights.out_features)),
        products(room.take<Product>(2 * count)), jobs(room.take<Job>(count)) {
    for (int64_t i = 0; i < count; ++i) {
      const Job job(m, routed.batches[first + i], room);
      if (jobs != nullptr) set(jobs[i] = job, i);
    }
  }

  const Batch& last() const { return routed.batches[first_batch + num_batches - 1]; }
  bool is_last() const { return m.num_others() == 0 && end == m.places(); }

  void set(Job& job, int64_t index) {
    const Batch& batch = *job.batch;
    const int64_t size = batch.expert->size;
    const Weight first = weight_of(batch.expert->gate_up, m.dtype, m.weights.in_features);
    const Weight second = weight_of(batch.expert->down, m.dtype, size);
    *(job.gate_up = products + index) = {first.gemm, first.args, 0, 0};
    GemmArgs& gate_up = job.gate_up->args;
    gate_up.x = job.x;
    gate_up.rows = batch.rows;
    gate_up.n = job.is_direct ? size : m.first_outputs(size);
    gate_up.up_panels = job.is_direct && m.gating.is_gated != 0 ? size / kPanel : 0;
    gate_up.activation = job.is_direct ? int32_t(m.gating.activation) : int32_t(QR_NONE);
    gate_up.out = job.is_direct ? job.inner : reinterpret_cast<char*>(job.sums);
    gate_up.out_dtype = job.is_direct ? m.dtype : int32_t(QR_FLOAT32);
    *(job.down = products + num_batches + index) = {second.gemm, second.args, 0, 0};
    GemmArgs& down = job.down->args;
    down.x = job.prepared;
    down.rows = batch.rows;
    down.n = m.weights.out_features;
    down.out = outputs + (batch.begin - begin) * m.weights.out_features;
    down.out_dtype = QR_FLOAT32;
  }

  void run() {
    for_each_range(m.weights.in_features, [&](const Job& job, int64_t from, int64_t to) { gather(job, from, to); });
    qr::run(products, num_batches);
    for_each_range(last().expert->size, [&](const Job& job, int64_t from, int64_t to) { prepare_inner(job, from, to); });
    qr::run(products + num_batches, num_batches);
    add_up();
  }

  // Call body(job, from, to) for the rows [from, to) of each batch, some at a time; `elements`: of a row, about.
  template <class Body>
  void for_each_range(int64_t elements, const Body& body) {
    const int64_t each = std::clamp<int64_t>(kPieceElements / elements, 1, 32);
    parallel_for(divide_up(end - begin, each), [&](int64_t piece) {
      int64_t place = begin + piece * each;
      const int64_t behind = std::min(end, place + each);
      const Job* job = std::upper_bound(jobs, jobs + num_batches, place, [](int64_t at, const Job& other) {
                         return at < other.batch->begin;
                       }) - 1;
      for (; place < behind; ++job) {
        const Batch& batch = *job->batch;
        const int64_t to = std::min(batch.rows, behind - batch.begin);
        body(*job, place - batch.begin, to);
        place = batch.begin + to;
      }
    });
  }

  void gather(const Job& job, int64_t from, int64_t to) const {
    const int64_t bytes = m.weights.in_features * bytes_of(m.dtype);
    if (job.rows == nullptr && (job.batch->rows <= kFewRows || to - from == 1)) {
      for (int64_t row = from; row < to; ++row)
        prepare(*job.gate_up, job.x, source_of(job, row) - row * bytes, row, row + 1);
      return;
    }
    alignas(64) char own[kPieceElements * 4];
    char* rows = job.rows == nullptr ? own : job.rows + from * bytes;
    for (int64_t row = from; row < to; ++row) fetch(job, row, rows + (row - from) * bytes);
    if (job.x != job.rows) prepare(*job.gate_up, job.x, rows - from * bytes, from, to);
  }

  int64_t choice_of(const Job& job, int64_t row) const { return routed.choice_of[job.batch->begin + row]; }
  const char* source_of(const Job& job, int64_t row) const {
    return m.x + choice_of(job, row) / m.choices() * m.weights.in_features * bytes_of(m.dtype);
  }

  void fetch(const Job& job, int64_t row, char* to) const {
    const int64_t depth = m.weights.in_features;
    if (m.weighs_input())
      kernels()->scale_add(to, source_of(job, row), nullptr, m.dtype, routed.input_weights[choice_of(job, row)], depth);
    else
      std::memcpy(to, source_of(job, row), size_t(depth * bytes_of(m.dtype)));
  }

  void prepare_inner(const Job& job, int64_t from, int64_t to) const {
    const int64_t size = job.batch->expert->size;
    for (int64_t row = from; row < to && !job.is_direct; ++row) {
      const float* sums = job.sums + row * m.first_outputs(size);
      kernels()->gate(job.inner + row * size * bytes_of(m.dtype), m.dtype, sums,
                      m.gating.is_gated != 0 ? sums + size : nullptr, size, m.between());
    }
    if (job.prepared != job.inner) prepare(*job.down, job.prepared, job.inner, from, to);
  }

  // Rows [from, to) of a batch, that lie behind one another in `source`, in the form that its product reads.
  void prepare(const Product& product, char* target, const char* source, int64_t from, int64_t to) const {
    const GemmArgs& args = product.args;
    product.gemm->prepare(target, source, m.dtype, args.rows, args.k, from, to, args.order);
  }

  void add_up() {
    const int64_t n = m.weights.out_features;
    const int64_t each = std::clamp<int64_t>(kPieceElements / (n * m.choices()), 1, 32);
    parallel_for(divide_up(m.rows, each), [&](int64_t piece) {
      for (int64_t row = piece * each; row < std::min(m.rows, (piece + 1) * each); ++row) add_up(row, n);
    });
  }

  void add_up(int64_t row, int64_t n) const {
    const int64_t at = row * m.choices();
    const int32_t *own = routed.places + at, *own_end = own + m.choices();
    const int32_t *first = std::lower_bound(own, own_end, begin), *behind = std::lower_bound(first, own_end, end);
    if (first == behind && !is_last()) return;
    float* total = routed.total + row * n;
    WeighedSum sum{total, QR_FLOAT32, first == own ? nullptr : total, outputs - begin * n, first,
                   routed.weights + at + (first - own), behind - first, n, nullptr};
    if (is_last()) {
      sum.dtype = m.dtype;
      sum.out = static_cast<char*>(m.out) + row * n * bytes_of(m.dtype);
      if (m.residual != nullptr) sum.residual = static_cast<const char*>(m.residual) + row * n * bytes_of(m.dtype);
    }
    kernels()->weighed_sum(sum);
  }
};

// What follows the waves where there are more candidates than experts: x times the sum of the weights of identities, and
// the residual.
int32_t add_others(const Mixture& m, const Routed& routed) {
  const int64_t n = m.weights.out_features, bytes = n * bytes_of(m.dtype);
  std::atomic<int32_t> failed{QR_OK};
  parallel_for(divide_up(m.rows, kRoutedRows), [&](int64_t piece) {
    auto* wide = static_cast<float*>(scratch(2, n * int64_t(sizeof(float))));
    if (wide == nullptr) return failed.store(QR_ENOMEM);
    for (int64_t row = piece * kRoutedRows; row < std::min(m.rows, (piece + 1) * kRoutedRows); ++row) {
      const int32_t *own = routed.places + row * m.choices(), *own_end = own + m.choices();
      const int64_t of_experts = std::lower_bound(own, own_end, routed.end) - own;
      const int32_t* chosen = routed.chosen + row * m.choices();
      const auto first_skip = int32_t(m.weights.num_experts + m.weights.num_identities);
      const int64_t of_identities = std::lower_bound(chosen, chosen + m.choices(), first_skip) - chosen;
      float weight = 0.0f;
      for (int64_t i = of_experts; i < of_identities; ++i) weight += routed.weights[row * m.choices() + i];
      const char* x = m.x + row * bytes;
      for (int64_t i = 0; of_experts < of_identities && i < n; ++i) wide[i] = read_float(x, m.dtype, i);
      const int32_t place = 0;
      const void* residual = m.residual == nullptr ? nullptr : static_cast<const char*>(m.residual) + row * bytes;
      kernels()->weighed_sum({static_cast<char*>(m.out) + row * bytes, m.dtype,
                              of_experts == 0 ? nullptr : routed.total + row * n, wide, &place, &weight,
                              of_experts < of_identities ? 1 : 0, n, residual});
    }
  });
  return failed.load();
}

// Batches from `first` on that one wave takes.
int64_t size_of_wave(const Mixture& m, const Routed& routed, int64_t first) {
  int64_t count = 0, bytes = 0;
  while (first + count < routed.num_batches) {
    Room own(nullptr);
    const Wave wave(m, routed, first + count, 1, own);
    bytes += own.bytes();
    if (count > 0 && bytes > kWaveBytes) break;
    ++count;
  }
  return count;
}

int32_t run(const Mixture& m) {
  Room counted(nullptr);
  const Routed unplaced(m, counted);
  void* memory = scratch(5, counted.bytes());
  if (memory == nullptr) return QR_ENOMEM;
  Room room(memory);
  Routed routed(m, room);
  const int32_t status = route(m, routed);
  if (status != QR_OK) return status;
  sort_by_expert(m, routed);
  for (int64_t first = 0; first < routed.num_batches;) {
    const int64_t count = size_of_wave(m, routed, first);
    Room needed(nullptr);
    const Wave unplaced_wave(m, routed, first, count, needed);
    void* wave_memory = scratch(6, needed.bytes());
    if (wave_memory == nullptr) return QR_ENOMEM;
    Room wave_room(wave_memory);
    Wave(m, routed, first, count, wave_room).run();
    first += count;
  }
  return m.num_others() == 0 ? int32_t(QR_OK) : add_others(m, routed);
}

// ---- arguments ----

bool is_gating(const qr_gating& g) {
  return (g.is_gated == 0 || g.is_gated == 1) && g.activation >= QR_NONE && g.activation <= QR_RELU2 &&
         float(g.limit) > 0 && float(g.slope) > 0 && is_finite(float(g.slope)) && is_finite(float(g.offset));
}

bool are_weights(const Mixture& m) {
  const qr_mixture& w = m.weights;
  const int64_t most = INT32_MAX - 1;
  if (w.num_experts < 1 || w.num_experts > most || !are_sizes(w.in_features, w.out_features)) return false;
  if (w.experts == nullptr || (w.has_shared_gate != 0 && w.has_shared == 0)) return false;
  if (w.num_identities < 0 || w.num_identities > most - w.num_experts) return false;
  if (w.num_skips < 0 || w.num_skips > most - w.num_experts - w.num_identities) return false;
  if (m.num_others() > 0 && (w.has_shared != 0 || w.scales != nullptr || m.weighs_input())) return false;
  if (w.num_identities > 0 && w.in_features != w.out_features) return false;
  if (!are_sizes(m.rows, w.router_features) || (m.routed == m.x && w.router_features != w.in_features)) return false;
  if (!is_weight_of(w.router, m.num_logits(), w.router_features)) return false;
  for (int64_t i = 0; i < w.num_experts + (w.has_shared != 0); ++i) {
    const qr_expert& expert = w.experts[i];
    if (expert.size < 1 || !are_sizes(2, expert.size) ||
        !is_weight_of(expert.gate_up, m.first_outputs(expert.size), w.in_features) ||
        !is_weight_of(expert.down, w.out_features, expert.size))
      return false;
  }
  return true;
}

bool are_given(const Mixture& m) {
  if (m.given == nullptr) return true;
  if (m.routing.near >= 0) return false;
  return std::all_of(m.given, m.given + m.rows * m.routing.num_chosen,
                     [&](int32_t expert) { return expert >= 0 && expert < m.num_candidates(); });
}

bool is_right(const Mixture& m) {
  if (!is_dtype(m.dtype) || !is_dtype(m.routed_dtype) || !is_gating(m.gating) || !are_weights(m)) return false;
  if (!is_routing(m.routing, m.num_candidates()) || !are_sizes(m.rows, m.choices()) || m.places() > INT32_MAX)
    return false;
  if (!are_given(m)) return false;
  return are_sizes(m.rows, m.weights.in_features) && are_sizes(m.rows, m.weights.out_features, m.choices()) &&
         are_sizes(m.rows, m.num_logits()) && (m.rows == 0 || are_there(m.out, m.x));
}

}  // namespace
}  // namespace qr

using namespace qr;

extern "C" int32_t qr_mixture_of_experts(void* out, const void* x, const void* routed, int32_t routed_dtype,
                                         const int32_t* given, int32_t dtype, const void* residual, int64_t rows,
                                         const qr_mixture* mixture, const qr_routing* routing, const qr_gating* gating) {
  if (kernels() == nullptr) return QR_ESTATE;
  if (!are_there(mixture, routing, gating)) return QR_EINVAL;
  const bool is_apart = routed != nullptr;
  const Mixture m{*mixture, *routing, *gating, out, static_cast<const char*>(x), is_apart ? routed : x,
                  residual, given, dtype, is_apart ? routed_dtype : dtype, rows};
  if (!is_right(m)) return QR_EINVAL;
  return rows == 0 ? int32_t(QR_OK) : run(m);
}
