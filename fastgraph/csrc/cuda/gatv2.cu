// Additive attention: the score of an entry is <att, leaky_relu(z)>, where z = x_src[col] +
// x_dst[row] + weight_edge^T edge. The projection of the edges is made where it is needed and never
// stored.
#include <algorithm>

#include "cuda/kernels.h"
#include "fastgraph/block_sums.cuh"
#include "fastgraph/edge_softmax_backward.cuh"

namespace fastgraph::cuda {
namespace {

template <typename T>
Gatv2Inputs<T> gatherable(Gatv2Inputs<T> in, const Csr& graph) {
  in.x_src = gathered_heads(in.x_src, graph);
  in.x_dst = gathered_heads(in.x_dst, graph);
  return in;
}

template <typename T, bool kEdges>
struct Additive {
  using A = Accumulator<T>;

  Gatv2Inputs<T> in;
  A slope;

  __device__ A leaky_relu(A z) const { return z > 0 ? z : slope * z; }
  __device__ A through_leaky_relu(A z, A grad) const { return z > 0 ? grad : slope * grad; }

  // z of the entries, between a node and others; in channels that are not there, anything.
  template <typename L, int kCount>
  __device__ void find_z(const Part<L>& part, const typename L::Share& node,
                         const typename L::Share (&others)[kCount], const Entries<kCount>& entries,
                         typename L::Sums (&z)[kCount]) const {
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      z[u].each([&](A& sum, int q, int i) { sum = others[u].at(q, i) + node.at(q, i); });
    }
    if constexpr (kEdges) {
      for (int64_t d = 0; d < in.edge.width; ++d) {
        const auto weight = part.load(in.weight_edge.at(part.head, d), in.weight_edge.width);
#pragma unroll
        for (int u = 0; u < kCount; ++u) {
          const A channel = widened(in.edge.row(entries.edge[u])[d]);
          z[u].each([&](A& sum, int q, int i) { sum += channel * weight.at(q, i); });
        }
      }
    }
  }

  // dot += this lane's part of the scores.
  template <typename L, int kCount>
  __device__ void add_scores(const Part<L>& part, const typename L::Share& node,
                             const typename L::Share& att,
                             const typename L::Share (&others)[kCount],
                             const Entries<kCount>& entries, A (&dot)[kCount]) const {
    typename L::Sums z[kCount];
    find_z(part, node, others, entries, z);
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      dot[u] += sum_within(part, in.att.width, [&](int q, int i) {
        return att.at(q, i) * leaky_relu(z[u].values[q][i]);
      });
    }
  }
};

template <typename T, bool kEdgesOf>
struct Gatv2Scores {
  using Element = T;
  using A = Accumulator<T>;
  static constexpr bool kEdges = kEdgesOf, kScores = true, kProducts = false;
  static constexpr bool kBiased = false, kTogether = !kEdges && std::is_same_v<T, float>;
  static constexpr int kRows = kEdges ? 3 : 1;

  Additive<T, kEdges> additive;

  template <typename L>
  struct Held {
    typename L::Share dst, att;
  };
  template <typename L, int kCount>
  struct Gathered {
    typename L::Share src[kCount];
  };

  FASTGRAPH_BOTH int64_t dot_width() const { return additive.in.x_src.width; }
  int64_t gathered_bytes() const { return additive.in.x_src.bytes(); }

  template <typename L>
  __device__ Held<L> hold(const Part<L>& part, int64_t row) const {
    return {part.load(additive.in.x_dst, row), part.load(additive.in.att, 0)};
  }
  template <typename L, int kCount>
  __device__ Gathered<L, kCount> gather(const Part<L>& part, const Entries<kCount>& entries) const {
    Gathered<L, kCount> gathered;
    part.gather(additive.in.x_src, entries, gathered.src);
    return gathered;
  }
  template <typename L, int kCount>
  __device__ void add_dots(const Part<L>& part, const Held<L>& held,
                           const Gathered<L, kCount>& gathered, const Entries<kCount>& entries,
                           Dots<A, kCount>& dots) const {
    additive.add_scores(part, held.dst, held.att, gathered.src, entries, dots.score);
  }
  __device__ A score_of_dot(A dot) const { return dot; }

