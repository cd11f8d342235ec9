// Running tasks on the OpenMP threads that torch uses.
#pragma once

#include <cstdint>

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

// Calls body(i) for 0 <= i < count in any order. Tasks must not depend on which thread runs them,
// and must not throw. `work` estimates the elementary operations of all tasks together. What tasks
// have written, streams included, can be read afterwards.
template <typename Body>
void for_each_task(int64_t count, int64_t work, const Body& body) {
  if (count > 1 && work >= kParallelThreshold && max_threads() > 1) {
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t i = 0; i < count; ++i) {
      body(i);
      finish_streams();
    }
  } else {
    for (int64_t i = 0; i < count; ++i) body(i);
    finish_streams();
  }
}

}  // namespace fastgraph
