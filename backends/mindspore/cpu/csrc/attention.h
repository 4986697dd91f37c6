// Ragged attention over the paged cache in MindSpore's layout [blocks, block_size, kv_heads, D].
// Softmax runs online over 64 keys at a time, counted from the start of the sequence, and each row
// does its own arithmetic: its result depends on nothing but its own query and keys.
#pragma once
#include <math.h>

#include "isa.h"
#include "vec.h"

namespace {

using mindstream::AttentionArgs;
using mindstream::AttentionItem;

constexpr int kKeys = 64;      // keys of one softmax step
constexpr int kRows = 16;      // query rows that share the keys they read
constexpr int kMaxDim = 512;

struct AttentionTile {
  const float *keys[kKeys], *values[kKeys];
  float scores[kKeys], top[kRows], total[kRows];
  float out[kRows][kMaxDim];
};

constexpr int64_t kWriteRows = 16;  // of one item

inline void write_cache(const AttentionArgs &a, int64_t item) {
  const int64_t row = a.kv_heads * a.head_dim, begin = item * kWriteRows;
  for (int64_t t = begin; t < smaller(a.tokens, begin + kWriteRows); t++) {
    if (a.slots[t] < 0) continue;
    memcpy(a.key_cache + a.slots[t] * row, a.k + t * row, row * sizeof(float));
    memcpy(a.value_cache + a.slots[t] * row, a.v + t * row, row * sizeof(float));
  }
}

inline float dot(const float *x, const float *y, int64_t dim) {
  vf parts = {};
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) parts = fma(load(x + d), load(y + d), parts);
  float result = sum(parts);
  for (; d < dim; d++) result += x[d] * y[d];
  return result;
}

// out = out * keep + sum over n keys of weight * value
inline void add_values(float *out, float keep, const float *weights, const float *const *values,
                       int n, int64_t dim) {
  int64_t d = 0;
  for (; d + 4 * kLanes <= dim; d += 4 * kLanes) {
    vf acc[4];
    for (int i = 0; i < 4; i++) acc[i] = load(out + d + i * kLanes) * splat(keep);
    for (int j = 0; j < n; j++) {
      const vf w = splat(weights[j]);
      for (int i = 0; i < 4; i++) acc[i] = fma(w, load(values[j] + d + i * kLanes), acc[i]);
    }
    for (int i = 0; i < 4; i++) store(out + d + i * kLanes, acc[i]);
  }
  for (; d < dim; d++) {
    float acc = out[d] * keep;
    for (int j = 0; j < n; j++) acc += weights[j] * values[j][d];
    out[d] = acc;
  }
}

inline void attend_block(const AttentionArgs &a, AttentionTile &tile, const float *q, int r, int n) {
  for (int j = 0; j < n; j++) tile.scores[j] = dot(q, tile.keys[j], a.head_dim) * a.scale;
  for (int j = n; j < kKeys; j++) tile.scores[j] = -INFINITY;
  vf best = load(tile.scores);
  for (int j = kLanes; j < kKeys; j += kLanes) best = max(best, load(tile.scores + j));
  const float top = larger(tile.top[r], largest(best));
  vf total = {};
  for (int j = 0; j < kKeys; j += kLanes) {
    const vf weight = exp(load(tile.scores + j) - splat(top));
    store(tile.scores + j, weight);
    total += weight;
  }
  const float keep = exp(splat(tile.top[r] - top))[0];
  tile.top[r] = top;
  tile.total[r] = tile.total[r] * keep + sum(total);
  add_values(tile.out[r], keep, tile.scores, tile.values, n, a.head_dim);
}

inline void attend(const AttentionArgs &a, const AttentionItem &item) {
  const int64_t b = item.sequence, rows = item.rows, heads = item.heads, seen = item.seen;
  AttentionTile tile;
  const int64_t dim = a.head_dim, width = a.heads * dim, kv_width = a.kv_heads * dim;
  const int64_t kv_head = item.first_head / (a.heads / a.kv_heads);
  for (int64_t r = 0; r < rows * heads; r++) {
    tile.top[r] = -INFINITY;
    tile.total[r] = 0;
    memset(tile.out[r], 0, dim * sizeof(float));
  }
  for (int64_t start = 0; start < seen + rows - 1; start += kKeys) {
    const int64_t count = smaller<int64_t>(kKeys, seen + rows - 1 - start);
    for (int64_t j = 0; j < count; j++) {
      const int64_t key = start + j;
      const int64_t block = a.block_tables[b * a.table_width + key / a.block_size];
      const int64_t at = (block * a.block_size + key % a.block_size) * kv_width + kv_head * dim;
      tile.keys[j] = a.key_cache + at;
      tile.values[j] = a.value_cache + at;
    }
    for (int64_t i = 0; i < rows; i++) {
      const int64_t n = smaller<int64_t>(count, seen + i - start);
      if (n <= 0) continue;
      for (int64_t h = 0; h < heads; h++) {
        const float *q = a.q + (item.first_token + i) * width + (item.first_head + h) * dim;
        attend_block(a, tile, q, (int)(i * heads + h), (int)n);
      }
    }
  }
  for (int64_t i = 0; i < rows; i++)
    for (int64_t h = 0; h < heads; h++) {
      const int64_t r = i * heads + h;
      float *out = a.out + (item.first_token + i) * width + (item.first_head + h) * dim;
      for (int64_t d = 0; d < dim; d++) out[d] = tile.out[r][d] / tile.total[r];
    }
}

int64_t attention_items(const void *context, int64_t phase) {
  const AttentionArgs &a = *static_cast<const AttentionArgs *>(context);
  return phase == 0 ? (a.tokens + kWriteRows - 1) / kWriteRows : a.item_count;
}

void run_attention(const void *context, int64_t phase, int64_t item) {
  const AttentionArgs &a = *static_cast<const AttentionArgs *>(context);
  if (phase == 0)
    write_cache(a, item);
  else
    attend(a, a.items[item]);
}

}  // namespace
