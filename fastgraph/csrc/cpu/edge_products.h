// Products of values of edges with matrices, and sums of their outer products, in blocks of both
// that stay in vector registers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "fastgraph/chunks.h"
#include "fastgraph/inline.h"
#include "fastgraph/memory.h"
#include "fastgraph/simd.h"

namespace fastgraph {

// A tile of sums has so many rows and vectors, which leaves registers for a row of the matrix.
constexpr int kProductVectors = kVectorRegisters >= 32 ? 4 : 2;
constexpr int kProductRows = 4;

namespace detail {

// kRows rows of the columns of C of out = x * matrix, of the columns from f on. Each number is
// summed in the order of the matrix's rows, however many rows there are beside it.
template <int kRows, typename C, typename A>
FASTGRAPH_INLINE void multiply_tile(const A* const* x, const A* matrix, int64_t depth,
                                    int64_t width, int64_t f, A* const* out) {
  matrix += f;
  constexpr int kLane = C::kLanes;
  using V = Vector<A, kLane>;
  V sum[kRows][C::kCount] = {};
  for (int64_t k = 0; k < depth; ++k, matrix += width) {
    V row[C::kCount];
#pragma GCC unroll 16
    for (int q = 0; q < C::kCount; ++q) row[q] = load<kLane>(matrix + q * kLane);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const V value = splat<A, kLane>(x[r][k]);
#pragma GCC unroll 16
      for (int q = 0; q < C::kCount; ++q) {
        sum[r][q] = multiply_add<A, kLane>(value, row[q], sum[r][q]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int q = 0; q < C::kCount; ++q) store<kLane>(out[r] + f + q * kLane, sum[r][q]);
  }
}

// The same for a row of which only some places are not zero.
template <typename C, typename A>
FASTGRAPH_INLINE void multiply_places(const A* x, const int32_t* places, int64_t count,
                                      const A* matrix, int64_t width, int64_t f, A* out) {
  constexpr int kLane = C::kLanes;
  Vector<A, kLane> sum[C::kCount] = {};
  for (int64_t i = 0; i < count; ++i) {
    const A* const row = matrix + places[i] * width + f;
    const auto value = splat<A, kLane>(x[places[i]]);
#pragma GCC unroll 16
    for (int q = 0; q < C::kCount; ++q) {
      sum[q] = multiply_add<A, kLane>(value, load<kLane>(row + q * kLane), sum[q]);
    }
  }
#pragma GCC unroll 16
  for (int q = 0; q < C::kCount; ++q) store<kLane>(out + f + q * kLane, sum[q]);
}

}  // namespace detail

// True if no value is infinite or NaN: zeros times them are zeros.
template <typename A>
bool are_finite(const A* x, int64_t count) {
  constexpr int N = kLanes<A>;
  Vector<A, N> zeros{};
  int64_t k = 0;
  for (; k + N <= count; k += N) zeros += load<N>(x + k) * Vector<A, N>{};
  A rest = sum_of<A, N>(zeros);
  for (; k < count; ++k) rest += x[k] * A{0};
  return rest == 0;
}

// The places in a row that are not zero, if they are few. The gradient of a maximum is one at few
// edges of a row.
template <typename A>
class FewPlaces {
 public:
  explicit FewPlaces(int64_t depth) : places_(scratch<int32_t>(depth + 1)) {}

  // True if they are so few that the others are left out.
  bool find(const A* x, int64_t depth) {
    if (depth < kLeastDepth || kFew * nonzeros(x, depth) > depth) return false;
    int32_t* const places = places_.get();
    int64_t count = 0, k = 0;
    // Nobody can tell which ones are zeros: a branch would be taken wrongly for most others.
    const auto take = [&](int64_t end) {
#pragma GCC unroll 8
      for (; k < end; ++k) {
        places[count] = static_cast<int32_t>(k);
        count += x[k] != 0;
      }
    };
    while (k + kTogether <= depth) {
      uint64_t words[kTogether * sizeof(A) / sizeof(uint64_t)], all = 0;
      std::memcpy(words, x + k, sizeof(words));
      for (const uint64_t word : words) all |= word;
      if ((all & ~kSigns) == 0) {
        k += kTogether;
      } else {
        take(k + kTogether);
      }
    }
    take(depth);
    count_ = count;
    return true;
  }

  const int32_t* get() const { return places_.get(); }
  int64_t count() const { return count_; }

 private:
  static constexpr int64_t kFew = 4, kLeastDepth = 8, kTogether = 16;
  static constexpr uint64_t kSigns = sizeof(A) == 4 ? 0x8000000080000000 : 0x8000000000000000;

  static int64_t nonzeros(const A* x, int64_t depth) {
    constexpr int N = kLanes<A>;
    using V = Vector<A, N>;
    V ones{};
    int64_t k = 0;
    for (; k + N <= depth; k += N) ones += load<N>(x + k) == V{} ? V{} : splat<A, N>(1);
    auto found = static_cast<int64_t>(sum_of<A, N>(ones));
    for (; k < depth; ++k) found += x[k] != 0;
    return found;
  }

