// Scaled dot-product attention over neighbourhoods: the score of an entry is
// scale * <query[row], key[col]>.
#include "cpu/kernels.h"

namespace fastgraph {
namespace {

template <typename T>
inline BlockOf<Accumulator<T>> dot_scores(const EdgeBlock& block, const T* own,
                                          Heads<const T> others, Accumulator<T> scale) {
  return dots<T>(block, own, others) * scale;
}

template <typename T>
struct Forward : OnlineSoftmax<T> {
  using A = Accumulator<T>;

  Heads<const T> query;
  Heads<const T> key;
  A scale;

  void absorb(const EdgeBlock& block, A*, A* state) const {
    block.prefetch_next(key);
    block.prefetch_next(this->value);
    const auto score = dot_scores<T>(block, query.at(block.row, block.head), key, scale);
    OnlineSoftmax<T>::absorb(block, score, state);
  }

  void finish(int64_t row, int64_t head, bool empty, int64_t, const A* state) const {
    OnlineSoftmax<T>::finish(row, head, empty, state);
  }
};

// The gradient of query.
template <typename T>
struct BackwardDst : DestinationSoftmax<T, BackwardDst<T>> {
  using A = Accumulator<T>;

  Heads<const T> query;
  Heads<const T> key;
  Heads<const T> value;
  A scale;
  Heads<const T> grad;
  Heads<T> grad_query;

  BlockOf<A> score(const EdgeBlock& block) const {
    block.prefetch_next(key);
    return dot_scores<T>(block, query.at(block.row, block.head), key, scale);
  }

  BlockOf<A> product(const EdgeBlock& block) const {
    block.prefetch_next(value);
    return dots<T>(block, grad.at(block.row, block.head), value);
  }

  void absorb(const EdgeBlock& block, const A* buffer, A* state) const {
    add_rows<T>(block, this->score_gradients(block, buffer), key, A{1}, state);
  }

  void finish(int64_t row, int64_t head, bool, int64_t, const A* state) const {
    for_each_part<kLanes<T>, 1>(0, key.width, [&](auto chunk, int64_t f) {
      constexpr int N = decltype(chunk)::kLanes;
      store<N>(grad_query.at(row, head) + f, scale * load<N>(state + f));
    });
  }
};

// Gradients of key and value, along the transpose; state holds both.
template <typename T>
struct BackwardSrc : RowSums<Accumulator<T>> {
  using A = Accumulator<T>;

  Heads<const T> query;
  Heads<const T> key;
  Heads<const T> value;
  A scale;
  Dropout dropout;
  SoftmaxStats<const A> stats;
  const A* delta;
  Heads<const T> grad;
  Heads<T> grad_key;
  Heads<T> grad_value;

  void absorb(const EdgeBlock& block, A*, A* state) const {
    block.prefetch_next(query);
    block.prefetch_next(grad);
    const auto product = dots<T>(block, value.at(block.row, block.head), grad);
    const auto score = dot_scores<T>(block, key.at(block.row, block.head), query, scale);
    const auto grads = gradients_of_column<A>(block, score, product, stats, delta, dropout);
    add_rows<T>(block, grads.score, query, A{1}, state);
    add_rows<T>(block, grads.weight, grad, A{1}, state + key.width);
  }

  void finish(int64_t row, int64_t head, bool, int64_t, const A* state) const {
    for_each_part<kLanes<T>, 1>(0, key.width, [&](auto chunk, int64_t f) {
      constexpr int N = decltype(chunk)::kLanes;
      store<N>(grad_key.at(row, head) + f, scale * load<N>(state + f));
      store<N>(grad_value.at(row, head) + f, load<N>(state + key.width + f));
    });
  }
};

}  // namespace

template <typename T>
void attention(const Csr& graph, Heads<const T> query, Heads<const T> key, Heads<const T> value,
               double scale, Dropout dropout, Heads<T> out, SoftmaxStats<Accumulator<T>> stats) {
  prefer_huge_pages(out.data, out.bytes());
  const Forward<T> pass{
      {value, out, stats, dropout}, query, key, static_cast<Accumulator<T>>(scale)};
  run_pass<Accumulator<T>>(graph, make_schedule(graph), out.heads, 2 * out.width, pass);
}

template <typename T>
void attention_backward_dst(const Csr& graph, Heads<const T> query, Heads<const T> key,
                            Heads<const T> value, double scale, Dropout dropout,
                            SoftmaxStats<const Accumulator<T>> stats, Heads<const T> grad,
                            Accumulator<T>* delta, Heads<T> grad_query) {
  using A = Accumulator<T>;
  prefer_huge_pages(grad_query.data, grad_query.bytes());
  const BackwardDst<T> pass{{{key.width}, dropout, stats, delta},
                            query,
                            key,
                            value,
                            static_cast<A>(scale),
                            grad,
                            grad_query};
  run_destination_pass<T>(graph, make_schedule(graph), key.heads, 2 * key.width, pass);
}

template <typename T>
void attention_backward_src(const Csr& transpose, Heads<const T> query, Heads<const T> key,
                            Heads<const T> value, double scale, Dropout dropout,
                            SoftmaxStats<const Accumulator<T>> stats, const Accumulator<T>* delta,
                            Heads<const T> grad, Heads<T> grad_key, Heads<T> grad_value) {
  using A = Accumulator<T>;
  prefer_huge_pages(grad_key.data, grad_key.bytes());
  prefer_huge_pages(grad_value.data, grad_value.bytes());
  const BackwardSrc<T> pass{{2 * key.width}, query, key,   value, static_cast<A>(scale),
                            dropout,         stats, delta, grad,  grad_key,
                            grad_value};
  run_pass<A>(transpose, make_schedule(transpose), key.heads, 2 * key.width, pass);
}

#define FASTGRAPH_INSTANTIATE(T)                                                                   \
  template void attention(const Csr&, Heads<const T>, Heads<const T>, Heads<const T>, double,      \
                          Dropout, Heads<T>, SoftmaxStats<Accumulator<T>>);                        \
  template void attention_backward_dst(const Csr&, Heads<const T>, Heads<const T>, Heads<const T>, \
                                       double, Dropout, SoftmaxStats<const Accumulator<T>>,        \
                                       Heads<const T>, Accumulator<T>*, Heads<T>);                 \
  template void attention_backward_src(const Csr&, Heads<const T>, Heads<const T>, Heads<const T>, \
                                       double, Dropout, SoftmaxStats<const Accumulator<T>>,        \
                                       const Accumulator<T>*, Heads<const T>, Heads<T>, Heads<T>);
FASTGRAPH_INSTANTIATE(float)
FASTGRAPH_INSTANTIATE(double)
FASTGRAPH_INSTANTIATE(bfloat16)
FASTGRAPH_INSTANTIATE(float16)
#undef FASTGRAPH_INSTANTIATE

}  // namespace fastgraph
