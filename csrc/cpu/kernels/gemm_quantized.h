// Products with int8 and int4 weights: a part of a panel is widened to bf16 tiles in L1, exactly (integers up to 127
// have 7 significant bits), and multiplied as bf16 is; scales are applied to the float32 sums. So a weight costs a
// byte or half of memory traffic, and five instructions for 64 of them.
//
//   int8  [K/32][2 halves of 16 columns][8 rows of 4 k][64]: sign and magnitude; a 16-byte lane of a row holds 4
//         columns, first their k 0 and 1, then their k 2 and 3, so that unpacking gives pairs of all columns
//   int4  [K/32][2 halves][4 rows of 8 k][16 columns][8 nibbles], value - 8
#pragma once

#include "gemm.h"

namespace qr {
namespace {

QR_INLINE uint32_t bf16_of_integer(int value) {
  uint32_t bits;
  const float f = float(value);
  std::memcpy(&bits, &f, 4);
  return bits >> 16;
}

#if defined(__AVX512F__)

#if defined(__AVX512VBMI__)

// Both bytes of the bf16 of each magnitude, looked up by its seven bits; vpermi2b ignores the sign above them.
struct Int8Widener {
  __m512i low[2], high[2];
  Int8Widener() {
    alignas(64) uint8_t table[2][128];
    for (int i = 0; i < 128; ++i) {
      table[0][i] = uint8_t(bf16_of_integer(i));
      table[1][i] = uint8_t(bf16_of_integer(i) >> 8);
    }
    for (int half = 0; half < 2; ++half) {
      low[half] = _mm512_load_si512(table[0] + half * 64);
      high[half] = _mm512_load_si512(table[1] + half * 64);
    }
  }
  static constexpr int64_t kHalfBytes = 512;
  void half(const char* in, char* tile) const {
    for (int row = 0; row < 8; ++row) {
      const __m512i v = _mm512_loadu_si512(in + row * 64);
      const __m512i l = _mm512_permutex2var_epi8(low[0], v, low[1]);
      __m512i h = _mm512_permutex2var_epi8(high[0], v, high[1]);
      h = _mm512_ternarylogic_epi32(h, v, _mm512_set1_epi8(int8_t(0x80)), 0xf8);  // h | (v & 0x80)
      _mm512_storeu_si512(tile + row * 128, _mm512_unpacklo_epi8(l, h));
      _mm512_storeu_si512(tile + row * 128 + 64, _mm512_unpackhi_epi8(l, h));
    }
  }
};

#else

struct Int8Widener {
  static constexpr int64_t kHalfBytes = 512;
  // words of (first, second) byte -> pairs of bf16
  QR_INLINE __m512i pairs(__m512i words) {
    const __m512i magnitude = _mm512_set1_epi32(0x7f), sign = _mm512_set1_epi32(int(0x80000000));
    const __m512i first = _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_and_si512(words, magnitude)));
    const __m512i second =
        _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(words, 8), magnitude)));
    const __m512i a = _mm512_or_si512(first, _mm512_and_si512(_mm512_slli_epi32(words, 24), sign));
    const __m512i b = _mm512_or_si512(second, _mm512_and_si512(_mm512_slli_epi32(words, 16), sign));
    return _mm512_or_si512(_mm512_srli_epi32(a, 16), b);
  }
  void half(const char* in, char* tile) const {
    for (int row = 0; row < 8; ++row) {
      const __m512i v = _mm512_loadu_si512(in + row * 64);
      _mm512_storeu_si512(tile + row * 128, pairs(_mm512_unpacklo_epi16(v, v)));
      _mm512_storeu_si512(tile + row * 128 + 64, pairs(_mm512_unpackhi_epi16(v, v)));
    }
  }
};

#endif

// The bf16 of a nibble - 8 by a table of 16 in one register; vpermd ignores the bits above the index.
struct Int4Widener {
  __m512i even, odd;
  Int4Widener() {
    alignas(64) uint32_t table[16];
    for (int i = 0; i < 16; ++i) table[i] = bf16_of_integer(i - 8);
    even = _mm512_load_si512(table);
    odd = _mm512_slli_epi32(even, 16);
  }
  static constexpr int64_t kHalfBytes = 256;
  template <int Pair>
  QR_INLINE __m512i pair(__m512i v, __m512i even, __m512i odd) {
    const __m512i first = _mm512_permutexvar_epi32(Pair == 0 ? v : _mm512_srli_epi32(v, Pair * 8), even);
    return _mm512_or_si512(first, _mm512_permutexvar_epi32(_mm512_srli_epi32(v, Pair * 8 + 4), odd));
  }
  void half(const char* in, char* tile) const {
    for (int row = 0; row < 4; ++row, tile += 256) {
      const __m512i v = _mm512_loadu_si512(in + row * 64);
      _mm512_storeu_si512(tile, pair<0>(v, even, odd));
      _mm512_storeu_si512(tile + 64, pair<1>(v, even, odd));
      _mm512_storeu_si512(tile + 128, pair<2>(v, even, odd));
      _mm512_storeu_si512(tile + 192, pair<3>(v, even, odd));
    }
  }
};

