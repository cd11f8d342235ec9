// What bindings of samplers share: checks of graphs, and errors of samplers.
#pragma once

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/function.h>

#include <cstdlib>
#include <string>
#include <type_traits>

#include "bindings/checks.h"
#include "cpu/sampling.h"

namespace fastgraph {

inline std::string item(const char* name, size_t i) {
  return std::string(name) + "[" + std::to_string(i) + "]";
}

// An item of a list, of which one that is None has nothing to look at.
inline tvm::ffi::Tensor tensor_at(const tvm::ffi::Array<tvm::ffi::Tensor>& tensors, size_t i,
                                  const char* name) {
  tvm::ffi::Tensor tensor = tensors[static_cast<int64_t>(i)];
  if (!tensor.defined()) TVM_FFI_THROW(TypeError) << item(name, i) << " must be a tensor, got None";
  return tensor;
}

// A contiguous one-dimensional tensor of any size.
template <typename T>
const T* checked_vector(const Tensor& tensor, const std::string& name) {
  check_ndim(tensor, 1, name.c_str());
  return checked<const T>(tensor, {tensor.size(0)}, name.c_str());
}

// What the arguments of a function are called.
struct SampleNames {
  std::string seed, ptr, index;
};

inline void throw_defect(const SampleDefect& defect, const SampleNames& names) {
  switch (defect.kind) {
    case SampleDefect::kNone: return;
    case SampleDefect::kSeed:
      TVM_FFI_THROW(IndexError) << names.seed << " holds node " << defect.value << " at position "
                                << defect.position << ", which is not in the graph";
    case SampleDefect::kColptr:
      TVM_FFI_THROW(ValueError) << names.ptr << " must ascend to the number of edges, got "
                                << defect.value << " at position " << defect.position + 1;
    case SampleDefect::kRow:
      TVM_FFI_THROW(IndexError) << names.index << " holds node " << defect.value << " at position "
                                << defect.position << ", which is not in the graph";
    case SampleDefect::kUnsorted:
      TVM_FFI_THROW(ValueError)
          << names.index << " must have the edges of a node in order of time, which those of "
          << "node " << defect.position << " are not";
    case SampleDefect::kWeight:
      TVM_FFI_THROW(ValueError) << "edge_weight[" << defect.which << "]"
                                << " must be finite and at least 0, got " << defect.weight
                                << " at position " << defect.position;
    case SampleDefect::kTotal:
      TVM_FFI_THROW(ValueError) << "edge_weight[" << defect.which << "]"
                                << " must have finite sums, which that of node " << defect.position
                                << " is not";
    case SampleDefect::kTooLarge:
      TVM_FFI_THROW(ValueError) << "num_neighbors must give a sample of less than 2^31 nodes and "
                                << "edges, got " << defect.value;
    case SampleDefect::kEdgeType:
      TVM_FFI_THROW(IndexError) << "edge_type holds " << defect.value << " at position "
                                << defect.position << ", for which there is no fanout";
  }
}

// Memory of a buffer that a tensor owns from now on.
template <typename T>
struct OwnedMemory {
  T* memory;
  void AllocData(DLTensor* tensor) { tensor->data = memory; }
  void FreeData(DLTensor* tensor) { std::free(tensor->data); }
};

template <typename T>
tvm::ffi::Tensor to_tensor(Buffer<T>& buffer) {
  const int64_t size = buffer.size();
  const DLDataType dtype{std::is_unsigned<T>::value ? kDLUInt : kDLInt, 8 * sizeof(T), 1};
  return tvm::ffi::Tensor::FromNDAlloc(OwnedMemory<T>{buffer.release()},
                                       tvm::ffi::ShapeView(&size, 1), dtype, DLDevice{kDLCPU, 0});
}

// Calls body(Ptr{}, Index{}) with the element types of a graph.
template <typename Body>
auto dispatch_graph(const Tensor& rowptr, const Tensor& col, const char* rowptr_name,
                    const char* col_name, const Body& body) {
  return dispatch_indices(rowptr, rowptr_name, [&](auto ptr) {
    return dispatch_indices(col, col_name, [&](auto index) { return body(ptr, index); });
  });
}

template <typename Ptr, typename Index>
Adjacency<Ptr, Index> checked_adjacency(const Tensor& rowptr, const Tensor& col,
                                        const char* rowptr_name, const char* col_name) {
  const Adjacency<Ptr, Index> graph{checked_vector<Ptr>(rowptr, rowptr_name),
                                    checked_vector<Index>(col, col_name), rowptr.size(0) - 1,
                                    col.size(0)};
  if (graph.num_nodes < 0) {
    TVM_FFI_THROW(ValueError) << rowptr_name << " must hold at least one value, got none";
  }
  if (graph.rowptr[0] != 0 || graph.rowptr[graph.num_nodes] != graph.num_edges) {
    TVM_FFI_THROW(ValueError) << rowptr_name << " must run from 0 to " << graph.num_edges
                              << " (the size of " << col_name << "), got " << graph.rowptr[0]
                              << " to " << graph.rowptr[graph.num_nodes];
  }
  return graph;
}

}  // namespace fastgraph
