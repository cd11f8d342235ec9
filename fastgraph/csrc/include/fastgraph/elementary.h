// Elementary functions of a whole vector at a time: polynomials in float, those of C in double.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "fastgraph/simd.h"

namespace fastgraph {

template <typename A, int N, typename Function>
inline Vector<A, N> for_each_lane(Vector<A, N> x, const Function& function) {
  for (int i = 0; i < N; ++i) x[i] = function(x[i]);
  return x;
}

template <typename A, int N>
inline Vector<A, N> absolute(Vector<A, N> x) {
  using I = Vector<Bits<A>, N>;
  return (Vector<A, N>)((I)x & splat<Bits<A>, N>(std::numeric_limits<Bits<A>>::max()));
}

namespace detail {

// exp(r) - 1 where x = exponent ln 2 + r with |r| <= ln 2 / 2, by the polynomial of Cephes. The
// exponent is a whole number.
template <int N>
inline Vector<float, N> reduced_expm1(Vector<float, N> x, Vector<float, N>& exponent) {
  using F = Vector<float, N>;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const auto times_plus = [](F a, F b, float c) {
    return multiply_add<float, N>(a, b, splat<float, N>(c));
  };
  exponent = times_plus(x, splat<float, N>(1.44269504088896341f), kRound) - kRound;
  F r = multiply_add<float, N>(exponent, splat<float, N>(-0.693359375f), x);
  r = multiply_add<float, N>(exponent, splat<float, N>(2.12194440e-4f), r);
  F p = splat<float, N>(1.9875691500e-4f);
  p = times_plus(p, r, 1.3981999507e-3f);
  p = times_plus(p, r, 8.3334519073e-3f);
  p = times_plus(p, r, 4.1665795894e-2f);
  p = times_plus(p, r, 1.6666665459e-1f);
  p = times_plus(p, r, 5.0000001201e-1f);
  return multiply_add<float, N>(p, r * r, r);
}

// x * 2^exponent, where that itself may be no number of its type: in two steps.
template <int N>
inline Vector<float, N> scaled(Vector<float, N> x, Vector<float, N> exponent) {
#if defined(__AVX512F__)
  if constexpr (N == 16) {
    return (Vector<float, N>)_mm512_scalef_ps((__m512)x, (__m512)exponent);
  }
#endif
  using F = Vector<float, N>;
  const auto whole = __builtin_convertvector(exponent, Vector<int32_t, N>);
  const auto half = whole >> 1;
  return x * (F)((half + 127) << 23) * (F)((whole - half + 127) << 23);
}

// The smaller of two vectors lane by lane; b where they are equal or one is NaN.
template <int N>
inline Vector<float, N> smaller(Vector<float, N> a, Vector<float, N> b) {
#if defined(__AVX512F__)
  if constexpr (N == 16) return (Vector<float, N>)_mm512_min_ps((__m512)a, (__m512)b);
#endif
  return a < b ? a : b;
}

// x within the range in which exponentials of float are neither 0 nor infinite; NaN stays.
template <int N>
inline Vector<float, N> within_exponents(Vector<float, N> x) {
  x = larger<float, N>(splat<float, N>(-104.0f), x);
  return smaller<N>(splat<float, N>(89.0f), x);
}

}  // namespace detail

template <typename A, int N>
inline Vector<A, N> exponential(Vector<A, N> x) {
  if constexpr (std::is_same_v<A, float>) {
    Vector<float, N> exponent;
    const auto q = detail::reduced_expm1<N>(detail::within_exponents<N>(x), exponent);
    return detail::scaled<N>(q + 1.0f, exponent);
  } else {
    return for_each_lane<A, N>(x, [](A v) { return std::exp(v); });
  }
}

template <typename A, int N>
inline Vector<A, N> exponential_minus_1(Vector<A, N> x) {
  if constexpr (std::is_same_v<A, float>) {
    Vector<float, N> exponent;
    const auto q = detail::reduced_expm1<N>(detail::within_exponents<N>(x), exponent);
    const auto power = detail::scaled<N>(splat<float, N>(1.0f), exponent);
    const auto large = detail::scaled<N>(q + 1.0f, exponent);  // of which 1 is less than a rounding
    return x > splat<float, N>(40.0f) ? large : q * power + (power - 1.0f);
  } else {
    return for_each_lane<A, N>(x, [](A v) { return std::expm1(v); });
  }
}

// By the polynomial of Cephes for the mantissa between sqrt(1/2) and sqrt(2).
template <typename A, int N>
inline Vector<A, N> logarithm(Vector<A, N> x) {
  if constexpr (std::is_same_v<A, float>) {
    using F = Vector<float, N>;
    using I = Vector<int32_t, N>;
    const I is_subnormal = x < splat<float, N>(std::numeric_limits<float>::min());
    const F normal = is_subnormal ? x * 8388608.0f : x;
    const I bits = (I)normal;
    F m = (F)((bits & 0x7fffff) | 0x3f000000);
    const I is_low = m < splat<float, N>(0.707106781f);
    const I exponent = (bits >> 23) - 126 + is_low - (is_subnormal & 23);
    m = (is_low ? m + m : m) - 1.0f;
    const F e = __builtin_convertvector(exponent, F), z = m * m;
    F y = m * 7.0376836292e-2f - 1.1514610310e-1f;
    y = y * m + 1.1676998740e-1f;
    y = y * m - 1.2420140846e-1f;
    y = y * m + 1.4249322787e-1f;
    y = y * m - 1.6668057665e-1f;
    y = y * m + 2.0000714765e-1f;
    y = y * m - 2.4999993993e-1f;
    y = y * m + 3.3333331174e-1f;
    y = y * m * z - e * 2.12194440e-4f - z * 0.5f;
    const F result = m + y + e * 0.693359375f;
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    const F of_others = x < F{} ? splat<float, N>(std::numeric_limits<float>::quiet_NaN()) : x;
    const F of_zero = x == F{} ? splat<float, N>(-kInfinity) : of_others;
    return (x > F{}) & (x < splat<float, N>(kInfinity)) ? result : of_zero;
  } else {
    return for_each_lane<A, N>(x, [](A v) { return std::log(v); });
  }
}

// The logarithm of the rounded sum, corrected by how it was rounded.
template <typename A, int N>
inline Vector<A, N> logarithm_plus_1(Vector<A, N> x) {
  if constexpr (std::is_same_v<A, float>) {
    using F = Vector<float, N>;
    const F sum = x + 1.0f, rest = sum - 1.0f;
    const F result = logarithm<float, N>(sum) * (x / rest);
    const auto is_exact =
        (rest == x) | (sum == splat<float, N>(std::numeric_limits<float>::infinity()));
    const F exact = is_exact ? logarithm<float, N>(sum) : result;
    return rest == F{} ? x : exact;
  } else {
    return for_each_lane<A, N>(x, [](A v) { return std::log1p(v); });
  }
}

template <typename A, int N>
inline Vector<A, N> hyperbolic_tangent(Vector<A, N> x) {
  if constexpr (std::is_same_v<A, float>) {
    using F = Vector<float, N>;
    using I = Vector<int32_t, N>;
    const F magnitude = absolute<float, N>(x), most = splat<float, N>(20.0f);
    const F t = exponential_minus_1<float, N>((magnitude > most ? most : magnitude) * 2.0f);
    const I sign = (I)x & splat<int32_t, N>(std::numeric_limits<int32_t>::min());
    return (F)((I)(t / (t + 2.0f)) | sign);
  } else {
    return for_each_lane<A, N>(x, [](A v) { return std::tanh(v); });
  }
}

// Within 3 units in the last place: x times a polynomial of its square up to 1, and beyond it one
// of the logarithm of 1 - erf(x), both minimax ones; from 4 on 1 is the next number.
template <typename A, int N>
inline Vector<A, N> error_function(Vector<A, N> x) {
  if constexpr (std::is_same_v<A, float>) {
    using F = Vector<float, N>;
    using I = Vector<int32_t, N>;
    const auto times_plus = [](F a, F b, float c) {
      return multiply_add<float, N>(a, b, splat<float, N>(c));
    };
    const F square = x * x, magnitude = absolute<float, N>(x), most = splat<float, N>(4.0f);
    F p = splat<float, N>(7.85385782e-5f);
    p = times_plus(p, square, -8.01019254e-4f);
    p = times_plus(p, square, 5.18832775e-3f);
    p = times_plus(p, square, -2.6853811e-2f);
    p = times_plus(p, square, 1.12835854e-1f);
    p = times_plus(p, square, -3.7612626e-1f);
    p = times_plus(p, square, 1.12837911f);
    const F t = magnitude > most ? most : magnitude;
    F q = splat<float, N>(1.86380086e-4f);
    q = times_plus(q, t, -2.94766668e-3f);
    q = times_plus(q, t, 2.18380969e-2f);
    q = times_plus(q, t, -1.03106819e-1f);
    q = times_plus(q, t, -6.38144732e-1f);
    q = times_plus(q, t, -1.12708926f);
    q = times_plus(q, t, -3.41512583e-4f);
    const I sign = (I)x & splat<int32_t, N>(std::numeric_limits<int32_t>::min());
    const F large = (F)((I)(1.0f - exponential<float, N>(q)) | sign);
    return magnitude > splat<float, N>(1.0f) ? large : x * p;
  } else {
    return for_each_lane<A, N>(x, [](A v) { return std::erf(v); });
  }
}

// The angle of (x, y), signs of zeros and infinities as in C. Within 2.5 units in the last place, 2
// where products and sums are fused: of the smaller over the larger, which is at most 1, by a
// minimax polynomial of its square.
template <typename A, int N>
inline Vector<A, N> angle(Vector<A, N> y, Vector<A, N> x) {
  if constexpr (std::is_same_v<A, float>) {
    using F = Vector<float, N>;
    using I = Vector<int32_t, N>;
    const auto times_plus = [](F a, F b, float c) {
      return multiply_add<float, N>(a, b, splat<float, N>(c));
    };
    const F of_y = absolute<float, N>(y), of_x = absolute<float, N>(x);
    const I is_steep = of_y > of_x;
    const F most = is_steep ? of_y : of_x, least = is_steep ? of_x : of_y;
    const F one = splat<float, N>(1.0f), quotient = least / most;
    // Both are infinite, or both are 0: as C has it.
    const F alike = most > one ? one : F{};
    const F q = (least == most) & ((most - most != F{}) | (most == F{})) ? alike : quotient;
    const F square = q * q;
    F p = splat<float, N>(2.92069279e-3f);
    p = times_plus(p, square, -1.63679309e-2f);
    p = times_plus(p, square, 4.32118662e-2f);
    p = times_plus(p, square, -7.55221471e-2f);
    p = times_plus(p, square, 1.06660046e-1f);
    p = times_plus(p, square, -1.42110556e-1f);
    p = times_plus(p, square, 1.99937731e-1f);
    p = times_plus(p, square, -3.33331525e-1f);
    F result = multiply_add<float, N>(p * square, q, q);
    result = is_steep ? 1.57079632679489662f - result : result;
    result = (I)x < I{} ? 3.14159265358979324f - result : result;
    const I sign = (I)y & splat<int32_t, N>(std::numeric_limits<int32_t>::min());
    return (x != x) | (y != y) ? x + y : (F)((I)result | sign);
  } else {
    for (int k = 0; k < N; ++k) y[k] = std::atan2(y[k], x[k]);
    return y;
  }
}

template <typename A, int N>
inline Vector<A, N> logistic(Vector<A, N> x) {
  return A{1} / (exponential<A, N>(-x) + A{1});
}

template <typename A, int N>
inline Vector<A, N> square_root(Vector<A, N> x) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<A, float> && N == 16) {
    return (Vector<A, N>)_mm512_sqrt_ps((__m512)x);
  }
#endif
  return for_each_lane<A, N>(x, [](A v) { return std::sqrt(v); });
}

}  // namespace fastgraph
