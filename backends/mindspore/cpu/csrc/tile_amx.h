// Intel's AMX: products of whole tiles, 16 rows of activations by 64 bytes of depth times 64 bytes of
// depth by 16 columns. The packed weights are such tiles already: 16 lines of a slab, a line being 32
// columns of four bytes of depth, are two tiles side by side.
//
// A tile product computes each row by itself, whatever rows are beside it and wherever in the tile
// it is, and every (row, column) is summed up over the same blocks of depth in the same order: the
// batch does not change a bit, as long as all batches come here. One row is a tile of one row.
#pragma once
#include "rows.h"

namespace {

constexpr int64_t kLine = 128;  // bytes of a slab's line, and of 32 sums
constexpr int64_t kBlockBytes = 16 * kLine;

// What LDTILECFG reads: Intel SDM volume 1, "Programming with Intel AMX".
struct TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

// This thread's tile registers, for as long as an item of work lasts:
//   0, 1  sums of the upper rows by the two halves of a slab's columns, 2, 3 of the lower rows,
//   4, 5  activations of the upper and of the lower rows, 6, 7  weights of the two halves.
// The configuration is a thread's own and nothing else of it can be relied on: workers come and go,
// the height of the tiles changes with the batch, and on the caller's thread other libraries may use
// tiles between two jobs. So each item loads it, some hundred cycles before work of many thousands,
// and releases it: a thread that then sleeps or multiplies no more has no 8 KiB of tiles to be saved
// at each context switch, and does not keep its core out of the deeper sleep states.
class Tiles {
 public:
  // The rows of both halves, at most 16 each; lower may be 0.
  Tiles(int64_t upper, int64_t lower) {
    alignas(64) TileConfig config = {};
    const int64_t rows[8] = {upper, upper, lower, lower, upper, lower, 16, 16};
    config.palette = 1;
    for (int i = 0; i < 8; i++) {
      config.rows[i] = (uint8_t)rows[i];
      config.row_bytes[i] = rows[i] ? 64 : 0;
    }
    // GCC's _tile_loadconfig says that it reads eight bytes: without this the others may stay unwritten.
    asm volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
  }
  Tiles(const Tiles &) = delete;
  Tiles &operator=(const Tiles &) = delete;
  ~Tiles() { _tile_release(); }
};

// What is asked for while a slab is computed, see Ahead in tile.h: `lines` cache lines a block.
struct BlocksAhead {
  const char *at;
  int64_t lines;
  INLINE void operator()(int64_t block) const {
    const char *p = at + block * lines * 64;
    for (int64_t i = 0; i < lines; i++, p += 64) prefetch(p);
  }
};

// sums = activations times a slab's weights in bf16. The rows lie `row` bytes apart, first the upper
// ones, then the lower ones where there are such. Four accumulators take four tile loads for four
// products: enough to hide that a product is done 52 cycles after it began, where one can begin every
// 16. Up to 16 rows have two accumulators; they wait more for the memory than for each other.
template <bool Lower>
INLINE void sum_bf16(const char *a, int64_t row, int64_t upper, const char *b, int64_t blocks,
                     BlocksAhead ahead, float (&sums)[32][kSlab]) {
  _tile_zero(0);
  _tile_zero(1);
  if (Lower) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t i = 0; i < blocks; i++, b += kBlockBytes) {
    ahead(i);
    _tile_loadd(4, a + i * 64, row);
    _tile_loadd(6, b, kLine);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + 64, kLine);
    _tile_dpbf16ps(1, 4, 7);
    if (Lower) {
      _tile_loadd(5, a + upper * row + i * 64, row);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums[0], kLine);
  _tile_stored(1, sums[0] + 16, kLine);
  if (Lower) {
    _tile_stored(2, sums[upper], kLine);
    _tile_stored(3, sums[upper] + 16, kLine);
  }
}

// The integer sums of a group of int8 weights: of the activations' high bytes and of their low bytes,
// which take the places of upper and lower rows.
INLINE void sum_int8(const char *a, int64_t row, const char *b, int32_t (&sums)[2][16][kSlab]) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, a, row);
  _tile_loadd(6, b, kLine);
  _tile_dpbsud(0, 4, 6);
  _tile_loadd(7, b + 64, kLine);
  _tile_dpbsud(1, 4, 7);
  _tile_loadd(5, a + 64, row);
  _tile_dpbsud(2, 5, 6);
  _tile_dpbsud(3, 5, 7);
  _tile_stored(0, sums[0][0], kLine);
  _tile_stored(1, sums[0][0] + 16, kLine);
  _tile_stored(2, sums[1][0], kLine);
  _tile_stored(3, sums[1][0] + 16, kLine);
}

}  // namespace
