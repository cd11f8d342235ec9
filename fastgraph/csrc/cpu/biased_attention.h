// Attention with something added to its scores: what its kernels read and write. The pass over
// sources is attention's own, which reads what the other pass has left.
#pragma once

#include <cstdint>

#include "cpu/edge_bias.h"
#include "fastgraph/attention_arguments.h"
#include "fastgraph/views.h"

namespace fastgraph {

// As attention() in kernels.h. A row that the bias leaves no finite score has no share: its output
// is the addend alone, its statistics and weights are 0.
template <typename T>
void biased_attention(const OrderedCsr& graph, const AttentionInputs<T>& in,
                      const EdgeBiases<T>& bias, double scale, Dropout dropout,
                      const SoftmaxOutputs<T>& outputs);

// Gradients of a bias, [edges, heads] and [types, heads], or no data.
template <typename T>
struct EdgeBiasGradients {
  Matrix<T> of_edges;
  Matrix<T> of_types;
};

template <typename T>
void biased_attention_backward_dst(const OrderedCsr& graph, const AttentionInputs<T>& in,
                                   const EdgeBiases<T>& bias, double scale, Dropout dropout,
                                   const SoftmaxGradients<T>& given, Accumulator<T>* between,
                                   Heads<T> grad_query, Matrix<Accumulator<T>> grad_edge,
                                   const EdgeBiasGradients<T>& grad_bias);

}  // namespace fastgraph
