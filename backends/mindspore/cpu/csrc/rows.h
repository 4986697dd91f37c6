// Activations on their way into a matrix product: normalised, and put into the product's format.
#pragma once
#include <math.h>

#include "isa.h"
#include "tile.h"

namespace {

using mindstream::Rows;
using mindstream::Weights;

constexpr int64_t kItemRows = 4;  // rows of an item that works row by row

inline int64_t row_items(int64_t rows) { return (rows + kItemRows - 1) / kItemRows; }

constexpr int64_t kMaxDepth = 32768;  // of a product whose rows are normalised or quantised here

template <Weights W>
struct Format;
template <>
struct Format<Weights::kF32> {
  typedef F32Step Step;
  typedef F32Step::Unit Unit;
  static constexpr int kDepth = 1;
};
template <>
struct Format<Weights::kBf16> {
  typedef Bf16Step Step;
  typedef Bf16Step::Unit Unit;
  static constexpr int kDepth = 2;
};
template <>
struct Format<Weights::kInt8> {
  typedef Int8Unit Unit;
  static constexpr int kDepth = 4;
};

inline int64_t group_count(int64_t depth) { return (depth + kGroup - 1) / kGroup; }

template <Weights W>
inline int64_t step_count(int64_t depth) {
  return W == Weights::kInt8 ? group_count(depth) * kGroup / 4 * kInt8Passes : depth / Format<W>::kDepth;
}

inline void make_units(const float *x, float *units, int64_t n) { memcpy(units, x, n * sizeof(float)); }
inline void make_units(const float *x, Bf16Pair *units, int64_t n) { memcpy(units, x, n * sizeof(float)); }
inline void make_units(const float *x, uint32_t *units, int64_t n) { to_bf16_pairs(x, units, n); }

// Values [first, first + n) of a row; n and first are multiples of 16.
template <Weights W>
inline void put_values(const Rows &rows, int64_t row, int64_t depth, int64_t first, const float *x, int64_t n) {
  if constexpr (W == Weights::kInt8) {
    memcpy(rows.staging + row * depth + first, x, n * sizeof(float));
  } else {
    typedef typename Format<W>::Unit Unit;
    make_units(x, reinterpret_cast<Unit *>(rows.units + row * rows.stride) + first / Format<W>::kDepth, n);
  }
}

#if defined(__AVX512VNNI__)
// The 64 values of a group as 16-bit integers, split into words of high and of low bytes.
inline void quantize_group(const float *x, float *scale, int32_t *offset, uint32_t *high, uint32_t *low) {
  __m512 most = _mm512_setzero_ps();
  for (int i = 0; i < kGroup; i += 16) most = _mm512_max_ps(most, _mm512_abs_ps(_mm512_loadu_ps(x + i)));
  *scale = _mm512_reduce_max_ps(most) / 32512.0f;  // the highest byte is 127 then
  const __m512 inverse = _mm512_set1_ps(*scale > 0 ? 1.0f / *scale : 0.0f);
  __m512i total = _mm512_setzero_si512();
  for (int i = 0; i < kGroup; i += 16) {
    const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + i), inverse));
    const __m512i h = _mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(128)), 8);
    total = _mm512_add_epi32(total, q);
    _mm_storeu_si128(reinterpret_cast<__m128i *>(high + i / 4), _mm512_cvtsepi32_epi8(h));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(low + i / 4), _mm512_cvtepi32_epi8(q));
  }
  *offset = -128 * _mm512_reduce_add_epi32(total);  // the weights carry 128 too much
}
#endif

// One row for int8 weights, with one scale a group. `x` has room for whole groups: padded here.
inline void quantize_row(const Rows &rows, int64_t row, int64_t depth, float *x) {
  constexpr int64_t steps = kGroup / 4;
  const int64_t groups = group_count(depth);
  Int8Unit *to = reinterpret_cast<Int8Unit *>(rows.units + row * rows.stride);
  for (int64_t i = depth; i < groups * kGroup; i++) x[i] = 0;
#if defined(__AVX512VNNI__)
  for (int64_t g = row * groups; g < (row + 1) * groups; g++, x += kGroup, to += 2 * steps)
    quantize_group(x, rows.scales + g, rows.offsets + g, to, to + steps);
#else
  memcpy(to, x, groups * steps * sizeof(Int8Unit));
#endif
}

template <Weights W>
inline void put_row(const Rows &rows, int64_t row, int64_t depth, float *x) {
  if constexpr (W == Weights::kInt8)
    quantize_row(rows, row, depth, x);
  else
    put_values<W>(rows, row, depth, 0, x, depth);
}

// Rows [begin, end) that put_values left in staging become units; for int8 alone.
inline void quantize_staged(const Rows &rows, int64_t begin, int64_t end, int64_t depth) {
  float x[kMaxDepth + kGroup];
  for (int64_t row = begin; row < end; row++) {
    memcpy(x, rows.staging + row * depth, depth * sizeof(float));
    quantize_row(rows, row, depth, x);
  }
}

// y = x / rms(x) * weight, the mean in a fixed order.
inline void rms_norm(const float *x, const float *weight, float *y, int64_t n, float eps) {
  vf squares = {};
  for (int64_t i = 0; i < n; i += kLanes) squares = fma(load(x + i), load(x + i), squares);
  const vf scale = splat(1.0f / sqrtf(sum(squares) / (float)n + eps));
  for (int64_t i = 0; i < n; i += kLanes) store(y + i, load(x + i) * scale * load(weight + i));
}

template <Weights W>
inline void norm_rows(const float *hidden, const float *weight, const Rows &rows, int64_t begin,
                      int64_t end, int64_t depth, float eps) {
  float x[kMaxDepth + kGroup];
  for (int64_t row = begin; row < end; row++) {
    rms_norm(hidden + row * depth, weight, x, depth, eps);
    put_row<W>(rows, row, depth, x);
  }
}

// Whole cache lines, so that threads with neighbouring rows do not share one, and an odd number of
// them: rows a power of two apart would all want the same few places of the first-level cache.
template <Weights W>
size_t unit_bytes(int64_t depth) {
  return ((step_count<W>(depth) * sizeof(typename Format<W>::Unit) + 63) / 64 | 1) * 64;
}

size_t row_bytes(Weights kind, int64_t depth) {
  switch (kind) {
    case Weights::kBf16: return unit_bytes<Weights::kBf16>(depth);
    case Weights::kInt8: return unit_bytes<Weights::kInt8>(depth);
    default: return unit_bytes<Weights::kF32>(depth);
  }
}

}  // namespace
