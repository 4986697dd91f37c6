// Compiled with the flags setup.py gives this instruction set.
#include "attention.h"

namespace mindstream {
extern const Kernels kAvx2 = {"avx2", paged_attention};
}  // namespace mindstream
