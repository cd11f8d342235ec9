// Indices of edges that are none of nodes.
#pragma once

#include <cstdint>

#include "cpu/indices.h"

namespace fastgraph {

// An index outside its range.
struct BadIndex {
  int64_t value = 0;
  bool in_row = false;  // in the row array rather than in the column array
};

// The first index out of range; only called when there is one.
template <typename Index>
inline BadIndex find_bad_index(Indices<Index> row, Indices<Index> col, int64_t num_rows,
                               int64_t num_cols, bool skips_loops = false) {
  for (int64_t i = 0; i < row.size; ++i) {
    if (skips_loops && row[i] == col[i]) continue;
    if (!in_range(row[i], num_rows)) return {row[i], true};
    if (!in_range(col[i], num_cols)) return {col[i], false};
  }
  return {};
}

}  // namespace fastgraph
