// Attention from one score for each node and head (Velickovic et al., Graph attention networks,
// 2018): the score of an entry is leaky_relu(score_src[col] + score_dst[row] + score_edge[edge]).
#include <algorithm>

#include "cpu/kernels.h"
#include "fastgraph/edge_blocks.h"
#include "fastgraph/edge_softmax.h"

namespace fastgraph {
namespace {

// Scores are scattered, too. Asks for those of the nodes that a block further on leads to.
template <typename T>
FASTGRAPH_INLINE void expect_scores(const Entries& block, Matrix<const T> others) {
  const int64_t begin = block.entry + kBlock;
  const int64_t end = std::min(begin + block.count, block.graph.num_entries);
  for (int64_t entry = begin; entry < end; ++entry) {
    __builtin_prefetch(others.row(block.graph.col[entry]));
  }
}

// The sums z of which the scores are leaky_relu(z); `own` is of the row's node, `others` of the
// gathered ones.
template <typename T, typename Block>
inline BlockOf<Accumulator<T>> score_sums(const Block& block, Matrix<const T> own,
                                          Matrix<const T> others, Matrix<const T> edges) {
  if (block.head == 0) expect_scores(block, others);
  BlockOf<Accumulator<T>> z = load_edges<T>(block, edges);
  const T* mine = own.row(block.row) + block.head;
  for_each_lane(block, [&](int lane, int i, int h) {
    z[lane] += load_one(mine + h) + load_one(others.row(block.col(i)) + block.head + h);
  });
  return z;
}

// The sums over a row of few entries, to its node in [nodes, heads].
template <typename T>
inline void store_sum_of_entries(const SharedBlock& block, BlockOf<Accumulator<T>> values,
                                 Matrix<T> to) {
  const auto sums = sum_of_entries<Accumulator<T>>(block, values);
  T* own = to.row(block.row) + block.head;
  for (int h = 0; h < block.heads; ++h) store_one(own + h, sums[h * block.stride]);
}

template <typename A>
inline BlockOf<A> leaky_relu(BlockOf<A> z, A slope) {
  return z > BlockOf<A>{} ? z : slope * z;
}

// grad[i] * leaky_relu'(z_i).
template <typename A>
inline BlockOf<A> through_leaky_relu(BlockOf<A> z, A slope, BlockOf<A> grad) {
  return z > BlockOf<A>{} ? grad : slope * grad;
}

template <typename T>
struct Scores {
  using A = Accumulator<T>;

  GatInputs<T> in;
  A slope;

  void expect_row(int64_t) const {}

  template <typename Block>
  BlockOf<A> operator()(const Block& block) const {
    const auto z = score_sums<T>(block, in.score_dst, in.score_src, in.score_edge);
    return leaky_relu<A>(z, slope);
  }
};

// The gradients of score_dst and score_edge.
template <typename T>
struct BackwardDst : DestinationSoftmax<T, BackwardDst<T>> {
  using A = Accumulator<T>;

  GatInputs<T> in;
  A slope;
  Matrix<T> grad_score_dst;
  Matrix<T> grad_score_edge;

  template <typename Block>
  Dots<A> dots_of(const Block& block, BlockOf<A> z) const {
    return {leaky_relu<A>(z, slope), dots<T>(block, this->grad, 0, NodeRows<T>(in.x))};
  }
  Dots<A> find_dots(const EdgeBlock& block) const {
    return dots_of(block, score_sums<T>(block, in.score_dst, in.score_src, in.score_edge));
  }

  bool knows_few() const { return true; }
  void absorb_few(const SharedBlock& block, int64_t, A*) const {
    const auto z = score_sums<T>(block, in.score_dst, in.score_src, in.score_edge);
    const auto grads = this->gradients_of_few(block, dots_of(block, z));
    const auto grad_z = through_leaky_relu<A>(z, slope, grads.score);
    store_edges<T>(block, grad_z, grad_score_edge);
    this->leave(block, grads.weight, grad_z);
    store_sum_of_entries<T>(block, grad_z, grad_score_dst);
  }

