// GAT head by head, for rows of many entries. What a head gathers is a panel, which a core's own
// cache holds, and the scores of its nodes, which the first cache holds. The weights of a whole row
// are computed, in whole vectors, before anything is added up.
//
// The score of an entry is a sum z_ij of two numbers of nodes behind a LeakyReLU, which has two
// slopes s_ij. With weights a, factors k of dropout, y the output and g its gradient, the gradient
// of z_ij is a_ij s_ij (k_ij <g_i, x_j> - delta_i), where delta_i is <g_i, y_i> less the gradient
// of the logarithm of the sum of exponentials. Nobody asks for it, but for its sums:
//
//   over the row     <g_i, sum_j a_ij s_ij k_ij x_j>  -  delta_i sum_j a_ij s_ij
//   over the column  <x_j, sum_i a_ij s_ij k_ij g_i>  -  sum_i a_ij s_ij delta_i
//
// So no product of two rows of features is taken for an entry: what is gathered is added up twice,
// with other weights. The sum over the row is taken by the entries where z is positive alone, whose
// part of y is y+ and of the weights is w+: (1 - s) <g_i, y+ - w+ y>, in which both parts cancel
// before the product is taken where all z of the row have the same sign, or one entry has all the
// weight. In the sum over the column they cancel but for a rounding of <x_j, g_i>.
#include "cpu/gat_panels.h"

#include <algorithm>
#include <limits>

#include "cpu/kernels.h"
#include "fastgraph/chunks.h"
#include "fastgraph/dropout.h"
#include "fastgraph/edge_blocks.h"
#include "fastgraph/edge_softmax.h"
#include "fastgraph/memory.h"
#include "fastgraph/result.h"
#include "fastgraph/schedule.h"

namespace fastgraph {
namespace {

// Some channels of one head.
template <typename T>
struct HeadPanel {
  Matrix<const T> x;
  int64_t head;
  int64_t first;  // channel of the head

  int64_t width() const { return x.width; }
};

template <typename T>
Matrix<const T> as_matrix(const Heads<const T>& x) {
  return {x.data, x.nodes, x.heads * x.width};
}

// The numbers of one head, one after the other.
template <typename T>
void load_column(const Matrix<const T>& from, int64_t head, Accumulator<T>* to) {
  for (int64_t node = 0; node < from.rows; ++node) to[node] = load_one(from.row(node) + head);
}

// What the entries of a row have, in whole blocks: arrays, one behind the other.
template <typename A>
struct RowBuffer {
  A* data;
  int64_t size;  // of an array

  RowBuffer(const RowEntries& entries, A* memory)
      : data(memory), size((entries.end - entries.begin + kBlock - 1) / kBlock * kBlock) {}

  A* operator[](int number) const { return data + number * size; }
};

// Calls body(block, place in the arrays) for the blocks of a row, which `head` sees.
template <typename Body>
FASTGRAPH_INLINE void for_each_block(const RowEntries& entries, int64_t head, const Body& body) {
  for (int64_t place = 0, e = entries.begin; e < entries.end; e += kBlock, place += kBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kBlock, entries.end - e));
    body(EdgeBlock{{entries.graph, entries.row, head, e, count}}, place);
  }
}

// The weights of kSums sums with dropout.
template <int kSums, typename A>
inline void drop(const RowEntries& entries, int64_t head, const KeptEntries<A>& kept,
                 const RowBuffer<A>& weights) {
  if (kept.are_all()) return;
  for_each_block(entries, head, [&](const EdgeBlock& block, int64_t place) {
    const BlockOf<A> factor = kept.factors(block.entry, head);
    for (int s = 0; s < kSums; ++s) {
      A* lanes = weights[s] + place;
      store<kBlock>(lanes, load<kBlock>(lanes) * factor);
    }
  });
}

// What the nodes that a block leads to have in a table.
template <int kStride = 1, typename A>
inline BlockOf<A> gather_of(const EdgeBlock& block, const A* table) {
  return gather<kBlock, kStride>(table, block.graph.col + block.entry, block.count);
}

