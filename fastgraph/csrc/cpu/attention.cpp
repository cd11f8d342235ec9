// Scaled dot-product attention over neighbourhoods: the score of an entry is
// scale * <query[row], key[col]>. Where edges carry features, these follow the channels of the key
// and of the value, so queries and outputs are wider by as much.
#include "cpu/attention.h"

#include "cpu/kernels.h"

namespace fastgraph {
namespace {

// Gradients of key and value, along the transpose; state holds both.
template <typename T>
struct BackwardSrc : SourceSoftmax<T> {
  using A = Accumulator<T>;

  AttentionInputs<T> in;
  A scale;
  Result<T> grad_key;
  Result<T> grad_value;

  // The sums of head h over the entries, which start from before(N, f) and before(N, width + f) and
  // are given to after(N, f, for key, for value), N channels at a time.
  template <typename Before, typename After, typename Block>
  void sum_gradients(const Block& block, int h, const EdgeGradients<A>& given, const Before& before,
                     const After& after) const {
    const NodeRows<T> queries(in.query, in.key.width), gradients(this->grad, in.key.width);
    for_each_part<kLanes<T>, 4>(0, in.key.width, [&](auto chunk, int64_t f) {
      using C = decltype(chunk);
      constexpr int N = C::kLanes;
      constexpr std::integral_constant<int, N> kLane{};
      using V = Vector<A, N>;
      V keys[C::kCount], values[C::kCount];
#pragma GCC unroll 4
      for (int q = 0; q < C::kCount; ++q) {
        keys[q] = before(kLane, f + q * N);
        values[q] = before(kLane, in.key.width + f + q * N);
      }
      for (int i = 0; i < block.count; ++i) {
        queries.template expect<C::kWidth>(block, i, h, f);
        gradients.template expect<C::kWidth>(block, i, h, f);
        const T* query = queries.at(block, i, h) + f;
        const T* gradient = gradients.at(block, i, h) + f;
        const V score = splat<A, N>(given.score[h * block.stride + i]);
        const V weight = splat<A, N>(given.weight[h * block.stride + i]);
#pragma GCC unroll 4
        for (int q = 0; q < C::kCount; ++q) {
          keys[q] = multiply_add<A, N>(score, load<N>(query + q * N), keys[q]);
          values[q] = multiply_add<A, N>(weight, load<N>(gradient + q * N), values[q]);
        }
      }
#pragma GCC unroll 4
      for (int q = 0; q < C::kCount; ++q) after(kLane, f + q * N, keys[q], values[q]);
    });
  }

  int64_t longest_batched_row() const {
    return fastgraph::longest_batched_row(in.key.heads, in.key.width);
  }
  void absorb_batch(const RowBatch& batch, int64_t) const {
    BatchValues<A> weight(batch), score(batch);
    this->gradients_of_batch(batch, weight.data, score.data);
    const NodeRows<T> queries(in.query, in.key.width), gradients(this->grad, in.key.width);
    batch.for_each_row([&](int64_t row, EntryRange entries, int64_t) {
      sum_entries<T>(batch, entries, score.data, queries, true,
                     [&](auto piece, int64_t head, int64_t f, auto sum) {
                       constexpr int N = decltype(piece)::kLanes;
                       grad_key.row(row, head).template store<N>(f, scale * sum);
                     });
      sum_entries<T>(batch, entries, weight.data, gradients, true,
                     [&](auto piece, int64_t head, int64_t f, auto sum) {
                       grad_value.row(row, head).template store<decltype(piece)::kLanes>(f, sum);
                     });
    });
  }

  bool knows_few() const { return true; }
  void absorb_few(const SharedBlock& block, int64_t, A*) const {
    const auto grads = this->gradients(block);
    for (int h = 0; h < block.heads; ++h) {
      const ResultRow<T> key = grad_key.row(block.row, block.head + h);
      const ResultRow<T> value = grad_value.row(block.row, block.head + h);
      sum_gradients(block, h, grads, Zeros<A>{},
                    [&](auto lanes, int64_t f, auto keys, auto values) {
                      constexpr int N = decltype(lanes)::value;
                      key.template store<N>(f, scale * keys);
                      value.template store<N>(f, values);
                    });
    }
  }

  void absorb(const EdgeBlock& block, A*, A* state) const {
    A* const values = state + in.key.width;
    sum_gradients(
        block, 0, this->gradients(block),
        [&](auto lanes, int64_t f) { return load<decltype(lanes)::value>(state + f); },
        [&](auto lanes, int64_t f, auto key_sums, auto value_sums) {
          constexpr int N = decltype(lanes)::value;
          store<N>(state + f, key_sums);
          store<N>(values + f, value_sums);
        });
  }

  void finish(int64_t row, int64_t head, bool, int64_t, const A* state) const {
    const int64_t width = in.key.width;
    const ResultRow<T> key = grad_key.row(row, head), value = grad_value.row(row, head);
    for_each_part<kLanes<T>, 1>(0, width, [&](auto chunk, int64_t f) {
      constexpr int N = decltype(chunk)::kLanes;
      key.template store<N>(f, scale * load<N>(state + f));
      value.template store<N>(f, load<N>(state + width + f));
    });
  }
};

}  // namespace

template <typename T>
void attention(const OrderedCsr& graph, const AttentionInputs<T>& in, double scale, Dropout dropout,
               const SoftmaxOutputs<T>& outputs) {
  const NoBias<T> none;
  const Scores<T, NoBias<T>> scores{in, none, static_cast<Accumulator<T>>(scale)};
  run_forward<T, Scores<T, NoBias<T>>>(
      graph, 2 * in.query.width,
      {scores, NodeRows<T>(in.value), EdgeRows<T>(in.edge), dropout, outputs});
}

template <typename T>
void attention_backward_dst(const OrderedCsr& graph, const AttentionInputs<T>& in, double scale,
                            Dropout dropout, const SoftmaxGradients<T>& given,
                            Accumulator<T>* between, Heads<T> grad_query,
                            Matrix<Accumulator<T>> grad_edge) {
  run_backward_dst<T>(graph, in, NoBias<T>(), scale, dropout, given, between, grad_query,
                      grad_edge);
}

template <typename T>
void attention_backward_src(const OrderedCsr& transpose, const AttentionInputs<T>& in, double scale,
                            Dropout, const SoftmaxGradients<T>& given,
                            const Accumulator<T>* between, Heads<T> grad_key, Heads<T> grad_value) {
  using A = Accumulator<T>;
  const int64_t width = in.key.width;
  const BackwardSrc<T> pass{{{2 * width}, given.grad, between},
                            in,
                            static_cast<A>(scale),
                            Result<T>(grad_key),
                            Result<T>(grad_value)};
  run_pass<A>(transpose, make_schedule(transpose), in.key.heads, 2 * width, pass);
}

FASTGRAPH_INSTANTIATE(attention)
FASTGRAPH_INSTANTIATE(attention_backward_dst)
FASTGRAPH_INSTANTIATE(attention_backward_src)

}  // namespace fastgraph
