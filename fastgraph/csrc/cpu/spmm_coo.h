// Sums of few columns over edges that are not grouped.
#pragma once

#include "cpu/coo.h"

namespace fastgraph {

constexpr int kMostColumns = 8;

// out[i] = the sum of weight[e] * col_scale[j] * x[j] over the entries e in row i and any column j,
// each bit as spmm has it on the same entries grouped by row. Where inverse_degree is not null, it
// becomes 1 over the number of entries in each row, 1 for none, and scales the row: a mean counts
// its entries as it adds them up. The scale and weights may be null, too. x has one column to
// kMostColumns.
template <typename T, typename Index>
void spmm_coo(const Coo<Index>& graph, const T* weight, Accumulator<T>* inverse_degree,
              const Accumulator<T>* col_scale, Matrix<const T> x, Matrix<T> out);

}  // namespace fastgraph
