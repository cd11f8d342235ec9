// Rows whose edges an edge program computes together.
#pragma once

#include <algorithm>
#include <cstdint>

namespace fastgraph {

// The most edges that registers hold: of values with few channels, and of others.
constexpr int64_t kMostEdges = 64, kMostWideEdges = 32;

// The rows of a block of edges: short ones, all of whose edges are there, or a long one. So what
// the interpreter does for each block is shared where nodes have few edges.
struct EdgeRows {
  int64_t count = 0, edges = 0;
  int64_t row[kMostEdges];        // the number of each
  int64_t begin[kMostEdges + 1];  // of each the place of its first edge in the block
  int64_t of_edge[kMostEdges];    // of each edge the place of its row

  void clear() { count = edges = begin[0] = 0; }

  void add(int64_t number, int64_t num_edges) {
    std::fill_n(of_edge + edges, num_edges, count);
    row[count++] = number;
    edges += num_edges;
    begin[count] = edges;
  }
};

}  // namespace fastgraph
