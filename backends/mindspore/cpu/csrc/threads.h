// The one thread pool of the kernels: jobs of many phases, each of independent items.
//
// There is no barrier. A phase ends when its items are done, by whichever threads had a core: a
// worker that the system took off its core, or that still sleeps, delays nothing but the item it
// holds. But every thread begins with its own share of a phase, the same one in each phase of equally
// many items: what it has written is still in its core's caches. Workers spin for a moment after a job and then sleep: an idle server uses no CPU.
#pragma once
#include <stdint.h>

namespace mindstream {

struct Job {
  const void *context;
  int64_t phases;  // below 2^23
  // Items of a phase, below 2^40; may be 0. Thread r of n begins with [items * r / n, items * (r + 1) / n).
  int64_t (*items)(const void *context, int64_t phase);
  // Does one item. What earlier phases wrote is visible; items of one phase run at any time.
  void (*run)(const void *context, int64_t phase, int64_t item);
};

// Returns when every item has been done. One caller at a time.
void run_parallel(const Job &job);
// Takes effect at the next job; 0: one thread a core this process may use.
void set_threads(int count);
int thread_count();

}  // namespace mindstream
