// Attention from one score for each node and head (Velickovic et al., Graph attention networks,
// 2018): the score of an entry is leaky_relu(score_src[col] + score_dst[row] + score_edge[edge]).
#include <algorithm>

#include "cpu/gat_panels.h"
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

// The first backward pass, along the transpose: the gradient of x, and from the rows gathered for
// it the product <grad, x> of each entry and head. The weights are computed again from the
// statistics.
template <typename T>
struct ValueGradients : RowSums<Accumulator<T>>, SoftmaxGradients<T> {
  using A = Accumulator<T>;

  Dropout dropout;
  GatInputs<T> in;
  A slope;
  Result<T> grad_x;
  Matrix<A> products;  // written

  FASTGRAPH_INLINE void expect_row(int64_t row) const { prefetch_node(in.x, row); }

  // What destinations have and what is left for them is scattered. Asks for it as for scores.
  FASTGRAPH_INLINE void expect_destinations(const Entries& block) const {
    const int64_t begin = block.entry + kBlock;
    const int64_t end = std::min(begin + block.count, block.graph.num_entries);
    for (int64_t entry = begin; entry < end; ++entry) {
      __builtin_prefetch(this->stats.at(block.graph.col[entry], 0));
      __builtin_prefetch(products.row(block.graph.edge(entry)), 1);
    }
  }

  template <typename Block>
  BlockOf<A> weights(const Block& block) const {
    if (block.head == 0) expect_destinations(block);
    const auto z = score_sums<T>(block, in.score_src, in.score_dst, in.score_edge);
    BlockOf<A> largest{}, inverse_sum{};
    for_each_lane(block, [&](int lane, int i, int h) {
      const A* of = this->stats.at(block.col(i), block.head + h);
      largest[lane] = of[0];
      inverse_sum[lane] = of[1];
    });
    return softmax_of<A>(leaky_relu<A>(z, slope), largest, inverse_sum) * kept<A>(dropout, block);
  }

  void absorb(const EdgeBlock& block, A*, A* state) const {
    const BlockOf<A> found = sum_rows_and_dots<T>(
        block, in.x, weights(block), NodeRows<T>(this->grad),
        [&](auto lanes, int, int64_t f) { return load<decltype(lanes)::value>(state + f); },
        [&](auto lanes, int, int64_t f, auto sum) {
          store<decltype(lanes)::value>(state + f, sum);
        });
    store_edges<A>(block, found, products);
  }

  bool knows_few() const { return true; }
  void absorb_few(const SharedBlock& block, int64_t, A*) const {
    const BlockOf<A> found = sum_rows_and_dots<T>(
        block, in.x, weights(block), NodeRows<T>(this->grad),
        [&](auto lanes, int, int64_t) { return Vector<A, decltype(lanes)::value>{}; },
        [&](auto lanes, int h, int64_t f, auto sum) {
          grad_x.row(block.row, block.head + h).template store<decltype(lanes)::value>(f, sum);
        });
    store_edges<A>(block, found, products);
  }

  void finish(int64_t row, int64_t head, bool, int64_t, const A* state) const {
    const ResultRow<T> target = grad_x.row(row, head);
    for_each_part<kLanes<T>, 1>(0, this->size, [&](auto chunk, int64_t f) {
      constexpr int N = decltype(chunk)::kLanes;
      target.template store<N>(f, load<N>(state + f));
    });
  }
};

// The second, over destinations: the gradients of score_dst and score_edge. In `left`, which is
// what stands between the passes, it finds the products, and leaves the gradients of z instead.
template <typename T>
struct ScoreGradients : DestinationSoftmax<T, ScoreGradients<T>, 1> {
  using A = Accumulator<T>;

  GatInputs<T> in;
  A slope;
  Matrix<T> grad_score_dst;
  Matrix<T> grad_score_edge;
  Matrix<A> left;

  FASTGRAPH_INLINE void expect_row(int64_t) const {}

  template <typename Block>
  BlockOf<A> sums(const Block& block) const {
    return score_sums<T>(block, in.score_dst, in.score_src, in.score_edge);
  }
  template <typename Block>
  Dots<A> dots_of(const Block& block, BlockOf<A> z) const {
    return {leaky_relu<A>(z, slope), load_edges<A>(block, {left.data, left.rows, left.width})};
  }
  Dots<A> find_dots(const EdgeBlock& block) const { return dots_of(block, sums(block)); }

  template <typename Block>
  void leave(const Block& block, BlockOf<A> grad_z) const {
    store_edges<T>(block, grad_z, grad_score_edge);
    store_edges<A>(block, grad_z, left);
  }

  bool knows_few() const { return true; }
  void absorb_few(const SharedBlock& block, int64_t, A*) const {
    const auto z = sums(block);
    const auto score = this->gradients_of_few(block, dots_of(block, z)).score;
    const auto grad_z = through_leaky_relu<A>(z, slope, score);
    leave(block, grad_z);
    store_sum_of_entries<T>(block, grad_z, grad_score_dst);
  }

