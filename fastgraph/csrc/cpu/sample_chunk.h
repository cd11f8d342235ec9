// What threads share a hop of a sample by: some nodes each.
#pragma once

#include <cstdint>

#include "cpu/sampling.h"

namespace fastgraph {

// Some nodes of one type whose edges of one type are drawn.
struct SampleChunk {
  int64_t relation;
  int64_t first, last;  // positions of the nodes
  int64_t range;        // of the first of them
  int64_t fanout;
  int64_t num_edges = 0;
  int64_t slot = 0;   // of the first edge within the hop
  int64_t place = 0;  // of the first edge within its type
  int64_t num_found = 0;
  int64_t number = 0;  // of the first node found
  SampleDefect defect = {};
};

}  // namespace fastgraph
