// Weights packed from blocks of GGUF's types: products with unit vectors give the numbers that the blocks stand for.
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "check.h"
#include "quire_cpu.h"

namespace {

struct Type {
  int32_t id, format;
  int64_t elements, bytes, group;
  int64_t nested;
  bool has_offsets;
  std::vector<int> halves;  // where numbers of float16 are
};

const std::vector<Type> types = {
    {QR_Q4_0, QR_INT4, 32, 18, 32, 0, false, {0}},     {QR_Q4_1, QR_INT4, 32, 20, 32, 0, true, {0, 2}},
    {QR_Q5_0, QR_INT5, 32, 22, 32, 0, false, {0}},     {QR_Q5_1, QR_INT5, 32, 24, 32, 0, true, {0, 2}},
    {QR_Q8_0, QR_INT8, 32, 34, 32, 0, false, {0}},     {QR_Q2_K, QR_INT2, 256, 84, 16, 2, false, {80, 82}},
    {QR_Q3_K, QR_INT3, 256, 110, 16, 1, false, {108}}, {QR_Q4_K, QR_INT4, 256, 144, 32, 2, false, {0, 2}},
    {QR_Q5_K, QR_INT5, 256, 176, 32, 2, false, {0, 2}}, {QR_Q6_K, QR_INT6, 256, 210, 16, 1, false, {208}},
    {QR_IQ4_NL, QR_LEVELS, 32, 18, 32, 0, false, {0}}, {QR_IQ4_XS, QR_LEVELS, 256, 136, 32, 1, false, {0}},
    {QR_MXFP4, QR_LEVELS, 32, 17, 32, 0, false, {}},   {QR_TQ1_0, QR_INT2, 256, 54, 128, 0, false, {52}},
    {QR_TQ2_0, QR_INT2, 256, 66, 128, 0, false, {64}},
};
const int8_t levels[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// Random bytes, but for float16 numbers, which are between 2^-8 and 2^-7.
std::vector<uint8_t> random_blocks(const Type& type, int64_t count) {
  std::uniform_int_distribution<int> any(0, 255);
  std::vector<uint8_t> out(size_t(count * type.bytes));
  for (uint8_t& byte : out) byte = uint8_t(any(rng()));
  for (int64_t i = 0; i < count; ++i) {
    for (int place : type.halves) out[size_t(i * type.bytes + place + 1)] = uint8_t(0x1c + any(rng()) % 4);
    if (type.halves.empty()) out[size_t(i * type.bytes)] = uint8_t(118 + any(rng()) % 4);
  }
  return out;
}

}  // namespace

TEST(packed_blocks_stand_for_their_numbers) {
  const int64_t n = 37, k = 512;
  std::vector<float> unit_vectors(size_t(k * k), 0.0f);
  for (int64_t i = 0; i < k; ++i) unit_vectors[size_t(i * k + i)] = 1.0f;
  for (const Type& type : types) {
    if (!runs_case(5)) continue;
    const int64_t row_bytes = k / type.elements * type.bytes;
    const int64_t nested_bytes = type.nested * 32 * (2 + 256 / type.group) * (k / 256) * 2;  // of two panels
    const int64_t scale_bytes = std::max(64 * k / type.group * 2, nested_bytes);
    const std::vector<uint8_t> blocks = random_blocks(type, n * k / type.elements);
    char* packed = aligned_zeros(qr_quantized_bytes(type.format, n, k));
    std::vector<char> scales(size_t(scale_bytes), 0), offsets(size_t(scale_bytes), 0);
    float largest = 0;
    int32_t are_halves = 0;
    CHECK(qr_block_range(&largest, &are_halves, type.id, blocks.data(), n, row_bytes, k) == QR_OK);
    const double unit = are_halves != 0 ? 1.0 : std::ldexp(1.0, std::ilogb(largest) - 14);
    auto* second = type.has_offsets ? reinterpret_cast<uint16_t*>(offsets.data()) : nullptr;
    for (int64_t row = 0; row < n; row += 19)
      CHECK(qr_pack_blocks(packed, scales.data(), second, unit, type.id, n, k,
                           blocks.data() + row * row_bytes, std::min<int64_t>(19, n - row), row_bytes, row) == QR_OK);
    qr_weight weight{};
    weight.packed = packed;
    weight.scales = scales.data();
    weight.offsets = second;
    weight.levels = type.format == QR_LEVELS ? levels : nullptr;
    weight.format = type.format;
    weight.group = type.group;
    weight.outputs = n;
    weight.unit = unit;
    weight.nested = type.nested;
    // float16 rounds scales that are not nested
    const float tolerance = 128 * largest * (type.nested == 0 ? 1e-3f : 1e-6f * 128);
    std::vector<float> numbers(size_t(n * k)), products(size_t(n * k));
    CHECK(qr_block_rows(numbers.data(), QR_FLOAT32, type.id, blocks.data(), n, row_bytes, k, weight.levels, nullptr,
                        n) == QR_OK);
    CHECK(qr_linear_quantized(products.data(), QR_FLOAT32, unit_vectors.data(), QR_FLOAT32, &weight, 1, k, n, k,
                              nullptr, QR_NONE, nullptr) == QR_OK);
    for (int64_t row = 0; row < n; ++row)
      for (int64_t i = 0; i < k; ++i) {
        const float expected = numbers[size_t(row * k + i)], found = products[size_t(i * n + row)];
        CHECK(std::fabs(found - expected) <= tolerance, "type %d: %g, not %g", type.id, found, expected);
      }
    std::free(packed);
  }
}

TEST(a_range_knows_numbers_that_are_none) {
  for (const Type& type : types) {
    if (type.halves.empty()) continue;
    std::vector<uint8_t> blocks(size_t(5 * type.bytes), 17);
    const size_t place = size_t(4 * type.bytes + type.halves.back());
    blocks[place] = 0;
    blocks[place + 1] = 0x7c;
    float largest = 0;
    int32_t are_halves = 0;
    CHECK(qr_block_range(&largest, &are_halves, type.id, blocks.data(), 5, type.bytes, type.elements) == QR_OK);
    CHECK(std::isnan(largest));
  }
}

TEST(blocks_of_no_type_and_rows_of_half_a_block_are_refused) {
  float largest;
  int32_t are_halves;
  const uint8_t blocks[1024] = {};
  for (int32_t id : {0, 1, 4, 9, 15, 22, 40, -1})
    CHECK(qr_block_range(&largest, &are_halves, id, blocks, 1, 256, 256) == QR_EINVAL);
  CHECK(qr_block_range(&largest, &are_halves, QR_Q4_0, blocks, 1, 18, 33) == QR_EINVAL);
  CHECK(qr_block_range(&largest, &are_halves, QR_Q4_K, blocks, 1, 144, 128) == QR_EINVAL);
  CHECK(qr_block_range(&largest, &are_halves, QR_Q4_0, blocks, 2, 17, 32) == QR_EINVAL);
  CHECK(qr_block_range(&largest, &are_halves, QR_Q4_0, blocks, 1, 18, 32) == QR_OK);
}
