// Batches of rows in attention whose queries and outputs have channels of edges behind those of
// nodes. What edges carry is read once, and filled up with zeros to whole vectors, as queries and
// gradients are: so a product with it is added to that with a node before the lanes are summed up.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/attention.h"
#include "fastgraph/chunks.h"
#include "fastgraph/edge_softmax.h"
#include "fastgraph/head_pieces.h"
#include "fastgraph/memory.h"
#include "fastgraph/row_batch.h"
#include "fastgraph/simd.h"
#include "fastgraph/views.h"

namespace fastgraph {
namespace {

// A width in whole vectors.
template <typename T>
constexpr int64_t whole_vectors(int64_t width) {
  return (width + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
}

// What the edges of a batch carry, in the order of its entries.
template <typename T>
class EdgesOfBatch {
 public:
  using A = Accumulator<T>;
  static constexpr int N = kLanes<T>;

  EdgesOfBatch(const RowBatch& batch, Matrix<const T> edge)
      : begin_(batch.begin),
        width_(whole_vectors<T>(edge.width)),
        memory_((batch.end - batch.begin) * width_),
        data_(memory_.get()) {
    for (int64_t e = batch.begin; e < batch.end; ++e) {
      const T* from = edge.row(batch.graph.edge(e));
      A* to = data_ + (e - begin_) * width_;
      if (edge.width % N != 0) store<N>(to + width_ - N, Vector<A, N>{});
      for_each_part<N, 2>(0, edge.width, [&](auto chunk, int64_t d) {
        constexpr int kLane = decltype(chunk)::kLanes;
#pragma GCC unroll 2
        for (int q = 0; q < decltype(chunk)::kCount; ++q) {
          store<kLane>(to + d + q * kLane, load<kLane>(from + d + q * kLane));
        }
      });
    }
  }

  const A* at(int64_t entry) const { return data_ + (entry - begin_) * width_; }
  int64_t width() const { return width_; }

 private:
  static constexpr int64_t kOnStack = 8192;

  int64_t begin_, width_;
  TaskScratch<A, kOnStack> memory_;
  A* data_;
};

// Calls body(N, first head) so that heads are covered, four at a time as long as there are.
template <typename Body>
FASTGRAPH_INLINE void for_each_four_heads(int64_t heads, const Body& body) {
  int64_t head = 0;
  for (; head + 4 <= heads; head += 4) body(std::integral_constant<int, 4>{}, head);
  for (; head < heads; ++head) body(std::integral_constant<int, 1>{}, head);
}

// products[h] += <own, (x[col], edge)> of each entry of a row and head.
template <typename T>
void add_dots_with_edges(const RowBatch& batch, int64_t row, EntryRange entries,
                         const Heads<const T>& own, const Heads<const T>& x,
                         const EdgesOfBatch<T>& edges, Accumulator<T>* products) {
  using A = Accumulator<T>;
  constexpr int N = kLanes<T>;
  using V = Vector<A, N>;
  const bool is_whole = x.width % N == 0;
  if (!is_whole) add_dots<T>(batch, row, entries, own, 0, NodeRows<T>(x), products);
  const int64_t channels = is_whole ? x.width : 0;
  for_each_four_heads(x.heads, [&](auto count, int64_t head) {
    constexpr int kHeads = decltype(count)::value;
    const T* mine = own.at(row, head);
    for (int64_t e = entries.begin; e < entries.end; ++e) {
      V product[kHeads] = {};
      const T* other = x.at(batch.graph.col[e], head);
      if (is_whole && e + kAhead < batch.graph.num_entries) {
        prefetch(x.at(batch.graph.col[e + kAhead], head), kHeads * x.width);
      }
      for (int64_t f = 0; f < channels; f += N) {
#pragma GCC unroll 4
        for (int h = 0; h < kHeads; ++h) {
          product[h] = multiply_add<A, N>(load<N>(mine + h * own.width + f),
                                          load<N>(other + h * x.width + f), product[h]);
        }
      }
      const A* edge = edges.at(e);
      for (int64_t d = 0; d < edges.width(); d += N) {
        const V carried = load<N>(edge + d);
#pragma GCC unroll 4
        for (int h = 0; h < kHeads; ++h) {
          const V factor = load<N>(mine + h * own.width + x.width + d);
          product[h] = multiply_add<A, N>(factor, carried, product[h]);
        }
      }
      add_sums<Piece<N, kHeads, 1>>(product, products + batch.at(e) + head);
    }
  });
}

// The sums over the entries of a row of what their edges carry, by one or two weights of each entry
// and head, given to after(which weights, head, channel, sum), a vector at a time.
template <typename T, int kWeights, typename After>
void sum_edges(const RowBatch& batch, EntryRange entries,
               const Accumulator<T>* const (&weights)[kWeights], const EdgesOfBatch<T>& edges,
               const After& after) {
  using A = Accumulator<T>;
  constexpr int N = kLanes<T>;
  using V = Vector<A, N>;
  detail::sweep<N, 3 - kWeights>(0, edges.width(), [&](auto chunk, int64_t d) {
    constexpr int kCount = decltype(chunk)::kCount;
    for_each_four_heads(batch.heads, [&](auto count, int64_t head) {
      constexpr int kHeads = decltype(count)::value;
      V total[kWeights][kHeads][kCount] = {};
      for (int64_t e = entries.begin; e < entries.end; ++e) {
        V carried[kCount];
#pragma GCC unroll 2
        for (int q = 0; q < kCount; ++q) carried[q] = load<N>(edges.at(e) + d + q * N);
#pragma GCC unroll 2
        for (int k = 0; k < kWeights; ++k) {
#pragma GCC unroll 4
          for (int h = 0; h < kHeads; ++h) {
            const V weight = splat<A, N>(weights[k][batch.at(e) + head + h]);
#pragma GCC unroll 2
            for (int q = 0; q < kCount; ++q) {
              total[k][h][q] = multiply_add<A, N>(weight, carried[q], total[k][h][q]);
            }
          }
        }
      }
#pragma GCC unroll 2
      for (int k = 0; k < kWeights; ++k) {
#pragma GCC unroll 4
        for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 2
          for (int q = 0; q < kCount; ++q) after(k, head + h, d + q * N, total[k][h][q]);
        }
      }
    });
  });
}

// Writes the gradients of the edges of a row: the sum over heads of a[h] * own[h] + b[h] *
// given[h], of which the channels of edges stand behind those of nodes.
template <typename T>
void store_edge_gradients(const RowBatch& batch, int64_t row, EntryRange entries,
                          const Accumulator<T>* a, const Heads<const T>& own,
                          const Accumulator<T>* b, const Heads<const T>& given, int64_t first,
                          const Matrix<Accumulator<T>>& to) {
  using A = Accumulator<T>;
  for_each_part<kLanes<T>, 1>(0, to.width, [&](auto chunk, int64_t d) {
    constexpr int N = decltype(chunk)::kLanes;
    using V = Vector<A, N>;
    for_each_four_heads(batch.heads, [&](auto count, int64_t head) {
      constexpr int kHeads = decltype(count)::value;
      V mine[kHeads], other[kHeads];
#pragma GCC unroll 4
      for (int h = 0; h < kHeads; ++h) {
        mine[h] = load<N>(own.at(row, head + h) + first + d);
        other[h] = load<N>(given.at(row, head + h) + first + d);
      }
      for (int64_t e = entries.begin; e < entries.end; ++e) {
        const int64_t at = batch.at(e) + head;
        A* const target = to.row(batch.graph.edge(e)) + d;
        V sum = head == 0 ? V{} : load<N>(target), more{};
#pragma GCC unroll 4
        for (int h = 0; h < kHeads; ++h) {
          sum = multiply_add<A, N>(splat<A, N>(a[at + h]), mine[h], sum);
          more = multiply_add<A, N>(splat<A, N>(b[at + h]), other[h], more);
        }
        store<N>(target, sum + more);
      }
    });
  });
}

// The forward pass.
template <typename T>
struct EdgeSoftmax : OnlineSoftmax<T, Scores<T, NoBias<T>>> {
  using A = Accumulator<T>;

