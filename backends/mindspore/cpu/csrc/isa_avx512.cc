// Compiled with the flags setup.py gives this instruction set.
#include "attention.h"
#include "stack.h"

namespace mindstream {
extern const Kernels kAvx512 = {
    "avx512",
    kTile,
    row_bytes,
    {attention_items, run_attention},
    {stack_items, run_stack},
    {head_items, run_head},
};
}  // namespace mindstream
