// Validation of tensors at the native boundary. Every error names the argument, what was expected
// and what was given.
#pragma once

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/optional.h>

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <new>
#include <string>
#include <type_traits>

#include FASTGRAPH_DEVICE  // "cpu/device.h", for example
#include "fastgraph/attention_arguments.h"
#include "fastgraph/types.h"
#include "fastgraph/views.h"

namespace fastgraph {

using Tensor = tvm::ffi::TensorView;
using OptionalTensor = tvm::ffi::Optional<tvm::ffi::TensorView>;

// A gradient of a tensor that is always there. Kernels that make all of them at once write this
// one, too, wanted or not.
#ifdef FASTGRAPH_BACKWARD_AT_ONCE
using GradientTensor = Tensor;
#else
using GradientTensor = OptionalTensor;
#endif

enum class DType { kFloat32, kFloat64, kBFloat16, kFloat16, kInt32, kInt64, kOther };

inline DType dtype_of(const Tensor& tensor) {
  const DLDataType type = tensor.dtype();
  if (type.lanes != 1) return DType::kOther;
  if (type.code == kDLFloat && type.bits == 32) return DType::kFloat32;
  if (type.code == kDLFloat && type.bits == 64) return DType::kFloat64;
  if (type.code == kDLBfloat && type.bits == 16) return DType::kBFloat16;
  if (type.code == kDLFloat && type.bits == 16) return DType::kFloat16;
  if (type.code == kDLInt && type.bits == 32) return DType::kInt32;
  if (type.code == kDLInt && type.bits == 64) return DType::kInt64;
  return DType::kOther;
}

template <typename T>
constexpr DType kDType = std::is_same_v<T, float>      ? DType::kFloat32
                         : std::is_same_v<T, double>   ? DType::kFloat64
                         : std::is_same_v<T, bfloat16> ? DType::kBFloat16
                         : std::is_same_v<T, float16>  ? DType::kFloat16
                         : std::is_same_v<T, int32_t>  ? DType::kInt32
                                                       : DType::kInt64;

inline const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return "float32";
    case DType::kFloat64: return "float64";
    case DType::kBFloat16: return "bfloat16";
    case DType::kFloat16: return "float16";
    case DType::kInt32: return "int32";
    case DType::kInt64: return "int64";
    case DType::kOther: break;
  }
  return "another dtype";
}

// The name of any dtype; the library's own conversion throws for some, which is fatal while an
// error is being put together.
inline std::string dtype_text(const Tensor& tensor) {
  const DLDataType type = tensor.dtype();
  const std::string bits = std::to_string(type.bits);
  switch (type.code) {
    case kDLInt: return "int" + bits;
    case kDLUInt: return "uint" + bits;
    case kDLFloat: return "float" + bits;
    case kDLBfloat: return "bfloat" + bits;
    case kDLComplex: return "complex" + bits;
    case kDLBool: return "bool";
    default: return "dtype code " + std::to_string(type.code) + " of " + bits + " bits";
  }
}

inline std::string shape_text(const Tensor& tensor) {
  std::string text = "[";
  for (int i = 0; i < tensor.ndim(); ++i) {
    text += (i ? ", " : "") + std::to_string(tensor.size(i));
  }
  return text + "]";
}

// The size of an element of any dtype that torch has for edges and their weights.
inline int64_t item_bytes(const Tensor& tensor, const char* name) {
  const DLDataType type = tensor.dtype();
  const int bits = type.bits * type.lanes;
  if (bits != 8 && bits != 16 && bits != 32 && bits != 64) {
    TVM_FFI_THROW(TypeError) << name << " must have elements of 1, 2, 4 or 8 bytes, got "
                             << dtype_text(tensor);
  }
  return bits / 8;
}

// What is said of a tensor that does not fit is put together here, so that calls with tensors that
// do neither make a text nor carry the code for it.
#define FASTGRAPH_NOT_INLINED inline __attribute__((noinline, cold))

[[noreturn]] FASTGRAPH_NOT_INLINED void refuse_dtype(const Tensor& tensor, DType expected,
                                                     const char* name) {
  TVM_FFI_THROW(TypeError) << name << " must be " << name_of(expected) << ", got "
                           << dtype_text(tensor);
}