#else

// AVX2: by tables in memory; this set is for correctness on old machines, not for speed.
struct Int8Widener {
  uint16_t table[256];
  Int8Widener() {
    for (int i = 0; i < 256; ++i) table[i] = uint16_t(bf16_of_integer(i & 127) | uint32_t(i & 128) << 8);
  }
  static constexpr int64_t kHalfBytes = 512;
  void half(const char* in, char* tile) const {
    const auto* bytes = reinterpret_cast<const uint8_t*>(in);
    auto* out = reinterpret_cast<uint16_t*>(tile);
    for (int row = 0; row < 8; ++row)
      for (int lane = 0; lane < 4; ++lane)
        for (int upper = 0; upper < 2; ++upper)
          for (int i = 0; i < 8; ++i)
            out[(row * 2 + upper) * 32 + lane * 8 + i] = table[bytes[row * 64 + lane * 16 + upper * 8 + i]];
  }
};

struct Int4Widener {
  uint32_t table[256];
  Int4Widener() {
    for (int i = 0; i < 256; ++i) table[i] = bf16_of_integer(i % 16 - 8) | bf16_of_integer(i / 16 - 8) << 16;
  }
  static constexpr int64_t kHalfBytes = 256;
  void half(const char* in, char* tile) const {
    const auto* bytes = reinterpret_cast<const uint8_t*>(in);
    for (int row = 0; row < 4; ++row)
      for (int column = 0; column < 16; ++column)
        for (int pair = 0; pair < 4; ++pair)
          std::memcpy(tile + (row * 4 + pair) * 64 + column * 4, &table[bytes[row * 64 + column * 4 + pair]], 4);
  }
};

#endif

constexpr int64_t kPartSteps = 4;  // of 32 k: 8 KiB of tiles; 16 KiB already crowd what is prefetched out of L1
constexpr int64_t kWidenPrefetch = 2048;

// sums += part * scales (+ group sums of x * corrections * scales), for one group of one panel
QR_INLINE void add_group(const GemmArgs& g, int64_t row_begin, int64_t rows, int64_t panel, int64_t group,
                         int64_t groups, const float* part, float* sums) {
  const int64_t at = (panel * groups + group) * kPanel;
  const Fp16* scales = static_cast<const Fp16*>(g.scales) + at;
  for (int v = 0; v < kVectors; ++v) {
    const vf scale = load(scales + v * W);
    vf correction = zero();
    if (g.corrections != nullptr) {
      alignas(64) float values[W];
      for (int i = 0; i < W; ++i) values[i] = float(g.corrections[at + v * W + i]);
      correction = mul(load(values), scale);
    }
    for (int64_t row = 0; row < rows; ++row) {
      vf sum = fma(load(part + row * kPanel + v * W), scale, load(sums + row * kPanel + v * W));
      if (g.corrections != nullptr) sum = fma(set1(g.group_sums[(row_begin + row) * groups + group]), correction, sum);
      store(sums + row * kPanel + v * W, sum);
    }
  }
}

