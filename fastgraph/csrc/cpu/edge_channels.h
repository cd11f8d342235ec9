// Instructions of edge programs on the channels of each head: the largest, the first, and parts.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "fastgraph/chunks.h"
#include "fastgraph/simd.h"

namespace fastgraph {

// The largest of some numbers; NaN if there is one.
template <typename A>
A largest_of(const A* x, int64_t count) {
  constexpr int N = kLanes<A>;
  using V = Vector<A, N>;
  const auto take = [](auto value, auto most) {
    return (value > most) | (value != value) ? value : most;
  };
  A most = -std::numeric_limits<A>::infinity();
  int64_t c = 0;
  if (count >= N) {
    V best = load<N>(x);
    for (c = N; c + N <= count; c += N) best = take(load<N>(x + c), best);
    for (int k = 0; k < N; ++k) most = most != most ? most : take(best[k], most);
  }
  for (; c < count; ++c) most = most != most ? most : take(x[c], most);
  return most;
}

// out = the largest of the channels of each head.
template <typename A>
void largest_of_heads(const A* const* in, int64_t heads, int64_t of_head, int64_t edges, A* out) {
  for (int64_t g = 0; g < edges; ++g) {
    for (int64_t h = 0; h < heads; ++h) *out++ = largest_of(in[g] + h * of_head, of_head);
  }
}

// out = 1 for the first channel of each head that is not 0, and 0 for all others.
template <typename A>
void first_of_heads(const A* const* in, int64_t heads, int64_t of_head, int64_t edges, A* out) {
  for (int64_t g = 0; g < edges; ++g) {
    for (int64_t h = 0; h < heads; ++h, out += of_head) {
      const A* const own = in[g] + h * of_head;
      std::fill_n(out, of_head, A{});
      const A* const first = std::find_if(own, own + of_head, [](A x) { return x != 0; });
      if (first != own + of_head) out[first - own] = 1;
    }
  }
}

// out = some channels of each head.
template <typename A>
void slice_heads(const A* const* in, int64_t heads, int64_t of_head, int64_t start, int64_t count,
                 int64_t edges, A* out) {
  for (int64_t g = 0; g < edges; ++g) {
    const A* from = in[g] + start;
    for (int64_t h = 0; h < heads; ++h, from += of_head, out += count) {
      std::memcpy(out, from, count * sizeof(A));
    }
  }
}

// out = the channels of each head among zeros.
template <typename A>
void pad_heads(const A* const* in, int64_t heads, int64_t of_head, int64_t start, int64_t count,
               int64_t edges, A* out) {
  std::fill_n(out, edges * heads * count, A{});
  out += start;
  for (int64_t g = 0; g < edges; ++g) {
    const A* from = in[g];
    for (int64_t h = 0; h < heads; ++h, from += of_head, out += count) {
      if (of_head == 1) {
        *out = *from;
      } else {
        std::memcpy(out, from, of_head * sizeof(A));
      }
    }
  }
}

}  // namespace fastgraph
