// Batches of rows, seen by all heads.
//
// What blocks of one head cost a row of two entries is mostly what is done once for each row and
// head. So rows of few entries are taken together. The numbers of entries and heads of a batch
// stand in an array one behind the other, heads of an entry side by side as tensors have them: they
// are read and written in vectors of heads, and exponentials are taken of whole vectors whatever
// the rows and heads are. Where heads are narrow, whose blocks leave most of a vector empty, a long
// row gains by that as well, and is a batch of its own. Values depend on their row alone, not on
// the batch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "fastgraph/attention_arguments.h"
#include "fastgraph/edge_blocks.h"
#include "fastgraph/exponential.h"
#include "fastgraph/head_pieces.h"
#include "fastgraph/memory.h"
#include "fastgraph/schedule.h"
#include "fastgraph/simd.h"
#include "fastgraph/views.h"

namespace fastgraph {

// Rows of so many entries are taken in batches, if there are no more heads.
constexpr int64_t kBatchedEntries = 32;
constexpr int64_t kBatchedHeads = 32;

// Numbers of entries and heads in a batch of several rows, at most.
constexpr int64_t kBatchValues = kBatchedEntries * kBatchedHeads;

// Whether vectors hold numbers of several heads.
inline bool heads_fill_vectors(int64_t heads) { return heads % 4 == 0 && heads <= kBatchedHeads; }

// How many entries a row that is taken in a batch has at most; 0 without batches. Wider heads fill
// the vectors of blocks, which gather each row of long ones once where a batch does once for each
// piece of its channels.
inline int64_t longest_batched_row(int64_t heads, int64_t channels) {
  constexpr int64_t kWidest = 16;
  if (heads == 0 || heads > kBatchedHeads) return 0;
  return heads_fill_vectors(heads) && channels <= kWidest ? kMaxPiece : kBatchedEntries;
}

struct RowBatch {
  const OrderedCsr& graph;
  int64_t heads;
  int64_t place_begin;
  int64_t place_end;
  int64_t begin;  // the first entry
  int64_t end;

  int64_t size() const { return (end - begin) * heads; }

  // Where the numbers of an entry begin.
  int64_t at(int64_t entry) const { return (entry - begin) * heads; }

  // Calls expect(col, edge) of an entry further on, which nothing else asks for in time.
  template <typename Expect>
  FASTGRAPH_INLINE void expect_after(int64_t entry, const Expect& expect) const {
    const int64_t ahead = entry + kAhead;
    if (ahead < graph.num_entries) expect(graph.col[ahead], graph.edge(ahead));
  }

  // Calls body(row, its entries, where in an array of rows and heads its numbers begin).
  template <typename Body>
  FASTGRAPH_INLINE void for_each_row(const Body& body) const {
    for (int64_t place = place_begin; place < place_end; ++place) {
      const EntryRange entries{graph.rowptr[place], graph.rowptr[place + 1]};
      body(graph.row(place), entries, (place - place_begin) * heads);
    }
  }
};

// Memory for a number of each entry and head of a batch, in whole blocks.
template <typename A>
struct BatchValues {
  explicit BatchValues(const RowBatch& batch)
      : memory((batch.size() + kBlock - 1) / kBlock * kBlock), data(memory.get()) {}

