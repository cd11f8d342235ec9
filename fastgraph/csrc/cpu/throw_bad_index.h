// The error about an index of an edge that is none of a node.
#pragma once

#include <tvm/ffi/error.h>

#include "cpu/bad_index.h"

namespace fastgraph {

// Rows of the sparse matrix are destinations, row 1 of an edge_index, or with `transpose` sources.
[[noreturn]] inline void throw_bad_index(const BadIndex& bad, int64_t num_rows, int64_t num_cols,
                                         bool transpose = false) {
  TVM_FFI_THROW(IndexError) << "edge_index holds index " << bad.value << " in row "
                            << (bad.in_row != transpose ? 1 : 0) << ", expected 0 <= index < "
                            << (bad.in_row ? num_rows : num_cols);
}

}  // namespace fastgraph
