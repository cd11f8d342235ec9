// Scaled dot-product attention: the score of an entry is scale * <query[row], key[col]>. Where
// edges carry features, these follow the channels of the key and of the value, so queries and
// outputs are wider by as much. Something of the edges may be added to scores.
#pragma once

#include <algorithm>

#include "cuda/kernels.h"
#include "fastgraph/edge_softmax_backward.cuh"

namespace fastgraph::cuda {

template <typename T>
AttentionInputs<T> gatherable(AttentionInputs<T> in, const Csr& graph) {
  in.query = gathered_heads(in.query, graph);
  in.key = gathered_heads(in.key, graph);
  in.value = gathered_heads(in.value, graph);
  return in;
}

// Replaces the share of channels from `begin` on by that of an edge's features.
template <typename L, typename T>
__device__ void load_behind(const Part<L>& part, const T* edge, int64_t begin, int64_t width,
                            typename L::Share& share) {
#pragma unroll
  for (int q = 0; q < L::kPacks; ++q) {
    const int64_t f = part.first + L::Share::column(part.lanes.lane, q) - begin;
    if (f >= 0 && f < width) share.packs[q] = load_pack<L::kValues>(edge + f);
  }
}

// The rows of nodes that entries lead to, with the features of the edges behind them: a lane reads
// either the ones or the others.
template <bool kFeatures, typename L, typename T, int kCount>
__device__ void gather_joined(const Part<L>& part, Heads<const T> x, Matrix<const T> edge,
                              const Entries<kCount>& entries, typename L::Share (&rows)[kCount]) {
  if constexpr (!kFeatures) {
    part.gather(x, entries, rows);
  } else {
#pragma unroll
    for (int q = 0; q < L::kPacks; ++q) {
      const int64_t f = part.first + L::Share::column(part.lanes.lane, q);
      const bool of_node = f < x.width;
      const auto own =
          of_node ? part.rows_of(x, q)
                  : GatheredRows<T, L::kValues>(edge.data, edge.width, edge.width, f - x.width);
#pragma unroll
      for (int u = 0; u < kCount; ++u) {
        rows[u].packs[q] = own.load(of_node ? entries.col[u] : entries.edge[u]);
      }
    }
  }
}

// Nothing is added to scores.
struct NoBias {
  static constexpr bool kGiven = false;
};

// What is added to the score of an entry: numbers of its edge and of its type, as far as they are
// given. A type that the table does not have makes it NaN.
template <typename T>
struct EdgeBias {
  using A = Accumulator<T>;
  static constexpr bool kGiven = true;

  EdgeBiases<T> biases;

  __device__ A of(int64_t edge, int head) const {
    const auto& [of_edges, of_types] = biases;
    A sum = of_edges.given() ? widened(of_edges.values.row(edge)[head]) : A{0};
    if (!of_types.given()) return sum;
    const int64_t type = of_types.types.at(edge);
    if (type < 0 || type >= of_types.values.rows) return NAN;
    return sum + widened(of_types.values.row(type)[head]);
  }
};

// kFeatures tells whether edges carry features, in this pass and in those below.
template <typename T, bool kFeatures, typename Bias>
struct AttentionScores {
  using Element = T;
  using A = Accumulator<T>;
  static constexpr bool kBiased = Bias::kGiven, kEdges = kFeatures;
  static constexpr bool kScores = true, kProducts = false, kTogether = false;
  static constexpr int kRows = kFeatures ? 4 : 2;

  AttentionInputs<T> in;
  Bias bias;
  A scale;

  template <typename L>
  struct Held {
    typename L::Share query;
  };
  template <typename L, int kCount>
  struct Gathered {
    typename L::Share key[kCount], value[kCount];
  };

  FASTGRAPH_BOTH int64_t dot_width() const { return in.query.width; }

  template <typename L>
  __device__ Held<L> hold(const Part<L>& part, int64_t row) const {
    return {part.load(in.query, row)};
  }
  template <typename L, int kCount>
  __device__ Gathered<L, kCount> gather(const Part<L>& part, const Entries<kCount>& entries) const {
    Gathered<L, kCount> gathered;
    gather_joined<kFeatures>(part, in.key, in.edge, entries, gathered.key);
    gather_joined<kFeatures>(part, in.value, in.edge, entries, gathered.value);
    return gathered;
  }
  template <typename L, int kCount>
  __device__ void add_dots(const Part<L>& part, const Held<L>& held,
                           const Gathered<L, kCount>& gathered, const Entries<kCount>&,
                           Dots<A, kCount>& dots) const {
    add_products(part, this->dot_width(), held.query, gathered.key, dots.score);
  }
  __device__ A score_of_dot(A dot) const { return times(scale, dot); }
  __device__ A bias_of(int64_t edge, int head) const { return bias.of(edge, head); }

