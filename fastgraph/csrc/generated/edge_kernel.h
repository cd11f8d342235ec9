// What a kernel takes that was generated for one edge program (fastgraph/edge_programs/source.py
// writes its source). The compiler of such kernels knows no header but these, and so no fixed-width
// names of integers.
#pragma once

namespace fastgraph::generated {

// More of either, and a program is interpreted.
constexpr int kMostOperands = 40;
constexpr int kMostReductions = 20;

struct EdgeArguments {
  // The graph: see CutCsr. A task is a Span.
  const int* col;
  const int* edge_id;
  const int* tasks;
  long long num_tasks;
  // What pieces of rows leave, `partial_size` values each.
  void* partial;
  int partial_size;
  // Where what a reduction leaves begins in that.
  int partial_at[kMostReductions];
  const void* operands[kMostOperands];
  void* out[kMostReductions];
  void* record[kMostReductions];
  void* scale[kMostReductions];
  // Of a total: a row for each warp.
  void* warps[kMostReductions];
};

}  // namespace fastgraph::generated
