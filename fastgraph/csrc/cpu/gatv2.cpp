// Additive attention (Brody, Alon and Yahav, How attentive are graph attention networks?, 2022):
// the score of an entry is <att, leaky_relu(z)>, z = x_src[col] + x_dst[row] + weight_edge^T edge.
// The projection of the edges is made channel by channel where it is needed, and never stored.
#include <algorithm>

#include "cpu/kernels.h"
#include "fastgraph/edge_blocks.h"
#include "fastgraph/edge_softmax.h"
#include "fastgraph/partial_sums.h"

namespace fastgraph {
namespace {

template <typename V, typename A>
inline V leaky_relu(V z, A slope) {
  return z > V{} ? z : slope * z;
}

// What edges add to z.
template <typename T>
struct EdgeProjection {
  using A = Accumulator<T>;

  Matrix<const T> edge;
  Heads<const T> weight;  // [heads, channels of edges, width]

  int64_t channels() const { return edge.width; }
  A channel(const Entries& block, int i, int64_t d) const {
    return load_one(edge.row(block.edge(i)) + d);
  }

  // Adds the part that stands in a chunk of channels at f.
  template <typename C>
  void add_to(Vector<A, C::kLanes>* z, const Entries& block, int i, int h, int64_t f) const {
    for (int64_t d = 0; d < channels(); ++d) {
      const A factor = channel(block, i, d);
      const T* row = weight.at(block.head + h, d) + f;
#pragma GCC unroll 4
      for (int q = 0; q < C::kCount; ++q) z[q] += factor * load<C::kLanes>(row + q * C::kLanes);
    }
  }
};

// For graphs without features of edges, whose loops have nothing to skip then.
template <typename T>
struct NoEdges {
  template <typename C>
  void add_to(Vector<Accumulator<T>, C::kLanes>*, const Entries&, int, int, int64_t) const {}
};

// Calls body with what the edges of these inputs add to z.
template <typename T, typename Body>
inline auto with_edges(const Gatv2Inputs<T>& in, const Body& body) {
  if (in.edge.width > 0) return body(EdgeProjection<T>{in.edge, in.weight_edge});
  return body(NoEdges<T>{});
}

// The scores of a block of entries; the row is one of `nodes`, `others` are gathered. With
// kProducts, the products <grad, others> are added to *products besides.
template <bool kProducts, typename T, typename Edges, typename Block>
inline BlockOf<Accumulator<T>> additive_scores(const Block& block, Heads<const T> nodes,
                                               const NodeRows<T>& others, const Edges& edges,
                                               Heads<const T> att, Accumulator<T> slope,
                                               Heads<const T> grad = {},
                                               BlockOf<Accumulator<T>>* products = nullptr) {
  using A = Accumulator<T>;
  BlockOf<A> score{};
  for_each_part<kLanes<T>, 4>(0, others.width, [&](auto chunk, int64_t f) {
    using C = decltype(chunk);
    using V = Vector<A, C::kLanes>;
    V mine[C::kCount], factor[C::kCount], given[C::kCount], sums[kBlock], product_sums[kBlock];
    for (int h = 0; h < block.heads; ++h) {
      const T* own = nodes.at(block.row, block.head + h) + f;
      const T* weight = att.at(0, block.head + h) + f;
#pragma GCC unroll 4
      for (int q = 0; q < C::kCount; ++q) {
        mine[q] = load<C::kLanes>(own + q * C::kLanes);
        factor[q] = load<C::kLanes>(weight + q * C::kLanes);
        if constexpr (kProducts) {
          given[q] = load<C::kLanes>(grad.at(block.row, block.head + h) + f + q * C::kLanes);
        }
      }
      for (int i = 0; i < block.count; ++i) {
        others.template expect<C::kWidth>(block, i, h, f);
        const T* other = others.at(block, i, h) + f;
        V z[C::kCount], sum{}, product{};
#pragma GCC unroll 4
        for (int q = 0; q < C::kCount; ++q) {
          z[q] = mine[q] + load<C::kLanes>(other + q * C::kLanes);
        }
        if constexpr (kProducts) {
#pragma GCC unroll 4
          for (int q = 0; q < C::kCount; ++q) {
            product = multiply_add<A, C::kLanes>(given[q], load<C::kLanes>(other + q * C::kLanes),
                                                 product);
          }
        }
        edges.template add_to<C>(z, block, i, h, f);
#pragma GCC unroll 4
        for (int q = 0; q < C::kCount; ++q) {
          sum = multiply_add<A, C::kLanes>(factor[q], leaky_relu(z[q], slope), sum);
        }
        sums[h * block.stride + i] = sum;
        if constexpr (kProducts) product_sums[h * block.stride + i] = product;
      }
    }
    score += sums_of_block<A, C::kLanes>(block, sums);
    if constexpr (kProducts) *products += sums_of_block<A, C::kLanes>(block, product_sums);
  });
  return score;
}

// The same for a row of a batch, without features of edges: added to score.
template <typename T>
inline void add_scores(const RowBatch& batch, int64_t row, EntryRange entries,
                       const Gatv2Inputs<T>& in, Accumulator<T> slope, Accumulator<T>* score) {
  using A = Accumulator<T>;
  for_each_piece(in.x_src, [&](auto piece, int64_t head, int64_t f) {
    using P = decltype(piece);
    constexpr int N = P::kLanes;
    using V = Vector<A, N>;
    V own[P::kHeads][P::kCount], factor[P::kHeads][P::kCount];
#pragma GCC unroll 4
    for (int h = 0; h < P::kHeads; ++h) {
#pragma GCC unroll 4
      for (int q = 0; q < P::kCount; ++q) {
        own[h][q] = load<N>(in.x_dst.at(row, head + h) + f + q * N);
        factor[h][q] = load<N>(in.att.at(0, head + h) + f + q * N);
      }
    }
    for (int64_t e = entries.begin; e < entries.end; ++e) {
      const T* other = in.x_src.at(batch.graph.col[e], head) + f;
      expect_piece<P>(batch, e, in.x_src, head, f);
      V sum[P::kHeads] = {};
#pragma GCC unroll 4
      for (int h = 0; h < P::kHeads; ++h) {
#pragma GCC unroll 4
        for (int q = 0; q < P::kCount; ++q) {
          const V z = own[h][q] + load<N>(other + h * in.x_src.width + q * N);
          sum[h] = multiply_add<A, N>(factor[h][q], leaky_relu(z, slope), sum[h]);
        }
      }
      add_sums<A, N, P::kHeads>(sum, score + batch.at(e) + head);
    }
  });
}

// The slopes of head h: the sums over the entries of grad[i] * leaky_relu'(z_i), which start from
// before(N, f) and are given to after(N, f, sum), N channels at a time. The sum over the entries of
// grad[i] * leaky_relu(z_i) is added to activations.
template <typename T, typename Edges, typename Before, typename After, typename Block>
inline void sum_slopes(const Block& block, int h, Heads<const T> nodes, const NodeRows<T>& others,
                       const Edges& edges, Accumulator<T> slope, BlockOf<Accumulator<T>> grad,
                       Accumulator<T>* activations, const Before& before, const After& after) {
  using A = Accumulator<T>;
  const T* own = nodes.at(block.row, block.head + h);
  for_each_part<kLanes<T>, 4>(0, others.width, [&](auto chunk, int64_t f) {
    using C = decltype(chunk);
    constexpr int N = C::kLanes;
    constexpr std::integral_constant<int, N> kLane{};
    using V = Vector<A, N>;
    V mine[C::kCount], slope_sum[C::kCount], activation_sum[C::kCount];
#pragma GCC unroll 4
    for (int q = 0; q < C::kCount; ++q) {
      mine[q] = load<N>(own + f + q * N);
      slope_sum[q] = before(kLane, f + q * N);
      activation_sum[q] = load<N>(activations + f + q * N);
    }
    for (int i = 0; i < block.count; ++i) {
      others.template expect<C::kWidth>(block, i, h, f);
      const T* other = others.at(block, i, h) + f;
      const A g = grad[h * block.stride + i];
      V z[C::kCount];
#pragma GCC unroll 4
      for (int q = 0; q < C::kCount; ++q) z[q] = mine[q] + load<N>(other + q * N);
      edges.template add_to<C>(z, block, i, h, f);
#pragma GCC unroll 4
      for (int q = 0; q < C::kCount; ++q) {
        const V sloped = z[q] > V{} ? splat<A, N>(g) : splat<A, N>(slope * g);
        slope_sum[q] += sloped;
        activation_sum[q] = multiply_add<A, N>(sloped, z[q], activation_sum[q]);
      }
    }
#pragma GCC unroll 4
    for (int q = 0; q < C::kCount; ++q) {
      after(kLane, f + q * N, slope_sum[q]);
      store<N>(activations + f + q * N, activation_sum[q]);
    }
  });
}

// att times the slopes of a row. One without entries has none, whatever att is: NaN * 0 is NaN.
template <int N, typename T>
inline Vector<Accumulator<T>, N> through_att(bool empty, const T* att,
                                             const Accumulator<T>* slopes) {
  return empty ? Vector<Accumulator<T>, N>{} : load<N>(att) * load<N>(slopes);
}

// The slopes of a block of one head, added to those in memory.
template <typename T, typename Edges>
inline void add_slopes(const EdgeBlock& block, Heads<const T> nodes, const NodeRows<T>& others,
                       const Edges& edges, Accumulator<T> slope, BlockOf<Accumulator<T>> grad,
                       Accumulator<T>* activations, Accumulator<T>* slopes) {
  sum_slopes<T>(
      block, 0, nodes, others, edges, slope, grad, activations,
      [&](auto lanes, int64_t f) { return load<decltype(lanes)::value>(slopes + f); },
      [&](auto lanes, int64_t f, auto sum) { store<decltype(lanes)::value>(slopes + f, sum); });
}

// The gradients that head h of a node gets as a source: the sums over the entries of weight[i] *
// grad_i as a value, and of score[i] * leaky_relu'(z_i), which start from before(N, f) and
// before(N, width + f) and are given to after(N, f, values, slopes), N channels at a time.
template <typename T, typename Edges, typename Before, typename After, typename Block>
inline void sum_gradients(const Block& block, int h, const Gatv2Inputs<T>& in, Heads<const T> grad,
                          const Edges& edges, Accumulator<T> slope,
                          const EdgeGradients<Accumulator<T>>& given, const Before& before,
                          const After& after) {
  using A = Accumulator<T>;
  const NodeRows<T> gradients(grad), others(in.x_dst);
  const T* own = in.x_src.at(block.row, block.head + h);
  for_each_part<kLanes<T>, 4>(0, grad.width, [&](auto chunk, int64_t f) {
    using C = decltype(chunk);
    constexpr int N = C::kLanes;
    constexpr std::integral_constant<int, N> kLane{};
    using V = Vector<A, N>;
    V mine[C::kCount], values[C::kCount], slopes[C::kCount];
#pragma GCC unroll 4
    for (int q = 0; q < C::kCount; ++q) {
      mine[q] = load<N>(own + f + q * N);
      values[q] = before(kLane, f + q * N);
      slopes[q] = before(kLane, grad.width + f + q * N);
    }
    for (int i = 0; i < block.count; ++i) {
      gradients.template expect<C::kWidth>(block, i, h, f);
      others.template expect<C::kWidth>(block, i, h, f);
      const T* gradient = gradients.at(block, i, h) + f;
      const T* other = others.at(block, i, h) + f;
      const V weight = splat<A, N>(given.weight[h * block.stride + i]);
      const A g = given.score[h * block.stride + i];
      V z[C::kCount];
#pragma GCC unroll 4
      for (int q = 0; q < C::kCount; ++q) z[q] = mine[q] + load<N>(other + q * N);
      edges.template add_to<C>(z, block, i, h, f);
#pragma GCC unroll 4
      for (int q = 0; q < C::kCount; ++q) {
        values[q] = multiply_add<A, N>(weight, load<N>(gradient + q * N), values[q]);
        slopes[q] += z[q] > V{} ? splat<A, N>(g) : splat<A, N>(slope * g);
      }
    }
#pragma GCC unroll 4
    for (int q = 0; q < C::kCount; ++q) after(kLane, f + q * N, values[q], slopes[q]);
  });
}

// grad_edge += weight_edge grad_z_i of each entry, and grad_weight += edge_i grad_z_i^T over the
// block, where grad_z = grad[i] * att * leaky_relu'(z_i). Either may be null.
template <typename T>
inline void add_edge_gradients(const EdgeBlock& block, const T* own, Heads<const T> others,
                               const EdgeProjection<T>& edges, Heads<const T> att,
                               Accumulator<T> slope, BlockOf<Accumulator<T>> grad,
                               Matrix<Accumulator<T>> grad_edge, Accumulator<T>* grad_weight) {
  using A = Accumulator<T>;
  const int64_t width = others.width;
  for_each_part<kLanes<T>, 4>(0, width, [&](auto chunk, int64_t f) {
    using C = decltype(chunk);
    constexpr int N = C::kLanes;
    using V = Vector<A, N>;
    for (int i = 0; i < block.count; ++i) {
      const T* other = others.at(block.col(i), block.head) + f;
      V z[C::kCount];
      for (int q = 0; q < C::kCount; ++q) {
        z[q] = load<N>(own + f + q * N) + load<N>(other + q * N);
      }
      edges.template add_to<C>(z, block, i, 0, f);
      for (int q = 0; q < C::kCount; ++q) {
        const V scaled = grad[i] * load<N>(att.at(0, block.head) + f + q * N);
        z[q] = z[q] > V{} ? scaled : slope * scaled;
      }
      for (int64_t d = 0; d < edges.channels(); ++d) {
        const T* weight = edges.weight.at(block.head, d) + f;
        const A factor = edges.channel(block, i, d);
        A* target = grad_weight + d * width + f;
        if (grad_weight != nullptr) {
#pragma GCC unroll 4
          for (int q = 0; q < C::kCount; ++q) {
            store<N>(target + q * N, load<N>(target + q * N) + factor * z[q]);
          }
        }
        if (grad_edge.data == nullptr) continue;
        V sum{};
#pragma GCC unroll 4
        for (int q = 0; q < C::kCount; ++q) sum += load<N>(weight + q * N) * z[q];
        grad_edge.row(block.edge(i))[d] += sum_of<A, N>(sum);
      }
    }
  });
}

template <typename T>
struct Scores {
  using A = Accumulator<T>;

