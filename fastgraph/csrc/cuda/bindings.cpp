// The functions that only GPUs have.
#include <cuda_runtime.h>
#include <tvm/ffi/function.h>

#include "cuda/device.h"

namespace fastgraph {
namespace {

// The version of CUDA that the driver supports, 1000 * major + 10 * minor; 0 without a driver.
int64_t driver_version() {
  int version = 0;
  check_cuda(cudaDriverGetVersion(&version), "cudaDriverGetVersion");
  return version;
}

// The version of CUDA that the kernels were built with.
int64_t runtime_version() {
  int version = 0;
  check_cuda(cudaRuntimeGetVersion(&version), "cudaRuntimeGetVersion");
  return version;
}

}  // namespace
}  // namespace fastgraph

TVM_FFI_DLL_EXPORT_TYPED_FUNC(driver_version, fastgraph::driver_version);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(runtime_version, fastgraph::runtime_version);
