// The kernels that exist once per instruction set, and the choice among them at run time.
#pragma once
#include <cstdint>

namespace mindstream {

// Arguments of the ragged paged attention; arrays as documented in operators.cc.
struct AttentionArgs {
  const float *q, *k, *v;
  float *key_cache, *value_cache;
  const int32_t *slots, *block_tables, *q_lens, *kv_lens;
  float *out;
  int64_t tokens, heads, kv_heads, head_dim, block_size, sequences, table_width;
  float scale;
};

struct Kernels {
  const char *name;
  // Writes the new keys and values, then attends. Called on every thread of a job.
  void (*attention)(const AttentionArgs &args, const struct Team &team);
};

// The best the CPU has, or the one MINDSTREAM_CPU_ISA names if the CPU has it.
const Kernels &kernels();

extern const Kernels kPortable;
#if defined(MINDSTREAM_X86)
extern const Kernels kAvx2, kAvx512, kAvx512Bf16;
#endif

}  // namespace mindstream
