// Whether the content of a tensor is what it was, found out on the stream without the host: blocks
// sum a mixture of each element and its place, and one block adds the sums and compares. Results of
// a call that used something derived from another content are made NaN.
#include <cmath>

#include "cuda/kernels.h"
#include "fastgraph/lanes.cuh"

namespace fastgraph::cuda {
namespace {

constexpr int64_t kMostBlocks = 1024;

// splitmix64 (Steele, Lea and Flood, OOPSLA 2014).
__device__ inline uint64_t mixed(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// The sum over the block, for its first thread; all of its threads must come.
__device__ inline uint64_t block_sum(uint64_t value) {
  FASTGRAPH_SHARED(uint64_t, all, kBlockThreads);
  const int thread = static_cast<int>(threadIdx.x);
  all[thread] = value;
  __syncthreads();
  for (int half = kBlockThreads / 2; half > 0; half /= 2) {
    if (thread < half) all[thread] += all[thread + half];
    __syncthreads();
  }
  return all[0];
}

template <typename Word>
__global__ void __launch_bounds__(kBlockThreads)
    sum_elements(const Word* elements, int64_t count, uint64_t* sums) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kBlockThreads;
  uint64_t sum = 0;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(kBlockThreads) + threadIdx.x; i < count;
       i += step) {
    const uint64_t place = mixed(0x9e3779b97f4a7c15u * static_cast<uint64_t>(i + 1));
    sum += mixed(static_cast<uint64_t>(__ldg(elements + i)) + place);
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// The total goes to `total`, or `changed` becomes 1 where it is not the expected one.
__global__ void __launch_bounds__(kBlockThreads)
    add_sums(const uint64_t* sums, int64_t count, uint64_t* total, const uint64_t* expected,
             int32_t* changed) {
  uint64_t sum = 0;
  for (int64_t i = threadIdx.x; i < count; i += kBlockThreads) sum += sums[i];
  sum = block_sum(sum);
  if (threadIdx.x > 0) return;
  if (total != nullptr) *total = sum;
  if (expected != nullptr && *expected != sum) *changed = 1;
}

template <typename T>
__global__ void __launch_bounds__(kBlockThreads)
    fill_if(const int32_t* changed, T* out, int64_t count) {
  if (*changed == 0) return;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kBlockThreads;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(kBlockThreads) + threadIdx.x; i < count;
       i += step) {
    out[i] = narrowed<T>(static_cast<Accumulator<T>>(NAN));
  }
}

unsigned blocks_for(int64_t count) {
  return static_cast<unsigned>(std::min(ceil_div(count, kBlockThreads), kMostBlocks));
}

template <typename Word>
cudaError_t run(Queue& queue, const void* data, int64_t count, uint64_t* total,
                const uint64_t* expected, int32_t* changed) {
  const unsigned blocks = blocks_for(count);
  auto* sums = queue.scratch<uint64_t>(blocks);
  const cudaError_t error = launch({"sum_elements", blocks, kBlockThreads, 0, queue.stream()},
                                   sum_elements<Word>, static_cast<const Word*>(data), count, sums);
  if (error != cudaSuccess) return error;
  return launch({"add_sums", 1, kBlockThreads, 0, queue.stream()}, add_sums, sums,
                static_cast<int64_t>(blocks), total, expected, changed);
}

cudaError_t run(Queue& queue, const Elements& elements, uint64_t* total, const uint64_t* expected,
                int32_t* changed) {
  const auto [data, count, bytes] = elements;
  switch (bytes) {
    case 1: return run<uint8_t>(queue, data, count, total, expected, changed);
    case 2: return run<uint16_t>(queue, data, count, total, expected, changed);
    case 4: return run<uint32_t>(queue, data, count, total, expected, changed);
    default: return run<unsigned long long>(queue, data, count, total, expected, changed);
  }
}

}  // namespace

cudaError_t record_content(Queue& queue, const Elements& elements, uint64_t* total) {
  return run(queue, elements, total, nullptr, nullptr);
}

cudaError_t check_content(Queue& queue, const Elements& elements, const uint64_t* expected,
                          int32_t* changed) {
  return run(queue, elements, nullptr, expected, changed);
}

template <typename T>
cudaError_t fill_with_nan_if(Queue& queue, const int32_t* changed, T* out, int64_t count) {
  return launch({"fill_if", blocks_for(count), kBlockThreads, 0, queue.stream()}, fill_if<T>,
                changed, out, count);
}

FASTGRAPH_INSTANTIATE(fill_with_nan_if)

}  // namespace fastgraph::cuda
