// Cutting long rows of a sparse matrix, without a schedule and without asking the device.
//
// All entries are cut at multiples of kChunk. A row with more entries than that is long: what each
// chunk holds of it is a piece, computed on its own and merged in order by a second kernel. A chunk
// holds pieces of two long rows at most, for one between them would have to fit in; so piece 2c is
// the one that starts chunk c, and 2c + 1 the one that ends it if that is another. The cut depends
// on the matrix alone, and so do the results' bits.
#pragma once

#include <cstdint>

#include "fastgraph/lanes.cuh"
#include "fastgraph/platform.cuh"
#include "fastgraph/views.h"

namespace fastgraph {

constexpr int kChunk = 256;

// The work of one group of lanes: some entries of a row, none if the row is -1. The result is the
// row's if piece is -1.
struct Span {
  int64_t row;
  int64_t begin;
  int64_t end;
  int64_t piece;
};

// How many pieces to make room for; 0 if no row is long.
inline int64_t num_pieces(const Csr& graph) {
  return graph.longest > kChunk ? 2 * ((graph.num_entries + kChunk - 1) / kChunk) : 0;
}

// The row in which an entry stands, if it is one of those from low to high.
inline __device__ int64_t row_between(const Csr& graph, int64_t low, int64_t high, int64_t entry) {
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (__ldg(graph.rowptr + middle) <= entry) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

inline __device__ int64_t row_of(const Csr& graph, int64_t entry) {
  return row_between(graph, 0, graph.num_rows - 1, entry);
}

// The span of a task: first the pieces, because they take longest, then the rows.
inline __device__ Span span_of(const Csr& graph, int64_t task, int64_t pieces) {
  if (task >= pieces) {
    const int64_t row = task - pieces;
    const int64_t begin = __ldg(graph.rowptr + row), end = __ldg(graph.rowptr + row + 1);
    return {pieces > 0 && end - begin > kChunk ? -1 : row, begin, end, -1};
  }
  const int64_t first = task / 2 * kChunk;
  const int64_t last = first + kChunk < graph.num_entries ? first + kChunk : graph.num_entries;
  const bool at_end = task % 2 == 1;
  const int64_t row = row_of(graph, at_end ? last - 1 : first);
  const int64_t begin = __ldg(graph.rowptr + row), end = __ldg(graph.rowptr + row + 1);
  const bool mine = end - begin > kChunk && !(at_end && begin <= first);
  return {mine ? row : -1, begin > first ? begin : first, end < last ? end : last, task};
}

// Calls body(piece) for the pieces of a long row, in order.
template <typename Body>
__device__ void for_each_piece(int64_t begin, int64_t end, const Body& body) {
  for (int64_t chunk = begin / kChunk; chunk * kChunk < end; ++chunk) {
    body(2 * chunk + (chunk * kChunk < begin ? 1 : 0));
  }
}

// Calls body(row, begin, end) for the long rows among the kBlockThreads ones that are this block's,
// with all of its threads.
template <typename Body>
__device__ void for_each_long_row(const Csr& graph, const Body& body) {
  FASTGRAPH_SHARED(int64_t, ends, kBlockThreads + 1);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kBlockThreads;
  const int64_t count = min(graph.num_rows - first, static_cast<int64_t>(kBlockThreads));
  for (int64_t i = threadIdx.x; i <= count; i += kBlockThreads) ends[i] = graph.rowptr[first + i];
  __syncthreads();
  for (int64_t i = 0; i < count; ++i) {
    if (ends[i + 1] - ends[i] > kChunk) body(first + i, ends[i], ends[i + 1]);
  }
}

// Blocks of a kernel that calls for_each_long_row().
inline unsigned merge_blocks(const Csr& graph) {
  return static_cast<unsigned>(ceil_div(graph.num_rows, kBlockThreads));
}

}  // namespace fastgraph