  template <typename L, int kCount>
  static __device__ const typename L::Share& value(const Gathered<L, kCount>& gathered, int u) {
    return gathered.src[u];
  }
};

// Gradients of x_dst, att and edge.
template <typename T, bool kEdgesOf>
struct Gatv2Destinations : DestinationPass<T> {
  using A = Accumulator<T>;
  static constexpr bool kEdges = kEdgesOf, kScores = true, kOnce = !kEdges;
  static constexpr int kRows = kEdges ? 3 : 1;

  Additive<T, kEdges> additive;
  Heads<A> grad_att;  // a node for each block
  Matrix<A> grad_edge;
  A* grad_score;  // [entries, heads], for EdgeWeights; null if edges have no features

  template <typename L>
  struct Held {
    typename L::Share dst, att, grad;
  };
  template <typename L, int kCount>
  struct Gathered {
    typename L::Share src[kCount];
  };
  template <typename L>
  struct Sums {
    typename L::Sums slopes, mean_slopes;            // over gradients and over weights
    typename L::Sums activations, mean_activations;  // the same
    __device__ void clear() {
      slopes.clear();
      mean_slopes.clear();
      activations.clear();
      mean_activations.clear();
    }
    __device__ void shift(A by) {
      slopes.each([&](A& sum, int q, int i) { sum -= by * mean_slopes.values[q][i]; });
      activations.each([&](A& sum, int q, int i) { sum -= by * mean_activations.values[q][i]; });
    }
  };
  template <typename L>
  struct Totals {
    typename L::Sums att;
    __device__ void clear() { att.clear(); }
  };

  __device__ int64_t result_width() const { return this->result.rows.width; }

  template <typename L>
  __device__ Held<L> hold(const Part<L>& part, int64_t row) const {
    return {part.load(additive.in.x_dst, row), part.load(additive.in.att, 0),
            part.load(this->given.grad, row)};
  }
  template <typename L, int kCount>
  __device__ Gathered<L, kCount> gather(const Part<L>& part, const Entries<kCount>& entries) const {
    Gathered<L, kCount> gathered;
    part.gather(additive.in.x_src, entries, gathered.src);
    return gathered;
  }
  template <typename L, int kCount>
  __device__ void add_dots(const Part<L>& part, const Held<L>& held,
                           const Gathered<L, kCount>& gathered, const Entries<kCount>& entries,
                           Dots<A, kCount>& dots) const {
    additive.add_scores(part, held.dst, held.att, gathered.src, entries, dots.score);
    add_products(part, this->dot_width(), held.grad, gathered.src, dots.product);
  }
  __device__ A score_of_dot(A dot) const { return dot; }