  Gatv2Inputs<T> in;
  A slope;

  FASTGRAPH_INLINE void expect_row(int64_t row) const { prefetch_node(in.x_dst, row); }

  bool knows_batches() const { return in.edge.width == 0; }
  void of_batch(const RowBatch& batch, A* score) const {
    std::fill_n(score, batch.size(), A{0});
    batch.for_each_row([&](int64_t row, EntryRange entries, int64_t) {
      add_scores<T>(batch, row, entries, in, slope, score);
    });
  }

  template <typename Block>
  BlockOf<A> operator()(const Block& block) const {
    return with_edges<T>(in, [&](const auto& edges) {
      return additive_scores<false, T>(block, in.x_dst, NodeRows<T>(in.x_src), edges, in.att,
                                       slope);
    });
  }
};

// Gradients of x_dst, att, edge and weight_edge; state holds the sums of slopes, of activations and
// those for weight_edge.
template <typename T>
struct BackwardDst : DestinationSoftmax<T, BackwardDst<T>> {
  using A = Accumulator<T>;

  Scores<T> scores;
  Result<T> grad_dst;
  Matrix<A> grad_edge;
  // [slots, heads, (1 + channels of edges) * width]: of att, and of weight_edge if it is wanted.
  Heads<A> sums;

  FASTGRAPH_INLINE void expect_row(int64_t row) const {
    prefetch_node(this->grad, row);
    scores.expect_row(row);
  }

