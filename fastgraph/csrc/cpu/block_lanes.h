// Sixteen nodes in the lanes of a vector, beside other nodes one by one.
//
// Channels of the sixteen stand in working memory, [channels][16]. A number of another node comes
// to all lanes by a load, so that nothing is gathered, and maxima and sums of softmax are those of
// whole vectors.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "cpu/bias_table.h"
#include "cpu/block_attention.h"
#include "cpu/block_products.h"
#include "fastgraph/edge_blocks.h"
#include "fastgraph/memory.h"
#include "fastgraph/parallel.h"
#include "fastgraph/simd.h"

namespace fastgraph {

constexpr int kWindow = 16;
static_assert(kWindow == kBlock);
constexpr int32_t kAllLanes = (1 << kWindow) - 1;

// Columns of a window whose scores are kept at once.
constexpr int64_t kColumns = 64;

// Columns whose scores are computed together, and channels that are added up together: as many sums
// as keep the processor's multipliers at work, of a quarter to half of its registers.
template <typename A>
constexpr int kAtOnce =
    kVectorRegisters > 16 ? kVectorRegisters * kLanes<A> / 64 : kVectorRegisters * kLanes<A> / 32;

template <typename A>
using LaneMask = Vector<Bits<A>, kWindow>;

// All bits of the lanes whose bit is set.
template <typename A>
FASTGRAPH_INLINE LaneMask<A> lanes_of(int32_t bits) {
  constexpr Bits<A> kOne = 1;
  const LaneMask<A> lane = splat<Bits<A>, kWindow>(kOne) << lane_numbers<Bits<A>, kWindow>();
  return (splat<Bits<A>, kWindow>(bits) & lane) != 0;
}

namespace detail {

template <int kSide, typename T, typename Square>
FASTGRAPH_INLINE int64_t transpose_squares(int64_t c, int64_t width, const Square& square) {
  for (; c + kSide <= width; c += kSide) {
    for (int r = 0; r < kWindow; r += kSide) square(std::integral_constant<int, kSide>{}, r, c);
  }
  if constexpr (kSide > 4) return transpose_squares<kSide / 2, T>(c, width, square);
  return c;
}

}  // namespace detail

// The channels of all heads of a window's nodes: to[c][lane], and zeros where there is no node.
template <typename T, typename A = Accumulator<T>>
void load_lanes(const Heads<const T>& x, int64_t first, A* to) {
  const int64_t row = x.heads * x.width, count = std::min<int64_t>(kWindow, x.nodes - first);
  const T* const from = x.data + first * row;
  int64_t c = 0;
  if (count == kWindow) {
    c = detail::transpose_squares<kLanes<T>, T>(0, row, [&](auto side, int r, int64_t f) {
      constexpr int N = decltype(side)::value;
      Vector<A, N> square[N];
#pragma GCC unroll 16
      for (int i = 0; i < N; ++i) square[i] = load<N>(from + (r + i) * row + f);
      detail::transpose_square<A, N>(square);
#pragma GCC unroll 16
      for (int i = 0; i < N; ++i) store<N>(to + (f + i) * kWindow + r, square[i]);
    });
  }
  for (; c < row; ++c) {
    for (int64_t i = 0; i < kWindow; ++i) {
      to[c * kWindow + i] = i < count ? load_one(from + i * row + c) : A{0};
    }
  }
}

// The other way, times a factor.
template <typename T, typename A = Accumulator<T>>
void store_lanes(const A* from, A factor, const Heads<T>& x, int64_t first) {
  const int64_t row = x.heads * x.width, count = std::min<int64_t>(kWindow, x.nodes - first);
  T* const to = x.data + first * row;
  int64_t c = 0;
  if (count == kWindow) {
    c = detail::transpose_squares<kLanes<T>, T>(0, row, [&](auto side, int r, int64_t f) {
      constexpr int N = decltype(side)::value;
      Vector<A, N> square[N];
#pragma GCC unroll 16
      for (int i = 0; i < N; ++i) square[i] = factor * load<N>(from + (f + i) * kWindow + r);
      detail::transpose_square<A, N>(square);
#pragma GCC unroll 16
      for (int i = 0; i < N; ++i) store<N>(to + (r + i) * row + f, square[i]);
    });
  }
  for (; c < row; ++c) {
    for (int64_t i = 0; i < count; ++i) {
      store_one(to + i * row + c, factor * from[c * kWindow + i]);
    }
  }
}

// Some columns of a window, seen by one head.
struct Columns {
  const Windows& windows;
  int64_t begin;
  int64_t count;
  int64_t head = 0;
  int64_t rows[kColumns];  // where the rows of their nodes begin in a tensor

