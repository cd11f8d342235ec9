// Scaled dot-product attention whose keys and values have projected features of edges added to them
// (Shi et al., Masked label prediction, 2021).
//
// <query, W^T edge> is <W query, edge>, and the sum of weighted W^T edge is that of weighted edge,
// times W^T. So nothing is projected for each edge: what is there is attention with the channels of
// edges behind those of nodes, between two small products for each row, and as many times two in
// the backward pass, with one more for the gradient of W. Rows without entries have none of these,
// whatever W is: NaN * 0 is NaN.
#include "cpu/edge_attention.h"

#include <algorithm>
#include <type_traits>

#include "cpu/kernels.h"
#include "fastgraph/chunks.h"
#include "fastgraph/memory.h"
#include "fastgraph/parallel.h"
#include "fastgraph/partial_sums.h"
#include "fastgraph/result.h"

namespace fastgraph {
namespace {

constexpr int64_t kRowsOfTask = 256;
constexpr int64_t kRowsAtOnce = 32;

// Vectors of a tile of sums, and rows of it, all of which stay in registers.
constexpr int kTileVectors = 2;
constexpr int kTileRows = kVectorRegisters >= 32 ? 8 : 4;

// Rows that have entries, and where some channels of a head begin in each.
template <typename T>
struct SomeRows {
  int64_t id[kRowsAtOnce];
  int64_t count = 0;

  struct Channels {
    const T* of[kRowsAtOnce];
  };
  Channels channels(Heads<const T> x, int64_t head, int64_t first = 0) const {
    Channels found;
    for (int64_t i = 0; i < count; ++i) found.of[i] = x.at(id[i], head) + first;
    return found;
  }
};

// Calls tile(number of rows, first row) so that the tiles cover `count` rows once.
template <typename Tile>
FASTGRAPH_INLINE void for_each_tile(int64_t count, const Tile& tile) {
  int64_t i = 0;
  const auto tiles = [&](auto rows) {
    for (; i + decltype(rows)::value <= count; i += decltype(rows)::value) tile(rows, i);
  };
  tiles(std::integral_constant<int, kTileRows>{});
  tiles(std::integral_constant<int, kTileRows / 4>{});
  tiles(std::integral_constant<int, 1>{});
}

// Gives use(lanes, row, first column, vector) the products of rows with a matrix [depth, width].
template <typename T, typename Use>
void multiply_rows(const T* const* x, int64_t count, const Accumulator<T>* matrix, int64_t depth,
                   int64_t width, const Use& use) {
  using A = Accumulator<T>;
  for_each_part<kLanes<T>, kTileVectors>(0, width, [&](auto chunk, int64_t f) {
    using C = decltype(chunk);
    constexpr int N = C::kLanes;
    for_each_tile(count, [&](auto rows, int64_t first) {
      constexpr int kRows = decltype(rows)::value;
      Vector<A, N> sum[kRows][C::kCount] = {};
      const A* own = matrix + f;
      for (int64_t k = 0; k < depth; ++k, own += width) {
        Vector<A, N> factor[C::kCount];
#pragma GCC unroll 4
        for (int q = 0; q < C::kCount; ++q) factor[q] = load<N>(own + q * N);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const auto value = splat<A, N>(load_one(x[first + r] + k));
#pragma GCC unroll 4
          for (int q = 0; q < C::kCount; ++q) {
            sum[r][q] = multiply_add<A, N>(value, factor[q], sum[r][q]);
          }
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int q = 0; q < C::kCount; ++q) {
          use(std::integral_constant<int, N>{}, first + r, f + q * N, sum[r][q]);
        }
      }
    });
  });
}

// Adds the sum of a_i x_i^T over rows to a matrix [depth, width].
template <typename T>
void add_outer_products(const T* const* a, const T* const* x, int64_t count, int64_t depth,
                        int64_t width, Accumulator<T>* matrix) {
  using A = Accumulator<T>;
  for_each_part<kLanes<T>, kTileVectors>(0, width, [&](auto chunk, int64_t f) {
    using C = decltype(chunk);
    constexpr int N = C::kLanes;
    for_each_tile(depth, [&](auto rows, int64_t first) {
      constexpr int kRows = decltype(rows)::value;
      Vector<A, N> sum[kRows][C::kCount];
      A* const own = matrix + first * width + f;
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int q = 0; q < C::kCount; ++q) sum[r][q] = load<N>(own + r * width + q * N);
      }
      for (int64_t i = 0; i < count; ++i) {
        Vector<A, N> other[C::kCount];
#pragma GCC unroll 4
        for (int q = 0; q < C::kCount; ++q) other[q] = load<N>(x[i] + f + q * N);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const auto value = splat<A, N>(load_one(a[i] + first + r));
#pragma GCC unroll 4
          for (int q = 0; q < C::kCount; ++q) {
            sum[r][q] = multiply_add<A, N>(value, other[q], sum[r][q]);
          }
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int q = 0; q < C::kCount; ++q) store<N>(own + r * width + q * N, sum[r][q]);
      }
    });
  });
}

