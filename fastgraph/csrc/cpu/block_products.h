// Products of small dense matrices in working memory, and what brings rows of a tensor there. Rows
// of the right factor and of the product are padded to whole vectors.
#pragma once

#include <cstdint>
#include <utility>

#include "fastgraph/chunks.h"
#include "fastgraph/inline.h"
#include "fastgraph/simd.h"

namespace fastgraph {

// The least multiple of the vector's size that holds `width` accumulators.
template <typename A>
constexpr int64_t padded(int64_t width) {
  return (width + kLanes<A> - 1) / kLanes<A> * kLanes<A>;
}

// The left factor: element (m, k) is data[m * row + k * step], so that it may be a transpose.
template <typename A>
struct LeftFactor {
  const A* data;
  int64_t row;
  int64_t step;
};

// A matrix in working memory whose rows are `row` values apart.
template <typename A>
struct Block {
  A* data;
  int64_t row;
};

namespace detail {

// kRows rows and kVectors vectors of a product, which stay in registers.
template <bool kAdds, int kRows, int kVectors, typename A>
FASTGRAPH_INLINE void product_tile(int64_t depth, LeftFactor<A> left, Block<const A> right,
                                   Block<A> out) {
  constexpr int N = kLanes<A>;
  using V = Vector<A, N>;
  V sum[kRows][kVectors];
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 4
    for (int q = 0; q < kVectors; ++q) {
      sum[m][q] = kAdds ? load<N>(out.data + m * out.row + q * N) : V{};
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    V values[kVectors];
#pragma GCC unroll 4
    for (int q = 0; q < kVectors; ++q) values[q] = load<N>(right.data + k * right.row + q * N);
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      const V factor = splat<A, N>(left.data[m * left.row + k * left.step]);
#pragma GCC unroll 4
      for (int q = 0; q < kVectors; ++q) {
        sum[m][q] = multiply_add<A, N>(factor, values[q], sum[m][q]);
      }
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 4
    for (int q = 0; q < kVectors; ++q) store<N>(out.data + m * out.row + q * N, sum[m][q]);
  }
}

template <bool kAdds, int kRows, int kVectors, typename A>
void product_rows(int64_t rows, int64_t depth, LeftFactor<A> left, Block<const A> right,
                  Block<A> out) {
  for (; rows >= kRows; rows -= kRows) {
    product_tile<kAdds, kRows, kVectors, A>(depth, left, right, out);
    left.data += kRows * left.row;
    out.data += kRows * out.row;
  }
  if constexpr (kRows > 1) {
    if (rows > 0) product_rows<kAdds, kRows / 2, kVectors, A>(rows, depth, left, right, out);
  }
}

template <bool kAdds, int kVectors, typename A>
void product_columns(int64_t rows, int64_t width, int64_t depth, LeftFactor<A> left,
                     Block<const A> right, Block<A> out) {
  constexpr int kWidth = kVectors * kLanes<A>;
  // Registers for the sums, but for those that hold the right factor and one of the left.
  constexpr int kMost = (kVectorRegisters - 4) / kVectors;
  constexpr int kRows = kMost < 12 ? kMost : 12;
  for (; width >= kWidth; width -= kWidth) {
    product_rows<kAdds, kRows, kVectors, A>(rows, depth, left, right, out);
    right.data += kWidth;
    out.data += kWidth;
  }
  if constexpr (kVectors > 1) {
    product_columns<kAdds, kVectors / 2, A>(rows, width, depth, left, right, out);
  }
}

// The transpose of a square of vectors, by stages that interleave those half of it apart.
template <typename A, int N>
FASTGRAPH_INLINE void transpose_square(Vector<A, N> (&square)[N]) {
  constexpr auto kEach = std::make_index_sequence<N>{};
#pragma GCC unroll 4
  for (int stage = 1; stage < N; stage *= 2) {
    Vector<A, N> next[N];
#pragma GCC unroll 8
    for (int i = 0; i < N / 2; ++i) {
      next[2 * i] = pairs_of<0, A, N>(square[i], square[i + N / 2], kEach);
      next[2 * i + 1] = pairs_of<N / 2, A, N>(square[i], square[i + N / 2], kEach);
    }
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) square[i] = next[i];  // in registers, where a copy at once is not
  }
}

}  // namespace detail

// out[m][n] = sum over k < depth of left(m, k) * right[k][n], which kAdds adds to what stands
// there, for n < width, a multiple of the vector. Terms are added in the order of k.
template <bool kAdds, typename A>
void multiply(int64_t rows, int64_t width, int64_t depth, LeftFactor<A> left, Block<const A> right,
              Block<A> out) {
  constexpr int kVectors = kVectorRegisters > 16 ? 4 : 2;
  detail::product_columns<kAdds, kVectors, A>(rows, width, depth, left, right, out);
}

// to[r][c] = factor * from[r * row + c], and zeros from the width on to the end of a vector.
template <typename T, typename A = Accumulator<T>>
void copy_rows(const T* from, int64_t row, int64_t count, int64_t width, A factor, Block<A> to) {
  constexpr int N = kLanes<T>;
  for (int64_t r = 0; r < count; ++r, from += row) {
    A* target = to.data + r * to.row;
    for_each_part<N, 1>(0, width, [&](auto chunk, int64_t c) {
      constexpr int kLane = decltype(chunk)::kLanes;
      store<kLane>(target + c, factor * load<kLane>(from + c));
    });
    for (int64_t c = width; c < padded<A>(width); ++c) target[c] = 0;
  }
}

// to[c][r] = from[r * row + c], and zeros from the last row on to the end of a vector.
template <typename T, typename A = Accumulator<T>>
void copy_transposed(const T* from, int64_t row, int64_t count, int64_t width, Block<A> to) {
  constexpr int N = kLanes<T>;
  for (int64_t first = 0; first < count; first += N) {
    const T* rows = from + first * row;
    const auto present = static_cast<int>(count - first < N ? count - first : N);
    int64_t c = 0;
    for (; c + N <= width; c += N) {
      Vector<A, N> square[N];
#pragma GCC unroll 16
      for (int i = 0; i < N; ++i) {
        square[i] = i < present ? load<N>(rows + i * row + c) : Vector<A, N>{};
      }
      detail::transpose_square<A, N>(square);
#pragma GCC unroll 16
      for (int i = 0; i < N; ++i) store<N>(to.data + (c + i) * to.row + first, square[i]);
    }
    for (; c < width; ++c) {
      A* target = to.data + c * to.row + first;
      for (int i = 0; i < N; ++i) target[i] = i < present ? load_one(rows + i * row + c) : A{0};
    }
  }
}

}  // namespace fastgraph
