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

#include "cpu/block_products.h"
#include "cpu/kernels.h"
#include "fastgraph/memory.h"
#include "fastgraph/parallel.h"
#include "fastgraph/partial_sums.h"
#include "fastgraph/result.h"

namespace fastgraph {
namespace {

constexpr int64_t kRowsOfTask = 256;
constexpr int64_t kRowsAtOnce = 32;

// Some channels of a tensor of nodes.
template <typename T>
struct Channels {
  Heads<const T> x;
  int64_t first;
  int64_t width;

  const T* at(int64_t node, int64_t head) const { return x.at(node, head) + first; }
};

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
        to_edges_(scratch<A>(heads_ * width_ * padded<A>(of_edges_))),
        to_nodes_(scratch<A>(heads_ * of_edges_ * padded<A>(width_))) {
    for (int64_t head = 0; head < heads_; ++head) {
      const T* own = weight.at(head, 0);
      copy_rows(own, width_, of_edges_, width_, A{1}, to_nodes(head));
      copy_transposed(own, width_, of_edges_, width_, to_edges(head));
    }
  }

  // out[r] = (x[r], W x[r]).
  void widen(Heads<const T> x, Heads<T> out) const {
    for_some_rows([&](int64_t, const Rows& rows, int64_t head, A* memory) {
      const Block<A> own = gather(rows, {x, 0, width_}, head, &memory);
      const Block<A> found = block(&memory, of_edges_);
      multiply<false>(rows.count, found.row, width_, LeftFactor<A>{own.data, own.row, 1},
                      constant(to_edges(head)), found);
      for (int64_t i = 0; i < rows.count; ++i) {
        T* target = out.at(rows.id[i], head);
        std::copy_n(x.at(rows.id[i], head), width_, target);
        for_each_part<kLanes<T>, 1>(0, of_edges_, [&](auto chunk, int64_t d) {
          constexpr int N = decltype(chunk)::kLanes;
          store<N>(target + width_ + d, load<N>(found.data + i * found.row + d));
        });
      }
    });
  }

