#include "packing.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "threads.h"

namespace mindstream {

uint16_t round_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

namespace {

float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

float half_to_float(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16, exponent = half >> 10 & 31, mantissa = half & 0x3ff;
  if (exponent == 31) return from_bits(sign | 0x7f800000u | mantissa << 13);
  if (exponent != 0) return from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
  const float tiny = static_cast<float>(mantissa) * 5.9604645e-8f;
  return sign ? -tiny : tiny;
}

int64_t groups(int64_t depth) { return (depth + kGroup - 1) / kGroup; }

void pack_bf16(const Matrix &m, int64_t column, const float *x) {
  uint16_t *to = static_cast<uint16_t *>(m.data) + (column / kSlab * (m.depth / 2) * kSlab + column % kSlab) * 2;
  for (int64_t k = 0; k < m.depth; k += 2, to += 2 * kSlab) {
    to[0] = round_bf16(x[k]);
    to[1] = round_bf16(x[k + 1]);
  }
}

void pack_f32(const Matrix &m, int64_t column, const float *x) {
  float *to = static_cast<float *>(m.data) + column / kSlab * m.depth * kSlab + column % kSlab;
  for (int64_t k = 0; k < m.depth; k++, to += kSlab) *to = x[k];
}

// The next bf16 from x >= 0 on. What is 0 then is so small that its values count as zeros.
uint32_t round_up_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return x < std::numeric_limits<float>::min() ? 0 : (bits + 0xffff) & 0xffff0000u;
}

void pack_int8(const Matrix &m, int64_t column, const float *x) {
  const int64_t count = groups(m.depth), lane = column % kSlab;
  uint8_t *group = static_cast<uint8_t *>(m.data) + column / kSlab * count * kGroupBytes;
  for (int64_t g = 0; g < count; g++, x += kGroup, group += kGroupBytes) {
    const int64_t used = std::min<int64_t>(kGroup, m.depth - g * kGroup);
    float most = 0;
    for (int64_t i = 0; i < used; i++) most = std::max(most, std::fabs(x[i]));
    const uint32_t bits = round_up_bf16(most / 127.0f);  // up: no value leaves the range
    const float inverse = bits ? 1.0f / from_bits(bits) : 0.0f;
    reinterpret_cast<uint16_t *>(group + kGroup * kSlab)[lane % 16 * 2 + lane / 16] = static_cast<uint16_t>(bits >> 16);
    for (int64_t i = 0; i < kGroup; i++)
      group[(i / 4 * kSlab + lane) * 4 + i % 4] = static_cast<uint8_t>(i < used ? std::lrint(x[i] * inverse) + 128 : 128);
  }
}

struct PackJob {
  const Matrix *matrix;
  const Source *source;
  Place place;
  int64_t first;

  int64_t column(int64_t row) const {
    if (place == Place::kBehind) return first + row;
    return row / 16 * kSlab + row % 16 + (place == Place::kUp ? 16 : 0);
  }
};

// Rows that end up in one slab are one item: they share cache lines.
int64_t pack_items(const void *context, int64_t) {
  return (static_cast<const PackJob *>(context)->source->rows + kSlab - 1) / kSlab;
}

void pack_rows(const void *context, int64_t, int64_t item) {
  const PackJob &job = *static_cast<const PackJob *>(context);
  const Matrix &m = *job.matrix;
  std::vector<float> x(static_cast<size_t>(m.depth + kGroup));
  for (int64_t row = item * kSlab; row < std::min(job.source->rows, (item + 1) * kSlab); row++) {
    job.source->read(row, x.data());
    const int64_t column = job.column(row);
    if (m.kind == Weights::kBf16) pack_bf16(m, column, x.data());
    if (m.kind == Weights::kF32) pack_f32(m, column, x.data());
    if (m.kind == Weights::kInt8) pack_int8(m, column, x.data());
  }
}

}  // namespace

void Source::read(int64_t row, float *to) const {
  const int64_t at = row * columns;
  if (type == SourceType::kF32) {
    std::memcpy(to, static_cast<const float *>(data) + at, static_cast<size_t>(columns) * 4);
    return;
  }
  const uint16_t *from = static_cast<const uint16_t *>(data) + at;
  for (int64_t i = 0; i < columns; i++)
    to[i] = type == SourceType::kBf16 ? from_bits(static_cast<uint32_t>(from[i]) << 16) : half_to_float(from[i]);
}

void PackedMatrix::shape(int64_t columns, int64_t depth, Weights kind) {
  matrix.columns = columns;
  matrix.depth = depth;
  matrix.kind = kind;
}

// A slab is a multiple of 64 bytes in every format.
size_t PackedMatrix::bytes() const {
  const int64_t slabs = matrix.slabs(), depth = matrix.depth;
  if (matrix.kind == Weights::kInt8) return static_cast<size_t>(slabs * groups(depth) * kGroupBytes);
  return static_cast<size_t>(slabs * kSlab * depth * (matrix.kind == Weights::kF32 ? 4 : 2));
}

void PackedMatrix::place(char *at) { matrix.data = at; }

void PackedMatrix::pack(const Source &source, Place place, int64_t first) {
  const PackJob job = {&matrix, &source, place, first};
  run_parallel({&job, 1, pack_items, pack_rows});
}

void PackedMatrix::read(int64_t column, float *to) const {
  const int64_t slab = column / kSlab, lane = column % kSlab, depth = matrix.depth;
  if (matrix.kind == Weights::kF32) {
    const float *from = static_cast<const float *>(matrix.data) + slab * depth * kSlab + lane;
    for (int64_t k = 0; k < depth; k++) to[k] = from[k * kSlab];
    return;
  }
  const uint16_t *from = static_cast<const uint16_t *>(matrix.data) + (slab * (depth / 2) * kSlab + lane) * 2;
  for (int64_t k = 0; k < depth; k++) to[k] = from_bits(static_cast<uint32_t>(from[k / 2 * kSlab * 2 + k % 2]) << 16);
}

}  // namespace mindstream