  template <typename L, int kCount>
  static __device__ const typename L::Share& value(const Gathered<L, kCount>& gathered, int u) {
    return gathered.value[u];
  }
};

// The gradients of query and edge.
template <typename T, bool kFeatures, typename Bias>
struct AttentionDestinations : DestinationPass<T> {
  using A = Accumulator<T>;
  static constexpr bool kBiased = Bias::kGiven, kEdges = kFeatures;
  static constexpr bool kScores = true, kOnce = !kFeatures;
  static constexpr int kRows = kFeatures ? 4 : 2;

  AttentionInputs<T> in;
  Bias bias;
  A scale;
  Matrix<A> grad_edge;

  template <typename L>
  struct Held {
    typename L::Share query, grad;
  };
  template <typename L, int kCount>
  struct Gathered {
    typename L::Share key[kCount], value[kCount];
  };
  template <typename L>
  struct Sums {
    typename L::Sums key, mean_key;  // over gradients and over weights
    __device__ void clear() {
      key.clear();
      mean_key.clear();
    }
    __device__ void shift(A by) {
      key.each([&](A& sum, int q, int i) { sum -= by * mean_key.values[q][i]; });
    }
  };
  template <typename L>
  using Totals = NoTotals<L>;

  __device__ int64_t result_width() const { return this->result.rows.width; }

  template <typename L>
  __device__ Held<L> hold(const Part<L>& part, int64_t row) const {
    return {part.load(in.query, row), part.load(this->given.grad, row)};
  }
  template <typename L, int kCount>
  __device__ Gathered<L, kCount> gather(const Part<L>& part, const Entries<kCount>& entries) const {
    Gathered<L, kCount> gathered;
    gather_joined<kFeatures>(part, in.key, in.edge, entries, gathered.key);
    gather_joined<kFeatures>(part, in.value, in.edge, entries, gathered.value);
    return gathered;
  }
  template <typename L, int kCount>
  __device__ void add_dots(const Part<L>& part, const Held<L>& held,
                           const Gathered<L, kCount>& gathered, const Entries<kCount>&,
                           Dots<A, kCount>& dots) const {
    add_products(part, this->dot_width(), held.query, gathered.key, dots.score);
    add_products(part, this->dot_width(), held.grad, gathered.value, dots.product);
  }
  __device__ A score_of_dot(A dot) const { return times(scale, dot); }
  __device__ A bias_of(int64_t edge, int head) const { return bias.of(edge, head); }

  template <typename L, int kCount>
  __device__ void add(const Part<L>&, const Held<L>&, const Gathered<L, kCount>& gathered,
                      const Entries<kCount>&, const A (&weight)[kCount],
                      const A (&gradient)[kCount], Sums<L>& sums) const {
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      for_each_value<L>([&](int q, int i) {
        const A key = gathered.key[u].at(q, i);
        sums.key.values[q][i] += gradient[u] * key;
        sums.mean_key.values[q][i] += weight[u] * key;
      });
    }
  }
  template <typename L>
  __device__ void finish(const Part<L>& part, const Span& span, const Held<L>&, Sums<L>& sums,
                         NoTotals<L>&) const {
    sums.key.each([&](A& sum, int, int) { sum *= scale; });
    this->result.store(part, span, sums.key);
    if (span.piece >= 0) part.store(sums.mean_key, this->weights, span.piece, scale);
  }

  template <typename L>
  __device__ void add_gradients(const Part<L>& part, const Span& span, const Held<L>&,
                                const EntrySoftmax<L>& softmax, NoTotals<L>&) const {
    constexpr int kMost = L::template kInFlight<(kFeatures ? 2 : 1)>;
    typename L::Sums sums;
    sums.clear();
    for_each_batch(this->graph, span, part.lanes, [&](const Batch& batch) {
      const A own = softmax.gradient(batch);
      for_each_entries<kMost, kEdges>(batch, part.lanes, [&](const auto& entries) {
        constexpr int kCount = std::decay_t<decltype(entries)>::kCount;
        typename L::Share key[kCount];
        gather_joined<kFeatures>(part, in.key, in.edge, entries, key);
#pragma unroll
        for (int u = 0; u < kCount; ++u) {
          const A grad = part.lanes.from(own, entries.first + u);
          sums.each([&](A& sum, int q, int i) { sum += grad * key[u].at(q, i); });
        }
      });
      if (kFeatures && part.first == 0) add_edges(part, span.row, batch, own, softmax);
    });
    sums.each([&](A& sum, int, int) { sum *= scale; });
    this->result.store(part, span, sums);
  }