// Products of the rows of a graph that have entries with W, in both directions.
template <typename T>
class RowProjection {
 public:
  using A = Accumulator<T>;

  // weight: [heads, channels of edges, channels].
  RowProjection(const OrderedCsr& graph, Heads<const T> weight)
      : graph_(graph),
        heads_(weight.nodes),
        of_edges_(weight.heads),
        width_(weight.width),
        to_edges_(scratch<A>(heads_ * size())),
        to_nodes_(scratch<A>(heads_ * size())) {
    for (int64_t head = 0; head < heads_; ++head) {
      for (int64_t d = 0; d < of_edges_; ++d) {
        for (int64_t f = 0; f < width_; ++f) {
          const A value = load_one(weight.at(head, d) + f);
          to_edges_[head * size() + f * of_edges_ + d] = value;
          to_nodes_[head * size() + d * width_ + f] = value;
        }
      }
    }
  }

  // out[r] = (x[r], W x[r]).
  void widen(Heads<const T> x, Heads<T> out) const {
    for_some_rows([&](int64_t, const SomeRows<T>& rows, int64_t head) {
      const auto own = rows.channels(x, head);
      T* target[kRowsAtOnce];
      for (int64_t i = 0; i < rows.count; ++i) {
        target[i] = out.at(rows.id[i], head);
        std::copy_n(own.of[i], width_, target[i]);
      }
      multiply_rows<T>(own.of, rows.count, to_edges_.get() + head * size(), width_, of_edges_,
                       [&](auto lanes, int64_t i, int64_t d, auto product) {
                         store<decltype(lanes)::value>(target[i] + width_ + d, product);
                       });
    });
  }

  // out[r] = y + W^T z + its addend, for x[r] = (y, z), and the addend alone without entries.
  void narrow(Heads<const T> x, const SoftmaxOutputs<T>& to) const {
    const Result<T> out(to.out);
    for_some_rows([&](int64_t, const SomeRows<T>& rows, int64_t head) {
      const auto nodes = rows.channels(x, head), edges = rows.channels(x, head, width_);
      multiply_rows<T>(edges.of, rows.count, to_nodes_.get() + head * size(), of_edges_, width_,
                       [&](auto lanes, int64_t i, int64_t f, auto product) {
                         constexpr int N = decltype(lanes)::value;
                         const int64_t row = rows.id[i];
                         const SumRow<T> target(out.row(row, head), to.addend_of(row, head));
                         target.template store<N>(f, load<N>(nodes.of[i] + f) + product);
                       });
    });
    for (int64_t place = 0; place < graph_.num_rows; ++place) {
      if (has_entries(place)) continue;
      const int64_t row = graph_.row(place);
      for (int64_t head = 0; head < heads_; ++head) {
        const SumRow<T> target(out.row(row, head), to.addend_of(row, head));
        for (int64_t f = 0; f < width_; ++f) target.template store<1>(f, Vector<A, 1>{});
      }
    }
    finish_streams();
  }

  // The sum over the rows of z[r] x[r]^T + b[r] y[r]^T, where z are the channels of edges behind
  // those of nodes in `wide`.
  void weight_gradient(Heads<const T> wide, Heads<const T> x, Heads<const T> b, Heads<const T> y,
                       Heads<T> out) const {
    const int64_t of_task = heads_ * size();
    const auto sums = scratch<A>(num_tasks() * of_task);
    std::fill_n(sums.get(), num_tasks() * of_task, A{0});
    for_some_rows([&](int64_t task, const SomeRows<T>& rows, int64_t head) {
      A* const sum = sums.get() + task * of_task + head * size();
      add_outer_products<T>(rows.channels(wide, head, width_).of, rows.channels(x, head).of,
                            rows.count, of_edges_, width_, sum);
      add_outer_products<T>(rows.channels(b, head).of, rows.channels(y, head).of, rows.count,
                            of_edges_, width_, sum);
    });
    sum_slots<T>(sums.get(), num_tasks(), of_task, of_task, out.data);
  }

 private:
  // Of a head's weight.
  int64_t size() const { return of_edges_ * width_; }

  int64_t num_tasks() const { return (graph_.num_rows + kRowsOfTask - 1) / kRowsOfTask; }
  bool has_entries(int64_t place) const { return graph_.rowptr[place] < graph_.rowptr[place + 1]; }

