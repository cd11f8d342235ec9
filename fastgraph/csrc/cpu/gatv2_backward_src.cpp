// Additive attention: the gradient of x_src, which is summed up along the transpose.
#include "cpu/gatv2.h"

namespace fastgraph {
namespace {

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
    const auto of_edges = edges.template of_block<C>(block, h, f);
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
      of_edges.add_to(z, i);
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

// The gradients that a row of a batch gets as a source, without features of edges, as
// sum_gradients() has them: given to after(N, head, f, values, slopes), N channels at a time.
template <typename T, typename After>
inline void sum_gradients(const RowBatch& batch, int64_t row, EntryRange entries,
                          const Gatv2Inputs<T>& in, Heads<const T> grad, Accumulator<T> slope,
                          const Accumulator<T>* weights, const Accumulator<T>* scores,
                          const After& after) {
  using A = Accumulator<T>;
  for_each_piece(grad, [&](auto piece, int64_t head, int64_t f) {
    using P = decltype(piece);
    constexpr int N = P::kLanes;
    constexpr std::integral_constant<int, N> kLane{};
    using V = Vector<A, N>;
    const int64_t width = grad.width;
    V own[P::kHeads][P::kCount], values[P::kHeads][P::kCount] = {};
    V slopes[P::kHeads][P::kCount] = {};
#pragma GCC unroll 4
    for (int h = 0; h < P::kHeads; ++h) {
#pragma GCC unroll 4
      for (int q = 0; q < P::kCount; ++q) {
        own[h][q] = load<N>(in.x_src.at(row, head + h) + f + q * N);
      }
    }
    for (int64_t e = entries.begin; e < entries.end; ++e) {
      const T* gradient = grad.at(batch.graph.col[e], head) + f;
      const T* other = in.x_dst.at(batch.graph.col[e], head) + f;
      const int64_t at = batch.at(e) + head;
      expect_piece<P>(batch, e, grad, head, f);
      expect_piece<P>(batch, e, in.x_dst, head, f);
#pragma GCC unroll 4
      for (int h = 0; h < P::kHeads; ++h) {
        const V weight = splat<A, N>(weights[at + h]);
        const V up = splat<A, N>(scores[at + h]), down = splat<A, N>(slope * scores[at + h]);
#pragma GCC unroll 4
        for (int q = 0; q < P::kCount; ++q) {
          const V z = own[h][q] + load<N>(other + h * width + q * N);
          values[h][q] =
              multiply_add<A, N>(weight, load<N>(gradient + h * width + q * N), values[h][q]);
          slopes[h][q] += z > V{} ? up : down;
        }
      }
    }
#pragma GCC unroll 4
    for (int h = 0; h < P::kHeads; ++h) {
#pragma GCC unroll 4
      for (int q = 0; q < P::kCount; ++q) {
        after(kLane, head + h, f + q * N, values[h][q], slopes[h][q]);
      }
    }
  });
}

// The gradient of x_src, along the transpose; state holds the sums of gradients as a value and of
// slopes.
template <typename T, typename Edges>
struct BackwardSrc : SourceSoftmax<T> {
  using A = Accumulator<T>;

  AdditiveScores<T, Edges> scores;
  Result<T> grad_src;

  FASTGRAPH_INLINE void expect_row(int64_t row) const { prefetch_node(scores.in.x_src, row); }

  bool knows_batches() const { return scores.in.edge.width == 0; }
  void absorb_batch(const RowBatch& batch, int64_t) const {
    const Gatv2Inputs<T>& in = scores.in;
    BatchValues<A> weight, score;
    this->gradients_of_batch(batch, weight.data, score.data);
    batch.for_each_row([&](int64_t row, EntryRange entries, int64_t) {
      sum_gradients<T>(batch, row, entries, in, this->grad, scores.slope, weight.data, score.data,
                       [&](auto lanes, int64_t head, int64_t f, auto values, auto slopes) {
                         constexpr int N = decltype(lanes)::value;
                         using V = Vector<A, N>;
                         const V through_score = load<N>(in.att.at(0, head) + f) * slopes;
                         grad_src.row(row, head).template store<N>(
                             f, values + (entries.empty() ? V{} : through_score));
                       });
    });
  }

  bool knows_few() const { return true; }
  void absorb_few(const SharedBlock& block, int64_t, A*) const {
    const Gatv2Inputs<T>& in = scores.in;
    const auto grads = this->gradients(block);
    for (int h = 0; h < block.heads; ++h) {
      const T* att = in.att.at(0, block.head + h);
      const ResultRow<T> target = grad_src.row(block.row, block.head + h);
      sum_gradients<T>(block, h, in, this->grad, scores.edges, scores.slope, grads, Zeros<A>{},
                       [&](auto lanes, int64_t f, auto values, auto slopes) {
                         constexpr int N = decltype(lanes)::value;
                         target.template store<N>(f, values + load<N>(att + f) * slopes);
                       });
    }
  }

  void absorb(const EdgeBlock& block, A*, A* state) const {
    A* slopes = state + this->grad.width;
    sum_gradients<T>(
        block, 0, scores.in, this->grad, scores.edges, scores.slope, this->gradients(block),
        [&](auto lanes, int64_t f) { return load<decltype(lanes)::value>(state + f); },
        [&](auto lanes, int64_t f, auto value_sums, auto slope_sums) {
          constexpr int N = decltype(lanes)::value;
          store<N>(state + f, value_sums);
          store<N>(slopes + f, slope_sums);
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
void gatv2_backward_src(const OrderedCsr& transpose, const Gatv2Inputs<T>& in, double slope,
                        Dropout, const SoftmaxGradients<T>& given, const Accumulator<T>* between,
                        Heads<T> grad_src) {
  using A = Accumulator<T>;
  const int64_t width = in.att.width;
  const PackedProjection<T> packed(in.weight_edge);
  with_edges<T>(in, packed.matrix(), [&](const auto& edges) {
    const BackwardSrc<T, std::decay_t<decltype(edges)>> pass{{{2 * width}, given.grad, between},
                                                             {in, static_cast<A>(slope), edges},
                                                             Result<T>(grad_src)};
    const int64_t work = (2 + in.edge.width) * width;
    run_pass<A>(transpose, make_schedule(transpose), in.att.heads, work, pass);
  });
}

FASTGRAPH_INSTANTIATE(gatv2_backward_src)

}  // namespace fastgraph
