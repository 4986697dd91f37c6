#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace mindstream {
namespace {

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

int default_threads() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
  return std::max(1u, std::thread::hardware_concurrency());
}

class Pool {
 public:
  void resize(int count) {
    std::lock_guard<std::mutex> lock(call_);
    wanted_ = count > 0 ? count : default_threads();
  }

  int size() {
    std::lock_guard<std::mutex> lock(call_);
    return wanted_;
  }

  void run(Job job, void *context) {
    std::lock_guard<std::mutex> lock(call_);
    if (wanted_ != size_ || pid_ != getpid()) restart();
    job_ = job;
    context_ = context;
    counters_[0].value.store(0, std::memory_order_relaxed);
    arrived_.store(0, std::memory_order_relaxed);
    running_.store(size_ - 1, std::memory_order_relaxed);
    generation_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
      std::lock_guard<std::mutex> wake(sleep_);
      awake_.notify_all();
    }
    job(Team{0, size_}, context);
    wait([this] { return running_.load(std::memory_order_acquire) == 0; });
  }

  void barrier(int size) {
    if (size == 1) {
      counters_[0].value.store(0, std::memory_order_relaxed);
      return;
    }
    const uint32_t phase = phase_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      counters_[0].value.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    wait([this, phase] { return phase_.load(std::memory_order_acquire) != phase; });
  }

  int64_t next(int64_t total) {
    const int64_t item = counters_[0].value.fetch_add(1, std::memory_order_relaxed);
    return item < total ? item : -1;
  }

  ~Pool() {
    // Without a join at exit a worker would run into freed memory.
    if (pid_ == getpid()) stop();
    for (auto &worker : workers_)
      if (worker.joinable()) worker.detach();
  }

 private:
  struct alignas(64) Counter {
    std::atomic<int64_t> value{0};
  };

  // Other processes may hold the cores: a waiting thread gives its core away after a while.
  template <class Done>
  static void wait(Done done) {
    for (int spins = 0; !done(); spins++) {
      if (spins < 2000)
        relax();
      else
        sched_yield();
    }
  }

  void stop() {
    stopping_.store(true);
    {
      std::lock_guard<std::mutex> wake(sleep_);
      generation_.fetch_add(1);
      awake_.notify_all();
    }
    for (auto &worker : workers_) worker.join();
    workers_.clear();
    stopping_.store(false);
  }

  void restart() {
    if (pid_ == getpid())
      stop();
    else  // after a fork the workers do not exist
      for (auto &worker : workers_) worker.detach();
    workers_.clear();
    pid_ = getpid();
    size_ = wanted_;
    const uint32_t seen = generation_.load();
    for (int rank = 1; rank < size_; rank++)
      workers_.emplace_back([this, rank, seen] { work(rank, seen); });
  }

  void work(int rank, uint32_t seen) {
    for (;;) {
      seen = await_job(seen);
      if (stopping_.load(std::memory_order_acquire)) return;
      job_(Team{rank, size_}, context_);
      running_.fetch_sub(1, std::memory_order_acq_rel);
    }
  }

  uint32_t await_job(uint32_t seen) {
    for (int spins = 0; spins < kIdleSpins; spins++) {
      const uint32_t now = generation_.load(std::memory_order_acquire);
      if (now != seen) return now;
      relax();
    }
    std::unique_lock<std::mutex> lock(sleep_);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    awake_.wait(lock, [&] { return generation_.load(std::memory_order_seq_cst) != seen; });
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    return generation_.load();
  }

  static constexpr int kIdleSpins = 4000;  // some 50 us: longer than between two jobs of one step

  std::mutex call_;
  int wanted_ = default_threads(), size_ = 0;
  pid_t pid_ = 0;
  std::vector<std::thread> workers_;
  Job job_ = nullptr;
  void *context_ = nullptr;
  std::mutex sleep_;
  std::condition_variable awake_;
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stopping_{false};
  alignas(64) std::atomic<uint32_t> generation_{0};
  alignas(64) std::atomic<int> running_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
  Counter counters_[1];
};

Pool &pool() {
  static Pool instance;
  return instance;
}

}  // namespace

void Team::barrier() const { pool().barrier(size); }
int64_t Team::next(int64_t total) const { return pool().next(total); }
void run_parallel(Job job, void *context) { pool().run(job, context); }
void set_threads(int count) { pool().resize(count); }
int thread_count() { return pool().size(); }

}  // namespace mindstream
