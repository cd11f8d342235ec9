// Additive attention: the gradients that are summed up for destinations, of x_dst and att, and of
// what edges carry.
#include <algorithm>

#include "cpu/gatv2.h"
#include "fastgraph/partial_sums.h"

namespace fastgraph {
namespace {

// The slopes of head h: the sums over the entries of grad[i] * leaky_relu'(z_i), which start from
// before(N, f) and are given to after(N, f, sum), N channels at a time. The sum over the entries of
// grad[i] * leaky_relu(z_i) is added to activations.
template <typename T, typename Before, typename After, typename Block>
inline void sum_slopes(const Block& block, int h, Heads<const T> nodes, const NodeRows<T>& others,
                       Accumulator<T> slope, BlockOf<Accumulator<T>> grad,
                       Accumulator<T>* activations, const Before& before, const After& after) {
  using A = Accumulator<T>;
  const T* own = nodes.at(block.row, block.head + h);
  for_each_part<kLanes<T>, 4>(0, others.width, [&](auto chunk, int64_t f) {
    using C = decltype(chunk);
    constexpr int N = C::kLanes;
    constexpr std::integral_constant<int, N> kLane{};
    using V = Vector<A, N>;
    V mine[C::kCount], slope_sum[C::kCount], activation_sum[C::kCount];
#pragma GCC unroll 4
    for (int q = 0; q < C::kCount; ++q) {
      mine[q] = load<N>(own + f + q * N);
      slope_sum[q] = before(kLane, f + q * N);
      activation_sum[q] = load<N>(activations + f + q * N);
    }
    for (int i = 0; i < block.count; ++i) {
      others.template expect<C::kWidth>(block, i, h, f);
      const T* other = others.at(block, i, h) + f;
      const A g = grad[h * block.stride + i];
      V z[C::kCount];
#pragma GCC unroll 4
      for (int q = 0; q < C::kCount; ++q) z[q] = mine[q] + load<N>(other + q * N);
#pragma GCC unroll 4
      for (int q = 0; q < C::kCount; ++q) {
        const V sloped = z[q] > V{} ? splat<A, N>(g) : splat<A, N>(slope * g);
        slope_sum[q] += sloped;
        activation_sum[q] = multiply_add<A, N>(sloped, z[q], activation_sum[q]);
      }
    }
#pragma GCC unroll 4
    for (int q = 0; q < C::kCount; ++q) {
      after(kLane, f + q * N, slope_sum[q]);
      store<N>(activations + f + q * N, activation_sum[q]);
    }
  });
}

// The slopes of a block of one head, added to those in memory.
template <typename T>
inline void add_slopes(const EdgeBlock& block, Heads<const T> nodes, const NodeRows<T>& others,
                       Accumulator<T> slope, BlockOf<Accumulator<T>> grad,
                       Accumulator<T>* activations, Accumulator<T>* slopes) {
  sum_slopes<T>(
      block, 0, nodes, others, slope, grad, activations,
      [&](auto lanes, int64_t f) { return load<decltype(lanes)::value>(slopes + f); },
      [&](auto lanes, int64_t f, auto sum) { store<decltype(lanes)::value>(slopes + f, sum); });
}

// The slopes of a row of a batch, as sum_slopes() has them: given to after(N, head, f, sum), N
// channels at a time. Those of activations, [heads, channels], are added up by rows first, which
// errs less than one long sum.
template <typename T, typename After>
inline void sum_slopes(const RowBatch& batch, int64_t row, EntryRange entries,
                       const Gatv2Inputs<T>& in, Accumulator<T> slope, const Accumulator<T>* grad,
                       Accumulator<T>* activations, const After& after) {
  using A = Accumulator<T>;
  const int64_t width = in.x_src.width;
  for_each_piece<T>(batch.heads, width, true, [&](auto piece, int64_t head, int64_t f) {
    using P = decltype(piece);
    constexpr int N = P::kLanes;
    constexpr std::integral_constant<int, N> kLane{};
    using V = Vector<A, N>;
    V own[P::kVectors][P::kCount], sum[P::kVectors][P::kCount] = {};
    V activation[P::kVectors][P::kCount] = {};
#pragma GCC unroll 4
    for (int h = 0; h < P::kVectors; ++h) {
#pragma GCC unroll 4
      for (int q = 0; q < P::kCount; ++q) {
        own[h][q] = load<N>(in.x_dst.at(row, head + P::first_head(h)) + f + q * N);
      }
    }
    for (int64_t e = entries.begin; e < entries.end; ++e) {
      const T* other = in.x_src.at(batch.graph.col[e], head) + f;
      const A* given = grad + batch.at(e) + head;
#pragma GCC unroll 4
      for (int h = 0; h < P::kVectors; ++h) {
        const V up = of_heads<P>(given + P::first_head(h)), down = slope * up;
#pragma GCC unroll 4
        for (int q = 0; q < P::kCount; ++q) {
          const V z = own[h][q] + load<N>(other + P::first_head(h) * width + q * N);
          const V sloped = z > V{} ? up : down;
          sum[h][q] += sloped;
          activation[h][q] = multiply_add<A, N>(sloped, z, activation[h][q]);
        }
      }
    }
#pragma GCC unroll 4
    for (int h = 0; h < P::kVectors; ++h) {
      const int64_t first = head + P::first_head(h);
#pragma GCC unroll 4
      for (int q = 0; q < P::kCount; ++q) {
        after(kLane, first, f + q * N, sum[h][q]);
        A* target = activations + first * width + f + q * N;
        store<N>(target, load<N>(target) + activation[h][q]);
      }
    }
  });
}

// Gradients of x_dst and att where edges carry nothing; state holds the sums of slopes and of
// activations.
template <typename T>
struct BackwardDst : DestinationSoftmax<T, BackwardDst<T>> {
  using A = Accumulator<T>;

