// Attention from one score for each node and head (Velickovic et al., Graph attention networks,
// 2018): the score of an entry is leaky_relu(score_src[col] + score_dst[row]).
#include "cpu/kernels.h"

namespace fastgraph {
namespace {

// The sums z of which the scores are leaky_relu(z).
template <typename T>
inline BlockOf<Accumulator<T>> score_sums(const EdgeBlock& block, Matrix<const T> own,
                                          Matrix<const T> others) {
  const Accumulator<T> mine = load_one(own.row(block.row) + block.head);
  BlockOf<Accumulator<T>> z{};
  for (int i = 0; i < block.count; ++i) {
    z[i] = mine + load_one(others.row(block.col(i)) + block.head);
  }
  return z;
}

template <typename A>
inline BlockOf<A> leaky_relu(BlockOf<A> z, A slope) {
  return z > BlockOf<A>{} ? z : slope * z;
}

// The sum over a block of grad[i] * leaky_relu'(z_i).
template <typename A>
inline A sum_of_slopes(BlockOf<A> z, A slope, BlockOf<A> grad) {
  return sum_of<A, kBlock>(z > BlockOf<A>{} ? grad : slope * grad);
}

template <typename T>
struct Forward : OnlineSoftmax<T> {
  using A = Accumulator<T>;

  Matrix<const T> score_src;
  Matrix<const T> score_dst;
  A slope;

  void absorb(const EdgeBlock& block, A*, A* state) const {
    block.prefetch_next(this->value);
    const auto score = leaky_relu<A>(score_sums<T>(block, score_dst, score_src), slope);
    OnlineSoftmax<T>::absorb(block, score, state);
  }

  void finish(int64_t row, int64_t head, bool empty, int64_t, const A* state) const {
    OnlineSoftmax<T>::finish(row, head, empty, state);
  }
};

// The gradient of score_dst.
template <typename T>
struct BackwardDst : DestinationSoftmax<T, BackwardDst<T>> {
  using A = Accumulator<T>;

  Heads<const T> x;
  Matrix<const T> score_src;
  Matrix<const T> score_dst;
  A slope;
  Heads<const T> grad;
  Matrix<T> grad_score_dst;

  BlockOf<A> score(const EdgeBlock& block) const {
    return leaky_relu<A>(score_sums<T>(block, score_dst, score_src), slope);
  }

  BlockOf<A> product(const EdgeBlock& block) const {
    block.prefetch_next(x);
    return dots<T>(block, grad.at(block.row, block.head), x);
  }

  void absorb(const EdgeBlock& block, const A* buffer, A* state) const {
    const auto z = score_sums<T>(block, score_dst, score_src);
    state[0] += sum_of_slopes<A>(z, slope, this->score_gradients(block, buffer));
  }

  void finish(int64_t row, int64_t head, bool, int64_t, const A* state) const {
    store_one(grad_score_dst.row(row) + head, state[0]);
  }
};

// Gradients of score_src and x, along the transpose; state holds both.
template <typename T>
struct BackwardSrc : RowSums<Accumulator<T>> {
  using A = Accumulator<T>;

  Heads<const T> x;
  Matrix<const T> score_src;
  Matrix<const T> score_dst;
  A slope;
  Dropout dropout;
  SoftmaxStats<const A> stats;
  const A* delta;
  Heads<const T> grad;
  Matrix<T> grad_score_src;
  Heads<T> grad_x;

  void absorb(const EdgeBlock& block, A*, A* state) const {
    block.prefetch_next(grad);
    const auto product = dots<T>(block, x.at(block.row, block.head), grad);
    const auto z = score_sums<T>(block, score_src, score_dst);
    const auto grads =
        gradients_of_column<A>(block, leaky_relu<A>(z, slope), product, stats, delta, dropout);
    state[0] += sum_of_slopes<A>(z, slope, grads.score);
    add_rows<T>(block, grads.weight, grad, A{1}, state + 1);
  }

  void finish(int64_t row, int64_t head, bool, int64_t, const A* state) const {
    store_one(grad_score_src.row(row) + head, state[0]);
    for_each_part<kLanes<T>, 1>(0, x.width, [&](auto chunk, int64_t f) {
      constexpr int N = decltype(chunk)::kLanes;
      store<N>(grad_x.at(row, head) + f, load<N>(state + 1 + f));
    });
  }
};

}  // namespace

template <typename T>
void gat(const Csr& graph, Heads<const T> x, Matrix<const T> score_src, Matrix<const T> score_dst,
         double slope, Dropout dropout, Heads<T> out, SoftmaxStats<Accumulator<T>> stats) {
  prefer_huge_pages(out.data, out.bytes());
  const Forward<T> pass{
      {x, out, stats, dropout}, score_src, score_dst, static_cast<Accumulator<T>>(slope)};
  run_pass<Accumulator<T>>(graph, make_schedule(graph), out.heads, out.width, pass);
}

template <typename T>
void gat_backward_dst(const Csr& graph, Heads<const T> x, Matrix<const T> score_src,
                      Matrix<const T> score_dst, double slope, Dropout dropout,
                      SoftmaxStats<const Accumulator<T>> stats, Heads<const T> grad,
                      Accumulator<T>* delta, Matrix<T> grad_score_dst) {
  using A = Accumulator<T>;
  const BackwardDst<T> pass{{{1}, dropout, stats, delta}, x,    score_src,     score_dst,
                            static_cast<A>(slope),        grad, grad_score_dst};
  run_destination_pass<T>(graph, make_schedule(graph), x.heads, x.width, pass);
}

template <typename T>
void gat_backward_src(const Csr& transpose, Heads<const T> x, Matrix<const T> score_src,
                      Matrix<const T> score_dst, double slope, Dropout dropout,
                      SoftmaxStats<const Accumulator<T>> stats, const Accumulator<T>* delta,
                      Heads<const T> grad, Matrix<T> grad_score_src, Heads<T> grad_x) {
  using A = Accumulator<T>;
  prefer_huge_pages(grad_x.data, grad_x.bytes());
  const BackwardSrc<T> pass{{1 + x.width}, x,     score_src, score_dst, static_cast<A>(slope),
                            dropout,       stats, delta,     grad,      grad_score_src,
                            grad_x};
  run_pass<A>(transpose, make_schedule(transpose), x.heads, 2 * x.width, pass);
}

#define FASTGRAPH_INSTANTIATE(T)                                                                   \
  template void gat(const Csr&, Heads<const T>, Matrix<const T>, Matrix<const T>, double, Dropout, \
                    Heads<T>, SoftmaxStats<Accumulator<T>>);                                       \
  template void gat_backward_dst(const Csr&, Heads<const T>, Matrix<const T>, Matrix<const T>,     \
                                 double, Dropout, SoftmaxStats<const Accumulator<T>>,              \
                                 Heads<const T>, Accumulator<T>*, Matrix<T>);                      \
  template void gat_backward_src(const Csr&, Heads<const T>, Matrix<const T>, Matrix<const T>,     \
                                 double, Dropout, SoftmaxStats<const Accumulator<T>>,              \
                                 const Accumulator<T>*, Heads<const T>, Matrix<T>, Heads<T>);
FASTGRAPH_INSTANTIATE(float)
FASTGRAPH_INSTANTIATE(double)
FASTGRAPH_INSTANTIATE(bfloat16)
FASTGRAPH_INSTANTIATE(float16)
#undef FASTGRAPH_INSTANTIATE

}  // namespace fastgraph
