// Exponentials of a whole vector at a time.
#pragma once

#include <cmath>
#include <cstdint>

#include "fastgraph/simd.h"

namespace fastgraph {

// exp(x) for x <= 0, within 2 units in the last place; NaN gives NaN, and what no normal number is
// small enough for gives 0: processors take a hundred cycles for others, and lanes that are not in
// use would need one in most rows.
// x = n ln 2 + r with |r| <= ln 2 / 2, and exp(r) by the polynomial of the Cephes library.
template <int N>
inline Vector<float, N> exp_of_negative(Vector<float, N> x) {
  using F = Vector<float, N>;
  using I = Vector<int32_t, N>;
  constexpr float kLowest = -87.336544f;  // the logarithm of the smallest normal number
  constexpr float kRound = 12582912.0f;   // 1.5 * 2^23: adding it rounds to an integer
  const I is_tiny = x < splat<float, N>(kLowest);
  x = is_tiny ? F{} : x;
  const auto times_plus = [](F a, F b, float c) {
    return multiply_add<float, N>(a, b, splat<float, N>(c));
  };
  const F shifted = times_plus(x, splat<float, N>(1.44269504088896341f), kRound);
  const F n = shifted - kRound;
  F r = multiply_add<float, N>(n, splat<float, N>(-0.693359375f), x);
  r = multiply_add<float, N>(n, splat<float, N>(2.12194440e-4f), r);
  F p = splat<float, N>(1.9875691500e-4f);
  p = times_plus(p, r, 1.3981999507e-3f);
  p = times_plus(p, r, 8.3334519073e-3f);
  p = times_plus(p, r, 4.1665795894e-2f);
  p = times_plus(p, r, 1.6666665459e-1f);
  p = times_plus(p, r, 5.0000001201e-1f);
  p = multiply_add<float, N>(p, r * r, r + 1.0f);
  const I exponent = (I)shifted - (I)splat<float, N>(kRound);
  return is_tiny ? F{} : p * (F)((exponent + 127) << 23);
}

template <int N>
inline Vector<double, N> exp_of_negative(Vector<double, N> x) {
  for (int i = 0; i < N; ++i) x[i] = std::exp(x[i]);
  return x;
}

}  // namespace fastgraph
