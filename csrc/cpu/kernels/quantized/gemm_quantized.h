// Products with weights of 8 to 2 bits. Activations are quantised too, each group of k in a row by its largest
// magnitude; products are summed as integers within a group, exactly, and over groups in float32 in order of k. So
// every instruction set and every number of rows give the same sums, and nothing is widened on the way from memory.
// Where scales are nested, inputs are rounded and summed so in blocks of 256 (nested.h). Beside int2 with one scale for an
// output they are rounded by the largest one of the row.
//
//   int8  [K/64][2 halves of 16 columns][16 rows of 4 k][16 columns][4]: AMX tiles
//   int4  [K/64][2 halves][8 rows of 8 k][16 columns][4]: k 0..3 of a row in the low nibbles, k 4..7 in the high ones,
//         in two's complement; shifted into the upper half of a byte, a nibble is 16 times its value
//   levels  as int4, each nibble the index of a level
//   int6, int5, int3, int2  codes: the integers and what takes the least one to zero. [K/64][2 halves] of lines of 64 bytes
//         with the low bits of codes, four (int3 and int2: two), then of lines with the others: of int6 two, of int5 and
//         int3 one. A line has four bits of 1 row of 8 k, two of 2 rows or one of 4; where in a byte: CodeBits
#pragma once

#include "formats.h"

namespace qr {
namespace {

constexpr int64_t kQuantizedDepth = 64;

// A line that is read now: fetch those that follow, soon ones to L1 and later ones to L2, so that memory stays busy
// while sums are scaled.
constexpr int64_t kFarBytes = 6144;
QR_INLINE void prefetch_stream(const char* p) {
  prefetch(p + kPrefetchBytes);
  prefetch_to_l2(p + kFarBytes);
}

// ---- activations ----

struct RowGroup {
  float scale;  // NaN where an input is no number
  int32_t sum;  // of the integers; where groups have nested codes, see keep_sums
};

// Two sums of 13 bits, the second in the upper half.
QR_INLINE int32_t joined(int32_t first, int32_t second) {
  return int32_t(uint32_t(first & 0xffff) | uint32_t(second) << 16);
}
// Every second group takes the sum of the one after it, too.
QR_INLINE void join_sums(RowGroup* groups, int64_t count) {
  for (int64_t i = 0; i < count; i += 2) groups[i].sum = joined(groups[i].sum, groups[i + 1].sum);
}

// With two codes of each group every second one has two sums; with one code and vpdpbusd each has what sums of biased
// weights start at.
template <class Format>
QR_INLINE void keep_sums(RowGroup* groups, int64_t count) {
  if constexpr (Format::kKinds == 2) {
    join_sums(groups, count);
  } else {
#if defined(__AVX512VNNI__)
    for (int64_t i = 0; i < count; ++i) groups[i].sum *= -Format::kBias;
#endif
  }
}

// x prepared: a RowGroup for each row and group, then integers [rows / height][K / 64][height][64].
template <int Group>
struct QuantizedRows {
  int64_t groups, steps, height;
  RowGroup* row_groups;
  int8_t* values;

  QuantizedRows(const void* prepared, int64_t rows, int64_t k)
      : groups(divide_up(k, Group)), steps(divide_up(k, kQuantizedDepth)), height(rows < 16 ? rows : 16),
        row_groups(static_cast<RowGroup*>(const_cast<void*>(prepared))),
        values(reinterpret_cast<int8_t*>(row_groups) + values_at(rows, k)) {}

  int64_t step_bytes() const { return height * kQuantizedDepth; }
  int8_t* line(int64_t row, int64_t step) const {
    const uint64_t block = uint64_t(row) / 16, within = uint64_t(row) % 16;  // fewer rows than 16 are one block
    return values + (int64_t(block) * steps + step) * step_bytes() + int64_t(within) * kQuantizedDepth;
  }