[[noreturn]] FASTGRAPH_NOT_INLINED void refuse_ndim(const Tensor& tensor, int expected,
                                                    const char* name) {
  TVM_FFI_THROW(ValueError) << name << " must have " << expected << " dimension"
                            << (expected == 1 ? "" : "s") << ", got shape " << shape_text(tensor);
}

[[noreturn]] FASTGRAPH_NOT_INLINED void refuse_shape(const Tensor& tensor,
                                                     std::initializer_list<int64_t> expected,
                                                     const char* name) {
  std::string text;
  for (int64_t size : expected) text += (text.empty() ? "" : ", ") + std::to_string(size);
  TVM_FFI_THROW(ValueError) << name << " must have shape [" << text << "], got "
                            << shape_text(tensor);
}

[[noreturn]] FASTGRAPH_NOT_INLINED void refuse_strides(const Tensor& tensor, const char* name) {
  TVM_FFI_THROW(ValueError) << name << " must be contiguous, got shape " << shape_text(tensor)
                            << " with other strides";
}

[[noreturn]] FASTGRAPH_NOT_INLINED void refuse_no_memory(const char* name) {
  TVM_FFI_THROW(TypeError) << name << " must have memory of its own, got a tensor that has none, "
                           << "such as a subclass that wraps another";
}

#undef FASTGRAPH_NOT_INLINED

// A tensor on the device of the call. DLPack gives those without memory a null pointer.
inline void check_place(const Tensor& tensor, const char* name) {
  check_device(tensor, name);
  if (tensor.data_ptr() == nullptr && tensor.numel() > 0) refuse_no_memory(name);
}

inline void check_dtype(const Tensor& tensor, DType expected, const char* name) {
  if (dtype_of(tensor) != expected) refuse_dtype(tensor, expected, name);
}

inline void check_ndim(const Tensor& tensor, int ndim, const char* name) {
  if (tensor.ndim() != ndim) refuse_ndim(tensor, ndim, name);
}

inline void check_shape(const Tensor& tensor, std::initializer_list<int64_t> shape,
                        const char* name) {
  bool equal = tensor.ndim() == static_cast<int>(shape.size());
  int i = 0;
  for (int64_t size : shape) equal = equal && tensor.size(i++) == size;
  if (!equal) refuse_shape(tensor, shape, name);
}

// A contiguous tensor of a dtype and a shape on the device of the call. Not inlined, as every
// argument of every function comes here, and one call costs next to nothing.
inline __attribute__((noinline)) void check_tensor(const Tensor& tensor, DType dtype,
                                                   std::initializer_list<int64_t> shape,
                                                   const char* name) {
  check_place(tensor, name);
  check_dtype(tensor, dtype, name);
  check_shape(tensor, shape, name);
  if (!tensor.IsContiguous()) refuse_strides(tensor, name);
}

template <typename T>
T* checked(const Tensor& tensor, std::initializer_list<int64_t> shape, const char* name) {
  check_tensor(tensor, kDType<std::remove_const_t<T>>, shape, name);
  return memory_of<T>(tensor, name);
}

template <typename T>
T* checked(const OptionalTensor& tensor, std::initializer_list<int64_t> shape, const char* name) {
  return tensor.has_value() ? checked<T>(tensor.value(), shape, name) : nullptr;
}

template <typename T>
void check_row(int64_t values, const Tensor& tensor, const char* name) {
  if (values > kMostRowBytes / static_cast<int64_t>(sizeof(T))) {
    TVM_FFI_THROW(ValueError) << name << " must have rows of at most " << kMostRowBytes
                              << " bytes on this device, got shape " << shape_text(tensor) << " of "
                              << dtype_text(tensor);
  }
}

template <typename T>
Matrix<T> checked_matrix(const Tensor& tensor, int64_t rows, int64_t width, const char* name) {
  T* const data = checked<T>(tensor, {rows, width}, name);
  check_row<T>(width, tensor, name);
  return {data, rows, width};
}

template <typename T>
Matrix<T> checked_matrix(const OptionalTensor& tensor, int64_t rows, int64_t width,
                         const char* name) {
  return tensor.has_value() ? checked_matrix<T>(tensor.value(), rows, width, name) : Matrix<T>{};
}

