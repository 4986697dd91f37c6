#include <cstdlib>
#include <cstring>

#include "isa.h"

namespace mindstream {
namespace {

const Kernels *choose() {
  const Kernels *available[4];
  int count = 0;
#if defined(MINDSTREAM_X86)
  // The compiler's own check also asks the operating system whether it saves the wide registers.
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni"))
    available[count++] = &kAvx512Bf16;
  if (avx512) available[count++] = &kAvx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) available[count++] = &kAvx2;
#endif
  available[count++] = &kPortable;
  if (const char *wanted = std::getenv("MINDSTREAM_CPU_ISA"))
    for (int i = 0; i < count; i++)
      if (std::strcmp(available[i]->name, wanted) == 0) return available[i];
  return available[0];
}

}  // namespace

const Kernels &kernels() {
  static const Kernels *const chosen = choose();
  return *chosen;
}

}  // namespace mindstream