  Scratch<int32_t> places_;
  int64_t count_ = 0;
};

// Products of rows with a matrix [depth, width].
template <typename A>
class Product {
 public:
  Product(const A* matrix, int64_t depth, int64_t width)
      : matrix_(matrix),
        depth_(depth),
        width_(width),
        is_finite_(are_finite(matrix, depth * width)),
        few_(depth) {}

  // out = x * matrix for some rows, at most kMost.
  template <int kMost>
  void run(const A* const* x, int64_t rows, A* out) {
    const A* dense[kMost];
    A* results[kMost];
    int64_t count = 0;
    for (int64_t r = 0; r < rows; ++r) {
      A* const result = out + r * width_;
      if (is_finite_ && few_.find(x[r], depth_)) {
        for_each_chunk<kLanes<A>, kVectorsOfChunk>(0, width_, [&](auto chunk, int64_t f) {
          detail::multiply_places<decltype(chunk)>(x[r], few_.get(), few_.count(), matrix_, width_,
                                                   f, result);
        });
        continue;
      }
      dense[count] = x[r];
      results[count++] = result;
    }
    for_each_chunk<kLanes<A>, kProductVectors>(0, width_, [&](auto chunk, int64_t f) {
      using C = decltype(chunk);
      int64_t r = 0;
      const auto tiles = [&](auto number) {
        constexpr int kRows = decltype(number)::value;
        for (; r + kRows <= count; r += kRows) {
          detail::multiply_tile<kRows, C>(dense + r, matrix_, depth_, width_, f, results + r);
        }
      };
      tiles(std::integral_constant<int, kProductRows>{});
      tiles(std::integral_constant<int, kProductRows / 2>{});
      tiles(std::integral_constant<int, 1>{});
    });
  }

 private:
  const A* matrix_;
  int64_t depth_, width_;
  bool is_finite_;
  FewPlaces<A> few_;
};

// The sum of outer products of pairs of rows, which are collected until there are some.
template <typename A>
class OuterSum {
 public:
  OuterSum(int64_t depth, int64_t width, A* sums)
      : depth_(depth),
        width_(width),
        sums_(sums),
        few_(depth),
        x_(scratch<A>(kCollected * depth)),
        y_(scratch<A>(kCollected * width)) {
    std::fill_n(sums, depth * width, A{});
  }

  void add(const A* const* x, const A* const* y, int64_t pairs) {
    for (int64_t g = 0; g < pairs; ++g) {
      if (few_.find(x[g], depth_) && are_finite(y[g], width_)) {
        for (int64_t i = 0; i < few_.count(); ++i) add_row(few_.get()[i], x[g], y[g]);
        continue;
      }
      std::memcpy(x_.get() + count_ * depth_, x[g], depth_ * sizeof(A));
      std::memcpy(y_.get() + count_ * width_, y[g], width_ * sizeof(A));
      if (++count_ == kCollected) finish();
    }
  }

  // Has all pairs in the sums.
  void finish() {
    for_each_part<kLanes<A>, kProductVectors>(0, width_, [&](auto chunk, int64_t f) {
      using C = decltype(chunk);
      int64_t k = 0;
      for (; k + kProductRows <= depth_; k += kProductRows) tile<kProductRows, C>(k, f);
      for (; k < depth_; ++k) tile<1, C>(k, f);
    });
    count_ = 0;
  }

 private:
  static constexpr int64_t kCollected = 32;

  // Adds to a row of the sums.
  void add_row(int64_t k, const A* x, const A* y) {
    A* const to = sums_ + k * width_;
    for_each_part<kLanes<A>, kProductVectors>(0, width_, [&](auto chunk, int64_t f) {
      using C = decltype(chunk);
      constexpr int kLane = C::kLanes;
      const auto value = splat<A, kLane>(x[k]);
#pragma GCC unroll 16
      for (int q = 0; q < C::kCount; ++q) {
        A* const own = to + f + q * kLane;
        const auto other = load<kLane>(y + f + q * kLane);
        store<kLane>(own, multiply_add<A, kLane>(value, other, load<kLane>(own)));
      }
    });
  }

  // The rows of the sums from k on, and the columns of C from f on.
  template <int kRows, typename C>
  FASTGRAPH_INLINE void tile(int64_t k, int64_t f) {
    constexpr int kLane = C::kLanes;
    using V = Vector<A, kLane>;
    V sum[kRows][C::kCount] = {};
    const A *x = x_.get() + k, *y = y_.get() + f;
    for (int64_t g = 0; g < count_; ++g, x += depth_, y += width_) {
      V row[C::kCount];
#pragma GCC unroll 16
      for (int q = 0; q < C::kCount; ++q) row[q] = load<kLane>(y + q * kLane);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const V value = splat<A, kLane>(x[r]);
#pragma GCC unroll 16
        for (int q = 0; q < C::kCount; ++q) {
          sum[r][q] = multiply_add<A, kLane>(value, row[q], sum[r][q]);
        }
      }
    }
    A* const to = sums_ + k * width_ + f;
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
      for (int q = 0; q < C::kCount; ++q) {
        A* const own = to + r * width_ + q * kLane;
        store<kLane>(own, load<kLane>(own) + sum[r][q]);
      }
    }
  }

  int64_t depth_, width_, count_ = 0;
  A* sums_;
  FewPlaces<A> few_;
  Scratch<A> x_, y_;
};

}  // namespace fastgraph
