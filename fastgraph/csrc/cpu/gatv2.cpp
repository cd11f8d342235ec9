// Additive attention (Brody, Alon and Yahav, How attentive are graph attention networks?, 2022):
// the score of an entry is <att, leaky_relu(x_src[col] + x_dst[row])>.
#include "cpu/kernels.h"

namespace fastgraph {
namespace {

template <typename V, typename A>
inline V leaky_relu(V z, A slope) {
  return z > V{} ? z : slope * z;
}

// The scores of a block of entries; `own` is the head of the row's node, `others` are gathered.
template <typename T>
inline BlockOf<Accumulator<T>> additive_scores(const EdgeBlock& block, const T* own,
                                               Heads<const T> others, Heads<const T> att,
                                               Accumulator<T> slope) {
  using A = Accumulator<T>;
  BlockOf<A> score{};
  for_each_part<kLanes<T>, 4>(0, others.width, [&](auto chunk, int64_t f) {
    using C = decltype(chunk);
    using V = Vector<A, C::kLanes>;
    V mine[C::kCount], factor[C::kCount];
    for (int q = 0; q < C::kCount; ++q) {
      mine[q] = load<C::kLanes>(own + f + q * C::kLanes);
      factor[q] = load<C::kLanes>(att.at(0, block.head) + f + q * C::kLanes);
    }
    for (int i = 0; i < block.count; ++i) {
      const T* other = others.at(block.col(i), block.head) + f;
      V sum{};
#pragma GCC unroll 4
      for (int q = 0; q < C::kCount; ++q) {
        sum += factor[q] * leaky_relu(mine[q] + load<C::kLanes>(other + q * C::kLanes), slope);
      }
      score[i] += sum_of<A, C::kLanes>(sum);
    }
  });
  return score;
}

// slopes += grad[i] * leaky_relu'(z_i) over the block, and activations += grad[i] * leaky_relu(z_i)
// unless it is null.
template <bool kActivations, typename T>
inline void add_activations(const EdgeBlock& block, const T* own, Heads<const T> others,
                            Accumulator<T> slope, BlockOf<Accumulator<T>> grad,
                            Accumulator<T>* slopes, Accumulator<T>* activations) {
  using A = Accumulator<T>;
  for_each_part<kLanes<T>, 4>(0, others.width, [&](auto chunk, int64_t f) {
    using C = decltype(chunk);
    constexpr int N = C::kLanes;
    using V = Vector<A, N>;
    V mine[C::kCount], slope_sum[C::kCount], activation_sum[C::kCount] = {};
    for (int q = 0; q < C::kCount; ++q) {
      mine[q] = load<N>(own + f + q * N);
      slope_sum[q] = load<N>(slopes + f + q * N);
      if constexpr (kActivations) activation_sum[q] = load<N>(activations + f + q * N);
    }
    for (int i = 0; i < block.count; ++i) {
      const T* other = others.at(block.col(i), block.head) + f;
      const A g = grad[i];
#pragma GCC unroll 4
      for (int q = 0; q < C::kCount; ++q) {
        const V z = mine[q] + load<N>(other + q * N);
        const V sloped = z > V{} ? splat<A, N>(g) : splat<A, N>(slope * g);
        slope_sum[q] += sloped;
        if constexpr (kActivations) activation_sum[q] += sloped * z;
      }
    }
    for (int q = 0; q < C::kCount; ++q) {
      store<N>(slopes + f + q * N, slope_sum[q]);
      if constexpr (kActivations) store<N>(activations + f + q * N, activation_sum[q]);
    }
  });
}

template <typename T>
struct Forward : OnlineSoftmax<T> {
  using A = Accumulator<T>;

  Heads<const T> x_src;
  Heads<const T> x_dst;
  Heads<const T> att;
  A slope;

  void absorb(const EdgeBlock& block, A*, A* state) const {
    block.prefetch_next(x_src);
    const T* own = x_dst.at(block.row, block.head);
    const auto score = additive_scores<T>(block, own, x_src, att, slope);
    OnlineSoftmax<T>::absorb(block, score, state);
  }

  void finish(int64_t row, int64_t head, bool empty, int64_t, const A* state) const {
    OnlineSoftmax<T>::finish(row, head, empty, state);
  }
};

// Gradients of x_dst and att; state holds the sums of slopes and of activations.
template <typename T>
struct BackwardDst : DestinationSoftmax<T, BackwardDst<T>> {
  using A = Accumulator<T>;

  Heads<const T> x_src;
  Heads<const T> x_dst;
  Heads<const T> att;
  A slope;
  Heads<const T> grad;
  Heads<T> grad_dst;
  A* grad_att;  // [slots, heads, width]

  BlockOf<A> score(const EdgeBlock& block) const {
    block.prefetch_next(x_src);
    return additive_scores<T>(block, x_dst.at(block.row, block.head), x_src, att, slope);
  }

  BlockOf<A> product(const EdgeBlock& block) const {
    return dots<T>(block, grad.at(block.row, block.head), x_src);
  }

  void absorb(const EdgeBlock& block, const A* buffer, A* state) const {
    const auto grads = this->score_gradients(block, buffer);
    const T* own = x_dst.at(block.row, block.head);
    add_activations<true, T>(block, own, x_src, slope, grads, state, state + x_src.width);
  }

