// The functions of attention by sub-blocks, which CPUs alone have.
#include <tvm/ffi/function.h>

#include <cstdint>

#include "bindings/attention_sizes.h"
#include "bindings/score_bias_checks.h"
#include "cpu/block_attention.h"

namespace fastgraph {
namespace {

// What all passes take, as it came. Windows are of the nodes at one end of edges.
struct BlockAttentionArguments {
  const Tensor &ptr, &node, &lanes, &first, &edge;
  const Tensor &query, &key, &value;
  const OptionalTensor &table, &bias_index;

  int64_t queries() const { return query.size(0); }
  int64_t keys() const { return key.size(0); }
  int64_t heads() const { return query.size(1); }
  int64_t width() const { return query.size(2); }

  void check() const {
    check_ndim(query, 3, "query");
    check_ndim(key, 3, "key");
    check_ndim(node, 1, "node");
    check_ndim(edge, 1, "edge");
    check_given_together(table, "table", bias_index, "bias_index");
  }
  Windows windows(int64_t nodes) const {
    const int64_t count = (nodes + 15) / 16, columns = node.size(0);
    return {checked<const int64_t>(ptr, {count + 1}, "ptr"),
            checked<const int32_t>(node, {columns}, "node"),
            checked<const int32_t>(lanes, {columns}, "lanes"),
            checked<const int64_t>(first, {columns + 1}, "first"),
            checked<const int32_t>(edge, {edge.size(0)}, "edge"),
            count,
            nodes};
  }
  template <typename T>
  BlockAttentionInputs<T> inputs() const {
    return {checked_heads<const T>(query, queries(), heads(), width(), "query"),
            checked_heads<const T>(key, keys(), heads(), width(), "key"),
            checked_heads<const T>(value, keys(), heads(), width(), "value"),
            checked_bias<T>(table, bias_index, edge.size(0), heads(), "bias_index", "table")};
  }
  template <typename A>
  SoftmaxStats<A> stats(const Tensor& known) const {
    return {checked<A>(known, {queries(), heads(), 2}, "stats"), heads()};
  }
  template <typename T>
  SoftmaxGradients<T> gradients(const Tensor& known, const Tensor& grad,
                                const OptionalTensor& grad_logsum) const {
    using A = Accumulator<T>;
    return {stats<const A>(known),
            checked_heads<const T>(grad, queries(), heads(), width(), "grad"),
            {},
            checked_matrix<const A>(grad_logsum, queries(), heads(), "grad_logsum")};
  }
};

void bind_block_attention(Tensor ptr, Tensor node, Tensor lanes, Tensor first, Tensor edge,
                          Tensor query, Tensor key, Tensor value, OptionalTensor table,
                          OptionalTensor bias_index, double scale, Tensor out, Tensor stats) {
  const BlockAttentionArguments given{ptr,   node, lanes, first, edge,
                                      query, key,  value, table, bias_index};
  given.check();
  const Windows windows = given.windows(given.queries());
  dispatch_features(query, "query", [&](auto type) {
    using T = decltype(type);
    block_attention<T>(windows, given.inputs<T>(), scale,
                       checked_heads<T>(out, given.queries(), given.heads(), given.width(), "out"),
                       given.stats<Accumulator<T>>(stats));
  });
}

void bind_block_attention_backward_queries(Tensor ptr, Tensor node, Tensor lanes, Tensor first,
                                           Tensor edge, Tensor query, Tensor key, Tensor value,
                                           OptionalTensor table, OptionalTensor bias_index,
                                           double scale, Tensor stats, Tensor grad,
                                           OptionalTensor grad_logsum, Tensor delta,
                                           Tensor grad_query, OptionalTensor grad_table) {
  const BlockAttentionArguments given{ptr,   node, lanes, first, edge,
                                      query, key,  value, table, bias_index};
  given.check();
  check_gradient_of(table, grad_table, "grad_table", "table");
  const Windows windows = given.windows(given.queries());
  dispatch_features(query, "query", [&](auto type) {
    using T = decltype(type);
    const int64_t queries = given.queries(), heads = given.heads(), width = given.width();
    const auto in = given.inputs<T>();
    block_attention_backward_queries<T>(
        windows, in, scale, given.gradients<T>(stats, grad, grad_logsum),
        checked<Accumulator<T>>(delta, {queries, heads}, "delta"),
        checked_heads<T>(grad_query, queries, heads, width, "grad_query"),
        checked<T>(grad_table, {in.bias.values.rows, heads}, "grad_table"));
  });
}

void bind_block_attention_backward_keys(Tensor ptr, Tensor node, Tensor lanes, Tensor first,
                                        Tensor edge, Tensor query, Tensor key, Tensor value,
                                        OptionalTensor table, OptionalTensor bias_index,
                                        double scale, Tensor stats, Tensor grad, Tensor delta,
                                        Tensor grad_key, Tensor grad_value) {
  const BlockAttentionArguments given{ptr,   node, lanes, first, edge,
                                      query, key,  value, table, bias_index};
  given.check();
  const Windows windows = given.windows(given.keys());
  dispatch_features(query, "query", [&](auto type) {
    using T = decltype(type);
    const int64_t keys = given.keys(), heads = given.heads(), width = given.width();
    block_attention_backward_keys<T>(
        windows, given.inputs<T>(), scale, given.gradients<T>(stats, grad, {}),
        checked<const Accumulator<T>>(delta, {given.queries(), heads}, "delta"),
        checked_heads<T>(grad_key, keys, heads, width, "grad_key"),
        checked_heads<T>(grad_value, keys, heads, width, "grad_value"));
  });
}

}  // namespace
}  // namespace fastgraph

TVM_FFI_DLL_EXPORT_TYPED_FUNC(block_attention, fastgraph::bind_block_attention);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(block_attention_backward_queries,
                              fastgraph::bind_block_attention_backward_queries);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(block_attention_backward_keys,
                              fastgraph::bind_block_attention_backward_keys);
