// Additive attention: the gradient of x_src, which is summed up along the transpose.
#include "cpu/gatv2.h"

namespace fastgraph {
namespace {

// Where z is above 0: found again from the features of both nodes.
template <typename T>
struct SumsOfNodes {
  using A = Accumulator<T>;

  static constexpr bool kGapless = true;  // heads stand side by side

  Heads<const T> x_src, x_dst;

  template <int N>
  FASTGRAPH_INLINE Vector<A, N> of_row(int64_t row, int64_t head, int64_t f) const {
    return load<N>(x_src.at(row, head) + f);
  }
  template <int N>
  FASTGRAPH_INLINE Vector<Bits<A>, N> positive(Vector<A, N> own, const Csr& graph, int64_t entry,
                                               int64_t head, int64_t f) const {
    return own + load<N>(x_dst.at(graph.col[entry], head) + f) > Vector<A, N>{};
  }
  template <int kWidth>
  FASTGRAPH_INLINE void expect(const Entries& block, int i, int h, int64_t f) const {
    NodeRows<T>(x_dst).template expect<kWidth>(block, i, h, f);
  }
  template <typename P>
  FASTGRAPH_INLINE void expect_for_piece(const RowBatch& batch, int64_t e, int64_t head,
                                         int64_t f) const {
    expect_piece<P>(batch, e, x_dst, head, f);
  }
};

// The same where edges add to z, as the pass over destinations has left it: so that edges need not
// be projected again.
template <typename T>
struct SignsOfEdges {
  using A = Accumulator<T>;

  static constexpr bool kGapless = false;  // signs of a head fill whole numbers

  Signs signs;

  template <int N>
  FASTGRAPH_INLINE Vector<A, N> of_row(int64_t, int64_t, int64_t) const {
    return Vector<A, N>{};
  }
  template <int N>
  FASTGRAPH_INLINE Vector<Bits<A>, N> positive(Vector<A, N>, const Csr& graph, int64_t entry,
                                               int64_t head, int64_t f) const {
    return signs_of<A, N>(signs.at(graph.edge(entry), head), f);
  }
  template <int kWidth>
  FASTGRAPH_INLINE void expect(const Entries& block, int i, int h, int64_t f) const {
    if (f == 0) ask_for(block.graph, block.entry + i + kAhead, block.head + h);
  }
  template <typename P>
  FASTGRAPH_INLINE void expect_for_piece(const RowBatch& batch, int64_t e, int64_t head,
                                         int64_t f) const {
    if (f == 0) ask_for(batch.graph, e + kAhead, head);
  }
  FASTGRAPH_INLINE void ask_for(const Csr& graph, int64_t entry, int64_t head) const {
    if (entry < graph.num_entries) __builtin_prefetch(signs.at(graph.edge(entry), head));
  }
};

// The gradients that head h of a node gets as a source: the sums over the entries of weight[i] *
// grad_i as a value, and of score[i] * leaky_relu'(z_i), which start from before(N, f) and
// before(N, width + f) and are given to after(N, f, values, slopes), N channels at a time.
template <typename T, typename Sums, typename Before, typename After, typename Block>
inline void sum_gradients(const Block& block, int h, Heads<const T> grad, const Sums& sums,
                          Accumulator<T> slope, const EdgeGradients<Accumulator<T>>& given,
                          const Before& before, const After& after) {
  using A = Accumulator<T>;
  const NodeRows<T> gradients(grad);
  for_each_part<kLanes<T>, 4>(0, grad.width, [&](auto chunk, int64_t f) {
    using C = decltype(chunk);
    constexpr int N = C::kLanes;
    constexpr std::integral_constant<int, N> kLane{};
    using V = Vector<A, N>;
    V own[C::kCount], values[C::kCount], slopes[C::kCount];
#pragma GCC unroll 4
    for (int q = 0; q < C::kCount; ++q) {
      own[q] = sums.template of_row<N>(block.row, block.head + h, f + q * N);
      values[q] = before(kLane, f + q * N);
      slopes[q] = before(kLane, grad.width + f + q * N);
    }
    for (int i = 0; i < block.count; ++i) {
      gradients.template expect<C::kWidth>(block, i, h, f);
      sums.template expect<C::kWidth>(block, i, h, f);
      const T* gradient = gradients.at(block, i, h) + f;
      const V weight = splat<A, N>(given.weight[h * block.stride + i]);
      const A g = given.score[h * block.stride + i];
      const V up = splat<A, N>(g), down = splat<A, N>(slope * g);
#pragma GCC unroll 4
      for (int q = 0; q < C::kCount; ++q) {
        values[q] = multiply_add<A, N>(weight, load<N>(gradient + q * N), values[q]);
        slopes[q] += sums.template positive<N>(own[q], block.graph, block.entry + i, block.head + h,
                                               f + q * N)
                         ? up
                         : down;
      }
    }
#pragma GCC unroll 4
    for (int q = 0; q < C::kCount; ++q) after(kLane, f + q * N, values[q], slopes[q]);
  });
}

// The gradients that a row of a batch gets as a source, as sum_gradients() has them: given to
// after(N, head, f, values, slopes), N channels at a time.
template <typename T, typename Sums, typename After>
inline void sum_gradients(const RowBatch& batch, int64_t row, EntryRange entries,
                          Heads<const T> grad, const Sums& sums, Accumulator<T> slope,
                          const Accumulator<T>* weights, const Accumulator<T>* scores,
                          const After& after) {
  using A = Accumulator<T>;
  const int64_t heads = grad.heads, width = grad.width;
  for_each_piece<T>(heads, width, Sums::kGapless, [&](auto piece, int64_t head, int64_t f) {
    using P = decltype(piece);
    constexpr int N = P::kLanes;
    constexpr std::integral_constant<int, N> kLane{};
    using V = Vector<A, N>;
    V own[P::kVectors][P::kCount], values[P::kVectors][P::kCount] = {};
    V slopes[P::kVectors][P::kCount] = {};
#pragma GCC unroll 4
    for (int h = 0; h < P::kVectors; ++h) {
#pragma GCC unroll 4
      for (int q = 0; q < P::kCount; ++q) {
        own[h][q] = sums.template of_row<N>(row, head + P::first_head(h), f + q * N);
      }
    }
    for (int64_t e = entries.begin; e < entries.end; ++e) {
      const T* gradient = grad.at(batch.graph.col[e], head) + f;
      const int64_t at = batch.at(e) + head;
      expect_piece<P>(batch, e, grad, head, f);
      sums.template expect_for_piece<P>(batch, e, head, f);
#pragma GCC unroll 4
      for (int h = 0; h < P::kVectors; ++h) {
        const int64_t first = P::first_head(h);
        const V weight = of_heads<P>(weights + at + first);
        const V up = of_heads<P>(scores + at + first), down = slope * up;
#pragma GCC unroll 4
        for (int q = 0; q < P::kCount; ++q) {
          const V given = load<N>(gradient + first * width + q * N);
          values[h][q] = multiply_add<A, N>(weight, given, values[h][q]);
          slopes[h][q] +=
              sums.template positive<N>(own[h][q], batch.graph, e, head + first, f + q * N) ? up
                                                                                            : down;
        }
      }
    }
#pragma GCC unroll 4
    for (int h = 0; h < P::kVectors; ++h) {
#pragma GCC unroll 4
      for (int q = 0; q < P::kCount; ++q) {
        after(kLane, head + P::first_head(h), f + q * N, values[h][q], slopes[h][q]);
      }
    }
  });
}

// The gradient of x_src, along the transpose; state holds the sums of gradients as a value and of
// slopes.
template <typename T, typename Sums>
struct BackwardSrc : SourceSoftmax<T> {
  using A = Accumulator<T>;

