// Float vectors of the instruction set a file is compiled for. Only files that are compiled once per
// instruction set include this. Such a file uses no C++ library: an inline function of it, compiled
// here with AVX-512, could be the copy the linker keeps for everyone.
#pragma once
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define INLINE inline __attribute__((always_inline))

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float vf __attribute__((vector_size(kLanes * 4)));
typedef int32_t vi __attribute__((vector_size(kLanes * 4)));
typedef float vf_any __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef uint32_t vu __attribute__((vector_size(kLanes * 4)));

inline vf load(const float *p) { return *reinterpret_cast<const vf_any *>(p); }
inline void store(float *p, vf x) { *reinterpret_cast<vf_any *>(p) = x; }
inline vf splat(float x) { return vf{} + x; }

// a * b + c, always fused or never on one instruction set: every row gets the same bits.
inline vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

inline vf max(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
  const vi greater = a > b;
  return (vf)((greater & (vi)a) | (~greater & (vi)b));
#endif
}

inline vf min(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#else
  const vi smaller = a < b;
  return (vf)((smaller & (vi)a) | (~smaller & (vi)b));
#endif
}

inline float sum(vf x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#else
  float parts[kLanes];
  store(parts, x);
  for (int step = kLanes / 2; step > 0; step /= 2)
    for (int i = 0; i < step; i++) parts[i] += parts[i + step];
  return parts[0];
#endif
}

inline float largest(vf x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#else
  float parts[kLanes], result;
  store(parts, x);
  result = parts[0];
  for (int i = 1; i < kLanes; i++) result = parts[i] > result ? parts[i] : result;
  return result;
#endif
}

inline float larger(float a, float b) { return a > b ? a : b; }
template <class T>
constexpr T smaller(T a, T b) {
  return a < b ? a : b;
}

// The nearest bf16, ties to even, in the low half. NaN stays NaN.
inline uint32_t to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return bits >> 16 | 0x40;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline float from_bf16(uint32_t half) {
  const uint32_t bits = half << 16;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

// pairs[i] = bf16 of x[2i] below bf16 of x[2i + 1]; n is a multiple of 16.
inline void to_bf16_pairs(const float *x, uint32_t *pairs, int64_t n) {
#if defined(__AVX512BF16__)
  int64_t i = 0;
  for (; i + 32 <= n; i += 32)
    _mm512_storeu_si512(pairs + i / 2, (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + i + 16),
                                                                    _mm512_loadu_ps(x + i)));
  if (i < n)
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(pairs + i / 2),
                        (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(x + i)));
#else
  for (int64_t i = 0; i < n; i += 2) pairs[i / 2] = to_bf16(x[i]) | to_bf16(x[i + 1]) << 16;
#endif
}

// 1 + r q(r), the minimax polynomial of 2^r on [0, 1] in relative error.
inline vf power_of_fraction(vf r) {
  vf p = splat(1.8671300495043397e-3f);
  p = fma(p, r, splat(9.0170307084918022e-3f));
  p = fma(p, r, splat(5.579991266131401e-2f));
  p = fma(p, r, splat(2.4016444385051727e-1f));
  p = fma(p, r, splat(6.9315129518508911e-1f));
  return fma(p, r, splat(1.0f));
}

// 2^x with a relative error below 2e-7; below -126 it is 0 or nearly, above 127 at least 2^127.
#if defined(__AVX512F__)
inline vf exp2(vf x) {
  const __m512 t = (__m512)max(splat(-160.0f), x);  // in this order NaN stays NaN
  const __m512 r = _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // t - floor(t), exact
  return (vf)_mm512_scalef_ps((__m512)power_of_fraction((vf)r), t);                // times 2^floor(t)
}
#else
inline vf exp2(vf x) {
  const vi tiny = x < splat(-126.0f);
  x = min(splat(127.0f), max(splat(-126.0f), x));
  const vf magic = splat(12582912.0f);  // adding it rounds to an integer in the low mantissa bits
  const vf shifted = (x - splat(0.5f)) + magic;
  const vf p = power_of_fraction(x - (shifted - magic));
  const vi scale = ((vi)shifted) << 23;  // the magic number's own bits leave at the top
  return (vf)(~tiny & ((vi)p + scale));
}
#endif

constexpr float kLog2E = 1.44269504f;

// The relative error grows by 6e-8 with each unit of |x|.
inline vf exp(vf x) { return exp2(x * splat(kLog2E)); }

}  // namespace
