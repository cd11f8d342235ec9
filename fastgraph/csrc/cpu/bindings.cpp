// The functions that only the CPU has: those that build and recognise graphs, those about memory
// and threads, and operators whose kernels exist for the CPU alone.
#include <tvm/ffi/function.h>

#include <algorithm>
#include <limits>

#include "bindings/attention_sizes.h"
#include "bindings/checks.h"
#include "bindings/score_bias_checks.h"
#include "cpu/degrees.h"
#include "cpu/dense_attention.h"
#include "cpu/dropout_factors.h"
#include "cpu/gather_tokens.h"
#include "cpu/indices.h"
#include "cpu/panels.h"
#include "cpu/threads.h"
#include "cpu/throw_bad_index.h"
#include "fastgraph/memory.h"
#include "fastgraph/parallel.h"

namespace fastgraph {
namespace {

MutableCsr checked_output(const Tensor& rowptr, const char* rowptr_name, const Tensor& col,
                          const char* col_name, int64_t num_rows, int64_t num_cols,
                          int64_t num_entries) {
  checked_size(num_rows, "num_rows");
  checked_size(num_cols, "num_cols");
  checked_size(num_entries, "the number of edges");
  return {checked<int64_t>(rowptr, {num_rows + 1}, rowptr_name),
          checked<int32_t>(col, {num_entries}, col_name),
          nullptr,
          nullptr,
          num_rows,
          num_cols,
          num_entries};
}

bool bind_build_csr(Tensor row, Tensor col, int64_t num_rows, int64_t num_cols, Tensor rowptr,
                    Tensor col_out, OptionalTensor edge_id) {
  check_ndim(row, 1, "row");
  const int64_t num_edges = row.size(0);
  MutableCsr graph =
      checked_output(rowptr, "rowptr", col_out, "col_out", num_rows, num_cols, num_edges);
  graph.edge_id = checked<int32_t>(edge_id, {num_edges}, "edge_id");
  return dispatch_indices(row, "row", [&](auto index) {
    using Index = decltype(index);
    const auto rows = checked_indices<Index>(row, num_edges, "row");
    const auto cols = checked_indices<Index>(col, num_edges, "col");
    BadIndex bad;
    const BuildResult result = build_csr(rows, cols, graph, bad);
    if (result == BuildResult::kBadIndex) throw_bad_index(bad, graph.num_rows, graph.num_cols);
    return result == BuildResult::kSorted;
  });
}

// The outputs have room for all edges and num_loops more; the number of edges that are kept.
int64_t bind_build_csr_with_loops(Tensor row, Tensor col, int64_t num_rows, int64_t num_cols,
                                  int64_t num_loops, Tensor rowptr, Tensor col_out,
                                  OptionalTensor edge_id) {
  check_ndim(row, 1, "row");
  checked_size(num_loops, "num_loops");
  if (num_loops > std::min(num_rows, num_cols)) {
    TVM_FFI_THROW(ValueError) << "num_loops must not exceed num_rows and num_cols (" << num_rows
                              << " and " << num_cols << "), got " << num_loops;
  }
  const int64_t num_edges = row.size(0);
  MutableCsr graph = checked_output(rowptr, "rowptr", col_out, "col_out", num_rows, num_cols,
                                    num_edges + num_loops);
  graph.edge_id = checked<int32_t>(edge_id, {num_edges + num_loops}, "edge_id");
  return dispatch_indices(row, "row", [&](auto index) {
    using Index = decltype(index);
    const auto rows = checked_indices<Index>(row, num_edges, "row");
    const auto cols = checked_indices<Index>(col, num_edges, "col");
    BadIndex bad;
    const int64_t num_kept = build_csr_with_loops(rows, cols, num_loops, graph, bad);
    if (num_kept < 0) throw_bad_index(bad, graph.num_rows, graph.num_cols);
    return num_kept;
  });
}

void bind_check_csr(Tensor ptr, Tensor index, int64_t num_rows, int64_t num_cols, Tensor rowptr,
                    Tensor col_out) {
  check_ndim(index, 1, "index");
  const int64_t num_entries = index.size(0);
  const MutableCsr graph =
      checked_output(rowptr, "rowptr", col_out, "col_out", num_rows, num_cols, num_entries);
  dispatch_indices(ptr, "ptr", [&](auto type) {
    using Index = decltype(type);
    const CsrDefect defect = check_csr(checked_indices<Index>(ptr, num_rows + 1, "ptr"),
                                       checked_indices<Index>(index, num_entries, "index"), graph);
    switch (defect.kind) {
      case CsrDefect::kNone: return;
      case CsrDefect::kFirst:
        TVM_FFI_THROW(ValueError) << "ptr must start with 0, got " << defect.value;
      case CsrDefect::kLast:
        TVM_FFI_THROW(ValueError) << "ptr must end with " << num_entries
                                  << " (the size of index), got " << defect.value;
      case CsrDefect::kDecreasing:
        TVM_FFI_THROW(ValueError) << "ptr must not decrease, got " << defect.value
                                  << " at position " << defect.position;
      case CsrDefect::kIndex:
        TVM_FFI_THROW(IndexError) << "index holds " << defect.value << " at position "
                                  << defect.position << ", expected 0 <= index < " << num_cols;
    }
  });
}

void bind_transpose_csr(Tensor rowptr, Tensor col, OptionalTensor edge_id, int64_t num_cut,
                        int64_t num_cols, Tensor rowptr_t, Tensor col_t, OptionalTensor edge_id_t) {
  const Csr graph = checked_csr(rowptr, col, edge_id, num_cut, {}, num_cols, kByRow);
  MutableCsr transpose = checked_output(rowptr_t, "rowptr_t", col_t, "col_t", num_cols,
                                        graph.num_rows, graph.num_entries);
  transpose.edge_id = checked<int32_t>(edge_id_t, {graph.num_entries}, "edge_id_t");
  with_memory([&] { transpose_csr(graph, transpose); });
}

bool bind_same_indices(Tensor a, Tensor b) {
  check_ndim(a, 1, "a");
  const int64_t size = a.size(0);
  return dispatch_indices(a, "a", [&](auto of_a) {
    return dispatch_indices(b, "b", [&](auto of_b) {
      return same_indices(checked_indices<decltype(of_a)>(a, size, "a"),
                          checked_indices<decltype(of_b)>(b, size, "b"));
    });
  });
}

void bind_use_threads(int64_t count) {
  if (count < 1 || count > std::numeric_limits<int32_t>::max()) {
    TVM_FFI_THROW(ValueError) << "count must be in [1, 2^31), got " << count;
  }
  use_threads(static_cast<int>(count));
}

void bind_reverse_rows(Tensor rowptr, Tensor col, Tensor col_out) {
  check_ndim(rowptr, 1, "rowptr");
  const Csr graph = checked_csr(rowptr, col, {}, 0, {}, 0, kByRow);
  int32_t* reversed = checked<int32_t>(col_out, {graph.num_entries}, "col_out");
  with_memory([&] { reverse_rows(graph, reversed); });
}

void bind_inverse_degree(Tensor rowptr, Tensor out) {
  check_ndim(rowptr, 1, "rowptr");
  const int64_t num_rows = rowptr.size(0) - 1;
  checked_size(num_rows, "the number of rows");
  const Indices<int64_t> offsets = checked_indices<int64_t>(rowptr, num_rows + 1, "rowptr");
  switch (dtype_of(out)) {
    case DType::kFloat32: return inverse_degree(offsets, checked<float>(out, {num_rows}, "out"));
    case DType::kFloat64: return inverse_degree(offsets, checked<double>(out, {num_rows}, "out"));
    default: TVM_FFI_THROW(TypeError) << "out must be float32 or float64, got " << dtype_text(out);
  }
}

int64_t bind_order_rows(Tensor rowptr, Tensor col, OptionalTensor edge_id, int64_t num_cut,
                        int64_t row_bytes, Tensor rowptr_out, Tensor col_out, Tensor edge_id_out,
                        Tensor row_id_out) {
  check_ndim(rowptr, 1, "rowptr");
  const int64_t num_rows = rowptr.size(0) - 1;
  const Csr graph = checked_csr(rowptr, col, edge_id, num_cut, {}, num_rows, kByRow);
  MutableCsr ordered = checked_output(rowptr_out, "rowptr_out", col_out, "col_out", num_rows,
                                      num_rows, graph.num_entries);
  ordered.edge_id = checked<int32_t>(edge_id_out, {graph.num_entries}, "edge_id_out");
  ordered.row_id = checked<int32_t>(row_id_out, {num_rows}, "row_id_out");
  return with_memory([&] { return static_cast<int64_t>(order_rows(graph, row_bytes, ordered)); });
}

int64_t bind_count_reads(Tensor rowptr, Tensor col, OptionalTensor edge_id, int64_t num_cut,
                         int64_t row_bytes) {
  const Csr graph = checked_csr(rowptr, col, edge_id, num_cut, {}, 0, kByRow);
  return with_memory([&] { return count_reads(graph, row_bytes); });
}

int64_t num_windows(const Csr& graph) { return (graph.num_rows + kTileRows - 1) / kTileRows; }

void bind_count_tile_columns(Tensor rowptr, Tensor col, OptionalTensor edge_id, int64_t num_cut,
                             Tensor windows, Tensor columns) {
  const Csr graph = checked_csr(rowptr, col, edge_id, num_cut, {}, 0, kByRow);
  check_ndim(windows, 1, "windows");
  const auto chosen = checked_indices<int32_t>(windows, windows.size(0), "windows");
  for (int64_t i = 0; i < chosen.size; ++i) {
    if (chosen[i] < 0 || chosen[i] >= num_windows(graph)) {
      TVM_FFI_THROW(IndexError) << "windows holds " << chosen[i] << " at position " << i
                                << ", expected 0 <= window < " << num_windows(graph);
    }
  }
  auto* const counts = checked<int64_t>(columns, {chosen.size}, "columns");
  with_memory([&] { count_tile_columns(graph, chosen, counts); });
}

void bind_fill_tiles(Tensor rowptr, Tensor col, OptionalTensor edge_id, int64_t num_cut, Tensor ptr,
                     Tensor col_out, Tensor bits, Tensor first, Tensor edge_id_out) {
  const Csr graph = checked_csr(rowptr, col, edge_id, num_cut, {}, 0, kByRow);
  check_ndim(col_out, 1, "col_out");
  const int64_t num_blocks = col_out.size(0) / kTileCols;
  const MutableTiles tiles{
      checked<const int64_t>(ptr, {num_windows(graph) + 1}, "ptr"),
      checked<int32_t>(col_out, {num_blocks * kTileCols}, "col_out"),
      reinterpret_cast<uint64_t*>(checked<int64_t>(bits, {num_blocks, kTileWords}, "bits")),
      checked<int64_t>(first, {num_blocks + 1}, "first"),
      checked<int32_t>(edge_id_out, {graph.num_entries}, "edge_id_out"),
      num_blocks};
  if (tiles.ptr[0] != 0 || tiles.ptr[num_windows(graph)] != num_blocks) {
    TVM_FFI_THROW(ValueError) << "ptr must run from 0 to " << num_blocks << ", the blocks in "
                              << "col_out, got " << tiles.ptr[0] << " to "
                              << tiles.ptr[num_windows(graph)];
  }
  const int64_t wrong = with_memory([&] { return fill_tiles(graph, tiles); });
  if (wrong >= 0) {
    TVM_FFI_THROW(ValueError) << "ptr must give each window the blocks that its columns fill, got "
                              << tiles.ptr[wrong] << " to " << tiles.ptr[wrong + 1]
                              << " for window " << wrong;
  }
}

// Operators of edges alone, which look at no column.

void bind_edge_softmax(Tensor rowptr, Tensor col, OptionalTensor edge_id, int64_t num_cut,
                       OptionalTensor order, Tensor score, Tensor out) {
  check_ndim(score, 2, "score");
  const int64_t heads = score.size(1);
  const OrderedCsr graph = checked_csr(rowptr, col, edge_id, num_cut, order, 0, kByRow);
  dispatch_features(score, "score", [&](auto type) {
    using T = decltype(type);
    edge_softmax<T>(graph, checked_matrix<const T>(score, graph.num_entries, heads, "score"),
                    checked_matrix<T>(out, graph.num_entries, heads, "out"));
  });
}

void bind_edge_softmax_backward(Tensor rowptr, Tensor col, OptionalTensor edge_id, int64_t num_cut,
                                OptionalTensor order, Tensor weight, Tensor grad,
                                Tensor grad_score) {
  check_ndim(weight, 2, "weight");
  const int64_t heads = weight.size(1);
  const OrderedCsr graph = checked_csr(rowptr, col, edge_id, num_cut, order, 0, kByRow);
  dispatch_features(weight, "weight", [&](auto type) {
    using T = decltype(type);
    const int64_t edges = graph.num_entries;
    edge_softmax_backward<T>(graph, checked_matrix<const T>(weight, edges, heads, "weight"),
                             checked_matrix<const T>(grad, edges, heads, "grad"),
                             checked_matrix<T>(grad_score, edges, heads, "grad_score"));
  });
}

// Attention of all queries of a graph to all its keys.

// The offsets of graphs among `nodes` rows, which are looked at: they say where kernels read.
const int64_t* checked_offsets(const Tensor& ptr, int64_t nodes, const char* name,
                               const char* nodes_name) {
  check_ndim(ptr, 1, name);
  const int64_t graphs = ptr.size(0) - 1;
  if (graphs < 0) {
    TVM_FFI_THROW(ValueError) << name << " must hold at least one value, got none";
  }
  const auto* offsets = checked<const int64_t>(ptr, {graphs + 1}, name);
  if (offsets[0] != 0) {
    TVM_FFI_THROW(ValueError) << name << " must start with 0, got " << offsets[0];
  }
  for (int64_t g = 0; g < graphs; ++g) {
    if (offsets[g + 1] < offsets[g]) {
      TVM_FFI_THROW(ValueError) << name << " must not decrease, got " << offsets[g + 1]
                                << " at position " << g + 1;
    }
  }
  if (offsets[graphs] != nodes) {
    TVM_FFI_THROW(ValueError) << name << " must end with " << nodes << " (the size of "
                              << nodes_name << "), got " << offsets[graphs];
  }
  return offsets;
}

// What both passes take.
struct DenseAttentionArguments {
  const Tensor &query, &key, &value;
  const OptionalTensor& bias;
  const Tensor &ptr, &key_ptr;
  const OptionalTensor& pair_type;
  int64_t first_head, first_pair;

