// Dot products of two rows.
#pragma once

#include <cstdint>

#include "fastgraph/chunks.h"
#include "fastgraph/simd.h"

namespace fastgraph {

// The dot product of two rows; the order of additions depends on the width alone.
template <typename T>
inline Accumulator<T> dot(const T* a, const T* b, int64_t width) {
  using A = Accumulator<T>;
  constexpr int kLane = kLanes<T>;
  constexpr int kChains = 4;  // independent sums, to hide the latency of an addition
  Vector<A, kLane> sum[kChains] = {};
  int64_t f = 0;
  for (; f + kChains * kLane <= width; f += kChains * kLane) {
#pragma GCC unroll 4
    for (int q = 0; q < kChains; ++q) {
      sum[q] += load<kLane>(a + f + q * kLane) * load<kLane>(b + f + q * kLane);
    }
  }
  for (; f + kLane <= width; f += kLane) sum[0] += load<kLane>(a + f) * load<kLane>(b + f);
  const Vector<A, kLane> lanes = (sum[0] + sum[1]) + (sum[2] + sum[3]);
  A total = sum_of<A, kLane>(lanes);
  for_each_part<kLane, 1>(f, width, [&](auto chunk, int64_t g) {
    constexpr int N = decltype(chunk)::kLanes;
    total += sum_of<A, N>(load<N>(a + g) * load<N>(b + g));
  });
  return total;
}

// The dot product of two rows as the sum of the lanes that this returns; width >= kLanes.
template <int kLane, typename T>
inline Vector<Accumulator<T>, kLane> lanes_of_dot(const T* a, const T* b, int64_t width) {
  using A = Accumulator<T>;
  using V = Vector<A, kLane>;
  const auto product = [&](int64_t f) { return load<kLane>(a + f) * load<kLane>(b + f); };
  V even{}, odd{};
  int64_t f = 0;
  for (; f + 2 * kLane <= width; f += 2 * kLane) {
    even += product(f);
    odd += product(f + kLane);
  }
  if (f + kLane <= width) {
    even += product(f);
    f += kLane;
  }
  if (f < width) {  // the last vector, without what was added already
    const auto is_new = lane_numbers<A, kLane>() >= splat<A, kLane>(kLane - (width - f));
    odd += is_new ? product(width - kLane) : V{};
  }
  return even + odd;
}

}  // namespace fastgraph