  Columns(const Windows& all, int64_t first, int64_t end, int64_t row)
      : windows(all), begin(first), count(end - first) {
    for (int64_t i = 0; i < count; ++i) rows[i] = all.node[first + i] * row;
  }

  int64_t size() const { return count; }
  int32_t lanes(int64_t i) const { return windows.lanes[begin + i]; }
  template <typename T>
  const T* row(const Heads<const T>& x, int64_t i) const {
    return x.data + rows[i] + head * x.width;
  }
};

// products[i] = factor * <own, the i-th column's channels of x>, lane by lane. The factor comes
// last: of query and key either may be `own`, and the score of an edge has the same bits.
template <typename T, int kCount, typename A>
FASTGRAPH_INLINE void multiply_columns(const Columns& columns, const Heads<const T>& x, int64_t i,
                                       A factor, const A* own, A* products) {
  const T* rows[kCount];
  BlockOf<A> sum[kCount] = {};
#pragma GCC unroll 8
  for (int k = 0; k < kCount; ++k) rows[k] = columns.row(x, i + k);
  for (int64_t c = 0; c < x.width; ++c) {
    const BlockOf<A> channel = load<kWindow>(own + c * kWindow);
#pragma GCC unroll 8
    for (int k = 0; k < kCount; ++k) {
      sum[k] = multiply_add<A, kWindow>(splat<A, kWindow>(load_one(rows[k] + c)), channel, sum[k]);
    }
  }
#pragma GCC unroll 8
  for (int k = 0; k < kCount; ++k) store<kWindow>(products + (i + k) * kWindow, factor * sum[k]);
}

template <typename T, int kCount = kAtOnce<Accumulator<T>>, typename A = Accumulator<T>>
void multiply_all_columns(const Columns& columns, const Heads<const T>& x, A factor, const A* own,
                          A* products, int64_t i = 0) {
  for (; i + kCount <= columns.size(); i += kCount) {
    multiply_columns<T, kCount>(columns, x, i, factor, own, products);
  }
  if constexpr (kCount > 1) {
    multiply_all_columns<T, kCount / 2>(columns, x, factor, own, products, i);
  }
}

// sums[c] += weights[i] * the channel c of each column. These columns are added up by themselves,
// as one sum over all columns of a hub would err by their number. kMasked passes over lanes without
// an edge: their weights are 0, and 0 times what is not finite is NaN.
template <bool kMasked, int kCount, typename T, typename A>
FASTGRAPH_INLINE int64_t add_channels(const Columns& columns, const Heads<const T>& x, int64_t c,
                                      const A* weights, A* sums) {
  for (; c + kCount <= x.width; c += kCount) {
    BlockOf<A> sum[kCount] = {};
    for (int64_t i = 0; i < columns.size(); ++i) {
      const T* row = columns.row(x, i) + c;
      const BlockOf<A> weight = load<kWindow>(weights + i * kWindow);
#pragma GCC unroll 8
      for (int k = 0; k < kCount; ++k) {
        const auto channel = splat<A, kWindow>(load_one(row + k));
        const auto next = multiply_add<A, kWindow>(channel, weight, sum[k]);
        sum[k] = kMasked ? (lanes_of<A>(columns.lanes(i)) ? next : sum[k]) : next;
      }
    }
#pragma GCC unroll 8
    for (int k = 0; k < kCount; ++k) {
      A* const to = sums + (c + k) * kWindow;
      store<kWindow>(to, load<kWindow>(to) + sum[k]);
    }
  }
  if constexpr (kCount > 1) {
    return add_channels<kMasked, kCount / 2>(columns, x, c, weights, sums);
  }
  return c;
}

template <typename T, typename A>
void add_columns(const Columns& columns, const Heads<const T>& x, bool masked, const A* weights,
                 A* sums) {
  constexpr int kCount = kAtOnce<A>;
  if (masked) {
    add_channels<true, kCount>(columns, x, 0, weights, sums);
  } else {
    add_channels<false, kCount>(columns, x, 0, weights, sums);
  }
}

// True if all are finite.
template <typename A>
inline bool all_finite(const A* values, int64_t vectors) {
  BlockOf<A> differences{};
  for (int64_t i = 0; i < vectors; ++i) {
    const BlockOf<A> own = load<kWindow>(values + i * kWindow);
    differences += own - own;
  }
  return sum_of<A, kWindow>(differences) == 0;
}

// Calls body(columns) for the columns of a window, so many that their scores can be kept, of
// tensors of which a node has a row of so many values.
template <typename Body>
void for_each_columns(const Windows& windows, int64_t window, int64_t row, const Body& body) {
  const int64_t end = windows.ptr[window + 1];
  for (int64_t begin = windows.ptr[window]; begin < end; begin += kColumns) {
    Columns columns(windows, begin, std::min(begin + kColumns, end), row);
    body(columns);
  }
}

// What is added to the scores of columns: biases of edges, and -infinity where there is none.
template <typename T>
class ColumnBias {
 public:
  using A = Accumulator<T>;

