// The only place that knows whether kernels are for a GPU, or for the emulator that runs them on
// the CPU in tests (tests/simt).
#pragma once

#include <cstdint>

#if defined(FASTGRAPH_SIMT)
#include "simt.h"
#include "tensor_cores.h"

#define FASTGRAPH_GRID_CONSTANT
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

// An argument of a kernel that its functions may take by reference without a copy for each thread.
#define FASTGRAPH_GRID_CONSTANT __grid_constant__
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

// The bits that are set.
__device__ inline int popcount(uint64_t bits) {
#if !defined(FASTGRAPH_SIMT)
  return __popcll(bits);
#else
  return __builtin_popcountll(bits);
#endif
}

// The nearest number that tensor cores take for a float: 10 bits behind the leading one.
__device__ inline uint32_t tf32_of(float value) {
#if !defined(FASTGRAPH_SIMT)
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
  return bits;
#else
  return simt::tf32_of(value);
#endif
}

// c += a b by a warp, of 16 x 8 and 8 x 8 numbers of tf32 in the layout of mma.m16n8k8: lane 4 g +
// t holds a[g][t], a[g + 8][t], a[g][t + 4], a[g + 8][t + 4]; b[t][g], b[t + 4][g]; c[g][2 t],
// c[g][2 t + 1], c[g + 8][2 t] and c[g + 8][2 t + 1].
__device__ inline void mma_tf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if !defined(FASTGRAPH_SIMT)
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
  simt::mma_tf32(c, a, b);
#endif
}

// The same of bfloat16, two in a register, the first in the lower half: a[g][2 t] and a[g][2 t +
// 1]; a[g + 8][2 t] and a[g + 8][2 t + 1]; b[2 t][g] and b[2 t + 1][g].
__device__ inline void mma_bf16(float (&c)[4], const uint32_t (&a)[2], uint32_t b) {
#if !defined(FASTGRAPH_SIMT)
  asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(b));
#else
  simt::mma_bf16(c, a, b);
#endif
}

// The same of 16 x 16 and 16 x 8 numbers (mma.m16n8k16): the registers are a[g], a[g + 8] and both
// again 8 columns on; b[2 t] and b[2 t + 1], and both again 8 rows on.
__device__ inline void mma_bf16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if !defined(FASTGRAPH_SIMT)
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
  simt::mma_bf16(c, a, b);
#endif
}

// Of shared memory: blocks that take more have to ask for it before.
constexpr size_t kSharedWithoutAsking = size_t{48} << 10;

// Starts a kernel; an empty grid is nothing to do. Errors of the kernel itself appear later, as
// always with CUDA.
template <typename... Parameters, typename... Arguments>
cudaError_t launch(const Launch& how, void (*kernel)(Parameters...), Arguments... arguments) {
  if (how.grid.x == 0 || how.grid.y == 0) return cudaSuccess;
#if !defined(FASTGRAPH_SIMT)
  if (how.shared_bytes > kSharedWithoutAsking) {
    // A limit of the kernel's own, which stays.
    const cudaError_t error = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(how.shared_bytes));
    if (error != cudaSuccess) return error;
  }
  kernel<<<how.grid, how.block, how.shared_bytes, how.stream>>>(
      static_cast<Parameters>(arguments)...);
  return cudaGetLastError();
#else
  auto closure = [&] { kernel(static_cast<Parameters>(arguments)...); };
  const auto body = [](void* c) { (*static_cast<decltype(closure)*>(c))(); };
  return simt::run(how.name, how.grid, how.block, how.shared_bytes, body, &closure);
#endif
}

// The same of a kernel that was loaded by itself, with one argument.
template <typename Argument>
cudaError_t launch_loaded(const Launch& how, const void* kernel, Argument argument) {
#if !defined(FASTGRAPH_SIMT)
  if (how.grid.x == 0 || how.grid.y == 0) return cudaSuccess;
  void* arguments[] = {&argument};
  return cudaLaunchKernel(kernel, how.grid, how.block, arguments, how.shared_bytes, how.stream);
#else
  return launch(how, reinterpret_cast<void (*)(Argument)>(const_cast<void*>(kernel)), argument);
#endif
}
#endif

}  // namespace fastgraph