  template <typename L, int kCount>
  __device__ void add(const Part<L>& part, const Held<L>& held, const Gathered<L, kCount>& gathered,
                      const Entries<kCount>& entries, const A (&weight)[kCount],
                      const A (&gradient)[kCount], Sums<L>& sums) const {
    typename L::Sums z[kCount];
    additive.find_z(part, held.dst, gathered.src, entries, z);
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      z[u].each([&](A& value, int q, int i) {
        const A sloped = additive.through_leaky_relu(value, gradient[u]);
        const A mean = additive.through_leaky_relu(value, weight[u]);
        sums.slopes.values[q][i] += sloped;
        sums.mean_slopes.values[q][i] += mean;
        sums.activations.values[q][i] += sloped * value;
        sums.mean_activations.values[q][i] += mean * value;
      });
    }
  }
  // att times the slopes of a span. One without entries has none, whatever att is, and NaN * 0 is
  // NaN; with entries, an att that is not finite has made the slopes NaN already. A test of the
  // span in place of the slopes would spill registers.
  template <typename L>
  static __device__ void put_through_att(const Held<L>& held, typename L::Sums& slopes) {
    slopes.each([&](A& sum, int q, int i) { sum = sum != 0 ? sum * held.att.at(q, i) : A{0}; });
  }

  template <typename L>
  __device__ void finish(const Part<L>& part, const Span& span, const Held<L>& held, Sums<L>& sums,
                         Totals<L>& totals) const {
    totals.att.each([&](A& sum, int q, int i) { sum += sums.activations.values[q][i]; });
    put_through_att(held, sums.slopes);
    this->result.store(part, span, sums.slopes);
    if (span.piece < 0) return;
    put_through_att(held, sums.mean_slopes);
    part.store(sums.mean_slopes, this->weights, span.piece, 1);
    part.store(sums.mean_activations, this->parameter_weights, span.piece, 1);
  }

  template <typename L>
  __device__ void add_gradients(const Part<L>& part, const Span& span, const Held<L>& held,
                                const EntrySoftmax<L>& softmax, Totals<L>& totals) const {
    constexpr int kMost = L::template kInFlight<(kEdges ? 4 : 2)>;
    typename L::Sums slopes;
    slopes.clear();
    for_each_batch(this->graph, span, part.lanes, [&](const Batch& batch) {
      const A own = softmax.gradient(batch);
      if (kEdges && part.first == 0 && part.lanes.lane < batch.count) {
        grad_score[batch.entry * grad_att.heads + part.head] = own;
      }
      for_each_entries<kMost, kEdges>(batch, part.lanes, [&](const auto& entries) {
        constexpr int kCount = std::decay_t<decltype(entries)>::kCount;
        const auto gathered = gather(part, entries);
        typename L::Sums z[kCount];
        additive.find_z(part, held.dst, gathered.src, entries, z);
#pragma unroll
        for (int u = 0; u < kCount; ++u) {
          const A grad = part.lanes.from(own, entries.first + u);
          z[u].each([&](A& value, int q, int i) {
            const A sloped = additive.through_leaky_relu(value, grad);
            slopes.values[q][i] += sloped;
            totals.att.values[q][i] += sloped * value;
            value = part.covers(q, grad_att.width) ? held.att.at(q, i) * sloped : A{0};
          });
        }
        if constexpr (kEdges) add_edges(part, entries, z);
      });
    });
    put_through_att(held, slopes);
    this->result.store(part, span, slopes);
  }

  // grad_edge += weight_edge grad_z of each entry. A group takes the heads of its rows one after
  // another, and each channel is always the same lane's.
  template <typename L, int kCount>
  __device__ void add_edges(const Part<L>& part, const Entries<kCount>& entries,
                            const typename L::Sums (&grad_z)[kCount]) const {
    const Heads<const T>& weights = additive.in.weight_edge;
    for (int64_t begin = 0; begin < grad_edge.width; begin += L::kLanes) {
      const int count = static_cast<int>(min(grad_edge.width - begin, int64_t{L::kLanes}));
      A own[kCount] = {};
      for (int c = 0; c < count; ++c) {
        const auto weight = part.load(weights.at(part.head, begin + c), weights.width);
#pragma unroll
        for (int u = 0; u < kCount; ++u) {
          A dot = 0;
          for_each_value<L>([&](int q, int i) { dot += weight.at(q, i) * grad_z[u].values[q][i]; });
          dot = part.lanes.sum(dot);
          if (part.lanes.lane == c) own[u] = dot;
        }
      }
#pragma unroll
      for (int u = 0; u < kCount; ++u) {
        if (part.lanes.lane >= count) continue;
        A* target = grad_edge.row(entries.edge[u]) + begin + part.lanes.lane;
        *target = part.head == 0 && part.first == 0 ? own[u] : *target + own[u];
      }
    }
  }

  template <typename L>
  __device__ void store_totals(const Part<L>& part, const Totals<L>& totals) const {
    store_block_sum(totals.att, grad_att.at(blockIdx.x, part.head) + part.first,
                    grad_att.width - part.first);
  }
};

// The gradient of weight_edge: the sum of edge grad_z^T over all entries, for some channels of the
// edges at a time.
template <typename T>
struct EdgeWeights {
  using A = Accumulator<T>;

