// For ThreadSanitizer: every item of a phase reads all that the phase before has written, and the
// pool changes its size. A test compiles and runs this together with threads.cc.
#include <cstdint>
#include <cstdio>
#include <vector>

#include "threads.h"

namespace {

constexpr int64_t kPhases = 8;

// What each item of each phase has written: the sum of all that the phase before wrote.
struct Sums {
  std::vector<int64_t> of[kPhases];
};

bool is_empty(int64_t phase) { return phase % 3 == 1; }

int64_t items(const void *context, int64_t phase) {
  return is_empty(phase) ? 0 : static_cast<int64_t>(static_cast<const Sums *>(context)->of[phase].size());
}

void run(const void *context, int64_t phase, int64_t item) {
  auto *sums = const_cast<Sums *>(static_cast<const Sums *>(context));
  int64_t before = phase - 1, sum = before < 0 ? 1 : 0;
  if (before >= 0 && is_empty(before)) before--;
  if (before >= 0)
    for (const int64_t value : sums->of[before]) sum += value;
  sums->of[phase][item] = sum;
}

// The phases' sums are powers of the number of items.
bool is_right(const Sums &sums) {
  int64_t want = 1;
  for (int64_t phase = 0; phase < kPhases; phase++) {
    if (is_empty(phase)) continue;
    for (const int64_t value : sums.of[phase])
      if (value != want) return false;
    want *= static_cast<int64_t>(sums.of[phase].size());
  }
  return true;
}

}  // namespace

int main() {
  for (int job = 0; job < 3000; job++) {
    if (job % 500 == 0) mindstream::set_threads(1 + job / 500);
    Sums sums;
    for (auto &phase : sums.of) phase.resize(1 + job % 7);
    mindstream::run_parallel({&sums, kPhases, items, run});
    if (!is_right(sums)) {
      std::printf("job %d: wrong sums\n", job);
      return 1;
    }
  }
  return 0;
}
