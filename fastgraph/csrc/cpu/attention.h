// The passes of scaled dot-product attention that compute scores, with and without a bias of these.
#pragma once

#include <algorithm>

#include "cpu/edge_bias.h"
#include "fastgraph/attention_arguments.h"
#include "fastgraph/edge_blocks.h"
#include "fastgraph/edge_softmax.h"
#include "fastgraph/views.h"

namespace fastgraph {

// Of each file that includes this: compilers inline what a file calls once, and attention without a
// bias takes longer where one file has both.
namespace {

// <query, key> and <grad, value> of each entry of a destination, without what edges add.
template <typename T, typename Block>
inline Dots<Accumulator<T>> dots_of_pairs(const Block& block, const AttentionInputs<T>& in,
                                          Heads<const T> grad) {
  using A = Accumulator<T>;
  const NodeRows<T> keys(in.key), values(in.value);
  Dots<A> found{};
  for_each_part<kLanes<T>, 4>(0, keys.width, [&](auto chunk, int64_t f) {
    using C = decltype(chunk);
    constexpr int N = C::kLanes;
    using V = Vector<A, N>;
    V query[C::kCount], given[C::kCount], scores[kBlock], products[kBlock];
    for (int h = 0; h < block.heads; ++h) {
      const T* own = in.query.at(block.row, block.head + h) + f;
      const T* own_grad = grad.at(block.row, block.head + h) + f;
#pragma GCC unroll 4
      for (int q = 0; q < C::kCount; ++q) {
        query[q] = load<N>(own + q * N);
        given[q] = load<N>(own_grad + q * N);
      }
      for (int i = 0; i < block.count; ++i) {
        keys.template expect<C::kWidth>(block, i, h, f);
        values.template expect<C::kWidth>(block, i, h, f);
        const T* key = keys.at(block, i, h) + f;
        const T* value = values.at(block, i, h) + f;
        V score{}, product{};
#pragma GCC unroll 4
        for (int q = 0; q < C::kCount; ++q) {
          score = multiply_add<A, N>(query[q], load<N>(key + q * N), score);
          product = multiply_add<A, N>(given[q], load<N>(value + q * N), product);
        }
        scores[h * block.stride + i] = score;
        products[h * block.stride + i] = product;
      }
    }
    found.score += sums_of_block<A, N>(block, scores);
    found.product += sums_of_block<A, N>(block, products);
  });
  return found;
}

// The products of a row of a batch with what its entries have, nodes and edges.
template <typename T>
inline void add_products(const RowBatch& batch, int64_t row, EntryRange entries,
                         const Heads<const T>& own, const Heads<const T>& others,
                         const Matrix<const T>& edge, Accumulator<T>* products) {
  add_dots<T>(batch, row, entries, own, 0, NodeRows<T>(others), products);
  if (edge.width == 0) return;
  add_dots<T>(batch, row, entries, own, others.width, EdgeRows<T>(edge), products);
}

template <typename T, typename Bias>
struct Scores {
  using A = Accumulator<T>;

  AttentionInputs<T> in;
  const Bias& bias;
  A scale;

  FASTGRAPH_INLINE void expect_row(int64_t row) const { prefetch_node(in.query, row); }

  void of_batch(const RowBatch& batch, A* score) const {
    std::fill_n(score, batch.size(), A{0});
    batch.for_each_row([&](int64_t row, EntryRange entries, int64_t) {
      add_products<T>(batch, row, entries, in.query, in.key, in.edge, score);
    });
    for (int64_t i = 0; i < batch.size(); ++i) score[i] *= scale;
    bias.add_to_batch(batch, score);
  }

  template <typename Block>
  BlockOf<A> operator()(const Block& block) const {
    bias.expect(block);
    auto score = dots<T>(block, in.query, 0, NodeRows<T>(in.key));
    if (in.edge.width > 0) score += dots<T>(block, in.query, in.key.width, EdgeRows<T>(in.edge));
    return bias.added(block, scale * score);
  }
};

// The gradients of query and edge. State holds the sums for the query, and behind them those of
// edges by their weights, where these are wanted; batches leave these to who has them.
template <typename T, typename Bias>
struct BackwardDst : DestinationSoftmax<T, BackwardDst<T, Bias>> {
  using A = Accumulator<T>;

