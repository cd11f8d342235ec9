// Sums of few columns over edges that are not grouped.
//
// Each edge adds its message to the row that it belongs to. With so few columns, all additions take
// less time than to group the edges.
#include "cpu/spmm_coo.h"

#include <algorithm>
#include <type_traits>
#include <vector>

#include "cpu/indices.h"
#include "fastgraph/memory.h"
#include "fastgraph/schedule.h"
#include "fastgraph/simd.h"

namespace fastgraph {
namespace {

// The sums of rows of W columns. A row is cut after kMaxPiece entries, as spmm cuts it, so that it
// comes to the same bits.
template <typename A, int W>
class Sums {
 public:
  explicit Sums(int64_t rows)
      : size_(rows * W), piece_(scratch<A>(size_)), count_(scratch<int32_t>(rows)) {
    std::fill_n(piece_.get(), size_, A{});
    std::fill_n(count_.get(), rows, 0);
  }

  // Calls add(e, sum) for all entries e from `first` on that are in its row; returns the next one.
  template <typename RowOf, typename Add>
  int64_t add_run(const RowOf& row_of, int64_t first, int64_t end, const Add& add) {
    const int64_t row = row_of(first);
    A sum[W];
    std::copy_n(&piece_[row * W], W, sum);
    int32_t count = count_[row];
    int64_t e = first;
    do {
      add(e, sum);
      if (++count == kMaxPiece) {
        cut(row, sum);
        count = 0;
      }
    } while (++e < end && row_of(e) == row);
    std::copy_n(sum, W, &piece_[row * W]);
    count_[row] = count;
    return e;
  }

  A total(int64_t place) const { return (before_.empty() ? A{} : before_[place]) + piece_[place]; }

  // The entries of a row.
  int64_t size(int64_t row) const {
    return (pieces_.empty() ? 0 : kMaxPiece * pieces_[row]) + count_[row];
  }

 private:
  void cut(int64_t row, A (&sum)[W]) {
    if (before_.empty()) {
      before_.resize(size_);
      pieces_.resize(size_ / W);
    }
    ++pieces_[row];
    for (int f = 0; f < W; ++f) {
      before_[row * W + f] += sum[f];
      sum[f] = 0;
    }
  }

  int64_t size_;
  Scratch<A> piece_;             // the last one of each row
  Scratch<int32_t> count_;       // of its entries
  std::vector<A> before_;        // the sums of the others, once there are any
  std::vector<int32_t> pieces_;  // the others of each row
};

// sum += coefficient(e, column of e) * its row of x, of W columns, for all entries, in their order.
template <int W, typename T, typename Index, typename Coefficient>
void add_entries(const Coo<Index>& graph, const T* x, const Coefficient& coefficient,
                 Sums<Accumulator<T>, W>& sums) {
  with_access(graph.row, [&](auto row_of) {
    with_access(graph.col, [&](auto col_of) {
      const int64_t end = graph.row.size;
      for (int64_t e = 0; e < end;) {
        e = sums.add_run(row_of, e, end, [&](int64_t e, Accumulator<T>(&sum)[W]) {
          const int64_t col = col_of(e);
          const Accumulator<T> factor = coefficient(e, col);
          for (int f = 0; f < W; ++f) sum[f] += factor * load_one(x + col * W + f);
        });
      }
    });
  });
}

// Adds up rows `x` of W columns, of which `out` has the first ones.
template <int W, typename V, typename T, typename Index>
void add_up(const Coo<Index>& graph, const T* weight, Accumulator<T>* inverse_degree,
            const Accumulator<T>* col_scale, const V* x, Matrix<T> out) {
  using A = Accumulator<T>;
  Sums<A, W> sums(graph.num_rows);
  if (weight && col_scale) {
    const auto product = [&](int64_t e, int64_t col) {
      return col_scale[col] * load_one(weight + e);
    };
    add_entries(graph, x, product, sums);
  } else if (weight) {
    add_entries(graph, x, [&](int64_t e, int64_t) { return load_one(weight + e); }, sums);
  } else if (col_scale) {
    add_entries(graph, x, [&](int64_t, int64_t col) { return col_scale[col]; }, sums);
  } else {
    add_entries(graph, x, [](int64_t, int64_t) { return A{1}; }, sums);
  }
  for (int64_t row = 0; row < graph.num_rows; ++row) {
    A scale{1};
    if (inverse_degree) {
      scale = A{1} / static_cast<A>(std::max<int64_t>(sums.size(row), 1));
      inverse_degree[row] = scale;
    }
    T* of_row = out.row(row);
    for (int64_t f = 0; f < out.width; ++f) store_one(of_row + f, scale * sums.total(row * W + f));
  }
}

// The same for any number of columns up to W: rows are copied to where each has W values, so that
// they are added up as vectors.
template <int W, typename T, typename Index>
void add_up_padded(const Coo<Index>& graph, const T* weight, Accumulator<T>* inverse_degree,
                   const Accumulator<T>* col_scale, Matrix<const T> x, Matrix<T> out) {
  using A = Accumulator<T>;
  if constexpr (std::is_same_v<A, T>) {
    if (x.width == W) return add_up<W>(graph, weight, inverse_degree, col_scale, x.data, out);
  }
  const auto padded = scratch<A>(x.rows * W);
  for (int64_t row = 0; row < x.rows; ++row) {
    const T* from = x.row(row);
    A* to = &padded[row * W];
    for (int64_t f = 0; f < x.width; ++f) to[f] = load_one(from + f);
    std::fill(to + x.width, to + W, A{});
  }
  add_up<W>(graph, weight, inverse_degree, col_scale, padded.get(), out);
}

}  // namespace

template <typename T, typename Index>
void spmm_coo(const Coo<Index>& graph, const T* weight, Accumulator<T>* inverse_degree,
              const Accumulator<T>* col_scale, Matrix<const T> x, Matrix<T> out) {
  if (x.width == 1) return add_up<1>(graph, weight, inverse_degree, col_scale, x.data, out);
  if (x.width == 2) return add_up<2>(graph, weight, inverse_degree, col_scale, x.data, out);
  if (x.width <= 4) return add_up_padded<4>(graph, weight, inverse_degree, col_scale, x, out);
  add_up_padded<kMostColumns>(graph, weight, inverse_degree, col_scale, x, out);
}

#define FASTGRAPH_INSTANTIATE_COO(Index)                                  \
  template decltype(spmm_coo<float, Index>) spmm_coo<float, Index>;       \
  template decltype(spmm_coo<double, Index>) spmm_coo<double, Index>;     \
  template decltype(spmm_coo<bfloat16, Index>) spmm_coo<bfloat16, Index>; \
  template decltype(spmm_coo<float16, Index>) spmm_coo<float16, Index>;

FASTGRAPH_INSTANTIATE_COO(int32_t)
FASTGRAPH_INSTANTIATE_COO(int64_t)

}  // namespace fastgraph
