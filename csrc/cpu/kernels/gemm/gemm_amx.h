// bfloat16 times bfloat16 by AMX tiles: 16 rows x 32 k times 32 k x 16 columns per instruction.
//
// Up to 32 rows: an accumulator for each half panel and each sixteen rows, and the weight streams through once. One row
// costs what sixteen cost, and two chains of 52 cycles still consume 100 GB/s a core, three times what memory gives.
// More rows: 2 x 2 accumulators, and blocking for the caches.
#pragma once

#include "gemm.h"

namespace qr {
namespace {

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
  void set(int tile, int num_rows, int num_bytes) {
    rows[tile] = uint8_t(num_rows);
    bytes[tile] = uint16_t(num_bytes);
  }
  void use() const {
    // gcc 12 drops the stores above without the barrier, and the load faults
    asm volatile("" ::"r"(this) : "memory");
    _tile_loadconfig(this);
  }
};

// Tile loads are invisible to the compiler's view of memory: order them after what was stored before.
QR_INLINE void memory_barrier() { asm volatile("" ::: "memory"); }

constexpr int64_t kTileBytes = 1024;
constexpr int64_t kTilePrefetch = 1024;  // ahead of the stream: 17 GB/s a core against 14 at 8 KiB, which crowds L1
constexpr int64_t kInnerSteps = 16;      // k steps of 32 whose weights stay in L1 while rows pass: 32 KiB
// Of x, what stays in L2 while panels pass: all of K, or a stretch of it beside the sums of all panels of a piece. It
// may fill a quarter of L2 and no more: pages of 4 KiB fall on its sets by chance, and where too many fall on one, x is
// read from L3 in every pass.
constexpr int64_t kWholeBytes = 1 << 19, kStretchBytes = 1 << 18;

// Up to 32 rows whose K needs no padding are read where they are. Others are copied into tiles (QR_BFLOAT16_TILES),
// zeros where rows or k end, unless the op before wrote them so.
bool reads_in_place(int64_t rows, int64_t k) { return rows <= 32 && k % kDepth == 0; }

int64_t tile_rows_bytes(int64_t rows, int64_t k, int32_t) {
  return reads_in_place(rows, k) ? 0 : round_up(rows, 32) * round_up(k, kDepth) * 2;
}

void tile_rows(void* prepared, const void* x, int32_t, int64_t rows, int64_t k, int64_t begin, int64_t end,
               const int32_t*) {
  const int64_t steps = divide_up(k, kDepth), whole = k / kDepth;
  if (end == rows) end = round_up(rows, 32);
  const Places places(steps * kDepth, QR_BFLOAT16_TILES);
  for (int64_t row = begin; row < end; ++row) {
    const auto* in = static_cast<const uint16_t*>(x) + row * k;
    auto* out = static_cast<uint16_t*>(prepared) + places.row(row);
    for (int64_t s = 0; s < steps; ++s) {
      __m512i values = _mm512_setzero_si512();
      if (row < rows && s < whole)
        values = _mm512_loadu_si512(in + s * kDepth);
      else if (row < rows)
        values = _mm512_maskz_loadu_epi16((1u << (k - whole * kDepth)) - 1, in + s * kDepth);
      _mm512_storeu_si512(out + s * places.step, values);
    }
  }
}

// Sums that are complete but not yet output: they are worked off between the products of what comes next, for the
// vector units are idle then. They lie as [2 tiles of rows][2 tiles of columns][16][16] and must stay until output.
class Unfinished {
 public:
  explicit Unfinished(const GemmArgs& args) : g(args) {}
  void set(int64_t row_begin, int64_t row_end, int64_t panel_index, const float* own, const float* up_own) {
    complete();
    row = first = row_begin;
    end = row_end;
    panel = panel_index;
    sums = own;
    up_sums = up_own;
  }
  // Some of the rows: what is left of a tile's sixteen at most.
  void advance(int64_t rows) {
    if (row >= end) return;
    const int64_t in_tile = (row - first) % 16, at = (row - first) / 16 * 512 + in_tile * 16;
    if (rows > 16 - in_tile) rows = 16 - in_tile;
    const int64_t stop = row + rows < end ? row + rows : end;
    memory_barrier();
    finish<TileSums>(g, row, stop, panel, sums + at, up_sums + at);
    row = stop;
  }
  void complete() {
    while (row < end) advance(16);
  }