  // Both dot products in one loop, where there are registers for it: elsewhere it is 30 % slower.
  template <typename Block>
  Dots<A> find_dots(const Block& block) const {
    constexpr bool kTogether = kVectorRegisters >= 32;
    const Gatv2Inputs<T>& in = scores.in;
    BlockOf<A> product{};
    const BlockOf<A> score = with_edges<T>(in, [&](const auto& edges) {
      return additive_scores<kTogether, T>(block, in.x_dst, NodeRows<T>(in.x_src), edges, in.att,
                                           scores.slope, this->grad, &product);
    });
    if constexpr (kTogether) {
      return {score, product};
    } else {
      return {score, dots<T>(block, this->grad, 0, NodeRows<T>::seen_before(in.x_src))};
    }
  }

  bool knows_few() const { return scores.in.edge.width == 0; }
  void absorb_few(const SharedBlock& block, int64_t slot, A*) const {
    const Gatv2Inputs<T>& in = scores.in;
    const auto grads = this->gradients_of_few(block, find_dots(block));
    this->leave(block, grads.weight, grads.score);
    for (int h = 0; h < block.heads; ++h) {
      const int64_t head = block.head + h;
      const ResultRow<T> target = grad_dst.row(block.row, head);
      sum_slopes<T>(block, h, in.x_dst, NodeRows<T>::seen_before(in.x_src), NoEdges<T>{},
                    scores.slope, grads.score, sums.at(slot, head), Zeros<A>{},
                    [&](auto lanes, int64_t f, auto slopes) {
                      constexpr int N = decltype(lanes)::value;
                      target.template store<N>(f, load<N>(in.att.at(0, head) + f) * slopes);
                    });
    }
  }