  // grad_edge += scale * grad * query + weight * grad_out of each entry of a batch, of the channels
  // that stand for edges. A group takes the heads of its rows one after another, and each channel
  // is always the same lane's.
  template <typename L>
  __device__ void add_edges(const Part<L>& part, int64_t row, const Batch& batch, A own_grad,
                            const EntrySoftmax<L>& softmax) const {
    const T* query = in.query.at(row, part.head) + in.key.width;
    const T* grad_out = this->given.grad.at(row, part.head) + in.key.width;
    const A own_weight = softmax.weight[batch.number] * this->keep(batch.edge, part.head);
    for (int u = 0; u < batch.count; ++u) {
      const A grad = scale * part.lanes.from(own_grad, u);
      const A weight = part.lanes.from(own_weight, u);
      A* target = grad_edge.row(part.lanes.from(batch.edge, u));
      for (int64_t f = part.lanes.lane; f < grad_edge.width; f += L::kLanes) {
        const A sum = grad * widened(query[f]) + weight * widened(grad_out[f]);
        target[f] = part.head == 0 ? sum : target[f] + sum;
      }
    }
  }
  template <typename L>
  __device__ void store_totals(const Part<L>&, const NoTotals<L>&) const {}
};

// The gradients of scores, which are those of what is added to them: [edges, heads], or no data.
template <typename T>
struct ScoreGradients {
  Matrix<T> of_edges;
  Matrix<Accumulator<T>> summed;  // from which those of types are added up
};

// Gradients of key, value and bias, along the transpose: where the gradients of scores are found
// from the delta of rows that are known, while those of queries are corrected as it becomes known.
template <typename T, bool kFeatures, typename Bias>
struct AttentionSources : SourcePass<T> {
  using A = Accumulator<T>;
  static constexpr bool kBiased = Bias::kGiven, kEdges = kFeatures, kScores = true;
  static constexpr int kRows = kFeatures ? 4 : 2;

  AttentionInputs<T> in;
  Bias bias;
  A scale;
  RowResult<T> grad_key;
  RowResult<T> grad_value;
  ScoreGradients<T> grad_score;

  template <typename L>
  struct Held {
    typename L::Share key, value;
  };
  template <typename L, int kCount>
  struct Gathered {
    typename L::Share query[kCount], grad[kCount];
  };
  template <typename L>
  struct Sums {
    typename L::Sums key, value;
    __device__ void clear() {
      key.clear();
      value.clear();
    }
  };

  __device__ int64_t result_width() const { return grad_key.rows.width; }

  template <typename L>
  __device__ Held<L> hold(const Part<L>& part, int64_t row) const {
    return {part.load(in.key, row), part.load(in.value, row)};
  }
  template <typename L, int kCount>
  __device__ Gathered<L, kCount> gather(const Part<L>& part, const Entries<kCount>& entries) const {
    Gathered<L, kCount> gathered;
    part.gather(in.query, entries, gathered.query);
    part.gather(this->given.grad, entries, gathered.grad);
    return gathered;
  }
  template <typename L, int kCount>
  __device__ void add_dots(const Part<L>& part, const Held<L>& held,
                           const Gathered<L, kCount>& gathered, const Entries<kCount>& entries,
                           Dots<A, kCount>& dots) const {
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      typename L::Share key = held.key, value = held.value;
      if constexpr (kFeatures) {
        const T* edge = in.edge.row(entries.edge[u]);
        load_behind(part, edge, in.key.width, in.edge.width, key);
        load_behind(part, edge, in.key.width, in.edge.width, value);
      }
      const int64_t width = this->dot_width();
      dots.score[u] += sum_within(
          part, width, [&](int q, int i) { return key.at(q, i) * gathered.query[u].at(q, i); });
      dots.product[u] += sum_within(
          part, width, [&](int q, int i) { return value.at(q, i) * gathered.grad[u].at(q, i); });
    }
  }
  __device__ A score_of_dot(A dot) const { return times(scale, dot); }
  __device__ A bias_of(int64_t edge, int head) const { return bias.of(edge, head); }

  template <typename L, int kCount>
  __device__ void add(const Part<L>&, const Held<L>&, const Gathered<L, kCount>& gathered,
                      const Entries<kCount>&, const A (&of_value)[kCount],
                      const A (&of_score)[kCount], Sums<L>& sums) const {
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      sums.key.each([&](A& sum, int q, int i) { sum += of_score[u] * gathered.query[u].at(q, i); });
      sums.value.each(
          [&](A& sum, int q, int i) { sum += of_value[u] * gathered.grad[u].at(q, i); });
    }
  }
  __device__ void store_score(int64_t edge, int head, A gradient) const {
    const auto& [of_edges, summed] = grad_score;
    if (of_edges.data) of_edges.row(edge)[head] = narrowed<T>(gradient);
    if (summed.data) summed.row(edge)[head] = gradient;
  }
  template <typename L>
  __device__ void store(const Part<L>& part, const Span& span, Sums<L>& sums) const {
    sums.key.each([&](A& sum, int, int) { sum *= scale; });
    grad_key.store(part, span, sums.key);
    grad_value.store(part, span, sums.value);
  }
};