// Each of kSums sums, one behind the other, is that over the entries of a row of weight * x[col],
// with weights of its own. Entries in turns have sums of their own: an addition would wait for the
// one before. Some entries at a time are added up before they join the sum of all: gradients of
// scores are differences of long sums, of which each addition rounds as much as the sum is large.
template <int kSums, typename T>
inline void add_entries(const RowEntries& entries, const Matrix<const T>& x,
                        const RowBuffer<Accumulator<T>>& weights, Accumulator<T>* sum) {
  using A = Accumulator<T>;
  constexpr int kTurns = 2;
  constexpr int64_t kAtOnce = 32;
  const int32_t* col = entries.graph.col + entries.begin;
  const int64_t count = entries.end - entries.begin, width = x.width;
  for_each_part<kLanes<T>, 4 / kSums>(0, width, [&](auto chunk, int64_t f) {
    using C = decltype(chunk);
    constexpr int N = C::kLanes;
    Vector<A, N> total[kTurns][kSums][C::kCount];
    Vector<A, N> of_all[kSums][C::kCount] = {};
    const auto add = [&](int turn, int64_t e) {
      const T* row = x.data + col[e] * width + f;
      Vector<A, N> value[C::kCount];  // compilers would load it again for each sum
#pragma GCC unroll 8
      for (int q = 0; q < C::kCount; ++q) value[q] = load<N>(row + q * N);
#pragma GCC unroll 2
      for (int s = 0; s < kSums; ++s) {
        const auto weight = splat<A, N>(weights[s][e]);
#pragma GCC unroll 8
        for (int q = 0; q < C::kCount; ++q) {
          total[turn][s][q] = multiply_add<A, N>(weight, value[q], total[turn][s][q]);
        }
      }
    };
    for (int64_t begin = 0; begin < count; begin += kAtOnce) {
      const int64_t end = std::min(begin + kAtOnce, count);
      for (auto& of_turn : total) {
        for (auto& of_sum : of_turn) std::fill_n(of_sum, C::kCount, Vector<A, N>{});
      }
      int64_t e = begin;
      for (; e + kTurns <= end; e += kTurns) {
#pragma GCC unroll 2
        for (int turn = 0; turn < kTurns; ++turn) add(turn, e + turn);
      }
      if (e < end) add(0, e);
#pragma GCC unroll 2
      for (int s = 0; s < kSums; ++s) {
#pragma GCC unroll 8
        for (int q = 0; q < C::kCount; ++q) of_all[s][q] += total[0][s][q] + total[1][s][q];
      }
    }
#pragma GCC unroll 2
    for (int s = 0; s < kSums; ++s) {
#pragma GCC unroll 8
      for (int q = 0; q < C::kCount; ++q) store<N>(sum + s * width + f + q * N, of_all[s][q]);
    }
  });
}

// The sums of a row, then the largest score and the sum of exponentials.
template <typename T>
struct PanelForward : RowSums<Accumulator<T>> {
  using A = Accumulator<T>;

  HeadPanel<T> panel;
  const A* score_src;  // of this head
  const A* score_dst;
  A slope;
  const KeptEntries<A>& kept;
  SoftmaxOutputs<T> outputs;
  Result<T> out{outputs.out};

  int64_t buffer_size() const { return kBlock; }
  void reset(A* state) const { state[panel.width()] = -std::numeric_limits<A>::infinity(); }

  void begin(const RowEntries& entries, bool, A* memory, A* state) const {
    const RowBuffer<A> buffer(entries, memory);
    const BlockOf<A> own = splat<A, kBlock>(score_dst[entries.row]);
    BlockOf<A> largest = splat<A, kBlock>(-std::numeric_limits<A>::infinity()), sum{};
    for_each_block(entries, panel.head, [&](const EdgeBlock& block, int64_t place) {
      const BlockOf<A> z = own + gather_of(block, score_src);
      const auto score = masked<A>(block, leaky_relu<A>(z, slope));
      largest = larger<A, kBlock>(score, largest);
      store<kBlock>(buffer[0] + place, score);
    });
    A* softmax = state + panel.width();
    softmax[0] = max_of<A, kBlock>(largest);
    const BlockOf<A> origin = splat<A, kBlock>(softmax_origin(softmax[0]));
    for_each_block(entries, panel.head, [&](const EdgeBlock&, int64_t place) {
      A* lanes = buffer[0] + place;
      const BlockOf<A> p = exp_of_negative<kBlock>(load<kBlock>(lanes) - origin);
      sum += p;
      store<kBlock>(lanes, p);
    });
    softmax[1] = sum_of<A, kBlock>(sum);
    drop<1>(entries, panel.head, kept, buffer);
    add_entries<1, T>(entries, panel.x, buffer, state);
  }

  void merge(const A* piece, A* state) const { merge_softmax(piece, panel.width(), state); }

  void finish(int64_t row, int64_t, bool empty, int64_t, const A* state) const {
    const A* softmax = state + panel.width();
    A* own = outputs.stats.at(row, panel.head);
    own[0] = empty ? A{0} : softmax[0];
    const A scale = own[1] = empty ? A{0} : 1 / softmax[1];
    const SumRow<T> target(out.row(row, panel.head), outputs.addend_of(row, panel.head));
    for_each_part<kLanes<T>, 1>(0, panel.width(), [&](auto chunk, int64_t f) {
      constexpr int N = decltype(chunk)::kLanes;
      target.template store<N>(panel.first + f, load<N>(state + f) * scale);
    });
  }
};

