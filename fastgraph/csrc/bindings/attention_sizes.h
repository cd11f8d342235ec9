// What the functions of attention operators check alike.
#pragma once

#include "bindings/checks.h"
#include "fastgraph/attention_arguments.h"

namespace fastgraph {

// Sizes of an attention operator, and the checks of what its functions share: `rows` aggregate and
// `cols` are gathered, whichever of them the graph at hand is compressed by.
struct AttentionSizes {
  int64_t rows, cols, heads, width, edges;
  int64_t edge_width = 0;  // channels of edges that follow the others in outputs

  Rows by_row(const Tensor& rowptr, const Tensor& col, const OptionalTensor& edge_id,
              int64_t num_cut, const OptionalTensor& order) const {
    check_shape(rowptr, {rows + 1}, "rowptr");
    return checked_csr(rowptr, col, edge_id, num_cut, order, cols, kByRow);
  }
  Rows by_col(const Tensor& rowptr, const Tensor& col, const OptionalTensor& edge_id,
              int64_t num_cut, const OptionalTensor& order) const {
    check_shape(rowptr, {cols + 1}, "rowptr_t");
    return checked_csr(rowptr, col, edge_id, num_cut, order, rows, kByCol);
  }
  template <typename T>
  Heads<T> of_rows(const Tensor& tensor, const char* name) const {
    return checked_heads<T>(tensor, rows, heads, width, name);
  }
  template <typename T>
  Heads<T> of_cols(const Tensor& tensor, const char* name) const {
    return checked_heads<T>(tensor, cols, heads, width, name);
  }
  // Of rows, with the channels of the edges behind the others.
  template <typename T>
  Heads<T> extended_rows(const Tensor& tensor, const char* name) const {
    return checked_heads<T>(tensor, rows, heads, width + edge_width, name);
  }
  template <typename T>
  Matrix<T> row_scores(const Tensor& tensor, const char* name) const {
    return checked_matrix<T>(tensor, rows, heads, name);
  }
  template <typename T>
  Matrix<T> col_scores(const Tensor& tensor, const char* name) const {
    return checked_matrix<T>(tensor, cols, heads, name);
  }
  template <typename T>
  Matrix<T> edge_scores(const OptionalTensor& tensor, const char* name) const {
    return checked_matrix<T>(tensor, edges, heads, name);
  }
  template <typename T>
  Matrix<T> of_edges(const OptionalTensor& tensor, const char* name) const {
    return checked_matrix<T>(tensor, edges, edge_width, name);
  }
  template <typename A>
  SoftmaxStats<A> stats(const Tensor& tensor) const {
    return {checked<A>(tensor, {rows, heads, 2}, "stats"), heads};
  }
  template <typename T>
  SoftmaxOutputs<T> outputs(const Tensor& out, const Tensor& statistics,
                            const OptionalTensor& alpha, const OptionalTensor& addend) const {
    return {extended_rows<T>(out, "out"), stats<Accumulator<T>>(statistics),
            edge_scores<T>(alpha, "alpha"), to_each_row<const T>(addend, "addend")};
  }
  // Like the output, or one node's for all rows.
  template <typename T>
  Heads<T> to_each_row(const OptionalTensor& tensor, const char* name) const {
    if (!tensor.has_value()) return {};
    check_ndim(tensor.value(), 3, name);
    const int64_t nodes = tensor.value().size(0) == 1 ? 1 : rows;
    return checked_heads<T>(tensor.value(), nodes, heads, width + edge_width, name);
  }
  template <typename T>
  SoftmaxGradients<T> gradients(const Tensor& statistics, const Tensor& grad,
                                const OptionalTensor& grad_alpha,
                                const OptionalTensor& grad_logsum) const {
    return {stats<const Accumulator<T>>(statistics), extended_rows<const T>(grad, "grad"),
            edge_scores<const T>(grad_alpha, "grad_alpha"),
            checked_matrix<const Accumulator<T>>(grad_logsum, rows, heads, "grad_logsum")};
  }
  // What the pass over destinations leaves for the one over sources: two numbers for each edge and
  // head, and so many more.
  template <typename A>
  A* between_passes(const Tensor& tensor, int64_t more = 0) const {
    return checked<A>(tensor, {edges, heads, 2 + more}, "between");
  }
  // Numbers that hold a bit for each channel, where edges have features.
  template <typename A>
  int64_t of_signs(int64_t edge_channels) const {
    constexpr int64_t kBits = 8 * sizeof(A);
    return edge_channels > 0 ? (width + kBits - 1) / kBits : 0;
  }
};

inline AttentionSizes attention_sizes(const Tensor& gathered, const char* name, int64_t rows,
                                      const Tensor& col, const char* col_name) {
  check_ndim(gathered, 3, name);
  check_ndim(col, 1, col_name);
  return {rows, gathered.size(0), gathered.size(1), gathered.size(2), col.size(0)};
}

// The number of channels that edges carry, 0 for none.
inline int64_t edge_width(const OptionalTensor& edge) {
  if (!edge.has_value()) return 0;
  check_ndim(edge.value(), 2, "edge");
  return edge.value().size(1);
}

inline void check_given_together(const OptionalTensor& a, const char* a_name,
                                 const OptionalTensor& b, const char* b_name) {
  if (a.has_value() != b.has_value()) {
    TVM_FFI_THROW(ValueError) << "expected both or neither of " << a_name << " and " << b_name
                              << ", got " << (a.has_value() ? a_name : b_name) << " alone";
  }
}

// A gradient may be left out that nobody wants, but is not one of nothing.
inline void check_gradient_of(const OptionalTensor& tensor, const OptionalTensor& grad,
                              const char* name, const char* of = "edge") {
  if (grad.has_value() && !tensor.has_value()) {
    TVM_FFI_THROW(ValueError) << "expected " << of << " with " << name << ", got " << name
                              << " alone";
  }
}

// Inputs of attention as they came.
struct AttentionArguments {
  const Tensor &query, &key, &value;
  const OptionalTensor& edge;

  AttentionSizes sizes(const Tensor& col, const char* col_name) const {
    check_ndim(query, 3, "query");
    AttentionSizes sizes = attention_sizes(key, "key", query.size(0), col, col_name);
    sizes.edge_width = edge_width(edge);
    return sizes;
  }
  template <typename T>
  AttentionInputs<T> checked_for(const AttentionSizes& sizes) const {
    return {sizes.extended_rows<const T>(query, "query"), sizes.of_cols<const T>(key, "key"),
            sizes.of_cols<const T>(value, "value"), sizes.of_edges<const T>(edge, "edge")};
  }
};

}  // namespace fastgraph