  void absorb_batch(const RowBatch& batch, int64_t) const {
    const AttentionInputs<T>& in = this->scores.in;
    const EdgesOfBatch<T> edges(batch, in.edge);
    BatchValues<A> p(batch), inverse_sum(batch);
    std::fill_n(p.data, batch.size(), A{0});
    batch.for_each_row([&](int64_t row, EntryRange entries, int64_t) {
      add_dots_with_edges<T>(batch, row, entries, in.query, in.key, edges, p.data);
    });
    for (int64_t i = 0; i < batch.size(); ++i) p.data[i] *= this->scores.scale;
    softmax_of_batch<A>(batch, this->outputs.stats, p.data, inverse_sum.data);
    drop<A>(batch, this->dropout, p.data);
    batch.for_each_row([&](int64_t row, EntryRange entries, int64_t place) {
      const A* scale = inverse_sum.data + place;
      sum_entries<T>(batch, entries, p.data, this->value, false,
                     [&](auto piece, int64_t head, int64_t f, auto sum) {
                       constexpr int N = decltype(piece)::kLanes;
                       store<N>(this->outputs.out.at(row, head) + f, scale[head] * sum);
                     });
      sum_edges<T, 1>(batch, entries, {p.data}, edges, [&](int, int64_t head, int64_t d, auto sum) {
        T* const out = this->outputs.out.at(row, head) + in.value.width;
        store<kLanes<T>>(out + d, scale[head] * sum);
      });
    });
  }
};

// The backward pass over destinations. Gradients of edges, which may be null, are written.
template <typename T>
struct EdgeBackwardDst : BackwardDst<T, NoBias<T>> {
  using A = Accumulator<T>;
  using Base = BackwardDst<T, NoBias<T>>;

