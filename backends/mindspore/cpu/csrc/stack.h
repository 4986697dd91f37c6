// The whole decoder stack as one job: the phases of each layer, and at last the final norm.
#pragma once
#include "cached_attention.h"

namespace {

using mindstream::Dims;
using mindstream::Layer;

enum Stage {
  kInputNorm, kQkv, kRotate, kAttend, kMerge, kQuantizeAttended, kOut, kPostNorm, kGateUp, kQuantizeWide, kDown,
};
static_assert(kDown + 1 == mindstream::kLayerPhases, "a phase for each stage");
static_assert(kAttend == mindstream::kCachePhases, "keys and values are written before it");

// Rows of the attention that belong to a sequence; behind them is padding.
inline int64_t used_rows(const StackArgs &s) {
  int64_t rows = 0;
  for (int64_t b = 0; b < s.sequences; b++) rows += s.q_lens[b];
  return rows;
}

int64_t stack_items(const void *context, int64_t phase) {
  const StackArgs &s = *static_cast<const StackArgs *>(context);
  phase += s.first_phase;
  const int64_t index = phase / mindstream::kLayerPhases;
  if (index == s.dims->layers) return row_items(s.tokens);
  const Layer &layer = s.layers[index];
  switch (phase % mindstream::kLayerPhases) {
    case kQkv: return matmul_items(layer.qkv, s.tokens, s.threads);
    case kAttend: return s.item_count;
    case kMerge: return s.chunks ? used_rows(s) * s.dims->heads : 0;
    case kOut: return matmul_items(layer.out, s.tokens, s.threads);
    case kGateUp: return matmul_items(layer.gate_up, s.tokens, s.threads);
    case kDown: return matmul_items(layer.down, s.tokens, s.threads);
    case kQuantizeAttended:
    case kQuantizeWide: return s.dims->weights == Weights::kInt8 ? row_items(s.tokens) : 0;
    default: return row_items(s.tokens);
  }
}

template <Weights W, Cache C>
void run_stage(const StackArgs &s, int64_t index, int64_t stage, int64_t item) {
  const Dims &d = *s.dims;
  const Layer &layer = s.layers[index];
  const int64_t n = s.tokens, attended = d.heads * d.head_dim;
  const int64_t begin = item * kItemRows, end = smaller(n, begin + kItemRows);
  const Piece piece = {n, s.threads, item};
  switch (stage) {
    case kInputNorm: return norm_rows<W>(s.hidden, layer.input_norm, s.narrow, begin, end, d.hidden, d.eps);
    case kQkv: return matmul<W>(layer.qkv, s.narrow, piece, StoreOut{s.qkv, layer.qkv.columns, layer.qkv_bias});
    case kRotate: return rotate_and_store<C>(s, index, begin, end);
    case kAttend: return attend_rows<W, C>(s, index, s.items[item]);
    case kMerge: return merge_split<W>(s, item / d.heads, item % d.heads);
    case kQuantizeAttended: return quantize_staged(s.narrow, begin, end, attended);
    case kOut: return matmul<W>(layer.out, s.narrow, piece, AddOut{s.hidden, d.hidden});
    case kPostNorm: return norm_rows<W>(s.hidden, layer.post_norm, s.narrow, begin, end, d.hidden, d.eps);
    case kGateUp: return matmul<W>(layer.gate_up, s.narrow, piece, SwigluOut<W>{s.wide, d.intermediate});
    case kQuantizeWide: return quantize_staged(s.wide, begin, end, d.intermediate);
    case kDown: return matmul<W>(layer.down, s.wide, piece, AddOut{s.hidden, d.hidden});
  }
}

void final_norm(const StackArgs &s, int64_t item) {
  const int64_t hidden = s.dims->hidden, begin = item * kItemRows;
  for (int64_t t = begin; t < smaller(s.tokens, begin + kItemRows); t++)
    rms_norm(s.hidden + t * hidden, s.final_norm, s.hidden + t * hidden, hidden, s.dims->eps);
}

template <Weights W>
void run_stage(const StackArgs &s, int64_t index, int64_t stage, int64_t item) {
  if (s.dims->cache == Cache::kBf16)
    run_stage<W, Cache::kBf16>(s, index, stage, item);
  else
    run_stage<W, Cache::kF32>(s, index, stage, item);
}

void run_stack(const void *context, int64_t phase, int64_t item) {
  const StackArgs &s = *static_cast<const StackArgs *>(context);
  phase += s.first_phase;
  const int64_t index = phase / mindstream::kLayerPhases, stage = phase % mindstream::kLayerPhases;
  if (index == s.dims->layers) return final_norm(s, item);
  switch (s.dims->weights) {
    case Weights::kBf16: return run_stage<Weights::kBf16>(s, index, stage, item);
    case Weights::kInt8: return run_stage<Weights::kInt8>(s, index, stage, item);
    case Weights::kF32: return run_stage<Weights::kF32>(s, index, stage, item);
  }
}

}  // namespace
