// The functions by which GPUs notice edits of tensors; the CPU has `checksum`.
#include <tvm/ffi/function.h>

#include "bindings/checks.h"

namespace fastgraph {
namespace {

// A contiguous tensor that a kernel may change in part.
template <typename T>
T* checked_update(const Tensor& tensor, const char* name) {
  check_place(tensor, name);
  check_dtype(tensor, kDType<T>, name);
  if (!tensor.IsContiguous()) {
    TVM_FFI_THROW(ValueError) << name << " must be contiguous, got shape " << shape_text(tensor)
                              << " with other strides";
  }
  return updated_memory_of<T>(tensor, name);
}

kernels::Elements checked_elements(const Tensor& tensor) {
  check_place(tensor, "tensor");
  if (!tensor.IsContiguous()) {
    TVM_FFI_THROW(ValueError) << "tensor must be contiguous, got shape " << shape_text(tensor)
                              << " with other strides";
  }
  return {memory_of<const char>(tensor, "tensor"), tensor.numel(), item_bytes(tensor, "tensor")};
}

void bind_sum_content(Tensor tensor, Tensor sums) {
  Call call(tensor);
  check_ndim(sums, 1, "sums");
  if (sums.size(0) == 0) TVM_FFI_THROW(ValueError) << "sums must not be empty";
  with_memory([&] {
    call.run(kernels::sum_content, checked_elements(tensor),
             reinterpret_cast<uint64_t*>(checked<int64_t>(sums, {sums.size(0)}, "sums")),
             sums.size(0));
  });
}

void bind_spoil_if_changed(Tensor sums, Tensor expected, Tensor seen, int64_t name, Tensor out) {
  Call call(out);
  check_ndim(sums, 1, "sums");
  check_dtype(seen, kDType<int64_t>, "seen");
  check_shape(seen, {1}, "seen");
  const int64_t count = sums.size(0);
  dispatch_features(out, "out", [&](auto type) {
    using T = decltype(type);
    call.run(kernels::spoil_if_changed<T>,
             kernels::ContentSums{
                 reinterpret_cast<const uint64_t*>(checked<const int64_t>(sums, {count}, "sums")),
                 reinterpret_cast<const uint64_t*>(
                     checked<const int64_t>(expected, {count}, "expected")),
                 count},
             kernels::Seen{host_memory_of<int64_t>(seen, "seen"), name},
             checked_update<T>(out, "out"), out.numel());
  });
}

}  // namespace
}  // namespace fastgraph
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sum_content, fastgraph::bind_sum_content);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(spoil_if_changed, fastgraph::bind_spoil_if_changed);