  void absorb(const EdgeBlock& block, const A* buffer, A* state) const {
    const auto score = this->score_gradients(block, buffer);
    const auto grad_z = through_leaky_relu<A>(sums(block), slope, score);
    leave(block, grad_z);
    state[0] += sum_of<A, kBlock>(grad_z);
  }

  void finish(int64_t row, int64_t head, bool, int64_t, const A* state) const {
    store_one(grad_score_dst.row(row) + head, state[0]);
  }
};

// The third, along the transpose: the gradient of score_src, from those of z.
template <typename T>
struct SourceScoreGradients : RowSums<Accumulator<T>> {
  using A = Accumulator<T>;

  Matrix<const A> grad_z;  // [edges, heads]
  Matrix<T> grad_score_src;

  // Asks for what entries of a block further on will read.
  FASTGRAPH_INLINE void expect_reads(const Entries& block) const {
    const int64_t begin = block.entry + kBlock;
    const int64_t end = std::min(begin + block.count, block.graph.num_entries);
    for (int64_t entry = begin; entry < end; ++entry) {
      __builtin_prefetch(grad_z.row(block.graph.edge(entry)));
    }
  }
  template <typename Block>
  BlockOf<A> gradients(const Block& block) const {
    if (block.head == 0) expect_reads(block);
    return load_edges<A>(block, grad_z);
  }

  void absorb(const EdgeBlock& block, A*, A* state) const {
    state[0] += sum_of<A, kBlock>(gradients(block));
  }

  bool knows_few() const { return true; }
  void absorb_few(const SharedBlock& block, int64_t, A*) const {
    store_sum_of_entries<T>(block, gradients(block), grad_score_src);
  }

  void finish(int64_t row, int64_t head, bool, int64_t, const A* state) const {
    store_one(grad_score_src.row(row) + head, state[0]);
  }
};

}  // namespace

template <typename T>
void gat(const OrderedCsr& graph, const GatInputs<T>& in, double slope, Dropout dropout,
         const SoftmaxOutputs<T>& outputs) {
  const bool from_nodes = in.score_edge.data == nullptr && outputs.alpha.data == nullptr;
  if (const int64_t channels = from_nodes ? channels_of_head(graph, in.x) : 0; channels > 0) {
    return gat_by_panels<T>(graph, in, slope, dropout, outputs, channels);
  }
  const Scores<T> scores{in, static_cast<Accumulator<T>>(slope)};
  const EdgeRows<T> no_edges(Matrix<const T>{});
  run_forward<T, Scores<T>>(graph, in.x.width,
                            {scores, NodeRows<T>(in.x), no_edges, dropout, outputs});
}

// What passes from one pass to the next is a number for each edge and head.
template <typename T>
void gat_backward(const OrderedCsr& graph, const OrderedCsr& transpose, const GatInputs<T>& in,
                  double slope, Dropout dropout, const SoftmaxGradients<T>& given, Heads<T> grad_x,
                  Matrix<T> grad_score_src, Matrix<T> grad_score_dst, Matrix<T> grad_score_edge) {
  using A = Accumulator<T>;
  const bool by_edge = in.score_edge.data != nullptr || given.grad_alpha.data != nullptr;
  const int64_t channels =
      by_edge ? 0
              : std::min(channels_of_head(graph, in.x), channels_of_head(transpose, given.grad));
  if (channels > 0) {
    return gat_backward_by_panels<T>(graph, transpose, in, slope, dropout, given, grad_x,
                                     grad_score_src, grad_score_dst, channels);
  }
  const int64_t edges = graph.num_entries, heads = in.x.heads, width = in.x.width;
  const auto between = scratch<A>(edges * heads);
  prefer_huge_pages(between.get(), edges * heads * static_cast<int64_t>(sizeof(A)));
  const Schedule by_source = make_schedule(transpose);
  const A negative_slope = static_cast<A>(slope);
  const Matrix<A> left{between.get(), edges, heads};
  run_pass<A>(
      transpose, by_source, heads, 2 * width,
      ValueGradients<T>{{width}, given, dropout, in, negative_slope, Result<T>(grad_x), left});
  run_destination_pass<T>(graph, make_schedule(graph), heads, 1,
                          ScoreGradients<T>{{{1}, given, between.get(), dropout},
                                            in,
                                            negative_slope,
                                            grad_score_dst,
                                            grad_score_edge,
                                            left});
  run_pass<A>(transpose, by_source, heads, 1,
              SourceScoreGradients<T>{{1}, {between.get(), edges, heads}, grad_score_src});
}

FASTGRAPH_INSTANTIATE(gat)
FASTGRAPH_INSTANTIATE(gat_backward)

}  // namespace fastgraph