  // Calls body(task, rows, head). The cut into tasks and rows depends on the graph alone.
  template <typename Body>
  void for_some_rows(const Body& body) const {
    const int64_t work = graph_.num_rows * heads_ * (1 + of_edges_) * width_;
    for_each_task(num_tasks(), work, [&](int64_t task) {
      const int64_t end = std::min((task + 1) * kRowsOfTask, graph_.num_rows);
      SomeRows<T> rows;
      const auto finish = [&] {
        for (int64_t head = 0; head < heads_; ++head) body(task, rows, head);
        rows.count = 0;
      };
      for (int64_t place = task * kRowsOfTask; place < end; ++place) {
        if (!has_entries(place)) continue;
        rows.id[rows.count++] = graph_.row(place);
        if (rows.count == kRowsAtOnce) finish();
      }
      if (rows.count > 0) finish();
    });
  }

  const OrderedCsr& graph_;
  int64_t heads_, of_edges_, width_;
  Scratch<A> to_edges_, to_nodes_;  // W of each head, transposed and as it is
};

// Memory for tensors like the queries, with other numbers of channels: one block, which the C
// library mostly keeps for the next call. The system zeroes every page of a new one, which takes
// longer than the products of the rows in it.
template <typename T>
class LikeQueries {
 public:
  LikeQueries(Heads<const T> query, int64_t channels)
      : query_(query), memory_(made(query.nodes * query.heads * channels)), next_(memory_.get()) {}

  Heads<T> take(int64_t width) {
    const Heads<T> taken{next_, query_.nodes, query_.heads, width};
    next_ += query_.nodes * query_.heads * width;
    return taken;
  }

 private:
  static Scratch<T> made(int64_t size) {
    constexpr int64_t kNeverKept = int64_t{1} << 25;
    const bool is_new = size * static_cast<int64_t>(sizeof(T)) >= kNeverKept;
    return is_new ? scratch_in_huge_pages<T>(size) : scratch<T>(size);
  }

  Heads<const T> query_;
  Scratch<T> memory_;
  T* next_;
};

template <typename T>
Heads<const T> constant(Heads<T> x) {
  return {x.data, x.nodes, x.heads, x.width};
}

}  // namespace

template <typename T>
void edge_attention(const OrderedCsr& graph, const EdgeAttentionInputs<T>& in, double scale,
                    Dropout dropout, const SoftmaxOutputs<T>& outputs) {
  if (in.edge.width == 0) return attention<T>(graph, in.without_edges(), scale, dropout, outputs);
  const RowProjection<T> projection(graph, in.weight_edge);
  const int64_t width = in.key.width + in.edge.width;
  LikeQueries<T> memory(in.query, 2 * width);
  const Heads<T> query = memory.take(width), out = memory.take(width);
  projection.widen(in.query, query);
  attention<T>(graph, {constant(query), in.key, in.value, in.edge}, scale, dropout,
               {out, outputs.stats, outputs.alpha, {}});
  projection.narrow(constant(out), outputs);
}

template <typename T>
void edge_attention_backward_dst(const OrderedCsr& graph, const EdgeAttentionInputs<T>& in,
                                 double scale, Dropout dropout, const SoftmaxGradients<T>& given,
                                 Accumulator<T>* between, Heads<T> grad_query,
                                 Matrix<Accumulator<T>> grad_edge, Heads<T> grad_weight_edge) {
  if (in.edge.width == 0) {
    return attention_backward_dst<T>(graph, in.without_edges(), scale, dropout, given, between,
                                     grad_query, {});
  }
  const RowProjection<T> projection(graph, in.weight_edge);
  const bool wants_weight = grad_weight_edge.data != nullptr;
  const int64_t width = in.key.width + in.edge.width;
  LikeQueries<T> memory(in.query, 3 * width + (wants_weight ? in.edge.width : 0));
  const Heads<T> query = memory.take(width), grad = memory.take(width), found = memory.take(width);
  const Heads<T> sums = wants_weight ? memory.take(in.edge.width) : Heads<T>{};
  projection.widen(in.query, query);
  projection.widen(given.grad, grad);
  attention_backward_dst_with_sums<T>(
      graph, {constant(query), in.key, in.value, in.edge}, scale, dropout,
      {given.stats, constant(grad), given.grad_alpha, given.grad_logsum}, between, found, grad_edge,
      sums);
  projection.narrow(constant(found), {grad_query, {}, {}, {}});
  if (!wants_weight) return;
  projection.weight_gradient(constant(found), in.query, constant(sums), given.grad,
                             grad_weight_edge);
}

template <typename T>
void edge_attention_backward_src(const OrderedCsr& transpose, const EdgeAttentionInputs<T>& in,
                                 double scale, Dropout dropout, const SoftmaxGradients<T>& given,
                                 const Accumulator<T>* between, Heads<T> grad_key,
                                 Heads<T> grad_value) {
  attention_backward_src<T>(transpose, in.without_edges(), scale, dropout, given, between, grad_key,
                            grad_value);
}

FASTGRAPH_INSTANTIATE(edge_attention)
FASTGRAPH_INSTANTIATE(edge_attention_backward_dst)
FASTGRAPH_INSTANTIATE(edge_attention_backward_src)

}  // namespace fastgraph
