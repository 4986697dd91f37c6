// Runs Intel's AMX instructions on an x86-64 Linux CPU without them: each raises SIGILL, the handler
// decodes it, does in plain C++ what the manual says, and goes on behind it. So the tests run the very
// machine code that a CPU with AMX would. Loaded before the kernels' library, it makes
// MINDSTREAM_CPU_ISA=amx_emulated available; see dispatch.cc.
//
// What each instruction does is from its page in the Intel 64 and IA-32 Architectures Software
// Developer's Manual, volume 2 (LDTILECFG, TILERELEASE, TILEZERO, TILELOADD, TILELOADDT1, TILESTORED,
// TDPBF16PS, TDPBSUD), their encoding too. What would be #GP or #UD there ends the process here.
#include <math.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

// Present where the process runs under AddressSanitizer: it knows which memory may be touched.
extern "C" __attribute__((weak)) void *__asan_region_is_poisoned(void *begin, size_t size);

namespace {

struct Tile {
  int rows, row_bytes;  // 0: not configured
  uint8_t data[16][64];
};

thread_local Tile tiles[8];
thread_local bool configured;

void require(bool holds, const char *what) {
  if (holds) return;
  fprintf(stderr, "amx_emulator: %s\n", what);
  abort();
}

void touch(const void *begin, size_t size) {
  if (__asan_region_is_poisoned)
    require(!__asan_region_is_poisoned(const_cast<void *>(begin), size), "a tile outside its array");
}

// One instruction, VEX.128.<prefix>.0F38.W0 <opcode>, see "Instruction Format" in volume 2.
struct Instruction {
  uint8_t opcode, prefix;      // prefix: 0 none, 1 66, 2 F3, 3 F2
  int reg, rm, vvvv;           // tiles; rm unless in memory
  bool memory;
  uint8_t *base;               // with the displacement
  int64_t index;               // scaled
  int length;
};

const int kRegisters[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                            REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

int64_t little_endian(const uint8_t *p, int bytes) {
  int32_t word;
  if (bytes == 1) return static_cast<int8_t>(*p);
  memcpy(&word, p, 4);
  return word;
}

Instruction decode(const greg_t *registers) {
  const uint8_t *const start = reinterpret_cast<const uint8_t *>(registers[REG_RIP]);
  require(start[0] == 0xc4 && (start[1] & 31) == 2 && (start[2] & 0x84) == 0, "not an instruction of AMX");
  const bool x = !(start[1] & 0x40), b = !(start[1] & 0x20);
  const uint8_t modrm = start[4], mod = modrm >> 6, low = modrm & 7;
  const uint8_t *p = start + 5;
  Instruction i = {};
  i.prefix = start[2] & 3;
  i.vvvv = ~start[2] >> 3 & 15;
  i.opcode = start[3];
  i.reg = modrm >> 3 & 7;
  i.rm = low;
  i.memory = mod != 3;
  if (i.memory) {
    int from = low + 8 * b;
    int64_t base = 0;
    bool no_base = mod == 0 && low == 5;  // relative to the next instruction
    if (low == 4) {
      const uint8_t sib = *p++;
      const int index = (sib >> 3 & 7) + 8 * x;
      from = (sib & 7) + 8 * b;
      no_base = mod == 0 && (sib & 7) == 5;
      if (index != 4) i.index = registers[kRegisters[index]] << (sib >> 6);
    }
    const int bytes = mod == 1 ? 1 : mod == 2 || no_base ? 4 : 0;
    if (bytes) base = little_endian(p, bytes);
    p += bytes;
    if (!no_base) base += registers[kRegisters[from]];
    if (no_base && low == 5) base += reinterpret_cast<int64_t>(p);
    i.base = reinterpret_cast<uint8_t *>(base);
  }
  i.length = static_cast<int>(p - start);
  return i;
}

void load_config(const uint8_t *config) {
  touch(config, 64);
  memset(tiles, 0, sizeof(tiles));
  configured = config[0] != 0;
  require(config[0] <= 1 && config[1] == 0, "LDTILECFG: palette or start row");
  for (int i = 2; i < 16; i++) require(config[i] == 0, "LDTILECFG: reserved bytes");
  for (int i = 0; i < 16; i++) {
    const int row_bytes = config[16 + 2 * i] + 256 * config[17 + 2 * i], rows = config[48 + i];
    require(row_bytes <= 64 && rows <= 16 && (row_bytes == 0) == (rows == 0), "LDTILECFG: size of a tile");
    require(i < 8 || rows == 0, "LDTILECFG: there are 8 tiles");
    if (i < 8) tiles[i].rows = rows;
    if (i < 8) tiles[i].row_bytes = row_bytes;
  }
}

Tile &tile(int number) {
  require(configured && number < 8 && tiles[number].rows > 0, "a tile that is not configured");
  return tiles[number];
}

void load_tile(Tile &to, const uint8_t *base, int64_t stride) {
  memset(to.data, 0, sizeof(to.data));
  for (int r = 0; r < to.rows; r++) {
    touch(base + r * stride, static_cast<size_t>(to.row_bytes));
    memcpy(to.data[r], base + r * stride, static_cast<size_t>(to.row_bytes));
  }
}

void store_tile(const Tile &from, uint8_t *base, int64_t stride) {
  for (int r = 0; r < from.rows; r++) {
    touch(base + r * stride, static_cast<size_t>(from.row_bytes));
    memcpy(base + r * stride, from.data[r], static_cast<size_t>(from.row_bytes));
  }
}

template <class T>
T value(const uint8_t *row, int index) {
  T x;
  memcpy(&x, row + static_cast<size_t>(index) * sizeof(T), sizeof(T));
  return x;
}

float flush(float x) { return fabsf(x) < 1.17549435e-38f ? copysignf(0.0f, x) : x; }

float bf16(const uint8_t *row, int index) {
  const uint32_t bits = static_cast<uint32_t>(value<uint16_t>(row, index)) << 16;
  float x;
  memcpy(&x, &bits, 4);
  return flush(x);
}

// TDPBF16PS: even and odd products are summed up by themselves, then added to each other and to the
// tile; denormals are zero wherever they occur. (The pseudo-code of the Intrinsics Guide adds each
// product to the tile instead. Results differ in the last bits, and nothing tested depends on them.)
float dot_bf16(const uint8_t *a, const Tile &b, int column, float sum) {
  float even = 0, odd = 0;
  for (int k = 0; k < b.rows; k++) {
    even = flush(fmaf(bf16(a, 2 * k), bf16(b.data[k], 2 * column), even));
    odd = flush(fmaf(bf16(a, 2 * k + 1), bf16(b.data[k], 2 * column + 1), odd));
  }
  return flush(flush(sum) + flush(even + odd));
}

// TDPBSUD: signed bytes of a, unsigned bytes of b, sums that wrap around.
int32_t dot_int8(const uint8_t *a, const Tile &b, int column, int32_t sum) {
  uint32_t total = static_cast<uint32_t>(sum);
  for (int k = 0; k < b.rows; k++)
    for (int i = 0; i < 4; i++)
      total += static_cast<uint32_t>(static_cast<int8_t>(a[4 * k + i]) * b.data[k][4 * column + i]);
  return static_cast<int32_t>(total);
}

template <class T, T dot(const uint8_t *, const Tile &, int, T)>
void multiply(const Instruction &i) {
  require(i.reg != i.rm && i.reg != i.vvvv && i.rm != i.vvvv, "a product of a tile with itself");
  Tile &sums = tile(i.reg);
  const Tile &a = tile(i.rm), &b = tile(i.vvvv);
  require(sums.rows == a.rows && sums.row_bytes == b.row_bytes && a.row_bytes == 4 * b.rows && b.row_bytes % 4 == 0,
          "a product of tiles that do not fit");
  for (int m = 0; m < sums.rows; m++)
    for (int n = 0; n < sums.row_bytes / 4; n++) {
      const T sum = dot(a.data[m], b, n, value<T>(sums.data[m], n));
      memcpy(sums.data[m] + 4 * n, &sum, 4);
    }
}

void run(const Instruction &i) {
  switch (i.opcode << 8 | i.prefix << 4 | i.memory) {
    case 0x4901: return load_config(i.base + i.index);
    case 0x4900: configured = false; return memset(tiles, 0, sizeof(tiles)), void();  // TILERELEASE
    case 0x4930: return memset(tile(i.reg).data, 0, sizeof(Tile::data)), void();  // TILEZERO
    case 0x4b11:  // TILELOADDT1
    case 0x4b31: return load_tile(tile(i.reg), i.base, i.index);
    case 0x4b21: return store_tile(tile(i.reg), i.base, i.index);
    case 0x5c20: return multiply<float, dot_bf16>(i);
    case 0x5e20: return multiply<int32_t, dot_int8>(i);
    default: require(false, "an instruction that is not emulated");
  }
}

void on_illegal_instruction(int, siginfo_t *, void *context) {
  greg_t *registers = static_cast<ucontext_t *>(context)->uc_mcontext.gregs;
  const Instruction instruction = decode(registers);
  run(instruction);
  registers[REG_RIP] += instruction.length;
}

}  // namespace

extern "C" {
// The kernels' library looks for this name.
extern const int mindstream_amx_emulator = 1;

// After whoever else handles SIGILL: called when the kernels' tests begin.
void mindstream_install_amx_emulator() {
  struct sigaction action = {};
  action.sa_sigaction = on_illegal_instruction;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGILL, &action, nullptr);
}
}