  template <typename T>
  DenseAttentionInputs<T> checked_for() const {
    check_ndim(query, 3, "query");
    check_ndim(key, 3, "key");
    check_shape(key_ptr, {ptr.numel()}, "key_ptr");
    const int64_t queries = query.size(0), keys = key.size(0);
    const int64_t heads = query.size(1), width = query.size(2);
    DenseAttentionInputs<T> in{checked_heads<const T>(query, queries, heads, width, "query"),
                               checked_heads<const T>(key, keys, heads, width, "key"),
                               checked_heads<const T>(value, keys, heads, width, "value"),
                               checked_offsets(ptr, queries, "ptr", "query"),
                               checked_offsets(key_ptr, keys, "key_ptr", "key"),
                               ptr.size(0) - 1,
                               {},
                               first_head,
                               first_pair};
    int64_t pairs = 0;
    for (int64_t g = 0; g < in.graphs; ++g) {
      pairs += (in.ptr[g + 1] - in.ptr[g]) * (in.key_ptr[g + 1] - in.key_ptr[g]);
    }
    in.bias = checked_bias<T>(bias, pair_type, pairs, heads, "pair_type");
    return in;
  }
};

void bind_dropout_factors(Tensor numbers, int64_t first_head, double dropout, int64_t seed,
                          Tensor out) {
  if (first_head < 0 || first_head > std::numeric_limits<int32_t>::max()) {
    TVM_FFI_THROW(ValueError) << "first_head must be from 0 to "
                              << std::numeric_limits<int32_t>::max() << ", got " << first_head;
  }
  check_ndim(out, 2, "out");
  dispatch_features(out, "out", [&](auto type) {
    using T = decltype(type);
    const int64_t rows = out.size(0), heads = out.size(1);
    dropout_factors<T>(checked<const int64_t>(numbers, {rows}, "numbers"), first_head,
                       checked_dropout(dropout, seed), checked_matrix<T>(out, rows, heads, "out"));
  });
}

void bind_dense_attention(Tensor query, Tensor key, Tensor value, OptionalTensor bias, Tensor ptr,
                          Tensor key_ptr, OptionalTensor pair_type, double scale, double dropout,
                          int64_t seed, int64_t first_head, int64_t first_pair, Tensor out,
                          Tensor stats) {
  const DenseAttentionArguments arguments{query,   key,       value,      bias,      ptr,
                                          key_ptr, pair_type, first_head, first_pair};
  dispatch_features(query, "query", [&](auto type) {
    using T = decltype(type);
    const auto in = arguments.checked_for<T>();
    const int64_t rows = in.query.nodes, heads = in.query.heads;
    dense_attention<T>(in, scale, checked_dropout(dropout, seed),
                       checked_heads<T>(out, rows, heads, in.query.width, "out"),
                       {checked<Accumulator<T>>(stats, {rows, heads, 2}, "stats"), heads});
  });
}

void bind_dense_attention_backward(Tensor query, Tensor key, Tensor value, OptionalTensor bias,
                                   Tensor ptr, Tensor key_ptr, OptionalTensor pair_type,
                                   double scale, double dropout, int64_t seed, int64_t first_head,
                                   int64_t first_pair, Tensor out, Tensor stats, Tensor grad,
                                   OptionalTensor grad_logsum, Tensor grad_query, Tensor grad_key,
                                   Tensor grad_value, OptionalTensor grad_bias) {
  const DenseAttentionArguments arguments{query,   key,       value,      bias,      ptr,
                                          key_ptr, pair_type, first_head, first_pair};
  check_gradient_of(bias, grad_bias, "grad_bias", "bias");
  dispatch_features(query, "query", [&](auto type) {
    using T = decltype(type);
    using A = Accumulator<T>;
    const auto in = arguments.checked_for<T>();
    const int64_t rows = in.query.nodes, heads = in.query.heads, width = in.query.width;
    const SoftmaxGradients<T> given{
        {checked<const A>(stats, {rows, heads, 2}, "stats"), heads},
        checked_heads<const T>(grad, rows, heads, width, "grad"),
        {},
        checked_matrix<const A>(grad_logsum, rows, heads, "grad_logsum")};
    dense_attention_backward<T>(
        in, scale, checked_dropout(dropout, seed),
        checked_heads<const T>(out, rows, heads, width, "out"), given,
        checked_heads<T>(grad_query, rows, heads, width, "grad_query"),
        checked_heads<T>(grad_key, in.key.nodes, heads, width, "grad_key"),
        checked_heads<T>(grad_value, in.key.nodes, heads, width, "grad_value"),
        checked<T>(grad_bias, {in.bias.values.rows, heads}, "grad_bias"));
  });
}

// A contiguous matrix of elements of any dtype, as bytes.
TokenTable checked_table(const Tensor& tensor, int64_t row_bytes, const char* name) {
  check_place(tensor, name);
  check_ndim(tensor, 2, name);
  const int64_t own_bytes = tensor.size(1) * item_bytes(tensor, name);
  if (row_bytes >= 0 && own_bytes != row_bytes) {
    TVM_FFI_THROW(ValueError) << name << " must have rows of " << row_bytes << " bytes, got shape "
                              << shape_text(tensor) << " of " << dtype_text(tensor);
  }
  if (!tensor.IsContiguous()) refuse_strides(tensor, name);
  return {memory_of<const char>(tensor, name), tensor.size(0), own_bytes, false};
}

// How many of the rows come from the cache.
int64_t bind_gather_tokens(Tensor rows, bool is_elsewhere, OptionalTensor cache_bits,
                           OptionalTensor cache_before, OptionalTensor cache_rows, Tensor nodes,
                           Tensor out) {
  TokenTable table = checked_table(rows, -1, "rows");
  table.is_elsewhere = is_elsewhere;
  TokenCache cache{};
  if (cache_bits.has_value()) {
    const int64_t words = (table.num_rows + 63) / 64;
    const auto* bits = checked<const int64_t>(cache_bits, {words}, "cache_bits");
    if (!cache_before.has_value() || !cache_rows.has_value()) {
      TVM_FFI_THROW(ValueError) << "cache_before and cache_rows must be tensors with cache_bits, "
                                << "got None";
    }
    const TokenTable held = checked_table(cache_rows.value(), table.row_bytes, "cache_rows");
    cache = {reinterpret_cast<const uint64_t*>(bits),
             checked<const int32_t>(cache_before, {words}, "cache_before"), held.rows,
             held.num_rows};
  }
  check_ndim(nodes, 1, "nodes");
  const int64_t count = nodes.size(0);
  const auto* ids = checked<const int32_t>(nodes, {count}, "nodes");
  const TokenTable result = checked_table(out, table.row_bytes, "out");
  if (result.num_rows != count) {
    TVM_FFI_THROW(ValueError) << "out must have a row for each of " << count << " nodes, got shape "
                              << shape_text(out);
  }
  BadIndex bad;
  const int64_t hits = with_memory(
      [&] { return gather_tokens(table, cache, ids, count, memory_of<char>(out, "out"), bad); });
  if (hits < 0 && bad.in_row) {
    TVM_FFI_THROW(ValueError) << "cache_rows must have the row of each node of cache_bits, got "
                              << cache.num_rows << " rows without that of node " << bad.value;
  }
  if (hits < 0) {
    TVM_FFI_THROW(IndexError) << "nodes holds " << bad.value << ", expected 0 <= node < "
                              << table.num_rows;
  }
  return hits;
}

int64_t bind_checksum(Tensor tensor) {
  check_place(tensor, "tensor");
  if (tensor.ndim() != 1 && tensor.ndim() != 2) {
    TVM_FFI_THROW(ValueError) << "tensor must have 1 or 2 dimensions, got shape "
                              << shape_text(tensor);
  }
  const bool is_matrix = tensor.ndim() == 2;
  const int last = tensor.ndim() - 1;
  return static_cast<int64_t>(checksum(
      {memory_of<const char>(tensor, "tensor"), is_matrix ? tensor.size(0) : 1, tensor.size(last),
       is_matrix ? tensor.stride(0) : 0, tensor.stride(last), item_bytes(tensor, "tensor")}));
}

void bind_prefer_huge_pages(Tensor tensor) {
  check_place(tensor, "tensor");
  if (!tensor.IsContiguous()) {
    TVM_FFI_THROW(ValueError) << "tensor must be contiguous, got shape " << shape_text(tensor)
                              << " with other strides";
  }
  prefer_huge_pages(memory_of<void>(tensor, "tensor"),
                    static_cast<int64_t>(tvm::ffi::GetDataSize(tensor)));
}

int64_t bind_panel_channels(int64_t num_rows, int64_t num_cols, int64_t num_entries,
                            int64_t channels, int64_t item_bytes, int64_t cache_bytes,
                            int64_t heads) {
  checked_size(num_rows, "num_rows");
  checked_size(num_cols, "num_cols");
  checked_size(num_entries, "num_entries");
  checked_size(channels, "channels");
  checked_size(cache_bytes, "cache_bytes");
  if (item_bytes < 1 || item_bytes > kCacheLine) {
    TVM_FFI_THROW(ValueError) << "item_bytes must be in [1, " << kCacheLine << "], got "
                              << item_bytes;
  }
  checked_size(heads, "heads");
  PanelRule* rule = panel_channels;
  if (heads > 0) rule = head_panel_rule(heads);
  return rule(num_rows, num_cols, num_entries, channels, item_bytes, cache_bytes);
}

}  // namespace
}  // namespace fastgraph

