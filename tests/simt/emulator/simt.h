// CUDA C++ for a plain C++ compiler: what kernels need of the language, executed on the CPU.
//
// Every CUDA thread is a fiber. Blocks run one after another, threads in an order that a seed
// decides, so nothing runs in accidental lockstep; a thread is left where it waits for others and,
// if the runtime sees them, at any access to memory. What cannot be right ends the launch with a
// message that names kernel, block and thread; runtime.cpp and memory.cpp tell how.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "fastgraph/simd.h"

#define __global__
#define __device__
// The compiler sees no access in a call whose result goes to memory.
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

struct alignas(16) double2 {
  double x, y;
};

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorLaunchFailure = 719 };

// Kernels that are generated later are linked against these.
#pragma GCC visibility push(default)
namespace simt {

// Where in the kernel a thread waits; two threads that should meet must stand at the same place.
struct Place {
  const char* file;
  int line;
};
#define SIMT_PLACE simt::Place place = {__builtin_FILE(), __builtin_LINE()}

struct Coordinates {
  dim3 thread, block, block_size, grid_size;
};
const Coordinates& here();

enum class Collective { kShuffle, kBallot, kSyncWarp };

// Waits for all lanes in the mask. A shuffle returns the value of lane `source`, a ballot the lanes
// whose value is not 0.
uint64_t meet(Collective kind, unsigned mask, uint64_t value, int source, Place place);
void meet_block(Place place);
int lane();

// A shared array that belongs to one declaration in a kernel, without its past as a new block finds
// it. The declaration holds its address in `slot`.
void* shared_array(void** slot, size_t bytes, const char* name);
void* dynamic_shared();
// Fails if an instruction that is for the GPU's memory alone is given an address of shared memory.
void check_global(const void* address, Place place);

float atomic_add(float* address, float value);

using Body = void (*)(void* closure);
cudaError_t run(const char* name, dim3 grid, dim3 block, size_t shared_bytes, Body body,
                void* closure);

// What the host does. Before each call: no error yet.
void begin();
const char* error();
// Memory of the emulated GPU, without content.
void* allocate(size_t bytes, const char* name);
void release(void* address);
void write(void* to, const void* from, size_t bytes);
// Back to the host, only what was ever written.
void read(void* to, const void* from, size_t bytes);

template <typename T>
T shuffle(unsigned mask, T value, int source, Place place) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = meet(Collective::kShuffle, mask, bits, source, place);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

template <typename To, typename From>
To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

}  // namespace simt
#pragma GCC visibility pop

#define threadIdx (simt::here().thread)
#define blockIdx (simt::here().block)
#define blockDim (simt::here().block_size)
#define gridDim (simt::here().grid_size)
constexpr int warpSize = 32;

// Declarations of shared memory; platform.cuh has their meaning for nvcc. Each lambda has a slot of
// its own, so each declaration and each instance of a template does.
#define FASTGRAPH_SHARED(T, name, count)             \
  T* const name = static_cast<T*>([](size_t bytes) { \
    static void* slot = nullptr;                     \
    return simt::shared_array(&slot, bytes, #name);  \
  }((count) * sizeof(T)))
#define FASTGRAPH_DYNAMIC_SHARED(T, name) T* const name = static_cast<T*>(simt::dynamic_shared())

inline void __syncthreads(SIMT_PLACE) { simt::meet_block(place); }
inline void __syncwarp(unsigned mask = 0xffffffffu, SIMT_PLACE) {
  simt::meet(simt::Collective::kSyncWarp, mask, 0, 0, place);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, SIMT_PLACE) {
  const uint64_t value = predicate != 0;
  return static_cast<unsigned>(simt::meet(simt::Collective::kBallot, mask, value, 0, place));
}
// Which lanes happen to run together is not a question that a correct kernel asks.
unsigned __activemask() = delete;

// As on a GPU, lanes count within segments of `width`, and one without a partner gets its own
// value.
template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = warpSize, SIMT_PLACE) {
  const int begin = simt::lane() & ~(width - 1);
  return simt::shuffle(mask, value, begin + (source & (width - 1)), place);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = warpSize, SIMT_PLACE) {
  const int lane = simt::lane(), source = lane ^ bits;
  return simt::shuffle(mask, value, source > (lane | (width - 1)) ? lane : source, place);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, int delta, int width = warpSize, SIMT_PLACE) {
  const int lane = simt::lane();
  const bool inside = (lane & (width - 1)) + delta < width;
  return simt::shuffle(mask, value, inside ? lane + delta : lane, place);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, int delta, int width = warpSize, SIMT_PLACE) {
  const int lane = simt::lane();
  const bool inside = (lane & (width - 1)) >= delta;
  return simt::shuffle(mask, value, inside ? lane - delta : lane, place);
}

inline float atomicAdd(float* address, float value) { return simt::atomic_add(address, value); }

using std::max;
using std::min;

template <typename T>
T __ldg(const T* address, SIMT_PLACE) {
  simt::check_global(address, place);
  return *address;
}

// A store of a vector, in one.
template <typename T>
void __stwb(T* address, T value, SIMT_PLACE) {
  simt::check_global(address, place);
  *address = value;
}

inline float __uint_as_float(uint32_t bits) { return simt::bit_cast<float>(bits); }
inline uint32_t __float_as_uint(float value) { return simt::bit_cast<uint32_t>(value); }
// Products that no addition takes in; the emulator is compiled without contraction.
inline float __fmul_rn(float a, float b) { return a * b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline uint32_t __umulhi(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>((static_cast<uint64_t>(a) * b) >> 32);
}

// The position of the lowest bit that is set, from 1; 0 for none.
inline int __ffs(int bits) { return __builtin_ffs(bits); }

// Half types: the conversions of the CPU kernels, which are bit-exact too.
struct __half {
  fastgraph::float16 value;
};
struct __nv_bfloat16 {
  fastgraph::bfloat16 value;
};
inline __half __ushort_as_half(uint16_t bits) { return {{bits}}; }
inline uint16_t __half_as_ushort(__half half) { return half.value.bits; }
inline float __half2float(__half half) { return fastgraph::load_one(&half.value); }
inline __half __float2half_rn(float value) {
  __half half;
  fastgraph::store_one(&half.value, value);
  return half;
}
inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 half) { return half.value.bits; }
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  __nv_bfloat16 half;
  fastgraph::store_one(&half.value, value);
  return half;
}
