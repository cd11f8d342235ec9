// Fixed-width vectors on top of the compiler's vector extension, and the conversions between the
// element types of tensors and the types that CPU kernels accumulate in.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "fastgraph/types.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace fastgraph {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kVectorRegisters = 32;
#else
constexpr int kVectorRegisters = 16;
#endif

// Values of type T that one register holds after conversion to the accumulator type.
template <typename T>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(Accumulator<T>));

// A single value has a lane beside it that is never looked at: compilers have registers for two
// lanes, and keep one in memory.
template <typename T, int N>
struct VectorOf {
  typedef T type __attribute__((vector_size((N == 1 ? 2 : N) * sizeof(T))));
};
template <typename T, int N>
using Vector = typename VectorOf<T, N>::type;

// The integer type as wide as T: what comparing two vectors of T yields (0 or -1 in each lane).
template <typename T>
using Bits = std::conditional_t<sizeof(T) == 8, int64_t, int32_t>;

// The difference from 0 is the value itself, also of -0, so that compilers leave it out; in a sum
// with 0 they have to add.
template <typename T, int N>
inline Vector<T, N> splat(T value) {
  return value - Vector<T, N>{};
}

template <int N, typename T>
inline Vector<T, N> load_raw(const T* p) {
  Vector<T, N> v{};
  std::memcpy(&v, p, N * sizeof(T));
  return v;
}

template <int N, typename T>
inline void store_raw(T* p, Vector<T, N> v) {
  std::memcpy(p, &v, N * sizeof(T));
}

// Whether the processor can store without filling caches.
#if defined(__SSE2__)
constexpr bool kStreams = true;
#else
constexpr bool kStreams = false;
#endif

// The same without filling caches where the processor can; p must be aligned to the vector. Other
// threads see it after finish_streams().
template <int N, typename T>
inline void stream_raw(T* p, Vector<T, N> v) {
  [[maybe_unused]] constexpr size_t kBytes = N * sizeof(T);  // used where there are such stores
#if defined(__AVX512F__)
  if constexpr (kBytes == 64) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(p), (__m512i)v);
    return;
  }
#endif
#if defined(__AVX__)
  if constexpr (kBytes == 32) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), (__m256i)v);
    return;
  }
#endif
#if defined(__SSE2__)
  if constexpr (kBytes == 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(p), (__m128i)v);
    return;
  }
#endif
  store_raw<N>(p, v);
}

inline void finish_streams() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// The products of the lower halves of lanes.
template <int N>
inline Vector<uint64_t, N> times(Vector<uint64_t, N> a, Vector<uint64_t, N> b) {
#if defined(__AVX512F__)
  if constexpr (N == 8) return (Vector<uint64_t, N>)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#endif
#if defined(__AVX2__)
  if constexpr (N == 4) return (Vector<uint64_t, N>)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#endif
#if defined(__SSE2__)
  if constexpr (N == 2) return (Vector<uint64_t, N>)_mm_mul_epu32((__m128i)a, (__m128i)b);
#endif
  return (a & 0xffffffffu) * (b & 0xffffffffu);
}

// 0, 1, 2, ...
template <typename A, int N>
inline Vector<A, N> lane_numbers() {
  Vector<A, N> lane;
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) lane[i] = static_cast<A>(i);
  return lane;
}

template <int N>
inline Vector<float, N> widen(Vector<uint16_t, N> half, bfloat16) {
  // To the upper half of a lane by one instruction instead of two.
#if defined(__AVX512BW__)
  if constexpr (N == 16) {
    const auto places = (__m512i)(lane_numbers<uint32_t, N>() << 16);
    const auto values = _mm512_castsi256_si512((__m256i)half);
    return (Vector<float, N>)_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, places, values);
  }
#endif
#if defined(__AVX2__)
  if constexpr (N == 8) {  // bytes 2i and 2i + 1 follow two zeros
    const auto places = (__m256i)(lane_numbers<uint32_t, N>() * 0x02020000u + 0x01008080u);
    const auto values = _mm256_broadcastsi128_si256((__m128i)half);
    return (Vector<float, N>)_mm256_shuffle_epi8(values, places);
  }
#endif
  return (Vector<float, N>)(__builtin_convertvector(half, Vector<uint32_t, N>) << 16);
}

