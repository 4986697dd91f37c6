// The whole decoder stack as one job: all layers and the final norm, with a barrier between steps.
#pragma once
#include "cached_attention.h"

namespace {

using mindstream::HeadArgs;

template <Weights W, Cache C>
void run_layer(const StackArgs &s, int64_t index, const Team &team) {
  const mindstream::Dims &d = *s.dims;
  const mindstream::Layer &layer = s.layers[index];
  const int64_t tile = tile_rows(s.tokens, kTile), attended = d.heads * d.head_dim;
  norm_rows<W>(s.hidden, layer.input_norm, s.narrow, s.tokens, tile, d.hidden, d.eps, team);
  team.barrier();
  matmul<W>(layer.qkv, s.narrow, s.tokens, team, StoreOut{s.qkv, layer.qkv.columns, layer.qkv_bias});
  team.barrier();
  rotate_and_store<C>(s, index, team);
  team.barrier();
  cached_attention<W, C>(s, index, tile, team);
  team.barrier();
  finish_rows<W>(s.narrow, s.tokens, tile, attended, team);
  matmul<W>(layer.out, s.narrow, s.tokens, team, AddOut{s.hidden, d.hidden});
  team.barrier();
  norm_rows<W>(s.hidden, layer.post_norm, s.narrow, s.tokens, tile, d.hidden, d.eps, team);
  team.barrier();
  matmul<W>(layer.gate_up, s.narrow, s.tokens, team, SwigluOut<W>{s.wide, tile, d.intermediate});
  team.barrier();
  finish_rows<W>(s.wide, s.tokens, tile, d.intermediate, team);
  matmul<W>(layer.down, s.wide, s.tokens, team, AddOut{s.hidden, d.hidden});
  team.barrier();
}

template <Weights W, Cache C>
void run_stack(const StackArgs &s, const Team &team) {
  const int64_t hidden = s.dims->hidden;
  for (int64_t layer = 0; layer < s.dims->layers; layer++) run_layer<W, C>(s, layer, team);
  for (int64_t t = team.rank; t < s.tokens; t += team.size)
    rms_norm(s.hidden + t * hidden, s.final_norm, s.hidden + t * hidden, hidden, s.dims->eps);
}

template <Weights W>
void run_stack(const StackArgs &s, const Team &team) {
  if (s.dims->cache == Cache::kBf16)
    run_stack<W, Cache::kBf16>(s, team);
  else
    run_stack<W, Cache::kF32>(s, team);
}

void stack(const StackArgs &s, const Team &team) {
  switch (s.dims->weights) {
    case Weights::kBf16: return run_stack<Weights::kBf16>(s, team);
    case Weights::kInt8: return run_stack<Weights::kInt8>(s, team);
    case Weights::kF32: return run_stack<Weights::kF32>(s, team);
  }
}

template <Weights W>
void run_head(const HeadArgs &h, const Team &team) {
  const int64_t tile = tile_rows(h.count, kTile), hidden = h.head->depth;
  float x[kMaxDepth + kGroup];
  for (int64_t i = team.rank; i < h.count; i += team.size) {
    memcpy(x, h.hidden + i * hidden, hidden * sizeof(float));
    put_row<W>(h.acts, i, tile, hidden, x);
  }
  team.barrier();
  matmul<W>(*h.head, h.acts, h.count, team, StoreOut{h.logits, h.head->columns, nullptr});
}

void head(const HeadArgs &h, const Team &team) {
  switch (h.head->kind) {
    case Weights::kBf16: return run_head<Weights::kBf16>(h, team);
    case Weights::kInt8: return run_head<Weights::kInt8>(h, team);
    case Weights::kF32: return run_head<Weights::kF32>(h, team);
  }
}

}  // namespace