// What the gradients of a head need to know of a destination.
template <typename A>
struct Destination {
  A score;
  A largest;
  A inverse_sum;
  A delta;
};

// What both backward passes have. The panel is a whole head.
template <typename T>
struct PanelBackward : RowSums<Accumulator<T>> {
  using A = Accumulator<T>;

  HeadPanel<T> panel;
  const A* score_src;  // of this head
  Destination<A>* destinations;
  A slope;
  const KeptEntries<A>& kept;

  int64_t buffer_size() const { return 2 * kBlock; }
  void reset(A*) const {}

  // Two sums, and behind them another one of the row, `last`.
  void add(const RowEntries& entries, const RowBuffer<A>& weights, BlockOf<A> last,
           A* state) const {
    drop<2>(entries, panel.head, kept, weights);
    add_entries<2, T>(entries, panel.x, weights, state);
    state[2 * panel.width()] = sum_of<A, kBlock>(last);
  }
};

// The pass over destinations: sums of all entries, and of those with a positive z, and the weight
// of the latter. It writes delta, and the gradient of score_dst.
template <typename T>
struct PanelDestinations : PanelBackward<T> {
  using A = Accumulator<T>;

  const SoftmaxGradients<T>& given;
  Matrix<T> grad_score_dst;

  FASTGRAPH_INLINE void expect_row(int64_t row) const {
    prefetch(given.grad.at(row, this->panel.head), this->panel.width());
  }

  void begin(const RowEntries& entries, bool, A* memory, A* state) const {
    const RowBuffer<A> weights(entries, memory);
    const Destination<A>& own = this->destinations[entries.row];
    const BlockOf<A> score_dst = splat<A, kBlock>(own.score), zero{};
    const BlockOf<A> largest = splat<A, kBlock>(own.largest);
    const BlockOf<A> inverse_sum = splat<A, kBlock>(own.inverse_sum);
    BlockOf<A> of_positive{};
    for_each_block(entries, this->panel.head, [&](const EdgeBlock& block, int64_t place) {
      const BlockOf<A> z = score_dst + gather_of(block, this->score_src);
      const auto score = masked<A>(block, leaky_relu<A>(z, this->slope));
      const BlockOf<A> p = softmax_of<A>(score, largest, inverse_sum);
      of_positive += z > zero ? p : zero;
      store<kBlock>(weights[0] + place, p);
      store<kBlock>(weights[1] + place, z > zero ? p : zero);
    });
    this->add(entries, weights, of_positive, state);
  }

  void finish(int64_t row, int64_t, bool empty, int64_t, const A* state) const {
    T* target = grad_score_dst.row(row) + this->panel.head;
    if (empty) return store_one(target, A{0});  // whatever the gradient is
    const int64_t width = this->panel.width();
    const A *positive = state + width, weight = positive[width];
    const T* grad = given.grad.at(row, this->panel.head);
    A of_all = 0, of_positive = 0, nan_if_infinite = 0;
    for_each_part<kLanes<T>, 1>(0, width, [&](auto chunk, int64_t f) {
      constexpr int N = decltype(chunk)::kLanes;
      const auto g = load<N>(grad + f), y = load<N>(state + f);
      of_all += sum_of<A, N>(g * y);
      of_positive += sum_of<A, N>(g * (load<N>(positive + f) - weight * y));
      nan_if_infinite += sum_of<A, N>(g - g);
    });
    // By entry, an infinite gradient makes infinities that cancel in their sum, or with it, and an
    // infinite feature one that cancels with the sum.
    const A of_logsum = given.of_logsum(row, this->panel.head);
    this->destinations[row].delta = of_all + nan_if_infinite - of_logsum;
    store_one(target, (1 - this->slope) * of_positive + (of_all - of_all) +
                          of_logsum * (this->slope + (1 - this->slope) * weight));
  }
};

// The pass over sources, along the transpose: sums of the gradients of destinations by the weights,
// which are that of x, and by weights times slopes, and of delta by these without dropout.
template <typename T>
struct PanelSources : PanelBackward<T> {
  using A = Accumulator<T>;

  Heads<const T> x;
  Result<T> grad_x;
  Matrix<T> grad_score_src;

  FASTGRAPH_INLINE void expect_row(int64_t row) const {
    prefetch(x.at(row, this->panel.head), x.width);
  }