 private:
  const GemmArgs& g;
  int64_t first = 0, row = 0, end = 0, panel = 0;
  const float *sums = nullptr, *up_sums = nullptr;
};

// How the steps of 32 k lie in a panel: each in one piece, or in the parts of a compact one.
template <bool kCompact>
struct PanelLayout {
  static constexpr int64_t kParts = kCompact ? kCompactParts : 1;
  static constexpr int64_t kPart = kCompact ? kCompactPart : kExpandedStep;  // bytes
  int64_t begin = 0, part = 0, step = kExpandedStep;  // see CompactPlaces

  explicit PanelLayout(const GemmArgs& g) {
    if (!kCompact) return;
    const CompactPlaces places = CompactPlaces::of(static_cast<const char*>(g.packed), g.k);
    begin = places.begin;
    part = places.part;
    step = places.step;
  }
  const char* at(const char* panel, int64_t index) const { return panel + begin + index * step; }
  // Call body(line) for the lines [first, last) of the kParts * kPart bytes of the step that begins at `start`.
  template <class Body>
  __attribute__((always_inline)) void lines(const char* start, int64_t first, int64_t last, const Body& body) const {
    for (int64_t at = first; at < last; at += 64) body(start + at / kPart * part + at % kPart);
  }
};

// The steps of a panel that is read once, each fetched to L1 before it is needed.
template <bool kCompact>
class StreamedSteps;

template <>
class StreamedSteps<false> {
 public:
  StreamedSteps(const GemmArgs&, const char* panel, const char* next, int64_t steps)
      : panel(panel), next(next), bytes(steps * kExpandedStep) {}
  const char* at(int64_t step) const {
    const int64_t ahead = step * kExpandedStep + kTilePrefetch;
    const char* later = ahead < bytes ? panel + ahead : next + (ahead - bytes);
    for (int line = 0; line < 32; ++line) prefetch(later + line * 64);
    return panel + step * kExpandedStep;
  }

 private:
  const char *panel, *next;
  int64_t bytes;
};

// Compact steps are expanded in L1 one step ahead of the products, and the one after is asked for before that: requests
// spread among the work leave memory idle. Of each page further on, one line is asked for early, so that its address is
// translated by then: in a virtual machine that takes as long as memory itself.
template <>
class StreamedSteps<true> {
 public:
  StreamedSteps(const GemmArgs& g, const char* panel, const char* next, int64_t steps)
      : panel(panel), next(next), steps(steps), layout(g), expander(panel, g.k, 0) {
    expander.expand(0, expanded[0]);
  }
  const char* at(int64_t step) {
    memory_barrier();
    if (step % kPageSteps == 0) {
      const char* far = at_step(step + kFarSteps);
      for (int64_t part = 0; part < kCompactParts; ++part) prefetch(far + part * layout.part);
    }
    layout.lines(at_step(step + 2), 0, layout.kParts * layout.kPart, [](const char* line) { prefetch(line); });
    memory_barrier();
    if (step + 1 < steps) expander.expand(step + 1, expanded[(step + 1) & 1]);
    memory_barrier();
    return expanded[step & 1];
  }

 private:
  static constexpr int64_t kPageSteps = 8;  // a page of 4 KiB holds ten steps of a stream
  static constexpr int64_t kFarSteps = 24;

  // Beyond this panel, in the next one.
  const char* at_step(int64_t step) const {
    return step < steps ? layout.at(panel, step) : layout.at(next, step - steps);
  }

  const char *panel, *next;
  int64_t steps;
  PanelLayout<true> layout;
  Expander expander;
  alignas(64) char expanded[2][kExpandedStep];
};

// The panels of a piece of work in the order of their passes: a gated layer's gate and up panels alternate.
struct Passes {
  const GemmArgs& g;
  int64_t panel_begin, halves, count;

