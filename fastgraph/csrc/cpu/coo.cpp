// Whether edges that are not grouped lead to nodes.
#include "cpu/coo.h"

#include <algorithm>
#include <atomic>

#include "cpu/bad_index.h"
#include "cpu/indices.h"
#include "fastgraph/parallel.h"

namespace fastgraph {

template <typename Index>
bool are_in_range(const Coo<Index>& graph, BadIndex& bad) {
  constexpr int64_t kStep = 1 << 14;  // entries of a task
  const int64_t size = graph.row.size;
  const auto last_row = static_cast<uint64_t>(graph.num_rows) - 1;
  const auto last_col = static_cast<uint64_t>(graph.num_cols) - 1;
  std::atomic<bool> valid{true};
  with_access(graph.row, [&](auto row_of) {
    with_access(graph.col, [&](auto col_of) {
      for_each_task((size + kStep - 1) / kStep, size, [&](int64_t step) {
        // The highest bit is set as soon as an index is negative, or what is left from it to the
        // last one.
        uint64_t bits = 0;
        for (int64_t e = step * kStep; e < std::min((step + 1) * kStep, size); ++e) {
          const auto row = static_cast<uint64_t>(static_cast<int64_t>(row_of(e)));
          const auto col = static_cast<uint64_t>(static_cast<int64_t>(col_of(e)));
          bits |= row | (last_row - row) | col | (last_col - col);
        }
        if (bits >> 63) valid.store(false, std::memory_order_relaxed);
      });
    });
  });
  if (!valid.load()) bad = find_bad_index(graph.row, graph.col, graph.num_rows, graph.num_cols);
  return valid.load();
}

template bool are_in_range(const Coo<int32_t>&, BadIndex&);
template bool are_in_range(const Coo<int64_t>&, BadIndex&);

}  // namespace fastgraph