  TaskScratch<A, kBatchValues> memory;
  A* const data;
};

// The longest batch of rows of up to `longest` entries from a place on, which may be one of more
// than kBatchedEntries; without rows if the first has too many.
inline RowBatch batch_from(const OrderedCsr& graph, int64_t heads, int64_t place, int64_t place_end,
                           int64_t longest) {
  const int64_t* rowptr = graph.rowptr;
  const int64_t most = kBatchValues / heads, limit = std::min(place_end, place + most);
  int64_t end = place;
  while (end < limit && rowptr[end + 1] - rowptr[end] <= kBatchedEntries &&
         rowptr[end + 1] - rowptr[place] <= most) {
    ++end;
  }
  if (end == place && rowptr[end + 1] - rowptr[end] <= longest) ++end;
  return {graph, heads, place, end, rowptr[place], rowptr[end]};
}

// Calls body(N) with the lanes of the vectors that heads are taken in.
template <typename A, typename Body>
FASTGRAPH_INLINE void with_head_lanes(int64_t heads, const Body& body) {
  constexpr int kMost = std::min(8, kLanes<A>);
  if (heads % kMost == 0) return body(std::integral_constant<int, kMost>{});
  if constexpr (kMost > 4) {
    if (heads % 4 == 0) return body(std::integral_constant<int, 4>{});
  }
  body(std::integral_constant<int, 1>{});
}

// p = exp(p) for numbers that are not above 0.
template <typename A>
inline void exponentials_of_batch(const RowBatch& batch, A* p) {
  const int64_t size = batch.size();
  std::fill_n(p + size, (kBlock - size % kBlock) % kBlock, A{0});
  constexpr int N = kLanes<A>;
  for (int64_t i = 0; i < size; i += N) store<N>(p + i, exp_of_negative<N>(load<N>(p + i)));
}

// p = exp(p) * inverse_sum: the weights of a softmax.
template <typename A>
inline void weights_of_batch(const RowBatch& batch, const A* inverse_sum, A* p) {
  exponentials_of_batch(batch, p);
  for (int64_t i = 0; i < batch.size(); ++i) p[i] *= inverse_sum[i];
}

// Takes the largest score of the row from each score, and loads the inverse sums of each entry.
template <typename A>
inline void relative_to_largest(const RowBatch& batch, const SoftmaxStats<const A>& stats, A* p,
                                A* inverse_sum) {
  with_head_lanes<A>(batch.heads, [&](auto lanes) {
    constexpr int N = decltype(lanes)::value;
    batch.for_each_row([&](int64_t row, EntryRange entries, int64_t) {
      for (int64_t h = 0; h < batch.heads; h += N) {
        Vector<A, N> largest, inverse;
        load_pairs<N>(stats.at(row, h), largest, inverse);
        for (int64_t e = entries.begin; e < entries.end; ++e) {
          A* own = p + batch.at(e) + h;
          store<N>(own, load<N>(own) - largest);
          store<N>(inverse_sum + batch.at(e) + h, inverse);
        }
      }
    });
  });
}

// Adds what edges have, [edges, heads]; without data nothing.
template <typename T>
inline void add_edges_of_batch(const RowBatch& batch, Matrix<const T> from,
                               Accumulator<T>* values) {
  if (from.data == nullptr) return;
  with_head_lanes<Accumulator<T>>(batch.heads, [&](auto lanes) {
    constexpr int N = decltype(lanes)::value;
    for (int64_t e = batch.begin; e < batch.end; ++e) {
      const T* row = from.row(batch.graph.edge(e));
      for (int64_t h = 0; h < batch.heads; h += N) {
        Accumulator<T>* own = values + batch.at(e) + h;
        store<N>(own, load<N>(own) + load<N>(row + h));
      }
    }
  });
}

// Writes two numbers for each edge and head, [edges, heads, 2].
template <typename A>
inline void store_edge_pairs(const RowBatch& batch, const A* first, const A* second, A* to) {
  with_head_lanes<A>(batch.heads, [&](auto lanes) {
    constexpr int N = decltype(lanes)::value;
    for (int64_t e = batch.begin; e < batch.end; ++e) {
      A* own = to + 2 * batch.graph.edge(e) * batch.heads;
      for (int64_t h = 0; h < batch.heads; h += N) {
        const int64_t at = batch.at(e) + h;
        store_pairs<N>(own + 2 * h, load<N>(first + at), load<N>(second + at));
      }
    }
  });
}

// Weights become the gradients of scores, where `product` is keep <grad, value> of each entry:
// p (product - delta), where the gradient of the logarithm of the sum is taken from delta. They add
// up to 0 over a row, so sums of them are small differences of large terms. Therefore the mean of
// product - delta, which should be 0, is taken from it as well: it is what delta has been rounded
// by, and what the weights lack of 1. Leaves product - delta in `product`.
template <typename A>
inline void gradients_of_batch(const RowBatch& batch, const Matrix<const A>& grad_logsum,
                               A* product, A* p) {
  with_head_lanes<A>(batch.heads, [&](auto lanes) {
    constexpr int N = decltype(lanes)::value;
    using V = Vector<A, N>;
    batch.for_each_row([&](int64_t row, EntryRange entries, int64_t) {
      for (int64_t h = 0; h < batch.heads; h += N) {
        V delta{}, rest{};
        for (int64_t e = entries.begin; e < entries.end; ++e) {
          const int64_t at = batch.at(e) + h;
          delta = multiply_add<A, N>(load<N>(p + at), load<N>(product + at), delta);
        }
        for (int64_t e = entries.begin; e < entries.end; ++e) {
          const int64_t at = batch.at(e) + h;
          const V less = load<N>(product + at) - delta;
          rest = multiply_add<A, N>(load<N>(p + at), less, rest);
          store<N>(product + at, less);
        }
        rest = rest - rest == 0 ? rest : V{};  // of an infinite delta, inf - inf
        if (grad_logsum.data != nullptr) rest -= load<N>(grad_logsum.row(row) + h);
        for (int64_t e = entries.begin; e < entries.end; ++e) {
          const int64_t at = batch.at(e) + h;
          store<N>(p + at, load<N>(p + at) * (load<N>(product + at) - rest));
        }
      }
    });
  });
}

// Writes what edges get, [edges, heads]; without data nothing.
template <typename T>
inline void store_edges_of_batch(const RowBatch& batch, const Accumulator<T>* values,
                                 Matrix<T> to) {
  if (to.data == nullptr) return;
  with_head_lanes<Accumulator<T>>(batch.heads, [&](auto lanes) {
    constexpr int N = decltype(lanes)::value;
    for (int64_t e = batch.begin; e < batch.end; ++e) {
      T* own = to.row(batch.graph.edge(e));
      for (int64_t h = 0; h < batch.heads; h += N)
        store<N>(own + h, load<N>(values + batch.at(e) + h));
    }
  });
}

// Writes the sums over the entries of each row, [rows, heads].
template <typename T>
inline void store_sums_of_batch(const RowBatch& batch, const Accumulator<T>* values, Matrix<T> to) {
  using A = Accumulator<T>;
  with_head_lanes<A>(batch.heads, [&](auto lanes) {
    constexpr int N = decltype(lanes)::value;
    batch.for_each_row([&](int64_t row, EntryRange entries, int64_t) {
      for (int64_t h = 0; h < batch.heads; h += N) {
        Vector<A, N> sum{};
        for (int64_t e = entries.begin; e < entries.end; ++e) {
          sum += load<N>(values + batch.at(e) + h);
        }
        store<N>(to.row(row) + h, sum);
      }
    });
  });
}

// Asks for what an entry further on will read where entry e reads a piece.
template <typename P, typename T>
FASTGRAPH_INLINE void expect_piece(const RowBatch& batch, int64_t e, const Heads<const T>& x,
                                   int64_t head, int64_t f) {
  if (e + kAhead >= batch.graph.num_entries) return;
  const T* row = x.at(batch.graph.col[e + kAhead], head) + f;
  if constexpr (P::kVectors == 1) {
    prefetch<P::kCount * P::kLanes* static_cast<int64_t>(sizeof(T))>(row);
  } else {
    prefetch(row, P::first_head(P::kVectors) * x.width);
  }
}
template <typename P, typename T>
FASTGRAPH_INLINE void expect_piece(const RowBatch& batch, int64_t e, const NodeRows<T>& rows,
                                   int64_t head, int64_t f) {
  expect_piece<P>(batch, e, rows.x, head, f);
}
// Rows of edges mostly follow each other in memory.
template <typename P, typename T>
FASTGRAPH_INLINE void expect_piece(const RowBatch&, int64_t, const EdgeRows<T>&, int64_t, int64_t) {
}

// products[h] += <own, row> of each entry of a row and head, where `own` are the channels of the
// row's node from `first` on.
template <typename T, typename Rows>
FASTGRAPH_INLINE void add_dots(const RowBatch& batch, int64_t row, EntryRange entries,
                               const Heads<const T>& nodes, int64_t first, const Rows& rows,
                               Accumulator<T>* products) {
  using A = Accumulator<T>;
  const bool gapless = rows.gapless() && nodes.width == rows.width;
  for_each_piece<T>(batch.heads, rows.width, gapless, [&](auto piece, int64_t head, int64_t f) {
    using P = decltype(piece);
    constexpr int N = P::kLanes;
    using V = Vector<A, N>;
    V own[P::kVectors][P::kCount];
#pragma GCC unroll 4
    for (int h = 0; h < P::kVectors; ++h) {
#pragma GCC unroll 4
      for (int q = 0; q < P::kCount; ++q) {
        own[h][q] = load<N>(nodes.at(row, head + P::first_head(h)) + first + f + q * N);
      }
    }
    for (int64_t e = entries.begin; e < entries.end; ++e) {
      const T* other = rows.of_entry(batch.graph, e, head) + f;
      expect_piece<P>(batch, e, rows, head, f);
      V product[P::kVectors] = {};
#pragma GCC unroll 4
      for (int h = 0; h < P::kVectors; ++h) {
#pragma GCC unroll 4
        for (int q = 0; q < P::kCount; ++q) {
          const V value = load<N>(other + P::first_head(h) * rows.head_stride() + q * N);
          product[h] = multiply_add<A, N>(own[h][q], value, product[h]);
        }
      }
      add_sums<P>(product, products + batch.at(e) + head);
    }
  });
}

// The sum over the entries of a row of weight * their rows, given to after(piece, head, channel,
// sum), a vector of a piece at a time. `gapless` says that the heads of what after() writes stand
// side by side.
template <typename T, typename Rows, typename After>
FASTGRAPH_INLINE void sum_entries(const RowBatch& batch, EntryRange entries,
                                  const Accumulator<T>* weights, const Rows& rows, bool gapless,
                                  const After& after) {
  using A = Accumulator<T>;
  gapless = gapless && rows.gapless();
  for_each_piece<T>(batch.heads, rows.width, gapless, [&](auto piece, int64_t head, int64_t f) {
    using P = decltype(piece);
    constexpr int N = P::kLanes;
    Vector<A, N> total[P::kVectors][P::kCount] = {};
    for (int64_t e = entries.begin; e < entries.end; ++e) {
      const T* row = rows.of_entry(batch.graph, e, head) + f;
      const A* weight = weights + batch.at(e) + head;
      expect_piece<P>(batch, e, rows, head, f);
#pragma GCC unroll 4
      for (int h = 0; h < P::kVectors; ++h) {
        const auto w = of_heads<P>(weight + P::first_head(h));
        const T* own = row + P::first_head(h) * rows.head_stride();
#pragma GCC unroll 4
        for (int q = 0; q < P::kCount; ++q) {
          total[h][q] = multiply_add<A, N>(w, load<N>(own + q * N), total[h][q]);
        }
      }
    }
#pragma GCC unroll 4
    for (int h = 0; h < P::kVectors; ++h) {
#pragma GCC unroll 4
      for (int q = 0; q < P::kCount; ++q) {
        after(piece, head + P::first_head(h), f + q * N, total[h][q]);
      }
    }
  });
}

// The same of nodes, and from what is gathered products[h] += <own, x[col]> of each entry and head,
// where `own` are the channels of the row's node. Heads share no vector here: it gained 10 % at 2
// to 8 entries, and lost 7 % at about 32.
template <typename T, typename After>
FASTGRAPH_INLINE void sum_entries_and_dots(const RowBatch& batch, int64_t row, EntryRange entries,
                                           const Heads<const T>& nodes,
                                           const Accumulator<T>* weights, const Heads<const T>& x,
                                           Accumulator<T>* products, const After& after) {
  using A = Accumulator<T>;
  for_each_piece<T>(x.heads, x.width, [&](auto piece, int64_t head, int64_t f) {
    using P = decltype(piece);
    constexpr int N = P::kLanes;
    using V = Vector<A, N>;
    V own[P::kVectors][P::kCount], total[P::kVectors][P::kCount] = {};
#pragma GCC unroll 4
    for (int h = 0; h < P::kVectors; ++h) {
#pragma GCC unroll 4
      for (int q = 0; q < P::kCount; ++q) {
        own[h][q] = load<N>(nodes.at(row, head + P::first_head(h)) + f + q * N);
      }
    }
    for (int64_t e = entries.begin; e < entries.end; ++e) {
      const T* other = x.at(batch.graph.col[e], head) + f;
      const A* weight = weights + batch.at(e) + head;
      expect_piece<P>(batch, e, x, head, f);
      V product[P::kVectors] = {};
#pragma GCC unroll 4
      for (int h = 0; h < P::kVectors; ++h) {
        const V w = of_heads<P>(weight + P::first_head(h));
#pragma GCC unroll 4
        for (int q = 0; q < P::kCount; ++q) {
          const V value = load<N>(other + P::first_head(h) * x.width + q * N);
          product[h] = multiply_add<A, N>(own[h][q], value, product[h]);
          total[h][q] = multiply_add<A, N>(w, value, total[h][q]);
        }
      }
      add_sums<P>(product, products + batch.at(e) + head);
    }
#pragma GCC unroll 4
    for (int h = 0; h < P::kVectors; ++h) {
#pragma GCC unroll 4
      for (int q = 0; q < P::kCount; ++q) {
        after(piece, head + P::first_head(h), f + q * N, total[h][q]);
      }
    }
  });
}

// Replaces scores by exponentials of their distance from the largest of the row, and writes the
// statistics of the softmax, whose inverse sums are needed again.
template <typename A>
inline void softmax_of_batch(const RowBatch& batch, const SoftmaxStats<A>& stats, A* p,
                             A* inverse_sum) {
  constexpr A kLowest = -std::numeric_limits<A>::infinity();
  BatchValues<A> largest(batch);
  with_head_lanes<A>(batch.heads, [&](auto lanes) {
    constexpr int N = decltype(lanes)::value;
    using V = Vector<A, N>;
    batch.for_each_row([&](int64_t, EntryRange entries, int64_t place) {
      for (int64_t h = 0; h < batch.heads; h += N) {
        V top = splat<A, N>(kLowest);
        for (int64_t e = entries.begin; e < entries.end; ++e) {
          top = larger<A, N>(load<N>(p + batch.at(e) + h), top);
        }
        const V origin = top > splat<A, N>(kLowest) ? top : V{};
        for (int64_t e = entries.begin; e < entries.end; ++e) {
          A* own = p + batch.at(e) + h;
          store<N>(own, load<N>(own) - origin);
        }
        store<N>(largest.data + place + h, top);
      }
    });
  });
  exponentials_of_batch(batch, p);
  with_head_lanes<A>(batch.heads, [&](auto lanes) {
    constexpr int N = decltype(lanes)::value;
    using V = Vector<A, N>;
    batch.for_each_row([&](int64_t row, EntryRange entries, int64_t place) {
      for (int64_t h = 0; h < batch.heads; h += N) {
        V sum{};
        for (int64_t e = entries.begin; e < entries.end; ++e) {
          sum += load<N>(p + batch.at(e) + h);
        }
        const bool empty = entries.empty();
        const V top = empty ? V{} : load<N>(largest.data + place + h);
        const V inverse = empty ? V{} : 1 / sum;
        store<N>(inverse_sum + place + h, inverse);
        store_pairs<N>(stats.at(row, h), top, inverse);
      }
    });
  });
}

}  // namespace fastgraph
