// The function by which GPUs list their tasks; the CPU's kernels cut a matrix themselves.
#include <tvm/ffi/function.h>

#include "bindings/checks.h"

namespace fastgraph {
namespace {

void bind_make_tasks(Tensor rowptr, int64_t chunk, int64_t num_cut, Tensor tasks) {
  Call call(rowptr);
  check_ndim(rowptr, 1, "rowptr");
  if (rowptr.size(0) < 1) {
    TVM_FFI_THROW(ValueError) << "rowptr must hold at least one value, got none";
  }
  if (chunk < 1 || chunk > cuda::kChunk) {
    TVM_FFI_THROW(ValueError) << "chunk must be in [1, " << cuda::kChunk << "], got " << chunk;
  }
  const int64_t num_rows = checked_size(rowptr.size(0) - 1, "the number of rows");
  with_memory([&] {
    const auto* ends = checked<const int64_t>(rowptr, {num_rows + 1}, "rowptr");
    auto* data = checked_tasks<int32_t>(tasks, num_rows, num_cut, "tasks");
    call.run(cuda::make_tasks, ends, num_rows, chunk,
             cuda::TaskList{reinterpret_cast<cuda::Span*>(data),
                            reinterpret_cast<cuda::CutRow*>(data + 4 * (tasks.size(0) - num_cut)),
                            tasks.size(0) - num_rows, num_cut});
  });
}

}  // namespace
}  // namespace fastgraph

TVM_FFI_DLL_EXPORT_TYPED_FUNC(make_tasks, fastgraph::bind_make_tasks);
