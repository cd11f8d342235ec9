// The projection W e of what edges carry to the channels of all heads, and its gradients. These are
// small products, made for many entries at a time: a tile of results stays in registers, so that W
// is read once for several entries, and edges once for several channels. The order of additions in
// a result depends on the sizes alone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "fastgraph/chunks.h"
#include "fastgraph/edge_blocks.h"
#include "fastgraph/inline.h"
#include "fastgraph/memory.h"
#include "fastgraph/simd.h"
#include "fastgraph/views.h"

namespace fastgraph {

// Results that a product keeps in registers; the other ones are for what it multiplies.
constexpr int kTile = kVectorRegisters / 2;

// W as [channels of edges, channels of all heads], and zeros up to whole vectors. One more follows,
// so that a vector can be read from any column.
template <typename T>
class PackedProjection {
 public:
  using A = Accumulator<T>;
  static constexpr int kLane = kVectorBytes / static_cast<int>(sizeof(A));

  // weight: [heads, channels of edges, channels].
  explicit PackedProjection(Heads<const T> weight)
      : rows_(weight.heads),
        stride_((weight.nodes * weight.width + kLane - 1) / kLane * kLane),
        packed_(scratch<A>(rows_ * stride_ + kLane)) {
    std::fill_n(packed_.get(), rows_ * stride_ + kLane, A{0});
    for (int64_t head = 0; head < weight.nodes; ++head) {
      for (int64_t d = 0; d < rows_; ++d) {
        A* row = packed_.get() + d * stride_ + head * weight.width;
        for (int64_t f = 0; f < weight.width; ++f) row[f] = load_one(weight.at(head, d) + f);
      }
    }
  }

  Matrix<const A> matrix() const { return {packed_.get(), rows_, stride_}; }

 private:
  int64_t rows_, stride_;
  Scratch<A> packed_;
};

// What edges add to vectors of entries, [entries, channels of all heads].
template <typename T>
struct EdgeProjection {
  using A = Accumulator<T>;
  static constexpr int kLane = kVectorBytes / static_cast<int>(sizeof(A));

  Matrix<const T> edge;
  Matrix<const A> weight;  // as packed
  int64_t heads;
  int64_t width;  // of a head

  // What edges add to a chunk of the channels of one head.
  template <typename C>
  struct OfBlock {
    Vector<A, C::kLanes> added[kBlock][C::kCount];

    FASTGRAPH_INLINE void add_to(Vector<A, C::kLanes>* z, int i) const {
#pragma GCC unroll 4
      for (int q = 0; q < C::kCount; ++q) z[q] += added[i][q];
    }
  };

  // In whole vectors, of which narrower chunks take the first lanes: so a sum is rounded alike
  // wherever it is made. The softmax that a backward pass finds again is only as good as its scores
  // are those of the forward pass.
  template <typename C>
  FASTGRAPH_INLINE OfBlock<C> of_block(const Entries& block, int h, int64_t f) const {
    const int64_t column = (block.head + h) * width + f;
    if constexpr (C::kLanes == kLane) {
      OfBlock<C> found;
      fill(block, column, found);
      return found;
    } else {
      static_assert(C::kCount == 1);
      OfBlock<Chunk<kLane, 1>> whole;
      fill(block, column, whole);
      OfBlock<C> found;
      for (int i = 0; i < block.count; ++i) {
        std::memcpy(found.added[i], whole.added[i], sizeof(found.added[i]));
      }
      return found;
    }
  }

  // Of all channels, for `count` entries from the first: rows of `out` have the width of the packed
  // weight, and zeros where that has them, whatever edges carry: infinity * 0 is NaN.
  void of_entries(const Csr& graph, int64_t first, int64_t count, A* out) const {
    for_each_part<kLane, 4>(0, weight.width, [&](auto chunk, int64_t column) {
      using C = decltype(chunk);
      for_each_part<1, entries_at_once<C>()>(0, count, [&](auto entries, int64_t i) {
        project<decltype(entries)::kCount, C>(
            graph, first + i, column, [&](int e, int q, auto sum) {
              store<C::kLanes>(out + (i + e) * weight.width + column + q * C::kLanes, sum);
            });
      });
    });
    for (int64_t i = 0; i < count; ++i) {
      std::fill(out + i * weight.width + heads * width, out + (i + 1) * weight.width, A{0});
    }
  }