  AdditiveScores<T, NoEdges> scores;
  Result<T> grad_dst;
  Heads<A> sums;  // [slots, heads, width], of att

  FASTGRAPH_INLINE void expect_row(int64_t row) const {
    prefetch_node(this->grad, row);
    scores.expect_row(row);
  }

  template <typename Block>
  Dots<A> find_dots(const Block& block) const {
    return scores.with_products(block, this->grad);
  }

  int64_t longest_batched_row() const {
    return fastgraph::longest_batched_row(scores.in.att.heads, scores.in.att.width);
  }
  void absorb_batch(const RowBatch& batch, int64_t slot) const {
    const Gatv2Inputs<T>& in = scores.in;
    BatchValues<A> p(batch), product(batch);
    scores.of_batch(batch, p.data, this->grad, product.data);
    this->gradients_of_scores(batch, product.data, p.data);
    batch.for_each_row([&](int64_t row, EntryRange entries, int64_t) {
      sum_slopes<T>(batch, row, entries, in, scores.slope, p.data, sums.at(slot, 0),
                    [&](auto lanes, int64_t head, int64_t f, auto slopes) {
                      constexpr int N = decltype(lanes)::value;
                      using V = Vector<A, N>;
                      const V found = load<N>(in.att.at(0, head) + f) * slopes;
                      grad_dst.row(row, head).template store<N>(f, entries.empty() ? V{} : found);
                    });
    });
  }

  bool knows_few() const { return true; }
  void absorb_few(const SharedBlock& block, int64_t slot, A*) const {
    const Gatv2Inputs<T>& in = scores.in;
    const auto grads = this->gradients_of_few(block, find_dots(block));
    this->leave(block, grads.weight, grads.score);
    for (int h = 0; h < block.heads; ++h) {
      const int64_t head = block.head + h;
      const ResultRow<T> target = grad_dst.row(block.row, head);
      sum_slopes<T>(block, h, in.x_dst, NodeRows<T>::seen_before(in.x_src), scores.slope,
                    grads.score, sums.at(slot, head), Zeros<A>{},
                    [&](auto lanes, int64_t f, auto slopes) {
                      constexpr int N = decltype(lanes)::value;
                      target.template store<N>(f, load<N>(in.att.at(0, head) + f) * slopes);
                    });
    }
  }

  void absorb(const EdgeBlock& block, const A* buffer, A* state) const {
    const Gatv2Inputs<T>& in = scores.in;
    const auto grads = this->score_gradients(block, buffer);
    this->leave(block, this->weights(buffer), grads);
    add_slopes<T>(block, in.x_dst, NodeRows<T>::seen_before(in.x_src), scores.slope, grads,
                  state + in.x_src.width, state);
  }

