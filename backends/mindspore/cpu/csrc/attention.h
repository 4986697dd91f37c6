// Ragged attention over the paged cache in MindSpore's layout [blocks, block_size, kv_heads, D].
// Softmax runs online over 64 keys at a time, counted from the start of the sequence, and each row
// does its own arithmetic: its result depends on nothing but its own query and keys.
#pragma once
#include <math.h>

#include "isa.h"
#include "threads.h"
#include "vec.h"

namespace {

using mindstream::AttentionArgs;
using mindstream::Team;

constexpr int kKeys = 64;      // keys of one softmax step
constexpr int kRows = 16;      // query rows that share the keys they read
constexpr int kMaxDim = 512;

struct AttentionTile {
  const float *keys[kKeys], *values[kKeys];
  float scores[kKeys], top[kRows], total[kRows];
  float out[kRows][kMaxDim];
};

inline void write_cache(const AttentionArgs &a, const Team &team) {
  const int64_t row = a.kv_heads * a.head_dim, begin = a.tokens * team.rank / team.size;
  const int64_t end = a.tokens * (team.rank + 1) / team.size;
  for (int64_t t = begin; t < end; t++) {
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

// Heads [first_head, first_head + heads) of query rows [row, row + rows) of sequence b.
inline void attend(const AttentionArgs &a, int64_t b, int64_t first_token, int64_t row, int64_t rows,
                   int64_t first_head, int64_t heads) {
  AttentionTile tile;
  const int64_t dim = a.head_dim, width = a.heads * dim, kv_width = a.kv_heads * dim;
  const int64_t kv_head = first_head / (a.heads / a.kv_heads);
  const int64_t seen = a.kv_lens[b] - a.q_lens[b] + row + 1;  // keys the first row sees
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
        const float *q = a.q + (first_token + row + i) * width + (first_head + h) * dim;
        attend_block(a, tile, q, (int)(i * heads + h), (int)n);
      }
    }
  }
  for (int64_t i = 0; i < rows; i++)
    for (int64_t h = 0; h < heads; h++) {
      const int64_t r = i * heads + h;
      float *out = a.out + (first_token + row + i) * width + (first_head + h) * dim;
      for (int64_t d = 0; d < dim; d++) out[d] = tile.out[r][d] / tile.total[r];
    }
}

void paged_attention(const AttentionArgs &a, const Team &team) {
  write_cache(a, team);
  team.barrier();
  const int64_t group = a.heads / a.kv_heads;
  // Heads of a group share keys; with little work they are spread over the threads instead.
  const int64_t few = a.tokens * a.kv_heads < 4 * team.size;
  const int64_t heads = few ? 1 : smaller<int64_t>(group, kRows), parts = (group + heads - 1) / heads;
  const int64_t rows = kRows / heads;
  int64_t item = team.next(INT64_MAX), seen = 0, first_token = 0;
  for (int64_t b = 0; b < a.sequences; b++) {
    const int64_t tiles = (a.q_lens[b] + rows - 1) / rows, items = tiles * a.kv_heads * parts;
    for (; item < seen + items; item = team.next(INT64_MAX)) {
      const int64_t tile = (item - seen) / (a.kv_heads * parts), head = (item - seen) % (a.kv_heads * parts);
      const int64_t first = head / parts * group + head % parts * heads;
      attend(a, b, first_token, tile * rows, smaller<int64_t>(rows, a.q_lens[b] - tile * rows), first,
             smaller<int64_t>(heads, (head / parts + 1) * group - first));
    }
    seen += items;
    first_token += a.q_lens[b];
  }
  // Rows that belong to no sequence are padding.
  if (team.rank == 0 && first_token < a.tokens)
    memset(a.out + first_token * a.heads * a.head_dim, 0,
           (a.tokens - first_token) * a.heads * a.head_dim * sizeof(float));
}

}  // namespace