  AttentionInputs<T> in;
  const Bias& bias;
  A scale;
  Result<T> grad_query;
  Matrix<A> grad_edge;  // added to, or null
  Result<T> edge_sums;
  bool wants_sums;

  FASTGRAPH_INLINE void expect_row(int64_t row) const {
    prefetch_node(this->grad, row);
    prefetch_node(in.query, row);
  }

  template <typename Block>
  Dots<A> find_dots(const Block& block) const {
    bias.expect(block);
    auto found = dots_of_pairs<T>(block, in, this->grad);
    if (in.edge.width > 0) {
      found.score += dots<T>(block, in.query, in.key.width, EdgeRows<T>(in.edge));
      found.product += dots<T>(block, this->grad, in.key.width, EdgeRows<T>(in.edge));
    }
    found.score = bias.added(block, scale * found.score);
    return found;
  }

  int64_t longest_batched_row() const {
    return fastgraph::longest_batched_row(in.key.heads, in.key.width);
  }
  void absorb_batch(const RowBatch& batch, int64_t) const {
    BatchValues<A> p(batch), product(batch), weight(batch);
    std::fill_n(p.data, batch.size(), A{0});
    std::fill_n(product.data, batch.size(), A{0});
    batch.for_each_row([&](int64_t row, EntryRange entries, int64_t) {
      add_products<T>(batch, row, entries, in.query, in.key, in.edge, p.data);
      add_products<T>(batch, row, entries, this->grad, in.value, in.edge, product.data);
    });
    for (int64_t i = 0; i < batch.size(); ++i) p.data[i] *= scale;
    bias.add_to_batch(batch, p.data);
    this->gradients_of_scores(batch, product.data, p.data, weight.data);
    for (int64_t i = 0; i < batch.size(); ++i) p.data[i] *= scale;
    batch.for_each_row([&](int64_t row, EntryRange entries, int64_t) {
      const auto store_from = [&](int64_t first) {
        return [&, first](auto piece, int64_t head, int64_t f, auto sum) {
          grad_query.row(row, head).template store<decltype(piece)::kLanes>(first + f, sum);
        };
      };
      const bool alone = in.edge.width == 0;
      sum_entries<T>(batch, entries, p.data, NodeRows<T>(in.key), alone, store_from(0));
      if (alone) return;
      sum_entries<T>(batch, entries, p.data, EdgeRows<T>(in.edge), false, store_from(in.key.width));
      if (grad_edge.data != nullptr) {
        leave_edge_gradients(batch, row, entries, p.data, weight.data);
      }
    });
  }

  // The gradients of the edges of a row: its heads' queries by `score`, and gradients by `weight`.
  void leave_edge_gradients(const RowBatch& batch, int64_t row, EntryRange entries, const A* score,
                            const A* weight) const {
    for_each_part<kLanes<T>, 1>(0, in.edge.width, [&](auto chunk, int64_t f) {
      constexpr int N = decltype(chunk)::kLanes;
      const int64_t column = in.key.width + f;
      for (int64_t e = entries.begin; e < entries.end; ++e) {
        Vector<A, N> sum{};
        for (int64_t h = 0; h < batch.heads; ++h) {
          const int64_t at = batch.at(e) + h;
          const auto query = load<N>(in.query.at(row, h) + column);
          const auto given = load<N>(this->grad.at(row, h) + column);
          sum = multiply_add<A, N>(splat<A, N>(score[at]), query, sum);
          sum = multiply_add<A, N>(splat<A, N>(weight[at]), given, sum);
        }
        store<N>(grad_edge.row(batch.graph.edge(e)) + f, sum);
      }
    });
  }

