#include <cstdlib>
#include <cstring>

#include "isa.h"

#if defined(MINDSTREAM_AMX_BUILT)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

// Defined by tests/kernels/amx_emulator.cc, where that is loaded.
extern "C" __attribute__((weak, visibility("default"))) const int mindstream_amx_emulator;
#endif

namespace mindstream {
namespace {

struct Choice {
  const Kernels *kernels;
  bool (*runs)();
};

#if defined(MINDSTREAM_X86)
// The compiler's own check also asks the operating system whether it saves the wide registers.
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

bool has_avx512_bf16() {
  return has_avx512() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
}
#endif

#if defined(MINDSTREAM_AMX_BUILT)
// What the CPU says: Intel SDM volume 1, "Programming with Intel AMX".
bool cpu_has_amx() {
  constexpr unsigned kInstructions = 1u << 22 | 1u << 24 | 1u << 25;  // bf16, tiles, int8
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kInstructions) != kInstructions) return false;
  // Palette 1 as the kernels use it: 8 tiles of 16 rows of 64 bytes.
  return __get_cpuid_count(0x1d, 1, &a, &b, &c, &d) && (b & 0xffff) >= 64 && b >> 16 >= 8 && (c & 0xffff) >= 16;
}

// Whether this process may use it too: the system saves the tiles and permits them, see Linux'
// Documentation/arch/x86/xstate.rst. Asking makes every signal frame larger for good, so it is the
// last question, and only who would use the tiles asks.
bool has_amx() {
  constexpr unsigned kStates = 3u << 17;  // tile configuration and tile data
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!has_avx512_bf16() || !cpu_has_amx()) return false;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return false;
  asm volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
  return (a & kStates) == kStates && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

const Kernels *emulated_amx() {
  static const Kernels emulated = [] {
    Kernels k = kAmx;
    k.name = "amx_emulated";
    return k;
  }();
  return &emulated;
}

bool emulates_amx() { return has_avx512_bf16() && !cpu_has_amx() && &mindstream_amx_emulator; }
#endif

const Kernels *choose() {
  // The best first.
  const Choice choices[] = {
#if defined(MINDSTREAM_AMX_BUILT)
      {&kAmx, has_amx},
#endif
#if defined(MINDSTREAM_X86)
      {&kAvx512Bf16, has_avx512_bf16},
      {&kAvx512, has_avx512},
      {&kAvx2, has_avx2},
#endif
      {&kPortable, [] { return true; }},
  };
  const char *const wanted = std::getenv("MINDSTREAM_CPU_ISA");
  for (const Choice &choice : choices)
    if (wanted && std::strcmp(choice.kernels->name, wanted) == 0 && choice.runs()) return choice.kernels;
#if defined(MINDSTREAM_AMX_BUILT)
  if (wanted && std::strcmp(wanted, "amx_emulated") == 0 && emulates_amx()) return emulated_amx();
#endif
  for (const Choice &choice : choices)
    if (choice.runs()) return choice.kernels;
  return &kPortable;
}

}  // namespace

const Kernels &kernels() {
  static const Kernels *const chosen = choose();
  return *chosen;
}

}  // namespace mindstream