TVM_FFI_DLL_EXPORT_TYPED_FUNC(build_csr, fastgraph::bind_build_csr);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(build_csr_with_loops, fastgraph::bind_build_csr_with_loops);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(check_csr, fastgraph::bind_check_csr);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(transpose_csr, fastgraph::bind_transpose_csr);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(reverse_rows, fastgraph::bind_reverse_rows);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(same_indices, fastgraph::bind_same_indices);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(inverse_degree, fastgraph::bind_inverse_degree);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(order_rows, fastgraph::bind_order_rows);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(count_reads, fastgraph::bind_count_reads);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(count_tile_columns, fastgraph::bind_count_tile_columns);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fill_tiles, fastgraph::bind_fill_tiles);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(edge_softmax, fastgraph::bind_edge_softmax);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(edge_softmax_backward, fastgraph::bind_edge_softmax_backward);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(dense_attention, fastgraph::bind_dense_attention);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(dense_attention_backward, fastgraph::bind_dense_attention_backward);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(dropout_factors, fastgraph::bind_dropout_factors);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gather_tokens, fastgraph::bind_gather_tokens);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(checksum, fastgraph::bind_checksum);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(prefer_huge_pages, fastgraph::bind_prefer_huge_pages);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(panel_channels, fastgraph::bind_panel_channels);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(force_panels, fastgraph::force_panels);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(run_serially, fastgraph::run_serially);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(max_threads, fastgraph::max_threads);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(use_threads, fastgraph::bind_use_threads);
