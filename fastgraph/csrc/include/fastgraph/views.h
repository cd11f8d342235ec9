// Plain views of the tensors that kernels work on. They own nothing and know no framework.
#pragma once

#include <cstdint>

// Functions that both a CPU kernel and a CUDA kernel may call.
#if defined(__CUDACC__)
#define FASTGRAPH_BOTH __host__ __device__
#else
#define FASTGRAPH_BOTH
#endif

namespace fastgraph {

// Elements of any type in rows, of whatever strides; strides count elements.
struct Strided {
  const char* data;
  int64_t rows;
  int64_t size;  // of a row
  int64_t row_stride;
  int64_t stride;
  int64_t item_bytes;
};

// A compressed sparse matrix: the entries of row r are [rowptr[r], rowptr[r + 1]); entry e stands
// in column col[e]. edge_id maps an entry to the caller's edge; null means that entries are in edge
// order already.
struct Csr {
  const int64_t* rowptr;
  const int32_t* col;
  const int32_t* edge_id;
  int64_t num_rows;
  int64_t num_cols;
  int64_t num_entries;

  FASTGRAPH_BOTH int64_t edge(int64_t entry) const { return edge_id ? edge_id[entry] : entry; }
};

// The same with rows in any order: rowptr delimits the row at each place, and row_id tells which
// one that is; null means that row r is at place r.
struct OrderedCsr : Csr {
  const int32_t* row_id;

  int64_t row(int64_t place) const { return row_id ? row_id[place] : place; }
};

// The same with writable arrays, for the functions that build one.
struct MutableCsr {
  int64_t* rowptr;
  int32_t* col;
  int32_t* edge_id;
  int32_t* row_id;
  int64_t num_rows;
  int64_t num_cols;
  int64_t num_entries;
};

// A row-major matrix without gaps.
template <typename T>
struct Matrix {
  T* data;
  int64_t rows;
  int64_t width;

  FASTGRAPH_BOTH T* row(int64_t r) const { return data + r * width; }
  FASTGRAPH_BOTH int64_t bytes() const { return rows * width * static_cast<int64_t>(sizeof(T)); }
};

// A row-major [nodes, heads, width] tensor without gaps.
template <typename T>
struct Heads {
  T* data;
  int64_t nodes;
  int64_t heads;
  int64_t width;

  FASTGRAPH_BOTH T* at(int64_t node, int64_t head) const {
    return data + (node * heads + head) * width;
  }
  FASTGRAPH_BOTH int64_t bytes() const {
    return nodes * heads * width * static_cast<int64_t>(sizeof(T));
  }
};

// A vector of node indices, one per edge; stride is in elements and may be 0.
template <typename Index>
struct Indices {
  const Index* data;
  int64_t stride;
  int64_t size;

  FASTGRAPH_BOTH int64_t operator[](int64_t i) const {
    return static_cast<int64_t>(data[i * stride]);
  }
};

}  // namespace fastgraph