  Passes(const GemmArgs& args, int64_t begin, int64_t end)
      : g(args), panel_begin(begin), halves(args.up_panels != 0 ? 2 : 1), count((end - begin) * halves) {}
  int64_t panel(int64_t pass) const { return panel_begin + pass / halves; }
  bool completes(int64_t pass) const { return pass % halves == halves - 1; }
  const char* weight(int64_t pass) const {
    if (panel(pass) * kPanel >= g.n) pass = count - 1;  // what follows is another piece, most likely this thread's
    return static_cast<const char*>(g.packed) + (panel(pass) + pass % halves * g.up_panels) * g.panel_bytes;
  }
};

// Up to kInnerSteps steps [begin, end) of the panel of one pass: they stay in L1 while the rows pass.
struct Part {
  int64_t pass, begin, end;
  int64_t from, to;  // the stretch of K that they belong to; all passes go over one before the next
};

class Parts {
 public:
  Parts(const Passes& passes, int64_t steps, int64_t stretch)
      : passes(passes.count), steps(steps), stretch(stretch), first(at(0, 0, 0)) {}
  bool exists(const Part& part) const { return part.pass < passes; }
  Part after(const Part& part) const {
    if (part.end < part.to) return at(part.pass, part.end, part.from);
    if (part.pass + 1 < passes || part.to == steps) return at(part.pass + 1, part.from, part.from);
    return at(0, part.to, part.to);
  }

 private:
  Part at(int64_t pass, int64_t begin, int64_t from) const {
    const int64_t to = from + stretch < steps ? from + stretch : steps;
    return {pass, begin, begin + kInnerSteps < to ? begin + kInnerSteps : to, from, to};
  }
  int64_t passes, steps, stretch;

 public:
  const Part first;
};

// The weights of one part after the other, and what is done between the products while rows pass: the first pair of row
// tiles brings the part from L2 to L1, expanding it where it is compact; and the part after it is fetched to L2, each
// pair fetching its share.
template <bool kCompact>
class PartWeights {
 public:
  PartWeights(const GemmArgs& g, const Passes& passes, const Parts& parts, int64_t pairs)
      : g(g), passes(passes), parts(parts), layout(g), share(round_up(divide_up(kBytes, pairs), 64)) {}

  // Of the part whose turn it is now.
  const char* begin(const Part& part) {
    first_step = part.begin;
    end_step = part.end;
    packed = address(part);
    next = address(parts.after(part));
    if constexpr (!kCompact) return packed;
    expander = Expander(passes.weight(part.pass), g.k, part.begin);
    memory_barrier();
    expander.expand(part.begin, expanded);
    memory_barrier();
    return expanded;
  }

  // Before the products of one step of the part.
  void advance(int64_t pair, int64_t step) {
    if (pair == 0 && kCompact) {
      layout.lines(packed + (step + 2) * layout.step, 0, kBytes, [](const char* line) { prefetch(line); });
      if (first_step + step + 1 < end_step) {
        memory_barrier();
        expander.expand(first_step + step + 1, expanded + (step + 1) * kExpandedStep);
        memory_barrier();
      }
    } else if (pair == 0) {
      layout.lines(packed + step * layout.step + kTilePrefetch, 0, kBytes, [](const char* line) { prefetch(line); });
    }
    const int64_t from = pair * share, to = from + share < kBytes ? from + share : kBytes;
    layout.lines(next + step * layout.step, from, to, [](const char* line) { prefetch_to_l2(line); });
  }

 private:
  static constexpr int64_t kBytes = PanelLayout<kCompact>::kParts * PanelLayout<kCompact>::kPart;
  const char* address(const Part& part) const { return layout.at(passes.weight(part.pass), part.begin); }

  const GemmArgs& g;
  const Passes& passes;
  const Parts& parts;
  PanelLayout<kCompact> layout;
  int64_t share, first_step = 0, end_step = 0;
  const char *packed = nullptr, *next = nullptr;
  Expander expander;
  alignas(64) char expanded[kCompact ? kInnerSteps * kExpandedStep : 64];
};

// The x of the next stretch is fetched to L2 while the panels pass over this one, each pass fetching its share of every
// step. It comes from memory otherwise, at the first pass, and nobody computes meanwhile.
class RowsAhead {
 public:
  RowsAhead(const Part& part, int64_t passes, int64_t steps)
      : stretch((part.to - part.from) * kStep), begin(part.pass * round_up(divide_up(kStep, passes), 64)) {
    const int64_t share_end = begin + round_up(divide_up(kStep, passes), 64);
    end = part.to == steps ? 0 : share_end < kStep ? share_end : kStep;
  }
  // At one step of a pair of row tiles.
  void advance(const char* x) const {
    for (int64_t at = begin; at < end; at += 64) prefetch_to_l2(x + stretch + at);
  }

