// The operators MindSpore's ops.Custom(func_type="aot") calls; ctypes calls them alike in tests.
//
// An operator gets its inputs and then its outputs in `params`, with `ndims` and `shapes` alike, and
// returns 0 or an error. With dynamic shapes it also needs the functions InferShape (a dimension may
// be -1 while the graph is compiled) and InferType.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "isa.h"
#include "model.h"
#include "ragged.h"
#include "threads.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using mindstream::AttentionArgs;
using mindstream::Model;
using mindstream::StackArgs;

namespace {

constexpr int64_t kAttentionRows = 16;  // at most, of an item of PagedAttention

int refuse(const char *operation, const char *what, long long given, long long bound) {
  std::fprintf(stderr, "mindstream %s: %s: %lld (bound: %lld)\n", operation, what, given, bound);
  return 1;
}

// The ragged batch of an attention: what a wrong table would read or write outside the cache.
struct RaggedBatch {
  const char *operation;
  const int32_t *slots, *block_tables, *q_lens, *kv_lens;
  int64_t tokens, sequences, table_width, blocks, block_size;

  int check_sequence(int64_t b) const {
    const int64_t used = (kv_lens[b] + block_size - 1) / block_size;
    if (q_lens[b] < 0 || kv_lens[b] < q_lens[b])
      return refuse(operation, "length below the new tokens", kv_lens[b], q_lens[b]);
    if (used > table_width) return refuse(operation, "block table too short", table_width, used);
    for (int64_t i = 0; i < used; i++) {
      const int64_t block = block_tables[b * table_width + i];
      if (block < 0 || block >= blocks) return refuse(operation, "block outside the cache", block, blocks);
    }
    return 0;
  }

  int check() const {
    int64_t rows = 0;
    for (int64_t b = 0; b < sequences; rows += q_lens[b++])
      if (const int error = check_sequence(b)) return error;
    if (rows > tokens) return refuse(operation, "more new tokens than rows", rows, tokens);
    for (int64_t t = 0; t < tokens; t++)
      if (slots[t] >= blocks * block_size)
        return refuse(operation, "slot outside the cache", slots[t], blocks * block_size);
    return 0;
  }
};

template <class T>
T *as(void *p) {
  return static_cast<T *>(p);
}

}  // namespace

// q[T,H*D] k[T,KH*D] v[T,KH*D] key_cache[NB,BS,KH,D] value_cache[NB,BS,KH,D] (float32)
// slots[T] block_tables[B,MB] q_seq_lens[B] batch_valid_length[B] (int32) -> out[T,H*D].
// Writes k and v into the caches in place; a negative slot writes nothing.
EXPORT int PagedAttention(int, void **p, int *, int64_t **s, const char **, void *, void *) {
  AttentionArgs a;
  a.q = as<const float>(p[0]);
  a.k = as<const float>(p[1]);
  a.v = as<const float>(p[2]);
  a.key_cache = as<float>(p[3]);
  a.value_cache = as<float>(p[4]);
  a.slots = as<const int32_t>(p[5]);
  a.block_tables = as<const int32_t>(p[6]);
  a.q_lens = as<const int32_t>(p[7]);
  a.kv_lens = as<const int32_t>(p[8]);
  a.out = as<float>(p[9]);
  a.tokens = s[0][0];
  a.block_size = s[3][1];
  a.kv_heads = s[3][2];
  a.head_dim = s[3][3];
  a.heads = s[0][1] / a.head_dim;
  a.sequences = s[6][0];
  a.table_width = s[6][1];
  a.scale = 1.0f / std::sqrt(static_cast<float>(a.head_dim));
  const char *const name = "PagedAttention";
  if (a.head_dim > 512) return refuse(name, "head size", a.head_dim, 512);
  if (a.heads % a.kv_heads != 0) return refuse(name, "heads no multiple of the KV heads", a.heads, a.kv_heads);
  const RaggedBatch batch = {name, a.slots, a.block_tables, a.q_lens, a.kv_lens, a.tokens, a.sequences,
                             a.table_width, s[3][0], a.block_size};
  if (const int error = batch.check()) return error;
  // Heads of a group share keys; with little work they are spread over the threads instead.
  const bool few = a.tokens * a.kv_heads < 4 * mindstream::thread_count();
  std::vector<mindstream::AttentionItem> items;
  mindstream::attention_items({a.q_lens, a.kv_lens, a.sequences, a.heads, a.kv_heads},
                              few ? 1 : kAttentionRows, 0, mindstream::thread_count(), items);
  a.items = items.data();
  a.item_count = static_cast<int64_t>(items.size());
  const mindstream::Phases &phases = mindstream::kernels().attention;
  mindstream::run_parallel({&a, mindstream::kAttentionPhases, phases.items, phases.run});
  // Rows that belong to no sequence are padding.
  int64_t used = 0;
  for (int64_t b = 0; b < a.sequences; b++) used += a.q_lens[b];
  std::memset(a.out + used * s[0][1], 0, static_cast<size_t>((a.tokens - used) * s[0][1]) * sizeof(float));
  return 0;
}