template <typename T, typename... Elements>
bool is_packed(const AttentionInputs<T>& in, const Elements*... others) {
  return fits_packs<T>(in.key.width, in.query.data, in.key.data, in.value.data, others...) &&
         fits_packs<T>(in.edge.width, in.edge.data);
}

template <typename T, typename Bias>
cudaError_t run_attention(Queue& queue, const CutCsr& graph, const AttentionInputs<T>& in,
                          const Bias& bias, double scale, Dropout dropout,
                          const SoftmaxOutputs<T>& outputs) {
  const bool packed = is_packed(in, outputs.out.data, outputs.addend.data);
  return with_edges(in, [&](auto edges) {
    const AttentionScores<T, edges.value, Bias> scores{gatherable(in, graph), bias,
                                                       static_cast<Accumulator<T>>(scale)};
    return run_forward(queue, "attention_rows", graph, scores, dropout, outputs, packed);
  });
}

template <typename T, typename Bias>
cudaError_t run_attention_dst(Queue& queue, const CutCsr& graph, const AttentionInputs<T>& in,
                              const Bias& bias, double scale, Dropout dropout,
                              const SoftmaxGradients<T>& given, Accumulator<T>* delta,
                              Heads<T> grad_query, Matrix<Accumulator<T>> grad_edge) {
  const bool packed = is_packed(in, given.grad.data, grad_query.data);
  const DestinationPass<T> base(queue, graph, dropout, given, delta, grad_query);
  return with_edges(in, [&](auto edges) {
    using Pass = AttentionDestinations<T, edges.value, Bias>;
    Pass pass{base, gatherable(in, graph), bias, static_cast<Accumulator<T>>(scale), grad_edge};
    // Where all heads add to the same gradient of an edge, one group takes them all.
    const int64_t heads = edges.value ? std::min<int64_t>(1, in.key.heads) : in.key.heads;
    return with_layout<T>(in.query.width, packed, [&](auto layout) {
      using L = decltype(layout);
      if constexpr (kVisitsOnce<L, Pass>) pass.correct_pieces(queue);
      const dim3 grid(blocks_for<L>(pass.graph.num_tasks), grid_size(heads));
      return run_destinations<L>(queue, "attention_destinations", pass, grid);
    });
  });
}

template <typename T, typename Bias>
cudaError_t run_attention_src(Queue& queue, const CutCsr& transpose, const AttentionInputs<T>& in,
                              const Bias& bias, double scale, Dropout dropout,
                              const SoftmaxGradients<T>& given, const Accumulator<T>* delta,
                              Heads<T> grad_key, Heads<T> grad_value,
                              const ScoreGradients<T>& grad_score) {
  const bool packed = is_packed(in, given.grad.data, grad_key.data, grad_value.data);
  const SourcePass<T> base(transpose, dropout, given, delta);
  return with_edges(in, [&](auto edges) {
    const AttentionSources<T, edges.value, Bias> pass{
        base,
        gatherable(in, transpose),
        bias,
        static_cast<Accumulator<T>>(scale),
        RowResult<T>(queue, base.graph.num_pieces, grad_key),
        RowResult<T>(queue, base.graph.num_pieces, grad_value),
        grad_score};
    cudaError_t error = run_sources(queue, "attention_sources", pass, packed);
    if (error == cudaSuccess) error = merge(queue, transpose, pass.grad_key);
    return error == cudaSuccess ? merge(queue, transpose, pass.grad_value) : error;
  });
}

}  // namespace fastgraph::cuda
