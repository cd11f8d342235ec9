// The functions of attention with a bias. Compiled for each kind of device.
#include <tvm/ffi/function.h>

#include <cstdint>

#include "bindings/attention_sizes.h"
#include "bindings/checks.h"
#include "bindings/score_bias_checks.h"

namespace fastgraph {
namespace {

// Inputs of biased_attention as they came.
struct BiasedAttentionArguments : AttentionArguments {
  const OptionalTensor &bias, &table, &bias_index;

  AttentionSizes sizes(const Tensor& col, const char* col_name) const {
    check_given_together(table, "table", bias_index, "bias_index");
    return AttentionArguments::sizes(col, col_name);
  }
  template <typename T>
  EdgeBiases<T> checked_biases(const AttentionSizes& sizes) const {
    if (table.has_value() && table.value().ndim() > 0 && table.value().size(0) > INT32_MAX) {
      TVM_FFI_THROW(ValueError) << "table must have less than 2^31 rows, got "
                                << table.value().size(0);
    }
    return {checked_bias<T>(bias, {}, sizes.edges, sizes.heads, "bias_index"),
            checked_bias<T>(table, bias_index, sizes.edges, sizes.heads, "bias_index", "table")};
  }
};

void bind_biased_attention(Tensor rowptr, Tensor col, OptionalTensor edge_id, int64_t num_cut,
                           OptionalTensor order, Tensor query, Tensor key, Tensor value,
                           OptionalTensor edge, OptionalTensor bias, OptionalTensor table,
                           OptionalTensor bias_index, double scale, double dropout, int64_t seed,
                           Tensor out, Tensor stats, OptionalTensor alpha, OptionalTensor addend) {
  Call call(key);
  const BiasedAttentionArguments arguments{{query, key, value, edge}, bias, table, bias_index};
  const AttentionSizes sizes = arguments.sizes(col, "col");
  const Rows graph = sizes.by_row(rowptr, col, edge_id, num_cut, order);
  dispatch_features(key, "key", [&](auto type) {
    using T = decltype(type);
    call.run(kernels::biased_attention<T>, graph, arguments.checked_for<T>(sizes),
             arguments.checked_biases<T>(sizes), scale, checked_dropout(dropout, seed),
             sizes.outputs<T>(out, stats, alpha, addend));
  });
}

#ifdef FASTGRAPH_BACKWARD_AT_ONCE

void bind_biased_attention_backward(
    Tensor rowptr, Tensor col, OptionalTensor edge_id, int64_t num_cut, OptionalTensor order,
    Tensor rowptr_t, Tensor col_t, OptionalTensor edge_id_t, int64_t num_cut_t,
    OptionalTensor order_t, Tensor query, Tensor key, Tensor value, OptionalTensor edge,
    OptionalTensor bias, OptionalTensor table, OptionalTensor bias_index, double scale,
    double dropout, int64_t seed, Tensor stats, Tensor grad, OptionalTensor grad_alpha,
    OptionalTensor grad_logsum, Tensor grad_query, Tensor grad_key, Tensor grad_value,
    OptionalTensor grad_edge, OptionalTensor grad_bias, OptionalTensor grad_table) {
  Call call(key);
  const BiasedAttentionArguments arguments{{query, key, value, edge}, bias, table, bias_index};
  const AttentionSizes sizes = arguments.sizes(col, "col");
  const Rows graph = sizes.by_row(rowptr, col, edge_id, num_cut, order);
  check_shape(col_t, {sizes.edges}, "col_t");
  const Rows transpose = sizes.by_col(rowptr_t, col_t, edge_id_t, num_cut_t, order_t);
  check_given_together(edge, "edge", grad_edge, "grad_edge");
  check_given_together(bias, "bias", grad_bias, "grad_bias");
  check_given_together(table, "table", grad_table, "grad_table");
  dispatch_features(key, "key", [&](auto type) {
    using T = decltype(type);
    const EdgeBiases<T> biases = arguments.checked_biases<T>(sizes);
    call.run(kernels::biased_attention_backward<T>, graph, transpose,
             arguments.checked_for<T>(sizes), biases, scale, checked_dropout(dropout, seed),
             sizes.gradients<T>(stats, grad, grad_alpha, grad_logsum),
             sizes.extended_rows<T>(grad_query, "grad_query"),
             sizes.of_cols<T>(grad_key, "grad_key"), sizes.of_cols<T>(grad_value, "grad_value"),
             sizes.of_edges<Accumulator<T>>(grad_edge, "grad_edge"),
             EdgeBiasGradients<T>{sizes.edge_scores<T>(grad_bias, "grad_bias"),
                                  checked_matrix<T>(grad_table, biases.of_types.values.rows,
                                                    sizes.heads, "grad_table")});
  });
}

#else

void bind_biased_attention_backward_dst(Tensor rowptr, Tensor col, OptionalTensor edge_id,
                                        int64_t num_cut, OptionalTensor order, Tensor query,
                                        Tensor key, Tensor value, OptionalTensor edge,
                                        OptionalTensor bias, OptionalTensor table,
                                        OptionalTensor bias_index, double scale, double dropout,
                                        int64_t seed, Tensor stats, Tensor grad,
                                        OptionalTensor grad_alpha, OptionalTensor grad_logsum,
                                        Tensor between, Tensor grad_query, OptionalTensor grad_edge,
                                        OptionalTensor grad_bias, OptionalTensor grad_table) {
  Call call(key);
  const BiasedAttentionArguments arguments{{query, key, value, edge}, bias, table, bias_index};
  const AttentionSizes sizes = arguments.sizes(col, "col");
  const Rows graph = sizes.by_row(rowptr, col, edge_id, num_cut, order);
  check_gradient_of(edge, grad_edge, "grad_edge");
  check_gradient_of(bias, grad_bias, "grad_bias", "bias");
  check_gradient_of(table, grad_table, "grad_table", "table");
  dispatch_features(key, "key", [&](auto type) {
    using T = decltype(type);
    const EdgeBiases<T> biases = arguments.checked_biases<T>(sizes);
    call.run(kernels::biased_attention_backward_dst<T>, graph, arguments.checked_for<T>(sizes),
             biases, scale, checked_dropout(dropout, seed),
             sizes.gradients<T>(stats, grad, grad_alpha, grad_logsum),
             sizes.between_passes<Accumulator<T>>(between),
             sizes.extended_rows<T>(grad_query, "grad_query"),
             sizes.of_edges<Accumulator<T>>(grad_edge, "grad_edge"),
             EdgeBiasGradients<T>{sizes.edge_scores<T>(grad_bias, "grad_bias"),
                                  checked_matrix<T>(grad_table, biases.of_types.values.rows,
                                                    sizes.heads, "grad_table")});
  });
}

void bind_biased_attention_backward_src(Tensor rowptr_t, Tensor col_t, OptionalTensor edge_id_t,
                                        int64_t num_cut, OptionalTensor order_t, Tensor query,
                                        Tensor key, Tensor value, OptionalTensor edge,
                                        OptionalTensor bias, OptionalTensor table,
                                        OptionalTensor bias_index, double scale, double dropout,
                                        int64_t seed, Tensor stats, Tensor grad,
                                        OptionalTensor grad_alpha, OptionalTensor grad_logsum,
                                        Tensor between, Tensor grad_key, Tensor grad_value) {
  Call call(key);
  const BiasedAttentionArguments arguments{{query, key, value, edge}, bias, table, bias_index};
  const AttentionSizes sizes = arguments.sizes(col_t, "col_t");
  const Rows transpose = sizes.by_col(rowptr_t, col_t, edge_id_t, num_cut, order_t);
  dispatch_features(key, "key", [&](auto type) {
    using T = decltype(type);
    arguments.checked_biases<T>(sizes);  // which the pass does not read
    call.run(kernels::attention_backward_src<T>, transpose, arguments.checked_for<T>(sizes), scale,
             checked_dropout(dropout, seed),
             sizes.gradients<T>(stats, grad, grad_alpha, grad_logsum),
             sizes.between_passes<const Accumulator<T>>(between),
             sizes.of_cols<T>(grad_key, "grad_key"), sizes.of_cols<T>(grad_value, "grad_value"));
  });
}

#endif

}  // namespace
}  // namespace fastgraph

TVM_FFI_DLL_EXPORT_TYPED_FUNC(biased_attention, fastgraph::bind_biased_attention);
#ifdef FASTGRAPH_BACKWARD_AT_ONCE
TVM_FFI_DLL_EXPORT_TYPED_FUNC(biased_attention_backward, fastgraph::bind_biased_attention_backward);
#else
TVM_FFI_DLL_EXPORT_TYPED_FUNC(biased_attention_backward_dst,
                              fastgraph::bind_biased_attention_backward_dst);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(biased_attention_backward_src,
                              fastgraph::bind_biased_attention_backward_src);
#endif
