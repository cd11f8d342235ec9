// Edges in the order in which they were given.
#pragma once

#include "cpu/kernels.h"

namespace fastgraph {

// A sparse matrix in coordinate format: entry e stands in row row[e] and column col[e].
template <typename Index>
struct Coo {
  Indices<Index> row;
  Indices<Index> col;
  int64_t num_rows;
  int64_t num_cols;
};

// Whether all entries are inside the matrix; if not, with the first index that is not.
template <typename Index>
bool are_in_range(const Coo<Index>& graph, BadIndex& bad);

}  // namespace fastgraph