 private:
  static constexpr int64_t kStep = 2 * kTileBytes;
  int64_t stretch, begin, end;
};

struct AmxMicro {
  int64_t steps;

  // Tiles 0, 1: sums of the first sixteen rows, whose x is in 4; 2, 3 and 5: of the second; 6, 7: weights.
  explicit AmxMicro(const GemmArgs& g) : steps(divide_up(g.k, kDepth)) {
    const int rows = g.rows < 16 ? int(g.rows) : 16;
    const int more = g.rows <= 16 ? 16 : g.rows < 32 ? int(g.rows) - 16 : 16;
    TileConfig config;
    for (int tile = 0; tile < 6; ++tile) config.set(tile, tile == 2 || tile == 3 || tile == 5 ? more : rows, 64);
    for (int tile = 6; tile < 8; ++tile) config.set(tile, 16, 64);
    config.use();
  }
  ~AmxMicro() { _tile_release(); }  // idle tiles would be saved at every context switch
  AmxMicro(const AmxMicro&) = delete;
  AmxMicro& operator=(const AmxMicro&) = delete;

  // Up to 16, or 32 rows: all of K at once, the panel is read once.
  template <bool kTwo, bool kCompact>
  void stream(const GemmArgs& g, const char* panel, const char* next, float* sums, Unfinished& unfinished) const {
    const bool in_place = reads_in_place(g.rows, g.k);
    const int64_t advance = in_place ? 64 : 2 * kTileBytes, stride = in_place ? g.k * 2 : 64;
    const char* x = static_cast<const char*>(g.x);
    const int64_t rows_each = divide_up(g.rows, steps);
    StreamedSteps<kCompact> weights(g, panel, next, steps);
    zero_sums<kTwo>();
    for (int64_t s = 0; s < steps; ++s, x += advance) {
      step<kTwo, false>(x, x + 16 * stride, stride, weights.at(s));
      unfinished.advance(rows_each);
    }
    store_sums<kTwo>(sums);
  }

  // Any number of pairs of row tiles, continuing from `sums` unless `fresh`. Between the products, other work advances.
  template <class Weights, class Done>
  void part(const char* x, int64_t pairs, const char* weights, int64_t count, bool fresh, float* sums,
            Unfinished& unfinished, Weights& ahead, const RowsAhead& rows_ahead, const Done& done) const {
    const int64_t rows_each = divide_up(32, count);
    for (int64_t pair = 0; pair < pairs; ++pair, x += (steps - count) * 2 * kTileBytes) {
      float* own = sums + pair * 32 * kPanel;
      if (fresh)
        zero_sums<true>();
      else
        load_sums(own);
      for (int64_t s = 0; s < count; ++s, x += 2 * kTileBytes) {
        ahead.advance(pair, s);
        rows_ahead.advance(x);
        step<true, true>(x, x + kTileBytes, 64, weights + s * 2 * kTileBytes);
        unfinished.advance(rows_each);
      }
      store_sums<true>(own);
      done(pair);
    }
  }