template <typename T>
Heads<T> checked_heads(const Tensor& tensor, int64_t nodes, int64_t heads, int64_t width,
                       const char* name) {
  T* const data = checked<T>(tensor, {nodes, heads, width}, name);
  check_row<T>(heads * width, tensor, name);
  return {data, nodes, heads, width};
}

template <typename T>
Heads<T> checked_heads(const OptionalTensor& tensor, int64_t nodes, int64_t heads, int64_t width,
                       const char* name) {
  return tensor.has_value() ? checked_heads<T>(tensor.value(), nodes, heads, width, name)
                            : Heads<T>{};
}

// What edges have for each of some heads, [edges, heads], or for one, [edges]: the heads share
// `width` columns evenly.
template <typename T>
Matrix<T> checked_edge_values(const Tensor& tensor, int64_t edges, int64_t width,
                              const char* name) {
  if (tensor.ndim() == 1) return {checked<T>(tensor, {edges}, name), edges, 1};
  check_ndim(tensor, 2, name);
  const int64_t heads = tensor.size(1);
  if (!kEdgesHaveHeads && heads != 1) {
    TVM_FFI_THROW(ValueError) << name << " must have one value for each edge on this device, got "
                              << "shape " << shape_text(tensor);
  }
  if (heads < 1 || width % heads != 0) {
    TVM_FFI_THROW(ValueError) << name << " must have heads that share " << width
                              << " columns evenly, got shape " << shape_text(tensor);
  }
  return checked_matrix<T>(tensor, edges, heads, name);
}

template <typename T>
Matrix<T> checked_edge_values(const OptionalTensor& tensor, int64_t edges, int64_t width,
                              const char* name) {
  return tensor.has_value() ? checked_edge_values<T>(tensor.value(), edges, width, name)
                            : Matrix<T>{};
}

inline int64_t checked_size(int64_t size, const char* name) {
  if (size < 0 || size > std::numeric_limits<int32_t>::max()) {
    TVM_FFI_THROW(ValueError) << name << " must be in [0, 2^31), got " << size;
  }
  return size;
}

inline Dropout checked_dropout(double rate, int64_t seed) {
  if (!(rate >= 0 && rate <= 1)) {
    TVM_FFI_THROW(ValueError) << "dropout must be in [0, 1], got " << rate;
  }
  return {rate, static_cast<uint64_t>(seed)};
}

template <typename Index>
Indices<Index> checked_indices(const Tensor& tensor, int64_t size, const char* name) {
  check_place(tensor, name);
  check_dtype(tensor, kDType<Index>, name);
  check_shape(tensor, {size}, name);
  const int64_t stride = size > 1 ? tensor.stride(0) : 1;
  if (stride < 0) {
    TVM_FFI_THROW(ValueError) << name << " must have a stride >= 0, got " << stride;
  }
  return {memory_of<const Index>(tensor, name), stride, size};
}

// What the arguments that make up a matrix are called.
struct CsrNames {
  const char *rowptr, *col, *edge_id, *num_cut, *row_id, *tasks;
};
constexpr CsrNames kByRow{"rowptr", "col", "edge_id", "num_cut", "row_id", "tasks"};
constexpr CsrNames kByCol{"rowptr_t", "col_t", "edge_id_t", "num_cut_t", "row_id_t", "tasks_t"};

// The list of a GPU's tasks, and behind them that of the rows that were cut: four numbers for each
// of num_rows rows and of the pieces, of which a row that was cut has at least two.
template <typename T>
T* checked_tasks(const Tensor& tensor, int64_t num_rows, int64_t num_cut, const char* name) {
  check_ndim(tensor, 2, name);
  T* const data = checked<T>(tensor, {tensor.size(0), 4}, name);
  if (reinterpret_cast<uintptr_t>(data) % 16 != 0) {
    TVM_FFI_THROW(ValueError) << name << " must be aligned to 16 bytes";
  }
  if (num_cut < 0 || num_cut > num_rows || tensor.size(0) - num_rows < 2 * num_cut) {
    TVM_FFI_THROW(ValueError) << name << " must list " << num_rows << " rows and at least two "
                              << "pieces of each of those that are cut, got shape "
                              << shape_text(tensor) << " with " << num_cut << " that are cut";
  }
  return data;
}

