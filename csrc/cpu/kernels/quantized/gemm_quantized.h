// Products with weights of 8, 6, 5 and 4 bits. Activations are quantised too, each group of k in a row by its largest
// magnitude; products are summed as integers within a group, exactly, and over groups in float32 in order of k. So
// every instruction set and every number of rows give the same sums, and nothing is widened on the way from memory.
//
//   int8  [K/64][2 halves of 16 columns][16 rows of 4 k][16 columns][4]: AMX tiles
//   int4  [K/64][2 halves][8 rows of 8 k][16 columns][4]: k 0..3 of a row in the low nibbles, k 4..7 in the high ones,
//         in two's complement; shifted into the upper half of a byte, a nibble is 16 times its value
//   levels  as int4, each nibble the index of a level
//   int6, int5  codes: the integers and 32 or 16. [K/64][2 halves] of 8 rows as int4 has them, with the low four bits of
//         codes, then lines of 64 bytes with the others: of 2 rows (int5: 4), from the lowest bits of a byte upwards
//         those of k 0..3 of the first row, of its k 4..7, of k 0..3 of the second row ...
#pragma once

#include "../gemm/gemm.h"

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
  int32_t sum;  // of the integers
};

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
    return values + (row / height * steps + step) * step_bytes() + row % height * kQuantizedDepth;
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

