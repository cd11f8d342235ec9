// Attention without anything added to its scores.
#include "cuda/attention.cuh"

namespace fastgraph::cuda {

template <typename T>
cudaError_t attention(Queue& queue, const CutCsr& graph, const AttentionInputs<T>& in, double scale,
                      Dropout dropout, const SoftmaxOutputs<T>& outputs) {
  return run_attention<T>(queue, graph, in, NoBias{}, scale, dropout, outputs);
}

template <typename T>
cudaError_t attention_backward(Queue& queue, const CutCsr& graph, const CutCsr& transpose,
                               const AttentionInputs<T>& in, double scale, Dropout dropout,
                               const SoftmaxGradients<T>& given, Heads<T> grad_query,
                               Heads<T> grad_key, Heads<T> grad_value,
                               Matrix<Accumulator<T>> grad_edge) {
  auto* delta = queue.scratch<Accumulator<T>>(graph.num_rows * in.key.heads);
  const cudaError_t error = run_attention_dst<T>(queue, graph, in, NoBias{}, scale, dropout, given,
                                                 delta, grad_query, grad_edge);
  if (error != cudaSuccess) return error;
  return run_attention_src<T>(queue, transpose, in, NoBias{}, scale, dropout, given, delta,
                              grad_key, grad_value, {});
}

FASTGRAPH_INSTANTIATE(attention)
FASTGRAPH_INSTANTIATE(attention_backward)

}  // namespace fastgraph::cuda
