// Matrix products over the packed weights, slab by slab.
#pragma once
#include "rows.h"

namespace {

using mindstream::Matrix;

template <Weights W, int R>
INLINE void slab_product(const Matrix &m, const Rows &rows, int64_t tile, int64_t slab, vf (&c)[R][kVecs]) {
  typedef typename Format<W>::Unit Unit;
  const int64_t steps = step_count<W>(m.depth);
  const Unit *a = static_cast<const Unit *>(rows.units) + tile * steps * R;
  const int64_t weight_steps = W == Weights::kInt8 ? steps / kInt8Passes : steps;
  const char *b = static_cast<const char *>(m.data) + slab * weight_steps * kSlab * 4;
  if constexpr (W == Weights::kInt8) {
    const int64_t groups = group_count(m.depth), at = tile * groups * R;
    multiply_int8<R>(a, rows.scales + at, rows.offsets + at, b, m.scales + slab * groups * kSlab, groups, c);
  } else {
    multiply<typename Format<W>::Step, R, 1, R, true>(a, b, b + kSlab * 2, kSlab * 4, steps, c);
  }
}

// The work of a product is parts of the rows times slabs, the slabs of a part one after the other,
// cut into items that get smaller: long runs of memory are read faster than single slabs, and the
// small items at the end let all threads finish together.
struct Run {
  int64_t begin, end;
};

inline int64_t run_length(int64_t left, int64_t threads) {
  return (3 * left + 4 * threads - 1) / (4 * threads);
}

inline int64_t run_count(int64_t total, int64_t threads) {
  int64_t count = 0;
  for (int64_t left = total; left > 0; count++) left -= run_length(left, threads);
  return count;
}

inline Run nth_run(int64_t total, int64_t threads, int64_t n) {
  int64_t begin = 0;
  while (n-- > 0) begin += run_length(total - begin, threads);
  return {begin, begin + run_length(total - begin, threads)};
}

constexpr int64_t kPartTiles = 10;  // their activations stay in the second-level cache

// Into how many parts the rows' tiles are cut: also more where there are few slabs for the threads.
inline int64_t tile_parts(const Matrix &m, int64_t tiles, int64_t threads) {
  const int64_t cached = (tiles + kPartTiles - 1) / kPartTiles;
  const int64_t enough = (8 * threads + m.slabs() - 1) / m.slabs();
  return smaller<int64_t>(cached > enough ? cached : enough, tiles);
}

inline int64_t matmul_items(const Matrix &m, int64_t count, int64_t threads) {
  const int64_t tile = tile_rows(count, kTile);
  return run_count(m.slabs() * tile_parts(m, (count + tile - 1) / tile, threads), threads);
}

// A product's one item among all: see matmul_items.
struct Piece {
  int64_t rows, threads, item;
};

// One tile of rows times one slab. A function of its own: inlined into the loops around it, GCC keeps
// the sums in memory.
template <Weights W, int R, class Out>
__attribute__((noinline)) void tile_product(const Matrix &m, const Rows &rows, int64_t tile,
                                            int64_t slab, int64_t count, const Out &out) {
  vf c[R][kVecs] = {};
  slab_product<W, R>(m, rows, tile, slab, c);
  for (int r = 0; r < R && tile * R + r < count; r++) out(tile * R + r, slab, c[r]);
}

// Calls out(row, slab, columns) with the 32 columns of the item's slabs and rows.
template <Weights W, int R, class Out>
void matmul_tiles(const Matrix &m, const Rows &rows, const Piece &piece, const Out &out) {
  const int64_t tiles = (piece.rows + R - 1) / R, parts = tile_parts(m, tiles, piece.threads);
  const Run run = nth_run(m.slabs() * parts, piece.threads, piece.item);
  for (int64_t i = run.begin; i < run.end; i++) {
    const int64_t part = i / m.slabs(), slab = i % m.slabs();
    for (int64_t t = tiles * part / parts; t < tiles * (part + 1) / parts; t++)
      tile_product<W, R>(m, rows, t, slab, piece.rows, out);
  }
}

template <Weights W, class Out>
void matmul(const Matrix &m, const Rows &rows, const Piece &piece, const Out &out) {
  switch (tile_rows(piece.rows, kTile)) {
    case 1: return matmul_tiles<W, 1>(m, rows, piece, out);
    case 2: return matmul_tiles<W, 2>(m, rows, piece, out);
    case 3: return matmul_tiles<W, 3>(m, rows, piece, out);
#if defined(__AVX512F__) && !defined(MINDSTREAM_FEW_TILES)
    case 4: return matmul_tiles<W, 4>(m, rows, piece, out);
    case 5: return matmul_tiles<W, 5>(m, rows, piece, out);
    case 6: return matmul_tiles<W, 6>(m, rows, piece, out);
    case 7: return matmul_tiles<W, 7>(m, rows, piece, out);
    case 8: return matmul_tiles<W, 8>(m, rows, piece, out);
    case 9: return matmul_tiles<W, 9>(m, rows, piece, out);
    case 10: return matmul_tiles<W, 10>(m, rows, piece, out);
    case 11: return matmul_tiles<W, 11>(m, rows, piece, out);
    case 12: return matmul_tiles<W, 12>(m, rows, piece, out);
#endif
  }
}

// out[row, column] = product (+ bias), for columns that exist.
struct StoreOut {
  float *out;
  int64_t columns;
  const float *bias;
  void operator()(int64_t row, int64_t slab, const vf (&c)[kVecs]) const {
    float *to = out + row * columns + slab * kSlab;
    float part[kSlab];
    for (int v = 0; v < kVecs; v++)
      store(part + v * kLanes, bias ? c[v] + load(bias + slab * kSlab + v * kLanes) : c[v]);
    memcpy(to, part, smaller<int64_t>(kSlab, columns - slab * kSlab) * sizeof(float));
  }
};

// hidden[row, column] += product
struct AddOut {
  float *hidden;
  int64_t columns;
  void operator()(int64_t row, int64_t slab, const vf (&c)[kVecs]) const {
    float *to = hidden + row * columns + slab * kSlab;
    for (int v = 0; v < kVecs; v++) store(to + v * kLanes, load(to + v * kLanes) + c[v]);
  }
};

// silu(gate) * up of 16 columns each, as activations of the next product
template <Weights W>
struct SwigluOut {
  Rows rows;
  int64_t tile, depth;
  void operator()(int64_t row, int64_t slab, const vf (&c)[kVecs]) const {
    constexpr int half = kVecs / 2 ? kVecs / 2 : 1;
    float x[kSlab / 2];
    for (int v = 0; v < half; v++) {
      const vf gate = c[v], up = c[v + half];
      store(x + v * kLanes, gate / (splat(1.0f) + exp(-gate)) * up);
    }
    put_values<W>(rows, row, tile, depth, slab * kSlab / 2, x, kSlab / 2);
  }
};

}  // namespace
