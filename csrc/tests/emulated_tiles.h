// AMX tiles in plain C++, in place of the intrinsics: what the kernels for tiles compute can be tested on processors
// that have none. The compiler reads this before amx.cpp (-include). Operations as Intel's manual defines them; what
// faults there, ends the process.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace qr_emulated {
namespace {

struct Tiles {
  int32_t rows[8] = {}, bytes[8] = {};
  alignas(64) uint8_t data[8][16][64] = {};

  void configure(const void* config) {
    const auto* in = static_cast<const uint8_t*>(config);
    *this = Tiles();
    for (int tile = 0; tile < 8; ++tile) {
      uint16_t width;
      std::memcpy(&width, in + 16 + 2 * tile, 2);
      bytes[tile] = width;
      rows[tile] = in[48 + tile];
      need(rows[tile] <= 16 && width <= 64 && (rows[tile] == 0) == (width == 0), "no shape of a tile");
    }
    need(in[0] == 1, "an unknown palette");
  }
  void load(int tile, const void* base, int64_t stride) {
    zero(tile);
    for (int row = 0; row < rows[tile]; ++row)
      std::memcpy(data[tile][row], static_cast<const uint8_t*>(base) + row * stride, size_t(bytes[tile]));
  }
  void store(int tile, void* base, int64_t stride) const {
    need_shape(tile);
    for (int row = 0; row < rows[tile]; ++row)
      std::memcpy(static_cast<uint8_t*>(base) + row * stride, data[tile][row], size_t(bytes[tile]));
  }
  void zero(int tile) {
    need_shape(tile);
    std::memset(data[tile], 0, sizeof data[tile]);
  }

  // Sums of four products of bytes, of the types First and Second.
  template <class First, class Second>
  void dot_bytes(int out, int a, int b) {
    need_product(out, a, b);
    for (int row = 0; row < rows[out]; ++row) {
      auto* sums = reinterpret_cast<int32_t*>(data[out][row]);
      const auto* x = reinterpret_cast<const First*>(data[a][row]);
      for (int four = 0; four < rows[b]; ++four) {
        const auto* w = reinterpret_cast<const Second*>(data[b][four]);
        for (int column = 0; column < bytes[out] / 4; ++column)
          for (int i = 0; i < 4; ++i) sums[column] += int32_t(x[four * 4 + i]) * int32_t(w[column * 4 + i]);
      }
    }
  }

  // Sums of products of bfloat16: those of even and of odd k in a chain each, which are added to what was there.
  void dot_bf16(int out, int a, int b) {
    need_product(out, a, b);
    for (int row = 0; row < rows[out]; ++row) {
      float chains[2][16] = {};
      for (int pair = 0; pair < rows[b]; ++pair)
        for (int column = 0; column < bytes[out] / 4; ++column)
          for (int i = 0; i < 2; ++i)
            chains[i][column] = __builtin_fmaf(bf16(data[a][row], pair * 2 + i), bf16(data[b][pair], column * 2 + i),
                                               chains[i][column]);
      auto* sums = reinterpret_cast<float*>(data[out][row]);
      for (int column = 0; column < bytes[out] / 4; ++column) sums[column] += chains[0][column] + chains[1][column];
    }
  }

 private:
  static float bf16(const uint8_t* row, int index) {
    uint16_t half;
    std::memcpy(&half, row + 2 * index, 2);
    const uint32_t bits = uint32_t(half) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  }
  static void need(bool holds, const char* otherwise) {
    if (holds) return;
    std::fprintf(stderr, "emulated tiles: %s\n", otherwise);
    std::abort();
  }
  void need_shape(int tile) const { need(rows[tile] > 0, "a tile without a shape"); }
  void need_product(int out, int a, int b) const {
    need_shape(out);
    need(rows[out] == rows[a] && bytes[a] == 4 * rows[b] && bytes[b] == bytes[out], "shapes that do not fit");
  }
};

thread_local Tiles tiles;

}  // namespace
}  // namespace qr_emulated

#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#undef _tile_dpbsud
#undef _tile_dpbusd
#define _tile_loadconfig(config) qr_emulated::tiles.configure(config)
#define _tile_release() (qr_emulated::tiles = {})
#define _tile_loadd(tile, base, stride) qr_emulated::tiles.load(tile, base, stride)
#define _tile_stream_loadd(tile, base, stride) qr_emulated::tiles.load(tile, base, stride)
#define _tile_stored(tile, base, stride) qr_emulated::tiles.store(tile, base, stride)
#define _tile_zero(tile) qr_emulated::tiles.zero(tile)
#define _tile_dpbf16ps(out, a, b) qr_emulated::tiles.dot_bf16(out, a, b)
#define _tile_dpbssd(out, a, b) qr_emulated::tiles.dot_bytes<int8_t, int8_t>(out, a, b)
#define _tile_dpbsud(out, a, b) qr_emulated::tiles.dot_bytes<int8_t, uint8_t>(out, a, b)
#define _tile_dpbusd(out, a, b) qr_emulated::tiles.dot_bytes<uint8_t, int8_t>(out, a, b)
