// Passes over one row of logits.
#pragma once

#include "../kernels.h"
#include "simd.h"

namespace qr {
namespace {

// The largest value and the first index that holds it. NaN counts as the largest, as in torch.
Largest find_largest(const float* x, int64_t n) {
  vf top = set1(-__builtin_inff());
  int64_t i = 0;
  for (; i + W <= n; i += W) top = max(top, load(x + i));  // NaN in x: stays only if it is the last; found below
  float best = largest(top);
  for (; i < n; ++i) best = x[i] > best ? x[i] : best;
  // A vector holds the best or a NaN exactly when not all of it is below the best.
  const vf limit = set1(best);
  Largest found{best, 0};
  bool seen = false;
  for (i = 0; i < n; i += W) {
    const int count = n - i < W ? int(n - i) : W;
    if (count == W && all_less(load(x + i), limit)) continue;
    for (int j = 0; j < count; ++j) {
      const float value = x[i + j];
      if (value != value) return Largest{value, i + j};
      if (!seen && value == best) {
        found.index = i + j;
        seen = true;
      }
    }
  }
  return found;
}

// Sum of exp(x - shift): float32 within 1024 elements, double beyond, so that long rows lose nothing.
double sum_exponentials(const float* x, int64_t n, float shift) {
  const vf offset = set1(shift);
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += 1024) {
    const int64_t end = begin + 1024 < n ? begin + 1024 : n;
    vf part = zero();
    int64_t i = begin;
    for (; i + W <= end; i += W) part = add(part, exp(sub(load(x + i), offset)));
    if (i < end) {
      alignas(64) float lanes[W] = {};
      store(lanes, exp(sub(load(x + i, int(end - i)), offset)), int(end - i));
      part = add(part, load(lanes));
    }
    total += double(sum(part));
  }
  return total;
}

#if defined(__AVX512F__)
using vd = __m512d;
constexpr int kDoubles = 8;
QR_INLINE vd set1d(double x) { return _mm512_set1_pd(x); }
QR_INLINE vd widen_double(const float* p) { return _mm512_cvtps_pd(_mm256_loadu_ps(p)); }
QR_INLINE vd fmad(vd a, vd b, vd c) { return _mm512_fmadd_pd(a, b, c); }
QR_INLINE vd addd(vd a, vd b) { return _mm512_add_pd(a, b); }
QR_INLINE vd subd(vd a, vd b) { return _mm512_sub_pd(a, b); }
QR_INLINE vd divd(vd a, vd b) { return _mm512_div_pd(a, b); }
QR_INLINE vd muld(vd a, vd b) { return _mm512_mul_pd(a, b); }
QR_INLINE vd maxd(vd a, vd b) { return _mm512_max_pd(a, b); }
QR_INLINE vd roundd(vd a) { return _mm512_roundscale_pd(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
QR_INLINE vd scale_by(vd a, vd n) { return _mm512_scalef_pd(a, n); }
QR_INLINE void store_rounded(int64_t* p, vd v) { _mm512_storeu_si512(p, _mm512_cvtpd_epi64(v)); }
#elif defined(__AVX2__)
using vd = __m256d;
constexpr int kDoubles = 4;
QR_INLINE vd set1d(double x) { return _mm256_set1_pd(x); }
QR_INLINE vd widen_double(const float* p) { return _mm256_cvtps_pd(_mm_loadu_ps(p)); }
QR_INLINE vd fmad(vd a, vd b, vd c) { return _mm256_fmadd_pd(a, b, c); }
QR_INLINE vd addd(vd a, vd b) { return _mm256_add_pd(a, b); }
QR_INLINE vd subd(vd a, vd b) { return _mm256_sub_pd(a, b); }
QR_INLINE vd divd(vd a, vd b) { return _mm256_div_pd(a, b); }
QR_INLINE vd muld(vd a, vd b) { return _mm256_mul_pd(a, b); }
QR_INLINE vd maxd(vd a, vd b) { return _mm256_max_pd(a, b); }
QR_INLINE vd roundd(vd a) { return _mm256_round_pd(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
QR_INLINE vd scale_by(vd a, vd n) {
  __m256i exponent = _mm256_cvtepi32_epi64(_mm256_cvtpd_epi32(n));
  exponent = _mm256_slli_epi64(_mm256_add_epi64(exponent, _mm256_set1_epi64x(1023)), 52);
  return _mm256_mul_pd(a, _mm256_castsi256_pd(exponent));
}
// Adding 2^52 leaves the rounded integer in the low bits; values are below 2^41.
QR_INLINE void store_rounded(int64_t* p, vd v) {
  const __m256d magic = _mm256_set1_pd(4503599627370496.0);
  __m256i bits = _mm256_sub_epi64(_mm256_castpd_si256(_mm256_add_pd(v, magic)), _mm256_castpd_si256(magic));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), bits);
}
#endif

// e^x * 2^40 for x <= 0, within an ulp: degree 13 on |r| <= ln(2)/2. Below -40 the result rounds to 0 anyway.
QR_INLINE vd weight_of(vd x) {
  x = maxd(set1d(-40.0), x);
  const vd n = roundd(muld(x, set1d(1.4426950408889634074)));
  vd r = fmad(n, set1d(-6.93147180369123816490e-01), x);
  r = fmad(n, set1d(-1.90821492927058770002e-10), r);
  const double factorials[] = {6227020800.0, 479001600.0, 39916800.0, 3628800.0, 362880.0, 40320.0, 5040.0,
                               720.0,        120.0,       24.0,       6.0,       2.0,      1.0,     1.0};
  vd p = set1d(1.0 / factorials[0]);
  for (int i = 1; i < 14; ++i) p = fmad(p, r, set1d(1.0 / factorials[i]));
  return scale_by(p, addd(n, set1d(40.0)));
}

void sample_weights(int64_t* out, const float* logits, int64_t n, double largest, double temperature) {
  const vd top = set1d(largest), divisor = set1d(temperature);
  auto eight = [&](int64_t* to, const float* from) __attribute__((always_inline)) {
    store_rounded(to, weight_of(divd(subd(widen_double(from), top), divisor)));
  };
  int64_t i = 0;
  for (; i + kDoubles <= n; i += kDoubles) eight(out + i, logits + i);
  if (i < n) {
    float rest[kDoubles];
    int64_t weights[kDoubles];
    for (int j = 0; j < kDoubles; ++j) rest[j] = i + j < n ? logits[i + j] : float(largest);
    eight(weights, rest);
    for (int64_t j = i; j < n; ++j) out[j] = weights[j - i];
  }
}

// How many of x are larger than `value`, and how many of x[0 .. same_before] equal it.
int64_t count_not_below(const float* x, int64_t n, float value, int64_t same_before) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) count += x[i] > value;
  for (int64_t i = 0; i <= same_before; ++i) count += x[i] == value;
  return count;
}

// The next index from `begin` on whose value is larger than `value`; n if there is none.
int64_t next_above(const float* x, int64_t n, int64_t begin, float value) {
  const vf limit = set1(value);
  int64_t i = begin;
  for (; i + W <= n; i += W)
    if (any_less(limit, load(x + i))) break;
  for (; i < n; ++i)
    if (x[i] > value) break;
  return i;
}

// The values at the bits of one word; `out` may be written 32 places far.
QR_INLINE int64_t gather_word(float* out, const float* x, uint32_t word) {
#if defined(__AVX512F__)
  // To a register first: compressing to memory takes Zen 4 a hundred cycles.
  const uint32_t low = word & 0xffff, high = word >> 16;
  const int64_t num_low = __builtin_popcount(low);
  store(out, _mm512_maskz_compress_ps(__mmask16(low), _mm512_maskz_loadu_ps(__mmask16(low), x)));
  store(out + num_low, _mm512_maskz_compress_ps(__mmask16(high), _mm512_maskz_loadu_ps(__mmask16(high), x + 16)));
  return num_low + __builtin_popcount(high);
#else
  int64_t count = 0;
  for (; word != 0; word &= word - 1) out[count++] = x[__builtin_ctz(word)];
  return count;
#endif
}

int64_t gather_allowed(float* out, const float* x, const uint32_t* bits, int64_t n) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; i += 32) {
    uint32_t word = bits[i / 32];
    if (n - i < 32) word &= (uint32_t(1) << (n - i)) - 1;
    if (word == 0) continue;
    if (word == UINT32_MAX) {
      for (int64_t j = 0; j < 32; j += W) store(out + count + j, load(x + i + j));
      count += 32;
    } else {
      count += gather_word(out + count, x + i, word);
    }
  }
  return count;
}

}  // namespace
}  // namespace qr
