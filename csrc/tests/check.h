// The little that these tests need of a framework.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

struct Test {
  const char* name;
  void (*run)();
  Test* next;
  static Test*& list() {
    static Test* head = nullptr;
    return head;
  }
  Test(const char* name, void (*run)()) : name(name), run(run), next(list()) { list() = this; }
  inline static int failures = 0;
};

#define TEST(name)                      \
  static void name();                   \
  static Test test_##name{#name, name}; \
  static void name()

#define CHECK(condition, ...)                                                  \
  do {                                                                         \
    if (!(condition)) {                                                        \
      if (++Test::failures <= 20) {                                            \
        std::printf("%s:%d: CHECK(%s) ", __FILE__, __LINE__, #condition);      \
        std::printf(" " __VA_ARGS__);                                          \
        std::printf("\n");                                                     \
      }                                                                        \
    }                                                                          \
  } while (false)

// Whether an emulator runs the tests (make test-arm), a hundred times slower. Sweeps take fewer cases then.
inline bool is_emulated() {
  static const bool emulated = std::getenv("QUIRE_EMULATED") != nullptr;
  return emulated;
}

// Whether a case of a sweep runs: each, or, emulated, one in `of`, which shares no factor with the lengths of the loops.
inline bool runs_case(int of) {
  static int count = 0;
  return !is_emulated() || count++ % of == 0;
}

inline std::mt19937& rng() {
  static std::mt19937 engine(7);
  return engine;
}

inline std::vector<float> random_floats(int64_t n, float scale = 1.0f) {
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> out(static_cast<size_t>(n));
  for (float& x : out) x = normal(rng());
  return out;
}

uint16_t to_bf16(float x);
float from_bf16(uint16_t x);
// Elements of a qr_dtype, rounded by the compiler's or our own slow conversion; and the floats they stand for.
std::vector<char> encode(const std::vector<float>& values, int32_t dtype);
std::vector<float> decode(const std::vector<char>& data, int32_t dtype);
// 64-byte aligned zeros.
char* aligned_zeros(int64_t bytes);