  bool knows_few() const { return true; }
  void absorb_few(const SharedBlock& block, int64_t, A*) const {
    const auto grads = this->gradients_of_few(block, find_dots(block));
    this->leave(block, grads.weight, grads.score);
    for (int h = 0; h < block.heads; ++h) {
      const ResultRow<T> target = grad_query.row(block.row, block.head + h);
      store_sum<T>(block, h, grads.score, NodeRows<T>::seen_before(in.key), scale, target);
      if (in.edge.width > 0) {
        store_sum<T>(block, h, grads.score, EdgeRows<T>(in.edge), scale, target, in.key.width);
      }
      if (wants_sums) {
        store_sum<T>(block, h, grads.weight, EdgeRows<T>(in.edge), A{1},
                     edge_sums.row(block.row, block.head + h));
      }
    }
    add_edge_gradients(block, grads);
  }

  // Adds to the gradients of the block's edges what its heads have for them, as scores and values.
  template <typename Block>
  void add_edge_gradients(const Block& block, const EdgeGradients<A>& grads) const {
    if (grad_edge.data == nullptr) return;
    for_each_part<kLanes<T>, 1>(0, in.edge.width, [&](auto chunk, int64_t f) {
      constexpr int N = decltype(chunk)::kLanes;
      const int64_t column = in.key.width + f;
      for (int i = 0; i < block.count; ++i) {
        A* target = grad_edge.row(block.edge(i)) + f;
        auto sum = load<N>(target);
        for (int h = 0; h < block.heads; ++h) {
          const int lane = h * block.stride + i;
          const auto query = load<N>(in.query.at(block.row, block.head + h) + column);
          const auto grad = load<N>(this->grad.at(block.row, block.head + h) + column);
          sum = multiply_add<A, N>(splat<A, N>(scale * grads.score[lane]), query, sum);
          sum = multiply_add<A, N>(splat<A, N>(grads.weight[lane]), grad, sum);
        }
        store<N>(target, sum);
      }
    });
  }

  void absorb(const EdgeBlock& block, const A* buffer, A* state) const {
    const auto grads = this->score_gradients(block, buffer);
    const auto weights = this->weights(buffer);
    this->leave(block, weights, grads);
    const int64_t width = in.key.width;
    add_rows<A>(block, grads, NodeRows<T>::seen_before(in.key), A{1}, state);
    if (in.edge.width == 0) return;
    add_rows<A>(block, grads, EdgeRows<T>(in.edge), A{1}, state + width);
    if (wants_sums) add_rows<A>(block, weights, EdgeRows<T>(in.edge), A{1}, state + in.query.width);
    add_edge_gradients(block, {weights, grads});
  }

  void finish(int64_t row, int64_t head, bool, int64_t, const A* state) const {
    const ResultRow<T> target = grad_query.row(row, head);
    for_each_part<kLanes<T>, 1>(0, in.query.width, [&](auto chunk, int64_t f) {
      constexpr int N = decltype(chunk)::kLanes;
      target.template store<N>(f, scale * load<N>(state + f));
    });
    if (!wants_sums) return;
    const ResultRow<T> sums = edge_sums.row(row, head);
    for_each_part<kLanes<T>, 1>(0, in.edge.width, [&](auto chunk, int64_t f) {
      constexpr int N = decltype(chunk)::kLanes;
      sums.template store<N>(f, load<N>(state + in.query.width + f));
    });
  }
};

template <typename T, typename Bias>
void run_backward_dst(const OrderedCsr& graph, const AttentionInputs<T>& in, const Bias& bias,
                      double scale, Dropout dropout, const SoftmaxGradients<T>& given,
                      Accumulator<T>* between, Heads<T> grad_query,
                      Matrix<Accumulator<T>> grad_edge) {
  const int64_t width = in.query.width;
  const BackwardDst<T, Bias> pass{{{width}, given, between, dropout},
                                  in,
                                  bias,
                                  static_cast<Accumulator<T>>(scale),
                                  Result<T>(grad_query),
                                  grad_edge,
                                  Result<T>(Heads<T>{}),
                                  false};
  run_destination_pass<T>(graph, make_schedule(graph), in.query.heads, 2 * width, pass);
}

}  // namespace
}  // namespace fastgraph