  void absorb(const EdgeBlock& block, const A* buffer, A* state) const {
    const Gatv2Inputs<T>& in = scores.in;
    const auto grads = this->score_gradients(block, buffer);
    this->leave(block, this->weights(block, buffer), grads);
    const int64_t width = in.x_src.width;
    with_edges<T>(in, [&](const auto& edges) {
      add_slopes<T>(block, in.x_dst, NodeRows<T>::seen_before(in.x_src), edges, scores.slope, grads,
                    state + width, state);
    });
    A* const of_weight = sums.width > width ? state + 2 * width : nullptr;
    if (grad_edge.data != nullptr || of_weight != nullptr) {
      const T* own = in.x_dst.at(block.row, block.head);
      add_edge_gradients<T>(block, own, in.x_src, {in.edge, in.weight_edge}, in.att, scores.slope,
                            grads, grad_edge, of_weight);
    }
  }

  void finish(int64_t row, int64_t head, bool empty, int64_t slot, const A* state) const {
    const int64_t width = scores.in.att.width;
    const T* att = scores.in.att.at(0, head);
    const ResultRow<T> target = grad_dst.row(row, head);
    for_each_part<kLanes<T>, 1>(0, width, [&](auto chunk, int64_t f) {
      constexpr int N = decltype(chunk)::kLanes;
      target.template store<N>(f, through_att<N>(empty, att + f, state + f));
    });
    A* sum = sums.at(slot, head);
    for_each_part<kLanes<T>, 1>(0, sums.width, [&](auto chunk, int64_t f) {
      constexpr int N = decltype(chunk)::kLanes;
      store<N>(sum + f, load<N>(sum + f) + load<N>(state + width + f));
    });
  }
};

// The gradient of x_src, along the transpose; state holds the sums of gradients as a value and of
// slopes.
template <typename T>
struct BackwardSrc : SourceSoftmax<T> {
  using A = Accumulator<T>;

