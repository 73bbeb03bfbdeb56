// Blocks of GGUF's quantised types taken apart: integers, and the scales and offsets of their groups. Layouts: ggml,
// src/ggml-common.h and ggml-quants.c; `quire/ops/shared/blocks.py` says the same in torch. Plain loops of fixed length, which
// the compiler turns into vectors of the instruction set. Any bytes are a block.
#pragma once

#include <cstring>

#include "../../elements.h"
#include "../../kernels.h"
#include "../simd.h"

namespace qr {
namespace {

QR_INLINE float half_at(const uint8_t* p) {
  uint16_t bits;
  std::memcpy(&bits, p, 2);
  return from_half(bits);
}

// Of each run of kWidth bytes the low nibbles, then the high ones, less kZero.
template <int kBytes, int kWidth, int kZero>
QR_INLINE void nibbles(int8_t* __restrict out, const uint8_t* __restrict in) {
  for (int run = 0; run < kBytes; run += kWidth)
    for (int i = 0; i < kWidth; ++i) {
      out[2 * run + i] = int8_t((in[run + i] & 15) - kZero);
      out[2 * run + kWidth + i] = int8_t((in[run + i] >> 4) - kZero);
    }
}

// Of each run of 32 bytes the lowest two bits, then the next ones ..., times 2^kShift, added to out.
template <int kBytes, int kShift>
QR_INLINE void add_pairs(int8_t* __restrict out, const uint8_t* __restrict in) {
  for (int run = 0; run < kBytes; run += 32)
    for (int pair = 0; pair < 4; ++pair)
      for (int i = 0; i < 32; ++i)
        out[4 * run + 32 * pair + i] = int8_t(out[4 * run + 32 * pair + i] + ((in[run + i] >> 2 * pair & 3) << kShift));
}

// Of 32 bytes the lowest bits, then the next ones ..., times 2^kShift, added to out.
template <int kShift>
QR_INLINE void add_bits(int8_t* __restrict out, const uint8_t* __restrict in) {
  for (int bit = 0; bit < 8; ++bit)
    for (int i = 0; i < 32; ++i) out[32 * bit + i] = int8_t(out[32 * bit + i] + ((in[i] >> bit & 1) << kShift));
}

// The fifth bits of 32 elements, in order.
QR_INLINE void add_fifth_bits(int8_t* __restrict out, const uint8_t* __restrict in) {
  uint32_t bits;
  std::memcpy(&bits, in, 4);
  for (int i = 0; i < 32; ++i) out[i] = int8_t(out[i] + ((bits >> i & 1) << 4));
}

// The six-bit scales and minima of Q4_K and Q5_K, behind the two numbers that they are multiplied with. The first four
// of each have a byte of their own. The others have their low bits in the last four bytes and their high ones above the
// first four.
QR_INLINE void scales_and_minima(uint16_t* halves, int8_t* codes, const uint8_t* block) {
  std::memcpy(halves, block, 4);
  const uint8_t *first = block + 4, *second = block + 8, *last = block + 12;
  for (int i = 0; i < 4; ++i) {
    codes[2 * i] = int8_t(first[i] & 63);
    codes[2 * i + 1] = int8_t(second[i] & 63);
    codes[2 * (4 + i)] = int8_t((last[i] & 15) | (first[i] >> 2 & 48));
    codes[2 * (4 + i) + 1] = int8_t((last[i] >> 4) | (second[i] >> 2 & 48));
  }
}

template <int kBytes>
struct Blocks {  // of 32 elements in one group
  static constexpr int64_t kElements = 32, kSize = kBytes, kGroup = 32, kNested = 0;
  static constexpr bool kOffsets = false, kHalves = true;
  static void scales(float* scales, float*, const uint8_t* block) { *scales = half_at(block); }
};
template <int kBytes, int kZero>
struct BlocksWithLeast : Blocks<kBytes> {
  static constexpr bool kOffsets = true, kHalves = false;
  static void scales(float* scales, float* offsets, const uint8_t* block) {
    *scales = half_at(block);
    *offsets = half_at(block + 2) + kZero * *scales;
  }
};
// Of 256 elements; kCodes: of a group. kRaised: the integer that stands for the least value of a group with an offset.
template <int kBytes, int kOfGroup, int kCodes = 1, int kRaised = 0>
struct SuperBlocks {
  static constexpr int64_t kElements = 256, kSize = kBytes, kGroup = kOfGroup, kNested = kCodes;
  static constexpr bool kOffsets = kCodes == 2, kHalves = false;
  static constexpr float kZero = kRaised;
};

// Of 256 ternary numbers with one scale, which both groups take.
template <int kBytes>
struct TernaryBlocks {
  static constexpr int64_t kElements = 256, kSize = kBytes, kGroup = kTernaryGroup, kNested = 0;
  static constexpr bool kOffsets = false, kHalves = true;
  static void scales(float* scales, float*, const uint8_t* block) {
    scales[0] = scales[1] = half_at(block + kBytes - 2);
  }
};

struct Q4_0 : Blocks<18> {
  static constexpr int32_t kId = QR_Q4_0, kFormat = QR_INT4;
  static void values(int8_t* out, const uint8_t* block) { nibbles<16, 16, 8>(out, block + 2); }
};

struct Q4_1 : BlocksWithLeast<20, 8> {
  static constexpr int32_t kId = QR_Q4_1, kFormat = QR_INT4;
  static void values(int8_t* out, const uint8_t* block) { nibbles<16, 16, 8>(out, block + 4); }
};

struct Q5_0 : Blocks<22> {
  static constexpr int32_t kId = QR_Q5_0, kFormat = QR_INT5;
  static void values(int8_t* out, const uint8_t* block) {
    nibbles<16, 16, 16>(out, block + 6);
    add_fifth_bits(out, block + 2);
  }
};

struct Q5_1 : BlocksWithLeast<24, 16> {
  static constexpr int32_t kId = QR_Q5_1, kFormat = QR_INT5;
  static void values(int8_t* out, const uint8_t* block) {
    nibbles<16, 16, 16>(out, block + 8);
    add_fifth_bits(out, block + 4);
  }
};

struct Q8_0 : Blocks<34> {
  static constexpr int32_t kId = QR_Q8_0, kFormat = QR_INT8;
  static void values(int8_t* out, const uint8_t* block) { std::memcpy(out, block + 2, 32); }
};

struct Q2_K : SuperBlocks<84, 16, 2, 1> {
  static constexpr int32_t kId = QR_Q2_K, kFormat = QR_INT2;
  static void values(int8_t* out, const uint8_t* block) {
    std::memset(out, -1, 256);
    add_pairs<64, 0>(out, block + 16);
  }
  static void codes(uint16_t* halves, int8_t* codes, const uint8_t* block) {
    std::memcpy(halves, block + 80, 4);
    for (int i = 0; i < 16; ++i) {
      codes[2 * i] = int8_t(block[i] & 15);
      codes[2 * i + 1] = int8_t(block[i] >> 4);
    }
  }
};

struct Q3_K : SuperBlocks<110, 16> {
  static constexpr int32_t kId = QR_Q3_K, kFormat = QR_INT3;
  static void values(int8_t* out, const uint8_t* block) {
    std::memset(out, -4, 256);
    add_pairs<64, 0>(out, block + 32);
    add_bits<2>(out, block);
  }
  // Six bits each: the low four as nibbles of eight bytes, the high two in the four bytes behind them.
  static void codes(uint16_t* halves, int8_t* codes, const uint8_t* block) {
    const uint8_t *low = block + 96, *high = block + 104;
    std::memcpy(halves, block + 108, 2);
    for (int i = 0; i < 16; ++i) {
      const int code = (low[i % 8] >> i / 8 * 4 & 15) | (high[i % 4] >> i / 4 * 2 & 3) << 4;
      codes[i] = int8_t(code - 32);
    }
  }
};

struct Q4_K : SuperBlocks<144, 32, 2, 8> {
  static constexpr int32_t kId = QR_Q4_K, kFormat = QR_INT4;
  static void values(int8_t* out, const uint8_t* block) { nibbles<128, 32, 8>(out, block + 16); }
  static void codes(uint16_t* halves, int8_t* codes, const uint8_t* block) { scales_and_minima(halves, codes, block); }
};

struct Q5_K : SuperBlocks<176, 32, 2, 16> {
  static constexpr int32_t kId = QR_Q5_K, kFormat = QR_INT5;
  static void values(int8_t* out, const uint8_t* block) {
    nibbles<128, 32, 16>(out, block + 48);
    add_bits<4>(out, block + 16);
  }
  static void codes(uint16_t* halves, int8_t* codes, const uint8_t* block) { scales_and_minima(halves, codes, block); }
};

struct Q6_K : SuperBlocks<210, 16> {
  static constexpr int32_t kId = QR_Q6_K, kFormat = QR_INT6;
  static void values(int8_t* out, const uint8_t* block) {
    nibbles<128, 64, 32>(out, block);
    add_pairs<64, 4>(out, block + 128);
  }
  static void codes(uint16_t* halves, int8_t* codes, const uint8_t* block) {
    std::memcpy(halves, block + 208, 2);
    std::memcpy(codes, block + 192, 16);
  }
};

struct Iq4Nl : Blocks<18> {
  static constexpr int32_t kId = QR_IQ4_NL, kFormat = QR_LEVELS;
  static void values(int8_t* out, const uint8_t* block) { nibbles<16, 16, 0>(out, block + 2); }
};

struct Iq4Xs : SuperBlocks<136, 32> {
  static constexpr int32_t kId = QR_IQ4_XS, kFormat = QR_LEVELS;
  static void values(int8_t* out, const uint8_t* block) { nibbles<128, 16, 0>(out, block + 8); }
  static void codes(uint16_t* halves, int8_t* codes, const uint8_t* block) {
    std::memcpy(halves, block, 2);
    for (int i = 0; i < 8; ++i) {
      const int code = (block[4 + i / 2] >> i % 2 * 4 & 15) | (block[2 + i / 4] >> i % 4 * 2 & 3) << 4;
      codes[i] = int8_t(code - 32);
    }
  }
};

// The next kDigits of kBytes fractions in base 3, a byte being a fraction of 256: less 1 they are the values.
template <int kBytes, int kDigits>
QR_INLINE void digits(int8_t* __restrict out, const uint8_t* __restrict in) {
  uint8_t power = 1;
  for (int digit = 0; digit < kDigits; ++digit, power = uint8_t(power * 3))
    for (int i = 0; i < kBytes; ++i) out[digit * kBytes + i] = int8_t((uint8_t(in[i] * power) * 3 >> 8) - 1);
}

struct Tq1_0 : TernaryBlocks<54> {
  static constexpr int32_t kId = QR_TQ1_0, kFormat = QR_INT2;
  static void values(int8_t* out, const uint8_t* block) {
    digits<32, 5>(out, block);
    digits<16, 5>(out + 160, block + 32);
    digits<4, 4>(out + 240, block + 48);
  }
};

struct Tq2_0 : TernaryBlocks<66> {
  static constexpr int32_t kId = QR_TQ2_0, kFormat = QR_INT2;
  static void values(int8_t* out, const uint8_t* block) {
    std::memset(out, -1, 256);
    add_pairs<64, 0>(out, block);
  }
};

// Scales are powers of two (E8M0), 2 ** (exponent - 127), here halved because levels are doubled. Those of exponents 0
// and 1 are subnormal.
struct Mxfp4 : Blocks<17> {
  static constexpr int32_t kId = QR_MXFP4, kFormat = QR_LEVELS;
  static constexpr bool kHalves = false;
  static void values(int8_t* out, const uint8_t* block) { nibbles<16, 16, 0>(out, block + 1); }
  static void scales(float* scales, float*, const uint8_t* block) {
    const uint32_t bits = *block < 2 ? uint32_t(1) << (21 + *block) : uint32_t(*block - 1) << 23;
    std::memcpy(scales, &bits, 4);
  }
};

template <class Type>
void values_of(int8_t* out, const uint8_t* blocks, int64_t count) {
  for (int64_t i = 0; i < count; ++i) Type::values(out + i * Type::kElements, blocks + i * Type::kSize);
}

template <class Type>
void scales_of_block(float* scales, float* offsets, const uint8_t* block) {
  if constexpr (Type::kNested == 0) {
    Type::scales(scales, offsets, block);
  } else {
    uint16_t halves[2] = {};
    int8_t codes[Type::kNested * Type::kElements / Type::kGroup];
    Type::codes(halves, codes, block);
    for (int64_t i = 0; i < Type::kElements / Type::kGroup; ++i) {
      scales[i] = from_half(halves[0]) * float(codes[i * Type::kNested]);
      if (Type::kNested == 2) offsets[i] = Type::kZero * scales[i] - from_half(halves[1]) * float(codes[i * 2 + 1]);
    }
  }
}

template <class Type>
void scales_of(float* scales, float* offsets, const uint8_t* blocks, int64_t count) {
  constexpr int64_t kGroups = Type::kElements / Type::kGroup;
  for (int64_t i = 0; i < count; ++i)
    scales_of_block<Type>(scales + i * kGroups, offsets + i * kGroups, blocks + i * Type::kSize);
}

template <class Type>
constexpr BlockType block_type_of() {
  BlockType type{Type::kId,      Type::kFormat,  Type::kElements, Type::kSize,     Type::kGroup,
                 Type::kOffsets, Type::kHalves, Type::kNested,   values_of<Type>, scales_of<Type>, nullptr};
  if constexpr (Type::kNested != 0) type.codes = Type::codes;
  return type;
}

const BlockType* block_type(int32_t id) {
  static constexpr BlockType types[] = {
      block_type_of<Q4_0>(), block_type_of<Q4_1>(), block_type_of<Q5_0>(),  block_type_of<Q5_1>(),
      block_type_of<Q8_0>(), block_type_of<Q2_K>(), block_type_of<Q3_K>(),  block_type_of<Q4_K>(),
      block_type_of<Q5_K>(), block_type_of<Q6_K>(), block_type_of<Iq4Nl>(), block_type_of<Iq4Xs>(),
      block_type_of<Mxfp4>(), block_type_of<Tq1_0>(), block_type_of<Tq2_0>()};
  for (const BlockType& type : types)
    if (type.id == id) return &type;
  return nullptr;
}

void to_halves(uint16_t* out, const float* x, float unit, int64_t n) {
  const vf divisor = set1(unit);
  auto* halves = reinterpret_cast<Fp16*>(out);
  each_vector(n, [&](int64_t i, int count) __attribute__((always_inline)) {
    store(halves + i, div(load_some(x + i, count), divisor), count);
  });
}

template <class T>
void store_numbers(void* out, const float* numbers, int64_t n) {
  for (int64_t i = 0; i < n; i += W) store(static_cast<T*>(out) + i, load(numbers + i));
}

void read_blocks(void* out, int32_t dtype, const BlockType& type, const uint8_t* blocks, int64_t count,
                 const int8_t* levels) {
  alignas(64) int8_t values[kBlockElements];
  alignas(64) float numbers[kBlockElements], scales[kMostBlockGroups], offsets[kMostBlockGroups] = {};
  const int64_t elements = count * type.elements;
  type.values(values, blocks, count);
  type.scales(scales, offsets, blocks, count);
  if (levels != nullptr)
    for (int64_t i = 0; i < elements; ++i) values[i] = levels[values[i]];
  for (int64_t begin = 0; begin < elements; begin += type.group) {
    const float scale = scales[begin / type.group], offset = offsets[begin / type.group];
    for (int64_t i = begin; i < begin + type.group; ++i) numbers[i] = float(values[i]) * scale;
    if (type.has_offsets)
      for (int64_t i = begin; i < begin + type.group; ++i) numbers[i] += offset;
  }
  if (dtype == QR_FLOAT32) store_numbers<float>(out, numbers, elements);
  if (dtype == QR_BFLOAT16) store_numbers<Bf16>(out, numbers, elements);
  if (dtype == QR_FLOAT16) store_numbers<Fp16>(out, numbers, elements);
}

}  // namespace
}  // namespace qr