  Heads<const T> att;
  A slope;
  Sums sums;
  Result<T> grad_src;

  int64_t longest_batched_row() const {
    return fastgraph::longest_batched_row(att.heads, att.width);
  }
  void absorb_batch(const RowBatch& batch, int64_t) const {
    BatchValues<A> weight(batch), score(batch);
    this->gradients_of_batch(batch, weight.data, score.data);
    batch.for_each_row([&](int64_t row, EntryRange entries, int64_t) {
      sum_gradients<T>(batch, row, entries, this->grad, sums, slope, weight.data, score.data,
                       [&](auto lanes, int64_t head, int64_t f, auto values, auto slopes) {
                         constexpr int N = decltype(lanes)::value;
                         using V = Vector<A, N>;
                         const V through_score = load<N>(att.at(0, head) + f) * slopes;
                         grad_src.row(row, head).template store<N>(
                             f, values + (entries.empty() ? V{} : through_score));
                       });
    });
  }

  bool knows_few() const { return true; }
  void absorb_few(const SharedBlock& block, int64_t, A*) const {
    const auto grads = this->gradients(block);
    for (int h = 0; h < block.heads; ++h) {
      const T* factor = att.at(0, block.head + h);
      const ResultRow<T> target = grad_src.row(block.row, block.head + h);
      sum_gradients<T>(block, h, this->grad, sums, slope, grads, Zeros<A>{},
                       [&](auto lanes, int64_t f, auto values, auto slopes) {
                         constexpr int N = decltype(lanes)::value;
                         target.template store<N>(f, values + load<N>(factor + f) * slopes);
                       });
    }
  }

  void absorb(const EdgeBlock& block, A*, A* state) const {
    A* slopes = state + this->grad.width;
    sum_gradients<T>(
        block, 0, this->grad, sums, slope, this->gradients(block),
        [&](auto lanes, int64_t f) { return load<decltype(lanes)::value>(state + f); },
        [&](auto lanes, int64_t f, auto value_sums, auto slope_sums) {
          constexpr int N = decltype(lanes)::value;
          store<N>(state + f, value_sums);
          store<N>(slopes + f, slope_sums);
        });
  }

  void finish(int64_t row, int64_t head, bool empty, int64_t, const A* state) const {
    const T* factor = att.at(0, head);
    const ResultRow<T> target = grad_src.row(row, head);
    for_each_part<kLanes<T>, 1>(0, att.width, [&](auto chunk, int64_t f) {
      constexpr int N = decltype(chunk)::kLanes;
      const auto through_score = through_att<N>(empty, factor + f, state + att.width + f);
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
  const auto run = [&](auto sums) {
    const BackwardSrc<T, decltype(sums)> pass{{{2 * width}, given.grad, between},
                                              in.att,
                                              static_cast<A>(slope),
                                              sums,
                                              Result<T>(grad_src)};
    run_pass<A>(transpose, make_schedule(transpose), in.att.heads, 2 * width, pass);
  };
  if (in.edge.width > 0) {
    run(SignsOfEdges<T>{signs_behind(between, transpose, in.att)});
  } else {
    run(SumsOfNodes<T>{in.x_src, in.x_dst});
  }
}

FASTGRAPH_INSTANTIATE(gatv2_backward_src)

}  // namespace fastgraph
