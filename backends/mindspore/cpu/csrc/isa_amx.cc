// Compiled with the flags setup.py gives this instruction set.
#define MINDSTREAM_AMX
#include "attention.h"
#include "matmul_amx.h"
#include "stack.h"

namespace mindstream {
extern const Kernels kAmx = {
    "amx",
    kTile,
    row_bytes,
    {attention_items, run_attention},
    {stack_items, run_stack},
    {head_items, run_head},
};
}  // namespace mindstream