  // Adds the sum over the entries of edge_i given_i^T to grad_weight; both as wide as the packed
  // weight.
  void add_weight_gradient(const Csr& graph, int64_t first, int64_t count, const A* given,
                           A* grad_weight) const {
    for_each_part<kLane, 4>(0, weight.width, [&](auto chunk, int64_t column) {
      using C = decltype(chunk);
      for_each_part<1, kTile / 4>(0, edge.width, [&](auto rows, int64_t d) {
        add_tile<decltype(rows)::kCount, C>(graph, first, count, given + column, d,
                                            grad_weight + d * weight.width + column);
      });
    });
  }

  // Writes weight given_i for each entry.
  void edge_gradient(const Csr& graph, int64_t first, int64_t count, const A* given,
                     Matrix<A> grad_edge) const {
    constexpr int kMost = std::max(1, kLane / 4);
    for_each_part<1, kMost>(0, edge.width, [&](auto rows, int64_t d) {
      constexpr int kRows = decltype(rows)::kCount;
      constexpr int kEntries = kLane / kRows;
      for (int64_t i = 0; i < count; i += kEntries) {
        A sums[kLane];
        store<kLane>(sums, products<kRows>(given, i, count, d));
        for (int64_t e = 0; e < std::min<int64_t>(kEntries, count - i); ++e) {
          A* target = grad_edge.row(graph.edge(first + i + e)) + d;
          std::memcpy(target, sums + e * kRows, kRows * sizeof(A));
        }
      }
    });
  }

 private:
  // A call of its own: compiled once for all loops that it serves.
  template <typename C>
  __attribute__((noinline)) void fill(const Entries& block, int64_t column,
                                      OfBlock<C>& found) const {
    for_each_part<1, entries_at_once<C>()>(0, block.count, [&](auto entries, int64_t i) {
      project<decltype(entries)::kCount, C>(
          block.graph, block.entry + i, column,
          [&](int e, int q, auto sum) { found.added[i + e][q] = sum; });
    });
  }

  // Entries whose sums fill a tile together, eight at most: each has its own row of edges.
  template <typename C>
  static constexpr int entries_at_once() {
    return std::min(8, kTile / C::kCount);
  }

  // Gives result(e, q, sum) the vectors of a chunk of columns for kEntries entries.
  template <int kEntries, typename C, typename Use>
  FASTGRAPH_INLINE void project(const Csr& graph, int64_t entry, int64_t column,
                                const Use& use) const {
    constexpr int N = C::kLanes;
    using V = Vector<A, N>;
    const T* row[kEntries];
    V sum[kEntries][C::kCount] = {};
#pragma GCC unroll 8
    for (int e = 0; e < kEntries; ++e) row[e] = edge.row(graph.edge(entry + e));
    const A* own = weight.data + column;
    for (int64_t d = 0; d < edge.width; ++d, own += weight.width) {
      V factor[C::kCount];
#pragma GCC unroll 4
      for (int q = 0; q < C::kCount; ++q) factor[q] = load<N>(own + q * N);
#pragma GCC unroll 8
      for (int e = 0; e < kEntries; ++e) {
        const V channel = splat<A, N>(load_one(row[e] + d));
#pragma GCC unroll 4
        for (int q = 0; q < C::kCount; ++q) {
          sum[e][q] = multiply_add<A, N>(channel, factor[q], sum[e][q]);
        }
      }
    }
#pragma GCC unroll 8
    for (int e = 0; e < kEntries; ++e) {
#pragma GCC unroll 4
      for (int q = 0; q < C::kCount; ++q) use(e, q, sum[e][q]);
    }
  }

