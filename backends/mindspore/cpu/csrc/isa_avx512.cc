// Compiled with the flags setup.py gives this instruction set.
#include "attention.h"

namespace mindstream {
extern const Kernels kAvx512 = {"avx512", paged_attention};
}  // namespace mindstream