  // out[r] = y + W^T z + its addend, for x[r] = (y, z), and the addend alone without entries.
  void narrow(Heads<const T> x, const SoftmaxOutputs<T>& to) const {
    const Result<T> out(to.out);
    for_some_rows([&](int64_t, const Rows& rows, int64_t head, A* memory) {
      const Block<A> own = gather(rows, {x, width_, of_edges_}, head, &memory);
      const Block<A> found = block(&memory, width_);
      multiply<false>(rows.count, found.row, of_edges_, LeftFactor<A>{own.data, own.row, 1},
                      constant(to_nodes(head)), found);
      for (int64_t i = 0; i < rows.count; ++i) {
        const int64_t row = rows.id[i];
        const SumRow<T> target(out.row(row, head), to.addend_of(row, head));
        for_each_part<kLanes<T>, 1>(0, width_, [&](auto chunk, int64_t f) {
          constexpr int N = decltype(chunk)::kLanes;
          target.template store<N>(
              f, load<N>(x.at(row, head) + f) + load<N>(found.data + i * found.row + f));
        });
      }
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

  // The sum over the rows of a[r] x[r]^T + b[r] y[r]^T, where a and b have the channels of edges.
  void weight_gradient(Channels<T> a, Heads<const T> x, Heads<const T> b, Heads<const T> y,
                       Heads<T> out) const {
    const int64_t stride = padded<A>(width_), size = heads_ * of_edges_ * stride;
    const auto sums = scratch<A>(num_tasks() * size);
    std::fill_n(sums.get(), num_tasks() * size, A{0});
    for_some_rows([&](int64_t task, const Rows& rows, int64_t head, A* memory) {
      const Block<A> sum{sums.get() + task * size + head * of_edges_ * stride, stride};
      add_outer_products(rows, head, a, {x, 0, width_}, memory, sum);
      add_outer_products(rows, head, {b, 0, of_edges_}, {y, 0, width_}, memory, sum);
    });
    for (int64_t head = 0; head < heads_; ++head) {
      for (int64_t d = 0; d < of_edges_; ++d) {
        const A* own = sums.get() + (head * of_edges_ + d) * stride;
        sum_slots<T>(own, num_tasks(), size, width_, out.at(head, d));
      }
    }
  }

 private:
  struct Rows {
    int64_t id[kRowsAtOnce];
    int64_t count = 0;
  };

  int64_t num_tasks() const { return (graph_.num_rows + kRowsOfTask - 1) / kRowsOfTask; }
  bool has_entries(int64_t place) const { return graph_.rowptr[place] < graph_.rowptr[place + 1]; }

  Block<A> to_edges(int64_t head) const {
    const int64_t row = padded<A>(of_edges_);
    return {to_edges_.get() + head * width_ * row, row};
  }
  Block<A> to_nodes(int64_t head) const {
    const int64_t row = padded<A>(width_);
    return {to_nodes_.get() + head * of_edges_ * row, row};
  }
  static Block<const A> constant(Block<A> block) { return {block.data, block.row}; }

  // Calls body(task, rows, head, memory for two blocks of these rows). The cut into tasks and rows
  // depends on the graph alone.
  template <typename Body>
  void for_some_rows(const Body& body) const {
    const int64_t work = graph_.num_rows * heads_ * (1 + of_edges_) * width_;
    const int64_t size = kRowsAtOnce * (padded<A>(of_edges_) + padded<A>(width_));
    for_each_task(num_tasks(), work, [&](int64_t task) {
      TaskScratch<A, kRowsAtOnce * 64> memory(size);
      const int64_t end = std::min((task + 1) * kRowsOfTask, graph_.num_rows);
      Rows rows;
      const auto finish = [&] {
        for (int64_t head = 0; head < heads_; ++head) body(task, rows, head, memory.get());
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

  // Takes memory for a block of rows of so many channels.
  static Block<A> block(A** memory, int64_t width) {
    const Block<A> found{*memory, padded<A>(width)};
    *memory += kRowsAtOnce * found.row;
    return found;
  }

  static Block<A> gather(const Rows& rows, Channels<T> x, int64_t head, A** memory) {
    const Block<A> found = block(memory, x.width);
    for (int64_t i = 0; i < rows.count; ++i) {
      copy_rows(x.at(rows.id[i], head), 0, 1, x.width, A{1},
                Block<A>{found.data + i * found.row, found.row});
    }
    return found;
  }

  static void add_outer_products(const Rows& rows, int64_t head, Channels<T> a, Channels<T> x,
                                 A* memory, Block<A> sum) {
    const Block<A> left = gather(rows, a, head, &memory), right = gather(rows, x, head, &memory);
    multiply<true>(a.width, right.row, rows.count, LeftFactor<A>{left.data, 1, left.row},
                   constant(right), sum);
  }

  const OrderedCsr& graph_;
  int64_t heads_, of_edges_, width_;
  Scratch<A> to_edges_, to_nodes_;
};

// Memory for a tensor like the queries with so many channels.
template <typename T>
class LikeQueries {
 public:
  LikeQueries(Heads<const T> query, int64_t width)
      : memory_(scratch<T>(query.nodes * query.heads * width)),
        heads_{memory_.get(), query.nodes, query.heads, width} {}

  Heads<T> get() const { return heads_; }
  Heads<const T> values() const { return {heads_.data, heads_.nodes, heads_.heads, heads_.width}; }

 private:
  Scratch<T> memory_;
  Heads<T> heads_;
};

}  // namespace

template <typename T>
void edge_attention(const OrderedCsr& graph, const EdgeAttentionInputs<T>& in, double scale,
                    Dropout dropout, const SoftmaxOutputs<T>& outputs) {
  if (in.edge.width == 0) return attention<T>(graph, in.without_edges(), scale, dropout, outputs);
  const RowProjection<T> projection(graph, in.weight_edge);
  const int64_t width = in.key.width + in.edge.width;
  const LikeQueries<T> query(in.query, width), out(in.query, width);
  projection.widen(in.query, query.get());
  attention<T>(graph, {query.values(), in.key, in.value, in.edge}, scale, dropout,
               {out.get(), outputs.stats, outputs.alpha, {}});
  projection.narrow(out.values(), outputs);
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
  const int64_t first = in.key.width, channels = in.edge.width;
  const bool wants_weight = grad_weight_edge.data != nullptr;
  const LikeQueries<T> query(in.query, first + channels), grad(in.query, first + channels);
  const LikeQueries<T> found(in.query, first + channels);
  const LikeQueries<T> sums(in.query, wants_weight ? channels : 0);
  projection.widen(in.query, query.get());
  projection.widen(given.grad, grad.get());
  attention_backward_dst_with_sums<T>(
      graph, {query.values(), in.key, in.value, in.edge}, scale, dropout,
      {given.stats, grad.values(), given.grad_alpha, given.grad_logsum}, between, found.get(),
      grad_edge, wants_weight ? sums.get() : Heads<T>{});
  projection.narrow(found.values(), {grad_query, {}, {}, {}});
  if (!wants_weight) return;
  projection.weight_gradient({found.values(), first, channels}, in.query, sums.values(), given.grad,
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