  void begin(const RowEntries& entries, bool, A* memory, A* state) const {
    const RowBuffer<A> weights(entries, memory);
    const Destination<A>* others = this->destinations;
    const BlockOf<A> own = splat<A, kBlock>(this->score_src[entries.row]), zero{};
    BlockOf<A> of_delta{};
    for_each_block(entries, this->panel.head, [&](const EdgeBlock& block, int64_t place) {
      const BlockOf<A> z = own + gather_of<4>(block, &others->score);
      const auto score = masked<A>(block, leaky_relu<A>(z, this->slope));
      const BlockOf<A> p = softmax_of<A>(score, gather_of<4>(block, &others->largest),
                                         gather_of<4>(block, &others->inverse_sum));
      const BlockOf<A> by_slope = z > zero ? p : this->slope * p;
      of_delta += by_slope * gather_of<4>(block, &others->delta);
      store<kBlock>(weights[0] + place, p);
      store<kBlock>(weights[1] + place, by_slope);
    });
    this->add(entries, weights, of_delta, state);
  }

  void finish(int64_t row, int64_t, bool empty, int64_t, const A* state) const {
    const A* by_slope = state + x.width;
    const T* own = x.at(row, this->panel.head);
    const ResultRow<T> target = grad_x.row(row, this->panel.head);
    A product = 0;
    for_each_part<kLanes<T>, 1>(0, x.width, [&](auto chunk, int64_t f) {
      constexpr int N = decltype(chunk)::kLanes;
      target.template store<N>(f, load<N>(state + f));
      product += sum_of<A, N>(load<N>(own + f) * load<N>(by_slope + f));
    });
    // Nothing of a row without entries, whatever its features are.
    store_one(grad_score_src.row(row) + this->panel.head,
              empty ? A{0} : product - by_slope[x.width]);
  }
};

}  // namespace

template <typename T>
void gat_by_panels(const OrderedCsr& graph, const GatInputs<T>& in, double slope, Dropout dropout,
                   const SoftmaxOutputs<T>& outputs, int64_t channels) {
  using A = Accumulator<T>;
  const Schedule schedule = make_schedule(graph);
  const Panel<T> memory(as_matrix(in.x), channels);
  const KeptEntries<A> kept(graph, in.x.heads, dropout);
  const auto score_src = scratch<A>(in.x.nodes), score_dst = scratch<A>(graph.num_rows);
  for (int64_t head = 0; head < in.x.heads; ++head) {
    load_column(in.score_src, head, score_src.get());
    load_column(in.score_dst, head, score_dst.get());
    for (int64_t first = 0; first < in.x.width; first += channels) {
      const int64_t count = std::min(channels, in.x.width - first);
      run_pass<A>(graph, schedule, 1, count,
                  PanelForward<T>{{count + 2},
                                  {memory.copy(head * in.x.width + first, count), head, first},
                                  score_src.get(),
                                  score_dst.get(),
                                  static_cast<A>(slope),
                                  kept,
                                  outputs});
    }
  }
}

template <typename T>
void gat_backward_by_heads(const OrderedCsr& graph, const OrderedCsr& transpose,
                           const GatInputs<T>& in, double slope, Dropout dropout,
                           const SoftmaxGradients<T>& given, Heads<T> grad_x,
                           Matrix<T> grad_score_src, Matrix<T> grad_score_dst) {
  using A = Accumulator<T>;
  const int64_t width = in.x.width;
  const Schedule by_row = make_schedule(graph), by_source = make_schedule(transpose);
  const Panel<T> panel_of_x(as_matrix(in.x), width), panel_of_grad(as_matrix(given.grad), width);
  const KeptEntries<A> kept_by_row(graph, in.x.heads, dropout);
  const KeptEntries<A> kept_by_source(transpose, in.x.heads, dropout);
  const auto score_src = scratch<A>(in.x.nodes);
  const auto destinations = scratch<Destination<A>>(graph.num_rows);
  for (int64_t head = 0; head < in.x.heads; ++head) {
    load_column(in.score_src, head, score_src.get());
    for (int64_t row = 0; row < graph.num_rows; ++row) {
      const A* stats = given.stats.at(row, head);
      destinations[row] = {load_one(in.score_dst.row(row) + head), stats[0], stats[1], 0};
    }
    const auto with_panel = [&](const Panel<T>& memory,
                                const KeptEntries<A>& kept) -> PanelBackward<T> {
      return {{2 * width + 1},       {memory.copy(head * width, width), head, 0},
              score_src.get(),       destinations.get(),
              static_cast<A>(slope), kept};
    };
    run_pass<A>(graph, by_row, 1, 2 * width,
                PanelDestinations<T>{with_panel(panel_of_x, kept_by_row), given, grad_score_dst});
    run_pass<A>(transpose, by_source, 1, 2 * width,
                PanelSources<T>{with_panel(panel_of_grad, kept_by_source), in.x, Result<T>(grad_x),
                                grad_score_src});
  }
}

FASTGRAPH_INSTANTIATE(gat_by_panels)
FASTGRAPH_INSTANTIATE(gat_backward_by_heads)

}  // namespace fastgraph