template <int N>
inline Vector<float, N> widen(Vector<uint16_t, N> half, float16) {
#if defined(__AVX512F__)
  if constexpr (N == 16) {
    return (Vector<float, N>)_mm512_cvtph_ps((__m256i)half);
  }
#endif
#if defined(__F16C__)
  if constexpr (N == 8) {
    return (Vector<float, N>)_mm256_cvtph_ps((__m128i)half);
  }
#endif
  using U = Vector<uint32_t, N>;
  using F = Vector<float, N>;
  const U bits = __builtin_convertvector(half, U);
  const U sign = (bits & 0x8000u) << 16;
  const U magnitude = (bits & 0x7fffu) << 13;
  const U rebias = splat<uint32_t, N>(112u << 23);
  const U infinite = (U)(magnitude >= (0x7c00u << 13));
  const U normal = magnitude + rebias + (infinite & rebias);
  // A subnormal half m * 2^-24 is the distance of the float 2^-14 * (1 + m / 1024) from 2^-14.
  const U base = splat<uint32_t, N>(113u << 23);
  const U subnormal = (U)((F)(magnitude + base) - (F)base);
  const U is_normal = (U)(magnitude >= (0x0400u << 13));
  return (F)(sign | (is_normal & normal) | (~is_normal & subnormal));
}

// Both narrowing conversions round to nearest, ties to even.
template <int N>
inline Vector<uint16_t, N> narrow(Vector<float, N> value, bfloat16) {
  using U = Vector<uint32_t, N>;
  const U bits = (U)value;
  const U rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const U nan = (U)(value != value);
  return __builtin_convertvector((nan & 0x7fc0u) | (~nan & rounded), Vector<uint16_t, N>);
}

template <int N>
inline Vector<uint16_t, N> narrow(Vector<float, N> value, float16) {
#if defined(__AVX512F__)
  if constexpr (N == 16) {
    return (Vector<uint16_t, N>)_mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT);
  }
#endif
#if defined(__F16C__)
  if constexpr (N == 8) {
    return (Vector<uint16_t, N>)_mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT);
  }
#endif
  using U = Vector<uint32_t, N>;
  using F = Vector<float, N>;
  const U sign = ((U)value >> 16) & 0x8000u;
  const U bits = (U)value & 0x7fffffffu;
  const U normal = (bits - (112u << 23) + 0xfffu + ((bits >> 13) & 1u)) >> 13;
  // Adding 0.5, whose last place is 2^-24, lets the float unit round to a subnormal half.
  const F half = splat<float, N>(0.5f);
  const U subnormal = (U)((F)bits + half) - (U)half;
  const U is_subnormal = (U)(bits < 0x38800000u);
  const U is_infinite = (U)(bits >= 0x477ff000u);
  const U is_nan = (U)(bits > 0x7f800000u);
  U result = (is_subnormal & subnormal) | (~is_subnormal & normal);
  result = (is_infinite & 0x7c00u) | (~is_infinite & result);
  result = (is_nan & 0x7e00u) | (~is_nan & result);
  return __builtin_convertvector(sign | result, Vector<uint16_t, N>);
}

// a * b + c, rounded once by x86 processors that can do so.
template <typename A, int N>
inline Vector<A, N> multiply_add(Vector<A, N> a, Vector<A, N> b, Vector<A, N> c) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<A, float> && N == 16) {
    return (Vector<A, N>)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
  }
  if constexpr (std::is_same_v<A, double> && N == 8) {
    return (Vector<A, N>)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
  }
#endif
#if defined(__FMA__)
  if constexpr (std::is_same_v<A, float> && N == 8) {
    return (Vector<A, N>)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
  }
  if constexpr (std::is_same_v<A, double> && N == 4) {
    return (Vector<A, N>)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
  }
#endif
  return a * b + c;
}

// The larger of two vectors lane by lane; b where they are equal or one is NaN.
template <typename A, int N>
inline Vector<A, N> larger(Vector<A, N> a, Vector<A, N> b) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<A, float> && N == 16) {
    return (Vector<A, N>)_mm512_max_ps((__m512)a, (__m512)b);
  }
  if constexpr (std::is_same_v<A, double> && N == 8) {
    return (Vector<A, N>)_mm512_max_pd((__m512d)a, (__m512d)b);
  }
#endif
  return a > b ? a : b;
}

