// Products on tiles, which GPUs alone have.
#include <tvm/ffi/function.h>

#include "bindings/checks.h"
#include "fastgraph/attention_arguments.h"

namespace fastgraph {
namespace {

// Of a matrix or of heads.
template <typename View>
void check_packs(const View& view, const char* name) {
  constexpr int64_t kBytes = 16, kItem = sizeof(*view.data);
  if (view.width * kItem % kBytes != 0 || reinterpret_cast<uintptr_t>(view.data) % kBytes != 0) {
    TVM_FFI_THROW(ValueError) << name << " must have rows of whole packs of " << kBytes
                              << " bytes in aligned memory, got " << view.width << " columns of "
                              << kItem << " bytes";
  }
}

// Tiles as fastgraph.graphs.tiles makes them, on a GPU; `tasks` lists windows as rows and blocks as
// entries.
struct TileArguments {
  const Tensor &col, &bits, &first, &edge_id;
  int64_t num_windows, num_cut;
  const Tensor& tasks;

  // Of a matrix of so many rows and columns.
  Rows windows(int64_t num_rows, int64_t num_cols) const {
    check_ndim(bits, 2, "bits");
    checked_size(num_windows, "num_windows");
    if (num_windows != (num_rows + kTileRows - 1) / kTileRows) {
      TVM_FFI_THROW(ValueError) << "num_windows must be that of " << num_rows
                                << " rows of out, got " << num_windows;
    }
    const Csr blocks{nullptr, nullptr, nullptr, num_windows, num_cols, bits.size(0)};
    return with_order<Rows>(blocks, num_cut, tasks, kByRow);
  }
  Tiles tiles() const {
    check_ndim(edge_id, 1, "edge_id");
    const int64_t num_blocks = bits.size(0);
    return {checked<const int32_t>(col, {num_blocks * kTileCols}, "col"),
            reinterpret_cast<const uint64_t*>(
                checked<const int64_t>(bits, {num_blocks, kTileWords}, "bits")),
            checked<const int64_t>(first, {num_blocks + 1}, "first"),
            checked<const int32_t>(edge_id, {edge_id.size(0)}, "edge_id")};
  }
};

// Calls body(T{}) with the element type of features that tensor cores take.
template <typename Body>
void dispatch_tensor_cores(const Tensor& x, const char* name, const Body& body) {
  with_memory([&] {
    switch (dtype_of(x)) {
      case DType::kFloat32: return body(float{});
      case DType::kBFloat16: return body(bfloat16{});
      default:
        TVM_FFI_THROW(TypeError) << name << " must be float32 or bfloat16, got " << dtype_text(x);
    }
  });
}

void bind_spmm_tiles(Tensor col, Tensor bits, Tensor first, Tensor edge_id, int64_t num_windows,
                     int64_t num_cut, Tensor tasks, OptionalTensor weight, OptionalTensor row_scale,
                     Tensor x, Tensor out) {
  Call call(x);
  check_ndim(x, 2, "x");
  check_ndim(out, 2, "out");
  const TileArguments arguments{col, bits, first, edge_id, num_windows, num_cut, tasks};
  const int64_t num_rows = out.size(0), width = x.size(1);
  const Rows windows = arguments.windows(num_rows, x.size(0));
  dispatch_tensor_cores(x, "x", [&](auto type) {
    using T = decltype(type);
    const auto features = checked_matrix<const T>(x, x.size(0), width, "x");
    const auto sums = checked_matrix<T>(out, num_rows, width, "out");
    check_packs(features, "x");
    check_packs(sums, "out");
    const Tiles tiles = arguments.tiles();
    call.run(kernels::spmm_tiles<T>, windows, tiles,
             checked<const T>(weight, {edge_id.size(0)}, "weight"),
             checked<const float>(row_scale, {num_rows}, "row_scale"), features, sums);
  });
}

void bind_attention_tiles(Tensor col, Tensor bits, Tensor first, Tensor edge_id,
                          int64_t num_windows, int64_t num_cut, Tensor tasks, Tensor rowptr,
                          Tensor query, Tensor key, Tensor value, double scale, Tensor out,
                          Tensor stats, OptionalTensor addend) {
  Call call(key);
  check_ndim(query, 3, "query");
  check_ndim(key, 3, "key");
  const TileArguments arguments{col, bits, first, edge_id, num_windows, num_cut, tasks};
  const int64_t rows = query.size(0), cols = key.size(0), heads = key.size(1), width = key.size(2);
  const Rows windows = arguments.windows(rows, cols);
  dispatch_tensor_cores(key, "key", [&](auto type) {
    using T = decltype(type);
    const AttentionInputs<T> in{checked_heads<const T>(query, rows, heads, width, "query"),
                                checked_heads<const T>(key, cols, heads, width, "key"),
                                checked_heads<const T>(value, cols, heads, width, "value"),
                                {}};
    const int64_t bytes = width * static_cast<int64_t>(sizeof(T));
    if (bytes == 0 || bytes > kMostTileBytes) {
      TVM_FFI_THROW(ValueError) << "key must have heads of 16 to " << kMostTileBytes
                                << " bytes, got " << bytes;
    }
    SoftmaxOutputs<T> outputs{checked_heads<T>(out, rows, heads, width, "out"),
                              {checked<float>(stats, {rows, heads, 2}, "stats"), heads},
                              {},
                              {}};
    if (addend.has_value()) {
      check_ndim(addend.value(), 3, "addend");
      const int64_t nodes = addend.value().size(0) == 1 ? 1 : rows;
      outputs.addend = checked_heads<const T>(addend, nodes, heads, width, "addend");
      check_packs(outputs.addend, "addend");
    }
    check_packs(in.query, "query");
    check_packs(in.key, "key");
    check_packs(in.value, "value");
    check_packs(outputs.out, "out");
    call.run(kernels::attention_tiles<T>, windows, arguments.tiles(),
             checked<const int64_t>(rowptr, {rows + 1}, "rowptr"), in, scale, outputs);
  });
}

}  // namespace
}  // namespace fastgraph

TVM_FFI_DLL_EXPORT_TYPED_FUNC(spmm_tiles, fastgraph::bind_spmm_tiles);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(attention_tiles, fastgraph::bind_attention_tiles);
