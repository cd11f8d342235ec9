// Attention of all queries of a graph to all its keys: what its kernels read and write.
#pragma once

#include <cstdint>

#include "fastgraph/attention_arguments.h"
#include "fastgraph/score_bias.h"
#include "fastgraph/views.h"

namespace fastgraph {

// Queries, keys and values of graphs in a row: those of graph g are the queries [ptr[g], ptr[g +
// 1]) and the keys and values [key_ptr[g], key_ptr[g + 1]).
template <typename T>
struct DenseAttentionInputs {
  Heads<const T> query;
  Heads<const T> key;
  Heads<const T> value;
  const int64_t* ptr;
  const int64_t* key_ptr;
  int64_t graphs;
  ScoreBias<T> bias;   // of pairs, or no data
  int64_t first_head;  // the numbers of the first head and pair, for dropout
  int64_t first_pair;
};

// out[i][h] = the sum over all keys j of query i's graph of keep * softmax(score) * value[j][h],
// with scores scale * <query[i][h], key[j][h]> + bias; 0 in a graph without keys, or where a bias
// makes all scores -infinity. For dropout and bias the pairs are numbered as the edges of complete
// graphs are, grouped by query.
template <typename T>
void dense_attention(const DenseAttentionInputs<T>& in, double scale, Dropout dropout, Heads<T> out,
                     SoftmaxStats<Accumulator<T>> stats);

// The gradients of query, key and value, where `out` and given.stats are what the forward pass has
// written, and given.grad and given.grad_logsum the gradients of these. given.grad_alpha has no
// data. grad_bias is like the bias, or null where it is not wanted.
template <typename T>
void dense_attention_backward(const DenseAttentionInputs<T>& in, double scale, Dropout dropout,
                              Heads<const T> out, const SoftmaxGradients<T>& given,
                              Heads<T> grad_query, Heads<T> grad_key, Heads<T> grad_value,
                              T* grad_bias);

}  // namespace fastgraph