EXPORT std::vector<int64_t> PagedAttentionInferShape(int *ndims, int64_t **shapes, void *) {
  return {shapes[0], shapes[0] + ndims[0]};
}

EXPORT int PagedAttentionInferType(std::vector<int> types, void *) { return types[0]; }

// model[1] (int64: the model's number) like[W] (float32: see below) cos[P,D] sin[P,D] (float32) token_ids[T] positions[T] slots[T] block_tables[B,W] q_seq_lens[B]
// batch_valid_length[B] rows[R] (int32) key_cache and value_cache[layers,NB,KH,BS*D] (float32; a bf16
// cache is declared float32 too, with half the last dimension, as MindFormers' graph takes caches of its
// compute type alone) -> out[R,W] (float32). Row p of cos and sin is position p's. Writes the caches in
// place; a negative slot writes nothing. With W = vocab and like[0] = 0 the output is the logits of these
// rows; with W = 1 and like[0] = 1 the id of each row's largest one, see Model::forward.
EXPORT int LanguageModel(int, void **p, int *, int64_t **s, const char **, void *, void *) {
  const char *const name = "LanguageModel";
  Model *model = mindstream::find_model(*as<int64_t>(p[0]));
  if (!model) return refuse(name, "no such model", *as<int64_t>(p[0]), 0);
  const mindstream::Dims &d = model->dims();
  const bool best = *as<const float>(p[1]) != 0.0f;
  const int64_t width = best ? 1 : d.vocab;
  if (s[1][0] != width) return refuse(name, "width of the output", s[1][0], width);
  if (s[2][1] != d.head_dim) return refuse(name, "head size", s[2][1], d.head_dim);
  for (int i = 11; i < 13; i++) {
    if (s[i][0] != d.layers) return refuse(name, "layers of the cache", s[i][0], d.layers);
    if (s[i][2] != d.kv_heads) return refuse(name, "KV heads of the cache", s[i][2], d.kv_heads);
    const int64_t block = d.block_size * d.head_dim / (d.cache == mindstream::Cache::kBf16 ? 2 : 1);
    if (s[i][3] != block) return refuse(name, "block of the cache", s[i][3], block);
  }
  StackArgs a = {};
  a.tokens = s[4][0];
  a.sequences = s[7][0];
  a.table_width = s[7][1];
  a.blocks = s[11][1];
  a.cos = as<const float>(p[2]);
  a.sin = as<const float>(p[3]);
  const int32_t *ids = as<const int32_t>(p[4]);
  a.positions = as<const int32_t>(p[5]);
  a.slots = as<const int32_t>(p[6]);
  a.block_tables = as<const int32_t>(p[7]);
  a.q_lens = as<const int32_t>(p[8]);
  a.kv_lens = as<const int32_t>(p[9]);
  const int32_t *rows = as<const int32_t>(p[10]);
  a.key_cache = p[11];
  a.value_cache = p[12];
  for (int64_t t = 0; t < a.tokens; t++) {
    if (ids[t] < 0 || ids[t] >= d.vocab) return refuse(name, "token id outside the vocabulary", ids[t], d.vocab);
    if (a.positions[t] < 0 || a.positions[t] >= s[2][0])
      return refuse(name, "position outside the rotary table", a.positions[t], s[2][0]);
  }
  for (int64_t i = 0; i < s[10][0]; i++)
    if (rows[i] < 0 || rows[i] >= a.tokens) return refuse(name, "no such row", rows[i], a.tokens);
  const RaggedBatch batch = {name, a.slots, a.block_tables, a.q_lens, a.kv_lens, a.tokens, a.sequences,
                             a.table_width, a.blocks, d.block_size};
  if (const int error = batch.check()) return error;
  float *out = as<float>(p[13]);
  model->forward(a, ids, rows, s[10][0], best ? nullptr : out, best ? out : nullptr);
  return 0;
}

EXPORT std::vector<int64_t> LanguageModelInferShape(int *, int64_t **shapes, void *) {
  return {shapes[10][0], shapes[1][0]};
}

EXPORT int LanguageModelInferType(std::vector<int> types, void *) { return types[1]; }
