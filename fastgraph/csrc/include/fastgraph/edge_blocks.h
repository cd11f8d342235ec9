// Blocks of entries of one row, and sums over the rows of nodes and edges that these lead to.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "fastgraph/chunks.h"
#include "fastgraph/memory.h"
#include "fastgraph/result.h"
#include "fastgraph/simd.h"
#include "fastgraph/views.h"

namespace fastgraph {

// Entries whose scores are computed together: their rows stay in the first cache.
constexpr int kBlock = 16;

template <typename A>
using BlockOf = Vector<A, kBlock>;

// Some entries of one row. Vectors over a block of them have `stride` lanes for each of its heads,
// of which the first `count` are in use, one for each entry.
struct Entries {
  const Csr& graph;
  int64_t row;
  int64_t head;   // the first
  int64_t entry;  // the first
  int count;

  int64_t col(int i) const { return graph.col[entry + i]; }
  int64_t edge(int i) const { return graph.edge(entry + i); }
};

// Entries seen by one head.
struct EdgeBlock : Entries {
  static constexpr int heads = 1;
  static constexpr int stride = kBlock;
};

// All entries of a row of few, seen by several heads.
struct SharedBlock : Entries {
  int heads;   // heads * stride <= kBlock
  int stride;  // a power of 2
};

// Calls body(lane, i, h) for the lanes in use: entry i seen by head h of the block.
template <typename Block, typename Body>
inline void for_each_lane(const Block& block, const Body& body) {
  for (int h = 0; h < block.heads; ++h) {
    for (int i = 0; i < block.count; ++i) body(h * block.stride + i, i, h);
  }
}

// The entries [begin, end) of a row, seen by all heads.
struct RowEntries {
  const Csr& graph;
  int64_t row;
  int64_t heads;
  int64_t begin;
  int64_t end;

  // Calls body(block, nth), nth counting the calls. All heads see some entries before any sees
  // the next ones, so that what is gathered is read in pieces as long as a node has features.
  template <typename Body>
  void for_each_block(const Body& body) const {
    int64_t nth = 0;
    for (int64_t entry = begin; entry < end; entry += kBlock) {
      const int count = static_cast<int>(std::min<int64_t>(kBlock, end - entry));
      for (int64_t head = 0; head < heads; ++head) {
        body(EdgeBlock{{graph, row, head, entry, count}}, nth++);
      }
    }
  }

  // Whether one block holds what a head sees of the row.
  bool few() const { return begin < end && end - begin <= kBlock; }

  // Calls body(block) for the blocks, as few as there can be, that hold a row of few entries.
  template <typename Body>
  void for_each_shared_block(const Body& body) const {
    const int count = static_cast<int>(end - begin);
    int stride = 1;
    while (stride < count) stride *= 2;
    for (int64_t head = 0; head < heads; head += kBlock / stride) {
      const int shared = static_cast<int>(std::min<int64_t>(kBlock / stride, heads - head));
      body(SharedBlock{{graph, row, head, begin, count}, shared, stride});
    }
  }
};

// Asks for what a node has in x.
template <typename T>
FASTGRAPH_INLINE void prefetch_node(const Heads<T>& x, int64_t node) {
  prefetch(x.at(node, 0), x.heads * x.width);
}

// The first channels of the nodes that entries lead to, all of them unless told.
template <typename T>
struct NodeRows {
  Heads<const T> x;
  int64_t width;
  bool seen = false;  // the pass has just read the same rows

  explicit NodeRows(Heads<const T> all) : NodeRows(all, all.width) {}
  NodeRows(Heads<const T> all, int64_t count) : x(all), width(count) {}

  static NodeRows seen_before(Heads<const T> all) {
    NodeRows rows(all);
    rows.seen = true;
    return rows;
  }

  const T* at(const Entries& block, int i, int h = 0) const {
    return x.at(block.col(i), block.head + h);
  }
  const T* of_entry(const Csr& graph, int64_t entry, int64_t head) const {
    return x.at(graph.col[entry], head);
  }
  int64_t head_stride() const { return x.width; }
  bool gapless() const { return width == x.width; }  // heads stand side by side

  // Asks for what entries further on will need where entry i reads kCount values at f.
  template <int kCount>
  FASTGRAPH_INLINE void expect(const Entries& block, int i, int h, int64_t f) const {
    const int64_t entry = block.entry + i + kAhead;
    if (seen || entry >= block.graph.num_entries) return;
    prefetch<kCount * sizeof(T)>(x.at(block.graph.col[entry], block.head + h) + f);
  }
};

// What the edges of entries carry, the same for all heads; nothing if the width is 0.
template <typename T>
struct EdgeRows {
  Matrix<const T> x;
  int64_t width;

  explicit EdgeRows(Matrix<const T> all) : x(all), width(all.width) {}

  const T* at(const Entries& block, int i, int = 0) const { return x.row(block.edge(i)); }
  const T* of_entry(const Csr& graph, int64_t entry, int64_t) const {
    return x.row(graph.edge(entry));
  }
  constexpr int64_t head_stride() const { return 0; }
  constexpr bool gapless() const { return false; }