  void absorb(const EdgeBlock& block, const A* buffer, A* state) const {
    const auto z = score_sums<T>(block, in.score_dst, in.score_src, in.score_edge);
    const auto grad_z = through_leaky_relu<A>(z, slope, this->score_gradients(block, buffer));
    store_edges<T>(block, grad_z, grad_score_edge);
    this->leave(block, this->weights(block, buffer), grad_z);
    state[0] += sum_of<A, kBlock>(grad_z);
  }

  void finish(int64_t row, int64_t head, bool, int64_t, const A* state) const {
    store_one(grad_score_dst.row(row) + head, state[0]);
  }
};

// Gradients of x and score_src, along the transpose; state holds both.
template <typename T>
struct BackwardSrc : SourceSoftmax<T> {
  using A = Accumulator<T>;

  int64_t width;
  Result<T> grad_x;
  Matrix<T> grad_score_src;

  void absorb(const EdgeBlock& block, A*, A* state) const {
    const auto grads = this->gradients(block);
    add_rows<A>(block, grads.weight, NodeRows<T>(this->grad), A{1}, state);
    state[width] += sum_of<A, kBlock>(grads.score);
  }

  bool knows_few() const { return true; }
  void absorb_few(const SharedBlock& block, int64_t, A*) const {
    const auto grads = this->gradients(block);
    for (int h = 0; h < block.heads; ++h) {
      store_sum<T>(block, h, grads.weight, NodeRows<T>(this->grad), A{1},
                   grad_x.row(block.row, block.head + h));
    }
    store_sum_of_entries<T>(block, grads.score, grad_score_src);
  }

  void finish(int64_t row, int64_t head, bool, int64_t, const A* state) const {
    store_one(grad_score_src.row(row) + head, state[width]);
    const ResultRow<T> target = grad_x.row(row, head);
    for_each_part<kLanes<T>, 1>(0, width, [&](auto chunk, int64_t f) {
      constexpr int N = decltype(chunk)::kLanes;
      target.template store<N>(f, load<N>(state + f));
    });
  }
};

}  // namespace

template <typename T>
void gat(const OrderedCsr& graph, const GatInputs<T>& in, double slope, Dropout dropout,
         const SoftmaxOutputs<T>& outputs) {
  const Scores<T> scores{in, static_cast<Accumulator<T>>(slope)};
  const EdgeRows<T> no_edges(Matrix<const T>{});
  run_forward<T, Scores<T>>(graph, in.x.width,
                            {scores, NodeRows<T>(in.x), no_edges, dropout, outputs});
}

template <typename T>
void gat_backward_dst(const OrderedCsr& graph, const GatInputs<T>& in, double slope,
                      Dropout dropout, const SoftmaxGradients<T>& given, Accumulator<T>* between,
                      Matrix<T> grad_score_dst, Matrix<T> grad_score_edge) {
  const BackwardDst<T> pass{{{1}, given, between, dropout},
                            in,
                            static_cast<Accumulator<T>>(slope),
                            grad_score_dst,
                            grad_score_edge};
  run_destination_pass<T>(graph, make_schedule(graph), in.x.heads, in.x.width, pass);
}

template <typename T>
void gat_backward_src(const OrderedCsr& transpose, const GatInputs<T>& in, double, Dropout,
                      const SoftmaxGradients<T>& given, const Accumulator<T>* between,
                      Heads<T> grad_x, Matrix<T> grad_score_src) {
  const BackwardSrc<T> pass{
      {{1 + in.x.width}, given.grad, between}, in.x.width, Result<T>(grad_x), grad_score_src};
  run_pass<Accumulator<T>>(transpose, make_schedule(transpose), in.x.heads, in.x.width, pass);
}

FASTGRAPH_INSTANTIATE(gat)
FASTGRAPH_INSTANTIATE(gat_backward_dst)
FASTGRAPH_INSTANTIATE(gat_backward_src)

}  // namespace fastgraph
