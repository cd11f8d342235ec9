// Which channels of entries are above 0, one bit for each: what a pass over sources needs to know
// of numbers that a pass over destinations has, instead of all that these are made of.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "fastgraph/inline.h"
#include "fastgraph/simd.h"
#include "fastgraph/views.h"

namespace fastgraph {

// [edges, heads, bytes].
struct Signs {
  uint8_t* data;
  int64_t heads;
  int64_t bytes;  // of a head

  uint8_t* at(int64_t edge, int64_t head) const { return data + (edge * heads + head) * bytes; }
};

// Behind the two numbers for each edge and head that a pass over destinations leaves, with bytes
// for all channels of x in whole numbers.
template <typename A, typename T>
Signs signs_behind(A* between, const Csr& graph, Heads<const T> x) {
  constexpr int64_t kBits = 8 * sizeof(A);
  const int64_t numbers = (x.width + kBits - 1) / kBits;
  auto* const first = const_cast<std::remove_const_t<A>*>(between);
  return {reinterpret_cast<uint8_t*>(first + 2 * graph.num_entries * x.heads), x.heads,
          numbers * static_cast<int64_t>(sizeof(A))};
}

// Bit i says that lane i is above 0.
template <typename A, int N>
FASTGRAPH_INLINE uint32_t positive_lanes(Vector<A, N> v) {
  [[maybe_unused]] constexpr size_t kBytes = N * sizeof(A);
  [[maybe_unused]] constexpr bool kFloat = sizeof(A) == 4;
#if defined(__AVX512F__)
  if constexpr (kBytes == 64 && kFloat) {
    return _mm512_cmp_ps_mask((__m512)v, _mm512_setzero_ps(), _CMP_GT_OQ);
  } else if constexpr (kBytes == 64) {
    return _mm512_cmp_pd_mask((__m512d)v, _mm512_setzero_pd(), _CMP_GT_OQ);
  }
#endif
#if defined(__AVX__)
  if constexpr (kBytes == 32 && kFloat) {
    return static_cast<uint32_t>(_mm256_movemask_ps((__m256)(v > Vector<A, N>{})));
  } else if constexpr (kBytes == 32) {
    return static_cast<uint32_t>(_mm256_movemask_pd((__m256d)(v > Vector<A, N>{})));
  }
#endif
#if defined(__SSE2__)
  if constexpr (kBytes == 16 && kFloat) {
    return static_cast<uint32_t>(_mm_movemask_ps((__m128)(v > Vector<A, N>{})));
  }
#endif
  uint32_t bits = 0;
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) bits |= static_cast<uint32_t>(v[i] > 0) << i;
  return bits;
}

// Leaves the signs of the channels from f on, a multiple of N. Where a byte has those of several
// vectors, the first comes first.
template <typename A, int N>
FASTGRAPH_INLINE void leave_signs(Vector<A, N> v, int64_t f, uint8_t* signs) {
  const uint32_t bits = positive_lanes<A, N>(v);
  uint8_t* const own = signs + f / 8;
  if constexpr (N >= 8) {
    std::memcpy(own, &bits, N / 8);  // both kinds of processors have low bytes first
  } else {
    *own = static_cast<uint8_t>((f % 8 == 0 ? 0 : *own) | bits << f % 8);
  }
}

// All bits of a lane are 1 where the channel from f on, a multiple of N, is above 0.
template <typename A, int N>
FASTGRAPH_INLINE Vector<Bits<A>, N> signs_of(const uint8_t* signs, int64_t f) {
  using B = Bits<A>;
  uint32_t bits = 0;
  if constexpr (N >= 8) {
    std::memcpy(&bits, signs + f / 8, N / 8);
  } else {
    bits = static_cast<uint32_t>(signs[f / 8]) >> f % 8;
  }
  Vector<B, N> lane;
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) lane[i] = B{1} << i;
  if constexpr (N == 1) lane[1] = 0;
  return (splat<B, N>(static_cast<B>(bits)) & lane) != Vector<B, N>{};
}

}  // namespace fastgraph