template <class Parts, class Widener>
void run_panels(const GemmArgs& g, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end) {
  const int64_t rows = row_end - row_begin, steps = divide_up(g.k, kDepth);
  const bool grouped = g.format == QR_INT4;
  const int64_t part_steps = grouped ? g.group / kDepth : kPartSteps, groups = divide_up(steps, part_steps);
  const int64_t panel_floats = round_up(rows, 32) * kPanel, tile_bytes = (part_steps < 4 ? 4 : part_steps) * 2048;
  // two buffers of tiles: the next part is widened while the last is still being multiplied
  auto* sums = static_cast<float*>(scratch(0, 3 * panel_floats * 4 + 2 * tile_bytes));
  if (sums == nullptr) return;
  float *up_sums = sums + panel_floats, *part = up_sums + panel_floats;
  char* tiles = reinterpret_cast<char*>(part + panel_floats);
  const Parts parts(g);
  const Widener widener;
  const int64_t step_bytes = 2 * Widener::kHalfBytes;
  auto widen = [&](const char* weight, int64_t s, char* out) __attribute__((always_inline)) {
    const char* in = weight + s * step_bytes;
    for (int64_t line = 0; line < step_bytes; line += 64) prefetch(in + kWidenPrefetch + line);
    widener.half(in, out);
    widener.half(in + Widener::kHalfBytes, out + 1024);
  };
  auto multiply_parts = [&](int64_t panel, const char* weight, float* out) {
    for (int64_t index = 0; index < groups; ++index) {
      const int64_t begin = index * part_steps, end = begin + part_steps < steps ? begin + part_steps : steps;
      char* buffer = tiles + index % 2 * tile_bytes;
      for (int64_t s = begin; s < end; ++s) widen(weight, s, buffer + (s - begin) * 2048);
      if (!grouped) {
        parts.part(g, row_begin, row_end, begin, end, buffer, out, index == 0);
        continue;
      }
      parts.part(g, row_begin, row_end, begin, end, buffer, part, true);
      add_group(g, row_begin, rows, panel, index, groups, part, out);
    }
  };
  auto multiply = [&](int64_t panel, float* out) {
    const char* weight = static_cast<const char*>(g.packed) + panel * g.panel_bytes;
    if (grouped) std::memset(out, 0, size_t(panel_floats) * 4);
    if (rows <= Parts::kStreamedRows) {
      // Widening runs ahead of the products by some steps, so that tiles are not read before their stores have left the
      // store buffer, and neither waits for the other.
      constexpr int64_t kAhead = 2, kRing = 4;
      auto* ring = tiles;
      parts.begin(rows);
      for (int64_t s = 0; s < steps + kAhead; ++s) {
        if (s < steps) widen(weight, s, ring + s % kRing * 2048);
        const int64_t t = s - kAhead;
        if (t < 0) continue;
        parts.step_of(g, row_begin, rows, t, ring + t % kRing * 2048);
        if (grouped && ((t + 1) % part_steps == 0 || t + 1 == steps)) {
          parts.end(rows, part);
          add_group(g, row_begin, rows, panel, t / part_steps, groups, part, out);
          parts.begin(rows);
        }
      }
      if (!grouped) parts.end(rows, out);
    } else {
      multiply_parts(panel, weight, out);
    }
    if (grouped) return;
    const float* scales = static_cast<const float*>(g.scales) + panel * kPanel;
    for (int64_t row = 0; row < rows; ++row)
      for (int v = 0; v < kVectors; ++v)
        store(out + row * kPanel + v * W, mul(load(out + row * kPanel + v * W), load(scales + v * W)));
  };
  for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
    multiply(panel, sums);
    if (g.up_panels != 0) multiply(panel + g.up_panels, up_sums);
    finish(g, row_begin, row_end, panel, sums, up_sums);
  }
}

template <class Parts>
void run_quantized(const GemmArgs& g, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end) {
  if (g.format == QR_INT4)
    run_panels<Parts, Int4Widener>(g, row_begin, row_end, panel_begin, panel_end);
  else
    run_panels<Parts, Int8Widener>(g, row_begin, row_end, panel_begin, panel_end);
}

template <class T>
void sum_groups(float* out, const T* x, int64_t k, int64_t group) {
  for (int64_t begin = 0; begin < k; begin += group) {
    const int64_t n = k - begin < group ? k - begin : group;
    vf total = zero();
    each_vector(n, [&](int64_t i, int count) __attribute__((always_inline)) {
      total = add(total, load_some(x + begin + i, count));
    });
    *out++ = sum(total);
  }
}

void group_sums(float* out, const void* x, int32_t x_dtype, int64_t k, int64_t group, int64_t begin, int64_t end) {
  const int64_t groups = divide_up(k, group);
  for (int64_t row = begin; row < end; ++row) {
    if (x_dtype == QR_FLOAT32)
      sum_groups(out + row * groups, static_cast<const float*>(x) + row * k, k, group);
    else if (x_dtype == QR_BFLOAT16)
      sum_groups(out + row * groups, static_cast<const Bf16*>(x) + row * k, k, group);
    else
      sum_groups(out + row * groups, static_cast<const Fp16*>(x) + row * k, k, group);
  }
}

}  // namespace
}  // namespace qr
