// The CPU kernels. They trust their arguments; csrc/bindings checks them.
#pragma once

#include <cstdint>

#include "cpu/bad_index.h"
#include "fastgraph/attention_arguments.h"
#include "fastgraph/score_bias.h"
#include "fastgraph/simd.h"
#include "fastgraph/tiles.h"
#include "fastgraph/views.h"

namespace fastgraph {

// 64 bits that depend on every element and its place, and not on strides. Not for adversaries.
uint64_t checksum(const Strided& tensor);

enum class BuildResult { kSorted, kPermuted, kBadIndex };

// Compressed rows of the edges (row[i], col[i]), edges of one row in their original order. Edges
// that are sorted by row already are recognised; graph.edge_id is not written then. It may be null.
template <typename Index>
BuildResult build_csr(Indices<Index> row, Indices<Index> col, MutableCsr graph, BadIndex& bad);

// The same with the edges that lead from a node to itself, within the matrix or not, replaced by
// one for each of the first num_loops nodes. graph.edge_id counts the edges that are kept, in their
// order, and then the new ones. The number of edges kept; -1 for an index out of range.
template <typename Index>
int64_t build_csr_with_loops(Indices<Index> row, Indices<Index> col, int64_t num_loops,
                             MutableCsr graph, BadIndex& bad);

// A defect of a compressed matrix that a user made; position is -1 if there is none.
struct CsrDefect {
  enum Kind { kNone, kFirst, kLast, kDecreasing, kIndex } kind = kNone;
  int64_t position = -1;
  int64_t value = 0;
};

template <typename Index>
CsrDefect check_csr(Indices<Index> ptr, Indices<Index> index, MutableCsr graph);

// The entries of `graph` by column, entries of one column in ascending order of their rows.
// transpose.edge_id may be null.
void transpose_csr(const Csr& graph, MutableCsr transpose);

// The columns of each row from the last to the first.
void reverse_rows(const Csr& graph, int32_t* col);

// Which kernels read much less from memory for an order of rows.
enum class RowOrder { kNone, kForSums, kForAll };

// The rows of a square matrix in an order in which those with columns in common are close to each
// other, for kernels that gather rows of so many bytes by it; no result if that helps none of them.
// kForSums are those of spmm, sddmm and segment_reduce.
RowOrder order_rows(const Csr& graph, int64_t row_bytes, MutableCsr ordered);

// How many rows a core reads from memory that visits the rows of a matrix in their order and
// gathers rows of so many bytes, by a model of its cache. graph.num_cols is not looked at.
int64_t count_reads(Csr graph, int64_t row_bytes);

// How many columns each of some windows packs.
void count_tile_columns(const Csr& graph, Indices<int32_t> windows, int64_t* columns);

// Writes all but ptr, to which the windows must fit: the first one that does not, or -1.
int64_t fill_tiles(const Csr& graph, const MutableTiles& tiles);

// out[r] = row_scale[r] * sum over entries e of row r of
//          weight[edge(e)] * col_scale[col[e]] * x[col[e]]; null factors are 1. Each edge has a
// weight for every head, which are as many consecutive columns of x as there are of the others.
template <typename T>
void spmm(const OrderedCsr& graph, Matrix<const T> weight, const Accumulator<T>* row_scale,
          const Accumulator<T>* col_scale, Matrix<const T> x, Matrix<T> out);

// out[edge(e)][h] = row_scale[r] * dot(grad[r][h], x[col[e]][h]) for every entry e of row r and
// every head, of which out has one or more.
template <typename T>
void sddmm(const OrderedCsr& graph, const Accumulator<T>* row_scale, Matrix<const T> grad,
           Matrix<const T> x, Matrix<T> out);

// out[edge(e)][h] = exp(score[edge(e)][h]) / the sum of that over the row in which e stands.
template <typename T>
void edge_softmax(const OrderedCsr& graph, Matrix<const T> score, Matrix<T> out);

// The gradient for score, given out and its gradient.
template <typename T>
void edge_softmax_backward(const OrderedCsr& graph, Matrix<const T> out, Matrix<const T> grad,
                           Matrix<T> grad_score);

// out[r] = largest (or smallest) weight[edge(e)] * x[col[e]] of row r, 0 for empty rows. At most
// one of ties and winner is not null.
template <typename T>
void segment_reduce(const OrderedCsr& graph, const T* weight, bool is_max, Matrix<const T> x,
                    Matrix<T> out, int32_t* ties, int32_t* winner);

// The gradient of segment_reduce for x, along the rows of its graph, of which one of ties and
// winner is a record. x and out are read where ties are larger than 0.
template <typename T>
void segment_reduce_backward(const Csr& graph, const T* weight, Matrix<const T> x,
                             Matrix<const T> out, Matrix<const T> grad, const int32_t* ties,
                             const int32_t* winner, Matrix<T> grad_x);

// scores[k][n][h] = <x[n][h], att[k][h]>.
template <typename T>
void head_scores(Heads<const T> x, Heads<const T> att, Heads<T> scores);

// addend, like x, is part of grad_x besides, or no data. A gradient without data is left out.
template <typename T>
void head_scores_backward(Heads<const T> x, Heads<const T> att, Heads<const T> grad,
                          Heads<const T> addend, Heads<T> grad_x, Heads<T> grad_att);

// Attention operators: out[r] is the sum over row r of keep * softmax(score) * value, with values
// and scores as attention_arguments.h has them. In backward a pass over destinations leaves
// `between`, [edges, heads, 2], for the pass over sources, along the transposed graph; see
// edge_softmax.h. The passes of GAT are one function. Gradients of what edges carry, and of
// weight_edge, are left out where they have no data.

template <typename T>
void gatv2(const OrderedCsr& graph, const Gatv2Inputs<T>& in, double slope, Dropout dropout,
           const SoftmaxOutputs<T>& outputs);

// grad_edge and grad_weight_edge may be null.
template <typename T>
void gatv2_backward_dst(const OrderedCsr& graph, const Gatv2Inputs<T>& in, double slope,
                        Dropout dropout, const SoftmaxGradients<T>& given, Accumulator<T>* between,
                        Heads<T> grad_dst, Heads<T> grad_att, Matrix<Accumulator<T>> grad_edge,
                        Heads<T> grad_weight_edge);

template <typename T>
void gatv2_backward_src(const OrderedCsr& transpose, const Gatv2Inputs<T>& in, double slope,
                        Dropout dropout, const SoftmaxGradients<T>& given,
                        const Accumulator<T>* between, Heads<T> grad_src);

template <typename T>
void gat(const OrderedCsr& graph, const GatInputs<T>& in, double slope, Dropout dropout,
         const SoftmaxOutputs<T>& outputs);

// All passes: one over sources that gathers features, and two of numbers alone, or for each head
// one over destinations and one over sources that both gather.
template <typename T>
void gat_backward(const OrderedCsr& graph, const OrderedCsr& transpose, const GatInputs<T>& in,
                  double slope, Dropout dropout, const SoftmaxGradients<T>& given, Heads<T> grad_x,
                  Matrix<T> grad_score_src, Matrix<T> grad_score_dst, Matrix<T> grad_score_edge);

template <typename T>
void attention(const OrderedCsr& graph, const AttentionInputs<T>& in, double scale, Dropout dropout,
               const SoftmaxOutputs<T>& outputs);

// grad_edge is added to, because all heads contribute, or null.
template <typename T>
void attention_backward_dst(const OrderedCsr& graph, const AttentionInputs<T>& in, double scale,
                            Dropout dropout, const SoftmaxGradients<T>& given,
                            Accumulator<T>* between, Heads<T> grad_query,
                            Matrix<Accumulator<T>> grad_edge);

template <typename T>
void attention_backward_src(const OrderedCsr& transpose, const AttentionInputs<T>& in, double scale,
                            Dropout dropout, const SoftmaxGradients<T>& given,
                            const Accumulator<T>* between, Heads<T> grad_key, Heads<T> grad_value);

// Attention with something added to its scores. A row that this leaves no finite score has no
// share: its output is the addend alone, its statistics and weights are 0. The pass over sources is
// attention's own, which reads what the other pass has left.
template <typename T>
void biased_attention(const OrderedCsr& graph, const AttentionInputs<T>& in,
                      const EdgeBiases<T>& bias, double scale, Dropout dropout,
                      const SoftmaxOutputs<T>& outputs);

template <typename T>
void biased_attention_backward_dst(const OrderedCsr& graph, const AttentionInputs<T>& in,
                                   const EdgeBiases<T>& bias, double scale, Dropout dropout,
                                   const SoftmaxGradients<T>& given, Accumulator<T>* between,
                                   Heads<T> grad_query, Matrix<Accumulator<T>> grad_edge,
                                   const EdgeBiasGradients<T>& grad_bias);

// Defines a kernel for all element types.
#define FASTGRAPH_INSTANTIATE(kernel)                   \
  template decltype(kernel<float>) kernel<float>;       \
  template decltype(kernel<double>) kernel<double>;     \
  template decltype(kernel<bfloat16>) kernel<bfloat16>; \
  template decltype(kernel<float16>) kernel<float16>;

}  // namespace fastgraph
