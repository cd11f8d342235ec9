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

#if CUDART_VERSION >= 12080
// The address of a kernel in an image (cubin or PTX) that was compiled for the current GPU. It is
// never unloaded.
int64_t load_kernel(const tvm::ffi::Bytes& image, const tvm::ffi::String& name) {
  cudaLibrary_t library = nullptr;
  check_cuda(cudaLibraryLoadData(&library, image.data(), nullptr, nullptr, 0, nullptr, nullptr, 0),
             "cudaLibraryLoadData");
  cudaKernel_t kernel = nullptr;
  check_cuda(cudaLibraryGetKernel(&kernel, library, name.c_str()), "cudaLibraryGetKernel");
  return reinterpret_cast<int64_t>(kernel);
}
#endif

}  // namespace
}  // namespace fastgraph

#if CUDART_VERSION >= 12080
TVM_FFI_DLL_EXPORT_TYPED_FUNC(load_kernel, fastgraph::load_kernel);
#endif
TVM_FFI_DLL_EXPORT_TYPED_FUNC(driver_version, fastgraph::driver_version);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(runtime_version, fastgraph::runtime_version);
