// Nested groups by AMX tiles. An integer times the code of its group is two bytes, so two products of bytes give what a
// block of 256 inputs adds up to; it is scaled once.
#pragma once

#include "gemm_quantized_amx.h"
#include "nested.h"

namespace qr {
namespace {

// A group's codes for 16 columns, and how an integer times its code is stored as two bytes, in planes of low and of high
// ones. multiply_high: tiles of x times the high ones, which lie in tile 7; tile numbers are those of AmxNestedMicro.
template <bool Small>
struct CodePlanes;

// Codes of six bits and integers of five at most, neither negative: each three bits of a code give a byte.
template <>
struct CodePlanes<true> {
  static constexpr int kHighShift = 3;
  vi low, high;

  explicit __attribute__((always_inline)) CodePlanes(vi codes) {
    const vi both = _mm512_or_si512(codes, _mm512_slli_epi32(codes, 16)), seven = _mm512_set1_epi16(7);
    low = _mm512_and_si512(both, seven);
    high = _mm512_and_si512(_mm512_srli_epi16(both, 3), seven);
  }
  // Two bytes of a word are multiplied at once, for neither becomes more than a byte.
  __attribute__((always_inline)) void put(vi integers, char* lows, char* highs) const {
    _mm512_store_si512(lows, _mm512_mullo_epi16(integers, low));
    _mm512_store_si512(highs, _mm512_mullo_epi16(integers, high));
  }
  template <bool kSecondRows>
  QR_INLINE void multiply_high() {
    if constexpr (kSecondRows)
      _tile_dpbsud(3, 5, 7);
    else
      _tile_dpbsud(1, 4, 7);
  }
};

// Any others: the low byte of a product, and the high one with its sign.
template <>
struct CodePlanes<false> {
  static constexpr int kHighShift = 8;
  vi codes;

  explicit __attribute__((always_inline)) CodePlanes(vi wide)
      : codes(_mm512_mask_mov_epi16(_mm512_slli_epi32(wide, 16), 0x55555555, wide)) {}
  __attribute__((always_inline)) void put(vi integers, char* lows, char* highs) const {
    const vi even = _mm512_mullo_epi16(_mm512_srai_epi16(_mm512_slli_epi16(integers, 8), 8), codes);
    const vi odd = _mm512_mullo_epi16(_mm512_srai_epi16(integers, 8), codes);
    const __mmask64 odds = 0xaaaaaaaaaaaaaaaa;
    _mm512_store_si512(lows, _mm512_mask_mov_epi8(even, odds, _mm512_slli_epi16(odd, 8)));
    _mm512_store_si512(highs, _mm512_mask_mov_epi8(_mm512_srli_epi16(even, 8), odds, odd));
  }
  template <bool kSecondRows>
  QR_INLINE void multiply_high() {
    if constexpr (kSecondRows)
      _tile_dpbssd(3, 5, 7);
    else
      _tile_dpbssd(1, 4, 7);
  }
};

template <class Format>
struct AmxNestedMicro : QuantizedMicro<Format> {
  using QuantizedMicro<Format>::x;
  using Planes = CodePlanes<Format::kKinds == 2>;
  using Block = NestedBlock<Format>;
  static constexpr int64_t kSteps = kNestedBlock / 64, kPlaneBytes = kSteps * kTileBytes;
  static constexpr int64_t kBlockBytes = kSteps * 2 * Format::kHalfBytes;  // packed, of a panel
  static constexpr int64_t kFewRows = 8;
  alignas(64) mutable char buffers[2][2 * kPlaneBytes];

  explicit AmxNestedMicro(const GemmArgs& g) : QuantizedMicro<Format>(g) {
    TileConfig config;
    for (int tile = 0; tile < 6; ++tile) config.set(tile, int(x.height), 64);  // sums of two tiles of rows, and x
    for (int tile = 6; tile < 8; ++tile) config.set(tile, 16, 64);             // weights
    config.use();
  }
  ~AmxNestedMicro() { _tile_release(); }
  AmxNestedMicro(const AmxNestedMicro&) = delete;
  AmxNestedMicro& operator=(const AmxNestedMicro&) = delete;

  // Half a panel of a block at a time; the next one is taken apart before the products of this one.
  void multiply(const GemmArgs& g, int64_t row_begin, int64_t row_end, const char* packed, float* sums) const {
    const Format format(g);
    const int64_t panel = this->panel_of(g, packed), rows = row_end - row_begin, halves = 2 * x.steps / kSteps;
    std::memset(sums, 0, size_t(rows) * kPanel * 4);
    unpack(format, g, panel, packed, 0);
    for (int64_t index = 0; index < halves; ++index) {
      if (index + 1 < halves) unpack(format, g, panel, packed, index + 1);
      const Columns columns(Block(g, panel, x.groups, index / 2), int(index % 2));
      for (int64_t row = row_begin; row < row_end; row += 32)
        multiply_block(columns, index, row, row_end - row < 32 ? row_end - row : 32,
                       sums + (row - row_begin) * kPanel + index % 2 * W);
    }
    scale_columns<Format>(g, panel, rows, sums);
  }