  static int64_t values_at(int64_t rows, int64_t k) {
    return round_up(rows * divide_up(k, Group) * int64_t(sizeof(RowGroup)), 64);
  }
  static int64_t bytes(int64_t rows, int64_t k, int32_t) {
    return values_at(rows, k) + round_up(rows, 16) * round_up(k, kQuantizedDepth);
  }
};

#if !defined(__ARM_NEON)
QR_INLINE void store_int8(int8_t* out, vf v) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(v)));
#else
  const __m256i words = _mm256_cvtps_epi32(v);
  const __m128i half = _mm_packs_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm_packs_epi16(half, half));
#endif
}
#endif

// Inputs [begin, end) of a row, the group `group` of it, by `inverse`; zeros up to `stop`. in: the input `begin`.
template <class Rows, class T>
QR_INLINE int32_t round_group(const Rows& out, int64_t row, const T* in, int64_t begin, int64_t end, int64_t stop,
                              float inverse) {
  vf total = zero();
  for (int64_t i = begin; i < stop; i += W) {
    const int64_t left = end - i;
    const vf value = left >= W ? load(in + i - begin) : left > 0 ? load(in + i - begin, int(left)) : zero();
    const vf rounded = round(mul(value, set1(inverse)));
    total = add(total, rounded);
    store_int8(out.line(row, i / 64) + i % 64, rounded);
  }
  return int32_t(sum(total));
}

// How inputs become integers.
struct Rounding {
  float inverse;  // what they are multiplied by
  float scale;    // what an integer 1 stands for; NaN where an input is no number
};

template <class Format, class T>
QR_INLINE Rounding rounding_of(const T* in, int64_t count) {
  vf top = zero(), invalid = zero();
  each_vector(count, [&](int64_t i, int n) __attribute__((always_inline)) {
    const vf value = load_some(in + i, n);
    top = max(abs(value), top);
    invalid = fma(value, zero(), invalid);  // NaN once there is an infinity or a NaN
  });
  float magnitude = largest(top);
  if (Format::kRoundsRows && magnitude < 1e-5f) magnitude = 1e-5f;
  return {magnitude > 1e-30f ? 127.0f / magnitude : 0.0f, magnitude / 127.0f * Format::kUnit + sum(invalid)};
}

// order: null, or which elements of x are taken.
template <class Format, class T>
void quantize_row(const QuantizedRows<Format::kGroup>& out, const T* x, int64_t row, int64_t k, const int32_t* order) {
  constexpr int64_t kRounded = Format::kRounded, kGroup = Format::kGroup;
  alignas(64) T gathered[kRounded];
  RowGroup* groups = out.row_groups + row * out.groups;
  Rounding rounding{};
  if constexpr (Format::kRoundsRows) rounding = rounding_of<Format>(x, k);  // whatever their order
  for (int64_t begin = 0; begin < k; begin += kRounded) {
    const int64_t end = begin + kRounded < k ? begin + kRounded : k;
    const T* in = x + begin;
    if (order != nullptr) {
      for (int64_t i = begin; i < end; ++i) gathered[i - begin] = x[order[i]];
      in = gathered;
    }
    if constexpr (!Format::kRoundsRows) rounding = rounding_of<Format>(in, end - begin);
    for (int64_t first = begin; first < end; first += kGroup) {
      const int64_t last = first + kGroup < end ? first + kGroup : end;
      const int64_t stop = last < k ? first + kGroup : out.steps * 64;
      const int32_t total = round_group(out, row, in + first - begin, first, last, stop, rounding.inverse);
      groups[first / kGroup] = {rounding.scale, rounding.scale == rounding.scale ? total : 0};
    }
    if constexpr (Format::kNested) keep_sums<Format>(groups + begin / kGroup, kRounded / kGroup);
  }
}