  Scores<T> scores;
  Result<T> grad_src;

  FASTGRAPH_INLINE void expect_row(int64_t row) const { prefetch_node(scores.in.x_src, row); }

  bool knows_few() const { return true; }
  void absorb_few(const SharedBlock& block, int64_t, A*) const {
    const Gatv2Inputs<T>& in = scores.in;
    const auto grads = this->gradients(block);
    for (int h = 0; h < block.heads; ++h) {
      const T* att = in.att.at(0, block.head + h);
      const ResultRow<T> target = grad_src.row(block.row, block.head + h);
      with_edges<T>(in, [&](const auto& edges) {
        sum_gradients<T>(block, h, in, this->grad, edges, scores.slope, grads, Zeros<A>{},
                         [&](auto lanes, int64_t f, auto values, auto slopes) {
                           constexpr int N = decltype(lanes)::value;
                           target.template store<N>(f, values + load<N>(att + f) * slopes);
                         });
      });
    }
  }

  void absorb(const EdgeBlock& block, A*, A* state) const {
    const auto grads = this->gradients(block);
    A* slopes = state + this->grad.width;
    with_edges<T>(scores.in, [&](const auto& edges) {
      sum_gradients<T>(
          block, 0, scores.in, this->grad, edges, scores.slope, grads,
          [&](auto lanes, int64_t f) { return load<decltype(lanes)::value>(state + f); },
          [&](auto lanes, int64_t f, auto value_sums, auto slope_sums) {
            constexpr int N = decltype(lanes)::value;
            store<N>(state + f, value_sums);
            store<N>(slopes + f, slope_sums);
          });
    });
  }