// table[kStride * index[i]] in the first `count` of N lanes, and zeros. The table has less than
// 2^31 values.
template <int N, int kStride = 1, typename A>
inline Vector<A, N> gather(const A* table, const int32_t* index, int count) {
#if defined(__AVX512F__)
  if constexpr (N == 16) {
    const auto used = static_cast<__mmask16>((1u << count) - 1);
    const auto at = (Vector<int32_t, N>)_mm512_maskz_loadu_epi32(used, index) * kStride;
    if constexpr (std::is_same_v<A, float>) {
      return (Vector<A, N>)_mm512_mask_i32gather_ps(_mm512_setzero_ps(), used, (__m512i)at, table,
                                                    sizeof(A));
    } else {
      __m256i half[2];
      std::memcpy(half, &at, sizeof(at));
      const __m512d zero = _mm512_setzero_pd();
      const __m512d found[2] = {
          _mm512_mask_i32gather_pd(zero, static_cast<__mmask8>(used), half[0], table, sizeof(A)),
          _mm512_mask_i32gather_pd(zero, static_cast<__mmask8>(used >> 8), half[1], table,
                                   sizeof(A))};
      Vector<A, N> all;
      std::memcpy(&all, found, sizeof(all));
      return all;
    }
  }
#endif
  Vector<A, N> found{};
  for (int i = 0; i < count; ++i) found[i] = table[kStride * static_cast<int64_t>(index[i])];
  return found;
}

// N consecutive values of a tensor as accumulators.
template <int N, typename T>
inline Vector<Accumulator<T>, N> load(const T* p) {
  if constexpr (is_half<T>) {
    return widen<N>(load_raw<N>(reinterpret_cast<const uint16_t*>(p)), T{});
  } else {
    return load_raw<N>(p);
  }
}

template <int N, typename T>
inline void store(T* p, Vector<Accumulator<T>, N> v) {
  if constexpr (is_half<T>) {
    store_raw<N>(reinterpret_cast<uint16_t*>(p), narrow<N>(v, T{}));
  } else {
    store_raw<N>(p, v);
  }
}

template <typename T>
inline Accumulator<T> load_one(const T* p) {
  return load<1>(p)[0];
}

template <typename T>
inline void store_one(T* p, Accumulator<T> value) {
  store<1>(p, Vector<Accumulator<T>, 1>{value});
}

// The sum of all lanes, added up as a tree.
template <typename A, int N>
inline A sum_of(Vector<A, N> v) {
  if constexpr (N == 1) {
    return v[0];
  } else if constexpr (N == 2) {
    return v[0] + v[1];
  } else {
    Vector<A, N / 2> half[2];
    std::memcpy(half, &v, sizeof(v));
    return sum_of<A, N / 2>(half[0] + half[1]);
  }
}

namespace detail {

// {a[0] + a[1], a[2] + a[3], ..., b[0] + b[1], b[2] + b[3], ...}
template <typename A, int N, size_t... kLane>
inline Vector<A, N> sums_of_pairs(Vector<A, N> a, Vector<A, N> b, std::index_sequence<kLane...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, (2 * kLane)...) +
         __builtin_shufflevector(a, b, (2 * kLane + 1)...);
#else
  using I = Vector<Bits<A>, N>;
  return __builtin_shuffle(a, b, I{(2 * kLane)...}) +
         __builtin_shuffle(a, b, I{(2 * kLane + 1)...});
#endif
}

// {a[kFirst], b[kFirst], a[kFirst + 1], b[kFirst + 1], ...}
template <int kFirst, typename A, int N, size_t... kLane>
inline Vector<A, N> pairs_of(Vector<A, N> a, Vector<A, N> b, std::index_sequence<kLane...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, (kFirst + kLane / 2 + kLane % 2 * N)...);
#else
  return __builtin_shuffle(a, b, Vector<Bits<A>, N>{(kFirst + kLane / 2 + kLane % 2 * N)...});
#endif
}

// {a[kFirst], a[kFirst + 2], ..., b[kFirst], b[kFirst + 2], ...}
template <int kFirst, typename A, int N, size_t... kLane>
inline Vector<A, N> every_other(Vector<A, N> a, Vector<A, N> b, std::index_sequence<kLane...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, (kFirst + 2 * kLane)...);
#else
  return __builtin_shuffle(a, b, Vector<Bits<A>, N>{(kFirst + 2 * kLane)...});
#endif
}

