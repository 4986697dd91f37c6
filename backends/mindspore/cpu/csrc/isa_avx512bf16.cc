// Compiled with the flags setup.py gives this instruction set.
#include "attention.h"

namespace mindstream {
extern const Kernels kAvx512Bf16 = {"avx512bf16", paged_attention};
}  // namespace mindstream
