// The fused path's own KV cache, laid out for the tile product: a block of a KV head holds its keys in
// groups of 16 with the keys side by side, [group][D / n][16][n], and its values with the dimensions
// side by side, [block_size / n][D][n], where n is 2 for bf16, 1 for f32.
#pragma once
#include "matmul.h"

namespace {

using mindstream::Cache;
using mindstream::StackArgs;

constexpr int kHeadDim = 256;  // largest head size

template <Cache C>
struct CacheFormat {
  typedef F32Step Step;
  static constexpr int kDepth = 1, kBytes = 4;
};
template <>
struct CacheFormat<Cache::kBf16> {
  typedef Bf16Step Step;
  static constexpr int kDepth = 2, kBytes = 2;
};

// Where the blocks of one layer's KV head lie.
struct HeadCache {
  char *keys, *values;
  int64_t block_stride;  // bytes
};

template <Cache C>
inline HeadCache head_cache(const StackArgs &s, int64_t layer, int64_t kv_head) {
  const mindstream::Dims &d = *s.dims;
  const int64_t head = d.block_size * d.head_dim * CacheFormat<C>::kBytes;
  const int64_t at = (layer * s.blocks * d.kv_heads + kv_head) * head;
  return {static_cast<char *>(s.key_cache) + at, static_cast<char *>(s.value_cache) + at,
          d.kv_heads * head};
}

template <Cache C>
inline void write_key(char *block, int64_t offset, const float *x, int64_t dim) {
  const int64_t group = offset / 16, lane = offset % 16;
  if constexpr (C == Cache::kF32) {
    float *to = reinterpret_cast<float *>(block) + group * 16 * dim + lane;
    for (int64_t d = 0; d < dim; d++) to[d * 16] = x[d];
  } else {
    uint32_t pairs[kHeadDim / 2];
    to_bf16_pairs(x, pairs, dim);
    uint32_t *to = reinterpret_cast<uint32_t *>(block) + group * 8 * dim + lane;
    for (int64_t d = 0; d < dim / 2; d++) to[d * 16] = pairs[d];
  }
}

template <Cache C>
inline void write_value(char *block, int64_t offset, const float *x, int64_t dim) {
  if constexpr (C == Cache::kF32) {
    memcpy(block + offset * dim * 4, x, dim * 4);
  } else {
    uint16_t *to = reinterpret_cast<uint16_t *>(block) + offset / 2 * 2 * dim;
#if defined(__AVX512BF16__)
    // Only its own halves: another thread may be writing the other token's.
    const __m128i shift = _mm_cvtsi32_si128(offset % 2 ? 16 : 0);
    const __mmask32 own = offset % 2 ? 0xaaaaaaaau : 0x55555555u;
    for (int64_t d = 0; d < dim; d += 16) {
      const __m256i halves = (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(x + d));
      _mm512_mask_storeu_epi16(to + 2 * d, own, _mm512_sll_epi32(_mm512_cvtepu16_epi32(halves), shift));
    }
#else
    for (int64_t d = 0; d < dim; d++) to[2 * d + offset % 2] = (uint16_t)to_bf16(x[d]);
#endif
  }
}

// x * cos + rotate_half(x) * sin, scaled
inline void rotate(float *x, const float *cos, const float *sin, int64_t dim, float scale) {
  const int64_t half = dim / 2;
  for (int64_t i = 0; i < half; i += kLanes) {
    const vf a = load(x + i), b = load(x + half + i);
    store(x + i, fma(a, load(cos + i), -(b * load(sin + i))) * splat(scale));
    store(x + half + i, fma(b, load(cos + half + i), a * load(sin + half + i)) * splat(scale));
  }
}

// Norm, rotation and cache write of the rows' queries, keys and values.
template <Cache C>
void rotate_and_store(const StackArgs &s, int64_t index, int64_t begin, int64_t end) {
  const mindstream::Dims &d = *s.dims;
  const mindstream::Layer &layer = s.layers[index];
  const int64_t dim = d.head_dim, width = (d.heads + 2 * d.kv_heads) * dim;
  const float scale = kLog2E / sqrtf((float)dim);  // softmax takes powers of 2
  for (int64_t t = begin; t < end; t++) {
    float *row = s.qkv + t * width;
    const float *cos = s.cos + s.positions[t] * dim, *sin = s.sin + s.positions[t] * dim;
    for (int64_t h = 0; h < d.heads + d.kv_heads; h++) {
      const bool query = h < d.heads;
      const float *norm = query ? layer.q_norm : layer.k_norm;
      if (norm) rms_norm(row + h * dim, norm, row + h * dim, dim, d.eps);
      rotate(row + h * dim, cos, sin, dim, query ? scale : 1.0f);
    }
    if (s.slots[t] < 0) continue;
    const int64_t block = s.slots[t] / d.block_size, offset = s.slots[t] % d.block_size;
    for (int64_t h = 0; h < d.kv_heads; h++) {
      const HeadCache cache = head_cache<C>(s, index, h);
      write_key<C>(cache.keys + block * cache.block_stride, offset, row + (d.heads + h) * dim, dim);
      write_value<C>(cache.values + block * cache.block_stride, offset,
                     row + (d.heads + d.kv_heads + h) * dim, dim);
    }
  }
}

}  // namespace
