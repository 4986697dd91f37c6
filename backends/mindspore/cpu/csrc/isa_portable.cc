// Compiled with the flags setup.py gives this instruction set.
#include "kernel_table.h"

namespace mindstream {
extern const Kernels kPortable = kernel_table("portable");
}  // namespace mindstream
