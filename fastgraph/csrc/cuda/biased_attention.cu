// Attention with something added to its scores, whose gradients are those of the scores. Sums over
// the edges of each type have their terms in the order of edges, in groups of these.
#include <algorithm>

#include "cuda/attention.cuh"
#include "fastgraph/block_sums.cuh"

namespace fastgraph::cuda {
namespace {

// A group is summed on its own. Of fewer edges than this, or than a few for each type, it would
// take longer to begin and to end than to sum.
constexpr int64_t kLeastEdges = 256;
constexpr int64_t kEdgesOfType = 4;

// For each group, sums[group][type][head] = the sum of grad_score over its edges of that type. A
// thread has a group and a head.
template <typename A>
__global__ void __launch_bounds__(kBlockThreads)
    sum_types(Matrix<const A> grad_score, EntryTypes types, int64_t num_types, int64_t of_group,
              Matrix<A> sums) {
  const int64_t heads = grad_score.width;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kBlockThreads + threadIdx.x;
  const int64_t group = thread / heads;
  if (group >= sums.rows) return;
  A* own = sums.row(group) + thread % heads;
  for (int64_t type = 0; type < num_types; ++type) own[type * heads] = 0;
  const int64_t end = min((group + 1) * of_group, grad_score.rows);
  for (int64_t edge = group * of_group; edge < end; ++edge) {
    const int64_t type = types.at(edge);
    if (type < 0 || type >= num_types) continue;
    own[type * heads] += grad_score.row(edge)[thread % heads];
  }
}

template <typename T>
cudaError_t add_types(Queue& queue, Matrix<Accumulator<T>> grad_score, const EntryTypes& types,
                      Matrix<T> gradient) {
  using A = Accumulator<T>;
  const int64_t heads = gradient.width, size = gradient.rows * heads;
  if (size == 0) return cudaSuccess;
  const int64_t of_group = std::max(kLeastEdges, kEdgesOfType * gradient.rows);
  const int64_t groups = ceil_div(grad_score.rows, of_group);
  const Matrix<A> sums{queue.scratch<A>(groups * size), groups, size};
  const auto blocks = static_cast<unsigned>(ceil_div(groups * heads, kBlockThreads));
  const cudaError_t error =
      launch({"sum_types", blocks, kBlockThreads, 0, queue.stream()}, sum_types<A>,
             Matrix<const A>{grad_score.data, grad_score.rows, heads}, types, gradient.rows,
             of_group, sums);
  return error == cudaSuccess ? run_add_rows<T>(queue, sums, gradient.data) : error;
}

}  // namespace

template <typename T>
cudaError_t biased_attention(Queue& queue, const CutCsr& graph, const AttentionInputs<T>& in,
                             const EdgeBiases<T>& biases, double scale, Dropout dropout,
                             const SoftmaxOutputs<T>& outputs) {
  return run_attention<T>(queue, graph, in, EdgeBias<T>{biases}, scale, dropout, outputs);
}

template <typename T>
cudaError_t biased_attention_backward(Queue& queue, const CutCsr& graph, const CutCsr& transpose,
                                      const AttentionInputs<T>& in, const EdgeBiases<T>& biases,
                                      double scale, Dropout dropout,
                                      const SoftmaxGradients<T>& given, Heads<T> grad_query,
                                      Heads<T> grad_key, Heads<T> grad_value,
                                      Matrix<Accumulator<T>> grad_edge,
                                      const EdgeBiasGradients<T>& grad_bias) {
  using A = Accumulator<T>;
  const int64_t heads = in.key.heads, edges = graph.num_entries;
  auto* delta = queue.scratch<A>(graph.num_rows * heads);
  const EdgeBias<T> bias{biases};
  ScoreGradients<T> grad_score{grad_bias.of_edges, {}};
  if (grad_bias.of_types.data) grad_score.summed = {queue.scratch<A>(edges * heads), edges, heads};
  cudaError_t error = run_attention_dst<T>(queue, graph, in, bias, scale, dropout, given, delta,
                                           grad_query, grad_edge);
  if (error == cudaSuccess) {
    error = run_attention_src<T>(queue, transpose, in, bias, scale, dropout, given, delta, grad_key,
                                 grad_value, grad_score);
  }
  if (error != cudaSuccess || grad_bias.of_types.data == nullptr) return error;
  return add_types<T>(queue, grad_score.summed, biases.of_types.types, grad_bias.of_types);
}

FASTGRAPH_INSTANTIATE(biased_attention)
FASTGRAPH_INSTANTIATE(biased_attention_backward)

}  // namespace fastgraph::cuda