  CutCsr graph;
  Additive<T, true> additive;
  const A* grad_score;  // [entries, heads]
  Matrix<A> sums;       // [blocks, heads * channels of edges * width]
};

template <typename L>
constexpr int kEdgeChannels = std::clamp(32 / (L::kValues * L::kPacks), 1, 8);

template <typename L, typename T>
__global__ void __launch_bounds__(kBlockThreads) gatv2_edge_weights(EdgeWeights<T> op) {
  using A = typename L::A;
  constexpr int kMost = L::template kInFlight<4>, kChannels = kEdgeChannels<L>;
  const Gatv2Inputs<T>& in = op.additive.in;
  const int64_t groups = static_cast<int64_t>(gridDim.x) * (kBlockThreads / L::kLanes);
  const int64_t tasks = op.graph.num_tasks, width = in.att.width;
  for (int64_t channel = blockIdx.z * kChannels; channel < in.edge.width;
       channel += gridDim.z * kChannels) {
    const int channels = static_cast<int>(min(in.edge.width - channel, int64_t{kChannels}));
    for_each_head<L>(in.att.heads, width, [&](const Part<L>& part) {
      typename L::Sums sums[kChannels];
      for (auto& sum : sums) sum.clear();
      const auto att = part.load(in.att, 0);
      for (int64_t task = group_index<L::kLanes>(); task < tasks; task += groups) {
        const Span span = span_of(op.graph, task);
        const auto dst = part.load(in.x_dst, span.row);
        for_each_batch(op.graph, span, part.lanes, [&](const Batch& batch) {
          const A own = op.grad_score[batch.entry * in.att.heads + part.head];
          for_each_entries<kMost, true>(batch, part.lanes, [&](const auto& entries) {
            constexpr int kCount = std::decay_t<decltype(entries)>::kCount;
            typename L::Share src[kCount];
            typename L::Sums z[kCount];
            part.gather(in.x_src, entries, src);
            op.additive.find_z(part, dst, src, entries, z);
#pragma unroll
            for (int u = 0; u < kCount; ++u) {
              const A grad = part.lanes.from(own, entries.first + u);
              z[u].each([&](A& value, int q, int i) {
                value = att.at(q, i) * op.additive.through_leaky_relu(value, grad);
              });
              const T* edge = in.edge.row(entries.edge[u]) + channel;
#pragma unroll
              for (int c = 0; c < kChannels; ++c) {
                if (c >= channels) break;
                const A factor = widened(edge[c]);
                sums[c].each([&](A& sum, int q, int i) { sum += factor * z[u].values[q][i]; });
              }
            }
          });
        });
      }
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        if (c >= channels) break;
        A* row = op.sums.row(blockIdx.x) + (part.head * in.edge.width + channel + c) * width;
        store_block_sum(sums[c], row + part.first, width - part.first);
      }
    });
  }
}

template <typename L, typename T>
cudaError_t run_edge_weights(Queue& queue, const Gatv2Destinations<T, true>& pass,
                             Heads<T> grad_weight_edge) {
  const Gatv2Inputs<T>& in = pass.additive.in;
  const int64_t width = in.att.heads * in.edge.width * in.att.width;
  const unsigned heads = grid_size(in.att.heads);
  const unsigned channels = grid_size(ceil_div(in.edge.width, kEdgeChannels<L>));
  const unsigned blocks =
      sum_blocks(blocks_for<L>(pass.graph.num_tasks), int64_t{heads} * channels);
  auto* sums = queue.scratch<Accumulator<T>>(blocks * width);
  const EdgeWeights<T> op{pass.graph, pass.additive, pass.grad_score, {sums, blocks, width}};
  const dim3 grid(blocks, heads, channels);
  const cudaError_t error = launch({"gatv2_edge_weights", grid, kBlockThreads, 0, queue.stream()},
                                   gatv2_edge_weights<L, T>, op);
  return error == cudaSuccess ? run_add_rows<T>(queue, op.sums, grad_weight_edge.data) : error;
}