  void finish(int64_t row, int64_t head, bool empty, int64_t slot, const A* state) const {
    const int64_t width = scores.in.att.width;
    const T* att = scores.in.att.at(0, head);
    const ResultRow<T> target = grad_dst.row(row, head);
    for_each_part<kLanes<T>, 1>(0, width, [&](auto chunk, int64_t f) {
      constexpr int N = decltype(chunk)::kLanes;
      target.template store<N>(f, through_att<N>(empty, att + f, state + f));
    });
    A* sum = sums.at(slot, head);
    for_each_part<kLanes<T>, 1>(0, sums.width, [&](auto chunk, int64_t f) {
      constexpr int N = decltype(chunk)::kLanes;
      store<N>(sum + f, load<N>(sum + f) + load<N>(state + width + f));
    });
  }
};

// Leaves the weights and the gradients of the scores, no more.
template <typename T, typename Edges>
struct EdgeScores : DestinationSoftmax<T, EdgeScores<T, Edges>> {
  using A = Accumulator<T>;

  AdditiveScores<T, Edges> scores;

  FASTGRAPH_INLINE void expect_row(int64_t row) const {
    prefetch_node(this->grad, row);
    scores.expect_row(row);
  }
  template <typename Block>
  Dots<A> find_dots(const Block& block) const {
    return scores.with_products(block, this->grad);
  }

  int64_t longest_batched_row() const {
    return fastgraph::longest_batched_row(scores.in.att.heads, scores.in.att.width);
  }
  void absorb_batch(const RowBatch& batch, int64_t) const {
    BatchValues<A> p(batch), product(batch);
    scores.of_batch(batch, p.data, this->grad, product.data);
    this->gradients_of_scores(batch, product.data, p.data);
  }

  bool knows_few() const { return true; }
  void absorb_few(const SharedBlock& block, int64_t, A*) const {
    const auto grads = this->gradients_of_few(block, find_dots(block));
    this->leave(block, grads.weight, grads.score);
  }
  void absorb(const EdgeBlock& block, const A* buffer, A*) const {
    this->leave(block, this->weights(buffer), this->score_gradients(block, buffer));
  }
  void finish(int64_t, int64_t, bool, int64_t, const A*) const {}
};

// Entries of a task that are seen one after the other before any of them is left, so that what they
// gather and what their edges add is in the second cache; a longer row is not divided.
constexpr int64_t kEntriesAtOnce = 128;

// Gradients of x_dst, att, edge and weight_edge. For some rows at a time it projects the edges,
// finds the gradients of the scores, and from these the gradients of z, which take the place of the
// projections; products with them are the gradients of edges and of their weight.
template <typename T>
struct EdgeBackwardDst {
  using A = Accumulator<T>;

  const OrderedCsr& graph;
  Gatv2Inputs<T> in;
  A slope;
  Dropout dropout;
  SoftmaxGradients<T> given;
  A* between;
  Signs signs;
  A* delta;
  Result<T> grad_dst;
  Matrix<A> grad_edge;  // or null
  EdgeProjection<T> edges;
  Heads<A> sums;    // [slots, 1 + channels of edges, as the packed weight]: of att, and of
                    // weight_edge if it is wanted
  Heads<A> pieces;  // [pieces, heads, width]: slopes of rows that are cut

  void run(const Task& task, int64_t slot) const {
    std::fill_n(sums.at(slot, 0), sums.heads * sums.width, A{0});
    int64_t longest = kEntriesAtOnce;
    for (int64_t place = task.place_begin; place < task.place_end; ++place) {
      const EntryRange range = task.entries(graph, place);
      longest = std::max(longest, range.end - range.begin);
    }
    const auto z = scratch<A>(longest * sums.width);
    for (Task part = task; part.place_begin < task.place_end; part.place_begin = part.place_end) {
      if (part.whole()) {
        part.place_end = part.place_begin + 1;
        part.entry_begin = graph.rowptr[part.place_begin];
        const int64_t limit = part.entry_begin + kEntriesAtOnce;
        while (part.place_end < task.place_end && graph.rowptr[part.place_end + 1] <= limit) {
          ++part.place_end;
        }
        part.entry_end = graph.rowptr[part.place_end];
      }
      run_part(part, sums.at(slot, 0), z.get());
    }
  }

  void run_part(const Task& part, A* own, A* z) const {
    const int64_t first = part.entry_begin, count = part.entry_end - first;
    edges.of_entries(graph, first, count, z);
    find_scores(part, z);
    find_slopes(part, own, z);
    if (sums.heads > 1) edges.add_weight_gradient(graph, first, count, z, own + sums.width);
    if (grad_edge.data != nullptr) edges.edge_gradient(graph, first, count, z, grad_edge);
  }

