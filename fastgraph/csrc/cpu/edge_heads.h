// Values of heads for the channels of each, where a vector has channels of several heads.
#pragma once

#include <cstdint>

#include "fastgraph/inline.h"
#include "fastgraph/simd.h"

namespace fastgraph {

// Whether vectors of N lanes have the channels of whole heads, of several each.
template <int N>
FASTGRAPH_INLINE bool has_several_heads(int64_t of_head) {
  return of_head < N && N % of_head == 0;
}

// The heads of the lanes of a vector, which begins with a head of `of_head` channels.
template <typename A, int N>
FASTGRAPH_INLINE Vector<Bits<A>, N> heads_of_lanes(int64_t of_head) {
  return lane_numbers<Bits<A>, N>() / splat<Bits<A>, N>(static_cast<Bits<A>>(of_head));
}

// A vector with the values of heads, of which the first are read from p, where N can be.
template <typename A, int N>
FASTGRAPH_INLINE Vector<A, N> of_heads(const A* p, Vector<Bits<A>, N> heads) {
  const auto values = load<N>(p);
#if defined(__clang__)
  Vector<A, N> found{};
  for (int k = 0; k < N; ++k) found[k] = values[heads[k]];
  return found;
#else
  return __builtin_shuffle(values, heads);
#endif
}

}  // namespace fastgraph
