// The functions that sample graphs. They make their results, as only they know how large these are.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/function.h>

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "cpu/sampling.h"
#include "cpu/sampling_arguments.h"

namespace fastgraph {
namespace {

using OwnedTensor = tvm::ffi::Tensor;
using Tensors = tvm::ffi::Array<OwnedTensor>;
using OptionalTensors = tvm::ffi::Array<tvm::ffi::Optional<OwnedTensor>>;

void check_length(size_t length, size_t expected, const char* name) {
  if (length != expected) {
    TVM_FFI_THROW(ValueError) << name << " must have " << expected << " items, got " << length;
  }
}

template <typename T>
const T* checked_item(const OptionalTensors& tensors, size_t i, int64_t size, const char* name) {
  const auto tensor = tensors[static_cast<int64_t>(i)];
  if (!tensor.has_value()) return nullptr;
  const OwnedTensor owned = tensor.value();
  return checked<const T>(Tensor(owned), {size}, item(name, i).c_str());
}

template <typename T>
void append(Tensors& tensors, std::vector<Buffer<T>>& buffers) {
  for (auto& buffer : buffers) tensors.push_back(to_tensor(buffer));
}

OwnedTensor to_tensor(const std::vector<int64_t>& values) {
  Buffer<int64_t> buffer;
  buffer.reserve(static_cast<int64_t>(values.size()));
  for (const int64_t value : values) buffer.push(value);
  return to_tensor(buffer);
}

SampleNames names_of_items(const SampleDefect& defect) {
  const auto which = static_cast<size_t>(defect.which);
  return {item("seed", which), item("colptr", which), item("row", which)};
}

struct SampleArguments {
  Tensors colptr, row;
  Tensor src_type, dst_type, num_nodes;
  Tensors seed;
  Tensor fanouts;
  OptionalTensors node_time, edge_time, seed_time, edge_weight;
  bool replace, directed, disjoint, last;
  int64_t random_seed;
};

template <typename Ptr, typename Index>
Relation<Ptr, Index> checked_relation(const SampleArguments& in, size_t r,
                                      const std::vector<NodeType<Index>>& types) {
  const OwnedTensor owned_colptr = tensor_at(in.colptr, r, "colptr");
  const OwnedTensor owned_row = tensor_at(in.row, r, "row");
  const Tensor colptr(owned_colptr), row(owned_row);
  Relation<Ptr, Index> relation{};
  relation.colptr = checked_vector<Ptr>(colptr, item("colptr", r));
  relation.row = checked_vector<Index>(row, item("row", r));
  relation.num_dst = colptr.size(0) - 1;
  relation.num_edges = row.size(0);
  const auto num_types = static_cast<int64_t>(types.size());
  relation.src_type = memory_of<const int64_t>(in.src_type, "src_type")[r];
  relation.dst_type = memory_of<const int64_t>(in.dst_type, "dst_type")[r];
  if (relation.src_type < 0 || relation.src_type >= num_types || relation.dst_type < 0 ||
      relation.dst_type >= num_types) {
    TVM_FFI_THROW(IndexError) << "src_type and dst_type must be in [0, " << num_types << "), got "
                              << relation.src_type << " and " << relation.dst_type;
  }
  if (relation.num_dst < 0 || relation.num_dst != types[relation.dst_type].num_nodes) {
    TVM_FFI_THROW(ValueError) << item("colptr", r) << " must have one value more than its "
                              << types[relation.dst_type].num_nodes << " destinations, got "
                              << colptr.size(0);
  }
  if (relation.colptr[0] != 0 || relation.colptr[relation.num_dst] != relation.num_edges) {
    TVM_FFI_THROW(ValueError) << item("colptr", r) << " must run from 0 to " << relation.num_edges
                              << " (the size of row), got " << relation.colptr[0] << " to "
                              << relation.colptr[relation.num_dst];
  }
  relation.edge_time = checked_item<int64_t>(in.edge_time, r, relation.num_edges, "edge_time");
  const NodeType<Index>& sources = types[relation.src_type];
  if (!relation.edge_time) relation.node_time = sources.node_time;
  if (relation.is_temporal() && !in.disjoint) {
    TVM_FFI_THROW(ValueError) << "disjoint must be true for samples by time";
  }
  const auto weight = in.edge_weight[static_cast<int64_t>(r)];
  if (weight.has_value()) {
    const OwnedTensor owned = weight.value();
    const bool wide = dtype_of(Tensor(owned)) == DType::kFloat64;
    const int64_t size = relation.num_edges;
    if (wide) relation.weight64 = checked_item<double>(in.edge_weight, r, size, "edge_weight");
    if (!wide) relation.weight = checked_item<float>(in.edge_weight, r, size, "edge_weight");
  }
  return relation;
}

template <typename Index>
NodeType<Index> checked_type(const SampleArguments& in, size_t t) {
  NodeType<Index> type{};
  type.num_nodes = memory_of<const int64_t>(in.num_nodes, "num_nodes")[t];
  const OwnedTensor owned_seed = tensor_at(in.seed, t, "seed");
  const Tensor seed(owned_seed);
  type.seeds = checked_vector<Index>(seed, item("seed", t));
  type.num_seeds = seed.size(0);
  type.seed_time = checked_item<int64_t>(in.seed_time, t, type.num_seeds, "seed_time");
  const auto time = in.node_time[static_cast<int64_t>(t)];
  if (time.has_value()) {
    const OwnedTensor owned = time.value();
    if (type.num_nodes < 0) type.num_nodes = owned.numel();
    type.node_time = checked_item<int64_t>(in.node_time, t, type.num_nodes, "node_time");
  }
  return type;
}

template <typename Ptr, typename Index>
Tensors sample(const SampleArguments& in) {
  SampleRequest<Ptr, Index> request{};
  const size_t num_types = in.seed.size(), num_relations = in.colptr.size();
  for (size_t t = 0; t < num_types; ++t) request.types.push_back(checked_type<Index>(in, t));
  bool temporal = false;
  for (size_t r = 0; r < num_relations; ++r) {
    request.relations.push_back(checked_relation<Ptr, Index>(in, r, request.types));
    temporal = temporal || request.relations.back().is_temporal();
  }
  for (size_t t = 0; t < num_types; ++t) {
    const NodeType<Index>& type = request.types[t];
    if (temporal && type.num_seeds && !type.seed_time && !type.node_time) {
      TVM_FFI_THROW(ValueError) << item("seed_time", t)
                                << " must be given where nodes have no time";
    }
  }
  check_ndim(in.fanouts, 2, "num_neighbors");
  request.num_hops = in.fanouts.size(0);
  request.fanouts = checked<const int64_t>(
      in.fanouts, {request.num_hops, static_cast<int64_t>(num_relations)}, "num_neighbors");
  for (int64_t i = 0; i < in.fanouts.numel(); ++i) {
    if (request.fanouts[i] < -1 || request.fanouts[i] > std::numeric_limits<int32_t>::max()) {
      TVM_FFI_THROW(ValueError) << "num_neighbors must be in [-1, 2^31), got "
                                << request.fanouts[i];
    }
  }
  request.replace = in.replace;
  request.directed = in.directed;
  request.disjoint = in.disjoint;
  request.last = in.last;
  request.random_seed = static_cast<uint64_t>(in.random_seed);
  Sample<Ptr, Index> sample;
  const SampleDefect defect = sample_neighbors(request, sample);
  throw_defect(defect, names_of_items(defect));
  Tensors out;
  append(out, sample.node);
  append(out, sample.row);
  append(out, sample.col);
  append(out, sample.edge);
  if (in.disjoint) append(out, sample.batch);
  out.push_back(to_tensor(sample.num_nodes));
  out.push_back(to_tensor(sample.num_edges));
  return out;
}

// Nodes of each type; sources, destinations and places of edges of each type; groups of nodes, if
// samples are disjoint; counts of nodes [types, hops + 1] and of edges [types, hops], flat.
Tensors bind_sample_neighbors(Tensors colptr, Tensors row, Tensor src_type, Tensor dst_type,
                              Tensor num_nodes, Tensors seed, Tensor fanouts,
                              OptionalTensors node_time, OptionalTensors edge_time,
                              OptionalTensors seed_time, OptionalTensors edge_weight, bool replace,
                              bool directed, bool disjoint, bool last, int64_t random_seed) {
  const auto num_relations = static_cast<int64_t>(colptr.size());
  const auto num_types = static_cast<int64_t>(seed.size());
  if (num_types == 0) TVM_FFI_THROW(ValueError) << "seed must have a type of nodes, got none";
  check_length(row.size(), num_relations, "row");
  checked<const int64_t>(src_type, {num_relations}, "src_type");
  checked<const int64_t>(dst_type, {num_relations}, "dst_type");
  checked<const int64_t>(num_nodes, {num_types}, "num_nodes");
  check_length(node_time.size(), num_types, "node_time");
  check_length(edge_time.size(), num_relations, "edge_time");
  check_length(seed_time.size(), num_types, "seed_time");
  check_length(edge_weight.size(), num_relations, "edge_weight");
  const SampleArguments in{colptr,   row,       src_type,  dst_type,   num_nodes,   seed,
                           fanouts,  node_time, edge_time, seed_time,  edge_weight, replace,
                           directed, disjoint,  last,      random_seed};
  const OwnedTensor first = tensor_at(seed, 0, "seed");
  return dispatch_indices(Tensor(first), "seed", [&](auto index) {
    using Index = decltype(index);
    if (num_relations == 0) return sample<Index, Index>(in);
    const OwnedTensor first_colptr = tensor_at(colptr, 0, "colptr");
    return dispatch_indices(Tensor(first_colptr), "colptr",
                            [&](auto ptr) { return sample<decltype(ptr), Index>(in); });
  });
}

// For weights of a call's only type of edges.
void check_weight(const OptionalTensor& weight, int64_t num_edges, const float*& narrow,
                  const double*& wide) {
  if (!weight.has_value()) return;
  if (dtype_of(weight.value()) == DType::kFloat64) {
    wide = checked<const double>(weight, {num_edges}, "edge_weight");
  } else {
    narrow = checked<const float>(weight, {num_edges}, "edge_weight");
  }
}

EdgeTypes checked_types(const OptionalTensor& types, int64_t num_edges) {
  if (!types.has_value()) return {};
  const Tensor& tensor = types.value();
  check_place(tensor, "edge_type");
  check_shape(tensor, {num_edges}, "edge_type");
  const auto code = tensor.dtype().code;
  if ((code != kDLInt && code != kDLUInt) || (code == kDLUInt && tensor.dtype().bits != 8)) {
    TVM_FFI_THROW(TypeError) << "edge_type must be of integers, got " << dtype_text(tensor);
  }
  if (!tensor.IsContiguous()) refuse_strides(tensor, "edge_type");
  static const int64_t none = 0;  // memory of no edges may be null
  const int64_t bytes = item_bytes(tensor, "edge_type");
  return {num_edges ? tensor.data_ptr() : &none, bytes};
}

// Where the edges of each seed begin and end, their sources, and which edges these are.
Tensors bind_sample_layer(Tensor colptr, Tensor row, Tensor seed, Tensor fanouts,
                          OptionalTensor edge_type, OptionalTensor edge_weight, bool replace,
                          bool by_layer, bool ascending, int64_t random_seed) {
  return dispatch_graph(colptr, row, "colptr", "row", [&](auto ptr, auto index) {
    using Ptr = decltype(ptr);
    using Index = decltype(index);
    const auto graph = checked_adjacency<Ptr, Index>(colptr, row, "colptr", "row");
    LayerRequest<Ptr, Index> request{};
    request.relation.colptr = graph.rowptr;
    request.relation.row = graph.col;
    request.relation.num_dst = graph.num_nodes;
    request.relation.num_edges = graph.num_edges;
    check_weight(edge_weight, graph.num_edges, request.relation.weight, request.relation.weight64);
    request.seeds = checked_vector<Index>(seed, "seed");
    request.num_seeds = seed.size(0);
    request.fanouts = checked_vector<int64_t>(fanouts, "fanouts");
    request.num_types = fanouts.size(0);
    request.edge_type = checked_types(edge_type, graph.num_edges);
    if (request.num_seeds > std::numeric_limits<int32_t>::max()) {
      TVM_FFI_THROW(ValueError) << "seed must hold less than 2^31 nodes, got " << request.num_seeds;
    }
    if (!request.edge_type && request.num_types != 1) {
      TVM_FFI_THROW(ValueError) << "fanouts must have one value where edges have no types, got "
                                << request.num_types;
    }
    for (int64_t i = 0; i < request.num_types; ++i) {
      if (request.fanouts[i] < -1 || request.fanouts[i] > std::numeric_limits<int32_t>::max()) {
        TVM_FFI_THROW(ValueError) << "fanouts must be in [-1, 2^31), got " << request.fanouts[i];
      }
    }
    request.replace = replace;
    request.by_layer = by_layer;
    request.ascending = ascending;
    request.random_seed = static_cast<uint64_t>(random_seed);
    Layer<Ptr, Index> layer;
    throw_defect(sample_layer(request, layer), {"seed", "colptr", "row"});
    Tensors out;
    out.push_back(to_tensor(layer.colptr));
    out.push_back(to_tensor(layer.row));
    out.push_back(to_tensor(layer.edge));
    return out;
  });
}

void bind_random_walk(Tensor rowptr, Tensor col, Tensor seed, double p, double q,
                      int64_t random_seed, Tensor nodes, OptionalTensor edges) {
  check_ndim(nodes, 2, "nodes");
  const int64_t length = nodes.size(1) - 1;
  if (length < 0) TVM_FFI_THROW(ValueError) << "nodes must have at least one column, got none";
  if (!(p > 0 && q > 0 && std::isfinite(1 / p) && std::isfinite(1 / q))) {
    TVM_FFI_THROW(ValueError) << "p and q must be more than 0, got " << p << " and " << q;
  }
  dispatch_graph(rowptr, col, "rowptr", "col", [&](auto ptr, auto index) {
    using Ptr = decltype(ptr);
    using Index = decltype(index);
    const auto graph = checked_adjacency<Ptr, Index>(rowptr, col, "rowptr", "col");
    const Index* seeds = checked_vector<Index>(seed, "seed");
    const int64_t num_walks = seed.size(0);
    throw_defect(random_walk(graph, seeds, num_walks, length, WalkBias{p, q},
                             static_cast<uint64_t>(random_seed),
                             checked<Index>(nodes, {num_walks, length + 1}, "nodes"),
                             checked<Ptr>(edges, {num_walks, length}, "edges")),
                 {"seed", "rowptr", "col"});
  });
}

void bind_draw_negatives(Tensor colptr, Tensor row, int64_t num_src, bool loops,
                         int64_t random_seed, Tensor src, Tensor dst) {
  check_ndim(src, 1, "src");
  dispatch_graph(colptr, row, "colptr", "row", [&](auto ptr, auto index) {
    using Index = decltype(index);
    const auto graph = checked_adjacency<decltype(ptr), Index>(colptr, row, "colptr", "row");
    const int64_t num_pairs = src.size(0);
    const int64_t most = std::numeric_limits<Index>::max();
    if (num_src < 0 || num_src > most || (num_pairs && (num_src == 0 || graph.num_nodes == 0))) {
      TVM_FFI_THROW(ValueError) << "num_src must be a number of nodes, got " << num_src << " for "
                                << graph.num_nodes << " destinations";
    }
    throw_defect(
        draw_negatives(graph, num_src, loops, num_pairs, static_cast<uint64_t>(random_seed),
                       checked<Index>(src, {num_pairs}, "src"),
                       checked<Index>(dst, {num_pairs}, "dst")),
        {"seed", "colptr", "row"});
  });
}

// The distinct values, and the positions of all others among them.
Tensors bind_unique_and_compact(Tensors ids) {
  if (ids.empty()) TVM_FFI_THROW(ValueError) << "ids must hold a tensor, got none";
  const OwnedTensor first = tensor_at(ids, 0, "ids");
  return dispatch_indices(Tensor(first), "ids[0]", [&](auto index) {
    using Index = decltype(index);
    std::vector<Values<Index>> values;
    std::vector<Buffer<Index>> positions(ids.size());
    std::vector<Index*> memory;
    for (size_t i = 0; i < ids.size(); ++i) {
      const OwnedTensor owned = tensor_at(ids, i, "ids");
      const Tensor list(owned);
      values.push_back({checked_vector<Index>(list, item("ids", i)), list.size(0)});
      positions[i].reserve(list.size(0));
      positions[i].set_size(list.size(0));
      memory.push_back(positions[i].data());
    }
    Buffer<Index> distinct;
    const SampleDefect defect = unique_and_compact(values, memory, distinct);
    if (defect.kind == SampleDefect::kRow) {
      TVM_FFI_THROW(IndexError) << item("ids", static_cast<size_t>(defect.which)) << " holds "
                                << defect.value << " at position " << defect.position
                                << ", expected no negative number";
    }
    if (defect.kind) TVM_FFI_THROW(ValueError) << "ids must hold less than 2^31 values";
    Tensors out;
    out.push_back(to_tensor(distinct));
    append(out, positions);
    return out;
  });
}

}  // namespace
}  // namespace fastgraph

TVM_FFI_DLL_EXPORT_TYPED_FUNC(draw_negatives, fastgraph::bind_draw_negatives);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(random_walk, fastgraph::bind_random_walk);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(unique_and_compact, fastgraph::bind_unique_and_compact);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sample_layer, fastgraph::bind_sample_layer);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sample_neighbors, fastgraph::bind_sample_neighbors);
