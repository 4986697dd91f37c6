// The inner loops: a tile of activation rows times 32 columns. Every (row, column) is summed up step
// by step along the depth in one accumulator, so its bits do not depend on how many rows there are.
#pragma once
#include "isa.h"
#include "vec.h"

namespace {

using mindstream::kGroup;
using mindstream::kGroupBytes;
using mindstream::kSlab;

constexpr int kVecs = kSlab / kLanes;
#if defined(__AVX512F__) && !defined(MINDSTREAM_FEW_TILES)
constexpr int kTile = 12;  // 24 accumulators of 32 registers
#else
constexpr int kTile = 3;
#endif

inline vi load_words(const void *p) {
  vi x;
  memcpy(&x, p, sizeof(x));
  return x;
}

inline const char *column(const char *b0, const char *b1, int v) {
  constexpr int half = kVecs / 2;
  return (v < half ? b0 : b1) + v % half * kLanes * 4;
}

// Into the second-level cache: the first level's few open misses are left to the loads themselves.
inline void prefetch(const char *weights) { __builtin_prefetch(weights, 0, 2); }
// What one thread reads once in a step, for a lone tile of rows, need not drive everything else out of
// the larger caches.
inline void prefetch_once(const char *weights) { __builtin_prefetch(weights, 0, 0); }

// Weights are read from memory once, and the hardware alone starts too late at each slab. One tile of
// rows asks for what it will read itself a little later. Several tiles share the work: while they
// compute a slab, each asks for its part of the next one: the more evenly, the less other loads wait.
struct Ahead {
  const char *at;
  int64_t stride;  // bytes a step; 0: nothing is asked for
};
constexpr int64_t kAheadBytes = 4096;

// What one step of the depth is for each pair of formats. Unit: a row's activations of a step.
// b0, b1: the weights of a step in two halves of 16 columns.

struct F32Step {
  typedef float Unit;
  static constexpr int kDepth = 1;
  template <int R, class At>
  static INLINE void run(const char *b0, const char *b1, At at, vf (&c)[R][kVecs]) {
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; v++) {
      const vf w = load(reinterpret_cast<const float *>(column(b0, b1, v)));
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) c[r][v] = fma(splat(*at(r)), w, c[r][v]);
    }
  }
};

struct Bf16Pair {
  float even, odd;
};

// bf16 weights, float32 activations.
struct Bf16Expand {
  typedef Bf16Pair Unit;
  static constexpr int kDepth = 2;
  template <int R, class At>
  static INLINE void run(const char *b0, const char *b1, At at, vf (&c)[R][kVecs]) {
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; v++) {
      const vi pair = load_words(column(b0, b1, v));
      const vf even = (vf)(pair << 16), odd = (vf)(pair & (vi{} + (int32_t)0xffff0000));
#pragma GCC unroll 12
      for (int r = 0; r < R; r++)
        c[r][v] = fma(splat(at(r)->odd), odd, fma(splat(at(r)->even), even, c[r][v]));
    }
  }
};

#if defined(__AVX512BF16__)
// bf16 weights and activations, float32 sums: one instruction a step of two.
struct Bf16Dot {
  typedef uint32_t Unit;
  static constexpr int kDepth = 2;
  template <int R, class At>
  static INLINE void run(const char *b0, const char *b1, At at, vf (&c)[R][kVecs]) {
    const __m512bh w0 = (__m512bh)_mm512_loadu_si512(b0), w1 = (__m512bh)_mm512_loadu_si512(b1);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const __m512bh a = (__m512bh)_mm512_set1_epi32((int)*at(r));
      c[r][0] = (vf)_mm512_dpbf16_ps((__m512)c[r][0], w0, a);
      c[r][1] = (vf)_mm512_dpbf16_ps((__m512)c[r][1], w1, a);
    }
  }
};
typedef Bf16Dot Bf16Step;
#else
typedef Bf16Expand Bf16Step;
#endif

