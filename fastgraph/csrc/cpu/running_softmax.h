// Sums of values weighted by the softmax of scores that come a few at a time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "fastgraph/chunks.h"
#include "fastgraph/elementary.h"
#include "fastgraph/simd.h"

namespace fastgraph {

// What is subtracted from scores before the exponential: the largest, or 0 where none is finite.
template <typename A, int N>
FASTGRAPH_INLINE Vector<A, N> subtracted(Vector<A, N> largest) {
  return largest == splat<A, N>(-std::numeric_limits<A>::infinity()) ? Vector<A, N>{} : largest;
}

// The state of a row. Each head has a score, and the same number of channels.
template <typename A>
struct RunningSoftmax {
  static constexpr int N = kLanes<A>;

  A* sums;     // of weighted values, for each channel
  A* largest;  // score of each head
  A* totals;   // of the exponentials of scores
  int64_t heads;
  int64_t of_head;

  static int64_t size(int64_t width, int64_t heads) { return width + 2 * heads; }

  RunningSoftmax(A* memory, int64_t width, int64_t heads)
      : sums(memory),
        largest(memory + width),
        totals(largest + heads),
        heads(heads),
        of_head(width / heads) {}

  void begin() {
    std::fill_n(sums, heads * of_head, A{});
    std::fill_n(largest, heads, -std::numeric_limits<A>::infinity());
    std::fill_n(totals, heads, A{});
  }

  // Begins with the largest scores of some edges.
  void begin(const A* const* scores, int64_t edges) {
    begin();
    for_each_part<N, 1>(0, heads, [&](auto chunk, int64_t h) {
      constexpr int kLane = decltype(chunk)::kLanes;
      auto most = load<kLane>(largest + h);
      for (int64_t g = 0; g < edges; ++g) most = larger<A, kLane>(load<kLane>(scores[g] + h), most);
      store<kLane>(largest + h, most);
    });
  }

  // Raises the largest scores to those of some edges. What has been summed up is then as if these
  // had been known before.
  void raise(const A* const* scores, int64_t edges) {
    for_each_part<N, 1>(0, heads, [&](auto chunk, int64_t h) {
      constexpr int kLane = decltype(chunk)::kLanes;
      using I = Vector<Bits<A>, kLane>;
      const auto before = load<kLane>(largest + h);
      auto now = before;
      for (int64_t g = 0; g < edges; ++g) now = larger<A, kLane>(load<kLane>(scores[g] + h), now);
      const I is_raised = now > before;
      if (max_of<Bits<A>, kLane>(-is_raised) == 0) return;
      store<kLane>(largest + h, now);
      scale<kLane>(h, exponential<A, kLane>(before - subtracted<A, kLane>(now)));
    });
  }

  // Adds the exponentials of the scores of some edges.
  void add(const A* const* exponentials, int64_t edges) {
    for_each_part<N, 1>(0, heads, [&](auto chunk, int64_t h) {
      constexpr int kLane = decltype(chunk)::kLanes;
      auto total = load<kLane>(totals + h);
      for (int64_t g = 0; g < edges; ++g) total += load<kLane>(exponentials[g] + h);
      store<kLane>(totals + h, total);
    });
  }

  // Adds what was found of later edges, and changes it.
  void combine(RunningSoftmax later) {
    raise(&later.largest, 1);
    later.raise(&largest, 1);
    for (int64_t h = 0; h < heads; ++h) totals[h] += later.totals[h];
    for (int64_t c = 0; c < heads * of_head; ++c) sums[c] += later.sums[c];
  }

  // Divides the sums by the totals, which become 1 over themselves.
  void finish() {
    for_each_part<N, 1>(0, heads, [&](auto chunk, int64_t h) {
      constexpr int kLane = decltype(chunk)::kLanes;
      const auto inverse = splat<A, kLane>(1) / load<kLane>(totals + h);
      store<kLane>(totals + h, inverse);
      if (of_head == 1) store<kLane>(sums + h, load<kLane>(sums + h) * inverse);
    });
    if (of_head == 1) return;
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t c = 0; c < of_head; ++c) sums[h * of_head + c] *= totals[h];
    }
  }

  // Multiplies the sums of some heads from h on.
  template <int kLane>
  void scale(int64_t h, Vector<A, kLane> factor) {
    store<kLane>(totals + h, load<kLane>(totals + h) * factor);
    if (of_head == 1) return store<kLane>(sums + h, load<kLane>(sums + h) * factor);
    for (int64_t i = 0; i < kLane; ++i) {
      A* const own = sums + (h + i) * of_head;
      for (int64_t c = 0; c < of_head; ++c) own[c] *= factor[i];
    }
  }
};

}  // namespace fastgraph
