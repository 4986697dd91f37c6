// The C interface of loading and settings; ctypes calls it from fused_weights.py and library.py.
#include <algorithm>
#include <atomic>
#include <exception>
#include <stdexcept>
#include <string>

#include "model.h"
#include "threads.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

thread_local std::string last_error;

// Runs `action`; what it throws becomes the text of mindstream_error and the result `failed`.
template <class Action, class Result>
Result guarded(Action action, Result failed) {
  try {
    return action();
  } catch (const std::exception &error) {
    last_error = error.what();
    return failed;
  }
}

}  // namespace

// Why the last call on this thread failed.
EXPORT const char *mindstream_error() { return last_error.c_str(); }

// sizes: layers, hidden, heads, kv_heads, head_dim, intermediate, vocab, block_size, weights (0 bf16,
// 1 int8, 2 float32), cache (0 float32, 1 bf16). Returns the model's number, or 0.
EXPORT int64_t mindstream_model_create(const int64_t *sizes, float eps) {
  return guarded(
      [&] {
        mindstream::Dims d = {sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7], eps,
                              static_cast<mindstream::Weights>(sizes[8]), static_cast<mindstream::Cache>(sizes[9])};
        return mindstream::add_model(std::make_unique<mindstream::Model>(d));
      },
      int64_t{0});
}

// One tensor, row-major [rows, columns] of type 0 float32, 1 bf16 or 2 float16. Returns 0 or an error.
EXPORT int mindstream_model_put(int64_t handle, int64_t layer, int what, const void *data, int type,
                                int64_t rows, int64_t columns) {
  return guarded(
      [&] {
        mindstream::Model *model = mindstream::find_model(handle);
        if (!model) throw std::invalid_argument("no such model");
        const mindstream::Source source = {data, static_cast<mindstream::SourceType>(type), rows, columns};
        model->put(layer, static_cast<mindstream::Tensor>(what), source);
        return 0;
      },
      1);
}

// Checks that nothing is missing. Returns 0 or an error.
EXPORT int mindstream_model_finish(int64_t handle) {
  return guarded(
      [&] {
        mindstream::Model *model = mindstream::find_model(handle);
        if (!model) throw std::invalid_argument("no such model");
        model->finish();
        return 0;
      },
      1);
}

EXPORT void mindstream_model_free(int64_t handle) { mindstream::remove_model(handle); }

// Threads of the kernels; 0: one a core. Takes effect at the next operator.
EXPORT void mindstream_set_threads(int count) { mindstream::set_threads(count); }
EXPORT int mindstream_threads() { return mindstream::thread_count(); }
// The instruction set in use: portable, avx2, avx512, avx512bf16 or amx.
EXPORT const char *mindstream_isa() { return mindstream::kernels().name; }

// Reads the bytes once on all threads and returns their sum: what the machine's memory gives.
EXPORT uint64_t mindstream_read_all(const uint64_t *data, int64_t count) {
  constexpr int64_t kBlock = 1 << 16;
  struct Reading {
    const uint64_t *data;
    int64_t count;
    std::atomic<uint64_t> sum;
  } reading = {data, count, {0}};
  const mindstream::Job job = {
      &reading, 1,
      [](const void *context, int64_t) {
        return (static_cast<const Reading *>(context)->count + kBlock - 1) / kBlock;
      },
      [](const void *context, int64_t, int64_t item) {
        Reading &r = *const_cast<Reading *>(static_cast<const Reading *>(context));
        uint64_t sums[8] = {};
        const int64_t end = std::min(r.count, (item + 1) * kBlock) & ~int64_t{7};
        for (int64_t i = item * kBlock; i < end; i += 8)
          for (int64_t j = 0; j < 8; j++) sums[j] += r.data[i + j];
        for (const uint64_t part : sums) r.sum += part;
      }};
  mindstream::run_parallel(job);
  return reading.sum;
}
