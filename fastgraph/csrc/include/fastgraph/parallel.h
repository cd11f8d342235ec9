// Running tasks on the OpenMP threads that torch uses.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>

#include "fastgraph/simd.h"

namespace fastgraph {

// True in a process that was forked after this library was loaded. The OpenMP runtime's threads
// do not survive a fork, and a parallel region would wait for them forever.
bool forked();

// From now on this process runs everything on one thread.
void run_serially();

int max_threads();

// Below this many elementary operations waking the other threads costs more than it gains.
constexpr int64_t kParallelThreshold = 1 << 15;

// Calls body(i) for 0 <= i < count in any order. Tasks must not depend on which thread runs them.
// `work` estimates the elementary operations of all tasks together. What tasks have written,
// streams included, can be read afterwards. If one throws (memory may run out), the others that
// have not begun are left out, and the first exception comes out: one that left the parallel region
// itself would end the process.
//
// A thread takes tasks that follow each other, half of its share of those that are left (Hummel,
// Schonberg and Flynn, Factoring, 1992). So what a task leaves in the caches of a core serves the
// next one, and threads still end together.
template <typename Body>
void for_each_task(int64_t count, int64_t work, const Body& body) {
  const int64_t threads = max_threads();
  if (count > 1 && work >= kParallelThreshold && threads > 1) {
    std::atomic<int64_t> next{0};
    std::atomic<bool> failed{false};
    std::exception_ptr failure;
#pragma omp parallel
    {
      try {
        int64_t begin = next;
        while (begin < count) {
          const int64_t end = begin + std::max<int64_t>(1, (count - begin) / (2 * threads));
          if (next.compare_exchange_weak(begin, end)) {
            for (int64_t i = begin; i < end; ++i) body(i);
            begin = next;
          }
        }
      } catch (...) {
        next = count;
        if (!failed.exchange(true)) failure = std::current_exception();
      }
      finish_streams();
    }
    if (failure) std::rethrow_exception(failure);
  } else {
    for (int64_t i = 0; i < count; ++i) body(i);
    finish_streams();
  }
}

}  // namespace fastgraph
