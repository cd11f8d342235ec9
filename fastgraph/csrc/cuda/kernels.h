// The CUDA kernels: what cpu/kernels.h says of the functions with the same names holds here too,
// for tensors on the device. They trust their arguments, run on the caller's stream and wait for
// nothing. `longest` is the number of entries of the longest row, or any upper bound: where it is
// small there are no long rows to cut. `workspace` has as many floats as ..._workspace() says.
#pragma once

#include <cstdint>

#include "fastgraph/platform.cuh"
#include "fastgraph/types.h"
#include "fastgraph/views.h"

namespace fastgraph::cuda {

int64_t spmm_workspace(const Csr& graph, int64_t longest, int64_t width);

template <typename T>
cudaError_t spmm(const Csr& graph, int64_t longest, const T* weight, const float* row_scale,
                 const float* col_scale, Matrix<const T> x, Matrix<T> out, float* workspace,
                 Stream stream);

// The widest head that a group of lanes holds in registers.
constexpr int64_t kMaxHeadWidth = 512;

struct Dropout {
  double rate;
  uint64_t seed;
};

// What attention operators write.
template <typename T>
struct SoftmaxOutputs {
  Heads<T> out;
  float* stats;     // [rows, heads, 2]: largest score, inverse sum of exponentials
  Matrix<T> alpha;  // the weights with dropout, [edges, heads], or no data
};

template <typename T>
struct Gatv2Inputs {
  Heads<const T> x_src;
  Heads<const T> x_dst;
  Heads<const T> att;          // [1, heads, width]
  Matrix<const T> edge;        // [edges, channels of edges]; no data and a width of 0 without them
  Heads<const T> weight_edge;  // [heads, channels of edges, width]
};

int64_t gatv2_workspace(const Csr& graph, int64_t longest, int64_t heads, int64_t width);

// Returns cudaErrorInvalidValue for heads wider than kMaxHeadWidth.
template <typename T>
cudaError_t gatv2(const Csr& graph, int64_t longest, const Gatv2Inputs<T>& in, float slope,
                  Dropout dropout, const SoftmaxOutputs<T>& outputs, float* workspace,
                  Stream stream);

}  // namespace fastgraph::cuda