  Heads<T> query_sums;
  Heads<T> sums_by_weight;  // of what edges carry, or null

  void absorb_batch(const RowBatch& batch, int64_t) const {
    const AttentionInputs<T>& in = this->in;
    const EdgesOfBatch<T> edges(batch, in.edge);
    BatchValues<A> p(batch), product(batch), weight(batch);
    std::fill_n(p.data, batch.size(), A{0});
    std::fill_n(product.data, batch.size(), A{0});
    batch.for_each_row([&](int64_t row, EntryRange entries, int64_t) {
      add_dots_with_edges<T>(batch, row, entries, in.query, in.key, edges, p.data);
      add_dots_with_edges<T>(batch, row, entries, this->grad, in.value, edges, product.data);
    });
    for (int64_t i = 0; i < batch.size(); ++i) p.data[i] *= this->scale;
    this->gradients_of_scores(batch, product.data, p.data, weight.data);
    for (int64_t i = 0; i < batch.size(); ++i) p.data[i] *= this->scale;
    batch.for_each_row([&](int64_t row, EntryRange entries, int64_t) {
      sum_entries<T>(batch, entries, p.data, NodeRows<T>(in.key), false,
                     [&](auto piece, int64_t head, int64_t f, auto sum) {
                       store<decltype(piece)::kLanes>(query_sums.at(row, head) + f, sum);
                     });
      const auto leave = [&](int which, int64_t head, int64_t d, auto sum) {
        T* const to =
            which == 0 ? query_sums.at(row, head) + in.key.width : sums_by_weight.at(row, head);
        store<kLanes<T>>(to + d, sum);
      };
      if (this->wants_sums) {
        sum_edges<T, 2>(batch, entries, {p.data, weight.data}, edges, leave);
      } else {
        sum_edges<T, 1>(batch, entries, {p.data}, edges, leave);
      }
      if (this->grad_edge.data == nullptr) return;
      store_edge_gradients<T>(batch, row, entries, p.data, in.query, weight.data, this->grad,
                              in.key.width, this->grad_edge);
    });
  }

  // Blocks add to the gradients of their edges.
  void begin(const RowEntries& entries, bool whole, A* buffer, A* states) const {
    clear_edges(entries.graph, entries.begin, entries.end);
    Base::begin(entries, whole, buffer, states);
  }
  void absorb_few(const SharedBlock& block, int64_t slot, A* room) const {
    if (block.head == 0) clear_edges(block.graph, block.entry, block.entry + block.count);
    Base::absorb_few(block, slot, room);
  }

  void clear_edges(const Csr& graph, int64_t begin, int64_t end) const {
    if (this->grad_edge.data == nullptr) return;
    for (int64_t e = begin; e < end; ++e) {
      std::fill_n(this->grad_edge.row(graph.edge(e)), this->grad_edge.width, A{0});
    }
  }
};

}  // namespace
}  // namespace fastgraph
