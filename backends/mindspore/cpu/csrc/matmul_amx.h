// The matrix products of matmul.h in AMX tiles, for bf16 and int8 weights. float32 weights, and all
// of the attention, go through the AVX-512 code of the other headers.
#pragma once
#include "matmul.h"
#include "tile_amx.h"

namespace {

// One tile of rows asks for what it will read, the last two of several for a half of the next slab each.
inline BlocksAhead blocks_ahead(const Tile &tile, const char *b, int64_t blocks, int64_t block_lines) {
  const int64_t bytes = blocks * block_lines * 64, half = (block_lines + 1) / 2;
  if (tile.turns == 1) return {b + kAheadBytes, block_lines};
  if (tile.turn < tile.turns - 2) return {b, 0};
  return {b + bytes + (tile.turns - 1 - tile.turn) * blocks * half * 64, half};
}

// Up to 32 rows in two halves as equal as can be: two short tiles have more accumulators at work than
// one long one. Computes `rows` rows although a tile of the product may have one less, so that one
// configuration does: such a tile is never the last, the row behind it is there.
struct AmxBf16 {
  const int64_t rows, upper = rows > 16 ? (rows + 1) / 2 : rows;
  const Tiles tiles{upper, rows - upper};

  // Depths are multiples of 32, see Model: there is no last block to be cut.
  void operator()(const Matrix &m, const Rows &in, const Tile &tile, int64_t slab, float (&sums)[32][kSlab]) const {
    const int64_t blocks = m.depth / 32;
    const char *a = in.units + tile.first * in.stride;
    const char *b = static_cast<const char *>(m.data) + slab * blocks * kBlockBytes;
    const BlocksAhead ahead = blocks_ahead(tile, b, blocks, kBlockBytes / 64);
    if (rows > upper)
      sum_bf16<true>(a, in.stride, upper, b, blocks, ahead, sums);
    else
      sum_bf16<false>(a, in.stride, upper, b, blocks, ahead, sums);
  }
};

// Up to 16 rows. Integer sums are exact and what follows is multiply_int8's: its bits.
struct AmxInt8 {
  const int64_t rows;
  const Tiles tiles{rows, rows};

  void operator()(const Matrix &m, const Rows &in, const Tile &tile, int64_t slab, float (&sums)[32][kSlab]) const {
    const int64_t groups = group_count(m.depth), at = tile.first * groups;
    const char *a = in.units + tile.first * in.stride;
    const char *b = static_cast<const char *>(m.data) + slab * groups * kGroupBytes;
    const BlocksAhead ahead = blocks_ahead(tile, b, groups, kGroupBytes / 64);
    memset(sums, 0, sizeof(sums));
    for (int64_t g = 0; g < groups; g++, b += kGroupBytes) {
      alignas(64) int32_t parts[2][16][kSlab];
      ahead(g);
      sum_int8(a + g * 128, in.stride, b, parts);
      for (int64_t r = 0; r < rows; r++) {
        const int64_t i = at + r * groups + g;
        add_scaled(parts[0][r], parts[1][r], in.offsets[i], in.scales[i], b + kBlockBytes, sums[r]);
      }
    }
  }

  static INLINE void add_scaled(const int32_t *high, const int32_t *low, int32_t offset, float row_scale,
                                const char *scales, float *sums) {
    for (int v = 0; v < kVecs; v++, high += kLanes, low += kLanes, sums += kLanes) {
      const vi sum = (load_words(high) << 8) + load_words(low) + offset;
      const vf scale = load_scales(scales, v) * splat(row_scale);
      store(sums, fma(__builtin_convertvector(sum, vf), scale, load(sums)));
    }
  }
};

template <class Product, class Out>
void amx_tiles(const Matrix &m, const Rows &rows, const Piece &piece, const Out &out) {
  const Product product{tile_rows(m.kind, piece.rows)};
  alignas(64) float sums[32][kSlab];
  each_tile(m, piece, [&](const Tile &tile, int64_t height, int64_t slab) {
    product(m, rows, tile, slab, sums);
    for (int64_t r = 0; r < height; r++) out(tile.first + r, slab, {load(sums[r]), load(sums[r] + kLanes)});
  });
}

template <Weights W, class Out>
void matmul_amx(const Matrix &m, const Rows &rows, const Piece &piece, const Out &out) {
  if constexpr (W == Weights::kBf16)
    amx_tiles<AmxBf16>(m, rows, piece, out);
  else if constexpr (W == Weights::kInt8)
    amx_tiles<AmxInt8>(m, rows, piece, out);
}

}  // namespace
