// What the sampler of local nodes is given.
#pragma once

#include <cstdint>

#include "cpu/sampling.h"

namespace fastgraph {

// Lists of neighbours, of which those longer than a cap may have been thinned before.
template <typename Ptr, typename Index>
struct NeighborLists {
  Adjacency<Ptr, Index> graph;
  int64_t cap;          // no list is longer; 2^63 - 1 where none was thinned
  const int64_t* hubs;  // nodes with longer lists, which ascend
  int64_t num_hubs;
  const Index* thinned;   // [hubs, cap]
  const int64_t* counts;  // how many of these each hub has
};

template <typename Ptr, typename Index>
struct LocalNodesRequest {
  const NeighborLists<Ptr, Index>* lists;  // a neighbour is in any of them
  int64_t num_lists;
  int64_t num_nodes;
  const int64_t* nodes;
  int64_t num_rows;
  int64_t k;  // of a row, with its node
  bool release;
  uint64_t random_seed;
  bool is_elsewhere;  // most of the lists are in files and not in memory
};

// Of all rows together.
struct LocalNodesCounts {
  int64_t candidates = 0;  // entries of lists that were looked at
  int64_t few = 0;         // rows of nodes with fewer than k - 1 neighbours
  int64_t none = 0;        // rows of nodes without any
};

// Writes rows [rows, k]. In a defect, `which` is the number of the lists.
template <typename Ptr, typename Index>
SampleDefect sample_local_nodes(const LocalNodesRequest<Ptr, Index>& request, int32_t* rows,
                                LocalNodesCounts& counts);

// Writes the `cap` neighbours of each node that its order puts first, [nodes, cap], and how many
// there are, which is fewer where a list has duplicates.
template <typename Ptr, typename Index>
SampleDefect thin_lists(const Adjacency<Ptr, Index>& graph, const int64_t* nodes, int64_t num_nodes,
                        int64_t cap, uint64_t random_seed, Index* thinned, int64_t* counts);

}  // namespace fastgraph
