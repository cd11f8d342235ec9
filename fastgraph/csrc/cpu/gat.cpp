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

template <typename A, int N>
inline Vector<A, N> leaky_relu_of(Vector<A, N> z, A slope) {
  return z > Vector<A, N>{} ? z : slope * z;
}

// Calls body(N, row, entry, first head, z) for the sums of a batch, N heads at a time.
template <typename T, typename Body>
FASTGRAPH_INLINE void for_each_sum(const RowBatch& batch, Matrix<const T> own,
                                   Matrix<const T> others, Matrix<const T> edges,
                                   const Body& body) {
  with_head_lanes<Accumulator<T>>(batch.heads, [&](auto lanes) {
    constexpr int N = decltype(lanes)::value;
    batch.for_each_row([&](int64_t row, EntryRange entries, int64_t) {
      for (int64_t e = entries.begin; e < entries.end; ++e) {
        const T* other = others.row(batch.graph.col[e]);
        batch.expect_after(e, [&](int64_t col, int64_t) { __builtin_prefetch(others.row(col)); });
        const T* of_edge = edges.data == nullptr ? nullptr : edges.row(batch.graph.edge(e));
        for (int64_t h = 0; h < batch.heads; h += N) {
          auto z = load<N>(own.row(row) + h) + load<N>(other + h);
          if (of_edge != nullptr) z += load<N>(of_edge + h);
          body(lanes, row, e, h, z);
        }
      }
    });
  });
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

  void of_batch(const RowBatch& batch, A* score) const {
    for_each_sum<T>(batch, in.score_dst, in.score_src, in.score_edge,
                    [&](auto lanes, int64_t, int64_t e, int64_t h, auto z) {
                      constexpr int N = decltype(lanes)::value;
                      store<N>(score + batch.at(e) + h, leaky_relu_of<A, N>(z, slope));
                    });
  }

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

  int64_t longest_batched_row() const {
    return fastgraph::longest_batched_row(in.x.heads, in.x.width);
  }
  void absorb_batch(const RowBatch& batch, int64_t) const {
    BatchValues<A> p(batch), inverse_sum(batch), found(batch);
    for_each_sum<T>(batch, in.score_src, in.score_dst, in.score_edge,
                    [&](auto lanes, int64_t, int64_t e, int64_t h, auto z) {
                      constexpr int N = decltype(lanes)::value;
                      Vector<A, N> largest, inverse;
                      if (h == 0) {
                        batch.expect_after(e, [&](int64_t col, int64_t edge) {
                          __builtin_prefetch(this->stats.at(col, 0));
                          __builtin_prefetch(products.row(edge), 1);
                        });
                      }
                      load_pairs<N>(this->stats.at(batch.graph.col[e], h), largest, inverse);
                      store<N>(p.data + batch.at(e) + h, leaky_relu_of<A, N>(z, slope) - largest);
                      store<N>(inverse_sum.data + batch.at(e) + h, inverse);
                    });
    weights_of_batch<A>(batch, inverse_sum.data, p.data);
    drop<A>(batch, dropout, p.data);
    std::fill_n(found.data, batch.size(), A{0});
    batch.for_each_row([&](int64_t row, EntryRange entries, int64_t) {
      sum_entries_and_dots<T>(batch, row, entries, in.x, p.data, this->grad, found.data,
                              [&](auto piece, int64_t head, int64_t f, auto sum) {
                                constexpr int N = decltype(piece)::kLanes;
                                grad_x.row(row, head).template store<N>(f, sum);
                              });
    });
    store_edges_of_batch<A>(batch, found.data, products);
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

  int64_t longest_batched_row() const { return fastgraph::longest_batched_row(in.x.heads, 0); }
  void absorb_batch(const RowBatch& batch, int64_t) const {
    BatchValues<A> p(batch), inverse_sum(batch), product(batch), slopes(batch);
    for_each_sum<T>(batch, in.score_dst, in.score_src, in.score_edge,
                    [&](auto lanes, int64_t row, int64_t e, int64_t h, auto z) {
                      constexpr int N = decltype(lanes)::value;
                      using V = Vector<A, N>;
                      const int64_t at = batch.at(e) + h, edge = batch.graph.edge(e);
                      V largest, inverse, found = load<N>(left.row(edge) + h);
                      load_pairs<N>(this->stats.at(row, h), largest, inverse);
                      if (this->grad_alpha.data != nullptr) {
                        found += load<N>(this->grad_alpha.row(edge) + h);
                      }
                      store<N>(p.data + at, leaky_relu_of<A, N>(z, slope) - largest);
                      store<N>(inverse_sum.data + at, inverse);
                      store<N>(product.data + at, found);
                      store<N>(slopes.data + at, z > V{} ? splat<A, N>(1) : splat<A, N>(slope));
                    });
    weights_of_batch<A>(batch, inverse_sum.data, p.data);
    drop<A>(batch, this->dropout, product.data);
    gradients_of_batch<A>(batch, this->grad_logsum, product.data, p.data);
    for (int64_t i = 0; i < batch.size(); ++i) p.data[i] *= slopes.data[i];
    store_edges_of_batch<T>(batch, p.data, grad_score_edge);
    store_edges_of_batch<A>(batch, p.data, left);
    store_sums_of_batch<T>(batch, p.data, grad_score_dst);
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

  int64_t longest_batched_row() const { return fastgraph::longest_batched_row(grad_z.width, 0); }
  void absorb_batch(const RowBatch& batch, int64_t) const {
    with_head_lanes<A>(batch.heads, [&](auto lanes) {
      constexpr int N = decltype(lanes)::value;
      batch.for_each_row([&](int64_t row, EntryRange entries, int64_t) {
        for (int64_t h = 0; h < batch.heads; h += N) {
          Vector<A, N> sum{};
          for (int64_t e = entries.begin; e < entries.end; ++e) {
            batch.expect_after(
                e, [&](int64_t, int64_t edge) { __builtin_prefetch(grad_z.row(edge) + h); });
            sum += load<N>(grad_z.row(batch.graph.edge(e)) + h);
          }
          store<N>(grad_score_src.row(row) + h, sum);
        }
      });
    });
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
  const bool of_edges = in.score_edge.data != nullptr || given.grad_alpha.data != nullptr;
  if (!of_edges && heads_pay(graph, in.x) && heads_pay(transpose, given.grad)) {
    return gat_backward_by_heads<T>(graph, transpose, in, slope, dropout, given, grad_x,
                                    grad_score_src, grad_score_dst);
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