// The gradient of x_src, along the transpose.
template <typename T, bool kEdgesOf>
struct Gatv2Sources : SourcePass<T> {
  using A = Accumulator<T>;
  static constexpr bool kEdges = kEdgesOf, kScores = true;
  static constexpr int kRows = kEdges ? 4 : 3;

  Additive<T, kEdges> additive;
  RowResult<T> grad_src;

  template <typename L>
  struct Held {
    typename L::Share src, att;
  };
  template <typename L, int kCount>
  struct Gathered {
    typename L::Share dst[kCount], grad[kCount];
  };
  template <typename L>
  using Sums = typename L::Sums;

  __device__ int64_t result_width() const { return grad_src.rows.width; }

  template <typename L>
  __device__ Held<L> hold(const Part<L>& part, int64_t row) const {
    return {part.load(additive.in.x_src, row), part.load(additive.in.att, 0)};
  }
  template <typename L, int kCount>
  __device__ Gathered<L, kCount> gather(const Part<L>& part, const Entries<kCount>& entries) const {
    Gathered<L, kCount> gathered;
    part.gather(additive.in.x_dst, entries, gathered.dst);
    part.gather(this->given.grad, entries, gathered.grad);
    return gathered;
  }
  template <typename L, int kCount>
  __device__ void add_dots(const Part<L>& part, const Held<L>& held,
                           const Gathered<L, kCount>& gathered, const Entries<kCount>& entries,
                           Dots<A, kCount>& dots) const {
    additive.add_scores(part, held.src, held.att, gathered.dst, entries, dots.score);
    add_products(part, this->dot_width(), held.src, gathered.grad, dots.product);
  }
  __device__ A score_of_dot(A dot) const { return dot; }

  template <typename L, int kCount>
  __device__ void add(const Part<L>& part, const Held<L>& held, const Gathered<L, kCount>& gathered,
                      const Entries<kCount>& entries, const A (&of_value)[kCount],
                      const A (&of_score)[kCount], typename L::Sums& sums) const {
    typename L::Sums z[kCount];
    additive.find_z(part, held.src, gathered.dst, entries, z);
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      sums.each([&](A& sum, int q, int i) {
        const A sloped = additive.through_leaky_relu(z[u].values[q][i], of_score[u]);
        sum += of_value[u] * gathered.grad[u].at(q, i);
        sum += held.att.at(q, i) * sloped;
      });
    }
  }

  template <typename L>
  __device__ void store(const Part<L>& part, const Span& span, const typename L::Sums& sums) const {
    grad_src.store(part, span, sums);
  }
};

template <typename L, typename T, bool kEdges>
cudaError_t run_destinations_of(Queue& queue, const DestinationPass<T>& base,
                                const Additive<T, kEdges>& additive, Heads<T> grad_att,
                                Matrix<Accumulator<T>> grad_edge, Heads<T> grad_weight_edge) {
  using A = Accumulator<T>;
  using Pass = Gatv2Destinations<T, kEdges>;
  const int64_t width = grad_att.heads * grad_att.width;
  // Where all heads add to the same gradient of an edge, one group takes them all.
  const unsigned heads = grid_size(kEdges ? std::min<int64_t>(1, grad_att.heads) : grad_att.heads);
  const unsigned blocks = sum_blocks(blocks_for<L>(base.graph.num_tasks), heads);
  const int64_t corrected = kVisitsOnce<L, Pass> ? base.graph.num_cut : 0;
  auto* sums = queue.scratch<A>((blocks + corrected) * width);
  Pass pass{base,
            additive,
            {sums, blocks, grad_att.heads, grad_att.width},
            grad_edge,
            queue.scratch<A>(kEdges ? base.graph.num_entries * grad_att.heads : 0)};
  if constexpr (kVisitsOnce<L, Pass>) {
    pass.correct_pieces(queue);
    pass.parameter_weights = pass.of_pieces(queue, grad_att.heads, grad_att.width);
    pass.parameter = {sums + blocks * width, corrected, grad_att.heads, grad_att.width};
  }
  cudaError_t error = run_destinations<L>(queue, "gatv2_destinations", pass, {blocks, heads});
  if (error == cudaSuccess) {
    error = run_add_rows<T>(queue, {sums, blocks + corrected, width}, grad_att.data);
  }
  if constexpr (kEdges) {
    if (error == cudaSuccess) error = run_edge_weights<L>(queue, pass, grad_weight_edge);
  }
  return error;
}

