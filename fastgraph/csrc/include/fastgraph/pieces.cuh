// Tasks as kernels take them, and the pieces of rows that were cut as they merge them.
#pragma once

#include <cstdint>

#include "fastgraph/lanes.cuh"
#include "fastgraph/platform.cuh"
#include "fastgraph/tasks.h"

namespace fastgraph::cuda {

inline __device__ Span span_of(const CutCsr& graph, int64_t task) {
  const auto span = load_pack<4>(reinterpret_cast<const int32_t*>(graph.tasks + task));
  return {span.values[0], span.values[1], span.values[2], span.values[3]};
}

// Calls body(piece) for the pieces of a row that was cut, in order.
template <typename Body>
__device__ void for_each_piece(const CutRow& row, const Body& body) {
  for (int64_t piece = row.piece_begin; piece < row.piece_end; ++piece) body(piece);
}

// The grid of a kernel that merges pieces: a block for each row that was cut, and for kBlockThreads
// of `width` columns, over which blocks stride; empty if no row was cut.
inline dim3 merge_grid(const CutCsr& graph, int64_t width) {
  return {static_cast<unsigned>(graph.num_cut), grid_size(ceil_div(width, kBlockThreads))};
}

// Calls body(row, column) for the columns of this thread in such a kernel.
template <typename Body>
__device__ void for_each_merged(const CutCsr& graph, int64_t width, const Body& body) {
  const CutRow row = graph.cut_rows[blockIdx.x];
  const int64_t stride = static_cast<int64_t>(gridDim.y) * kBlockThreads;
  int64_t f = static_cast<int64_t>(blockIdx.y) * kBlockThreads + threadIdx.x;
  for (; f < width; f += stride) body(row, f);
}

}  // namespace fastgraph::cuda