template <class Format>
void quantize_rows(void* prepared, const void* x, int32_t x_dtype, int64_t rows, int64_t k, int64_t begin, int64_t end,
                   const int32_t* order) {
  const QuantizedRows<Format::kGroup> out(prepared, rows, k);
  for (int64_t row = begin; row < end; ++row) {
    if (x_dtype == QR_FLOAT32)
      quantize_row<Format>(out, static_cast<const float*>(x) + row * k, row, k, order);
    else if (x_dtype == QR_BFLOAT16)
      quantize_row<Format>(out, static_cast<const Bf16*>(x) + row * k, row, k, order);
    else
      quantize_row<Format>(out, static_cast<const Fp16*>(x) + row * k, row, k, order);
  }
}

// What a group has beside its scale.
enum class Shift { kNone, kZeroPoint, kOffset };
template <Shift kShift>
struct Shifted {
  static constexpr Shift value = kShift;
};

// What turns the integer sums of one group of a panel into floats.
template <class Format>
struct GroupScales {
  vf scale[kVectors], shift[kVectors];  // shift: what a zero point adds to the integers, or an offset to their product
  Shift kind;

  QR_INLINE GroupScales of(const GemmArgs& g, int64_t panel, int64_t groups, int64_t group) {
    GroupScales out;
    out.kind = Shift::kNone;
    if (!Format::kGrouped) return out;
    const int64_t at = (panel * groups + group) * kPanel;
    const Fp16* scales = static_cast<const Fp16*>(g.scales) + at;
    prefetch(scales + 8 * kPanel);
    for (int v = 0; v < kVectors; ++v) out.scale[v] = load(scales + v * W);
    if (g.zero_points != nullptr) {
      out.kind = Shift::kZeroPoint;
      for (int v = 0; v < kVectors; ++v) {
        alignas(64) float values[W];
        for (int i = 0; i < W; ++i) values[i] = float(g.zero_points[at + v * W + i]) / -Format::kUnit;
        out.shift[v] = load(values);
      }
    } else if (g.offsets != nullptr) {
      out.kind = Shift::kOffset;
      const auto* offsets = reinterpret_cast<const Fp16*>(g.offsets) + at;
      prefetch(offsets + 8 * kPanel);
      for (int v = 0; v < kVectors; ++v) out.shift[v] = mul(load(offsets + v * W), set1(1.0f / Format::kUnit));
    }
    return out;
  }

  // Call body(Shifted<kind>()), so that what it does to many sums asks for the kind once.
  template <class Body>
  __attribute__((always_inline)) void by_kind(const Body& body) const {
    if (!Format::kGrouped || kind == Shift::kNone)
      body(Shifted<Shift::kNone>());
    else if (kind == Shift::kZeroPoint)
      body(Shifted<Shift::kZeroPoint>());
    else
      body(Shifted<Shift::kOffset>());
  }

  // total + (sums * scales + offsets), each operation rounded once; with zero points the first is exact
  template <Shift kShift>
  __attribute__((always_inline)) vf add(Shifted<kShift>, vf total, vi sums, const RowGroup& x, int v) const {
    vf integers = floats(sums);
    if (Format::kGrouped) {
      if (kShift == Shift::kZeroPoint) integers = fma(shift[v], set1(float(x.sum)), integers);
      integers = mul(integers, scale[v]);
      if (kShift == Shift::kOffset) integers = fma(shift[v], set1(float(x.sum)), integers);
    }
    return fma(integers, set1(x.scale), total);
  }
};

// ---- products ----

// By the scale of each column, or the unit of all.
template <class Format>
QR_INLINE void scale_columns(const GemmArgs& g, int64_t panel, int64_t rows, float* sums) {
  if (Format::kGrouped && g.unit == 1.0f) return;
  const float* scales = static_cast<const float*>(g.scales) + panel * kPanel;
  for (int64_t row = 0; row < rows; ++row)
    for (int v = 0; v < kVectors; ++v)
      store(sums + row * kPanel + v * W,
            mul(load(sums + row * kPanel + v * W), Format::kGrouped ? set1(g.unit) : load(scales + v * W)));
}

// Rows [row_begin, row_end) of x times a panel, without the scales of columns.
template <class Format>
void multiply_panel(const GemmArgs& g, const QuantizedRows<Format::kGroup>& x, int64_t row_begin, int64_t row_end,
                    int64_t panel, float* sums);