// Unrolled, as every loop over the sums: a loop that is left makes GCC keep them in memory.
template <int R>
INLINE void clear(vf (&c)[R][kVecs]) {
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; v++) c[r][v] = vf{};
}

template <int R>
INLINE void copy(const vf (&from)[R][kVecs], vf (&to)[R][kVecs]) {
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; v++) to[r][v] = from[r][v];
}

// R rows that lie `stride` bytes apart, as addresses a processor computes while it loads.
template <class Unit, int R>
struct RowPointers {
  static constexpr int kBases = (R + 2) / 3;
  const char *bases[kBases];
  int64_t stride;

  INLINE RowPointers(const void *first, int64_t stride) : stride(stride) {
#pragma GCC unroll 4
    for (int i = 0; i < kBases; i++) bases[i] = static_cast<const char *>(first) + 3 * i * stride;
  }
  INLINE const Unit *operator()(int r) const {
    return reinterpret_cast<const Unit *>(bases[r / 3] + r % 3 * stride);
  }
  INLINE void advance(int64_t units) {
#pragma GCC unroll 4
    for (int i = 0; i < kBases; i++) {
      bases[i] += units * static_cast<int64_t>(sizeof(Unit));
      asm("" : "+r"(bases[i]));  // else GCC keeps a pointer a row, more than there are registers
    }
  }
};

// c += rows of activations, `row` bytes apart, times two halves of 16 columns, over `steps` steps of
// the depth. A step's columns are `stride` bytes behind the last step's.
template <class Step, int R, int Prefetches>
INLINE void multiply(const void *a, int64_t row, const char *b0, const char *b1, int64_t stride,
                     int64_t steps, Ahead ahead, vf (&c)[R][kVecs]) {
  RowPointers<typename Step::Unit, R> at(a, row);
  for (int64_t s = 0; s < steps; s++) {
    if (Prefetches == 1) prefetch(ahead.at);
    if (Prefetches == 2) prefetch_once(ahead.at), prefetch_once(ahead.at + 64);
    ahead.at += ahead.stride;
    Step::run(b0, b1, at, c);
    at.advance(1);
    b0 += stride;
    b1 += stride;
  }
}

// The same, over all N pairs of halves at once: a few rows alone would wait for their own sums.
template <class Step, int R, int N>
INLINE void multiply_pairs(const void *a, int64_t row, const char *(&b)[N][2], int64_t stride, int64_t steps,
                           vf (&c)[N][R][kVecs]) {
  RowPointers<typename Step::Unit, R> at(a, row);
  for (int64_t s = 0; s < steps; s++) {
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) Step::run(b[n][0] + s * stride, b[n][1] + s * stride, at, c[n]);
    at.advance(1);
  }
}

// How many pairs keep the multipliers busy; more would be wasted on a sequence's last few keys.
constexpr int pairs_at_once(int rows) { return rows <= kTile / 12 ? 4 : rows <= kTile / 2 ? 2 : 1; }

// The v-th vector of a group's scales: see Matrix.
inline vf load_scales(const char *words, int v) {
  constexpr int half = kVecs / 2;
  const vi pairs = load_words(words + v % half * kLanes * 4);
  return v < half ? (vf)(pairs << 16) : (vf)(pairs & (vi{} + (int32_t)0xffff0000));
}

// The products for int8 weights: integer sums over a group of 64, then scaled and added up in float32.
#if defined(__AVX512VNNI__)
// Activations have 16 bits, as two signed bytes each: eight bits would cost more than the rounded
// weights do. A row is [group][high bytes, low bytes][16 words of four]. Many rows go through a group
// twice, with the high bytes and with the low ones, so that one set of registers does for the sums of
// both. Integer sums are exact: the order is free.
typedef uint32_t Int8Unit;  // four signed bytes
constexpr int kInt8Passes = 2;

