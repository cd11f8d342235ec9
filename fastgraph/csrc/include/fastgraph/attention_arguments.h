// What attention operators read and write, on the CPU and in CUDA alike. A row of the graph is a
// node that aggregates (dst), a column one that is gathered (src), or the other way round in a
// transposed graph. What edges carry is optional: no data, and a width of 0.
#pragma once

#include <cstdint>

#include "fastgraph/types.h"
#include "fastgraph/views.h"

namespace fastgraph {

// Attention dropout: what remains is scaled up. A rate of 0 drops nothing.
struct Dropout {
  double rate;
  uint64_t seed;
};

// The softmax of one row and head, as the backward passes need it.
template <typename A>
struct SoftmaxStats {
  A* data;  // [rows, heads, 2]: largest score, inverse sum of exponentials
  int64_t heads;

  FASTGRAPH_BOTH A* at(int64_t row, int64_t head) const { return data + 2 * (row * heads + head); }
};

// What a forward pass writes.
template <typename T>
struct SoftmaxOutputs {
  Heads<T> out;
  SoftmaxStats<Accumulator<T>> stats;
  Matrix<T> alpha;        // the weights with dropout, [edges, heads], or no data
  Heads<const T> addend;  // read: like out, one node's for all or no data; out is the sum with it

  FASTGRAPH_BOTH const T* addend_of(int64_t row, int64_t head) const {
    if (addend.data == nullptr) return nullptr;
    return addend.at(addend.nodes == 1 ? 0 : row, head);
  }
};

// What backward passes are given besides the inputs of the forward pass.
template <typename T>
struct SoftmaxGradients {
  SoftmaxStats<const Accumulator<T>> stats;
  Heads<const T> grad;                       // of the output
  Matrix<const T> grad_alpha;                // of the weights, or no data
  Matrix<const Accumulator<T>> grad_logsum;  // of log(sum of exp(score)), [rows, heads], or no data

  FASTGRAPH_BOTH Accumulator<T> of_logsum(int64_t row, int64_t head) const {
    return grad_logsum.data == nullptr ? Accumulator<T>{0} : grad_logsum.row(row)[head];
  }
};

// Value x_src; score <att, leaky_relu(x_src[col] + x_dst[r] + weight_edge^T edge)>.
template <typename T>
struct Gatv2Inputs {
  Heads<const T> x_src;
  Heads<const T> x_dst;
  Heads<const T> att;          // [1, heads, width]
  Matrix<const T> edge;        // [edges, channels of edges]
  Heads<const T> weight_edge;  // [heads, channels of edges, width]
};

// Value x; score leaky_relu(score_src[col] + score_dst[r] + score_edge[edge]).
template <typename T>
struct GatInputs {
  Heads<const T> x;
  Matrix<const T> score_src;   // [nodes, heads]
  Matrix<const T> score_dst;   // [nodes, heads]
  Matrix<const T> score_edge;  // [edges, heads]
};

// Value (value, edge); score scale * <query[r], (key[col], edge)>.
template <typename T>
struct AttentionInputs {
  Heads<const T> query;  // as wide as key and edge together
  Heads<const T> key;
  Heads<const T> value;
  Matrix<const T> edge;  // [edges, channels of edges]
};

}  // namespace fastgraph
