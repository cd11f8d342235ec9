// Factors of rows by the number of their entries.
#pragma once

#include <algorithm>
#include <cstdint>

#include "fastgraph/parallel.h"
#include "fastgraph/views.h"

namespace fastgraph {

// One over the number of entries of each row, and 1 for a row that has none; A is float or double.
template <typename A>
void inverse_degree(Indices<int64_t> rowptr, A* out) {
  constexpr int64_t kStep = 1 << 14;  // rows of a task
  const int64_t num_rows = rowptr.size - 1;
  for_each_task((num_rows + kStep - 1) / kStep, num_rows, [&](int64_t step) {
    const int64_t begin = step * kStep, end = std::min(begin + kStep, num_rows);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t degree = rowptr[row + 1] - rowptr[row];
      out[row] = A{1} / static_cast<A>(std::max<int64_t>(degree, 1));
    }
  });
}

}  // namespace fastgraph
