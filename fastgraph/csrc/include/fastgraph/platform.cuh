// The only place that knows whether kernels are for a GPU, or for the emulator that runs them on
// the CPU in tests (tests/simt).
#pragma once

#include <cstdint>

#if defined(FASTGRAPH_SIMT)
#include "simt.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#define FASTGRAPH_SHARED(T, name, count) __shared__ T name[count]
#define FASTGRAPH_DYNAMIC_SHARED(T, name)                           \
  extern __shared__ __align__(16) unsigned char fastgraph_shared[]; \
  T* const name = reinterpret_cast<T*>(fastgraph_shared)
#endif

namespace fastgraph {

using Stream = cudaStream_t;

struct Launch {
  const char* name;  // of the kernel, for messages
  dim3 grid;
  dim3 block;
  size_t shared_bytes;
  Stream stream;
};

#if defined(__CUDACC__) || defined(FASTGRAPH_SIMT)
// The same value, from which the compiler computes nothing any earlier than here.
__device__ inline int64_t computed_here(int64_t value) {
#if !defined(FASTGRAPH_SIMT)
  asm volatile("" : "+l"(value));
#endif
  return value;
}

// The whole product, in one instruction; the compiler makes more of it where b is the same in a
// loop.
__device__ inline int64_t wide_product(int32_t a, int32_t b) {
#if !defined(FASTGRAPH_SIMT)
  int64_t product;
  asm("mul.wide.s32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
#else
  return static_cast<int64_t>(a) * b;
#endif
}

// 2^x, of which what is smaller than any normal number may be 0.
__device__ inline float exp2_of(float x) {
#if !defined(FASTGRAPH_SIMT)
  asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
  return x;
#else
  return exp2f(x);
#endif
}

// The larger of two values, or NaN where one of them is.
__device__ inline float larger_or_nan(float a, float b) {
#if !defined(FASTGRAPH_SIMT)
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(a) : "f"(b));
  return a;
#else
  return a > b || a != a ? a : b;
#endif
}

// Starts a kernel; an empty grid is nothing to do. Errors of the kernel itself appear later, as
// always with CUDA.
template <typename... Parameters, typename... Arguments>
cudaError_t launch(const Launch& how, void (*kernel)(Parameters...), Arguments... arguments) {
  if (how.grid.x == 0 || how.grid.y == 0) return cudaSuccess;
#if !defined(FASTGRAPH_SIMT)
  kernel<<<how.grid, how.block, how.shared_bytes, how.stream>>>(
      static_cast<Parameters>(arguments)...);
  return cudaGetLastError();
#else
  auto closure = [&] { kernel(static_cast<Parameters>(arguments)...); };
  const auto body = [](void* c) { (*static_cast<decltype(closure)*>(c))(); };
  return simt::run(how.name, how.grid, how.block, how.shared_bytes, body, &closure);
#endif
}
#endif

}  // namespace fastgraph
