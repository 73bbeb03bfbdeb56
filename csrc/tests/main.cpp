// Runs every test on the instruction set named: `quire_cpu_tests amx`; or those whose names hold one of the words that
// follow. Exit code 77 when this machine lacks it.
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "check.h"
#include "quire_cpu.h"

uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

float from_bf16(uint16_t x) {
  uint32_t bits = uint32_t(x) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

static float from_fp16(uint16_t h) {
  const int exponent = (h >> 10) & 31, mantissa = h & 0x3ff;
  float value = exponent == 0 ? std::ldexp(float(mantissa), -24) : std::ldexp(float(mantissa + 1024), exponent - 25);
  return (h & 0x8000) != 0 ? -value : value;
}

// Values here are below 65504: scale so that one unit is one place of the result, and round there.
static uint16_t to_fp16(float x) {
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  float magnitude = std::fabs(x);
  int exponent = magnitude == 0 ? -14 : std::max(-14, std::ilogb(magnitude));
  auto units = uint16_t(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));
  return uint16_t(sign | (uint16_t((exponent + 14) << 10) + units));
}

std::vector<char> encode(const std::vector<float>& values, int32_t dtype) {
  std::vector<char> out(values.size() * (dtype == QR_FLOAT32 ? 4 : 2));
  for (size_t i = 0; i < values.size(); ++i) {
    if (dtype == QR_FLOAT32) {
      std::memcpy(&out[i * 4], &values[i], 4);
    } else {
      uint16_t bits = dtype == QR_BFLOAT16 ? to_bf16(values[i]) : to_fp16(values[i]);
      std::memcpy(&out[i * 2], &bits, 2);
    }
  }
  return out;
}

std::vector<float> decode(const std::vector<char>& data, int32_t dtype) {
  std::vector<float> out(data.size() / (dtype == QR_FLOAT32 ? 4 : 2));
  for (size_t i = 0; i < out.size(); ++i) {
    if (dtype == QR_FLOAT32) {
      std::memcpy(&out[i], &data[i * 4], 4);
    } else {
      uint16_t bits;
      std::memcpy(&bits, &data[i * 2], 2);
      out[i] = dtype == QR_BFLOAT16 ? from_bf16(bits) : from_fp16(bits);
    }
  }
  return out;
}

char* aligned_zeros(int64_t bytes) {
  const size_t rounded = size_t(bytes + 63) / 64 * 64;
  void* memory = std::aligned_alloc(64, rounded);
  std::memset(memory, 0, rounded);
  return static_cast<char*>(memory);
}

// Whether one of the words is in the name, or there are none.
static bool is_wanted(const char* name, char** words) {
  bool found = *words == nullptr;
  for (; *words != nullptr; ++words) found = found || std::strstr(name, *words) != nullptr;
  return found;
}

int main(int argc, char** argv) {
  const char* names[] = {"",    "avx2", "avx_vnni",     "avx512",   "avx512_vnni", "avx512_bf16",
                         "amx", "neon", "neon_dotprod", "neon_bf16"};
  int32_t isa = 0;  // the best
  for (int32_t i = 1; argc > 1 && i <= QR_NEON_BF16; ++i)
    if (std::strcmp(argv[1], names[i]) == 0) isa = i;
  if (qr_init(isa, 2) != QR_OK) {
    std::printf("skipped: not on this machine\n");
    return 77;
  }
  isa = qr_isa_in_use();
  for (Test* test = Test::list(); test != nullptr; test = test->next) {
    if (!is_wanted(test->name, argv + (argc > 1 ? 2 : 1))) continue;
    const int before = Test::failures;
    const auto start = std::chrono::steady_clock::now();
    test->run();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    std::printf("%-12s %s %s (%.1f s)\n", names[isa], Test::failures == before ? "ok  " : "FAIL", test->name,
                seconds.count());
    std::fflush(stdout);
  }
  return Test::failures == 0 ? 0 : 1;
}
