// The C interface: what MindSpore's ops.Custom(func_type="aot") and ctypes call.
//
// A MindSpore operator gets its inputs and then its outputs in `params`, with `ndims` and `shapes`
// alike, and returns 0 or an error. With dynamic shapes it also needs the functions InferShape (a
// dimension may be -1 while the graph is compiled) and InferType.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "isa.h"
#include "threads.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using mindstream::AttentionArgs;

namespace {

int refuse(const char *what, long long given, long long bound) {
  std::fprintf(stderr, "mindstream PagedAttention: %s: %lld, must be %lld\n", what, given, bound);
  return 1;
}

int check(const AttentionArgs &a, int64_t blocks) {
  if (a.head_dim > 512) return refuse("head size above the largest", a.head_dim, 512);
  if (a.heads % a.kv_heads != 0) return refuse("heads no multiple of the KV heads", a.heads, a.kv_heads);
  int64_t tokens = 0;
  for (int64_t b = 0; b < a.sequences; b++) {
    if (a.q_lens[b] < 0 || a.kv_lens[b] < a.q_lens[b]) return refuse("length below the new tokens", a.kv_lens[b], a.q_lens[b]);
    tokens += a.q_lens[b];
    const int64_t used = (a.kv_lens[b] + a.block_size - 1) / a.block_size;
    if (used > a.table_width) return refuse("block table too short", a.table_width, used);
    for (int64_t i = 0; i < used; i++) {
      const int64_t block = a.block_tables[b * a.table_width + i];
      if (block < 0 || block >= blocks) return refuse("block outside the cache of so many blocks", block, blocks);
    }
  }
  if (tokens > a.tokens) return refuse("more new tokens than rows", tokens, a.tokens);
  for (int64_t t = 0; t < a.tokens; t++)
    if (a.slots[t] >= blocks * a.block_size) return refuse("slot outside the cache", a.slots[t], blocks * a.block_size);
  return 0;
}

}  // namespace

// q[T,H*D] k[T,KH*D] v[T,KH*D] key_cache[NB,BS,KH,D] value_cache[NB,BS,KH,D] (float32)
// slots[T] block_tables[B,MB] q_seq_lens[B] batch_valid_length[B] (int32) -> out[T,H*D].
// Writes k and v into the caches in place; a negative slot writes nothing.
EXPORT int PagedAttention(int, void **p, int *, int64_t **s, const char **, void *, void *) {
  AttentionArgs a;
  a.q = static_cast<const float *>(p[0]);
  a.k = static_cast<const float *>(p[1]);
  a.v = static_cast<const float *>(p[2]);
  a.key_cache = static_cast<float *>(p[3]);
  a.value_cache = static_cast<float *>(p[4]);
  a.slots = static_cast<const int32_t *>(p[5]);
  a.block_tables = static_cast<const int32_t *>(p[6]);
  a.q_lens = static_cast<const int32_t *>(p[7]);
  a.kv_lens = static_cast<const int32_t *>(p[8]);
  a.out = static_cast<float *>(p[9]);
  a.tokens = s[0][0];
  a.block_size = s[3][1];
  a.kv_heads = s[3][2];
  a.head_dim = s[3][3];
  a.heads = s[0][1] / a.head_dim;
  a.sequences = s[6][0];
  a.table_width = s[6][1];
  a.scale = 1.0f / std::sqrt(static_cast<float>(a.head_dim));
  if (const int error = check(a, s[3][0])) return error;
  mindstream::run_parallel(
      [](const mindstream::Team &team, void *args) {
        mindstream::kernels().attention(*static_cast<AttentionArgs *>(args), team);
      },
      &a);
  return 0;
}

EXPORT std::vector<int64_t> PagedAttentionInferShape(int *ndims, int64_t **shapes, void *) {
  return {shapes[0], shapes[0] + ndims[0]};
}

EXPORT int PagedAttentionInferType(std::vector<int> types, void *) { return types[0]; }

// Threads of the kernels; 0: one a core. Takes effect at the next operator.
EXPORT void mindstream_set_threads(int count) { mindstream::set_threads(count); }
EXPORT int mindstream_threads() { return mindstream::thread_count(); }
// The instruction set in use: portable, avx2, avx512 or avx512bf16.
EXPORT const char *mindstream_isa() { return mindstream::kernels().name; }
