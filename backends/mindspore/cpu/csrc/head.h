// The vocabulary projection: the logits of some rows, or the place of each row's largest.
#pragma once
#include "matmul.h"

namespace {

using mindstream::Best;
using mindstream::HeadArgs;

enum HeadStage { kPutRows, kLogits, kChoose };
static_assert(kChoose + 1 == mindstream::kHeadPhases, "a phase for each stage");

// What is there stays unless x is larger or NaN; a NaN stays for good.
INLINE void improve(Best &best, int v, vf x, vi slab) {
  float *const value = best.value + v * kLanes;
  int32_t *const place = best.slab + v * kLanes;
  const vf old = load(value);
  const vi stays = (x <= old) | (old != old), others = stays & load_words(place);
  store(value, stays ? old : x);
  slab = others | (~stays & slab);
  memcpy(place, &slab, sizeof(slab));
}

inline void begin(Best &best) {
  for (int i = 0; i < kSlab; i++) {
    best.value[i] = -INFINITY;
    best.slab[i] = -1;
  }
}

// In the order of the slabs, so that the first of equals stays.
struct BestOut {
  Best *best;  // of the item's rows
  int64_t columns;
  void operator()(int64_t row, int64_t slab, const vf (&c)[kVecs]) const {
    float x[kSlab];
    for (int v = 0; v < kVecs; v++) store(x + v * kLanes, c[v]);
    for (int64_t i = columns - slab * kSlab; i < kSlab; i++) x[i] = -INFINITY;  // no columns of the matrix
    for (int v = 0; v < kVecs; v++) improve(best[row], v, load(x + v * kLanes), vi{} + (int32_t)slab);
  }
};

// -1 for a row with a NaN, or with nothing above -inf.
inline float best_id(const Best &best) {
  int64_t id = -1;
  float most = -INFINITY;
  for (int i = 0; i < kSlab; i++) {
    const float value = best.value[i];
    const int64_t column = (int64_t)best.slab[i] * kSlab + i;
    if (value != value) return -1;
    if (value > most || (value == most && id > column && best.slab[i] >= 0)) {
      most = value;
      id = column;
    }
  }
  return (float)id;
}

// The items of the product saw a row's slabs in their own order.
void choose(const HeadArgs &h, int64_t row) {
  Best all;
  begin(all);
  const int64_t items = matmul_items(*h.head, h.count, h.threads);
  for (int64_t item = 0; item < items; item++) {
    const Best &part = h.best[item * h.count + row];
    for (int v = 0; v < kVecs; v++) improve(all, v, load(part.value + v * kLanes), load_words(part.slab + v * kLanes));
  }
  h.ids[row] = best_id(all);
}

int64_t head_items(const void *context, int64_t phase) {
  const HeadArgs &h = *static_cast<const HeadArgs *>(context);
  if (phase == kLogits) return matmul_items(*h.head, h.count, h.threads);
  return phase == kChoose && h.logits ? 0 : row_items(h.count);
}

template <Weights W>
void project(const HeadArgs &h, int64_t item) {
  const Piece piece = {h.count, h.threads, item};
  if (h.logits) return matmul<W>(*h.head, h.acts, piece, StoreOut{h.logits, h.head->columns, nullptr});
  Best *const best = h.best + item * h.count;
  for (int64_t row = 0; row < h.count; row++) begin(best[row]);
  matmul<W>(*h.head, h.acts, piece, BestOut{best, h.head->columns});
}

template <Weights W>
void run_head(const HeadArgs &h, int64_t phase, int64_t item) {
  if (phase == kLogits) return project<W>(h, item);
  const int64_t hidden = h.head->depth, first = item * kItemRows;
  float x[kMaxDepth + kGroup];
  for (int64_t i = first; i < smaller(h.count, first + kItemRows); i++) {
    if (phase == kChoose) {
      choose(h, i);
    } else {
      memcpy(x, h.hidden + h.rows[i] * hidden, hidden * sizeof(float));
      put_row<W>(h.acts, i, hidden, x);
    }
  }
}

void run_head(const void *context, int64_t phase, int64_t item) {
  const HeadArgs &h = *static_cast<const HeadArgs *>(context);
  switch (h.head->kind) {
    case Weights::kBf16: return run_head<Weights::kBf16>(h, phase, item);
    case Weights::kInt8: return run_head<Weights::kInt8>(h, phase, item);
    case Weights::kF32: return run_head<Weights::kF32>(h, phase, item);
  }
}

}  // namespace
