// Index tensors, read as fast as they can be.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "fastgraph/parallel.h"
#include "fastgraph/views.h"

namespace fastgraph {

inline bool in_range(int64_t value, int64_t limit) {
  return static_cast<uint64_t>(value) < static_cast<uint64_t>(limit);
}

// Calls body(at), where at(i) is the index at i: without a stride, loops over it are vectorised.
template <typename Index, typename Body>
void with_access(Indices<Index> values, const Body& body) {
  if (values.stride == 1) {
    body([data = values.data](int64_t i) { return data[i]; });
  } else {
    body([values](int64_t i) { return values[i]; });
  }
}

// Whether two tensors of one size hold the same numbers.
template <typename A, typename B>
bool same_indices(Indices<A> a, Indices<B> b) {
  constexpr int64_t kStep = 1 << 14;  // indices of a task
  std::atomic<bool> same{true};
  with_access(a, [&](auto of_a) {
    with_access(b, [&](auto of_b) {
      for_each_task((a.size + kStep - 1) / kStep, a.size, [&](int64_t step) {
        int64_t differences = 0;
        for (int64_t i = step * kStep; i < std::min((step + 1) * kStep, a.size); ++i) {
          differences |= static_cast<int64_t>(of_a(i)) ^ static_cast<int64_t>(of_b(i));
        }
        if (differences) same.store(false, std::memory_order_relaxed);
      });
    });
  });
  return same.load();
}

}  // namespace fastgraph
