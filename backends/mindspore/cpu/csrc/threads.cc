#include "threads.h"

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
  return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

// The phase a job is in and how many of a rank's items nobody has claimed yet, in one word: a claim is
// one compare-and-swap, and nothing of a job is read before a claim has succeeded. A job cannot end
// while an item is claimed, so what is read then is alive.
constexpr int kItemBits = 40;
constexpr uint64_t kItems = (uint64_t{1} << kItemBits) - 1;

// The items [.., end) of a phase that one rank is the first to claim.
struct alignas(64) Range {
  std::atomic<uint64_t> word{0};
  int64_t end = 0;  // written before the word that opens a phase
};

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

  void run(const Job &job) {
    std::lock_guard<std::mutex> lock(call_);
    if (wanted_ != size_ || pid_ != getpid()) restart();
    job_ = &job;
    open_.store(true, std::memory_order_seq_cst);
    enter(0);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
      std::lock_guard<std::mutex> wake(sleep_);
      awake_.notify_all();
    }
    take_part(0);
  }

  ~Pool() {
    // Without a join at exit a worker would run into freed memory.
    if (pid_ == getpid()) stop();
    for (auto &worker : workers_) worker.detach();
  }

 private:
  // Opens the first phase from `phase` on that has items, or ends the job.
  void enter(int64_t phase) {
    const Job &job = *job_;
    int64_t count = 0;
    while (phase < job.phases && (count = job.items(job.context, phase)) == 0) phase++;
    if (phase == job.phases) return open_.store(false, std::memory_order_release);
    total_ = count;
    done_.store(0, std::memory_order_relaxed);
    const int64_t ranks = static_cast<int64_t>(ranges_.size());
    for (int64_t rank = 0; rank < ranks; rank++) {
      Range &range = ranges_[static_cast<size_t>(rank)];
      range.end = count * (rank + 1) / ranks;
      const int64_t length = range.end - count * rank / ranks;
      range.word.store(static_cast<uint64_t>(phase) << kItemBits | static_cast<uint64_t>(length), std::memory_order_release);
    }
  }

  // Works until the job has ended: first on what is its rank's, then on what others have not begun.
  void take_part(size_t rank) {
    int spins = 0;
    while (open_.load(std::memory_order_acquire)) {
      bool worked = false;
      for (size_t i = 0; i < ranges_.size() && !worked; i++) worked = work(ranges_[(rank + i) % ranges_.size()]);
      if (worked)
        spins = 0;
      else if (++spins < 2000)
        relax();
      else  // another process may hold the core that the last item's thread needs
        sched_yield();
    }
  }

  // Does one item of the range; false if there is none.
  bool work(Range &range) {
    uint64_t word = range.word.load(std::memory_order_acquire);
    while ((word & kItems) != 0)
      if (range.word.compare_exchange_weak(word, word - 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
        finish(static_cast<int64_t>(word >> kItemBits), range.end - static_cast<int64_t>(word & kItems));
        return true;
      }
    return false;
  }

  void finish(int64_t phase, int64_t item) {
    const Job &job = *job_;
    const int64_t total = total_;
    job.run(job.context, phase, item);
    if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == total) enter(phase + 1);
  }

  void stop() {
    {
      std::lock_guard<std::mutex> wake(sleep_);
      stopping_.store(true);
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
    ranges_ = std::vector<Range>(static_cast<size_t>(size_));
    for (size_t rank = 1; rank < ranges_.size(); rank++)
      workers_.emplace_back([this, rank] {
        while (await_job()) take_part(rank);
      });
  }

  bool await_job() {
    for (int spins = 0; spins < kIdleSpins; spins++) {
      if (open_.load(std::memory_order_acquire)) return true;
      if (stopping_.load(std::memory_order_relaxed)) return false;
      relax();
    }
    std::unique_lock<std::mutex> lock(sleep_);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    awake_.wait(lock, [this] { return open_.load(std::memory_order_seq_cst) || stopping_.load(); });
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    return !stopping_.load();
  }

  static constexpr int kIdleSpins = 8000;  // some 100 us: longer than between two jobs of one step

  std::mutex call_;
  int wanted_ = default_threads(), size_ = 0;
  pid_t pid_ = 0;
  std::vector<std::thread> workers_;
  std::vector<Range> ranges_;  // one a thread
  const Job *job_ = nullptr;   // written, as total_, before the words that open a phase
  int64_t total_ = 0;
  std::mutex sleep_;
  std::condition_variable awake_;
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stopping_{false};
  alignas(64) std::atomic<bool> open_{false};  // a job is under way
  alignas(64) std::atomic<int64_t> done_{0};
};

Pool &pool() {
  static Pool instance;
  return instance;
}

}  // namespace

void run_parallel(const Job &job) { pool().run(job); }
void set_threads(int count) { pool().resize(count); }
int thread_count() { return pool().size(); }

}  // namespace mindstream