// order: null, or which elements of x are taken.
template <class Format, class T>
void quantize_row(const QuantizedRows<Format::kGroup>& out, const T* x, int64_t row, int64_t k, const int32_t* order) {
  alignas(64) T gathered[Format::kGroup];
  for (int64_t group = 0; group < out.groups; ++group) {
    const int64_t begin = group * Format::kGroup, end = begin + Format::kGroup < k ? begin + Format::kGroup : k;
    const T* in = x + begin;
    if (order != nullptr) {
      for (int64_t i = begin; i < end; ++i) gathered[i - begin] = x[order[i]];
      in = gathered;
    }
    vf top = zero(), invalid = zero();
    each_vector(end - begin, [&](int64_t i, int n) __attribute__((always_inline)) {
      const vf value = load_some(in + i, n);
      top = max(abs(value), top);
      invalid = fma(value, zero(), invalid);  // NaN once there is an infinity or a NaN
    });
    const float magnitude = largest(top);
    const vf inverse = set1(magnitude > 1e-30f ? 127.0f / magnitude : 0.0f);
    vf total = zero();
    const int64_t stop = begin + Format::kGroup < out.steps * 64 ? begin + Format::kGroup : out.steps * 64;
    for (int64_t i = begin; i < stop; i += W) {
      const int64_t left = end - i;
      const vf value = left >= W ? load(in + i - begin) : left > 0 ? load(in + i - begin, int(left)) : zero();
      const vf rounded = round(mul(value, inverse));
      total = add(total, rounded);
      store_int8(out.line(row, i / 64) + i % 64, rounded);
    }
    const float scale = magnitude / 127.0f * Format::kUnit + sum(invalid);
    out.row_groups[row * out.groups + group] = {scale, scale == scale ? int32_t(sum(total)) : 0};
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

// ---- integers ----

#if defined(__AVX512F__)
using vi = __m512i;
QR_INLINE vi none() { return _mm512_setzero_si512(); }
QR_INLINE vi load_bytes(const char* p) { return _mm512_loadu_si512(p); }
QR_INLINE vi four_bytes(const int8_t* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  return _mm512_set1_epi32(four);
}
QR_INLINE vi flip(vi v, int byte) { return _mm512_xor_si512(v, _mm512_set1_epi8(int8_t(byte))); }
QR_INLINE vi upper_nibbles(vi v) { return _mm512_and_si512(v, _mm512_set1_epi8(int8_t(0xf0))); }
QR_INLINE vi lower_nibbles(vi v) { return upper_nibbles(_mm512_slli_epi16(v, 4)); }
QR_INLINE vi add(vi a, vi b) { return _mm512_add_epi32(a, b); }
QR_INLINE vf floats(vi v) { return _mm512_cvtepi32_ps(v); }
#elif defined(__AVX2__)
using vi = __m256i;
QR_INLINE vi none() { return _mm256_setzero_si256(); }
QR_INLINE vi load_bytes(const char* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
QR_INLINE vi four_bytes(const int8_t* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  return _mm256_set1_epi32(four);
}
QR_INLINE vi flip(vi v, int byte) { return _mm256_xor_si256(v, _mm256_set1_epi8(int8_t(byte))); }
QR_INLINE vi add(vi a, vi b) { return _mm256_add_epi32(a, b); }
QR_INLINE vf floats(vi v) { return _mm256_cvtepi32_ps(v); }
#endif

// ---- weights ----

// What a row of 8 k of one half is made of, for one vector of columns: integers of k 0..3 and of k 4..7. `unsigned_row`
// gives kBias more than they are (in sixteenths of int4), `signed_four` one of the two as they are. Formats of fewer than
// 8 bits have `codes_of_row`, too, of the row begin + row: what `unsigned_row` gives, shifted right by kCodeShift.
template <int Group, bool Grouped>
struct Int8Of {
  static constexpr int kGroup = Group;
  static constexpr bool kGrouped = Grouped;  // or one scale for a column; activations keep groups, which hold an outlier
  static constexpr int kBits = 8, kBias = 128;
  static constexpr int kRowsTogether = 1;      // rows of 8 k that are unpacked best side by side
  static constexpr int64_t kHalfBytes = 1024;  // 64 k of 16 columns
  static constexpr float kUnit = 1.0f;         // value of an integer 1
  explicit Int8Of(const GemmArgs&) {}
#if !defined(__ARM_NEON)
  __attribute__((always_inline)) void unsigned_row(const char* half, int64_t begin, int row, vi& first,
                                                   vi& second) const {
    first = flip(load_bytes(half + (begin + row) * 128), 0x80);
    second = flip(load_bytes(half + (begin + row) * 128 + 64), 0x80);
  }
  __attribute__((always_inline)) vi signed_four(const char* line, int four) const {
    return load_bytes(line + four * 64);
  }
#endif
};
using Int8 = Int8Of<128, false>;
template <int Group>
using Int8Groups = Int8Of<Group, true>;

template <int Group>
struct Int4 {
  static constexpr int kGroup = Group;
  static constexpr bool kGrouped = true;
  static constexpr int kBits = 4, kCodeShift = 4, kBias = 128;
  static constexpr int kRowsTogether = 1;
  static constexpr int64_t kHalfBytes = 512;
  static constexpr float kUnit = 1.0f / 16;
  explicit Int4(const GemmArgs&) {}
#if !defined(__ARM_NEON)
  __attribute__((always_inline)) void codes_of_row(const char* half, int64_t begin, int row, vi& first,
                                                   vi& second) const {
    const vi both = flip(load_bytes(half + (begin + row) * 64), 0x88);
    first = low_nibbles(both);
    second = high_nibbles(both);
  }
#endif
#if defined(__AVX512F__)
  __attribute__((always_inline)) void unsigned_row(const char* half, int64_t begin, int row, vi& first,
                                                   vi& second) const {
    const vi both = flip(load_bytes(half + (begin + row) * 64), 0x88);
    first = lower_nibbles(both);
    second = upper_nibbles(both);
  }
#endif
};

template <int Bits, int Group>
struct Planes {
  static constexpr int kGroup = Group;
  static constexpr bool kGrouped = true;
  static constexpr int kBits = Bits, kCodeShift = 0, kBias = 1 << (Bits - 1);
  static constexpr int kHigh = Bits - 4;         // bits of a code above its nibble
  static constexpr int kRowsOfLine = 4 / kHigh;  // rows of 8 k whose high bits share 64 bytes
  static constexpr int kRowsTogether = kRowsOfLine < Group / 8 ? kRowsOfLine : Group / 8;
  static constexpr int64_t kHalfBytes = 128 * Bits;
  static constexpr float kUnit = 1.0f;
  explicit Planes(const GemmArgs&) {}

  // begin: a multiple of kRowsTogether
  __attribute__((always_inline)) void codes_of_row(const char* half, int64_t begin, int row, Bytes& first,
                                                   Bytes& second) const {
    // where lines begin with rows, the place of a row's bits is a constant if `row` is
    constexpr bool kStartsLine = kRowsTogether == kRowsOfLine;
    const int64_t in_lines = kStartsLine ? row : begin + row;
    const char* lines = half + 512 + (kStartsLine ? begin / kRowsOfLine * 64 : 0);
    const Bytes both = load_bytes_of(half + begin * 64 + row * 64);
    const Bytes line = load_bytes_of(lines + in_lines / kRowsOfLine * 64);
    const int place = int(in_lines % kRowsOfLine) * 2 * kHigh;
    first = either(low_nibbles(both), high_bits(line, place));
    second = either(high_nibbles(both), high_bits(line, place + kHigh));
  }
  __attribute__((always_inline)) void unsigned_row(const char* half, int64_t begin, int row, Bytes& first,
                                                   Bytes& second) const {
    codes_of_row(half, begin, row, first, second);
  }

 private:
  QR_INLINE Bytes high_bits(Bytes line, int place) {
    return bits_of(place < 4 ? words_left(line, 4 - place) : words_right(line, place - 4), (1 << Bits) - 16);
  }
};
template <int Group>
using Int5 = Planes<5, Group>;
template <int Group>
using Int6 = Planes<6, Group>;

template <int Group>
struct Levels {
  static constexpr int kGroup = Group;
  static constexpr bool kGrouped = true;
  static constexpr int kBits = 8, kBias = 128;
  static constexpr int kRowsTogether = 1;
  static constexpr int64_t kHalfBytes = 512;
  static constexpr float kUnit = 1.0f;
  Bytes levels;
  explicit Levels(const GemmArgs& g) : levels(sixteen_bytes(reinterpret_cast<const uint8_t*>(g.levels))) {}
#if !defined(__ARM_NEON)
  __attribute__((always_inline)) void unsigned_row(const char* half, int64_t begin, int row, vi& first,
                                                   vi& second) const {
    const vi both = load_bytes(half + (begin + row) * 64), above = flip(levels, 0x80);
    first = look_up(above, low_nibbles(both));
    second = look_up(above, high_nibbles(both));
  }
  __attribute__((always_inline)) vi signed_four(const char* line, int four) const {
    const vi both = load_bytes(line);
    return look_up(levels, four == 0 ? low_nibbles(both) : high_nibbles(both));
  }
#endif
};

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
    if (Format::kGroup <= 32 && g.nested != 0) return of_nested(g, panel, groups, group);
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

  // Each product of a code and a float16 is exact, and so is the scale times 2^(bits - 1).
  QR_INLINE GroupScales of_nested(const GemmArgs& g, int64_t panel, int64_t groups, int64_t group) {
    constexpr int64_t kGroups = kNestedBlock / Format::kGroup;
    const int64_t bytes = nested_bytes(g.nested, Format::kGroup), in_block = int64_t(uint64_t(group) % kGroups);
    const int64_t block = panel * divide_up(groups, kGroups) + int64_t(uint64_t(group) / kGroups);
    const char* begin = static_cast<const char*>(g.scales) + block * bytes;
    const auto* halves = reinterpret_cast<const Fp16*>(begin);
    const auto* codes = reinterpret_cast<const int8_t*>(begin) + g.nested * (2 + in_block) * kPanel;
    prefetch(begin + bytes + in_block % 2 * 64);
    prefetch(codes + bytes);
    GroupScales out;
    out.kind = g.nested == 1 ? Shift::kNone : Shift::kOffset;
    for (int v = 0; v < kVectors; ++v) out.scale[v] = mul(load(codes + v * W), load(halves + v * W));
    if (g.nested == 1) return out;
    for (int v = 0; v < kVectors; ++v) {
      const vf least = mul(load(halves + kPanel + v * W), set1(-1.0f / Format::kUnit));
      out.shift[v] = fma(load(codes + kPanel + v * W), least, mul(out.scale[v], set1(float(Format::kBias))));
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

  // total + (integers * scales + offsets), each operation rounded once; with zero points the first is exact
  template <Shift kShift>
  __attribute__((always_inline)) vf add(Shifted<kShift>, vf total, vf integers, RowGroup x, int v) const {
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

template <template <class> class Micro, class Format>
Gemm quantized_gemm() {
  return Gemm{QuantizedRows<Format::kGroup>::bytes, quantize_rows<Format>, run_gemm<Micro<Format>>};
}

template <template <class> class Micro, template <int> class Format>
void fill_small_groups(Gemm* gemms) {
  gemms[0] = quantized_gemm<Micro, Format<16>>();
  gemms[1] = quantized_gemm<Micro, Format<32>>();
}
template <template <class> class Micro, template <int> class Format>
void fill_groups(Gemm* gemms) {
  fill_small_groups<Micro, Format>(gemms);
  gemms[2] = quantized_gemm<Micro, Format<64>>();
  gemms[3] = quantized_gemm<Micro, Format<128>>();
}

template <template <class> class Micro>
void fill_quantized(Kernels& kernels) {
  kernels.gemm_int8 = quantized_gemm<Micro, Int8>();
  fill_groups<Micro, Int8Groups>(kernels.gemm_int8_groups);
  fill_groups<Micro, Int4>(kernels.gemm_int4);
  fill_small_groups<Micro, Int5>(kernels.gemm_int5);
  fill_small_groups<Micro, Int6>(kernels.gemm_int6);
  fill_groups<Micro, Levels>(kernels.gemm_levels);
}

}  // namespace
}  // namespace qr

#if defined(__ARM_NEON)
#include "gemm_quantized_neon.h"
#elif defined(__AVX512VNNI__)
#include "gemm_quantized_vnni.h"
#else
#include "gemm_quantized_pairs.h"
#endif
