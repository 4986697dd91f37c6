// Matrix products over the packed weights, slab by slab.
#pragma once
#include "rows.h"

namespace {

using mindstream::Matrix;

// A tile: some rows of a product from `first` on. It is number `turn` of the `turns` tiles that go
// through a slab one after the other: see Ahead.
struct Tile {
  int64_t first, turn, turns;
};

template <Weights W>
inline int64_t slab_bytes(int64_t depth) {
  return W == Weights::kInt8 ? group_count(depth) * kGroupBytes : step_count<W>(depth) * kSlab * 4;
}

template <Weights W, int R>
INLINE void slab_product(const Matrix &m, const Rows &rows, const Tile &tile, int64_t slab, vf (&c)[R][kVecs]) {
  const int64_t steps = step_count<W>(m.depth);
  const char *a = rows.units + tile.first * rows.stride;
  constexpr int64_t stride = kSlab * 4, half = stride / 2;
  const int64_t bytes = slab_bytes<W>(m.depth);
  const char *b = static_cast<const char *>(m.data) + slab * bytes;
  if constexpr (W == Weights::kInt8) {
    const int64_t groups = group_count(m.depth), at = tile.first * groups;
    multiply_int8<R>(a, rows.stride, rows.scales + at, rows.offsets + at, b, groups, c);
  } else {
    typedef typename Format<W>::Step Step;
    if (tile.turns == 1) return multiply<Step, R, 2>(a, rows.stride, b, b + half, stride, steps, {b + kAheadBytes, stride}, c);
    // A line a step, for as many steps as this tile's part of the next slab has lines.
    const int64_t lines = bytes / 64, first = lines * tile.turn / tile.turns;
    const int64_t asking = lines * (tile.turn + 1) / tile.turns - first;
    multiply<Step, R, 1>(a, rows.stride, b, b + half, stride, asking, {b + bytes + first * 64, 64}, c);
    a += asking * static_cast<int64_t>(sizeof(typename Step::Unit));
    b += asking * stride;
    multiply<Step, R, 0>(a, rows.stride, b, b + half, stride, steps - asking, {}, c);
  }
}

// The rows of a product are cut into tiles, as equal as can be. Of few tiles each thread gets all rows
// and its share of the slabs: memory is what takes the time, and every weight is read once. Of many it
// gets its share of the tiles and all slabs: its rows stay in its own core's caches from one product to
// the next. A share's tiles are cut into parts; its work is one part after the other, in a part one
// slab after the other, and in a slab one tile after the other. It is cut into items that get smaller:
// long runs of memory are read faster than single slabs, and the small items at the end are what other
// threads take over, so that all finish together.
struct Run {
  int64_t begin, end;
};

inline int64_t run_length(int64_t left) { return (3 * left + 3) / 4; }

inline int64_t run_count(int64_t total) {
  int64_t count = 0;
  for (int64_t left = total; left > 0; count++) left -= run_length(left);
  return count;
}

inline Run nth_run(int64_t total, int64_t n) {
  int64_t begin = 0;
  while (n-- > 0) begin += run_length(total - begin);
  return {begin, begin + run_length(total - begin)};
}

constexpr int64_t kThreadTiles = 4;  // from so many on a thread has rows of its own
constexpr int64_t kPartTiles = 10;  // their activations stay in the second-level cache

#if defined(MINDSTREAM_AMX)
// Which products matmul_amx.h does. Few int8 rows have the same bits in vectors, and fewer cycles by
// the instructions' count; that is not measured.
constexpr bool in_amx(Weights kind, int64_t rows) {
  return kind == Weights::kBf16 || (kind == Weights::kInt8 && rows > 4);
}
constexpr int64_t most_rows(Weights kind, int64_t rows) {
  return !in_amx(kind, rows) ? kTile : kind == Weights::kBf16 ? 32 : 16;
}
#else
constexpr bool in_amx(Weights, int64_t) { return false; }
constexpr int64_t most_rows(Weights, int64_t) { return kTile; }
#endif

inline int64_t tile_count(Weights kind, int64_t rows) {
  const int64_t most = most_rows(kind, rows);
  return (rows + most - 1) / most;
}

// Of the largest tile, such as the last one is.
inline int64_t tile_rows(Weights kind, int64_t rows) {
  const int64_t tiles = tile_count(kind, rows);
  return tiles ? (rows + tiles - 1) / tiles : 1;
}

// What one thread begins with.
struct Share {
  Run tiles, slabs;
  int64_t units() const { return (tiles.end - tiles.begin) * (slabs.end - slabs.begin); }
};

inline Run share_of(int64_t count, int64_t threads, int64_t rank) {
  return {count * rank / threads, count * (rank + 1) / threads};
}

inline Share nth_share(const Matrix &m, int64_t rows, int64_t threads, int64_t rank) {
  const int64_t tiles = tile_count(m.kind, rows);
  if (tiles >= kThreadTiles * threads) return {share_of(tiles, threads, rank), {0, m.slabs()}};
  return {{0, tiles}, share_of(m.slabs(), threads, rank)};
}

// The last share is the largest.
inline int64_t share_items(const Matrix &m, int64_t rows, int64_t threads) {
  return run_count(nth_share(m, rows, threads, threads - 1).units());
}

inline int64_t matmul_items(const Matrix &m, int64_t rows, int64_t threads) {
  return threads * share_items(m, rows, threads);
}

// A product's one item among all: see matmul_items.
struct Piece {
  int64_t rows, threads, item;
};

// One tile of rows times one slab. A function of its own: inlined into the loops around it, GCC keeps
// the sums in memory.
template <Weights W, int R, class Out>
__attribute__((noinline)) void tile_product(const Matrix &m, const Rows &rows, Tile tile, int64_t slab, const Out &out) {
  vf c[R][kVecs], sums[R][kVecs];
  clear(c);
  slab_product<W, R>(m, rows, tile, slab, c);
  copy(c, sums);
  for (int r = 0; r < R; r++) out(tile.first + r, slab, sums[r]);
}

// Calls product(tile, rows of the tile, slab) for all of an item.
template <class Product>
INLINE void each_tile(const Matrix &m, const Piece &piece, const Product &product) {
  const int64_t items = share_items(m, piece.rows, piece.threads), all = tile_count(m.kind, piece.rows);
  const Share share = nth_share(m, piece.rows, piece.threads, piece.item / items);
  const int64_t tiles = share.tiles.end - share.tiles.begin, parts = (tiles + kPartTiles - 1) / kPartTiles;
  const int64_t most = (tiles + parts - 1) / parts, part_units = (share.slabs.end - share.slabs.begin) * most;
  const Run run = nth_run(share.units(), piece.item % items);
  for (int64_t unit = run.begin; unit < run.end; unit++) {
    const int64_t first = unit / part_units * most, turns = smaller(most, tiles - first);
    const int64_t slab = share.slabs.begin + unit % part_units / turns, turn = unit % part_units % turns;
    const int64_t tile = share.tiles.begin + first + turn;
    const int64_t begin = piece.rows * tile / all, end = piece.rows * (tile + 1) / all;
    product(Tile{begin, turn, turns}, end - begin, slab);
  }
}

// Calls out(row, slab, columns) with the 32 columns of the item's slabs and rows. The tiles have R
// rows or one less.
template <Weights W, int R, class Out>
void matmul_tiles(const Matrix &m, const Rows &rows, const Piece &piece, const Out &out) {
  each_tile(m, piece, [&](const Tile &tile, int64_t height, int64_t slab) {
    if (R == 1 || height == R)
      tile_product<W, R>(m, rows, tile, slab, out);
    else
      tile_product<W, R - (R > 1)>(m, rows, tile, slab, out);
  });
}

template <Weights W, class Out>
void matmul_amx(const Matrix &m, const Rows &rows, const Piece &piece, const Out &out);  // see matmul_amx.h

template <Weights W, class Out>
void matmul(const Matrix &m, const Rows &rows, const Piece &piece, const Out &out) {
#if defined(MINDSTREAM_AMX)
  if (in_amx(W, piece.rows)) return matmul_amx<W>(m, rows, piece, out);
#endif
  switch (tile_rows(W, piece.rows)) {
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
    float part[kSlab], *to = out + row * columns + slab * kSlab;
    const int64_t left = columns - slab * kSlab;
    float *whole = left < kSlab ? part : to;
    for (int v = 0; v < kVecs; v++)
      store(whole + v * kLanes, bias ? c[v] + load(bias + slab * kSlab + v * kLanes) : c[v]);
    if (left < kSlab) memcpy(to, part, left * sizeof(float));
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
  int64_t depth;
  void operator()(int64_t row, int64_t slab, const vf (&c)[kVecs]) const {
    constexpr int half = kVecs / 2 ? kVecs / 2 : 1;
    float x[kSlab / 2];
    for (int v = 0; v < half; v++) {
      const vf gate = c[v], up = c[v + half];
      store(x + v * kLanes, gate / (splat(1.0f) + exp(-gate)) * up);
    }
    put_values<W>(rows, row, depth, slab * kSlab / 2, x, kSlab / 2);
  }
};

}  // namespace
