// The functions that sample local nodes.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/function.h>

#include <limits>
#include <string>
#include <vector>

#include "cpu/local_nodes.h"
#include "cpu/sampling_arguments.h"

namespace fastgraph {
namespace {

using OwnedTensor = tvm::ffi::Tensor;
using Tensors = tvm::ffi::Array<OwnedTensor>;

constexpr int64_t kMostNodes = std::numeric_limits<int32_t>::max();

// Lists of neighbours, with those that were thinned, if any.
template <typename Ptr, typename Index>
NeighborLists<Ptr, Index> checked_lists(const Tensors& ptr, const Tensors& index,
                                        const Tensors& hubs, const Tensors& thinned,
                                        const Tensors& counts, size_t i) {
  const OwnedTensor owned_ptr = tensor_at(ptr, i, "ptr");
  const OwnedTensor owned_index = tensor_at(index, i, "index");
  NeighborLists<Ptr, Index> lists{};
  lists.graph = checked_adjacency<Ptr, Index>(Tensor(owned_ptr), Tensor(owned_index),
                                              item("ptr", i).c_str(), item("index", i).c_str());
  if (lists.graph.num_nodes > kMostNodes) {
    TVM_FFI_THROW(ValueError) << item("ptr", i) << " must have less than 2^31 nodes, got "
                              << lists.graph.num_nodes;
  }
  lists.cap = std::numeric_limits<int64_t>::max();
  if (hubs.empty()) return lists;
  const OwnedTensor owned_hubs = tensor_at(hubs, i, "hubs");
  const OwnedTensor owned_thinned = tensor_at(thinned, i, "thinned");
  const OwnedTensor owned_counts = tensor_at(counts, i, "counts");
  const Tensor lists_of_hubs(owned_thinned);
  lists.hubs = checked_vector<int64_t>(Tensor(owned_hubs), item("hubs", i));
  lists.num_hubs = owned_hubs.numel();
  check_ndim(lists_of_hubs, 2, item("thinned", i).c_str());
  lists.cap = lists_of_hubs.size(1);
  lists.thinned =
      checked<const Index>(lists_of_hubs, {lists.num_hubs, lists.cap}, item("thinned", i).c_str());
  lists.counts =
      checked<const int64_t>(Tensor(owned_counts), {lists.num_hubs}, item("counts", i).c_str());
  for (int64_t hub = 0; hub < lists.num_hubs; ++hub) {
    if (lists.counts[hub] < 0 || lists.counts[hub] > lists.cap) {
      TVM_FFI_THROW(ValueError) << item("counts", i) << " must be in [0, " << lists.cap << "], got "
                                << lists.counts[hub];
    }
  }
  return lists;
}

SampleNames names_of(const SampleDefect& defect) {
  const auto which = static_cast<size_t>(defect.which);
  return {"nodes", item("ptr", which), item("index", which)};
}

// Writes rows, [nodes, k], and counts: candidates, rows of nodes with few neighbours, with none.
void bind_sample_local_nodes(Tensors ptr, Tensors index, Tensors hubs, Tensors thinned,
                             Tensors list_counts, Tensor nodes, bool release, int64_t random_seed,
                             bool is_elsewhere, Tensor rows, Tensor counts) {
  const size_t num_lists = ptr.size();
  if (num_lists == 0) TVM_FFI_THROW(ValueError) << "ptr must have an item, got none";
  for (const Tensors* of_lists : {&index, &hubs, &thinned, &list_counts}) {
    if (of_lists->size() != num_lists && (of_lists == &index || !hubs.empty())) {
      TVM_FFI_THROW(ValueError) << "index, hubs, thinned and counts must have " << num_lists
                                << " items, as ptr has, got " << of_lists->size();
    }
  }
  const int64_t* const chosen = checked_vector<int64_t>(nodes, "nodes");
  check_ndim(rows, 2, "rows");
  const int64_t num_rows = nodes.size(0), k = rows.size(1);
  if (k < 1 || k > kMostNodes) {
    TVM_FFI_THROW(ValueError) << "rows must have at least one column, got " << k;
  }
  auto* const out = checked<int32_t>(rows, {num_rows, k}, "rows");
  auto* const counted = checked<int64_t>(counts, {3}, "counts");
  const OwnedTensor first_ptr = tensor_at(ptr, 0, "ptr");
  const OwnedTensor first_index = tensor_at(index, 0, "index");
  dispatch_graph(
      Tensor(first_ptr), Tensor(first_index), "ptr[0]", "index[0]",
      [&](auto ptr_value, auto index_value) {
        using Ptr = decltype(ptr_value);
        using Index = decltype(index_value);
        std::vector<NeighborLists<Ptr, Index>> lists;
        for (size_t i = 0; i < num_lists; ++i) {
          lists.push_back(checked_lists<Ptr, Index>(ptr, index, hubs, thinned, list_counts, i));
          if (lists[i].graph.num_nodes != lists[0].graph.num_nodes) {
            TVM_FFI_THROW(ValueError)
                << item("ptr", i) << " must have " << lists[0].graph.num_nodes + 1
                << " values, as ptr[0] has, got " << lists[i].graph.num_nodes + 1;
          }
        }
        const LocalNodesRequest<Ptr, Index> request{lists.data(),
                                                    static_cast<int64_t>(num_lists),
                                                    lists[0].graph.num_nodes,
                                                    chosen,
                                                    num_rows,
                                                    k,
                                                    release,
                                                    static_cast<uint64_t>(random_seed),
                                                    is_elsewhere};
        LocalNodesCounts found;
        const SampleDefect defect = sample_local_nodes(request, out, found);
        throw_defect(defect, names_of(defect));
        counted[0] = found.candidates;
        counted[1] = found.few;
        counted[2] = found.none;
      });
}

// Writes the neighbours that are left of each node, [nodes, cap], and how many these are.
void bind_thin_lists(Tensor ptr, Tensor index, Tensor nodes, int64_t random_seed, Tensor thinned,
                     Tensor counts) {
  const int64_t* const chosen = checked_vector<int64_t>(nodes, "nodes");
  check_ndim(thinned, 2, "thinned");
  const int64_t num_nodes = nodes.size(0), cap = thinned.size(1);
  if (cap < 1) TVM_FFI_THROW(ValueError) << "thinned must have at least one column, got none";
  dispatch_graph(ptr, index, "ptr", "index", [&](auto ptr_value, auto index_value) {
    using Index = decltype(index_value);
    const auto graph = checked_adjacency<decltype(ptr_value), Index>(ptr, index, "ptr", "index");
    throw_defect(thin_lists(graph, chosen, num_nodes, cap, static_cast<uint64_t>(random_seed),
                            checked<Index>(thinned, {num_nodes, cap}, "thinned"),
                            checked<int64_t>(counts, {num_nodes}, "counts")),
                 {"nodes", "ptr", "index"});
  });
}

}  // namespace
}  // namespace fastgraph

TVM_FFI_DLL_EXPORT_TYPED_FUNC(sample_local_nodes, fastgraph::bind_sample_local_nodes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(thin_lists, fastgraph::bind_thin_lists);
