// The functions that Python calls: check tensors, pick the element type, run the kernel. Compiled
// for each kind of device; checks.h includes what differs between them.
#include <tvm/ffi/function.h>

#include "bindings/attention_sizes.h"
#include "bindings/checks.h"

namespace fastgraph {
namespace {

void bind_spmm(Tensor rowptr, Tensor col, OptionalTensor edge_id, int64_t num_cut,
               OptionalTensor order, OptionalTensor weight, OptionalTensor row_scale,
               OptionalTensor col_scale, Tensor x, Tensor out) {
  Call call(x);
  check_ndim(x, 2, "x");
  const int64_t width = x.size(1);
  const Rows graph = checked_csr(rowptr, col, edge_id, num_cut, order, x.size(0), kByRow);
  dispatch_features(x, "x", [&](auto type) {
    using T = decltype(type);
    using A = Accumulator<T>;
    call.run(kernels::spmm<T>, graph,
             checked_edge_values<const T>(weight, graph.num_entries, width, "weight"),
             checked<const A>(row_scale, {graph.num_rows}, "row_scale"),
             checked<const A>(col_scale, {graph.num_cols}, "col_scale"),
             checked_matrix<const T>(x, graph.num_cols, width, "x"),
             checked_matrix<T>(out, graph.num_rows, width, "out"));
  });
}

void bind_sddmm(Tensor rowptr, Tensor col, OptionalTensor edge_id, int64_t num_cut,
                OptionalTensor order, OptionalTensor row_scale, Tensor grad, Tensor x, Tensor out) {
  Call call(x);
  check_ndim(x, 2, "x");
  const int64_t width = x.size(1);
  const Rows graph = checked_csr(rowptr, col, edge_id, num_cut, order, x.size(0), kByRow);
  dispatch_features(x, "x", [&](auto type) {
    using T = decltype(type);
    using A = Accumulator<T>;
    call.run(kernels::sddmm<T>, graph, checked<const A>(row_scale, {graph.num_rows}, "row_scale"),
             checked_matrix<const T>(grad, graph.num_rows, width, "grad"),
             checked_matrix<const T>(x, graph.num_cols, width, "x"),
             checked_edge_values<T>(out, graph.num_entries, width, "out"));
  });
}

void bind_segment_reduce(Tensor rowptr, Tensor col, OptionalTensor edge_id, int64_t num_cut,
                         OptionalTensor order, OptionalTensor weight, bool is_max, Tensor x,
                         Tensor out, OptionalTensor ties, OptionalTensor winner) {
  Call call(x);
  if (ties.has_value() && winner.has_value()) {
    TVM_FFI_THROW(ValueError) << "expected at most one of ties and winner, got both";
  }
  check_ndim(x, 2, "x");
  const int64_t width = x.size(1);
  const Rows graph = checked_csr(rowptr, col, edge_id, num_cut, order, x.size(0), kByRow);
  dispatch_features(x, "x", [&](auto type) {
    using T = decltype(type);
    call.run(kernels::segment_reduce<T>, graph,
             checked<const T>(weight, {graph.num_entries}, "weight"), is_max,
             checked_matrix<const T>(x, graph.num_cols, width, "x"),
             checked_matrix<T>(out, graph.num_rows, width, "out"),
             checked<int32_t>(ties, {graph.num_rows, width}, "ties"),
             checked<int32_t>(winner, {graph.num_rows, width}, "winner"));
  });
}

#ifdef FASTGRAPH_EXTREMA_BY_SOURCE

void bind_divide_by_ties(Tensor grad, Tensor ties, Tensor share) {
  Call call(grad);
  check_ndim(grad, 2, "grad");
  const int64_t num_rows = grad.size(0), width = grad.size(1);
  dispatch_features(grad, "grad", [&](auto type) {
    using T = decltype(type);
    call.run(kernels::divide_by_ties<T>, checked_matrix<const T>(grad, num_rows, width, "grad"),
             checked<const int32_t>(ties, {num_rows, width}, "ties"),
             checked_matrix<T>(share, num_rows, width, "share"));
  });
}

void bind_segment_reduce_backward(Tensor rowptr_t, Tensor col_t, OptionalTensor edge_id_t,
                                  int64_t num_cut, OptionalTensor order_t, OptionalTensor weight,
                                  Tensor x, Tensor out, Tensor grad, OptionalTensor ties,
                                  OptionalTensor winner, Tensor grad_x) {
  Call call(x);
  if (ties.has_value() && winner.has_value()) {
    TVM_FFI_THROW(ValueError) << "expected at most one of ties and winner, got both";
  }
  check_ndim(x, 2, "x");
  check_ndim(out, 2, "out");
  const int64_t width = x.size(1), num_rows = out.size(0);
  const Rows transpose =
      checked_csr(rowptr_t, col_t, edge_id_t, num_cut, order_t, num_rows, kByCol);
  dispatch_features(x, "x", [&](auto type) {
    using T = decltype(type);
    call.run(kernels::segment_reduce_backward<T>, transpose,
             checked<const T>(weight, {transpose.num_entries}, "weight"),
             checked_matrix<const T>(x, transpose.num_rows, width, "x"),
             checked_matrix<const T>(out, num_rows, width, "out"),
             checked_matrix<const T>(grad, num_rows, width, "grad"),
             checked<const int32_t>(ties, {num_rows, width}, "ties"),
             checked<const int32_t>(winner, {num_rows, width}, "winner"),
             checked_matrix<T>(grad_x, transpose.num_rows, width, "grad_x"));
  });
}

#else

void bind_segment_reduce_backward(Tensor rowptr, Tensor col, OptionalTensor edge_id,
                                  int64_t num_cut, OptionalTensor weight, Tensor x, Tensor out,
                                  Tensor grad, OptionalTensor ties, OptionalTensor winner,
                                  Tensor grad_x) {
  Call call(x);
  if (ties.has_value() == winner.has_value()) {
    TVM_FFI_THROW(ValueError) << "expected one of ties and winner, got "
                              << (ties.has_value() ? "both" : "neither");
  }
  check_ndim(x, 2, "x");
  const int64_t width = x.size(1);
  const Csr graph = checked_csr(rowptr, col, edge_id, num_cut, {}, x.size(0), kByRow);
  dispatch_features(x, "x", [&](auto type) {
    using T = decltype(type);
    call.run(kernels::segment_reduce_backward<T>, graph,
             checked<const T>(weight, {graph.num_entries}, "weight"),
             checked_matrix<const T>(x, graph.num_cols, width, "x"),
             checked_matrix<const T>(out, graph.num_rows, width, "out"),
             checked_matrix<const T>(grad, graph.num_rows, width, "grad"),
             checked<const int32_t>(ties, {graph.num_rows, width}, "ties"),
             checked<const int32_t>(winner, {graph.num_rows, width}, "winner"),
             checked_matrix<T>(grad_x, graph.num_cols, width, "grad_x"));
  });
}

#endif

void bind_head_scores(Tensor x, Tensor att, Tensor scores) {
  Call call(x);
  check_ndim(x, 3, "x");
  check_ndim(att, 3, "att");
  const int64_t nodes = x.size(0), heads = x.size(1), width = x.size(2), count = att.size(0);
  dispatch_features(x, "x", [&](auto type) {
    using T = decltype(type);
    call.run(kernels::head_scores<T>, checked_heads<const T>(x, nodes, heads, width, "x"),
             checked_heads<const T>(att, count, heads, width, "att"),
             checked_heads<T>(scores, count, nodes, heads, "scores"));
  });
}

void bind_head_scores_backward(Tensor x, Tensor att, Tensor grad, OptionalTensor addend,
                               GradientTensor grad_x, GradientTensor grad_att) {
  Call call(x);
  check_ndim(x, 3, "x");
  check_ndim(att, 3, "att");
  const int64_t nodes = x.size(0), heads = x.size(1), width = x.size(2), count = att.size(0);
  dispatch_features(x, "x", [&](auto type) {
    using T = decltype(type);
    call.run(kernels::head_scores_backward<T>, checked_heads<const T>(x, nodes, heads, width, "x"),
             checked_heads<const T>(att, count, heads, width, "att"),
             checked_heads<const T>(grad, count, nodes, heads, "grad"),
             checked_heads<const T>(addend, nodes, heads, width, "addend"),
             checked_heads<T>(grad_x, nodes, heads, width, "grad_x"),
             checked_heads<T>(grad_att, count, heads, width, "grad_att"));
  });
}

// Inputs of gatv2 as they came.
struct Gatv2Arguments {
  const Tensor &x_src, &x_dst, &att;
  const OptionalTensor &edge, &weight_edge;

