// Whether the content of a tensor is what it was, found out on the stream without the host: blocks
// sum a mixture of each element and its place. Results of a call that used something derived from
// another content, whose sums are others, are made NaN.
#include <algorithm>
#include <cmath>

#include "cuda/kernels.h"
#include "fastgraph/lanes.cuh"

namespace fastgraph::cuda {
namespace {

// Each block of those that spoil a result looks at all sums, so there are few of both.
constexpr int64_t kMostSpoilingBlocks = 256;

// splitmix64 (Steele, Lea and Flood, OOPSLA 2014).
__device__ inline uint64_t mixed(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// The sum over the block, for all of its threads.
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
#pragma unroll 4  // so many loads at a time
  for (int64_t i = blockIdx.x * static_cast<int64_t>(kBlockThreads) + threadIdx.x; i < count;
       i += step) {
    const uint64_t place = mixed(0x9e3779b97f4a7c15u * static_cast<uint64_t>(i + 1));
    sum += mixed(static_cast<uint64_t>(__ldg(elements + i)) + place);
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// Where sums differ from those expected, all of `out` becomes NaN, and `seen`, which the host
// reads, `name`.
template <typename T>
__global__ void __launch_bounds__(kBlockThreads)
    spoil_if_others(const uint64_t* sums, const uint64_t* expected, int64_t num_sums, T* out,
                    int64_t count, int64_t* seen, int64_t name) {
  uint64_t others = 0;
  for (int64_t i = threadIdx.x; i < num_sums; i += kBlockThreads) others += sums[i] != expected[i];
  if (block_sum(others) == 0) return;
  if (blockIdx.x == 0 && threadIdx.x == 0) *seen = name;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kBlockThreads;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(kBlockThreads) + threadIdx.x; i < count;
       i += step) {
    out[i] = narrowed<T>(static_cast<Accumulator<T>>(NAN));
  }
}

template <typename Word>
cudaError_t sum_words(Queue& queue, const void* data, int64_t count, uint64_t* sums,
                      int64_t num_sums) {
  return launch({"sum_elements", static_cast<unsigned>(num_sums), kBlockThreads, 0, queue.stream()},
                sum_elements<Word>, static_cast<const Word*>(data), count, sums);
}

}  // namespace

cudaError_t sum_content(Queue& queue, const Elements& elements, uint64_t* sums, int64_t num_sums) {
  const auto [data, count, bytes] = elements;
  switch (bytes) {
    case 1: return sum_words<uint8_t>(queue, data, count, sums, num_sums);
    case 2: return sum_words<uint16_t>(queue, data, count, sums, num_sums);
    case 4: return sum_words<uint32_t>(queue, data, count, sums, num_sums);
    default: return sum_words<unsigned long long>(queue, data, count, sums, num_sums);
  }
}

template <typename T>
cudaError_t spoil_if_changed(Queue& queue, const ContentSums& sums, const Seen& seen, T* out,
                             int64_t count) {
  const auto blocks = std::clamp<int64_t>(ceil_div(count, kBlockThreads), 1, kMostSpoilingBlocks);
  return launch(
      {"spoil_if_others", static_cast<unsigned>(blocks), kBlockThreads, 0, queue.stream()},
      spoil_if_others<T>, sums.found, sums.expected, sums.count, out, count, seen.flag, seen.name);
}

FASTGRAPH_INSTANTIATE(spoil_if_changed)

}  // namespace fastgraph::cuda
