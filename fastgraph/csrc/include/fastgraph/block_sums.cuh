// Sums over all rows: each group of lanes adds up what its rows bring, a block what its groups
// have, and a second kernel the blocks, all in a fixed order.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/queue.h"
#include "fastgraph/lanes.cuh"

namespace fastgraph::cuda {

// Blocks in the grid's x direction of such a kernel, which stride over work for `wanted` of them;
// `others` is the size of the grid in the other directions.
inline unsigned sum_blocks(int64_t wanted, int64_t others) {
  constexpr int64_t kBlocks = 2048;
  const int64_t most = std::max<int64_t>(1, kBlocks / std::max<int64_t>(1, others));
  return static_cast<unsigned>(std::min(wanted, most));
}

// Stores the sum of `sums` over the groups of this block; all of its threads must come.
template <typename T, typename A, int kValues, int kLanes, int kPacks>
__device__ void store_block_sum(const RowSums<A, kValues, kLanes, kPacks>& sums, T* row,
                                int64_t width) {
  constexpr int kGroups = kBlockThreads / kLanes;
  FASTGRAPH_SHARED(A, all, kBlockThreads * kValues * kPacks);
  const int thread = static_cast<int>(threadIdx.x);
  RowSums<A, kValues, kLanes, kPacks> total = sums;
  total.each(
      [&](A& value, int q, int i) { all[(q * kValues + i) * kBlockThreads + thread] = value; });
  __syncthreads();
  if (thread < kLanes) {
    for (int group = 1; group < kGroups; ++group) {
      total.each([&](A& value, int q, int i) {
        value += all[(q * kValues + i) * kBlockThreads + group * kLanes + thread];
      });
    }
    total.store(row, thread, width, 1);
  }
  __syncthreads();  // before the next sum overwrites this one
}

// There are as few blocks of add_rows as warps' widths in a row, so each has many threads.
constexpr int kAddingThreads = 1024;

// total[f] = the sum of sums[row][f] over the rows. Each warp of a block adds up every so many of
// them for a warp's width of columns.
template <typename T>
__global__ void __launch_bounds__(kAddingThreads)
    add_rows(Matrix<const Accumulator<T>> sums, T* total) {
  constexpr int kWarps = kAddingThreads / kWarp;
  FASTGRAPH_SHARED(double, of_warps, kAddingThreads);
  const int lane = static_cast<int>(threadIdx.x) % kWarp,
            warp = static_cast<int>(threadIdx.x) / kWarp;
  const int64_t f = static_cast<int64_t>(blockIdx.x) * kWarp + lane;
  double sum = 0;
  for (int64_t row = warp; f < sums.width && row < sums.rows; row += kWarps) {
    sum += sums.row(row)[f];
  }
  of_warps[threadIdx.x] = sum;
  __syncthreads();
  if (warp > 0 || f >= sums.width) return;
  for (int other = 1; other < kWarps; ++other) sum += of_warps[other * kWarp + lane];
  total[f] = narrowed<T>(static_cast<Accumulator<T>>(sum));
}

template <typename T>
cudaError_t run_add_rows(Queue& queue, Matrix<Accumulator<T>> sums, T* total) {
  const auto blocks = static_cast<unsigned>(ceil_div(sums.width, kWarp));
  return launch({"add_rows", blocks, kAddingThreads, 0, queue.stream()}, add_rows<T>,
                Matrix<const Accumulator<T>>{sums.data, sums.rows, sums.width}, total);
}

}  // namespace fastgraph::cuda
