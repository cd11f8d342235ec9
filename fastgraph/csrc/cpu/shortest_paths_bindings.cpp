// The functions that measure distances in graphs.
#include "cpu/shortest_paths.h"

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/function.h>

#include "cpu/sampling_arguments.h"

namespace fastgraph {
namespace {

using Tensors = tvm::ffi::Array<tvm::ffi::Tensor>;

// What is farther has longest + 1, which a byte must hold.
constexpr int64_t kLongest = 254;

Graph checked_graph(const Tensor& rowptr, const Tensor& col, int64_t longest) {
  if (longest < 0 || longest > kLongest) {
    TVM_FFI_THROW(ValueError) << "longest must be in [0, " << kLongest << "], got " << longest;
  }
  return checked_adjacency<int64_t, int64_t>(rowptr, col, "rowptr", "col");
}

// Offsets of some lists that ascend from 0.
const int64_t* checked_offsets(const Tensor& offsets, int64_t num_lists, const char* name) {
  const auto* const begin = checked<const int64_t>(offsets, {num_lists + 1}, name);
  for (int64_t i = 0; i < num_lists; ++i) {
    if (begin[0] != 0 || begin[i] > begin[i + 1]) {
      TVM_FFI_THROW(ValueError) << name << " must ascend from 0, got " << begin[i] << " and "
                                << begin[i + 1] << " at position " << i;
    }
  }
  if (begin[0] != 0) TVM_FFI_THROW(ValueError) << name << " must ascend from 0, got " << begin[0];
  return begin;
}

uint8_t* checked_bytes(const Tensor& out, int64_t size) {
  check_place(out, "out");
  check_shape(out, {size}, "out");
  const DLDataType type = out.dtype();
  if (type.code != kDLUInt || type.bits != 8 || type.lanes != 1) {
    TVM_FFI_THROW(TypeError) << "out must be uint8, got " << dtype_text(out);
  }
  if (!out.IsContiguous()) refuse_strides(out, "out");
  return static_cast<uint8_t*>(out.data_ptr());
}

void bind_distances_in_ranges(Tensor rowptr, Tensor col, Tensor nodes, Tensor first, Tensor begin,
                              int64_t longest, Tensor out) {
  const Graph graph = checked_graph(rowptr, col, longest);
  const auto* const from = checked_vector<int64_t>(nodes, "nodes");
  const int64_t count = nodes.size(0);
  const Ranges ranges{from, checked<const int64_t>(first, {count}, "first"),
                      checked_offsets(begin, count, "begin"), count};
  auto* const distances = checked_bytes(out, ranges.begin[count]);
  throw_defect(distances_in_ranges(graph, ranges, longest, distances), {"nodes", "rowptr", "col"});
}

void bind_distances_of_entries(Tensor rowptr, Tensor col, Tensor ptr, Tensor key, int64_t longest,
                               Tensor out) {
  const Graph graph = checked_graph(rowptr, col, longest);
  const auto* const keys = checked_vector<int64_t>(key, "key");
  const int64_t num_entries = key.size(0);
  const auto* const begin = checked_offsets(ptr, graph.num_nodes, "ptr");
  if (begin[graph.num_nodes] != num_entries) {
    TVM_FFI_THROW(ValueError) << "ptr must run to " << num_entries << " (the size of key), got "
                              << begin[graph.num_nodes];
  }
  auto* const distances = checked_bytes(out, num_entries);
  throw_defect(distances_of_entries(graph, begin, keys, num_entries, longest, distances),
               {"key", "rowptr", "col"});
}

// How many nodes are within the bound of each node, which these are, and how far.
Tensors bind_nodes_within(Tensor rowptr, Tensor col, int64_t longest) {
  NodesWithin found;
  const Graph graph = checked_graph(rowptr, col, longest);
  throw_defect(nodes_within(graph, longest, found), {"rowptr", "rowptr", "col"});
  Tensors out;
  out.push_back(to_tensor(found.count));
  out.push_back(to_tensor(found.node));
  out.push_back(to_tensor(found.distance));
  return out;
}

}  // namespace
}  // namespace fastgraph

TVM_FFI_DLL_EXPORT_TYPED_FUNC(distances_in_ranges, fastgraph::bind_distances_in_ranges);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(distances_of_entries, fastgraph::bind_distances_of_entries);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(nodes_within, fastgraph::bind_nodes_within);
