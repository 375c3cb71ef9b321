// Vectors whose memory comes in huge pages where it is large: fewer faults while it is filled, and
// fewer misses of the TLB when it is read at random.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace prefixkv {

template <typename T>
struct HugePageAllocator {
  using value_type = T;
  static constexpr size_t kPage = size_t{1} << 21;

  HugePageAllocator() = default;
  template <typename U>
  HugePageAllocator(const HugePageAllocator<U>&) {}

  T* allocate(size_t count) {
    const size_t bytes = count * sizeof(T);
    if (bytes < kPage) return static_cast<T*>(::operator new(bytes));
    const size_t rounded = (bytes + kPage - 1) / kPage * kPage;
    void* memory = std::aligned_alloc(kPage, rounded);
    if (memory == nullptr) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
    madvise(memory, rounded, MADV_HUGEPAGE);  // if it is refused, pages are small
#endif
    return static_cast<T*>(memory);
  }
  void deallocate(T* memory, size_t count) {
    if (count * sizeof(T) < kPage) {
      ::operator delete(memory);
    } else {
      std::free(memory);
    }
  }
  bool operator==(const HugePageAllocator&) const = default;
};

template <typename T>
using HugeVector = std::vector<T, HugePageAllocator<T>>;

}  // namespace prefixkv
