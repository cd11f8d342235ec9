// An edge program as warps of a GPU run it: where each value stands in a warp's memory, and what is
// done with it. Everything has an offset there, in elements; -1 stands for nothing.
#pragma once

#include <cstdint>

#include "fastgraph/edge_code.h"
#include "fastgraph/tasks.h"
#include "fastgraph/types.h"
#include "fastgraph/views.h"

namespace fastgraph::cuda {

// An operand, of which a row of the graph, an entry or all of them have a row; or a number, where
// `rows` is null.
template <typename T>
struct EdgeLoad {
  const T* rows;
  double constant;
  int32_t at;
  int32_t width;
  int32_t shift;
  bool packed;  // its rows consist of packs
};

struct EdgeStep {
  int32_t out;
  int32_t argument[3];  // the second of a product is the number of its matrix among the loads
  int32_t width;        // of the result
  int32_t in_width;     // of the arguments
  uint8_t operation;
  uint8_t arity;
  uint8_t moves;  // a bit for each argument that has a value for each edge
  uint8_t shift;
};

template <typename T>
struct EdgeResult {
  EdgeReductionKind kind;
  int32_t width;
  int32_t heads;  // of the factor, or of the scores: their width
  int32_t shift;
  int32_t value;
  int32_t factor;
  int32_t row_factor;    // of a softmax: the exponentials of scores
  int32_t state;         // what is known of the row so far
  int32_t state_copies;  // each of some edges, which are put together in the end
  int32_t totals;        // over rows
  int32_t partial;       // what a piece leaves
  bool value_moves;
  bool factor_moves;
  bool packed;
  T* out;
  void* record;  // int32 of an extremum, T of a softmax
  T* scale;
  Accumulator<T>* sums;  // of a total: a row for each warp; of outer products: for each block

  FASTGRAPH_BOTH bool is_extremum() const {
    return kind == EdgeReductionKind::kMax || kind == EdgeReductionKind::kMin;
  }
  // Whether pieces of a row leave something that is put together.
  FASTGRAPH_BOTH bool is_merged() const { return kind != EdgeReductionKind::kEdge && !is_summed(); }
  FASTGRAPH_BOTH bool is_outer() const { return kind == EdgeReductionKind::kOuter; }
  // Whether it is of all edges.
  FASTGRAPH_BOTH bool is_summed() const { return kind == EdgeReductionKind::kTotal || is_outer(); }
};

// Programs of this size are arguments of the kernel, where all threads of a warp read them at once;
// with all the rest they have to fit into 4096 bytes. Larger ones are in the GPU's memory.
constexpr int kFewLoads = 28;
constexpr int kFewSteps = 68;
constexpr int kFewResults = 10;

template <typename T>
struct EdgeRun {
  using A = Accumulator<T>;

  CutCsr graph;
  int32_t block;         // edges at once
  int32_t memory_size;   // of a warp
  int32_t partial_size;  // of a piece
  // Of parameters and numbers, of rows, of gathered nodes, of edges; matrices are behind them.
  int32_t loads_end[4];
  int32_t steps_end[3];  // of those for the program, for a row, for an edge
  int32_t num_results;
  bool takes_edges;  // by their numbers
  bool has_outer;
  A* partial;
  // Of large programs.
  A* memory;  // of all warps
  const EdgeLoad<T>* many_loads;
  const EdgeStep* many_steps;
  const EdgeResult<T>* many_results;
  // Of others.
  EdgeLoad<T> few_loads[kFewLoads];
  EdgeStep few_steps[kFewSteps];
  EdgeResult<T> few_results[kFewResults];
};
static_assert(sizeof(EdgeRun<float>) <= 4096);

}  // namespace fastgraph::cuda
