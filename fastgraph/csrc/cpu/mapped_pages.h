// Pages of files that are mapped: the system is told which will be read. Memory that is no file's
// it refuses, which changes nothing.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace fastgraph {

inline void advise_pages(const void* from, int64_t bytes, int advice) {
  static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(from) & ~(page - 1);
  const auto end = reinterpret_cast<uintptr_t>(from) + static_cast<uintptr_t>(bytes);
  (void)madvise(reinterpret_cast<void*>(begin), end - begin, advice);
}

// Asks for pages, and does not wait for them. Of one call the system reads so much at most.
inline void ask_for_pages(const void* from, int64_t bytes) {
  constexpr int64_t kMost = int64_t{1} << 17;
  for (int64_t at = 0; at < bytes; at += kMost) {
    advise_pages(static_cast<const char*>(from) + at, std::min(kMost, bytes - at), MADV_WILLNEED);
  }
}

// While it lives, a page that is missing is read without those around it.
class PagesAtRandom {
 public:
  ~PagesAtRandom() {
    for (const auto& [from, bytes] : ranges_) advise_pages(from, bytes, MADV_NORMAL);
  }
  PagesAtRandom() = default;
  PagesAtRandom(const PagesAtRandom&) = delete;
  PagesAtRandom& operator=(const PagesAtRandom&) = delete;

  void add(const void* from, int64_t bytes) {
    if (bytes == 0) return;
    advise_pages(from, bytes, MADV_RANDOM);
    ranges_.emplace_back(from, bytes);
  }

 private:
  std::vector<std::pair<const void*, int64_t>> ranges_;
};

}  // namespace fastgraph