  // One or two tiles of rows times two of weights. kPassing: x must not displace the weights from L1.
  template <bool kTwo, bool kPassing>
  QR_INLINE void step(const char* x0, const char* x1, int64_t stride, const char* w) {
    if (kPassing)
      _tile_stream_loadd(4, x0, stride);
    else
      _tile_loadd(4, x0, stride);
    _tile_loadd(6, w, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, w + kTileBytes, 64);
    _tile_dpbf16ps(1, 4, 7);
    if (kTwo) {
      if (kPassing)
        _tile_stream_loadd(5, x1, stride);
      else
        _tile_loadd(5, x1, stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  template <bool kTwo>
  QR_INLINE void zero_sums() {
    _tile_zero(0);
    _tile_zero(1);
    if (kTwo) {
      _tile_zero(2);
      _tile_zero(3);
    }
  }
  QR_INLINE void load_sums(const float* sums) {
    _tile_stream_loadd(0, sums, 64);
    _tile_stream_loadd(1, sums + 256, 64);
    _tile_stream_loadd(2, sums + 512, 64);
    _tile_stream_loadd(3, sums + 768, 64);
  }
  template <bool kTwo>
  QR_INLINE void store_sums(float* sums) {
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + 256, 64);
    if (kTwo) {
      _tile_stored(2, sums + 512, 64);
      _tile_stored(3, sums + 768, 64);
    }
  }
};

// Up to 32 rows: the weight streams through once.
template <bool kTwo, bool kCompact>
void stream_amx(const GemmArgs& g, int64_t panel_begin, int64_t panel_end) {
  const Passes passes(g, panel_begin, panel_end);
  alignas(64) float sums[4][32 * kPanel];  // of two panels, or of two pairs of gate and up
  const AmxMicro micro(g);
  Unfinished unfinished(g);
  memory_barrier();
  for (int64_t pass = 0; pass < passes.count; ++pass) {
    float* own = sums[pass & 3];
    micro.stream<kTwo, kCompact>(g, passes.weight(pass), passes.weight(pass + 1), own, unfinished);
    const float* gate = sums[(pass - passes.halves + 1) & 3];
    if (passes.completes(pass)) unfinished.set(0, g.rows, passes.panel(pass), gate, own);
  }
  unfinished.complete();
  if (g.past_caches) _mm_sfence();
  memory_barrier();
}

// More than 32 rows. x, or a stretch of its K, stays in L2 while the panels pass, and a part of a panel in L1 while the
// rows pass. With all of K, sums rotate as in stream_amx; with a stretch, those of every pass wait for the next one.
template <bool kCompact>
void block_amx(const GemmArgs& g, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end) {
  const Passes passes(g, panel_begin, panel_end);
  const AmxMicro micro(g);
  const int64_t pairs = divide_up(row_end - row_begin, 32), panel_sums = pairs * 32 * kPanel;
  const int64_t step_bytes = pairs * 2 * kTileBytes;
  const int64_t stretch = micro.steps * step_bytes <= kWholeBytes
                              ? micro.steps
                              : divide_up(kStretchBytes, kInnerSteps * step_bytes) * kInnerSteps;
  const int64_t held = micro.steps <= stretch ? 4 : passes.count;
  auto* sums = static_cast<float*>(scratch(0, held * panel_sums * 4));
  if (sums == nullptr) return;
  Unfinished unfinished(g);
  const Parts parts(passes, micro.steps, stretch);
  PartWeights<kCompact> weights(g, passes, parts, pairs);
  const char* x = static_cast<const char*>(g.x) + row_begin * micro.steps * 64;
  memory_barrier();
  for (Part part = parts.first; parts.exists(part); part = parts.after(part)) {
    float* own = sums + part.pass % held * panel_sums;
    const bool completes = part.end == micro.steps && passes.completes(part.pass);
    const float* gate = completes ? sums + (part.pass - passes.halves + 1) % held * panel_sums : own;
    const char* own_weights = weights.begin(part);
    const RowsAhead rows_ahead(part, passes.count, micro.steps);
    micro.part(x + part.begin * 2 * kTileBytes, pairs, own_weights, part.end - part.begin, part.begin == 0, own,
               unfinished, weights, rows_ahead, [&](int64_t pair) {
                 if (!completes) return;
                 const int64_t first = row_begin + pair * 32, at = pair * 32 * kPanel;
                 unfinished.set(first, first + 32 < row_end ? first + 32 : row_end, passes.panel(part.pass), gate + at,
                                own + at);
               });
  }
  unfinished.complete();
  if (g.past_caches) _mm_sfence();
  memory_barrier();
}

template <bool kCompact>
void run_panels(const GemmArgs& g, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end) {
  if (g.rows <= 16)
    stream_amx<false, kCompact>(g, panel_begin, panel_end);
  else if (g.rows <= 32)
    stream_amx<true, kCompact>(g, panel_begin, panel_end);
  else
    block_amx<kCompact>(g, row_begin, row_end, panel_begin, panel_end);
}

void run_amx(const GemmArgs& g, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end) {
  (g.compact ? run_panels<true> : run_panels<false>)(g, row_begin, row_end, panel_begin, panel_end);
}

Gemm amx_gemm() { return Gemm{tile_rows_bytes, tile_rows, run_amx, true}; }

}  // namespace
}  // namespace qr
