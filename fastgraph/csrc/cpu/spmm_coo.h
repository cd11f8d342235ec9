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

constexpr int kMostColumns = 8;

// Whether all entries are inside the matrix; if not, with the first index that is not.
template <typename Index>
bool are_in_range(const Coo<Index>& graph, BadIndex& bad);

// out[i] = the sum of weight[e] * col_scale[j] * x[j] over the entries e in row i and any column j,
// each bit as spmm has it on the same entries grouped by row. Where inverse_degree is not null, it
// becomes 1 over the number of entries in each row, 1 for none, and scales the row: a mean counts
// its entries as it adds them up. The scale and weights may be null, too. x has one column to
// kMostColumns.
template <typename T, typename Index>
void spmm_coo(const Coo<Index>& graph, const T* weight, Accumulator<T>* inverse_degree,
              const Accumulator<T>* col_scale, Matrix<const T> x, Matrix<T> out);

}  // namespace fastgraph
