// What bindings need to know of the CPU.
#pragma once

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>

#include <cstdint>
#include <limits>
#include <utility>

#include "cpu/edge_program.h"
#include "cpu/kernels.h"

namespace fastgraph {

namespace kernels = ::fastgraph;

// Whether bindings can look into tensors.
constexpr bool kReadable = true;

// Where FASTGRAPH_BACKWARD_AT_ONCE is defined the backward passes of gatv2 and attention are one
// function, as those of gat are everywhere. Here they are two, the first of which leaves gradients
// of all edges to the other.
//
// Where FASTGRAPH_EXTREMA_BY_SOURCE is defined the gradient of extrema is gathered along the
// transpose, for a gradient that was divided by ties. Here it is left along the rows.

// A matrix as kernels take it.
using Rows = OrderedCsr;

// Whether the weights of edges, and products of what they join, may be one for each of some heads.
constexpr bool kEdgesHaveHeads = true;

// The most bytes that a row of a matrix may have.
constexpr int64_t kMostRowBytes = std::numeric_limits<int64_t>::max();

// A call of a function with tensors where `tensor` is.
class Call {
 public:
  explicit Call(const tvm::ffi::TensorView&) {}

  template <typename... Parameters, typename... Arguments>
  void run(void (*kernel)(Parameters...), Arguments&&... arguments) const {
    kernel(std::forward<Arguments>(arguments)...);
  }
};

inline void check_device(const tvm::ffi::TensorView& tensor, const char* name) {
  if (tensor.device().device_type != kDLCPU) {
    TVM_FFI_THROW(ValueError) << name << " must be on the CPU, got device type "
                              << tensor.device().device_type;
  }
}

// Where kernels find a tensor; T is const for those that they only read.
template <typename T>
T* memory_of(const tvm::ffi::TensorView& tensor, const char*) {
  return reinterpret_cast<T*>(static_cast<char*>(tensor.data_ptr()) + tensor.byte_offset());
}

}  // namespace fastgraph