// A matrix with what the device's kernels need to know besides: the CPU the rows in the order in
// which they stand, if that is not ascending, and a GPU its tasks.
template <typename R>
R with_order(const Csr& graph, int64_t num_cut, const OptionalTensor& order,
             const CsrNames& names) {
  if constexpr (std::is_same_v<R, OrderedCsr>) {
    checked_size(num_cut, names.num_cut);
    return {graph, checked<const int32_t>(order, {graph.num_rows}, names.row_id)};
  } else {
    if (!order.has_value()) {
      TVM_FFI_THROW(ValueError) << names.tasks << " must be a tensor on this device, got None";
    }
    const Tensor& list = order.value();
    const auto* data = checked_tasks<const int32_t>(list, graph.num_rows, num_cut, names.tasks);
    const int64_t num_tasks = list.size(0) - num_cut;
    return {graph,
            reinterpret_cast<decltype(R::tasks)>(data),
            reinterpret_cast<decltype(R::cut_rows)>(data + 4 * num_tasks),
            num_tasks,
            list.size(0) - graph.num_rows,
            num_cut};
  }
}

// A matrix that fastgraph.graphs.graph has made, and how many of its rows are cut. Sizes are
// checked, contents only where that takes no time.
inline Rows checked_csr(const Tensor& rowptr, const Tensor& col, const OptionalTensor& edge_id,
                        int64_t num_cut, const OptionalTensor& order, int64_t num_cols,
                        const CsrNames& names) {
  check_ndim(rowptr, 1, names.rowptr);
  check_ndim(col, 1, names.col);
  if (rowptr.size(0) < 1) {
    TVM_FFI_THROW(ValueError) << names.rowptr << " must hold at least one value, got none";
  }
  const int64_t num_rows = checked_size(rowptr.size(0) - 1, "the number of rows");
  const int64_t num_entries = checked_size(col.size(0), "the number of edges");
  const Csr graph{checked<const int64_t>(rowptr, {num_rows + 1}, names.rowptr),
                  checked<const int32_t>(col, {num_entries}, names.col),
                  checked<const int32_t>(edge_id, {num_entries}, names.edge_id),
                  num_rows,
                  num_cols,
                  num_entries};
  if (kReadable && (graph.rowptr[0] != 0 || graph.rowptr[num_rows] != num_entries)) {
    TVM_FFI_THROW(ValueError) << names.rowptr << " must run from 0 to " << num_entries
                              << " (the size of " << names.col << "), got " << graph.rowptr[0]
                              << " to " << graph.rowptr[num_rows];
  }
  return with_order<Rows>(graph, num_cut, order, names);
}

// Calls body(), which may need more working memory than there is: fastgraph.machine.native has
// Python raise torch's own error for this kind.
template <typename Body>
auto with_memory(const Body& body) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    TVM_FFI_THROW(FastgraphOutOfMemory)
        << "a fastgraph kernel needs more working memory than there is";
  } catch (const tvm::ffi::Error& error) {
    if (error.kind() != "MemoryError") throw;
    TVM_FFI_THROW(FastgraphOutOfMemory) << error.message();
  }
}

// Calls body(T{}) with the element type of a feature tensor.
template <typename Body>
auto dispatch_features(const Tensor& tensor, const char* name, const Body& body) {
  return with_memory([&] {
    switch (dtype_of(tensor)) {
      case DType::kFloat32: return body(float{});
      case DType::kFloat64: return body(double{});
      case DType::kBFloat16: return body(bfloat16{});
      case DType::kFloat16: return body(float16{});
      default:
        TVM_FFI_THROW(TypeError) << name << " must be float32, float64, bfloat16 or float16, got "
                                 << dtype_text(tensor);
    }
  });
}

// Calls body(Index{}) with the element type of an index tensor.
template <typename Body>
auto dispatch_indices(const Tensor& tensor, const char* name, const Body& body) {
  return with_memory([&] {
    switch (dtype_of(tensor)) {
      case DType::kInt32: return body(int32_t{});
      case DType::kInt64: return body(int64_t{});
      default:
        TVM_FFI_THROW(TypeError) << name << " must be int32 or int64, got " << dtype_text(tensor);
    }
  });
}

}  // namespace fastgraph