  // A tile of add_weight_gradient(): kRows channels of edges from d on.
  template <int kRows, typename C>
  FASTGRAPH_INLINE void add_tile(const Csr& graph, int64_t first, int64_t count, const A* given,
                                 int64_t d, A* target) const {
    constexpr int N = C::kLanes;
    using V = Vector<A, N>;
    V sum[kRows][C::kCount];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int q = 0; q < C::kCount; ++q) sum[r][q] = load<N>(target + r * weight.width + q * N);
    }
    for (int64_t i = 0; i < count; ++i, given += weight.width) {
      const T* row = edge.row(graph.edge(first + i)) + d;
      V own[C::kCount];
#pragma GCC unroll 4
      for (int q = 0; q < C::kCount; ++q) own[q] = load<N>(given + q * N);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const V channel = splat<A, N>(load_one(row + r));
#pragma GCC unroll 4
        for (int q = 0; q < C::kCount; ++q) {
          sum[r][q] = multiply_add<A, N>(channel, own[q], sum[r][q]);
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int q = 0; q < C::kCount; ++q) store<N>(target + r * weight.width + q * N, sum[r][q]);
    }
  }

  // <weight[d + r], given[i + e]> in lane e * kRows + r; the last entry again beyond it.
  template <int kRows>
  FASTGRAPH_INLINE Vector<A, kLane> products(const A* given, int64_t i, int64_t count,
                                             int64_t d) const {
    constexpr int kEntries = kLane / kRows;
    using V = Vector<A, kLane>;
    V sums[kLane] = {};
    const A* own = weight.row(d);
    const A* row[kEntries];
    for (int e = 0; e < kEntries; ++e) {
      row[e] = given + std::min<int64_t>(i + e, count - 1) * weight.width;
    }
    for (int64_t f = 0; f < weight.width; f += kLane) {
      V factor[kRows];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) factor[r] = load<kLane>(own + r * weight.width + f);
#pragma GCC unroll 16
      for (int e = 0; e < kEntries; ++e) {
        const V channels = load<kLane>(row[e] + f);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          V& sum = sums[e * kRows + r];
          sum = multiply_add<A, kLane>(channels, factor[r], sum);
        }
      }
    }
    return sums_of<A, kLane>(sums, kLane);
  }
};

// Projections that are there already, of entries from `first` on.
template <typename A>
struct ProjectedEdges {
  const A* projected;
  int64_t stride;
  int64_t first;
  int64_t width;  // of a head

  template <typename C>
  struct OfBlock {
    const A* begin;
    int64_t stride;

    FASTGRAPH_INLINE void add_to(Vector<A, C::kLanes>* z, int i) const {
#pragma GCC unroll 4
      for (int q = 0; q < C::kCount; ++q) {
        z[q] += load<C::kLanes>(begin + i * stride + q * C::kLanes);
      }
    }
  };

  template <typename C>
  FASTGRAPH_INLINE OfBlock<C> of_block(const Entries& block, int h, int64_t f) const {
    return {projected + (block.entry - first) * stride + (block.head + h) * width + f, stride};
  }

  // What an edge adds to vectors of channels from f on.
  struct OfEntry {
    const A* begin;

    template <int N>
    FASTGRAPH_INLINE void add_to(Vector<A, N>& z, int64_t f) const {
      z += load<N>(begin + f);
    }
  };
  FASTGRAPH_INLINE OfEntry of_entry(int64_t entry, int64_t head, int64_t f) const {
    return {projected + (entry - first) * stride + head * width + f};
  }
};

// For graphs without features of edges, whose loops have nothing to skip then.
struct NoEdges {
  struct OfBlock {
    template <typename V>
    void add_to(V*, int) const {}
  };
  template <typename C>
  OfBlock of_block(const Entries&, int, int64_t) const {
    return {};
  }
  struct OfEntry {
    template <int N, typename V>
    void add_to(V&, int64_t) const {}
  };
  OfEntry of_entry(int64_t, int64_t, int64_t) const { return {}; }
};

}  // namespace fastgraph