  // Rows of edges mostly follow each other in memory.
  template <int kCount>
  void expect(const Entries&, int, int, int64_t) const {}
};

// One value for each edge and head, [edges, heads]; without data a zero.
template <typename T, typename Block>
inline BlockOf<Accumulator<T>> load_edges(const Block& block, Matrix<const T> x) {
  BlockOf<Accumulator<T>> values{};
  if (x.data == nullptr) return values;
  for_each_lane(block, [&](int lane, int i, int h) {
    values[lane] = load_one(x.row(block.edge(i)) + block.head + h);
  });
  return values;
}

// The reverse; without data nothing is written.
template <typename T, typename Block>
inline void store_edges(const Block& block, BlockOf<Accumulator<T>> values, Matrix<T> x) {
  if (x.data == nullptr) return;
  for_each_lane(block, [&](int lane, int i, int h) {
    store_one(x.row(block.edge(i)) + block.head + h, values[lane]);
  });
}

// The sums of vectors that stand for the lanes in use, and zeros; writes v.
template <typename A, int N, typename Block>
inline BlockOf<A> sums_of_block(const Block& block, Vector<A, N> (&v)[kBlock]) {
  for (int h = 0; h + 1 < block.heads; ++h) {
    for (int i = block.count; i < block.stride; ++i) v[h * block.stride + i] = Vector<A, N>{};
  }
  const int count = (block.heads - 1) * block.stride + block.count;
  Vector<A, N> sums[kBlock / N] = {};
#pragma GCC unroll 16
  for (int i = 0; i < kBlock / N; ++i) {
    if (i * N < count) sums[i] = sums_of<A, N>(v + i * N, std::min(count - i * N, N));
  }
  BlockOf<A> result;
  if constexpr (N == 1) {
#pragma GCC unroll 16
    for (int i = 0; i < kBlock; ++i) result[i] = sums[i][0];
  } else {
    std::memcpy(&result, sums, sizeof(result));
  }
  return result;
}

// <own, rows[i]> of each entry i; `own` are the channels of the row's node from `first` on.
template <typename T, typename Rows, typename Block>
inline BlockOf<Accumulator<T>> dots(const Block& block, Heads<const T> nodes, int64_t first,
                                    const Rows& rows) {
  using A = Accumulator<T>;
  BlockOf<A> result{};
  for_each_part<kLanes<T>, 4>(0, rows.width, [&](auto chunk, int64_t f) {
    using C = decltype(chunk);
    using V = Vector<A, C::kLanes>;
    V mine[C::kCount], sums[kBlock];
    for (int h = 0; h < block.heads; ++h) {
      const T* own = nodes.at(block.row, block.head + h) + first + f;
#pragma GCC unroll 4
      for (int q = 0; q < C::kCount; ++q) mine[q] = load<C::kLanes>(own + q * C::kLanes);
      for (int i = 0; i < block.count; ++i) {
        rows.template expect<C::kWidth>(block, i, h, f);
        const T* row = rows.at(block, i, h) + f;
        V sum{};
#pragma GCC unroll 4
        for (int q = 0; q < C::kCount; ++q) {
          sum = multiply_add<A, C::kLanes>(mine[q], load<C::kLanes>(row + q * C::kLanes), sum);
        }
        sums[h * block.stride + i] = sum;
      }
    }
    result += sums_of_block<A, C::kLanes>(block, sums);
  });
  return result;
}

// The beginning of sums that start from nothing.
template <typename A>
struct Zeros {
  template <int N>
  Vector<A, N> operator()(std::integral_constant<int, N>, int64_t) const {
    return Vector<A, N>{};
  }
};

// The sum over the entries of weight[i] * rows[i] for head h of the block, N channels at a time: it
// starts from before(N, f) and is given to after(N, f, sum).
template <typename A, typename Rows, typename Before, typename After, typename Block>
inline void sum_rows(const Block& block, int h, BlockOf<A> weight, const Rows& rows,
                     const Before& before, const After& after) {
  constexpr int kWide = kVectorBytes / static_cast<int>(sizeof(A));
  for_each_part<kWide, 8>(0, rows.width, [&](auto chunk, int64_t f) {
    using C = decltype(chunk);
    constexpr std::integral_constant<int, C::kLanes> kLane{};
    Vector<A, C::kLanes> total[C::kCount];
#pragma GCC unroll 8
    for (int q = 0; q < C::kCount; ++q) total[q] = before(kLane, f + q * C::kLanes);
    for (int i = 0; i < block.count; ++i) {
      rows.template expect<C::kWidth>(block, i, h, f);
      const auto* row = rows.at(block, i, h) + f;
      const auto w = splat<A, C::kLanes>(weight[h * block.stride + i]);
#pragma GCC unroll 8
      for (int q = 0; q < C::kCount; ++q) {
        total[q] = multiply_add<A, C::kLanes>(w, load<C::kLanes>(row + q * C::kLanes), total[q]);
      }
    }
#pragma GCC unroll 8
    for (int q = 0; q < C::kCount; ++q) after(kLane, f + q * C::kLanes, total[q]);
  });
}

// sum = rescale * sum + the sum over a block of one head of weight[i] * rows[i].
template <typename A, typename Rows>
inline void add_rows(const EdgeBlock& block, BlockOf<A> weight, const Rows& rows, A rescale,
                     A* sum) {
  sum_rows<A>(
      block, 0, weight, rows,
      [&](auto lanes, int64_t f) { return rescale * load<decltype(lanes)::value>(sum + f); },
      [&](auto lanes, int64_t f, auto total) { store<decltype(lanes)::value>(sum + f, total); });
}

// The sum over the entries of weight[i] * rows[i] for each head of the block, as sum_rows() has it,
// with before(N, h, f) and after(N, h, f, sum). From the same rows <own, rows[i]> of each entry,
// where `own` are the channels of the row's node.
template <typename T, typename Rows, typename Before, typename After, typename Block>
inline BlockOf<Accumulator<T>> sum_rows_and_dots(const Block& block, Heads<const T> nodes,
                                                 BlockOf<Accumulator<T>> weight, const Rows& rows,
                                                 const Before& before, const After& after) {
  using A = Accumulator<T>;
  BlockOf<A> result{};
  for_each_part<kLanes<T>, 4>(0, rows.width, [&](auto chunk, int64_t f) {
    using C = decltype(chunk);
    constexpr int N = C::kLanes;
    constexpr std::integral_constant<int, N> kLane{};
    using V = Vector<A, N>;
    V mine[C::kCount], total[C::kCount], products[kBlock];
    for (int h = 0; h < block.heads; ++h) {
      const T* own = nodes.at(block.row, block.head + h) + f;
#pragma GCC unroll 4
      for (int q = 0; q < C::kCount; ++q) {
        mine[q] = load<N>(own + q * N);
        total[q] = before(kLane, h, f + q * N);
      }
      for (int i = 0; i < block.count; ++i) {
        rows.template expect<C::kWidth>(block, i, h, f);
        const T* row = rows.at(block, i, h) + f;
        const V w = splat<A, N>(weight[h * block.stride + i]);
        V product{};
#pragma GCC unroll 4
        for (int q = 0; q < C::kCount; ++q) {
          const V value = load<N>(row + q * N);
          product = multiply_add<A, N>(mine[q], value, product);
          total[q] = multiply_add<A, N>(w, value, total[q]);
        }
        products[h * block.stride + i] = product;
      }
#pragma GCC unroll 4
      for (int q = 0; q < C::kCount; ++q) after(kLane, h, f + q * N, total[q]);
    }
    result += sums_of_block<A, N>(block, products);
  });
  return result;
}

// scale * the sum over a row of few entries of weight[i] * rows[i] for head h of the block, as the
// channels of `target` from `first` on.
template <typename T, typename Rows, typename Target>
inline void store_sum(const SharedBlock& block, int h, BlockOf<Accumulator<T>> weight,
                      const Rows& rows, Accumulator<T> scale, const Target& target,
                      int64_t first = 0) {
  using A = Accumulator<T>;
  sum_rows<A>(block, h, weight, rows, Zeros<A>{}, [&](auto lanes, int64_t f, auto total) {
    constexpr int N = decltype(lanes)::value;
    target.template store<N>(first + f, scale * total);
  });
}

namespace detail {

// v[lane ^ kStep].
template <int kStep, typename A, size_t... kLane>
inline BlockOf<A> exchanged(BlockOf<A> v, std::index_sequence<kLane...>) {
#if defined(__clang__)
  return __builtin_shufflevector(v, v, (kLane ^ kStep)...);
#else
  return __builtin_shuffle(v, Vector<Bits<A>, kBlock>{(kLane ^ kStep)...});
#endif
}

template <int kStep, typename A, typename Combine>
inline BlockOf<A> combine_entries(int stride, BlockOf<A> v, const Combine& combine) {
  if constexpr (kStep > 0) {
    if (kStep < stride) {
      v = combine(v, exchanged<kStep, A>(v, std::make_index_sequence<kBlock>{}));
    }
    return combine_entries<kStep / 2, A>(stride, v, combine);
  } else {
    return v;
  }
}

}  // namespace detail

// The sum over the entries, in every lane of a head.
template <typename A>
inline BlockOf<A> sum_of_entries(const SharedBlock& block, BlockOf<A> v) {
  const auto add = [](BlockOf<A> a, BlockOf<A> b) { return a + b; };
  return detail::combine_entries<kBlock / 2, A>(block.stride, v, add);
}

// The largest value of the entries, in every lane of a head; a NaN may be passed over.
template <typename A>
inline BlockOf<A> max_of_entries(const SharedBlock& block, BlockOf<A> v) {
  return detail::combine_entries<kBlock / 2, A>(block.stride, v, larger<A, kBlock>);
}

}  // namespace fastgraph
