// GAT for graphs whose features are gathered panel by panel; see cpu/panels.h.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/panels.h"
#include "fastgraph/attention_arguments.h"
#include "fastgraph/edge_blocks.h"
#include "fastgraph/views.h"

namespace fastgraph {

template <typename A>
inline BlockOf<A> leaky_relu(BlockOf<A> z, A slope) {
  return z > BlockOf<A>{} ? z : slope * z;
}

// How many channels of a head make a panel; 0 where the kernels had better see all heads at once.
// `gathered` are the features, or their gradients along the transpose.
template <typename T>
int64_t channels_of_head(const Csr& graph, const Heads<const T>& gathered) {
  const int64_t width = gathered.width;
  return std::min(head_panel_channels(graph, width, sizeof(T)), width);
}

// As gat() and gat_backward() of cpu/kernels.h, for panels of so many channels, without scores of
// edges, and without gradients of the weights. outputs.alpha is not written.

template <typename T>
void gat_by_panels(const OrderedCsr& graph, const GatInputs<T>& in, double slope, Dropout dropout,
                   const SoftmaxOutputs<T>& outputs, int64_t channels);

template <typename T>
void gat_backward_by_panels(const OrderedCsr& graph, const OrderedCsr& transpose,
                            const GatInputs<T>& in, double slope, Dropout dropout,
                            const SoftmaxGradients<T>& given, Heads<T> grad_x,
                            Matrix<T> grad_score_src, Matrix<T> grad_score_dst, int64_t channels);

}  // namespace fastgraph
