// What the source of generated kernels stands on, behind edge_kernel.h: element types, loads and
// stores of packs, and functions of values. Compiled by NVRTC, and for tests by the emulator.
#pragma once

#if defined(FASTGRAPH_SIMT)
#include "fastgraph/platform.cuh"
#endif

namespace fastgraph::generated {

constexpr unsigned kAllLanes = 0xffffffffu;

struct Bfloat16 {
  unsigned short bits;
};
struct Float16 {
  unsigned short bits;
};

__device__ inline int widened(int value) { return value; }
__device__ inline float widened(float value) { return value; }
__device__ inline double widened(double value) { return value; }
__device__ inline float widened(Bfloat16 value) {
  return __uint_as_float(static_cast<unsigned>(value.bits) << 16);
}

#if !defined(FASTGRAPH_SIMT)
__device__ inline float widened(Float16 value) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
  return wide;
}
__device__ inline void narrow(float value, Bfloat16* to) {
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to->bits) : "f"(value));
}
__device__ inline void narrow(float value, Float16* to) {
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to->bits) : "f"(value));
}
// As the interpreter is compiled, which adds to sums so.
__device__ inline float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
__device__ inline double multiply_add(double a, double b, double c) { return fma(a, b, c); }
#else
inline float widened(Float16 value) { return __half2float(__ushort_as_half(value.bits)); }
inline void narrow(float value, Bfloat16* to) {
  to->bits = __bfloat16_as_ushort(__float2bfloat16_rn(value));
}
inline void narrow(float value, Float16* to) {
  to->bits = __half_as_ushort(__float2half_rn(value));
}
template <typename A>
A multiply_add(A a, A b, A c) {
  return a * b + c;
}
#endif
__device__ inline void narrow(float value, float* to) { *to = value; }
__device__ inline void narrow(double value, double* to) { *to = value; }

template <typename T, typename A>
__device__ A rounded(A value) {
  T narrower;
  narrow(value, &narrower);
  return widened(narrower);
}

// Values that one instruction loads or stores.
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Pack {
  T values[kCount];
};

template <int kCount, typename T, typename A>
__device__ void load(const T* from, A* to) {
  const auto pack = *reinterpret_cast<const Pack<T, kCount>*>(from);
#pragma unroll
  for (int i = 0; i < kCount; ++i) to[i] = widened(pack.values[i]);
}

template <int kCount, typename T, typename A>
__device__ void store(T* to, const A* from) {
  Pack<T, kCount> pack;
#pragma unroll
  for (int i = 0; i < kCount; ++i) narrow(from[i], &pack.values[i]);
  *reinterpret_cast<Pack<T, kCount>*>(to) = pack;
}

template <typename A>
__device__ A infinity() {
  return static_cast<A>(__uint_as_float(0x7f800000u));
}

// The larger of two values, of which a NaN counts for nothing.
__device__ inline float larger(float a, float b) { return fmaxf(a, b); }
__device__ inline double larger(double a, double b) { return fmax(a, b); }

// What is subtracted from scores before the exponential: the largest, or 0 where none is finite.
template <typename A>
__device__ A subtracted(A largest) {
  return largest == -infinity<A>() ? A(0) : largest;
}

// The largest of some values so far, and how many have it: none if it is NaN.
template <typename A>
__device__ void take(A& largest, A& count, A other, A of_other) {
  if (other > largest || other != other) {
    largest = other;
    count = other == other ? of_other : A(0);
  } else if (other == largest) {
    count += of_other;
  }
}

#define FASTGRAPH_FUNCTION(name, of_float)                           \
  __device__ inline float name##_of(float x) { return of_float(x); } \
  __device__ inline double name##_of(double x) { return ::name(x); }
FASTGRAPH_FUNCTION(fabs, fabsf)
FASTGRAPH_FUNCTION(sqrt, sqrtf)
FASTGRAPH_FUNCTION(exp, expf)
FASTGRAPH_FUNCTION(expm1, expm1f)
FASTGRAPH_FUNCTION(log, logf)
FASTGRAPH_FUNCTION(log1p, log1pf)
FASTGRAPH_FUNCTION(sin, sinf)
FASTGRAPH_FUNCTION(cos, cosf)
FASTGRAPH_FUNCTION(erf, erff)
FASTGRAPH_FUNCTION(tanh, tanhf)
#undef FASTGRAPH_FUNCTION
__device__ inline float pow_of(float a, float b) { return powf(a, b); }
__device__ inline double pow_of(double a, double b) { return pow(a, b); }
__device__ inline float atan2_of(float a, float b) { return atan2f(a, b); }
__device__ inline double atan2_of(double a, double b) { return atan2(a, b); }

}  // namespace fastgraph::generated
