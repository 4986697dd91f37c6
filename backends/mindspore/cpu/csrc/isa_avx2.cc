// Compiled with the flags setup.py gives this instruction set.
#include "kernel_table.h"

namespace mindstream {
extern const Kernels kAvx2 = kernel_table("avx2");
}  // namespace mindstream
