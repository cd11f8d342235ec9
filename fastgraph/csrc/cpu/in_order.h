// Tasks of which each has a part that follows those of the tasks before it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "fastgraph/parallel.h"

namespace fastgraph {

// Calls body(i) for 0 <= i < count in any order, as for_each_task does, and then(i) in ascending
// order for all i before the first whose body returned false: one thread at a time, as far as
// bodies have come, while the others go on with theirs.
template <typename Body, typename Then>
void for_each_then_in_order(int64_t count, int64_t work, const Body& body, const Then& then) {
  const std::unique_ptr<std::atomic<bool>[]> done(new std::atomic<bool>[count]());
  std::atomic<int64_t> next{0};
  std::atomic<bool> busy{false};
  const auto is_next_done = [&] {
    const int64_t i = next;
    return i < count && done[i];
  };
  for_each_task(count, work, [&](int64_t i) {
    done[i] = body(i);
    // Looks once more after it, as others may have left to it what they have done since.
    while (is_next_done() && !busy.exchange(true)) {
      for (; is_next_done(); ++next) then(next);
      busy = false;
    }
  });
}

}  // namespace fastgraph
