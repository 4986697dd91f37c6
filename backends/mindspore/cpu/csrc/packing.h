// Weights into the form the kernels read: see Matrix in isa.h.
#pragma once
#include <cstdint>

#include "isa.h"
#include "memory.h"

namespace mindstream {

// The nearest bf16, ties to even.
uint16_t round_bf16(float x);

enum class SourceType : int32_t { kF32 = 0, kBf16 = 1, kF16 = 2 };

// A row-major [rows, columns] array of a checkpoint.
struct Source {
  const void *data;
  SourceType type;
  int64_t rows, columns;
  // Row `row` as float32.
  void read(int64_t row, float *to) const;
};

// Where row n of a source lies among the packed columns.
enum class Place { kBehind, kGate, kUp };

struct PackedMatrix {
  Matrix matrix;
  void shape(int64_t columns, int64_t depth, Weights kind);
  size_t bytes() const;
  // Gives it its memory, bytes() from `at` on, at a multiple of 64.
  void place(char *at);
  // Packs all rows of the source on all threads: kBehind from column `first` on, kGate and kUp as
  // alternating 16 columns.
  void pack(const Source &source, Place place, int64_t first);
  // Packed column `column` as float32, depth values. Not for int8.
  void read(int64_t column, float *to) const;
};

}  // namespace mindstream
