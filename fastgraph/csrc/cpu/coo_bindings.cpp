// The functions for edges that are not grouped.
#include <tvm/ffi/function.h>

#include "bindings/checks.h"
#include "cpu/segment_reduce_coo.h"
#include "cpu/spmm_coo.h"
#include "cpu/throw_bad_index.h"

namespace fastgraph {
namespace {

// Calls body(the matrix of edges), once their indices have been checked unless the caller did.
template <typename Body>
void with_coo(const Tensor& source, const Tensor& destination, int64_t num_sources,
              int64_t num_destinations, bool transpose, bool is_checked, const Body& body) {
  check_ndim(source, 1, "source");
  const int64_t size = source.size(0);
  dispatch_indices(source, "source", [&](auto index) {
    using Index = decltype(index);
    Coo<Index> graph{checked_indices<Index>(destination, size, "destination"),
                     checked_indices<Index>(source, size, "source"), num_destinations, num_sources};
    if (transpose) graph = {graph.col, graph.row, num_sources, num_destinations};
    BadIndex bad;
    if (!is_checked && !are_in_range(graph, bad)) {
      throw_bad_index(bad, graph.num_rows, graph.num_cols, transpose);
    }
    body(graph);
  });
}

void bind_check_edges(Tensor source, Tensor destination, int64_t num_sources,
                      int64_t num_destinations) {
  checked_size(num_sources, "num_sources");
  checked_size(num_destinations, "num_destinations");
  with_coo(source, destination, num_sources, num_destinations, false, false, [](const auto&) {});
}

// The same of edges that lead rows of x to those of out.
template <typename Body>
void with_coo_between(const Tensor& source, const Tensor& destination, const Tensor& x,
                      const Tensor& out, bool transpose, bool is_checked, const Body& body) {
  const int64_t num_sources = (transpose ? out : x).size(0);
  const int64_t num_destinations = (transpose ? x : out).size(0);
  with_coo(source, destination, num_sources, num_destinations, transpose, is_checked, body);
}

int64_t checked_width(const Tensor& x, const Tensor& out, int64_t most) {
  check_ndim(x, 2, "x");
  check_ndim(out, 2, "out");
  const int64_t width = x.size(1);
  if (width < 1 || width > most) {
    TVM_FFI_THROW(ValueError) << "x must have 1 to " << most << " channels, got " << width;
  }
  return width;
}

void bind_spmm_coo(Tensor source, Tensor destination, bool transpose, bool is_checked,
                   OptionalTensor weight, OptionalTensor inverse_degree, OptionalTensor col_scale,
                   Tensor x, Tensor out) {
  const int64_t width = checked_width(x, out, kMostColumns);
  const int64_t num_rows = out.size(0), num_cols = x.size(0);
  const auto compute = [&](const auto& graph) {
    dispatch_features(x, "x", [&](auto type) {
      using T = decltype(type);
      using A = Accumulator<T>;
      const auto weights = checked<const T>(weight, {graph.row.size}, "weight");
      const auto of_rows = checked<A>(inverse_degree, {num_rows}, "inverse_degree");
      const auto of_cols = checked<const A>(col_scale, {num_cols}, "col_scale");
      const auto from = checked_matrix<const T>(x, num_cols, width, "x");
      const auto to = checked_matrix<T>(out, num_rows, width, "out");
      with_memory([&] { spmm_coo<T>(graph, weights, of_rows, of_cols, from, to); });
    });
  };
  with_coo_between(source, destination, x, out, transpose, is_checked, compute);
}

void bind_segment_reduce_coo(Tensor source, Tensor destination, bool transpose, bool is_checked,
                             OptionalTensor weight, bool is_max, Tensor x, Tensor out,
                             OptionalTensor ties) {
  const int64_t width = checked_width(x, out, kMostColumnsOfExtrema);
  const int64_t num_rows = out.size(0), num_cols = x.size(0);
  const auto compute = [&](const auto& graph) {
    dispatch_features(x, "x", [&](auto type) {
      using T = decltype(type);
      const auto weights = checked<const T>(weight, {graph.row.size}, "weight");
      const auto from = checked_matrix<const T>(x, num_cols, width, "x");
      const auto to = checked_matrix<T>(out, num_rows, width, "out");
      const auto shares = checked<int32_t>(ties, {num_rows, width}, "ties");
      with_memory([&] { segment_reduce_coo<T>(graph, weights, is_max, from, to, shares); });
    });
  };
  with_coo_between(source, destination, x, out, transpose, is_checked, compute);
}

}  // namespace
}  // namespace fastgraph

TVM_FFI_DLL_EXPORT_TYPED_FUNC(check_edges, fastgraph::bind_check_edges);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(spmm_coo, fastgraph::bind_spmm_coo);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(segment_reduce_coo, fastgraph::bind_segment_reduce_coo);
