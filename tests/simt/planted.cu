// Kernels with one mistake each, and the same without it.
#include <cstdint>

#include "fastgraph/platform.cuh"

namespace {

using fastgraph::launch;

constexpr int kThreads = 64;

// Reverses a block through shared memory.
template <bool kBug>
__global__ void missing_barrier(const float* in, float* out) {
  FASTGRAPH_SHARED(float, tile, kThreads);
  tile[threadIdx.x] = in[threadIdx.x];
  if (!kBug) __syncthreads();
  out[threadIdx.x] = tile[kThreads - 1 - threadIdx.x];
}

// The same within each warp, where a barrier of the warp is enough.
template <bool kBug>
__global__ void missing_warp_barrier(const float* in, float* out) {
  FASTGRAPH_SHARED(float, tile, kThreads);
  const int t = threadIdx.x;
  tile[t] = in[t];
  if (kBug) {
    __shfl_sync(0xffffffffu, 0, 0);  // meets the others, but orders no memory
  } else {
    __syncwarp();
  }
  out[t] = tile[t ^ 31];
}

// Tiles are used twice: what was read must not be overwritten early.
template <bool kBug>
__global__ void missing_second_barrier(const float* in, float* out) {
  FASTGRAPH_DYNAMIC_SHARED(float, tile);
  const int t = threadIdx.x;
  for (int round = 0; round < 2; ++round) {
    tile[t] = in[t];
    __syncthreads();
    out[t] = tile[kThreads - 1 - t];
    if (!kBug) __syncthreads();
  }
}

template <bool kBug>
__global__ void barrier_after_exit(const float* in, float* out) {
  if (kBug && threadIdx.x == 5) return;
  __syncthreads();
  out[threadIdx.x] = in[threadIdx.x];
}

template <bool kBug>
__global__ void barrier_in_branch(const float* in, float* out) {
  if (kBug && threadIdx.x % 2 == 0) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  out[threadIdx.x] = in[threadIdx.x];
}

template <bool kBug>
__global__ void shuffle_in_branch(const float* in, float* out) {
  const int t = threadIdx.x;
  float value = in[t];
  if (!kBug || t % 32 < 16) {
    const unsigned mask = kBug ? 0xffffffffu : __ballot_sync(0xffffffffu, 1);
    value += __shfl_down_sync(mask, value, 16);
    value += __shfl_up_sync(mask, value, 16);
  }
  out[t] = value;
}

template <bool kBug>
__global__ void shuffle_outside_mask(const float* in, float* out) {
  const int t = threadIdx.x, half = t % 32 / 16;
  const unsigned mask = half == 0 ? 0x0000ffffu : 0xffff0000u;
  out[t] = __shfl_xor_sync(mask, in[t], kBug ? 16 : 8);
}

template <bool kBug>
__global__ void shuffle_by_a_stranger(const float* in, float* out) {
  const int t = threadIdx.x;
  out[t] = __shfl_xor_sync(kBug ? 0xfffffffeu : 0xffffffffu, in[t], 1);
}

template <bool kBug>
__global__ void different_collectives(const float* in, float* out) {
  const int t = threadIdx.x;
  if (kBug && t % 2 == 0) {
    __ballot_sync(0xffffffffu, 1);
  } else {
    __syncwarp(kBug ? 0xffffffffu : __ballot_sync(0xffffffffu, 1));
  }
  out[t] = in[t];
}

template <bool kBug>
__global__ void warp_against_block(const float* in, float* out) {
  const int t = threadIdx.x;
  if (kBug && t % 32 < 16) __syncwarp();
  __syncthreads();
  out[t] = in[t];
}

// All blocks count in one place.
template <bool kBug>
__global__ void plain_count(const float*, float* out) {
  if (kBug) {
    out[0] += 1;
  } else {
    atomicAdd(out, 1.0f);
  }
}

template <bool kBug>
__global__ void same_output_of_blocks(const float* in, float* out) {
  const int block = kBug ? 0 : blockIdx.x;
  if (threadIdx.x == 0) out[block] = in[block];
}

template <bool kBug>
__global__ void unwritten_shared(const float* in, float* out) {
  FASTGRAPH_SHARED(float, tile, kThreads);
  if (!kBug || threadIdx.x != 7) tile[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = tile[kThreads - 1 - threadIdx.x];
}

template <bool kBug>
__global__ void shared_overrun(const float* in, float* out) {
  FASTGRAPH_SHARED(float, tile, kThreads);
  const int t = threadIdx.x + (kBug ? 1 : 0);
  tile[t] = in[threadIdx.x];
  out[threadIdx.x] = tile[t];
}

template <bool kBug>
__global__ void global_overrun(const float* in, float* out) {
  out[threadIdx.x] = in[threadIdx.x + (kBug ? 1 : 0)];
}

template <bool kBug>
__global__ void misaligned_load(const float* in, float* out) {
  if (threadIdx.x != 3) return;
  const float4 four = *reinterpret_cast<const float4*>(in + (kBug ? 2 : 4));
  const float2 two = *reinterpret_cast<const float2*>(in + 2);
  *reinterpret_cast<float4*>(out) = four;
  *reinterpret_cast<float2*>(out + 4) = two;
}

template <bool kBug>
__global__ void far_overrun(const float* in, float* out) {
  out[threadIdx.x] = in[threadIdx.x + (kBug ? int64_t{1} << 27 : 0)];
}

template <bool kBug>
__global__ void shared_address_for_the_gpus(const float* in, float* out) {
  FASTGRAPH_SHARED(float, tile, kThreads);
  const int t = threadIdx.x;
  tile[t] = in[t];
  __stwb(kBug ? tile + t : out + t, tile[t] + 1);
}

template <bool kBug>
__global__ void sum_that_overflows(const float* in, float* out) {
  const int t = threadIdx.x, many = 0x7fffffff - kThreads + (kBug ? 2 : 1);
  volatile int sum = many + t;
  out[t] = in[sum - many];
}

template <bool kBug>
__global__ void shift_by_all_bits(const float* in, float* out) {
  const int t = threadIdx.x;
  out[t] = in[t] * (1u << (t % 32 + (kBug ? 1 : 0)));
}

// What a thread keeps to itself is in registers.
template <bool kBug>
__global__ void overrun_of_registers(const float* in, float* out) {
  const int t = threadIdx.x;
  float own[4] = {in[t], in[t] + 1, in[t] + 2, in[t] + 3};
  out[t] = own[t % 4 + (kBug ? 1 : 0)];
}

using Planted = void (*)(const float*, float*);

struct Case {
  const char* name;
  Planted harmless;
  Planted bug;
};

#define CASE(name) {#name, name<false>, name<true>}
const Case kCases[] = {
    CASE(missing_barrier),      CASE(missing_warp_barrier),  CASE(missing_second_barrier),
    CASE(barrier_after_exit),   CASE(barrier_in_branch),     CASE(shuffle_in_branch),
    CASE(shuffle_outside_mask), CASE(shuffle_by_a_stranger), CASE(different_collectives),
    CASE(warp_against_block),   CASE(plain_count),           CASE(same_output_of_blocks),
    CASE(unwritten_shared),     CASE(shared_overrun),        CASE(global_overrun),
    CASE(misaligned_load),      CASE(far_overrun),           CASE(sum_that_overflows),
    CASE(shift_by_all_bits),    CASE(overrun_of_registers),  CASE(shared_address_for_the_gpus),
};
#undef CASE

}  // namespace

// Runs a case on some blocks; both arrays have 64 values. Returns what the emulator says, or null
// for a name that there is not.
extern "C" __attribute__((visibility("default"))) const char* simt_planted(const char* name,
                                                                           int bug, int blocks,
                                                                           const float* in,
                                                                           float* out) {
  constexpr size_t kBytes = 64 * sizeof(float);
  for (const Case& c : kCases) {
    if (std::strcmp(c.name, name) != 0) continue;
    simt::begin();
    void* const given = simt::allocate(kBytes, "in");
    void* const result = simt::allocate(kBytes, "out");
    simt::write(given, in, kBytes);
    simt::write(result, out, kBytes);
    const size_t shared = kThreads * sizeof(float);
    launch({c.name, static_cast<unsigned>(blocks), kThreads, shared, nullptr},
           bug ? c.bug : c.harmless, static_cast<const float*>(given), static_cast<float*>(result));
    simt::read(out, result, kBytes);
    simt::release(result);
    simt::release(given);
    return simt::error();
  }
  return nullptr;
}
