// Zeroed memory aligned for huge pages, freed with its owner.
#pragma once
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace mindstream {

// Between things that share one piece of memory: AddressSanitizer reports who touches it.
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kRedZone = 64;
inline void forbid(void *at, size_t bytes) { __asan_poison_memory_region(at, bytes); }
#else
constexpr size_t kRedZone = 0;
inline void forbid(void *, size_t) {}
#endif

class Memory {
 public:
  Memory() = default;
  Memory(const Memory &) = delete;
  Memory &operator=(const Memory &) = delete;
  ~Memory() { std::free(data_); }

  // At least `bytes`, zeroed when newly taken; what was in it is lost when it grows.
  void reserve(size_t bytes) {
    if (bytes <= size_) return;
    std::free(data_);
    data_ = nullptr;
    size_ = 0;
    const size_t page = bytes >= kHuge ? kHuge : 64, rounded = (bytes + page - 1) / page * page;
    data_ = std::aligned_alloc(page, rounded);
    if (!data_) throw std::bad_alloc();
#if defined(__linux__)
    // A step reads all weights: with 4 KiB pages address translation alone would slow it down.
    if (page == kHuge) madvise(data_, rounded, MADV_HUGEPAGE);
#endif
    std::memset(data_, 0, rounded);
    size_ = rounded;
  }

  template <class T>
  T *as() const {
    return static_cast<T *>(data_);
  }

  explicit operator bool() const { return data_ != nullptr; }

 private:
  static constexpr size_t kHuge = 2u << 20;
  void *data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace mindstream
