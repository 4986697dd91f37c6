// Compiled with the flags setup.py gives this instruction set.
#define MINDSTREAM_AMX
#include "matmul_amx.h"
#include "kernel_table.h"

namespace mindstream {
extern const Kernels kAmx = kernel_table("amx");
}  // namespace mindstream
