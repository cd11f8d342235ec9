// Maxima and minima of one or two columns over edges that are not grouped.
#pragma once

#include "cpu/coo.h"

namespace fastgraph {

constexpr int kMostColumnsOfExtrema = 2;

// out[i] = the maximum or minimum of weight[e] * x[j] over the entries e in row i and any column j,
// each bit as segment_reduce has it; zero for a row without entries. Where ties is not null, it
// becomes the number of shares of each value. The weights may be null, too. x has one column to
// kMostColumnsOfExtrema.
template <typename T, typename Index>
void segment_reduce_coo(const Coo<Index>& graph, const T* weight, bool is_max, Matrix<const T> x,
                        Matrix<T> out, int32_t* ties);

}  // namespace fastgraph
