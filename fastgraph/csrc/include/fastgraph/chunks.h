// Cutting feature rows into chunks whose accumulators stay in registers.
#pragma once

#include <cstdint>

#include "fastgraph/inline.h"
#include "fastgraph/simd.h"

namespace fastgraph {

// Vectors of a row that are added up at once. With more, the prefetches of an entry wait for each
// other; with fewer, the work for an entry counts too often.
constexpr int kVectorsOfChunk = 8;

// kCount vectors of kLanes values each, known at compile time.
template <int kLanesOfChunk, int kCountOfChunk>
struct Chunk {
  static constexpr int kLanes = kLanesOfChunk;
  static constexpr int kCount = kCountOfChunk;
  static constexpr int kWidth = kLanes * kCount;
};

namespace detail {

template <int kLanes, int kCount, typename Body>
FASTGRAPH_INLINE int64_t sweep(int64_t begin, int64_t end, const Body& body) {
  for (; end - begin >= kLanes * kCount; begin += kLanes * kCount) {
    body(Chunk<kLanes, kCount>{}, begin);
  }
  if constexpr (kCount > 1) {
    return sweep<kLanes, kCount / 2>(begin, end, body);
  } else {
    return begin;
  }
}

}  // namespace detail

// Calls body(Chunk{}, first) so that the chunks cover [begin, end). The last chunk may overlap the
// one before it: every value depends on its own column only, so it is computed twice, alike.
// Ranges narrower than a register use narrower vectors, several in a chunk whatever kCount is: a
// body goes over all of them.
template <int kLanes, int kCount, typename Body>
FASTGRAPH_INLINE void for_each_chunk(int64_t begin, int64_t end, const Body& body) {
  if (end - begin >= kLanes) {
    const int64_t rest = detail::sweep<kLanes, kCount>(begin, end, body);
    if (rest < end) body(Chunk<kLanes, 1>{}, end - kLanes);
  } else if constexpr (kLanes > 4) {
    for_each_chunk<4, kLanes / 4>(begin, end, body);
  } else if constexpr (kLanes > 1) {
    for_each_chunk<1, kLanes>(begin, end, body);
  }
}

// The same without overlap, for bodies that add to what stands in a column: the rest of a range is
// covered by ever narrower vectors. Bodies are large here, those of attention, and lose more than
// they gain where all of this is inlined into their callers.
template <int kLanes, int kCount, typename Body>
void for_each_part(int64_t begin, int64_t end, const Body& body) {
  const int64_t rest = detail::sweep<kLanes, kCount>(begin, end, body);
  if constexpr (kLanes > 1) {
    if (rest < end) for_each_part<kLanes / 2, 1>(rest, end, body);
  }
}

}  // namespace fastgraph