// {v[kStep], v[kStep + 1], ..., v[0], ...}
template <int kStep, typename A, int N, size_t... kLane>
inline Vector<A, N> rotated(Vector<A, N> v, std::index_sequence<kLane...>) {
#if defined(__clang__)
  return __builtin_shufflevector(v, v, ((kLane + kStep) % N)...);
#else
  return __builtin_shuffle(v, Vector<Bits<A>, N>{((kLane + kStep) % N)...});
#endif
}

}  // namespace detail

// p = {a[0], b[0], a[1], b[1], ...}
template <int N, typename A>
inline void store_pairs(A* p, Vector<A, N> a, Vector<A, N> b) {
  if constexpr (N == 1) {
    p[0] = a[0];
    p[1] = b[0];
  } else {
    constexpr auto kEach = std::make_index_sequence<N>{};
    store<N>(p, detail::pairs_of<0, A, N>(a, b, kEach));
    store<N>(p + N, detail::pairs_of<N / 2, A, N>(a, b, kEach));
  }
}

// The reverse.
template <int N, typename A>
inline void load_pairs(const A* p, Vector<A, N>& a, Vector<A, N>& b) {
  if constexpr (N == 1) {
    a[0] = p[0];
    b[0] = p[1];
  } else {
    constexpr auto kEach = std::make_index_sequence<N>{};
    const auto low = load<N>(p), high = load<N>(p + N);
    a = detail::every_other<0, A, N>(low, high, kEach);
    b = detail::every_other<1, A, N>(low, high, kEach);
  }
}

// Each lane combined with all those that are a multiple of `stride`, a power of two, away from it.
template <typename A, int N, int kStep = N / 2, typename Combine>
inline Vector<A, N> combine_lanes(Vector<A, N> v, int64_t stride, const Combine& combine) {
  if constexpr (kStep > 0) {
    if (kStep < stride) return v;
    const auto other = detail::rotated<kStep, A, N>(v, std::make_index_sequence<N>{});
    return combine_lanes<A, N, kStep / 2>(combine(v, other), stride, combine);
  } else {
    return v;
  }
}

// The sums of the lanes of the first `count` of N vectors, which together cost little more than one
// sum, and zeros. The order of additions does not depend on `count`. Writes v.
template <typename A, int N>
inline Vector<A, N> sums_of(Vector<A, N>* v, int count) {
  constexpr auto kEach = std::make_index_sequence<N>{};
  if (2 * count > N) {
    // The usual case: unrolled, so that all sums stay in registers.
    for (int i = count; i < N; ++i) v[i] = Vector<A, N>{};
    Vector<A, N> sums[N];
    std::memcpy(sums, v, sizeof(sums));
#pragma GCC unroll 4
    for (int pairs = N / 2; pairs > 0; pairs /= 2) {
#pragma GCC unroll 8
      for (int i = 0; i < pairs; ++i) {
        sums[i] = detail::sums_of_pairs<A, N>(sums[2 * i], sums[2 * i + 1], kEach);
      }
    }
    return sums[0];
  }
  // A sum without a partner is its own; the lanes that this fills are not among the first.
  int left = count;
  for (int level = N; level > 1; level /= 2) {
    const int pairs = (left + 1) / 2;
    for (int i = 0; i < pairs; ++i) {
      const int second = 2 * i + 1 < left ? 2 * i + 1 : 2 * i;
      v[i] = detail::sums_of_pairs<A, N>(v[2 * i], v[second], kEach);
    }
    left = pairs;
  }
  return lane_numbers<A, N>() < splat<A, N>(static_cast<A>(count)) ? v[0] : Vector<A, N>{};
}

// The largest lane; a NaN may be passed over.
template <typename A, int N>
inline A max_of(Vector<A, N> v) {
  if constexpr (N == 1) {
    return v[0];
  } else if constexpr (N == 2) {
    return v[0] > v[1] ? v[0] : v[1];
  } else {
    Vector<A, N / 2> half[2];
    std::memcpy(half, &v, sizeof(v));
    return max_of<A, N / 2>(half[0] > half[1] ? half[0] : half[1]);
  }
}

// The value that an operator computing in T itself would have: one rounding for half types.
template <typename T, int N>
inline Vector<Accumulator<T>, N> round_to(Vector<Accumulator<T>, N> v) {
  if constexpr (is_half<T>) {
    return widen<N>(narrow<N>(v, T{}), T{});
  } else {
    return v;
  }
}

}  // namespace fastgraph