  void find_scores(const Task& part, const A* z) const {
    const ProjectedEdges<A> projected{z, sums.width, part.entry_begin, in.att.width};
    const EdgeScores<T, ProjectedEdges<A>> pass{{{0}, given, between, dropout, delta},
                                                {in, slope, projected}};
    run_pass<A>(graph, {{part}, {}, 0}, in.att.heads, 2 * in.att.width, pass);
  }

  // The slopes: sums over the rows as gradients of x_dst, and over all entries of gradients for
  // att. z becomes its gradient.
  void find_slopes(const Task& part, A* activations, A* z) const {
    const int64_t width = in.att.width, heads = in.att.heads;
    for_each_piece<T>(heads, width, [&](auto piece, int64_t head, int64_t f) {
      using P = decltype(piece);
      constexpr int N = P::kLanes;
      using V = Vector<A, N>;
      V factor[P::kVectors][P::kCount], activation[P::kVectors][P::kCount] = {};
#pragma GCC unroll 4
      for (int h = 0; h < P::kVectors; ++h) {
#pragma GCC unroll 4
        for (int q = 0; q < P::kCount; ++q) {
          factor[h][q] = load<N>(in.att.at(0, head + h) + f + q * N);
        }
      }
      for (int64_t place = part.place_begin; place < part.place_end; ++place) {
        const int64_t row = graph.row(place);
        const EntryRange range = part.entries(graph, place);
        V mine[P::kVectors][P::kCount], slopes[P::kVectors][P::kCount] = {};
#pragma GCC unroll 4
        for (int h = 0; h < P::kVectors; ++h) {
#pragma GCC unroll 4
          for (int q = 0; q < P::kCount; ++q) {
            mine[h][q] = load<N>(in.x_dst.at(row, head + h) + f + q * N);
          }
        }
        for (int64_t entry = range.begin; entry < range.end; ++entry) {
          const int64_t edge = graph.edge(entry);
          const T* other = in.x_src.at(graph.col[entry], head) + f;
          const A* g = between + 2 * (edge * heads + head) + 1;
          A* at = z + (entry - part.entry_begin) * sums.width + head * width + f;
          uint8_t* const left = signs.at(edge, head);
#pragma GCC unroll 4
          for (int h = 0; h < P::kVectors; ++h) {
            const V up = splat<A, N>(g[2 * h]), down = splat<A, N>(slope * g[2 * h]);
#pragma GCC unroll 4
            for (int q = 0; q < P::kCount; ++q) {
              A* const own = at + h * width + q * N;
              const V sum = mine[h][q] + load<N>(other + h * width + q * N) + load<N>(own);
              leave_signs<A, N>(sum, f + q * N, left + h * signs.bytes);
              const V sloped = sum > V{} ? up : down;
              slopes[h][q] += sloped;
              activation[h][q] = multiply_add<A, N>(sloped, sum, activation[h][q]);
              store<N>(own, factor[h][q] * sloped);
            }
          }
        }
#pragma GCC unroll 4
        for (int h = 0; h < P::kVectors; ++h) {
          leave_slopes<N, P::kCount>(part, row, head + h, range.empty(), f, factor[h], slopes[h]);
        }
      }
#pragma GCC unroll 4
      for (int h = 0; h < P::kVectors; ++h) {
#pragma GCC unroll 4
        for (int q = 0; q < P::kCount; ++q) {
          A* const sum = activations + (head + h) * width + f + q * N;
          store<N>(sum, load<N>(sum) + activation[h][q]);
        }
      }
    });
  }

  // One without entries has none, whatever att is: NaN * 0 is NaN.
  template <int N, int kCount>
  FASTGRAPH_INLINE void leave_slopes(const Task& part, int64_t row, int64_t head, bool empty,
                                     int64_t f, const Vector<A, N>* att,
                                     const Vector<A, N>* slopes) const {
    const ResultRow<T> target = grad_dst.row(row, head);
#pragma GCC unroll 4
    for (int q = 0; q < kCount; ++q) {
      if (part.whole()) {
        target.template store<N>(f + q * N, empty ? Vector<A, N>{} : att[q] * slopes[q]);
      } else {
        store<N>(pieces.at(part.piece, head) + f + q * N, slopes[q]);
      }
    }
  }