template <class Format>
struct QuantizedMicro {
  QuantizedRows<Format::kGroup> x;

  explicit QuantizedMicro(const GemmArgs& g) : x(g.x, g.rows, g.k) {}

  int64_t panel_of(const GemmArgs& g, const char* packed) const {
    return (packed - static_cast<const char*>(g.packed)) / g.panel_bytes;
  }

  void multiply(const GemmArgs& g, int64_t row_begin, int64_t row_end, const char* packed, float* sums) const {
    const int64_t panel = panel_of(g, packed);
    multiply_panel<Format>(g, x, row_begin, row_end, panel, sums);
    scale_columns<Format>(g, panel, row_end - row_begin, sums);
  }
};

// How a format's products are done by this unit's vectors.
template <class Format>
struct ByVectors {
  static void fill(Gemm& gemm) {
    gemm = {QuantizedRows<Format::kGroup>::bytes, quantize_rows<Format>, run_gemm<QuantizedMicro<Format>>};
  }
};

template <template <class> class Way, template <int> class Format>
void fill_small_groups(Gemm* gemms) {
  Way<Format<16>>::fill(gemms[0]);
  Way<Format<32>>::fill(gemms[1]);
}
template <template <class> class Way, template <int> class Format>
void fill_large_groups(Gemm* gemms) {
  Way<Format<32>>::fill(gemms[0]);
  Way<Format<64>>::fill(gemms[1]);
  Way<Format<128>>::fill(gemms[2]);
}
template <template <class> class Way, template <int> class Format>
void fill_groups(Gemm* gemms) {
  Way<Format<16>>::fill(gemms[0]);
  fill_large_groups<Way, Format>(gemms + 1);
}

// Formats whose values are integers as they lie in a byte.
template <template <class> class Way>
void fill_integers(Kernels& kernels) {
  Way<Int8>::fill(kernels.gemm_int8);
  fill_groups<Way, Int8Groups>(kernels.gemm_int8_groups);
  Way<Int2>::fill(kernels.gemm_int2);
  fill_large_groups<Way, Int2Groups>(kernels.gemm_int2_groups);
  fill_groups<Way, Int4>(kernels.gemm_int4);
}

// Those whose values are looked up or put together from two places, and those with nested scales.
template <template <class> class Way>
void fill_codes(Kernels& kernels) {
  fill_large_groups<Way, Int3>(kernels.gemm_int3);
  fill_small_groups<Way, Int5>(kernels.gemm_int5);
  fill_small_groups<Way, Int6>(kernels.gemm_int6);
  fill_groups<Way, Levels>(kernels.gemm_levels);
  Way<Nested<Int6<16>, 1>>::fill(kernels.gemm_nested[kNestedInt6]);
  Way<Nested<Int5<32>, 2>>::fill(kernels.gemm_nested[kNestedInt5]);
  Way<Nested<Codes4<32>, 2>>::fill(kernels.gemm_nested[kNestedInt4]);
  Way<Nested<Int3<16>, 1>>::fill(kernels.gemm_nested[kNestedInt3]);
  Way<Nested<Int2Groups<16>, 2>>::fill(kernels.gemm_nested[kNestedInt2]);
  Way<Nested<Levels<32>, 1>>::fill(kernels.gemm_nested[kNestedLevels]);
}

template <template <class> class Way>
void fill_quantized(Kernels& kernels) {
  fill_integers<Way>(kernels);
  fill_codes<Way>(kernels);
}

}  // namespace
}  // namespace qr

#include "nested.h"

#if defined(__ARM_NEON)
#include "gemm_quantized_neon.h"
#elif defined(__AVX512VNNI__)
#include "gemm_quantized_vnni.h"
#elif defined(__AVX512F__)
#include "gemm_quantized_pairs.h"
#else
#include "gemm_quantized_unpacked.h"
#endif
