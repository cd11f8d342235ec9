// What bindings need to know of GPUs.
#pragma once

#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "cuda/kernels.h"

namespace fastgraph {

namespace kernels = ::fastgraph::cuda;

constexpr bool kReadable = false;
#define FASTGRAPH_BACKWARD_AT_ONCE
#define FASTGRAPH_EXTREMA_BY_SOURCE
#define FASTGRAPH_GENERATED_KERNELS
using Rows = cuda::CutCsr;
constexpr bool kEdgesHaveHeads = false;
constexpr int64_t kMostRowBytes = std::numeric_limits<int32_t>::max();

inline void check_cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    TVM_FFI_THROW(RuntimeError) << what << ": " << cudaGetErrorString(error);
  }
}

// A call of a function with tensors on the device of `tensor`: makes it the current one meanwhile,
// and runs kernels on the caller's stream there. Their scratch memory comes from the caller's
// allocator, which knows when what was put on a stream is done.
class Call : public cuda::Queue {
 public:
  explicit Call(const tvm::ffi::TensorView& tensor)
      : Queue(stream_of(tensor.device())), device_(tensor.device()) {
    check_cuda(cudaGetDevice(&previous_), "cudaGetDevice");
    if (previous_ != device_.device_id) {
      check_cuda(cudaSetDevice(device_.device_id), "cudaSetDevice");
    }
    current() = this;
  }
  ~Call() override {
    current() = nullptr;
    if (previous_ != device_.device_id) cudaSetDevice(previous_);
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  // The one in progress on this thread.
  static Call*& current() {
    static thread_local Call* call = nullptr;
    return call;
  }

  DLDevice device() const { return device_; }

  int64_t cache_bytes() const override {
    int bytes = 0;
    check_cuda(cudaDeviceGetAttribute(&bytes, cudaDevAttrL2CacheSize, device_.device_id),
               "cudaDeviceGetAttribute");
    return bytes;
  }

  template <typename... Parameters, typename... Arguments>
  void run(cudaError_t (*kernel)(cuda::Queue&, Parameters...), Arguments&&... arguments) {
    const cudaError_t error = kernel(*this, std::forward<Arguments>(arguments)...);
    if (error == cudaErrorNoKernelImageForDevice) {
      TVM_FFI_THROW(RuntimeError) << "fastgraph's CUDA kernels were not compiled for GPU "
                                  << device_.device_id << ": build them on this machine, or with "
                                  << "FASTGRAPH_CUDA=on for compute capability 8.0 and above";
    }
    check_cuda(error, "fastgraph's CUDA kernels");
  }

 private:
  static Stream stream_of(DLDevice device) {
    if (device.device_type != kDLCUDA) {
      TVM_FFI_THROW(ValueError) << "expected tensors on a GPU, got device type "
                                << device.device_type;
    }
    return static_cast<Stream>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  }

  void* allocate(int64_t bytes) override {
    constexpr DLDataType kByte{kDLUInt, 8, 1};
    scratch_.push_back(
        tvm::ffi::Tensor::FromEnvAlloc(TVMFFIEnvTensorAlloc, {bytes}, kByte, device_));
    return scratch_.back().data_ptr();
  }

  DLDevice device_;
  int previous_ = 0;
  std::vector<tvm::ffi::Tensor> scratch_;
};

inline void check_device(const tvm::ffi::TensorView& tensor, const char* name) {
  const DLDevice expected = Call::current()->device(), given = tensor.device();
  if (given.device_type != kDLCUDA || given.device_id != expected.device_id) {
    TVM_FFI_THROW(ValueError) << name << " must be on GPU " << expected.device_id
                              << ", got device type " << given.device_type << ", number "
                              << given.device_id;
  }
}

// Where kernels find a tensor; T is const for those that they only read.
template <typename T>
T* memory_of(const tvm::ffi::TensorView& tensor, const char*) {
  return reinterpret_cast<T*>(static_cast<char*>(tensor.data_ptr()) + tensor.byte_offset());
}

// The same for one that they may change in part.
template <typename T>
T* updated_memory_of(const tvm::ffi::TensorView& tensor, const char* name) {
  return memory_of<T>(tensor, name);
}

// Where kernels find a tensor of the host, whose memory must be pinned.
template <typename T>
T* host_memory_of(const tvm::ffi::TensorView& tensor, const char* name) {
  const DLDeviceType kind = tensor.device().device_type;
  if (kind != kDLCPU && kind != kDLCUDAHost) {
    TVM_FFI_THROW(ValueError) << name << " must be on the host, got device type " << kind;
  }
  void* found = nullptr;
  check_cuda(cudaHostGetDevicePointer(&found, memory_of<char>(tensor, name), 0), name);
  return static_cast<T*>(found);
}

}  // namespace fastgraph