  // The planes of half `index`, in its buffer.
  void unpack(const Format& format, const GemmArgs& g, int64_t panel, const char* packed, int64_t index) const {
    constexpr int kRows = Format::kGroup / 8, kRun = Format::kRowsTogether, kOfStep = 64 / Format::kGroup;
    const Block block(g, panel, x.groups, index / 2);
    const vi bias = _mm512_set1_epi8(int8_t(Format::kBias));
    const char* half = packed + index / 2 * kBlockBytes + index % 2 * Format::kHalfBytes;
    char* lows = buffers[index % 2];
    for (int64_t step = 0; step < kSteps; ++step, half += 2 * Format::kHalfBytes, lows += kTileBytes) {
      for (int64_t line = 0; line < Format::kHalfBytes; line += 64) {
        prefetch(half + kBlockBytes + line);
        prefetch_to_l2(half + 3 * kBlockBytes + line);
      }
      each<kOfStep>([&](auto group) __attribute__((always_inline)) {
        const Planes planes(block.codes_of(step * kOfStep + group, 0, int(index % 2)));
        each<kRows>([&](auto row) __attribute__((always_inline)) {
          constexpr int kRow = group * kRows + row, kFirst = kRow / kRun * kRun;
          vi integers[2];
          format.unsigned_row(half, kFirst, std::integral_constant<int, kRow - kFirst>(), integers[0], integers[1]);
          each<2>([&](auto four) __attribute__((always_inline)) {
            char* line = lows + (2 * kRow + four) * 64;
            planes.put(_mm512_sub_epi8(integers[four], bias), line, line + kPlaneBytes);
          });
        });
      });
    }
  }

  // What turns a block's integers for 16 columns into floats, in registers while rows pass.
  struct Columns {
    static constexpr int kPairs = Format::kKinds == 2 ? Format::kGroups / 2 : 0;
    vf scale, least;
    vi least_codes[kPairs + 1];

    Columns(const Block& block, int v) : scale(load(block.halves + v * W)), least(zero()) {
      if constexpr (kPairs > 0) least = mul(load(block.halves + kPanel + v * W), set1(-1.0f));
      each<kPairs>([&](auto pair) __attribute__((always_inline)) { least_codes[pair] = block.least_of(pair, v); });
    }
    // The operations of NestedBlock::scale_sums.
    __attribute__((always_inline)) vf scaled(vi integers, const RowGroup* of) const {
      const vf value = mul(floats(integers), scale);
      if constexpr (kPairs == 0) return value;
      vi inputs[2] = {none(), none()};
      each<kPairs>([&](auto pair) __attribute__((always_inline)) {
        inputs[pair % 2] = add_pairs(inputs[pair % 2], same(of[2 * pair].sum), least_codes[pair]);
      });
      return fma(floats(qr::add(inputs[0], inputs[1])), least, value);
    }
  };

  // Up to 32 rows; sums: of 16 columns.
  void multiply_block(const Columns& columns, int64_t index, int64_t row, int64_t rows, float* sums) const {
    alignas(64) int32_t lows[32 * W], highs[32 * W];
    multiply_tiles(x.line(row, index / 2 * kSteps), rows, buffers[index % 2], lows, highs);
    const Columns own = columns;  // which no store to `sums` changes
    const RowGroup* of = x.row_groups + row * x.groups + index / 2 * Format::kGroups;
    for (int64_t r = 0; r < rows; ++r, of += x.groups, sums += kPanel) {
      const vi high = _mm512_slli_epi32(_mm512_load_si512(highs + r * W), Planes::kHighShift);
      const vf value = own.scaled(qr::add(_mm512_load_si512(lows + r * W), high), of);
      store(sums, fma(value, set1(of->scale), load(sums)));
    }
  }

  void multiply_tiles(const int8_t* values, int64_t rows, const char* planes, int32_t* lows, int32_t* highs) const {
    const int64_t step_bytes = x.step_bytes(), second = x.steps * step_bytes;  // from one tile of rows to the next
    memory_barrier();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t step = 0; step < kSteps; ++step, values += step_bytes, planes += kTileBytes) {
      _tile_loadd(4, values, 64);
      _tile_loadd(6, planes, 64);
      _tile_dpbsud(0, 4, 6);
      _tile_loadd(7, planes + kPlaneBytes, 64);
      Planes::template multiply_high<false>();
      if (rows > 16) {
        _tile_loadd(5, values + second, 64);
        _tile_dpbsud(2, 5, 6);
        Planes::template multiply_high<true>();
      }
    }
    _tile_stored(0, lows, 64);
    _tile_stored(1, highs, 64);
    if (rows > 16) {
      _tile_stored(2, lows + 16 * W, 64);
      _tile_stored(3, highs + 16 * W, 64);
    }
    memory_barrier();
  }
};

// How a format's products are done by AMX tiles. Few rows are faster by vectors: as the set below has them, but where
// that one's tiles are small.
template <class Format>
struct ByAmx {
  using Micro = std::conditional_t<Format::kNested, AmxNestedMicro<Format>, AmxQuantizedMicro<Format>>;
  static inline decltype(Gemm::run) few_rows = nullptr;

  static void run(const GemmArgs& g, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end) {
    const auto chosen = g.rows > Micro::kFewRows ? run_gemm<Micro> : few_rows;
    chosen(g, row_begin, row_end, panel_begin, panel_end);
  }
  static void fill(Gemm& gemm) {
    if constexpr (kHasSmallTiles<Format>)
      few_rows = run_gemm<QuantizedMicro<Format>>;
    else
      few_rows = gemm.run;
    gemm.run = run;
  }
};

}  // namespace
}  // namespace qr