  void finish(int64_t row, int64_t head, bool, int64_t slot, const A* state) const {
    const int64_t width = att.width;
    A* sum = grad_att + (slot * att.heads + head) * width;
    for_each_part<kLanes<T>, 1>(0, width, [&](auto chunk, int64_t f) {
      constexpr int N = decltype(chunk)::kLanes;
      store<N>(grad_dst.at(row, head) + f, load<N>(att.at(0, head) + f) * load<N>(state + f));
      store<N>(sum + f, load<N>(sum + f) + load<N>(state + width + f));
    });
  }
};

// The gradient of x_src, along the transpose; state holds the sums of gradients as a value and of
// slopes.
template <typename T>
struct BackwardSrc : RowSums<Accumulator<T>> {
  using A = Accumulator<T>;

  Heads<const T> x_src;
  Heads<const T> x_dst;
  Heads<const T> att;
  A slope;
  Dropout dropout;
  SoftmaxStats<const A> stats;
  const A* delta;
  Heads<const T> grad;
  Heads<T> grad_src;

  void absorb(const EdgeBlock& block, A*, A* state) const {
    block.prefetch_next(x_dst);
    block.prefetch_next(grad);
    const T* own = x_src.at(block.row, block.head);
    const auto product = dots<T>(block, own, grad);
    const auto score = additive_scores<T>(block, own, x_dst, att, slope);
    const auto grads = gradients_of_column<A>(block, score, product, stats, delta, dropout);
    add_rows<T>(block, grads.weight, grad, A{1}, state);
    add_activations<false, T>(block, own, x_dst, slope, grads.score, state + x_src.width, nullptr);
  }

  void finish(int64_t row, int64_t head, bool, int64_t, const A* state) const {
    const int64_t width = att.width;
    for_each_part<kLanes<T>, 1>(0, width, [&](auto chunk, int64_t f) {
      constexpr int N = decltype(chunk)::kLanes;
      const auto through_score = load<N>(att.at(0, head) + f) * load<N>(state + width + f);
      store<N>(grad_src.at(row, head) + f, load<N>(state + f) + through_score);
    });
  }
};

}  // namespace

template <typename T>
void gatv2(const Csr& graph, Heads<const T> x_src, Heads<const T> x_dst, Heads<const T> att,
           double slope, Dropout dropout, Heads<T> out, SoftmaxStats<Accumulator<T>> stats) {
  prefer_huge_pages(out.data, out.bytes());
  const Forward<T> pass{
      {x_src, out, stats, dropout}, x_src, x_dst, att, static_cast<Accumulator<T>>(slope)};
  run_pass<Accumulator<T>>(graph, make_schedule(graph), out.heads, out.width, pass);
}

template <typename T>
void gatv2_backward_dst(const Csr& graph, Heads<const T> x_src, Heads<const T> x_dst,
                        Heads<const T> att, double slope, Dropout dropout,
                        SoftmaxStats<const Accumulator<T>> stats, Heads<const T> grad,
                        Accumulator<T>* delta, Heads<T> grad_dst, Heads<T> grad_att) {
  using A = Accumulator<T>;
  prefer_huge_pages(grad_dst.data, grad_dst.bytes());
  const Schedule schedule = make_schedule(graph);
  const int64_t slots = num_slots(schedule), size = att.heads * att.width;
  const auto sums = scratch<A>(slots * size);
  std::fill(sums.get(), sums.get() + slots * size, A{0});
  const BackwardDst<T> pass{{{2 * att.width}, dropout, stats, delta},
                            x_src,
                            x_dst,
                            att,
                            static_cast<A>(slope),
                            grad,
                            grad_dst,
                            sums.get()};
  run_destination_pass<T>(graph, schedule, att.heads, 2 * att.width, pass);
  for (int64_t f = 0; f < size; ++f) {
    double total = 0;
    for (int64_t slot = 0; slot < slots; ++slot) total += sums[slot * size + f];
    store_one(grad_att.data + f, static_cast<A>(total));
  }
}

template <typename T>
void gatv2_backward_src(const Csr& transpose, Heads<const T> x_src, Heads<const T> x_dst,
                        Heads<const T> att, double slope, Dropout dropout,
                        SoftmaxStats<const Accumulator<T>> stats, const Accumulator<T>* delta,
                        Heads<const T> grad, Heads<T> grad_src) {
  using A = Accumulator<T>;
  prefer_huge_pages(grad_src.data, grad_src.bytes());
  const BackwardSrc<T> pass{{2 * att.width}, x_src, x_dst, att,  static_cast<A>(slope),
                            dropout,         stats, delta, grad, grad_src};
  run_pass<A>(transpose, make_schedule(transpose), att.heads, 2 * att.width, pass);
}

#define FASTGRAPH_INSTANTIATE(T)                                                                   \
  template void gatv2(const Csr&, Heads<const T>, Heads<const T>, Heads<const T>, double, Dropout, \
                      Heads<T>, SoftmaxStats<Accumulator<T>>);                                     \
  template void gatv2_backward_dst(const Csr&, Heads<const T>, Heads<const T>, Heads<const T>,     \
                                   double, Dropout, SoftmaxStats<const Accumulator<T>>,            \
                                   Heads<const T>, Accumulator<T>*, Heads<T>, Heads<T>);           \
  template void gatv2_backward_src(const Csr&, Heads<const T>, Heads<const T>, Heads<const T>,     \
                                   double, Dropout, SoftmaxStats<const Accumulator<T>>,            \
                                   const Accumulator<T>*, Heads<const T>, Heads<T>);
FASTGRAPH_INSTANTIATE(float)
FASTGRAPH_INSTANTIATE(double)
FASTGRAPH_INSTANTIATE(bfloat16)
FASTGRAPH_INSTANTIATE(float16)
#undef FASTGRAPH_INSTANTIATE

}  // namespace fastgraph
