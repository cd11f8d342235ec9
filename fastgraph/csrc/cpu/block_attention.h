// Attention along edges by sub-blocks: windows of 16 nodes, side by side in the lanes of vectors,
// and beside each the columns of nodes at the other ends of their edges.
#pragma once

#include <cstdint>

#include "fastgraph/attention_arguments.h"
#include "fastgraph/score_bias.h"
#include "fastgraph/views.h"

namespace fastgraph {

// Edges by windows of 16 consecutive nodes at one end. A window has a column for each node at the
// other ends of its edges, or several where an edge is there more than once.
struct Windows {
  const int64_t* ptr;    // where the columns of each window begin, and those of the last end
  const int32_t* node;   // of each column
  const int32_t* lanes;  // a bit for each node of the window that has an edge
  const int64_t*
      first;            // where the edges of each column begin in `edge`, and those of the last end
  const int32_t* edge;  // numbers of edges, those of a column in the order of lanes
  int64_t count;
  int64_t nodes;  // in windows
};

template <typename T>
struct BlockAttentionInputs {
  Heads<const T> query;
  Heads<const T> key;
  Heads<const T> value;
  ScoreBias<T> bias;  // by types of edges, or no data
};

// As biased_attention() without features of edges, dropout and weights. `windows` are of queries.
template <typename T>
void block_attention(const Windows& windows, const BlockAttentionInputs<T>& in, double scale,
                     Heads<T> out, SoftmaxStats<Accumulator<T>> stats);

// The gradients of query and table, which is null where that is not wanted, by windows of queries.
// `delta`, [queries, heads], is written: what block_attention_backward_keys() needs besides.
template <typename T>
void block_attention_backward_queries(const Windows& windows, const BlockAttentionInputs<T>& in,
                                      double scale, const SoftmaxGradients<T>& given,
                                      Accumulator<T>* delta, Heads<T> grad_query, T* grad_table);

// The gradients of key and value, by windows of keys.
template <typename T>
void block_attention_backward_keys(const Windows& windows, const BlockAttentionInputs<T>& in,
                                   double scale, const SoftmaxGradients<T>& given,
                                   const Accumulator<T>* delta, Heads<T> grad_key,
                                   Heads<T> grad_value);

}  // namespace fastgraph
