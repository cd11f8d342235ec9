// The CUDA kernels: what cpu/kernels.h says of the functions with the same names holds here too,
// for tensors on the device, with the same arguments. They trust their arguments, run on the
// caller's stream and wait for nothing. Where those of the CPU add to grad_edge, these write it;
// where those write a single tie, these write ~edge, the edge that has all of the gradient.
#pragma once

#include <cstdint>

#include "cuda/queue.h"
#include "fastgraph/attention_arguments.h"
#include "fastgraph/score_bias.h"
#include "fastgraph/tasks.h"
#include "fastgraph/tiles.h"
#include "fastgraph/types.h"
#include "fastgraph/views.h"

namespace fastgraph {

struct EdgeCode;

}  // namespace fastgraph

namespace fastgraph::cuda {

// Lists the tasks of a matrix whose rows are cut where they have more entries than `chunk`, kChunk
// at most; the numbers in the list are those that this gives.
cudaError_t make_tasks(Queue& queue, const int64_t* rowptr, int64_t num_rows, int64_t chunk,
                       const TaskList& list);

// The elements of a contiguous tensor of any dtype.
struct Elements {
  const void* data;
  int64_t count;
  int64_t bytes;  // of each
};

// 64 bits for each of num_sums parts, which together depend on every element and its place.
cudaError_t sum_content(Queue& queue, const Elements& elements, uint64_t* sums, int64_t num_sums);

// Sums of sum_content, of one content and of the one that is expected.
struct ContentSums {
  const uint64_t* found;
  const uint64_t* expected;
  int64_t count;
};

// In memory of the host: it becomes `name` where something had changed.
struct Seen {
  int64_t* flag;
  int64_t name;
};

// Makes all of out NaN if sums are not those that are expected.
template <typename T>
cudaError_t spoil_if_changed(Queue& queue, const ContentSums& sums, const Seen& seen, T* out,
                             int64_t count);

template <typename T>
cudaError_t spmm(Queue& queue, const CutCsr& graph, Matrix<const T> weight,
                 const Accumulator<T>* row_scale, const Accumulator<T>* col_scale,
                 Matrix<const T> x, Matrix<T> out);

// spmm of features of whole packs in aligned memory, on tensor cores, which take numbers of float
// for those of tf32. The rows of `windows` are windows of tiles, and their entries are blocks.
template <typename T>
cudaError_t spmm_tiles(Queue& queue, const CutCsr& windows, const Tiles& tiles, const T* weight,
                       const float* row_scale, Matrix<const T> x, Matrix<T> out);

template <typename T>
cudaError_t sddmm(Queue& queue, const CutCsr& graph, const Accumulator<T>* row_scale,
                  Matrix<const T> grad, Matrix<const T> x, Matrix<T> out);

template <typename T>
cudaError_t segment_reduce(Queue& queue, const CutCsr& graph, const T* weight, bool is_max,
                           Matrix<const T> x, Matrix<T> out, int32_t* ties, int32_t* winner);

template <typename T>
cudaError_t divide_by_ties(Queue& queue, Matrix<const T> grad, const int32_t* ties,
                           Matrix<T> share);

template <typename T>
cudaError_t segment_reduce_backward(Queue& queue, const CutCsr& transpose, const T* weight,
                                    Matrix<const T> x, Matrix<const T> out, Matrix<const T> grad,
                                    const int32_t* ties, const int32_t* winner, Matrix<T> grad_x);

template <typename T>
cudaError_t head_scores(Queue& queue, Heads<const T> x, Heads<const T> att, Heads<T> scores);

template <typename T>
cudaError_t head_scores_backward(Queue& queue, Heads<const T> x, Heads<const T> att,
                                 Heads<const T> grad, Heads<const T> addend, Heads<T> grad_x,
                                 Heads<T> grad_att);

template <typename T>
cudaError_t gatv2(Queue& queue, const CutCsr& graph, const Gatv2Inputs<T>& in, double slope,
                  Dropout dropout, const SoftmaxOutputs<T>& outputs);

// The pass over destinations, and that over sources along the transpose, to which it leaves one
// number for each row and head.
template <typename T>
cudaError_t gatv2_backward(Queue& queue, const CutCsr& graph, const CutCsr& transpose,
                           const Gatv2Inputs<T>& in, double slope, Dropout dropout,
                           const SoftmaxGradients<T>& given, Heads<T> grad_src, Heads<T> grad_dst,
                           Heads<T> grad_att, Matrix<Accumulator<T>> grad_edge,
                           Heads<T> grad_weight_edge);

template <typename T>
cudaError_t gat(Queue& queue, const CutCsr& graph, const GatInputs<T>& in, double slope,
                Dropout dropout, const SoftmaxOutputs<T>& outputs);

template <typename T>
cudaError_t gat_backward(Queue& queue, const CutCsr& graph, const CutCsr& transpose,
                         const GatInputs<T>& in, double slope, Dropout dropout,
                         const SoftmaxGradients<T>& given, Heads<T> grad_x,
                         Matrix<T> grad_score_src, Matrix<T> grad_score_dst,
                         Matrix<T> grad_score_edge);

template <typename T>
cudaError_t attention(Queue& queue, const CutCsr& graph, const AttentionInputs<T>& in, double scale,
                      Dropout dropout, const SoftmaxOutputs<T>& outputs);

// The same for heads of whole packs in aligned memory, up to kMostTileBytes wide, on tensor cores:
// without features of edges, dropout and weights. Scores, and so the stats that the backward passes
// read, are as those of rows; weights are rounded to tf32 for float, as values are, and to bfloat16
// for that. `rowptr` delimits the edges of each row; `windows` are as above.
template <typename T>
cudaError_t attention_tiles(Queue& queue, const CutCsr& windows, const Tiles& tiles,
                            const int64_t* rowptr, const AttentionInputs<T>& in, double scale,
                            const SoftmaxOutputs<T>& outputs);

template <typename T>
cudaError_t attention_backward(Queue& queue, const CutCsr& graph, const CutCsr& transpose,
                               const AttentionInputs<T>& in, double scale, Dropout dropout,
                               const SoftmaxGradients<T>& given, Heads<T> grad_query,
                               Heads<T> grad_key, Heads<T> grad_value,
                               Matrix<Accumulator<T>> grad_edge);

// Both with something added to scores. A type that the table does not have makes a score NaN.
template <typename T>
cudaError_t biased_attention(Queue& queue, const CutCsr& graph, const AttentionInputs<T>& in,
                             const EdgeBiases<T>& biases, double scale, Dropout dropout,
                             const SoftmaxOutputs<T>& outputs);

template <typename T>
cudaError_t biased_attention_backward(Queue& queue, const CutCsr& graph, const CutCsr& transpose,
                                      const AttentionInputs<T>& in, const EdgeBiases<T>& biases,
                                      double scale, Dropout dropout,
                                      const SoftmaxGradients<T>& given, Heads<T> grad_query,
                                      Heads<T> grad_key, Heads<T> grad_value,
                                      Matrix<Accumulator<T>> grad_edge,
                                      const EdgeBiasGradients<T>& grad_bias);

// An edge program, whose code and lists of operands and outputs are the host's.
template <typename T>
cudaError_t edge_program(Queue& queue, const CutCsr& graph, const EdgeCode& code,
                         const T* const* operands, void* const* outputs);

// Defines a kernel for all element types, or for the one that its file is compiled for: a build for
// many cores compiles the largest files once for each.
#ifdef FASTGRAPH_ELEMENT
#define FASTGRAPH_INSTANTIATE(kernel) \
  template decltype(kernel<FASTGRAPH_ELEMENT>) kernel<FASTGRAPH_ELEMENT>;
#else
#define FASTGRAPH_INSTANTIATE(kernel)                   \
  template decltype(kernel<float>) kernel<float>;       \
  template decltype(kernel<double>) kernel<double>;     \
  template decltype(kernel<bfloat16>) kernel<bfloat16>; \
  template decltype(kernel<float16>) kernel<float16>;
#endif

}  // namespace fastgraph::cuda
