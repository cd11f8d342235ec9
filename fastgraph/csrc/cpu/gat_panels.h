// GAT for graphs whose features are gathered panel by panel; see cpu/panels.h.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/panels.h"
#include "fastgraph/attention_arguments.h"
#include "fastgraph/edge_blocks.h"
#include "fastgraph/row_batch.h"
#include "fastgraph/views.h"

namespace fastgraph {

template <typename A>
inline BlockOf<A> leaky_relu(BlockOf<A> z, A slope) {
  return z > BlockOf<A>{} ? z : slope * z;
}

// True where exponentials of panels are computed in vectors.
template <typename T>
constexpr bool kVectorised = sizeof(Accumulator<T>) == sizeof(float);

// How many channels of a head make a panel of the forward pass; 0 where it had better see all heads
// at once. Panels that are parts of a head have its weights computed again, which costs more than
// it saves where exponentials are computed one by one. Narrow heads, of which vectors of scores
// hold several, are as fast without.
template <typename T>
int64_t channels_of_head(const Csr& graph, const Heads<const T>& x) {
  constexpr int64_t kNarrow = kVectorised<T> ? 16 : 32;
  if (heads_fill_vectors(x.heads) && x.width < kNarrow) return 0;
  const int64_t of_rule = head_panel_channels(graph, x.heads, x.width, sizeof(T));
  const int64_t channels = std::min(of_rule, x.width);
  return kVectorised<T> || channels == x.width ? channels : 0;
}

// Whether the backward passes, which add up twice, had better see one head after the other: where
// heads are narrow, and whole ones are panels. `gathered` are the features, or their gradients
// along the transpose.
template <typename T>
bool heads_pay(const Csr& graph, const Heads<const T>& gathered) {
  constexpr int64_t kWidestOfMany = kVectorised<T> ? 32 : 0;
  const int64_t widest = heads_fill_vectors(gathered.heads) ? kWidestOfMany : 64;
  const int64_t width = gathered.width;
  return width > 0 && width <= widest &&
         head_panel_channels(graph, gathered.heads, width, sizeof(T)) >= width;
}

// As gat() and gat_backward() of cpu/kernels.h, without scores of edges, and without gradients of
// the weights. outputs.alpha is not written.

template <typename T>
void gat_by_panels(const OrderedCsr& graph, const GatInputs<T>& in, double slope, Dropout dropout,
                   const SoftmaxOutputs<T>& outputs, int64_t channels);

template <typename T>
void gat_backward_by_heads(const OrderedCsr& graph, const OrderedCsr& transpose,
                           const GatInputs<T>& in, double slope, Dropout dropout,
                           const SoftmaxGradients<T>& given, Heads<T> grad_x,
                           Matrix<T> grad_score_src, Matrix<T> grad_score_dst);

}  // namespace fastgraph
