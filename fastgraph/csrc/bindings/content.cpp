// The functions by which GPUs notice edits of tensors; the CPU has `checksum`.
#include <tvm/ffi/function.h>

#include "bindings/checks.h"

namespace fastgraph {
namespace {

// A contiguous tensor that a kernel may change in part.
template <typename T>
T* checked_update(const Tensor& tensor, const char* name) {
  check_device(tensor, name);
  check_dtype(tensor, kDType<T>, name);
  if (!tensor.IsContiguous()) {
    TVM_FFI_THROW(ValueError) << name << " must be contiguous, got shape " << shape_text(tensor)
                              << " with other strides";
  }
  return updated_memory_of<T>(tensor, name);
}

kernels::Elements checked_elements(const Tensor& tensor) {
  check_device(tensor, "tensor");
  if (!tensor.IsContiguous()) {
    TVM_FFI_THROW(ValueError) << "tensor must be contiguous, got shape " << shape_text(tensor)
                              << " with other strides";
  }
  return {memory_of<const char>(tensor, "tensor"), tensor.numel(), item_bytes(tensor, "tensor")};
}

void bind_record_content(Tensor tensor, Tensor total) {
  Call call(tensor);
  with_memory([&] {
    call.run(kernels::record_content, checked_elements(tensor),
             reinterpret_cast<uint64_t*>(checked<int64_t>(total, {1}, "total")));
  });
}

void bind_check_content(Tensor tensor, Tensor expected, Tensor changed) {
  Call call(tensor);
  check_shape(changed, {1}, "changed");
  with_memory([&] {
    call.run(kernels::check_content, checked_elements(tensor),
             reinterpret_cast<const uint64_t*>(checked<const int64_t>(expected, {1}, "expected")),
             checked_update<int32_t>(changed, "changed"));
  });
}

void bind_fill_with_nan_if(Tensor changed, Tensor out) {
  Call call(out);
  dispatch_features(out, "out", [&](auto type) {
    using T = decltype(type);
    call.run(kernels::fill_with_nan_if<T>, checked<const int32_t>(changed, {1}, "changed"),
             checked_update<T>(out, "out"), out.numel());
  });
}

}  // namespace
}  // namespace fastgraph

TVM_FFI_DLL_EXPORT_TYPED_FUNC(record_content, fastgraph::bind_record_content);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(check_content, fastgraph::bind_check_content);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fill_with_nan_if, fastgraph::bind_fill_with_nan_if);
