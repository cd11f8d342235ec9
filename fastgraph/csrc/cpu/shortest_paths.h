// Lengths of shortest paths, up to a bound.
#pragma once

#include <cstdint>

#include "cpu/sampling.h"

namespace fastgraph {

using Graph = Adjacency<int64_t, int64_t>;

// Ranges of nodes: the i-th begins with first[i], and is as long as [begin[i], begin[i + 1]). A
// node of it, node[i], is where a search begins.
struct Ranges {
  const int64_t *node, *first, *begin;
  int64_t count;
};

// Writes from begin[i] on the distance of each node of the i-th range from node[i], along edges
// between nodes of the range, or longest + 1.
SampleDefect distances_in_ranges(const Graph& graph, const Ranges& ranges, int64_t longest,
                                 uint8_t* out);

// Writes for each entry e of row r the distance of node key[e] from node r, or longest + 1.
SampleDefect distances_of_entries(const Graph& graph, const int64_t* ptr, const int64_t* key,
                                  int64_t num_entries, int64_t longest, uint8_t* out);

// The nodes that are at most `longest` from each node, itself the first, by ascending distance.
struct NodesWithin {
  Buffer<int64_t> count;  // of each node
  Buffer<int64_t> node;
  Buffer<uint8_t> distance;
};

SampleDefect nodes_within(const Graph& graph, int64_t longest, NodesWithin& found);

}  // namespace fastgraph