  AttentionSizes sizes(const Tensor& col, const char* col_name) const {
    check_ndim(x_dst, 3, "x_dst");
    check_given_together(edge, "edge", weight_edge, "weight_edge");
    return attention_sizes(x_src, "x_src", x_dst.size(0), col, col_name);
  }
  int64_t num_projected() const { return edge_width(edge); }

  template <typename T>
  Gatv2Inputs<T> checked_for(const AttentionSizes& sizes) const {
    const int64_t channels = num_projected();
    return {sizes.of_cols<const T>(x_src, "x_src"), sizes.of_rows<const T>(x_dst, "x_dst"),
            checked_heads<const T>(att, 1, sizes.heads, sizes.width, "att"),
            checked_matrix<const T>(edge, sizes.edges, channels, "edge"),
            checked_heads<const T>(weight_edge, sizes.heads, channels, sizes.width, "weight_edge")};
  }
};

void bind_gatv2(Tensor rowptr, Tensor col, OptionalTensor edge_id, int64_t num_cut,
                OptionalTensor order, Tensor x_src, Tensor x_dst, Tensor att, OptionalTensor edge,
                OptionalTensor weight_edge, double slope, double dropout, int64_t seed, Tensor out,
                Tensor stats, OptionalTensor alpha, OptionalTensor addend) {
  Call call(x_src);
  const Gatv2Arguments arguments{x_src, x_dst, att, edge, weight_edge};
  const AttentionSizes sizes = arguments.sizes(col, "col");
  const Rows graph = sizes.by_row(rowptr, col, edge_id, num_cut, order);
  dispatch_features(x_src, "x_src", [&](auto type) {
    using T = decltype(type);
    call.run(kernels::gatv2<T>, graph, arguments.checked_for<T>(sizes), slope,
             checked_dropout(dropout, seed), sizes.outputs<T>(out, stats, alpha, addend));
  });
}

#ifdef FASTGRAPH_BACKWARD_AT_ONCE

void bind_gatv2_backward(Tensor rowptr, Tensor col, OptionalTensor edge_id, int64_t num_cut,
                         OptionalTensor order, Tensor rowptr_t, Tensor col_t,
                         OptionalTensor edge_id_t, int64_t num_cut_t, OptionalTensor order_t,
                         Tensor x_src, Tensor x_dst, Tensor att, OptionalTensor edge,
                         OptionalTensor weight_edge, double slope, double dropout, int64_t seed,
                         Tensor stats, Tensor grad, OptionalTensor grad_alpha,
                         OptionalTensor grad_logsum, Tensor grad_src, Tensor grad_dst,
                         Tensor grad_att, OptionalTensor grad_edge,
                         OptionalTensor grad_weight_edge) {
  Call call(x_src);
  const Gatv2Arguments arguments{x_src, x_dst, att, edge, weight_edge};
  const AttentionSizes sizes = arguments.sizes(col, "col");
  const Rows graph = sizes.by_row(rowptr, col, edge_id, num_cut, order);
  check_shape(col_t, {sizes.edges}, "col_t");
  const Rows transpose = sizes.by_col(rowptr_t, col_t, edge_id_t, num_cut_t, order_t);
  check_given_together(edge, "edge", grad_edge, "grad_edge");
  check_given_together(edge, "edge", grad_weight_edge, "grad_weight_edge");
  dispatch_features(x_src, "x_src", [&](auto type) {
    using T = decltype(type);
    const int64_t channels = arguments.num_projected();
    call.run(
        kernels::gatv2_backward<T>, graph, transpose, arguments.checked_for<T>(sizes), slope,
        checked_dropout(dropout, seed), sizes.gradients<T>(stats, grad, grad_alpha, grad_logsum),
        sizes.of_cols<T>(grad_src, "grad_src"), sizes.of_rows<T>(grad_dst, "grad_dst"),
        checked_heads<T>(grad_att, 1, sizes.heads, sizes.width, "grad_att"),
        checked_matrix<Accumulator<T>>(grad_edge, sizes.edges, channels, "grad_edge"),
        checked_heads<T>(grad_weight_edge, sizes.heads, channels, sizes.width, "grad_weight_edge"));
  });
}

#else

void bind_gatv2_backward_dst(Tensor rowptr, Tensor col, OptionalTensor edge_id, int64_t num_cut,
                             OptionalTensor order, Tensor x_src, Tensor x_dst, Tensor att,
                             OptionalTensor edge, OptionalTensor weight_edge, double slope,
                             double dropout, int64_t seed, Tensor stats, Tensor grad,
                             OptionalTensor grad_alpha, OptionalTensor grad_logsum, Tensor between,
                             Tensor grad_dst, Tensor grad_att, OptionalTensor grad_edge,
                             OptionalTensor grad_weight_edge) {
  Call call(x_src);
  const Gatv2Arguments arguments{x_src, x_dst, att, edge, weight_edge};
  const AttentionSizes sizes = arguments.sizes(col, "col");
  const Rows graph = sizes.by_row(rowptr, col, edge_id, num_cut, order);
  check_gradient_of(edge, grad_edge, "grad_edge");
  check_gradient_of(edge, grad_weight_edge, "grad_weight_edge");
  dispatch_features(x_src, "x_src", [&](auto type) {
    using T = decltype(type);
    const int64_t channels = arguments.num_projected();
    call.run(
        kernels::gatv2_backward_dst<T>, graph, arguments.checked_for<T>(sizes), slope,
        checked_dropout(dropout, seed), sizes.gradients<T>(stats, grad, grad_alpha, grad_logsum),
        sizes.between_passes<Accumulator<T>>(between, sizes.of_signs<Accumulator<T>>(channels)),
        sizes.of_rows<T>(grad_dst, "grad_dst"),
        checked_heads<T>(grad_att, 1, sizes.heads, sizes.width, "grad_att"),
        checked_matrix<Accumulator<T>>(grad_edge, sizes.edges, channels, "grad_edge"),
        checked_heads<T>(grad_weight_edge, sizes.heads, channels, sizes.width, "grad_weight_edge"));
  });
}

void bind_gatv2_backward_src(Tensor rowptr_t, Tensor col_t, OptionalTensor edge_id_t,
                             int64_t num_cut, OptionalTensor order_t, Tensor x_src, Tensor x_dst,
                             Tensor att, OptionalTensor edge, OptionalTensor weight_edge,
                             double slope, double dropout, int64_t seed, Tensor stats, Tensor grad,
                             OptionalTensor grad_alpha, OptionalTensor grad_logsum, Tensor between,
                             Tensor grad_src) {
  Call call(x_src);
  const Gatv2Arguments arguments{x_src, x_dst, att, edge, weight_edge};
  const AttentionSizes sizes = arguments.sizes(col_t, "col_t");
  const Rows transpose = sizes.by_col(rowptr_t, col_t, edge_id_t, num_cut, order_t);
  dispatch_features(x_src, "x_src", [&](auto type) {
    using T = decltype(type);
    const int64_t more = sizes.of_signs<Accumulator<T>>(arguments.num_projected());
    call.run(kernels::gatv2_backward_src<T>, transpose, arguments.checked_for<T>(sizes), slope,
             checked_dropout(dropout, seed),
             sizes.gradients<T>(stats, grad, grad_alpha, grad_logsum),
             sizes.between_passes<const Accumulator<T>>(between, more),
             sizes.of_cols<T>(grad_src, "grad_src"));
  });
}

#endif

// Inputs of gat as they came.
struct GatArguments {
  const Tensor &x, &score_src, &score_dst;
  const OptionalTensor& score_edge;

