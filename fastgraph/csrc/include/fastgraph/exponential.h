// Exponentials of a whole vector at a time.
#pragma once

#include <cmath>
#include <cstdint>

#include "fastgraph/simd.h"

namespace fastgraph {

// exp(x) for x <= 0, within 2 units in the last place; NaN gives NaN and -infinity gives 0.
// x = n ln 2 + r with |r| <= ln 2 / 2, and exp(r) by the polynomial of the Cephes library.
template <int N>
inline Vector<float, N> exp_of_negative(Vector<float, N> x) {
  using F = Vector<float, N>;
  using I = Vector<int32_t, N>;
  constexpr float kLowest = -104.0f;     // exp of it rounds to 0
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  x = x < splat<float, N>(kLowest) ? splat<float, N>(kLowest) : x;
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
  // 2^n in two factors, since n goes below the exponent of the smallest normal number.
  const I exponent = (I)shifted - (I)splat<float, N>(kRound);
  const I first = exponent >> 1;
  const F low = (F)((first + 127) << 23), high = (F)((exponent - first + 127) << 23);
  return p * low * high;
}

template <int N>
inline Vector<double, N> exp_of_negative(Vector<double, N> x) {
  for (int i = 0; i < N; ++i) x[i] = std::exp(x[i]);
  return x;
}

}  // namespace fastgraph
