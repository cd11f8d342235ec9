// Attention with projected features of edges: what its kernels read and write.
#pragma once

#include <cstdint>

#include "fastgraph/attention_arguments.h"
#include "fastgraph/views.h"

namespace fastgraph {

// Value value + W^T edge; score scale * <query[r], key[col] + W^T edge>.
template <typename T>
struct EdgeAttentionInputs {
  Heads<const T> query;
  Heads<const T> key;
  Heads<const T> value;
  Matrix<const T> edge;        // [edges, channels of edges]
  Heads<const T> weight_edge;  // W, [heads, channels of edges, width]

  AttentionInputs<T> without_edges() const { return {query, key, value, {}}; }
};

// These three are as those of attention in kernels.h.
template <typename T>
void edge_attention(const OrderedCsr& graph, const EdgeAttentionInputs<T>& in, double scale,
                    Dropout dropout, const SoftmaxOutputs<T>& outputs);

// grad_edge and grad_weight_edge may be null.
template <typename T>
void edge_attention_backward_dst(const OrderedCsr& graph, const EdgeAttentionInputs<T>& in,
                                 double scale, Dropout dropout, const SoftmaxGradients<T>& given,
                                 Accumulator<T>* between, Heads<T> grad_query,
                                 Matrix<Accumulator<T>> grad_edge, Heads<T> grad_weight_edge);

template <typename T>
void edge_attention_backward_src(const OrderedCsr& transpose, const EdgeAttentionInputs<T>& in,
                                 double scale, Dropout dropout, const SoftmaxGradients<T>& given,
                                 const Accumulator<T>* between, Heads<T> grad_key,
                                 Heads<T> grad_value);

}  // namespace fastgraph
