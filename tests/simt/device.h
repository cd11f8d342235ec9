// The emulated GPU as bindings see it, in the place of cuda/device.h. Tensors are on the host; each
// is in the memory of the emulator for the time of a call, so that every access is watched.
#pragma once

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>

#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "cuda/kernels.h"

namespace fastgraph {

namespace kernels = ::fastgraph::cuda;

constexpr bool kReadable = true;
#define FASTGRAPH_BACKWARD_AT_ONCE
#define FASTGRAPH_EXTREMA_BY_SOURCE
#define FASTGRAPH_GENERATED_KERNELS
using Rows = cuda::CutCsr;
constexpr bool kEdgesHaveHeads = false;
constexpr int64_t kMostRowBytes = std::numeric_limits<int32_t>::max();

class Call : public cuda::Queue {
 public:
  explicit Call(const tvm::ffi::TensorView&) : Queue(nullptr) {
    simt::begin();
    current() = this;
  }
  ~Call() {
    for (auto buffer = buffers_.rbegin(); buffer != buffers_.rend(); ++buffer) {
      simt::release(buffer->memory);
    }
    current() = nullptr;
  }

  static Call*& current() {
    static Call* call = nullptr;
    return call;
  }

  // The features of small graphs fit, and those of the larger ones of tests do not.
  int64_t cache_bytes() const override { return 128 << 10; }

  // Where kernels find a tensor, aligned as on the host. Those that they do not read hold nothing
  // before.
  void* mirror(const tvm::ffi::TensorView& tensor, const char* name, bool is_read,
               bool is_written) {
    char* host = static_cast<char*>(tensor.data_ptr()) + tensor.byte_offset();
    const size_t bytes = tvm::ffi::GetDataSize(tensor.numel(), tensor.dtype());
    const size_t before = reinterpret_cast<uintptr_t>(host) % kPackBytes;
    char* memory = static_cast<char*>(simt::allocate(before + bytes, name));
    char* address = memory + before;
    buffers_.push_back({memory, address, is_written ? host : nullptr, bytes});
    if (is_read && bytes > 0) simt::write(address, host, bytes);  // empty ones may be null
    return address;
  }

  template <typename... Parameters, typename... Arguments>
  void run(cudaError_t (*kernel)(cuda::Queue&, Parameters...), Arguments&&... arguments) {
    if (kernel(*this, std::forward<Arguments>(arguments)...) != cudaSuccess) {
      TVM_FFI_THROW(RuntimeError) << simt::error();
    }
    for (const Buffer& buffer : buffers_) {
      if (buffer.host != nullptr) simt::read(buffer.host, buffer.address, buffer.bytes);
    }
  }

 private:
  static constexpr size_t kPackBytes = 32;  // of the largest one: 8 values of float32

  struct Buffer {
    void* memory;
    void* address;
    void* host;  // null if kernels only read it
    size_t bytes;
  };

  void* allocate(int64_t bytes) override {
    void* memory = simt::allocate(bytes, "scratch");
    buffers_.push_back({memory, memory, nullptr, 0});
    return memory;
  }

  std::vector<Buffer> buffers_;
};

inline void check_device(const tvm::ffi::TensorView& tensor, const char* name) {
  if (tensor.device().device_type != kDLCPU) {
    TVM_FFI_THROW(ValueError) << name << " must be on the CPU, got device type "
                              << tensor.device().device_type;
  }
}

template <typename T>
T* memory_of(const tvm::ffi::TensorView& tensor, const char* name) {
  constexpr bool kIsRead = std::is_const_v<T>;
  return static_cast<T*>(Call::current()->mirror(tensor, name, kIsRead, !kIsRead));
}

template <typename T>
T* updated_memory_of(const tvm::ffi::TensorView& tensor, const char* name) {
  return static_cast<T*>(Call::current()->mirror(tensor, name, true, true));
}

// The same here for memory of the host.
template <typename T>
T* host_memory_of(const tvm::ffi::TensorView& tensor, const char* name) {
  return updated_memory_of<T>(tensor, name);
}

}  // namespace fastgraph
