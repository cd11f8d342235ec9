// Edge programs; like the other kernels this one trusts its arguments.
#pragma once

#include "fastgraph/edge_code.h"
#include "fastgraph/views.h"

namespace fastgraph {

// The outputs of an edge program, of edges or rows or all of them as its reductions say, given its
// operands in the order of their slots.
template <typename T>
void edge_program(const OrderedCsr& graph, const EdgeCode& code, const T* const* operands,
                  void* const* outputs);

}  // namespace fastgraph