  explicit ColumnBias(const ScoreBias<T>& bias) : bias_(bias), table_(bias) {}

  bool given() const { return bias_.given(); }

  // The types of the edges of columns, 0 where there is none, [columns][16].
  void read_types(const Columns& columns, int32_t* types) const {
    if (!given()) return;
    bias_.types.visit([&](const auto* all) {
      for (int64_t i = 0; i < columns.size(); ++i) {
        const int32_t* edge = columns.windows.edge + columns.windows.first[columns.begin + i];
        int32_t* const own = types + i * kWindow;
        std::fill_n(own, kWindow, 0);
        for (auto left = static_cast<uint32_t>(columns.lanes(i)); left != 0; left &= left - 1) {
          own[__builtin_ctz(left)] = static_cast<int32_t>(all[*edge++]);
        }
      }
    });
  }

  void add(const Columns& columns, const int32_t* types, A* scores) const {
    const BlockOf<A> lowest = splat<A, kWindow>(-std::numeric_limits<A>::infinity());
    if (given()) {
      table_.visit(columns.head, [&](const auto& values) {
        constexpr int N = kLanes<A>;
        A found[kWindow];
        for (int64_t i = 0; i < columns.size(); ++i) {
          for (int lane = 0; lane < kWindow; lane += N) {
            values.write(types + i * kWindow + lane, found + lane);
          }
          store<kWindow>(scores + i * kWindow,
                         load<kWindow>(scores + i * kWindow) + load<kWindow>(found));
        }
      });
    }
    for (int64_t i = 0; i < columns.size(); ++i) {
      if (columns.lanes(i) == kAllLanes) continue;
      const auto score = load<kWindow>(scores + i * kWindow);
      store<kWindow>(scores + i * kWindow, lanes_of<A>(columns.lanes(i)) ? score : lowest);
    }
  }

 private:
  const ScoreBias<T>& bias_;
  BiasTable<T> table_;
};

// Windows are computed by threads in groups of about equal work, of which there are at most so
// many, whatever the number of threads.
constexpr int64_t kWindowGroups = 64;

// Calls body(group, window, memory) for all windows, with a Memory(heads, width) for each group.
template <typename Memory, typename Body>
void for_each_window(const Windows& windows, int64_t heads, int64_t width, const Body& body) {
  const int64_t columns = windows.ptr[windows.count], all = columns + windows.count;
  const auto begin_of = [&](int64_t group) {  // the first window at or behind its share of columns
    const int64_t share = all * group / kWindowGroups;
    int64_t low = 0, high = windows.count;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      windows.ptr[middle] + middle < share ? low = middle + 1 : high = middle;
    }
    return low;
  };
  const int64_t work = all * 4 * kWindow * heads * width;
  for_each_task(kWindowGroups, work, [&](int64_t group) {
    const int64_t begin = begin_of(group);
    const int64_t end = group + 1 < kWindowGroups ? begin_of(group + 1) : windows.count;
    if (begin == end) return;
    const Memory memory(heads, width);
    for (int64_t window = begin; window < end; ++window) body(group, window, memory);
  });
}

}  // namespace fastgraph
