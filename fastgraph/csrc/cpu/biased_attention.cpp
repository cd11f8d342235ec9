// Attention with something added to its scores, whose gradients are those of the scores, which
// the pass over destinations leaves in the order of edges: so they are read from there, and a sum
// over the edges of each type depends neither on the order of rows nor on how rows are cut.
#include <algorithm>

#include "cpu/attention.h"
#include "cpu/edge_bias.h"
#include "cpu/kernels.h"
#include "fastgraph/memory.h"
#include "fastgraph/parallel.h"
#include "fastgraph/partial_sums.h"

namespace fastgraph {
namespace {

// A group of edges is summed on its own. Of fewer edges than this, or than a few for each type, a
// group would take longer to begin and to end than to sum.
constexpr int64_t kLeastEdges = 1 << 13;
constexpr int64_t kEdgesOfType = 4;

// Calls body(N, edge, first head, gradients of the scores) for edges [begin, end).
template <typename A, typename Body>
void for_each_gradient(const A* between, int64_t begin, int64_t end, int64_t heads,
                       const Body& body) {
  with_head_lanes<A>(heads, [&](auto lanes) {
    constexpr int N = decltype(lanes)::value;
    for (int64_t edge = begin; edge < end; ++edge) {
      for (int64_t h = 0; h < heads; h += N) {
        Vector<A, N> weight, score;
        load_pairs<N>(between + 2 * (edge * heads + h), weight, score);
        body(lanes, edge, h, score);
      }
    }
  });
}

template <typename T>
void store_gradients(const Accumulator<T>* between, Matrix<T> gradient) {
  using A = Accumulator<T>;
  const int64_t edges = gradient.rows, heads = gradient.width;
  const int64_t groups = (edges + kLeastEdges - 1) / kLeastEdges;
  for_each_task(groups, edges * heads, [&](int64_t group) {
    const int64_t begin = group * kLeastEdges, end = std::min(begin + kLeastEdges, edges);
    for_each_gradient<A>(between, begin, end, heads,
                         [&](auto lanes, int64_t edge, int64_t h, auto score) {
                           store<decltype(lanes)::value>(gradient.row(edge) + h, score);
                         });
  });
}

template <typename T>
void sum_gradients(const Accumulator<T>* between, int64_t edges, const EntryTypes& types,
                   Matrix<T> gradient) {
  using A = Accumulator<T>;
  const int64_t heads = gradient.width, size = gradient.rows * heads;
  const int64_t of_group = std::max(kLeastEdges, kEdgesOfType * gradient.rows);
  const int64_t groups = (edges + of_group - 1) / of_group;
  const auto sums = scratch<A>(groups * size);
  types.visit([&](const auto* type) {
    for_each_task(groups, edges * heads, [&](int64_t group) {
      A* const own = sums.get() + group * size;
      std::fill_n(own, size, A{0});
      const int64_t begin = group * of_group, end = std::min(begin + of_group, edges);
      for_each_gradient<A>(between, begin, end, heads,
                           [&](auto lanes, int64_t edge, int64_t h, auto score) {
                             constexpr int N = decltype(lanes)::value;
                             A* const sum = own + type[edge] * heads + h;
                             store<N>(sum, load<N>(sum) + score);
                           });
    });
  });
  sum_slots<T>(sums.get(), groups, size, size, gradient.data);
}

}  // namespace

template <typename T>
void biased_attention(const OrderedCsr& graph, const AttentionInputs<T>& in,
                      const EdgeBiases<T>& biases, double scale, Dropout dropout,
                      const SoftmaxOutputs<T>& outputs) {
  const EdgeBias<T> bias(biases, graph);
  const Scores<T, EdgeBias<T>> scores{in, bias, static_cast<Accumulator<T>>(scale)};
  run_forward<T, Scores<T, EdgeBias<T>>>(
      graph, 2 * in.query.width,
      {scores, NodeRows<T>(in.value), EdgeRows<T>(in.edge), dropout, outputs},
      [&] { empty_rows_without_share<T>(outputs); });
}

template <typename T>
void biased_attention_backward_dst(const OrderedCsr& graph, const AttentionInputs<T>& in,
                                   const EdgeBiases<T>& bias, double scale, Dropout dropout,
                                   const SoftmaxGradients<T>& given, Accumulator<T>* between,
                                   Heads<T> grad_query, Matrix<Accumulator<T>> grad_edge,
                                   const EdgeBiasGradients<T>& grad_bias) {
  run_backward_dst<T>(graph, in, EdgeBias<T>(bias, graph), scale, dropout, given, between,
                      grad_query, grad_edge);
  if (grad_bias.of_edges.data != nullptr) store_gradients<T>(between, grad_bias.of_edges);
  if (grad_bias.of_types.data != nullptr) {
    sum_gradients<T>(between, graph.num_entries, bias.of_types.types, grad_bias.of_types);
  }
}

FASTGRAPH_INSTANTIATE(biased_attention)
FASTGRAPH_INSTANTIATE(biased_attention_backward_dst)

}  // namespace fastgraph
