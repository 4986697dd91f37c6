// Ragged attention over the fused path's own cache.
//
// Softmax runs online over 128 keys; 512 keys, counted from the start of the sequence, make a partial
// result, and partial results are merged in order. Which thread computes which partial result does
// not matter, so neither the batch nor the threads change a bit.
#pragma once
#include "cache_layout.h"

namespace {

using mindstream::AttentionItem;
using mindstream::kChunkKeys;

constexpr int kSpan = 128;  // keys of one softmax step

// R rows (query token, head) that read the same keys. Scores are logarithms to base 2.
template <Cache C, int R>
struct QueryTile {
  static constexpr int kDepth = CacheFormat<C>::kDepth, kPadded = (R + kLanes - 1) / kLanes * kLanes;
  typedef typename CacheFormat<C>::Step Step;
  typename Step::Unit q[R][kHeadDim / kDepth], weights[R][kSpan / kDepth];
  float scores[R][kSpan];
  float best[kPadded], keep[kPadded], sums[kPadded];           // of a span
  float top[kPadded], total[kPadded], out[R][kHeadDim];        // of the chunk
  float all_top[R], all_total[R], all_out[R][kHeadDim];        // of the chunks before
  int64_t seen[R];                                             // keys of each row
};

struct Merge {
  float before, now;
};

// How much each side counts when a partial result joins those before it.
inline Merge merge_weights(float &top, float &total, float part_top, float part_total) {
  const float best = larger(top, part_top);
  const Merge m = {exp2(splat(top - best))[0], exp2(splat(part_top - best))[0]};
  top = best;
  total = total * m.before + part_total * m.now;
  return m;
}

inline void merge_values(float *out, const float *part, Merge m, int64_t dim) {
  for (int64_t i = 0; i < dim; i += kLanes)
    store(out + i, fma(load(out + i), splat(m.before), load(part + i) * splat(m.now)));
}

template <Cache C, int R>
struct Attend {
  typedef QueryTile<C, R> Tile;
  typedef typename Tile::Step Step;
  static constexpr int kDepth = Tile::kDepth, kBytes = CacheFormat<C>::kBytes;

  const HeadCache cache;
  const int32_t *table;
  const int64_t block_size, dim;
  Tile &tile;

  // The 16 keys from `key` on; they lie in one block.
  char *group(char *base, int64_t key) const {
    return base + table[key / block_size] * cache.block_stride + key % block_size * dim * kBytes;
  }

  // What is read next: few rows wait for memory, not for sums.
  void ask_for(char *base, int64_t start, int64_t count) const {
    for (int64_t i = 0; i < count; i += 16) {
      const char *first = group(base, start + i);
      for (int64_t at = 0; at < 16 * dim * kBytes; at += 64) prefetch(first + at);
    }
  }

  void scores(int64_t start, int64_t count) const {
    constexpr int kPairs = pairs_at_once(R);
    for (int64_t i = 0; i < count; i += kPairs * kSlab) {
      const char *b[kPairs][2];
      for (int n = 0; n < kPairs; n++)
        for (int half = 0; half < 2; half++) {
          const int64_t key = i + n * kSlab + half * 16;
          b[n][half] = group(cache.keys, start + (key < count ? key : 0));
        }
      vf c[kPairs][R][kVecs];
#pragma GCC unroll 4
      for (int n = 0; n < kPairs; n++) clear(c[n]);
      multiply_pairs<Step, R, kPairs>(tile.q, sizeof(tile.q[0]), b, 64, dim / kDepth, c);
#pragma GCC unroll 4
      for (int n = 0; n < kPairs; n++)
#pragma GCC unroll 12
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
          for (int v = 0; v < kVecs; v++) store(tile.scores[r] + i + n * kSlab + v * kLanes, c[n][r][v]);
    }
  }

  // The largest of row r's scores in [0, count), of which it sees n.
  float largest_score(int r, int64_t n, int64_t all) const {
    if (n <= 0) return -INFINITY;
    float *x = tile.scores[r];
    for (int64_t j = n; j < all; j++) x[j] = -INFINITY;
    vf best = load(x);
    for (int64_t j = kLanes; j < all; j += kLanes) best = max(best, load(x + j));
    return largest(best);
  }

  // Makes row r's scores weights, and gives their sum.
  float weigh(int r, int64_t all) const {
    const float *x = tile.scores[r];
    const vf top = splat(tile.top[r]);
    vf total = {};
    for (int64_t j = 0; j < all; j += kSlab) {
      float weights[kSlab];
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; v++) {
        const vf weight = exp2(load(x + j + v * kLanes) - top);
        store(weights + v * kLanes, weight);
        total += weight;
      }
      make_units(weights, tile.weights[r] + j / kDepth, kSlab);
    }
    return sum(total);
  }