  void merge(const CutRow& cut) const {
    for (int64_t head = 0; head < in.att.heads; ++head) {
      const ResultRow<T> target = grad_dst.row(cut.row, head);
      for (int64_t f = 0; f < in.att.width; ++f) {
        A sum = 0;
        for (int64_t piece = cut.piece_begin; piece < cut.piece_end; ++piece) {
          sum += pieces.at(piece, head)[f];
        }
        target.template store<1>(f, Vector<A, 1>{load_one(in.att.at(0, head) + f) * sum});
      }
    }
  }
};

template <typename T>
void backward_dst(const OrderedCsr& graph, const Gatv2Inputs<T>& in, Accumulator<T> slope,
                  Dropout dropout, const SoftmaxGradients<T>& given, Accumulator<T>* between,
                  Heads<T> grad_dst, Heads<T> grad_att) {
  using A = Accumulator<T>;
  const Schedule schedule = make_schedule(graph);
  const int64_t width = in.att.width, heads = in.att.heads, slots = num_slots(schedule);
  const auto sums = scratch<A>(slots * heads * width);
  std::fill_n(sums.get(), slots * heads * width, A{0});
  const BackwardDst<T> pass{{{2 * width}, given, between, dropout},
                            {in, slope, {}},
                            Result<T>(grad_dst),
                            {sums.get(), slots, heads, width}};
  run_destination_pass<T>(graph, schedule, heads, 2 * width, pass);
  sum_slots<T>(sums.get(), slots, heads * width, heads * width, grad_att.data);
}

}  // namespace

template <typename T>
void gatv2_backward_dst(const OrderedCsr& graph, const Gatv2Inputs<T>& in, double slope,
                        Dropout dropout, const SoftmaxGradients<T>& given, Accumulator<T>* between,
                        Heads<T> grad_dst, Heads<T> grad_att, Matrix<Accumulator<T>> grad_edge,
                        Heads<T> grad_weight_edge) {
  using A = Accumulator<T>;
  const A own_slope = static_cast<A>(slope);
  if (in.edge.width == 0) {
    return backward_dst<T>(graph, in, own_slope, dropout, given, between, grad_dst, grad_att);
  }
  const Schedule schedule = make_schedule(graph);
  const int64_t width = in.att.width, heads = in.att.heads;
  const int64_t channels = grad_weight_edge.data == nullptr ? 0 : in.edge.width;
  const int64_t num_tasks = static_cast<int64_t>(schedule.tasks.size());
  const PackedProjection<T> packed(in.weight_edge);
  const EdgeProjection<T> edges{in.edge, packed.matrix(), heads, width};
  const int64_t stride = edges.weight.width, of_slot = (1 + channels) * stride;
  const auto delta = scratch<A>(graph.num_rows * heads);
  const auto sums = scratch<A>(num_tasks * of_slot);
  const auto pieces = scratch<A>(schedule.num_pieces * heads * width);
  const EdgeBackwardDst<T> pass{graph,
                                in,
                                own_slope,
                                dropout,
                                given,
                                between,
                                signs_behind(between, graph, in.att),
                                delta.get(),
                                Result<T>(grad_dst),
                                grad_edge,
                                edges,
                                {sums.get(), num_tasks, 1 + channels, stride},
                                {pieces.get(), schedule.num_pieces, heads, width}};
  find_delta_of_cut_rows<T>(
      graph, schedule, heads, 2 * width,
      EdgeScores<T, EdgeProjection<T>>{{{0}, given, between, dropout, delta.get()},
                                       {in, own_slope, edges}});
  const int64_t work = (graph.num_entries + graph.num_rows) * heads * (3 + in.edge.width) * width;
  for_each_task(num_tasks, work, [&](int64_t t) { pass.run(schedule.tasks[t], t); });
  for (const CutRow& cut : schedule.cut_rows) pass.merge(cut);
  sum_slots<T>(sums.get(), num_tasks, of_slot, heads * width, grad_att.data);
  for (int64_t head = 0; head < heads; ++head) {
    for (int64_t d = 0; d < channels; ++d) {
      const A* own = &sums[(1 + d) * stride + head * width];
      sum_slots<T>(own, num_tasks, of_slot, width, grad_weight_edge.at(head, d));
    }
  }
}

FASTGRAPH_INSTANTIATE(gatv2_backward_dst)

}  // namespace fastgraph
