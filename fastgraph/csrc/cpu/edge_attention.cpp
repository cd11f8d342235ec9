// Scaled dot-product attention whose keys and values have projected features of edges added to them
// (Shi et al., Masked label prediction, 2021).
//
// <query, W^T edge> is <W query, edge>, and the sum of weighted W^T edge is that of weighted edge,
// times W^T. So nothing is projected for each edge: what is there is attention with the channels of
// edges behind those of nodes, between two small products for each row, and as many times two in
// the backward pass, with one more for the gradient of W. Rows without entries have none of these,
// whatever W is: NaN * 0 is NaN.
//
// Some rows at a time are taken through all of that, so that what stands between the products stays
// in the caches of a core: of all rows it would be several times as much as the queries.
#include "cpu/edge_attention.h"

#include <algorithm>
#include <type_traits>

#include "cpu/edge_attention_batch.h"
#include "cpu/kernels.h"
#include "fastgraph/chunks.h"
#include "fastgraph/memory.h"
#include "fastgraph/parallel.h"
#include "fastgraph/partial_sums.h"
#include "fastgraph/result.h"

namespace fastgraph {
namespace {

constexpr int64_t kRowsAtOnce = 32;

// Vectors of a tile of sums, and rows of it, all of which stay in registers.
constexpr int kTileVectors = 2;
constexpr int kTileRows = kVectorRegisters >= 32 ? 8 : 4;

// Consecutive places of a graph as a graph of their own, whose row r is that at place first + r.
class RowGroup {
 public:
  RowGroup(const OrderedCsr& graph, int64_t first, int64_t count)
      : graph_(graph), first_(first), count_(count) {
    for (int64_t r = 0; r < count; ++r) {
      if (graph.rowptr[first + r] < graph.rowptr[first + r + 1]) some_[num_some_++] = r;
    }
  }

  int64_t count() const { return count_; }
  int64_t row(int64_t r) const { return graph_.row(first_ + r); }
  bool has_entries(int64_t r) const {
    return graph_.rowptr[first_ + r] < graph_.rowptr[first_ + r + 1];
  }

  // Those that have entries.
  int64_t num_some() const { return num_some_; }
  int64_t some(int64_t i) const { return some_[i]; }

  OrderedCsr rows() const {
    OrderedCsr own = graph_;
    own.rowptr += first_;
    own.num_rows = count_;
    own.row_id = nullptr;
    return own;
  }
  Schedule schedule() const {
    const int64_t* rowptr = graph_.rowptr + first_;
    return {{{0, count_, rowptr[0], rowptr[count_], -1}}, {}, 0};
  }

  // Asks for what a row some places behind row r has in x, of this group or the next one.
  template <typename T>
  void expect_after(int64_t r, const Heads<const T>& x) const {
    constexpr int64_t kRowsAhead = 8;
    const int64_t place = first_ + r + kRowsAhead;
    if (place < graph_.num_rows) prefetch_node(x, graph_.row(place));
  }