  void softmax(int64_t start, int64_t count) const {
    const int64_t all = (count + kSlab - 1) / kSlab * kSlab;
    for (int r = 0; r < R; r++) tile.best[r] = largest_score(r, smaller(count, tile.seen[r] - start), all);
    for (int r = 0; r < R; r += kLanes) {
      const vf before = load(tile.top + r), top = max(before, load(tile.best + r));
      store(tile.top + r, top);
      store(tile.keep + r, exp2(before - max(top, splat(-3e38f))));  // nothing seen so far: keep nothing
    }
    for (int r = 0; r < R; r++)
      if (tile.seen[r] > start) {
        tile.sums[r] = weigh(r, all);
      } else {
        tile.sums[r] = 0;
        memset(tile.weights[r], 0, sizeof(tile.weights[r]));
      }
    for (int r = 0; r < R; r += kLanes)
      store(tile.total + r, fma(load(tile.total + r), load(tile.keep + r), load(tile.sums + r)));
  }

  // N pairs of 16 dimensions from d on.
  template <int N>
  void add_values(int64_t start, int64_t count, int64_t d) const {
    vf c[N][R][kVecs];
#pragma GCC unroll 4
    for (int n = 0; n < N; n++)
#pragma GCC unroll 12
      for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; v++)
          c[n][r][v] = load(tile.out[r] + d + n * kSlab + v * kLanes) * splat(tile.keep[r]);
    for (int64_t i = 0; i < count; i += 16) {
      const int64_t keys = smaller<int64_t>(16, count - i), steps = keys / kDepth;
      const char *at = group(cache.values, start + i) + d * 4, *b[N][2];
      for (int n = 0; n < N; n++)
        for (int half = 0; half < 2; half++) b[n][half] = at + (2 * n + half) * 64;
      const auto *weights = &tile.weights[0][i / kDepth];
      multiply_pairs<Step, R, N>(weights, sizeof(tile.weights[0]), b, dim * 4, steps, c);
      if (keys % kDepth == 0) continue;
      uint32_t pairs[N * kSlab];  // the last pair's second key is not there: its bits may be NaN
      memcpy(pairs, at + steps * dim * 4, sizeof(pairs));
      for (uint32_t &x : pairs) x &= 0xffffu;
      for (int n = 0; n < N; n++)
        for (int half = 0; half < 2; half++) b[n][half] = reinterpret_cast<const char *>(pairs + (2 * n + half) * 16);
      multiply_pairs<Step, R, N>(weights + steps, sizeof(tile.weights[0]), b, 0, 1, c);
    }
#pragma GCC unroll 4
    for (int n = 0; n < N; n++)
#pragma GCC unroll 12
      for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; v++) store(tile.out[r] + d + n * kSlab + v * kLanes, c[n][r][v]);
  }

  void add_values(int64_t start, int64_t count) const {
    constexpr int kPairs = smaller(2, pairs_at_once(R));  // head sizes are multiples of 32, most of 64
    int64_t d = 0;
    for (; d + kPairs * kSlab <= dim; d += kPairs * kSlab) add_values<kPairs>(start, count, d);
    if (d < dim) add_values<1>(start, count, d);
  }

  // The partial result of keys [begin, end).
  void chunk(int64_t begin, int64_t end) const {
    for (int r = 0; r < R; r += kLanes) {
      store(tile.top + r, splat(-INFINITY));
      store(tile.best + r, splat(-INFINITY));  // of the rows that are not there, too
      store(tile.sums + r, vf{});
      store(tile.total + r, vf{});
    }
    for (int r = 0; r < R; r++) memset(tile.out[r], 0, dim * sizeof(float));
    for (int64_t start = begin; start < end; start += kSpan) {
      const int64_t count = smaller<int64_t>(kSpan, end - start);
      if (R <= kTile / 2) {
        ask_for(cache.values, start, count);
        if (start + kSpan < end) ask_for(cache.keys, start + kSpan, smaller<int64_t>(kSpan, end - start - kSpan));
      }
      scores(start, count);
      softmax(start, count);
      add_values(start, count);
    }
  }
};

