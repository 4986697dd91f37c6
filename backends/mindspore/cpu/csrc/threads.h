// The one thread pool of the kernels. A job runs on the calling thread and `size - 1` workers that
// spin for a moment after a job and then sleep, so an idle server uses no CPU.
#pragma once
#include <cstdint>

namespace mindstream {

// What one thread of a running job sees.
struct Team {
  int rank;  // 0 .. size - 1; 0 is the caller
  int size;
  // Waits until every thread of the job is here; what was written before is visible after.
  void barrier() const;
  // The next unclaimed number of [0, total), or -1. Between two uses all threads pass a barrier.
  int64_t next(int64_t total) const;
};

using Job = void (*)(const Team &team, void *context);

// Runs `job` on all threads and returns when all have ended. One caller at a time.
void run_parallel(Job job, void *context);
// Takes effect at the next job; 0: one thread a core this process may use.
void set_threads(int count);
int thread_count();

}  // namespace mindstream
