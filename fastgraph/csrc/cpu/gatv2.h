// Additive attention (Brody, Alon and Yahav, How attentive are graph attention networks?, 2022):
// the score of an entry is <att, leaky_relu(z)>, z = x_src[col] + x_dst[row] + weight_edge^T edge.
// Edges are projected for some entries at a time, where it is needed.
#pragma once

#include <algorithm>

#include "cpu/kernels.h"
#include "cpu/signs.h"
#include "fastgraph/edge_blocks.h"
#include "fastgraph/edge_projection.h"
#include "fastgraph/edge_softmax.h"

namespace fastgraph {

template <typename V, typename A>
inline V leaky_relu(V z, A slope) {
  return z > V{} ? z : slope * z;
}

// Calls body with what the edges of these inputs add to z.
template <typename T, typename Body>
inline auto with_edges(const Gatv2Inputs<T>& in, Matrix<const Accumulator<T>> weight,
                       const Body& body) {
  if (in.edge.width > 0)
    return body(EdgeProjection<T>{in.edge, weight, in.att.heads, in.att.width});
  return body(NoEdges{});
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
      const auto of_edges = edges.template of_block<C>(block, h, f);
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
        of_edges.add_to(z, i);
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

// The same for a row of a batch: added to score, and with kProducts to product.
template <bool kProducts, typename T, typename Edges>
inline void add_scores(const RowBatch& batch, int64_t row, EntryRange entries,
                       const Gatv2Inputs<T>& in, const Edges& edges, Accumulator<T> slope,
                       Accumulator<T>* score, Heads<const T> grad = {},
                       Accumulator<T>* product = nullptr) {
  using A = Accumulator<T>;
  const int64_t width = in.x_src.width;
  for_each_piece<T>(batch.heads, width, true, [&](auto piece, int64_t head, int64_t f) {
    using P = decltype(piece);
    constexpr int N = P::kLanes;
    using V = Vector<A, N>;
    V own[P::kVectors][P::kCount], factor[P::kVectors][P::kCount], given[P::kVectors][P::kCount];
#pragma GCC unroll 4
    for (int h = 0; h < P::kVectors; ++h) {
      const int64_t first = head + P::first_head(h);
#pragma GCC unroll 4
      for (int q = 0; q < P::kCount; ++q) {
        own[h][q] = load<N>(in.x_dst.at(row, first) + f + q * N);
        factor[h][q] = load<N>(in.att.at(0, first) + f + q * N);
        if constexpr (kProducts) given[h][q] = load<N>(grad.at(row, first) + f + q * N);
      }
    }
    for (int64_t e = entries.begin; e < entries.end; ++e) {
      const T* other = in.x_src.at(batch.graph.col[e], head) + f;
      const auto of_edge = edges.of_entry(e, head, f);
      expect_piece<P>(batch, e, in.x_src, head, f);
      V sum[P::kVectors] = {}, dot[P::kVectors] = {};
#pragma GCC unroll 4
      for (int h = 0; h < P::kVectors; ++h) {
#pragma GCC unroll 4
        for (int q = 0; q < P::kCount; ++q) {
          const int64_t at = P::first_head(h) * width + q * N;
          const V value = load<N>(other + at);
          V z = own[h][q] + value;
          of_edge.template add_to<N>(z, at);
          sum[h] = multiply_add<A, N>(factor[h][q], leaky_relu(z, slope), sum[h]);
          if constexpr (kProducts) dot[h] = multiply_add<A, N>(given[h][q], value, dot[h]);
        }
      }
      add_sums<P>(sum, score + batch.at(e) + head);
      if constexpr (kProducts) add_sums<P>(dot, product + batch.at(e) + head);
    }
  });
}

// Calls body(row, its entries, what these add to z) for the rows of a batch.
template <typename Edges, typename Body>
inline void for_each_row(const RowBatch& batch, const Edges& edges, const Body& body) {
  batch.for_each_row([&](int64_t row, EntryRange entries, int64_t) { body(row, entries, edges); });
}

// Edges are projected for some rows, or a part of one, at a time, so that what they add stays in
// the first cache.
template <typename T, typename Body>
inline void for_each_row(const RowBatch& batch, const EdgeProjection<T>& edges, const Body& body) {
  using A = Accumulator<T>;
  constexpr int64_t kAtOnce = 64;
  const int64_t stride = edges.weight.width;
  const int64_t* rowptr = batch.graph.rowptr;
  TaskScratch<A, kAtOnce * 64> z(kAtOnce * stride);
  const auto project = [&](int64_t begin, int64_t end) -> ProjectedEdges<A> {
    edges.of_entries(batch.graph, begin, end - begin, z.get());
    return {z.get(), stride, begin, edges.width};
  };
  for (int64_t place = batch.place_begin; place < batch.place_end;) {
    int64_t end = place + 1;
    while (end < batch.place_end && rowptr[end + 1] - rowptr[place] <= kAtOnce) ++end;
    const RowBatch part{batch.graph, batch.heads, place, end, rowptr[place], rowptr[end]};
    for (int64_t e = part.begin; part.end - part.begin > kAtOnce && e < part.end; e += kAtOnce) {
      const EntryRange some{e, std::min(e + kAtOnce, part.end)};
      body(batch.graph.row(place), some, project(some.begin, some.end));
    }
    if (part.end - part.begin <= kAtOnce) for_each_row(part, project(part.begin, part.end), body);
    place = end;
  }
}

template <typename T, typename Edges>
struct AdditiveScores {
  using A = Accumulator<T>;

  Gatv2Inputs<T> in;
  A slope;
  Edges edges;

  FASTGRAPH_INLINE void expect_row(int64_t row) const { prefetch_node(in.x_dst, row); }

  void of_batch(const RowBatch& batch, A* score) const {
    std::fill_n(score, batch.size(), A{0});
    for_each_row(batch, edges, [&](int64_t row, EntryRange entries, const auto& projected) {
      add_scores<false, T>(batch, row, entries, in, projected, slope, score);
    });
  }

  // With <grad, x_src> of each entry.
  void of_batch(const RowBatch& batch, A* score, Heads<const T> grad, A* product) const {
    std::fill_n(score, batch.size(), A{0});
    std::fill_n(product, batch.size(), A{0});
    for_each_row(batch, edges, [&](int64_t row, EntryRange entries, const auto& projected) {
      add_scores<true, T>(batch, row, entries, in, projected, slope, score, grad, product);
    });
  }

  template <typename Block>
  BlockOf<A> operator()(const Block& block) const {
    return additive_scores<false, T>(block, in.x_dst, NodeRows<T>(in.x_src), edges, in.att, slope);
  }

  // With <grad, x_src> in the same loop, where there are registers for it: elsewhere it is 30 %
  // slower.
  template <typename Block>
  Dots<A> with_products(const Block& block, Heads<const T> grad) const {
    BlockOf<A> product{};
    if constexpr (kVectorRegisters >= 32) {
      const auto score = additive_scores<true, T>(block, in.x_dst, NodeRows<T>(in.x_src), edges,
                                                  in.att, slope, grad, &product);
      return {score, product};
    } else {
      return {(*this)(block), dots<T>(block, grad, 0, NodeRows<T>::seen_before(in.x_src))};
    }
  }
};

// att times the slopes of a row. One without entries has none, whatever att is: NaN * 0 is NaN.
template <int N, typename T>
inline Vector<Accumulator<T>, N> through_att(bool empty, const T* att,
                                             const Accumulator<T>* slopes) {
  return empty ? Vector<Accumulator<T>, N>{} : load<N>(att) * load<N>(slopes);
}

}  // namespace fastgraph
