// Products on tiles, which GPUs alone have.
#include <tvm/ffi/function.h>

#include "bindings/checks.h"

namespace fastgraph {
namespace {

template <typename T>
void check_packs(Matrix<T> matrix, const char* name) {
  constexpr int64_t kBytes = 16;
  if (matrix.width * static_cast<int64_t>(sizeof(T)) % kBytes != 0 ||
      reinterpret_cast<uintptr_t>(matrix.data) % kBytes != 0) {
    TVM_FFI_THROW(ValueError) << name << " must have rows of whole packs of " << kBytes
                              << " bytes in aligned memory, got " << matrix.width << " columns of "
                              << sizeof(T) << " bytes";
  }
}

// Tiles as fastgraph.graphs.tiles makes them, on a GPU; `tasks` lists windows as rows and blocks as
// entries.
void bind_spmm_tiles(Tensor col, Tensor bits, Tensor first, Tensor edge_id, int64_t num_windows,
                     int64_t num_cut, Tensor tasks, OptionalTensor weight, OptionalTensor row_scale,
                     Tensor x, Tensor out) {
  Call call(x);
  check_ndim(bits, 2, "bits");
  check_ndim(edge_id, 1, "edge_id");
  check_ndim(x, 2, "x");
  check_ndim(out, 2, "out");
  checked_size(num_windows, "num_windows");
  const int64_t num_rows = out.size(0), num_blocks = bits.size(0), num_edges = edge_id.size(0);
  if (num_windows != (num_rows + kTileRows - 1) / kTileRows) {
    TVM_FFI_THROW(ValueError) << "num_windows must be that of " << num_rows << " rows of out, got "
                              << num_windows;
  }
  const auto run = [&](auto type) {
    using T = decltype(type);
    const int64_t width = x.size(1);
    const auto features = checked_matrix<const T>(x, x.size(0), width, "x");
    const auto sums = checked_matrix<T>(out, num_rows, width, "out");
    check_packs(features, "x");
    check_packs(sums, "out");
    const Csr windows{nullptr, nullptr, nullptr, num_windows, x.size(0), num_blocks};
    const Tiles tiles{checked<const int32_t>(col, {num_blocks * kTileCols}, "col"),
                      reinterpret_cast<const uint64_t*>(
                          checked<const int64_t>(bits, {num_blocks, kTileWords}, "bits")),
                      checked<const int64_t>(first, {num_blocks + 1}, "first"),
                      checked<const int32_t>(edge_id, {num_edges}, "edge_id")};
    call.run(kernels::spmm_tiles<T>, with_order<Rows>(windows, num_cut, tasks, kByRow), tiles,
             checked<const T>(weight, {num_edges}, "weight"),
             checked<const float>(row_scale, {num_rows}, "row_scale"), features, sums);
  };
  with_memory([&] {
    switch (dtype_of(x)) {
      case DType::kFloat32: return run(float{});
      case DType::kBFloat16: return run(bfloat16{});
      default: TVM_FFI_THROW(TypeError) << "x must be float32 or bfloat16, got " << dtype_text(x);
    }
  });
}

}  // namespace
}  // namespace fastgraph

TVM_FFI_DLL_EXPORT_TYPED_FUNC(spmm_tiles, fastgraph::bind_spmm_tiles);
