// Compiled with the flags setup.py gives this instruction set.
#include "kernel_table.h"

namespace mindstream {
extern const Kernels kAvx512Bf16 = kernel_table("avx512bf16");
}  // namespace mindstream
