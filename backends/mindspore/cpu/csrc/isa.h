// The kernels that exist once per instruction set, their arguments, and the choice at run time.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace mindstream {

// One piece of the attention's work: some query rows and heads of one sequence that share a KV head,
// and all keys or one chunk of them.
struct AttentionItem {
  int64_t sequence, first_token;  // first_token: of all rows
  int64_t rows, first_head, heads;
  int64_t seen;   // keys the first row sees
  int64_t chunk;  // -1: all
};

// Arguments of the ragged paged attention on MindSpore's cache layout; arrays as in operators.cc.
struct AttentionArgs {
  const float *q, *k, *v;
  float *key_cache, *value_cache;
  const int32_t *slots, *block_tables, *q_lens, *kv_lens;
  float *out;
  int64_t tokens, heads, kv_heads, head_dim, block_size, sequences, table_width;
  float scale;
  const AttentionItem *items;  // chunk is -1
  int64_t item_count;
};

enum class Weights : int32_t { kBf16 = 0, kInt8 = 1, kF32 = 2 };
enum class Cache : int32_t { kF32 = 0, kBf16 = 1 };

// A weight matrix [columns out, depth in] in slabs of 32 output columns:
//   bf16 [slab][depth / 2][32][2], f32 [slab][depth][32],
//   int8 [slab][depth / 64] groups: [16][32][4] as value + 128, then 16 words, in each the bf16 scale of
//   its column below that of 16 columns on. One run of memory, for it is read from begin to end.
struct Matrix {
  void *data = nullptr;
  int64_t columns = 0, depth = 0;
  Weights kind = Weights::kBf16;
  int64_t slabs() const { return (columns + 31) / 32; }
};

constexpr int kSlab = 32;
constexpr int kGroup = 64;  // values that share one scale in int8
constexpr int kGroupBytes = kGroup * kSlab + 64;

struct Layer {
  float *input_norm = nullptr, *post_norm = nullptr;  // [hidden]
  float *q_norm = nullptr, *k_norm = nullptr;         // [head_dim] or none
  float *qkv_bias = nullptr;                          // [(heads + 2 kv_heads) * head_dim] or none
  Matrix qkv, out, gate_up, down;                     // gate_up: 16 gate columns, 16 up columns, ...
};

struct Dims {
  int64_t layers, hidden, heads, kv_heads, head_dim, intermediate, vocab, block_size;
  float eps;
  Weights weights;
  Cache cache;
};

// Rows of activations in the form the matrix kernels multiply, one row behind the other. A step of the
// depth takes one, two or four values of a row.
struct Rows {
  char *units = nullptr;
  int64_t stride = 0;        // bytes from a row to the next
  float *staging = nullptr;  // int8 only: [rows][depth] before quantisation
  float *scales = nullptr;   // int8 only: [rows][group]
  int32_t *offsets = nullptr;
};

// One step of the decoder stack. T rows, B sequences.
struct StackArgs {
  int64_t first_phase;  // the job begins with this phase of the stack
  const Dims *dims;
  const Layer *layers;
  const float *final_norm;
  int64_t tokens, sequences, table_width, blocks, threads;
  const float *cos, *sin;  // [positions, head_dim]
  const int32_t *positions, *slots, *block_tables, *q_lens, *kv_lens;
  void *key_cache, *value_cache;  // [layers, blocks, kv_heads, block_size * head_dim]
  float *hidden;                  // [T, hidden] in and out
  // Scratch
  float *qkv;  // [T, (heads + 2 kv_heads) * head_dim]
  Rows narrow, wide;
  float *partials;  // split attention: [T, heads, chunks, head_dim + 2]
  int64_t chunks;   // 0: no split
  const AttentionItem *items;  // the same for every layer
  int64_t item_count;
};

// The largest logits so far of each of a slab's 32 places, and the slabs they are from.
struct Best {
  float value[kSlab];
  int32_t slab[kSlab];
};

struct HeadArgs {
  const Matrix *head;
  const float *hidden;  // [T, hidden]
  const int32_t *rows;  // [R] of hidden
  int64_t count, threads;
  float *logits;  // [R, vocab], or none: then
  float *ids;     // [R] the place of each row's largest logit, the first of equals; -1: see Model::forward
  Rows acts;
  Best *best;  // [items of the product, R]
};

// The two functions of a job, see threads.h; the context is the arguments' struct.
struct Phases {
  int64_t (*items)(const void *context, int64_t phase);
  void (*run)(const void *context, int64_t phase, int64_t item);
};

struct Kernels {
  const char *name;
  int tile;  // most rows that a product takes at once
  size_t (*row_bytes)(Weights kind, int64_t depth);  // Rows::stride at a depth
  Phases attention;  // of AttentionArgs, kAttentionPhases
  Phases stack;      // of StackArgs, layers * kLayerPhases + 1
  Phases head;       // of HeadArgs, kHeadPhases
  int64_t (*matmul_items)(const Matrix &m, int64_t rows, int64_t threads);
};

constexpr int64_t kAttentionPhases = 2, kLayerPhases = 11, kHeadPhases = 3;
constexpr int64_t kCachePhases = 3;  // the first of a layer, which write its keys and values

constexpr int64_t kChunkKeys = 512;  // keys of one partial result of the attention

// The best the CPU has, or the one MINDSTREAM_CPU_ISA names if the CPU has it.
const Kernels &kernels();

extern const Kernels kPortable;
#if defined(MINDSTREAM_X86)
extern const Kernels kAvx2, kAvx512, kAvx512Bf16;
#if defined(MINDSTREAM_AMX_BUILT)
extern const Kernels kAmx;
#endif
#endif

}  // namespace mindstream
