// Attention from one score for each node and head: the score of an entry is
// leaky_relu(score_src[col] + score_dst[row] + score_edge[edge]), which each lane finds for its
// own.
#include "cuda/kernels.h"
#include "fastgraph/edge_softmax_backward.cuh"

namespace fastgraph::cuda {
namespace {

template <typename T>
GatInputs<T> gatherable(GatInputs<T> in, const Csr& graph) {
  in.x = gathered_heads(in.x, graph);
  return in;
}

template <typename T>
struct NodeScores {
  using A = Accumulator<T>;

  GatInputs<T> in;
  A slope;

  __device__ A leaky_relu(A z) const { return z > 0 ? z : times(slope, z); }
  __device__ A through_leaky_relu(A z, A grad) const { return z > 0 ? grad : slope * grad; }

  // What the score of a lane's entry is leaky_relu of.
  __device__ A find_z(const Batch& batch, int64_t src, int64_t dst, int head) const {
    const A nodes = widened(in.score_dst.row(dst)[head]) + widened(in.score_src.row(src)[head]);
    if (in.score_edge.data == nullptr) return nodes;
    return nodes + widened(in.score_edge.row(batch.edge)[head]);
  }
};

template <typename T>
struct GatScores {
  using Element = T;
  using A = Accumulator<T>;
  static constexpr bool kEdges = false, kScores = false, kBiased = false, kTogether = false;
  static constexpr int kRows = 1;

  NodeScores<T> scores;

  struct Held {};
  template <typename L, int kCount>
  struct Gathered {
    typename L::Share x[kCount];
  };

  FASTGRAPH_BOTH int64_t dot_width() const { return scores.in.x.width; }

  __device__ A own_score(int64_t row, int head, const Batch& batch) const {
    return scores.leaky_relu(scores.find_z(batch, batch.col, row, head));
  }
  template <typename L>
  __device__ Held hold(const Part<L>&, int64_t) const {
    return {};
  }
  template <typename L, int kCount>
  __device__ Gathered<L, kCount> gather(const Part<L>& part, const Entries<kCount>& entries) const {
    Gathered<L, kCount> gathered;
    part.gather(scores.in.x, entries, gathered.x);
    return gathered;
  }
  template <typename L, int kCount>
  static __device__ const typename L::Share& value(const Gathered<L, kCount>& gathered, int u) {
    return gathered.x[u];
  }
};

// The gradients of score_dst and score_edge.
template <typename T>
struct GatDestinations : DestinationPass<T> {
  using A = Accumulator<T>;
  static constexpr bool kEdges = false, kScores = false, kOnce = false, kCorrects = true;
  static constexpr int kRows = 1;

  NodeScores<T> scores;
  Matrix<T> grad_score_edge;

  template <typename L>
  struct Held {
    typename L::Share grad;
  };
  template <typename L, int kCount>
  struct Gathered {
    typename L::Share x[kCount];
  };
  template <typename L>
  using Totals = NoTotals<L>;

  __device__ int64_t result_width() const { return 1; }

  __device__ A own_score(int64_t row, int head, const Batch& batch) const {
    return scores.leaky_relu(scores.find_z(batch, batch.col, row, head));
  }
  template <typename L>
  __device__ Held<L> hold(const Part<L>& part, int64_t row) const {
    return {part.load(this->given.grad, row)};
  }
  template <typename L, int kCount>
  __device__ Gathered<L, kCount> gather(const Part<L>& part, const Entries<kCount>& entries) const {
    Gathered<L, kCount> gathered;
    part.gather(scores.in.x, entries, gathered.x);
    return gathered;
  }
  template <typename L, int kCount>
  __device__ void add_dots(const Part<L>& part, const Held<L>& held,
                           const Gathered<L, kCount>& gathered, const Entries<kCount>&,
                           Dots<A, kCount>& dots) const {
    add_products(part, this->dot_width(), held.grad, gathered.x, dots.product);
  }

  template <typename L>
  __device__ void add_gradients(const Part<L>& part, const Span& span, const Held<L>&,
                                const EntrySoftmax<L>& softmax, NoTotals<L>&) const {
    A sum = 0, weights = 0;
    for_each_batch(this->graph, span, part.lanes, [&](const Batch& batch) {
      if (part.lanes.lane >= batch.count) return;
      const A z = scores.find_z(batch, batch.col, span.row, part.head);
      weights += scores.through_leaky_relu(z, softmax.weight[batch.number]);
      const A grad = scores.through_leaky_relu(z, softmax.gradient(batch));
      if (grad_score_edge.data) grad_score_edge.row(batch.edge)[part.head] = narrowed<T>(grad);
      sum += grad;
    });
    sum = part.lanes.sum(sum);
    weights = part.lanes.sum(weights);
    if (part.lanes.lane != 0) return;
    this->result.store_one(span, part.head, sum);
    if (span.piece >= 0 && this->corrects_pieces()) {
      *this->weights.at(span.piece, part.head) = weights;
    }
  }
  template <typename L>
  __device__ void store_totals(const Part<L>&, const NoTotals<L>&) const {}
};

// Gradients of x and score_src, along the transpose.
template <typename T>
struct GatSources : SourcePass<T> {
  using A = Accumulator<T>;
  static constexpr bool kEdges = false, kScores = false;
  static constexpr int kRows = 1;

  NodeScores<T> scores;
  RowResult<T> grad_x;
  RowResult<T> grad_score_src;

  template <typename L>
  struct Held {
    typename L::Share x;
  };
  template <typename L, int kCount>
  struct Gathered {
    typename L::Share grad[kCount];
  };
  template <typename L>
  struct Sums {
    typename L::Sums x;
    A score;  // over the entries of this lane
    __device__ void clear() {
      x.clear();
      score = 0;
    }
  };