  AttentionSizes sizes(const Tensor& col, const char* col_name) const {
    check_ndim(score_dst, 2, "score_dst");
    return attention_sizes(x, "x", score_dst.size(0), col, col_name);
  }
  template <typename T>
  GatInputs<T> checked_for(const AttentionSizes& sizes) const {
    return {sizes.of_cols<const T>(x, "x"), sizes.col_scores<const T>(score_src, "score_src"),
            sizes.row_scores<const T>(score_dst, "score_dst"),
            sizes.edge_scores<const T>(score_edge, "score_edge")};
  }
};

void bind_gat(Tensor rowptr, Tensor col, OptionalTensor edge_id, int64_t num_cut,
              OptionalTensor order, Tensor x, Tensor score_src, Tensor score_dst,
              OptionalTensor score_edge, double slope, double dropout, int64_t seed, Tensor out,
              Tensor stats, OptionalTensor alpha, OptionalTensor addend) {
  Call call(x);
  const GatArguments arguments{x, score_src, score_dst, score_edge};
  const AttentionSizes sizes = arguments.sizes(col, "col");
  const Rows graph = sizes.by_row(rowptr, col, edge_id, num_cut, order);
  dispatch_features(x, "x", [&](auto type) {
    using T = decltype(type);
    call.run(kernels::gat<T>, graph, arguments.checked_for<T>(sizes), slope,
             checked_dropout(dropout, seed), sizes.outputs<T>(out, stats, alpha, addend));
  });
}

void bind_gat_backward(Tensor rowptr, Tensor col, OptionalTensor edge_id, int64_t num_cut,
                       OptionalTensor order, Tensor rowptr_t, Tensor col_t,
                       OptionalTensor edge_id_t, int64_t num_cut_t, OptionalTensor order_t,
                       Tensor x, Tensor score_src, Tensor score_dst, OptionalTensor score_edge,
                       double slope, double dropout, int64_t seed, Tensor stats, Tensor grad,
                       OptionalTensor grad_alpha, OptionalTensor grad_logsum, Tensor grad_x,
                       Tensor grad_score_src, Tensor grad_score_dst,
                       OptionalTensor grad_score_edge) {
  Call call(x);
  const GatArguments arguments{x, score_src, score_dst, score_edge};
  const AttentionSizes sizes = arguments.sizes(col, "col");
  const Rows graph = sizes.by_row(rowptr, col, edge_id, num_cut, order);
  check_shape(col_t, {sizes.edges}, "col_t");
  const Rows transpose = sizes.by_col(rowptr_t, col_t, edge_id_t, num_cut_t, order_t);
  dispatch_features(x, "x", [&](auto type) {
    using T = decltype(type);
    call.run(
        kernels::gat_backward<T>, graph, transpose, arguments.checked_for<T>(sizes), slope,
        checked_dropout(dropout, seed), sizes.gradients<T>(stats, grad, grad_alpha, grad_logsum),
        sizes.of_cols<T>(grad_x, "grad_x"), sizes.col_scores<T>(grad_score_src, "grad_score_src"),
        sizes.row_scores<T>(grad_score_dst, "grad_score_dst"),
        sizes.edge_scores<T>(grad_score_edge, "grad_score_edge"));
  });
}

void bind_attention(Tensor rowptr, Tensor col, OptionalTensor edge_id, int64_t num_cut,
                    OptionalTensor order, Tensor query, Tensor key, Tensor value,
                    OptionalTensor edge, double scale, double dropout, int64_t seed, Tensor out,
                    Tensor stats, OptionalTensor alpha, OptionalTensor addend) {
  Call call(key);
  const AttentionArguments arguments{query, key, value, edge};
  const AttentionSizes sizes = arguments.sizes(col, "col");
  const Rows graph = sizes.by_row(rowptr, col, edge_id, num_cut, order);
  dispatch_features(key, "key", [&](auto type) {
    using T = decltype(type);
    call.run(kernels::attention<T>, graph, arguments.checked_for<T>(sizes), scale,
             checked_dropout(dropout, seed), sizes.outputs<T>(out, stats, alpha, addend));
  });
}

#ifdef FASTGRAPH_BACKWARD_AT_ONCE

void bind_attention_backward(Tensor rowptr, Tensor col, OptionalTensor edge_id, int64_t num_cut,
                             OptionalTensor order, Tensor rowptr_t, Tensor col_t,
                             OptionalTensor edge_id_t, int64_t num_cut_t, OptionalTensor order_t,
                             Tensor query, Tensor key, Tensor value, OptionalTensor edge,
                             double scale, double dropout, int64_t seed, Tensor stats, Tensor grad,
                             OptionalTensor grad_alpha, OptionalTensor grad_logsum,
                             Tensor grad_query, Tensor grad_key, Tensor grad_value,
                             OptionalTensor grad_edge) {
  Call call(key);
  const AttentionArguments arguments{query, key, value, edge};
  const AttentionSizes sizes = arguments.sizes(col, "col");
  const Rows graph = sizes.by_row(rowptr, col, edge_id, num_cut, order);
  check_shape(col_t, {sizes.edges}, "col_t");
  const Rows transpose = sizes.by_col(rowptr_t, col_t, edge_id_t, num_cut_t, order_t);
  check_given_together(edge, "edge", grad_edge, "grad_edge");
  dispatch_features(key, "key", [&](auto type) {
    using T = decltype(type);
    call.run(kernels::attention_backward<T>, graph, transpose, arguments.checked_for<T>(sizes),
             scale, checked_dropout(dropout, seed),
             sizes.gradients<T>(stats, grad, grad_alpha, grad_logsum),
             sizes.extended_rows<T>(grad_query, "grad_query"),
             sizes.of_cols<T>(grad_key, "grad_key"), sizes.of_cols<T>(grad_value, "grad_value"),
             sizes.of_edges<Accumulator<T>>(grad_edge, "grad_edge"));
  });
}

#else

void bind_attention_backward_dst(Tensor rowptr, Tensor col, OptionalTensor edge_id, int64_t num_cut,
                                 OptionalTensor order, Tensor query, Tensor key, Tensor value,
                                 OptionalTensor edge, double scale, double dropout, int64_t seed,
                                 Tensor stats, Tensor grad, OptionalTensor grad_alpha,
                                 OptionalTensor grad_logsum, Tensor between, Tensor grad_query,
                                 OptionalTensor grad_edge) {
  Call call(key);
  const AttentionArguments arguments{query, key, value, edge};
  const AttentionSizes sizes = arguments.sizes(col, "col");
  const Rows graph = sizes.by_row(rowptr, col, edge_id, num_cut, order);
  check_gradient_of(edge, grad_edge, "grad_edge");
  dispatch_features(key, "key", [&](auto type) {
    using T = decltype(type);
    call.run(kernels::attention_backward_dst<T>, graph, arguments.checked_for<T>(sizes), scale,
             checked_dropout(dropout, seed),
             sizes.gradients<T>(stats, grad, grad_alpha, grad_logsum),
             sizes.between_passes<Accumulator<T>>(between),
             sizes.extended_rows<T>(grad_query, "grad_query"),
             sizes.of_edges<Accumulator<T>>(grad_edge, "grad_edge"));
  });
}

void bind_attention_backward_src(Tensor rowptr_t, Tensor col_t, OptionalTensor edge_id_t,
                                 int64_t num_cut, OptionalTensor order_t, Tensor query, Tensor key,
                                 Tensor value, OptionalTensor edge, double scale, double dropout,
                                 int64_t seed, Tensor stats, Tensor grad, OptionalTensor grad_alpha,
                                 OptionalTensor grad_logsum, Tensor between, Tensor grad_key,
                                 Tensor grad_value) {
  Call call(key);
  const AttentionArguments arguments{query, key, value, edge};
  const AttentionSizes sizes = arguments.sizes(col_t, "col_t");
  const Rows transpose = sizes.by_col(rowptr_t, col_t, edge_id_t, num_cut, order_t);
  dispatch_features(key, "key", [&](auto type) {
    using T = decltype(type);
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

TVM_FFI_DLL_EXPORT_TYPED_FUNC(spmm, fastgraph::bind_spmm);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sddmm, fastgraph::bind_sddmm);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(segment_reduce, fastgraph::bind_segment_reduce);
#ifdef FASTGRAPH_EXTREMA_BY_SOURCE
TVM_FFI_DLL_EXPORT_TYPED_FUNC(divide_by_ties, fastgraph::bind_divide_by_ties);
#endif
TVM_FFI_DLL_EXPORT_TYPED_FUNC(segment_reduce_backward, fastgraph::bind_segment_reduce_backward);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(head_scores, fastgraph::bind_head_scores);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(head_scores_backward, fastgraph::bind_head_scores_backward);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gatv2, fastgraph::bind_gatv2);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gat, fastgraph::bind_gat);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gat_backward, fastgraph::bind_gat_backward);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(attention, fastgraph::bind_attention);
#ifdef FASTGRAPH_BACKWARD_AT_ONCE
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gatv2_backward, fastgraph::bind_gatv2_backward);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(attention_backward, fastgraph::bind_attention_backward);
#else
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gatv2_backward_dst, fastgraph::bind_gatv2_backward_dst);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gatv2_backward_src, fastgraph::bind_gatv2_backward_src);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(attention_backward_dst, fastgraph::bind_attention_backward_dst);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(attention_backward_src, fastgraph::bind_attention_backward_src);
#endif