  void finish(int64_t row, int64_t head, bool empty, int64_t, const A* state) const {
    const int64_t width = scores.in.att.width;
    const T* att = scores.in.att.at(0, head);
    const ResultRow<T> target = grad_src.row(row, head);
    for_each_part<kLanes<T>, 1>(0, width, [&](auto chunk, int64_t f) {
      constexpr int N = decltype(chunk)::kLanes;
      const auto through_score = through_att<N>(empty, att + f, state + width + f);
      target.template store<N>(f, load<N>(state + f) + through_score);
    });
  }
};

}  // namespace

template <typename T>
void gatv2(const OrderedCsr& graph, const Gatv2Inputs<T>& in, double slope, Dropout dropout,
           const SoftmaxOutputs<T>& outputs) {
  const Scores<T> scores{in, static_cast<Accumulator<T>>(slope)};
  const EdgeRows<T> no_edges(Matrix<const T>{});
  run_forward<T, Scores<T>>(
      graph, (1 + in.edge.width) * in.x_src.width,
      {scores, NodeRows<T>::seen_before(in.x_src), no_edges, dropout, outputs});
}

template <typename T>
void gatv2_backward_dst(const OrderedCsr& graph, const Gatv2Inputs<T>& in, double slope,
                        Dropout dropout, const SoftmaxGradients<T>& given, Accumulator<T>* between,
                        Heads<T> grad_dst, Heads<T> grad_att, Matrix<Accumulator<T>> grad_edge,
                        Heads<T> grad_weight_edge) {
  using A = Accumulator<T>;
  const Schedule schedule = make_schedule(graph);
  const int64_t width = in.att.width, heads = in.att.heads, slots = num_slots(schedule);
  const int64_t num_sums = (1 + (grad_weight_edge.data == nullptr ? 0 : in.edge.width)) * width;
  const auto sums = scratch<A>(slots * heads * num_sums);
  std::fill(sums.get(), sums.get() + slots * heads * num_sums, A{0});
  const BackwardDst<T> pass{{{width + num_sums}, given, between, dropout},
                            {in, static_cast<A>(slope)},
                            Result<T>(grad_dst),
                            grad_edge,
                            {sums.get(), slots, heads, num_sums}};
  run_destination_pass<T>(graph, schedule, heads, width + num_sums, pass);
  const int64_t of_edges = num_sums - width;
  for (int64_t head = 0; head < heads; ++head) {
    const A* own = &sums[head * num_sums];
    sum_slots<T>(own, slots, heads * num_sums, width, grad_att.at(0, head));
    sum_slots<T>(own + width, slots, heads * num_sums, of_edges, grad_weight_edge.at(head, 0));
  }
}

template <typename T>
void gatv2_backward_src(const OrderedCsr& transpose, const Gatv2Inputs<T>& in, double slope,
                        Dropout, const SoftmaxGradients<T>& given, const Accumulator<T>* between,
                        Heads<T> grad_src) {
  using A = Accumulator<T>;
  const int64_t width = in.att.width;
  const BackwardSrc<T> pass{
      {{2 * width}, given.grad, between}, {in, static_cast<A>(slope)}, Result<T>(grad_src)};
  const int64_t work = (2 + in.edge.width) * width;
  run_pass<A>(transpose, make_schedule(transpose), in.att.heads, work, pass);
}

FASTGRAPH_INSTANTIATE(gatv2)
FASTGRAPH_INSTANTIATE(gatv2_backward_dst)
FASTGRAPH_INSTANTIATE(gatv2_backward_src)

}  // namespace fastgraph