template <typename T, typename... Elements>
bool is_packed(const Gatv2Inputs<T>& in, const Elements*... others) {
  return fits_packs<T>(in.att.width, in.x_src.data, in.x_dst.data, in.att.data, in.weight_edge.data,
                       others...);
}

template <typename T>
cudaError_t backward_dst(Queue& queue, const CutCsr& graph, const Gatv2Inputs<T>& in, double slope,
                         Dropout dropout, const SoftmaxGradients<T>& given, Accumulator<T>* delta,
                         Heads<T> grad_dst, Heads<T> grad_att, Matrix<Accumulator<T>> grad_edge,
                         Heads<T> grad_weight_edge) {
  const bool packed = is_packed(in, given.grad.data, grad_dst.data);
  const DestinationPass<T> base(queue, graph, dropout, given, delta, grad_dst);
  return with_edges(in, [&](auto edges) {
    const Additive<T, edges.value> additive{gatherable(in, graph),
                                            static_cast<Accumulator<T>>(slope)};
    return with_layout<T>(in.att.width, packed, [&](auto layout) {
      return run_destinations_of<decltype(layout)>(queue, base, additive, grad_att, grad_edge,
                                                   grad_weight_edge);
    });
  });
}

template <typename T>
cudaError_t backward_src(Queue& queue, const CutCsr& transpose, const Gatv2Inputs<T>& in,
                         double slope, Dropout dropout, const SoftmaxGradients<T>& given,
                         const Accumulator<T>* delta, Heads<T> grad_src) {
  const bool packed = is_packed(in, given.grad.data, grad_src.data);
  const SourcePass<T> base(transpose, dropout, given, delta);
  return with_edges(in, [&](auto edges) {
    const Gatv2Sources<T, edges.value> pass{
        base,
        {gatherable(in, transpose), static_cast<Accumulator<T>>(slope)},
        RowResult<T>(queue, base.graph.num_pieces, grad_src)};
    const cudaError_t error = run_sources(queue, "gatv2_sources", pass, packed);
    return error == cudaSuccess ? merge(queue, transpose, pass.grad_src) : error;
  });
}

}  // namespace

template <typename T>
cudaError_t gatv2(Queue& queue, const CutCsr& graph, const Gatv2Inputs<T>& in, double slope,
                  Dropout dropout, const SoftmaxOutputs<T>& outputs) {
  const bool packed = is_packed(in, outputs.out.data, outputs.addend.data);
  return with_edges(in, [&](auto edges) {
    const Gatv2Scores<T, edges.value> scores{
        {gatherable(in, graph), static_cast<Accumulator<T>>(slope)}};
    return run_forward(queue, "gatv2_rows", graph, scores, dropout, outputs, packed);
  });
}

template <typename T>
cudaError_t gatv2_backward(Queue& queue, const CutCsr& graph, const CutCsr& transpose,
                           const Gatv2Inputs<T>& in, double slope, Dropout dropout,
                           const SoftmaxGradients<T>& given, Heads<T> grad_src, Heads<T> grad_dst,
                           Heads<T> grad_att, Matrix<Accumulator<T>> grad_edge,
                           Heads<T> grad_weight_edge) {
  auto* delta = queue.scratch<Accumulator<T>>(graph.num_rows * in.att.heads);
  const cudaError_t error = backward_dst(queue, graph, in, slope, dropout, given, delta, grad_dst,
                                         grad_att, grad_edge, grad_weight_edge);
  if (error != cudaSuccess) return error;
  return backward_src(queue, transpose, in, slope, dropout, given, delta, grad_src);
}

FASTGRAPH_INSTANTIATE(gatv2)
FASTGRAPH_INSTANTIATE(gatv2_backward)

}  // namespace fastgraph::cuda
