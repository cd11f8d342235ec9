// The functions of attention to features of edges, which CPUs alone have.
#include "cpu/edge_attention.h"

#include <tvm/ffi/function.h>

#include "bindings/attention_sizes.h"

namespace fastgraph {
namespace {

// Inputs of edge_attention as they came.
struct EdgeAttentionArguments {
  const Tensor &query, &key, &value;
  const OptionalTensor &edge, &weight_edge;

  AttentionSizes sizes(const Tensor& col, const char* col_name) const {
    check_ndim(query, 3, "query");
    check_given_together(edge, "edge", weight_edge, "weight_edge");
    return attention_sizes(key, "key", query.size(0), col, col_name);
  }
  int64_t num_projected() const { return edge_width(edge); }

  template <typename T>
  EdgeAttentionInputs<T> checked_for(const AttentionSizes& sizes) const {
    const int64_t channels = num_projected();
    return {sizes.of_rows<const T>(query, "query"), sizes.of_cols<const T>(key, "key"),
            sizes.of_cols<const T>(value, "value"),
            checked_matrix<const T>(edge, sizes.edges, channels, "edge"),
            checked_heads<const T>(weight_edge, sizes.heads, channels, sizes.width, "weight_edge")};
  }
};

void bind_edge_attention(Tensor rowptr, Tensor col, OptionalTensor edge_id, int64_t num_cut,
                         OptionalTensor order, Tensor query, Tensor key, Tensor value,
                         OptionalTensor edge, OptionalTensor weight_edge, double scale,
                         double dropout, int64_t seed, Tensor out, Tensor stats,
                         OptionalTensor alpha, OptionalTensor addend) {
  Call call(key);
  const EdgeAttentionArguments arguments{query, key, value, edge, weight_edge};
  const AttentionSizes sizes = arguments.sizes(col, "col");
  const Rows graph = sizes.by_row(rowptr, col, edge_id, num_cut, order);
  dispatch_features(key, "key", [&](auto type) {
    using T = decltype(type);
    call.run(kernels::edge_attention<T>, graph, arguments.checked_for<T>(sizes), scale,
             checked_dropout(dropout, seed), sizes.outputs<T>(out, stats, alpha, addend));
  });
}

void bind_edge_attention_backward_dst(Tensor rowptr, Tensor col, OptionalTensor edge_id,
                                      int64_t num_cut, OptionalTensor order, Tensor query,
                                      Tensor key, Tensor value, OptionalTensor edge,
                                      OptionalTensor weight_edge, double scale, double dropout,
                                      int64_t seed, Tensor stats, Tensor grad,
                                      OptionalTensor grad_alpha, OptionalTensor grad_logsum,
                                      Tensor between, Tensor grad_query, OptionalTensor grad_edge,
                                      OptionalTensor grad_weight_edge) {
  Call call(key);
  const EdgeAttentionArguments arguments{query, key, value, edge, weight_edge};
  const AttentionSizes sizes = arguments.sizes(col, "col");
  const Rows graph = sizes.by_row(rowptr, col, edge_id, num_cut, order);
  check_gradient_of(edge, grad_edge, "grad_edge");
  check_gradient_of(edge, grad_weight_edge, "grad_weight_edge");
  dispatch_features(key, "key", [&](auto type) {
    using T = decltype(type);
    const int64_t channels = arguments.num_projected();
    call.run(
        kernels::edge_attention_backward_dst<T>, graph, arguments.checked_for<T>(sizes), scale,
        checked_dropout(dropout, seed), sizes.gradients<T>(stats, grad, grad_alpha, grad_logsum),
        sizes.between_passes<Accumulator<T>>(between), sizes.of_rows<T>(grad_query, "grad_query"),
        checked_matrix<Accumulator<T>>(grad_edge, sizes.edges, channels, "grad_edge"),
        checked_heads<T>(grad_weight_edge, sizes.heads, channels, sizes.width, "grad_weight_edge"));
  });
}

void bind_edge_attention_backward_src(Tensor rowptr_t, Tensor col_t, OptionalTensor edge_id_t,
                                      int64_t num_cut, OptionalTensor order_t, Tensor query,
                                      Tensor key, Tensor value, OptionalTensor edge,
                                      OptionalTensor weight_edge, double scale, double dropout,
                                      int64_t seed, Tensor stats, Tensor grad,
                                      OptionalTensor grad_alpha, OptionalTensor grad_logsum,
                                      Tensor between, Tensor grad_key, Tensor grad_value) {
  Call call(key);
  const EdgeAttentionArguments arguments{query, key, value, edge, weight_edge};
  const AttentionSizes sizes = arguments.sizes(col_t, "col_t");
  const Rows transpose = sizes.by_col(rowptr_t, col_t, edge_id_t, num_cut, order_t);
  dispatch_features(key, "key", [&](auto type) {
    using T = decltype(type);
    call.run(kernels::edge_attention_backward_src<T>, transpose, arguments.checked_for<T>(sizes),
             scale, checked_dropout(dropout, seed),
             sizes.gradients<T>(stats, grad, grad_alpha, grad_logsum),
             sizes.between_passes<const Accumulator<T>>(between),
             sizes.of_cols<T>(grad_key, "grad_key"), sizes.of_cols<T>(grad_value, "grad_value"));
  });
}

}  // namespace
}  // namespace fastgraph

TVM_FFI_DLL_EXPORT_TYPED_FUNC(edge_attention, fastgraph::bind_edge_attention);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(edge_attention_backward_dst,
                              fastgraph::bind_edge_attention_backward_dst);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(edge_attention_backward_src,
                              fastgraph::bind_edge_attention_backward_src);