 private:
  const OrderedCsr& graph_;
  int64_t first_, count_, num_some_ = 0;
  int64_t some_[kRowsAtOnce];
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
// Row i is behind x[i] by `offset`.
template <typename T, typename Use>
void multiply_rows(const T* const* x, int64_t offset, int64_t count, const Accumulator<T>* matrix,
                   int64_t depth, int64_t width, const Use& use) {
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
          const auto value = splat<A, N>(load_one(x[first + r] + offset + k));
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

// Products of the rows of a group that have entries with W, in both directions.
template <typename T>
class RowProjection {
 public:
  using A = Accumulator<T>;

  // weight: [heads, channels of edges, channels].
  explicit RowProjection(Heads<const T> weight)
      : heads_(weight.nodes),
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

  // out[r] = (x[row of r], W x[row of r], zeros up to a whole vector).
  void widen(const RowGroup& group, Heads<const T> x, Heads<T> out) const {
    constexpr int kLane = kLanes<T>;
    const T* from[kRowsAtOnce];
    T* to[kRowsAtOnce];
    for (int64_t i = 0; i < group.num_some(); ++i) {
      const int64_t r = group.some(i);
      group.expect_after(r, x);
      from[i] = x.at(group.row(r), 0);
      to[i] = out.at(r, 0);
      for (int64_t head = 0; head < heads_; ++head) {
        for_each_chunk<kLane, 1>(0, width_, [&](auto chunk, int64_t f) {
          using C = decltype(chunk);
          for (int q = 0; q < C::kCount; ++q, f += C::kLanes) {
            store<C::kLanes>(to[i] + head * out.width + f,
                             load<C::kLanes>(from[i] + head * width_ + f));
          }
        });
        if (of_edges_ % kLane == 0) continue;
        store<kLane>(to[i] + (head + 1) * out.width - kLane, Vector<A, kLane>{});
      }
    }
    for (int64_t head = 0; head < heads_; ++head) {
      const int64_t target = head * out.width + width_;
      multiply_rows<T>(from, head * width_, group.num_some(), to_edges_.get() + head * size(),
                       width_, of_edges_, [&](auto lanes, int64_t i, int64_t d, auto product) {
                         store<decltype(lanes)::value>(to[i] + target + d, product);
                       });
    }
  }

  // out[row of r] = y + W^T z + its addend, for x[r] = (y, z), and the addend alone without
  // entries.
  void narrow(const RowGroup& group, Heads<const T> x, const Result<T>& out,
              const SoftmaxOutputs<T>& to) const {
    const T* from[kRowsAtOnce];
    int64_t row[kRowsAtOnce];
    for (int64_t i = 0; i < group.num_some(); ++i) {
      from[i] = x.at(group.some(i), 0);
      row[i] = group.row(group.some(i));
    }
    for (int64_t head = 0; head < heads_; ++head) {
      const int64_t nodes = head * x.width;
      multiply_rows<T>(from, nodes + width_, group.num_some(), to_nodes_.get() + head * size(),
                       of_edges_, width_, [&](auto lanes, int64_t i, int64_t f, auto product) {
                         constexpr int N = decltype(lanes)::value;
                         const SumRow<T> target(out.row(row[i], head), to.addend_of(row[i], head));
                         target.template store<N>(f, load<N>(from[i] + nodes + f) + product);
                       });
    }
    for (int64_t r = 0; r < group.count() && group.num_some() < group.count(); ++r) {
      if (group.has_entries(r)) continue;
      for (int64_t head = 0; head < heads_; ++head) {
        const SumRow<T> target(out.row(group.row(r), head), to.addend_of(group.row(r), head));
        for (int64_t f = 0; f < width_; ++f) target.template store<1>(f, Vector<A, 1>{});
      }
    }
  }

  // Adds the sum over the rows of z[r] x[row of r]^T + b[r] y[row of r]^T to sums [heads, channels
  // of edges, channels], where z are the channels of edges behind those of nodes in `wide`.
  void add_weight_gradient(const RowGroup& group, Heads<const T> wide, Heads<const T> x,
                           Heads<const T> b, Heads<const T> y, A* sums) const {
    const T* left[2 * kRowsAtOnce];
    const T* right[2 * kRowsAtOnce];
    for (int64_t head = 0; head < heads_; ++head, sums += size()) {
      int64_t count = 0;
      for (int64_t i = 0; i < group.num_some(); ++i) {
        const int64_t r = group.some(i);
        left[count] = wide.at(r, head) + width_;
        right[count++] = x.at(group.row(r), head);
        left[count] = b.at(r, head);
        right[count++] = y.at(group.row(r), head);
      }
      add_outer_products<T>(left, right, count, of_edges_, width_, sums);
    }
  }

  // Of the weight of all heads.
  int64_t weight_size() const { return heads_ * size(); }

 private:
  // Of a head's weight.
  int64_t size() const { return of_edges_ * width_; }

  int64_t heads_, of_edges_, width_;
  Scratch<A> to_edges_, to_nodes_;  // W of each head, transposed and as it is
};

// Memory for numbers of each row and head of a group, which every group of a task takes anew.
template <typename T>
class GroupMemory {
 public:
  GroupMemory(int64_t heads, int64_t numbers)
      : heads_(heads), memory_(scratch<T>(kRowsAtOnce * heads * numbers)), next_(memory_.get()) {}

  Heads<T> take(int64_t width) {
    const Heads<T> taken{next_, kRowsAtOnce, heads_, width};
    next_ += kRowsAtOnce * heads_ * width;
    return taken;
  }

 private:
  int64_t heads_;
  Scratch<T> memory_;
  T* next_;
};

template <typename T>
Heads<const T> constant(Heads<T> x) {
  return {x.data, x.nodes, x.heads, x.width};
}

// Copies `width` numbers of each row of a group from those of all rows.
template <typename A>
void copy_rows(const RowGroup& group, const A* all, int64_t width, A* own) {
  for (int64_t r = 0; r < group.count(); ++r) {
    std::copy_n(all + group.row(r) * width, width, own + r * width);
  }
}

// Calls run(memory, group, its schedule, slot) so that groups cover the rows of a graph, with
// memory made by make() for each task; calls of the same slot do not overlap. The cut depends on
// the graph alone. A row that is cut is a group, of whose pieces threads have several.
template <typename Make, typename Run>
void for_each_group(const OrderedCsr& graph, const Schedule& schedule, int64_t work,
                    const Make& make, const Run& run) {
  const int64_t num_tasks = static_cast<int64_t>(schedule.tasks.size());
  for_each_task(num_tasks, work, [&](int64_t t) {
    const Task& task = schedule.tasks[t];
    if (!task.whole()) return;
    auto memory = make();
    for (int64_t place = task.place_begin; place < task.place_end; place += kRowsAtOnce) {
      const RowGroup group(graph, place, std::min(kRowsAtOnce, task.place_end - place));
      run(memory, group, group.schedule(), t);
    }
  });
  if (schedule.cut_rows.empty()) return;
  auto memory = make();
  for (int64_t t = 0; t < num_tasks; ++t) {
    const Task& task = schedule.tasks[t];
    if (task.whole() || task.entry_begin != graph.rowptr[task.place_begin]) continue;
    const RowGroup group(graph, task.place_begin, 1);
    run(memory, group, make_schedule(group.rows()), t);
  }
}

template <typename T>
int64_t elementary_operations(const OrderedCsr& graph, const EdgeAttentionInputs<T>& in) {
  const int64_t channels = in.key.width + in.edge.width;
  return (graph.num_entries + graph.num_rows * in.edge.width) * in.key.heads * (channels + 1);
}

template <typename T>
struct Forward {
  using A = Accumulator<T>;

  const EdgeAttentionInputs<T>& in;
  const RowProjection<T>& projection;
  A scale;
  Dropout dropout;
  const SoftmaxOutputs<T>& outputs;
  Result<T> out{outputs.out};

  struct Memory {
    GroupMemory<T> rows;
    GroupMemory<A> softmax;
    Heads<T> query, out;
    A* stats;
  };
  Memory memory() const {
    const int64_t heads = in.query.heads;
    const int64_t width = in.key.width + whole_vectors<T>(in.edge.width);
    Memory made{{heads, 2 * width}, {heads, 2}, {}, {}, nullptr};
    made.query = made.rows.take(width);
    made.out = made.rows.take(width);
    made.stats = made.softmax.take(2).data;
    return made;
  }

  void run(const Memory& own, const RowGroup& group, const Schedule& schedule) const {
    const int64_t heads = in.query.heads;
    projection.widen(group, in.query, own.query);
    const AttentionInputs<T> wide{constant(own.query), in.key, in.value, in.edge};
    const NoBias<T> none;
    const EdgeSoftmax<T> pass{{{wide, none, scale},
                               NodeRows<T>(in.value),
                               EdgeRows<T>(in.edge),
                               dropout,
                               {own.out, {own.stats, heads}, outputs.alpha, {}}}};
    const OrderedCsr rows = group.rows();
    run_pass<A>(rows, schedule, heads, 2 * own.query.width, pass);
    if (outputs.alpha.data != nullptr) {
      run_pass<A>(rows, schedule, heads, 2 * own.query.width,
                  Weights<T, Scores<T, NoBias<T>>>{{0}, pass});
    }
    projection.narrow(group, constant(own.out), out, outputs);
    for (int64_t r = 0; r < group.count(); ++r) {
      std::copy_n(own.stats + r * 2 * heads, 2 * heads, outputs.stats.at(group.row(r), 0));
    }
  }
};

template <typename T>
struct Backward {
  using A = Accumulator<T>;

  const EdgeAttentionInputs<T>& in;
  const RowProjection<T>& projection;
  A scale;
  Dropout dropout;
  const SoftmaxGradients<T>& given;
  A* between;
  Matrix<A> grad_edge;
  Heads<T> grad_query;
  A* weight_sums;  // [slots, size of the weight], or null
  Result<T> out{grad_query};

  struct Memory {
    GroupMemory<T> rows;
    GroupMemory<A> softmax;
    Heads<T> query, grad, found, sums;
    A *stats, *delta, *grad_logsum;
  };
  Memory memory() const {
    const int64_t heads = in.query.heads, of_edges = whole_vectors<T>(in.edge.width);
    const int64_t width = in.key.width + of_edges;
    Memory made{
        {heads, 3 * width + of_edges}, {heads, 4}, {}, {}, {}, {}, nullptr, nullptr, nullptr};
    made.query = made.rows.take(width);
    made.grad = made.rows.take(width);
    made.found = made.rows.take(width);
    made.sums = made.rows.take(of_edges);
    made.stats = made.softmax.take(2).data;
    made.delta = made.softmax.take(1).data;
    made.grad_logsum = made.softmax.take(1).data;
    return made;
  }

  void run(const Memory& own, const RowGroup& group, const Schedule& schedule, int64_t slot) const {
    const int64_t heads = in.query.heads;
    projection.widen(group, in.query, own.query);
    projection.widen(group, given.grad, own.grad);
    copy_rows<A>(group, given.stats.data, 2 * heads, own.stats);
    Matrix<const A> grad_logsum{};
    if (given.grad_logsum.data != nullptr) {
      copy_rows<A>(group, given.grad_logsum.data, heads, own.grad_logsum);
      grad_logsum = {own.grad_logsum, group.count(), heads};
    }
    const bool wants_weight = weight_sums != nullptr;
    const Heads<T> sums = wants_weight ? own.sums : Heads<T>{};
    const NoBias<T> none;
    const AttentionInputs<T> wide{constant(own.query), in.key, in.value, in.edge};
    const SoftmaxGradients<T> gradients{
        {own.stats, heads}, constant(own.grad), given.grad_alpha, grad_logsum};
    EdgeBackwardDst<T> pass{
        {{{own.query.width + sums.width}, gradients, between, dropout, own.delta},
         wide,
         none,
         scale,
         Result<T>(own.found),
         grad_edge,
         Result<T>(sums),
         wants_weight},
        own.found,
        sums};
    const OrderedCsr rows = group.rows();
    if (!schedule.cut_rows.empty()) {
      find_delta_of_cut_rows<T>(rows, schedule, heads, 2 * own.query.width, pass);
    }
    run_pass<A>(rows, schedule, heads, 2 * own.query.width, pass);
    projection.narrow(group, constant(own.found), out, {grad_query, {}, {}, {}});
    if (wants_weight) {
      projection.add_weight_gradient(group, constant(own.found), in.query, constant(own.sums),
                                     given.grad, weight_sums + slot * projection.weight_size());
    }
  }
};

}  // namespace

template <typename T>
void edge_attention(const OrderedCsr& graph, const EdgeAttentionInputs<T>& in, double scale,
                    Dropout dropout, const SoftmaxOutputs<T>& outputs) {
  if (in.edge.width == 0) return attention<T>(graph, in.without_edges(), scale, dropout, outputs);
  const RowProjection<T> projection(in.weight_edge);
  const Forward<T> forward{in, projection, static_cast<Accumulator<T>>(scale), dropout, outputs};
  for_each_group(
      graph, make_schedule(graph), elementary_operations(graph, in),
      [&] { return forward.memory(); },
      [&](const auto& memory, const RowGroup& group, const Schedule& schedule, int64_t) {
        forward.run(memory, group, schedule);
      });
}

template <typename T>
void edge_attention_backward_dst(const OrderedCsr& graph, const EdgeAttentionInputs<T>& in,
                                 double scale, Dropout dropout, const SoftmaxGradients<T>& given,
                                 Accumulator<T>* between, Heads<T> grad_query,
                                 Matrix<Accumulator<T>> grad_edge, Heads<T> grad_weight_edge) {
  using A = Accumulator<T>;
  if (in.edge.width == 0) {
    return attention_backward_dst<T>(graph, in.without_edges(), scale, dropout, given, between,
                                     grad_query, {});
  }
  if (in.query.heads == 0 && grad_edge.data != nullptr) {
    std::fill_n(grad_edge.data, grad_edge.rows * grad_edge.width, A{0});
  }
  const RowProjection<T> projection(in.weight_edge);
  const Schedule schedule = make_schedule(graph);
  const bool wants_weight = grad_weight_edge.data != nullptr;
  const int64_t slots = static_cast<int64_t>(schedule.tasks.size());
  const int64_t of_slot = wants_weight ? projection.weight_size() : 0;
  const auto sums = scratch<A>(slots * of_slot);
  std::fill_n(sums.get(), slots * of_slot, A{0});
  const Backward<T> backward{in,        projection, static_cast<A>(scale),
                             dropout,   given,      between,
                             grad_edge, grad_query, wants_weight ? sums.get() : nullptr};
  for_each_group(
      graph, schedule, 2 * elementary_operations(graph, in), [&] { return backward.memory(); },
      [&](const auto& memory, const RowGroup& group, const Schedule& own, int64_t slot) {
        backward.run(memory, group, own, slot);
      });
  if (wants_weight) sum_slots<T>(sums.get(), slots, of_slot, of_slot, grad_weight_edge.data);
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
