// Maxima and minima of one or two columns over edges that are not grouped.
//
// Each edge shows its message to the row that it belongs to. With so few columns, all comparisons
// take less time than to group the edges.
#include "cpu/segment_reduce_coo.h"

#include <algorithm>
#include <limits>

#include "cpu/indices.h"
#include "fastgraph/memory.h"
#include "fastgraph/simd.h"

namespace fastgraph {
namespace {

// The largest value of a place so far, and how many equal it. A NaN replaces everything, a later
// NaN an earlier one, and a tie keeps the earlier.
template <typename A>
struct Largest {
  A best = -std::numeric_limits<A>::infinity();
  int32_t count = 0;

  void see(A value) {
    const bool takes = value > best || value != value;
    count = takes ? 1 : count + (value == best);
    best = takes ? value : best;
  }

  // The shares of the gradient: none of a NaN, and one of the zero that upstream's output starts
  // from.
  int32_t shares() const { return best == best ? count + (count > 0 && best == 0) : 0; }
};

// Shows W columns of each entry's message, times `sign`, to those of its row.
template <int W, typename T, typename Index, typename Message>
void see_entries(const Coo<Index>& graph, const T* x, const Message& message,
                 Largest<Accumulator<T>>* found) {
  with_access(graph.row, [&](auto row_of) {
    with_access(graph.col, [&](auto col_of) {
      for (int64_t e = 0; e < graph.row.size; ++e) {
        const int64_t row = row_of(e), col = col_of(e);
        for (int f = 0; f < W; ++f) found[row * W + f].see(message(e, load_one(x + col * W + f)));
      }
    });
  });
}

template <int W, typename T, typename Index>
void reduce(const Coo<Index>& graph, const T* weight, bool is_max, const T* x, Matrix<T> out,
            int32_t* ties) {
  using A = Accumulator<T>;
  // A minimum is the negated maximum of negated values, which is exact.
  const A sign = is_max ? A{1} : A{-1};
  const int64_t size = graph.num_rows * W;
  const auto found = scratch<Largest<A>>(size);
  std::fill_n(found.get(), size, Largest<A>{});
  if (weight) {
    // Messages that upstream would have stored in T tie after that rounding.
    const auto product = [&](int64_t e, A value) {
      return round_to<T, 1>(Vector<A, 1>{sign * load_one(weight + e) * value})[0];
    };
    see_entries<W>(graph, x, product, found.get());
  } else {
    see_entries<W>(graph, x, [sign](int64_t, A value) { return sign * value; }, found.get());
  }
  for (int64_t i = 0; i < size; ++i) {
    const Largest<A>& place = found[i];
    store_one(out.data + i, sign * (place.count > 0 ? place.best : A{0}));
    if (ties) ties[i] = place.shares();
  }
}

}  // namespace

template <typename T, typename Index>
void segment_reduce_coo(const Coo<Index>& graph, const T* weight, bool is_max, Matrix<const T> x,
                        Matrix<T> out, int32_t* ties) {
  if (x.width == 1) return reduce<1>(graph, weight, is_max, x.data, out, ties);
  reduce<kMostColumnsOfExtrema>(graph, weight, is_max, x.data, out, ties);
}

#define FASTGRAPH_INSTANTIATE_COO(Index)                                                      \
  template decltype(segment_reduce_coo<float, Index>) segment_reduce_coo<float, Index>;       \
  template decltype(segment_reduce_coo<double, Index>) segment_reduce_coo<double, Index>;     \
  template decltype(segment_reduce_coo<bfloat16, Index>) segment_reduce_coo<bfloat16, Index>; \
  template decltype(segment_reduce_coo<float16, Index>) segment_reduce_coo<float16, Index>;

FASTGRAPH_INSTANTIATE_COO(int32_t)
FASTGRAPH_INSTANTIATE_COO(int64_t)

}  // namespace fastgraph