// sums += weights times bytes, for `Planes` planes of bytes: both at once for few rows, a lone tile.
template <int R, int Planes, bool Prefetch>
INLINE void add_bytes(RowPointers<Int8Unit, R> at, const char *b, vi (&sums)[Planes][R][2]) {
  for (int s = 0; s < kGroup / 4; s++, at.advance(1), b += 128) {
    if (Prefetch && Planes == 2) prefetch_once(b + kAheadBytes), prefetch_once(b + kAheadBytes + 64);
    if (Prefetch && Planes == 1) prefetch(b + kAheadBytes), prefetch(b + kAheadBytes + 64);
    const __m512i w0 = _mm512_loadu_si512(b), w1 = _mm512_loadu_si512(b + 64);
#pragma GCC unroll 2
    for (int p = 0; p < Planes; p++)
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) {
        const __m512i x = _mm512_set1_epi32((int)at(r)[p * kGroup / 4]);
        sums[p][r][0] = (vi)_mm512_dpbusd_epi32((__m512i)sums[p][r][0], w0, x);
        sums[p][r][1] = (vi)_mm512_dpbusd_epi32((__m512i)sums[p][r][1], w1, x);
      }
  }
}

// The sums of one group: high bytes times 256, and low bytes. offsets: of row r at [r * groups].
template <int R>
INLINE void sum_group(RowPointers<Int8Unit, R> at, const int32_t *offsets, int64_t groups,
                      const char *b, vi (&out)[1][R][2]) {
  if constexpr (R <= 5) {
    vi sums[2][R][2] = {};
    add_bytes<R, 2, true>(at, b, sums);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
      for (int v = 0; v < 2; v++)
        out[0][r][v] = (sums[0][r][v] << 8) + sums[1][r][v] + offsets[r * groups];
  } else {
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) out[0][r][0] = out[0][r][1] = vi{};
    add_bytes<R, 1, true>(at, b, out);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
      for (int v = 0; v < 2; v++)
        out[0][r][v] = (out[0][r][v] << 8) + offsets[r * groups];
    at.advance(kGroup / 4);
    add_bytes<R, 1, false>(at, b, out);
  }
}

template <int R>
INLINE void multiply_int8(const char *a, int64_t row, const float *row_scales, const int32_t *offsets,
                          const char *b, int64_t groups, vf (&c)[R][kVecs]) {
  constexpr int steps = kGroup / 4;
  RowPointers<Int8Unit, R> at(a, row);
  for (int64_t g = 0; g < groups; g++, at.advance(kInt8Passes * steps), b += kGroupBytes) {
    vi sums[1][R][2];
    sum_group<R>(at, offsets + g, groups, b, sums);
    const char *const scales = b + steps * 128;
    prefetch(scales + kAheadBytes);
    const vf s0 = load_scales(scales, 0), s1 = load_scales(scales, 1);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const vf x = splat(row_scales[r * groups + g]);
      c[r][0] = fma(__builtin_convertvector(sums[0][r][0], vf), s0 * x, c[r][0]);
      c[r][1] = fma(__builtin_convertvector(sums[0][r][1], vf), s1 * x, c[r][1]);
    }
  }
}
#else
struct Int8Unit {
  float x[4];
};
constexpr int kInt8Passes = 1;

template <int R>
INLINE void multiply_int8(const char *a, int64_t row, const float *, const int32_t *, const char *b,
                          int64_t groups, vf (&c)[R][kVecs]) {
  RowPointers<Int8Unit, R> at(a, row);
  for (int64_t g = 0; g < groups; g++, b += kGroupBytes - kGroup * kSlab) {
    vf sums[R][kVecs] = {};
    for (int s = 0; s < kGroup / 4; s++, at.advance(1), b += 128)
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; v++) {
        const vu quad = (vu)load_words(b + v * kLanes * 4);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
          const vi value = (vi)(quad >> (8 * i) & (vu{} + 255u)) - 128;
          const vf w = __builtin_convertvector(value, vf);
#pragma GCC unroll 12
          for (int r = 0; r < R; r++) sums[r][v] = fma(splat(at(r)->x[i]), w, sums[r][v]);
        }
      }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; v++)
        c[r][v] = fma(sums[r][v], load_scales(b, v), c[r][v]);
  }
}
#endif

}  // namespace
