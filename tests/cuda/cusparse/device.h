// The CPU in the place of a GPU, for cuda/cusparse.cpp.
#pragma once

#include <cuda_runtime_api.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <cstdint>
#include <limits>

#include "fastgraph/views.h"

namespace fastgraph {

constexpr bool kReadable = true;
using Rows = OrderedCsr;
constexpr bool kEdgesHaveHeads = false;
constexpr int64_t kMostRowBytes = std::numeric_limits<int32_t>::max();

class Call {
 public:
  explicit Call(const tvm::ffi::TensorView& tensor) : device_(tensor.device()) {}

  DLDevice device() const { return device_; }
  cudaStream_t stream() const { return reinterpret_cast<cudaStream_t>(7); }

 private:
  DLDevice device_;
};

inline void check_device(const tvm::ffi::TensorView& tensor, const char* name) {
  if (tensor.device().device_type != kDLCPU) {
    TVM_FFI_THROW(ValueError) << name << " must be on the CPU, got device type "
                              << tensor.device().device_type;
  }
}

template <typename T>
T* memory_of(const tvm::ffi::TensorView& tensor, const char*) {
  return reinterpret_cast<T*>(static_cast<char*>(tensor.data_ptr()) + tensor.byte_offset());
}

}  // namespace fastgraph