template <Weights W, Cache C, int R>
void attend_item(const StackArgs &s, int64_t layer, const AttentionItem &item) {
  const mindstream::Dims &d = *s.dims;
  const int64_t dim = d.head_dim, width = (d.heads + 2 * d.kv_heads) * dim;
  QueryTile<C, R> tile;
  for (int r = 0; r < R; r++) {
    const int64_t token = item.first_token + r / item.heads, head = item.first_head + r % item.heads;
    make_units(s.qkv + token * width + head * dim, tile.q[r], dim);
    tile.seen[r] = item.seen + r / item.heads;
    tile.all_top[r] = -INFINITY;
    tile.all_total[r] = 0;
    memset(tile.all_out[r], 0, dim * sizeof(float));
  }
  const HeadCache cache = head_cache<C>(s, layer, item.first_head / (d.heads / d.kv_heads));
  const Attend<C, R> attend = {cache, s.block_tables + item.sequence * s.table_width, d.block_size, dim,
                               tile};
  const int64_t end = tile.seen[R - 1];
  if (item.chunk >= 0) {
    attend.chunk(item.chunk * kChunkKeys, smaller(end, (item.chunk + 1) * kChunkKeys));
    for (int r = 0; r < R; r++) {
      const int64_t token = item.first_token + r / item.heads, head = item.first_head + r % item.heads;
      float *to = s.partials + ((token * d.heads + head) * s.chunks + item.chunk) * (dim + 2);
      to[0] = tile.top[r];
      to[1] = tile.total[r];
      memcpy(to + 2, tile.out[r], dim * sizeof(float));
    }
    return;
  }
  for (int64_t begin = 0; begin < end; begin += kChunkKeys) {
    attend.chunk(begin, smaller(end, begin + kChunkKeys));
    for (int r = 0; r < R; r++) {
      if (tile.seen[r] <= begin) continue;
      const Merge m = merge_weights(tile.all_top[r], tile.all_total[r], tile.top[r], tile.total[r]);
      merge_values(tile.all_out[r], tile.out[r], m, dim);
    }
  }
  for (int r = 0; r < R; r++) {
    const int64_t token = item.first_token + r / item.heads, head = item.first_head + r % item.heads;
    const vf inverse = splat(1.0f / tile.all_total[r]);
    for (int64_t i = 0; i < dim; i += kLanes) store(tile.all_out[r] + i, load(tile.all_out[r] + i) * inverse);
    put_values<W>(s.narrow, token, d.heads * dim, head * dim, tile.all_out[r], dim);
  }
}

template <Weights W, Cache C>
void attend_rows(const StackArgs &s, int64_t layer, const AttentionItem &item) {
  switch (item.rows * item.heads) {
    case 1: return attend_item<W, C, 1>(s, layer, item);
    case 2: return attend_item<W, C, 2>(s, layer, item);
    case 3: return attend_item<W, C, 3>(s, layer, item);
#if defined(__AVX512F__) && !defined(MINDSTREAM_FEW_TILES)
    case 4: return attend_item<W, C, 4>(s, layer, item);
    case 5: return attend_item<W, C, 5>(s, layer, item);
    case 6: return attend_item<W, C, 6>(s, layer, item);
    case 7: return attend_item<W, C, 7>(s, layer, item);
    case 8: return attend_item<W, C, 8>(s, layer, item);
    case 9: return attend_item<W, C, 9>(s, layer, item);
    case 10: return attend_item<W, C, 10>(s, layer, item);
    case 11: return attend_item<W, C, 11>(s, layer, item);
    case 12: return attend_item<W, C, 12>(s, layer, item);
#endif
  }
}

// The partial results of one split row and head, merged in the order of the keys.
template <Weights W>
void merge_split(const StackArgs &s, int64_t token, int64_t head) {
  const int64_t dim = s.dims->head_dim, heads = s.dims->heads;
  int64_t b = 0, first = 0;
  while (token >= first + s.q_lens[b]) first += s.q_lens[b++];
  const int64_t seen = s.kv_lens[b] - s.q_lens[b] + token - first + 1;
  float top = -INFINITY, total = 0, out[kHeadDim] = {};
  for (int64_t c = 0; c * kChunkKeys < seen; c++) {
    const float *part = s.partials + ((token * heads + head) * s.chunks + c) * (dim + 2);
    const Merge m = merge_weights(top, total, part[0], part[1]);
    merge_values(out, part + 2, m, dim);
  }
  const vf inverse = splat(1.0f / total);
  for (int64_t j = 0; j < dim; j += kLanes) store(out + j, load(out + j) * inverse);
  put_values<W>(s.narrow, token, heads * dim, head * dim, out, dim);
}

}  // namespace
