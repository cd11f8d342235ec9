#pragma once

#include <cstdint>

#include "fastgraph/attention_arguments.h"
#include "fastgraph/views.h"

namespace fastgraph {

// What attention multiplies the weights of some edges by: out[e][h] for the edge numbers[e] and the
// head first_head + h. Numbers may have more than 32 bits.
template <typename T>
void dropout_factors(const int64_t* numbers, int64_t first_head, Dropout dropout, Matrix<T> out);

}  // namespace fastgraph