  __device__ int64_t result_width() const { return grad_x.rows.width; }

  __device__ A own_score(int64_t row, int head, const Batch& batch) const {
    return scores.leaky_relu(scores.find_z(batch, row, batch.col, head));
  }
  template <typename L>
  __device__ Held<L> hold(const Part<L>& part, int64_t row) const {
    return {part.load(scores.in.x, row)};
  }
  template <typename L, int kCount>
  __device__ Gathered<L, kCount> gather(const Part<L>& part, const Entries<kCount>& entries) const {
    Gathered<L, kCount> gathered;
    part.gather(this->given.grad, entries, gathered.grad);
    return gathered;
  }
  template <typename L, int kCount>
  __device__ void add_dots(const Part<L>& part, const Held<L>& held,
                           const Gathered<L, kCount>& gathered, const Entries<kCount>&,
                           Dots<A, kCount>& dots) const {
    add_products(part, this->dot_width(), held.x, gathered.grad, dots.product);
  }

  template <typename L, int kCount>
  __device__ void add(const Part<L>&, const Held<L>&, const Gathered<L, kCount>& gathered,
                      const Entries<kCount>&, const A (&of_value)[kCount], const A (&)[kCount],
                      Sums<L>& sums) const {
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      sums.x.each([&](A& sum, int q, int i) { sum += of_value[u] * gathered.grad[u].at(q, i); });
    }
  }
  template <typename L>
  __device__ void add_own(int64_t row, int head, const Batch& batch, A of_score,
                          Sums<L>& sums) const {
    const A z = scores.find_z(batch, row, batch.col, head);
    sums.score += scores.through_leaky_relu(z, of_score);
  }
  template <typename L>
  __device__ void store(const Part<L>& part, const Span& span, const Sums<L>& sums) const {
    grad_x.store(part, span, sums.x);
    const A score = part.lanes.sum(sums.score);
    if (part.lanes.lane == 0 && part.first == 0) grad_score_src.store_one(span, part.head, score);
  }
};

// A matrix [nodes, heads] as heads of one channel.
template <typename T>
Heads<T> as_heads(Matrix<T> x) {
  return {x.data, x.rows, x.width, 1};
}

template <typename T>
cudaError_t backward_dst(Queue& queue, const CutCsr& graph, const GatInputs<T>& in, double slope,
                         Dropout dropout, const SoftmaxGradients<T>& given, Accumulator<T>* delta,
                         Matrix<T> grad_score_dst, Matrix<T> grad_score_edge) {
  DestinationPass<T> base(queue, graph, dropout, given, delta, as_heads(grad_score_dst));
  if (grad_score_edge.data == nullptr) base.correct_pieces(queue);
  const GatDestinations<T> pass{
      base, {gatherable(in, graph), static_cast<Accumulator<T>>(slope)}, grad_score_edge};
  const bool packed = fits_packs<T>(in.x.width, in.x.data, given.grad.data);
  return with_layout<T>(in.x.width, packed, [&](auto layout) {
    using L = decltype(layout);
    const dim3 grid(blocks_for<L>(pass.graph.num_tasks), grid_size(in.x.heads));
    return run_destinations<L>(queue, "gat_destinations", pass, grid);
  });
}

template <typename T>
cudaError_t backward_src(Queue& queue, const CutCsr& transpose, const GatInputs<T>& in,
                         double slope, Dropout dropout, const SoftmaxGradients<T>& given,
                         const Accumulator<T>* delta, Heads<T> grad_x, Matrix<T> grad_score_src) {
  const SourcePass<T> base(transpose, dropout, given, delta);
  const GatSources<T> pass{base,
                           {gatherable(in, transpose), static_cast<Accumulator<T>>(slope)},
                           RowResult<T>(queue, base.graph.num_pieces, grad_x),
                           RowResult<T>(queue, base.graph.num_pieces, as_heads(grad_score_src))};
  const bool packed = fits_packs<T>(in.x.width, in.x.data, given.grad.data, grad_x.data);
  cudaError_t error = run_sources(queue, "gat_sources", pass, packed);
  if (error == cudaSuccess) error = merge(queue, transpose, pass.grad_x);
  return error == cudaSuccess ? merge(queue, transpose, pass.grad_score_src) : error;
}

}  // namespace

template <typename T>
cudaError_t gat(Queue& queue, const CutCsr& graph, const GatInputs<T>& in, double slope,
                Dropout dropout, const SoftmaxOutputs<T>& outputs) {
  const bool packed = fits_packs<T>(in.x.width, in.x.data, outputs.out.data, outputs.addend.data);
  const GatScores<T> scores{{gatherable(in, graph), static_cast<Accumulator<T>>(slope)}};
  return run_forward(queue, "gat_rows", graph, scores, dropout, outputs, packed);
}

template <typename T>
cudaError_t gat_backward(Queue& queue, const CutCsr& graph, const CutCsr& transpose,
                         const GatInputs<T>& in, double slope, Dropout dropout,
                         const SoftmaxGradients<T>& given, Heads<T> grad_x,
                         Matrix<T> grad_score_src, Matrix<T> grad_score_dst,
                         Matrix<T> grad_score_edge) {
  auto* delta = queue.scratch<Accumulator<T>>(graph.num_rows * in.x.heads);
  const cudaError_t error =
      backward_dst(queue, graph, in, slope, dropout, given, delta, grad_score_dst, grad_score_edge);
  if (error != cudaSuccess) return error;
  return backward_src(queue, transpose, in, slope, dropout, given, delta, grad_x, grad_score_src);
}

FASTGRAPH_INSTANTIATE(gat)
FASTGRAPH_INSTANTIATE(gat_backward)

}  // namespace fastgraph::cuda
