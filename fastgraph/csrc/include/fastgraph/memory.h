// Hints to the memory system.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#include "fastgraph/inline.h"

namespace fastgraph {

constexpr int64_t kCacheLine = 64;
constexpr int64_t kHugePage = int64_t{1} << 21;

// Asks for huge pages behind a large output before it is first written. A fresh tensor of 100 MB
// costs 25,000 page faults otherwise, which takes as long as computing it.
void prefer_huge_pages(void* data, int64_t bytes);

// How many entries ahead of the one being read to ask for the row of another node: it may be
// anywhere, which nothing else tells the processor in time.
constexpr int64_t kAhead = 12;

template <int64_t kBytes, typename T>
FASTGRAPH_INLINE void prefetch(const T* p) {
  const char* bytes = reinterpret_cast<const char*>(p);
#pragma GCC unroll 32
  for (int64_t offset = 0; offset < kBytes; offset += kCacheLine) {
    __builtin_prefetch(bytes + offset, 0, 3);
  }
}

// Asks for `count` values, a page of them at most: the processor expects the others by itself.
template <typename T>
FASTGRAPH_INLINE void prefetch(const T* p, int64_t count) {
  constexpr int64_t kOfLine = kCacheLine / sizeof(T), kOfPage = 4096 / sizeof(T);
  const int64_t end = count < kOfPage ? count : kOfPage;
  for (int64_t i = 0; i < end; i += kOfLine) prefetch<kCacheLine>(p + i);
}

struct Free {
  void operator()(void* p) const { std::free(p); }
};

// Uninitialised working memory.
template <typename T>
using Scratch = std::unique_ptr<T[], Free>;

// That begins at a multiple of `alignment` bytes, a power of 2.
template <typename T>
Scratch<T> scratch(int64_t size, size_t alignment = kCacheLine) {
  const auto bytes = static_cast<size_t>(size) * sizeof(T);
  void* p = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  if (p == nullptr && bytes > 0) throw std::bad_alloc();
  return Scratch<T>(static_cast<T*>(p));
}

// The same for one task, on the stack unless it is more than kOnStack values: allocating it takes a
// part of what a small task does.
template <typename T, int64_t kOnStack>
class TaskScratch {
 public:
  explicit TaskScratch(int64_t size) : more_(size > kOnStack ? scratch<T>(size) : nullptr) {}
  T* get() { return more_ ? more_.get() : few_; }

 private:
  alignas(kCacheLine) T few_[kOnStack];
  Scratch<T> more_;
};

// In whole huge pages, for what is read all over and should fill a cache: other pages leave it to
// chance which sets of the cache they share.
template <typename T>
Scratch<T> scratch_in_huge_pages(int64_t size) {
  auto memory = scratch<T>(size, kHugePage);
  const auto bytes = size * static_cast<int64_t>(sizeof(T));
  prefer_huge_pages(memory.get(), (bytes + kHugePage - 1) / kHugePage * kHugePage);
  return memory;
}

}  // namespace fastgraph
