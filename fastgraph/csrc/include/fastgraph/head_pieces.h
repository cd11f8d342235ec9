// The channels of all heads of a row in vectors.
//
// A vector has channels of one head where that fills it. Of narrow heads that stand side by side it
// has several whole ones, so that what a row costs goes by its channels, not by its heads.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "fastgraph/inline.h"
#include "fastgraph/simd.h"
#include "fastgraph/views.h"

namespace fastgraph {

// Some heads of a row, known at compile time: kCount vectors of kLanes channels of one head, or
// kVectors vectors of other heads each. Of those one vector has kShared, 1 or 2.
template <int kLanesOfPiece, int kVectorsOfPiece, int kCountOfPiece, int kSharedOfPiece = 1>
struct Piece {
  static constexpr int kLanes = kLanesOfPiece;
  static constexpr int kVectors = kVectorsOfPiece;
  static constexpr int kCount = kCountOfPiece;
  static constexpr int kShared = kSharedOfPiece;

  // The first head of a vector, counted from that of the piece.
  static constexpr int64_t first_head(int vector) { return vector * kShared; }
};

namespace detail {

// Pieces of the heads from `first` on, each for itself.
template <int kLane, int kCount, typename Body>
FASTGRAPH_INLINE void sweep_pieces(int64_t first, int64_t heads, int64_t begin, int64_t end,
                                   const Body& body) {
  for (; end - begin >= kLane * kCount; begin += kLane * kCount) {
    int64_t head = first;
    if constexpr (kCount == 1) {
      for (; head + 4 <= heads; head += 4) body(Piece<kLane, 4, 1>{}, head, begin);
    }
    for (; head < heads; ++head) body(Piece<kLane, 1, kCount>{}, head, begin);
  }
  if constexpr (kCount > 1) {
    sweep_pieces<kLane, kCount / 2>(first, heads, begin, end, body);
  } else if constexpr (kLane > 1) {
    if (begin < end) sweep_pieces<kLane / 2, 1>(first, heads, begin, end, body);
  }
}

// Pieces of two heads that share a vector. Returns the first head of those that are too few.
template <int kLane, int kVectors, typename Body>
FASTGRAPH_INLINE int64_t sweep_shared(int64_t head, int64_t heads, const Body& body) {
  for (; head + 2 * kVectors <= heads; head += 2 * kVectors) {
    body(Piece<kLane, kVectors, 1, 2>{}, head, 0);
  }
  if constexpr (kVectors > 1) {
    return sweep_shared<kLane, kVectors / 2>(head, heads, body);
  } else {
    return head;
  }
}

// {v[0], v[0], ..., v[N / 2 + 1], ...}: the two numbers of a vector that repeats them.
template <typename A, int N, size_t... kLane>
FASTGRAPH_INLINE Vector<A, N> halves_of(Vector<A, N> v, std::index_sequence<kLane...>) {
#if defined(__clang__)
  return __builtin_shufflevector(v, v, (kLane / 2 * 2 + 2 * kLane / N)...);
#else
  return __builtin_shuffle(v, Vector<Bits<A>, N>{(kLane / 2 * 2 + 2 * kLane / N)...});
#endif
}

}  // namespace detail

// Calls body(Piece{}, first head, first channel) so that the pieces cover the channels of all heads
// once: several heads that fill a vector each, or as many vectors of one head.
template <typename T, typename Body>
FASTGRAPH_INLINE void for_each_piece(int64_t heads, int64_t width, const Body& body) {
  detail::sweep_pieces<kLanes<T>, 4>(0, heads, 0, width, body);
}

// The same where two narrow heads may share a vector: if they are `gapless`, which is to say stand
// side by side wherever the body reads and writes them. Not of double: of the ways to repeat two of
// them GCC takes one through memory, which waits for what it has just stored.
template <typename T, typename Body>
FASTGRAPH_INLINE void for_each_piece(int64_t heads, int64_t width, bool gapless, const Body& body) {
  constexpr int kLane = kLanes<T>;
  int64_t head = 0;
  if constexpr (sizeof(Accumulator<T>) == sizeof(float)) {
    if (gapless && 2 * width == kLane) head = detail::sweep_shared<kLane, 4>(0, heads, body);
  }
  if (head < heads) detail::sweep_pieces<kLane, 4>(head, heads, 0, width, body);
}

// The numbers of the heads in a vector of a piece, each in the lanes of its channels.
template <typename P, typename A>
FASTGRAPH_INLINE Vector<A, P::kLanes> of_heads(const A* numbers) {
  constexpr int N = P::kLanes;
  if constexpr (P::kShared == 1) {
    return splat<A, N>(*numbers);
  } else {
    static_assert(P::kShared == 2 && sizeof(A) == 4);
    uint64_t pair;
    std::memcpy(&pair, numbers, sizeof(pair));
    const auto repeated = (Vector<A, N>)splat<uint64_t, N / 2>(pair);
    return detail::halves_of<A, N>(repeated, std::make_index_sequence<N>{});
  }
}

// Adds the sums of the channels of each head of a piece to the numbers of its heads. Writes v.
template <typename P, typename A>
FASTGRAPH_INLINE void add_sums(Vector<A, P::kLanes> (&v)[P::kVectors], A* to) {
  constexpr int N = P::kLanes, kHeads = P::kVectors * P::kShared;
  if constexpr (P::kShared == 2) {
    // As sums_of() has them, of half the lanes. A vector without a partner is its own.
    constexpr auto kEach = std::make_index_sequence<N>{};
    int left = P::kVectors;
#pragma GCC unroll 4
    for (int lanes = N / 2; lanes > 1; lanes /= 2) {
      const int pairs = (left + 1) / 2;
#pragma GCC unroll 2
      for (int i = 0; i < pairs; ++i) {
        v[i] =
            detail::sums_of_pairs<A, N>(v[2 * i], v[2 * i + 1 < left ? 2 * i + 1 : 2 * i], kEach);
      }
      left = pairs;
    }
    Vector<A, kHeads> sums;
    std::memcpy(&sums, v, sizeof(sums));
    store<kHeads>(to, load<kHeads>(to) + sums);
  } else if constexpr (kHeads == 4 && N > 4) {
    Vector<A, N / 2> folded[kHeads];
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; ++h) {
      Vector<A, N / 2> half[2];
      std::memcpy(half, &v[h], sizeof(half));
      folded[h] = half[0] + half[1];
    }
    add_sums<Piece<N / 2, kHeads, 1>>(folded, to);
  } else if constexpr (kHeads == 4 && N == 4) {
    store<N>(to, load<N>(to) + sums_of<A, N>(v, N));
  } else {
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; ++h) to[h] += sum_of<A, N>(v[h]);
  }
}

}  // namespace fastgraph
