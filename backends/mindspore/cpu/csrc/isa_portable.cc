// Compiled with the flags setup.py gives this instruction set.
#include "attention.h"

namespace mindstream {
extern const Kernels kPortable = {"portable", paged_attention};
}  // namespace mindstream
