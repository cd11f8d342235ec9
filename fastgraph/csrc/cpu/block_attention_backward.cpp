// Attention by sub-blocks, backward: gradients of sixteen queries at once, then of sixteen keys and
// values. Both passes make the weights again, from what the forward pass has left.
#include "cpu/block_attention.h"
#include "cpu/block_lanes.h"
#include "cpu/kernels.h"
#include "fastgraph/exponential.h"

namespace fastgraph {
namespace {

// Of all heads of the nodes of a window, two tensors and their gradients, and of some columns
// scores or weights, and products with the gradient of the output or gradients of scores.
template <typename T>
struct Memory {
  using A = Accumulator<T>;

  Scratch<A> first, second, of_first, of_second, score, product, softmax;
  Scratch<int32_t> types;

  Memory(int64_t heads, int64_t width)
      : first(scratch<A>(heads * width * kWindow)),
        second(scratch<A>(heads * width * kWindow)),
        of_first(scratch<A>(heads * width * kWindow)),
        of_second(scratch<A>(heads * width * kWindow)),
        score(scratch<A>(kColumns * kWindow)),
        product(scratch<A>(kColumns * kWindow)),
        softmax(scratch<A>(3 * heads * kWindow)),
        types(scratch<int32_t>(kColumns * kWindow)) {}
};

// The largest score, the inverse sum of a softmax, and the mean of the gradients of its weights.
template <typename V>
struct KnownSoftmax {
  V largest, inverse, delta;
};

// What both passes have.
template <typename T>
struct Pass {
  using A = Accumulator<T>;
  using V = BlockOf<A>;

  const Windows& windows;
  const BlockAttentionInputs<T>& in;
  const ColumnBias<T>& bias;
  A scale;
  SoftmaxGradients<T> given;

  // Scores of columns to weights; known(i) are the softmaxes of a column. Weights and products with
  // the gradient of the output are 0 where there is no edge.
  template <typename Known>
  FASTGRAPH_INLINE void weigh(const Columns& columns, const Memory<T>& at,
                              const Known& known) const {
    bias.add(columns, at.types.get(), at.score.get());
    for (int64_t i = 0; i < columns.size(); ++i) {
      A* const score = at.score.get() + i * kWindow;
      A* const product = at.product.get() + i * kWindow;
      const KnownSoftmax<V> own = known(i);
      const V above = load<kWindow>(score) - own.largest;
      store<kWindow>(score, exp_of_negative<kWindow>(above > V{} ? V{} : above) * own.inverse);
      if (columns.lanes(i) == kAllLanes) continue;
      const V found = load<kWindow>(product);
      store<kWindow>(product, lanes_of<A>(columns.lanes(i)) ? found : V{});
    }
  }

  // Products to gradients of scores.
  template <typename Known>
  FASTGRAPH_INLINE void differentiate(const Columns& columns, const Memory<T>& at,
                                      const Known& known) const {
    for (int64_t i = 0; i < columns.size(); ++i) {
      A* const product = at.product.get() + i * kWindow;
      const V weight = load<kWindow>(at.score.get() + i * kWindow);
      store<kWindow>(product, weight * (load<kWindow>(product) - known(i).delta));
    }
  }
};

template <typename T>
struct OfQueries : Pass<T> {
  using A = Accumulator<T>;
  using V = BlockOf<A>;

  A* delta;
  Heads<T> grad_query;

  // of_types: the gradient of the table that the window's group adds up, or null.
  void run(int64_t window, bool masked, const Memory<T>& at, A* of_types) const {
    const int64_t row = window * kWindow, heads = this->in.query.heads;
    const int64_t width = this->in.query.width, channels = width * kWindow;
    load_lanes<T>(this->in.query, row, at.first.get());
    load_lanes<T>(this->given.grad, row, at.second.get());
    std::fill_n(at.of_first.get(), heads * channels, A{0});
    for (int64_t head = 0; head < heads; ++head) read_softmax(row, head, at);
    const int64_t size = this->windows.ptr[window + 1] - this->windows.ptr[window];
    if (size > kColumns) {  // the mean of gradients is known before any is taken from it
      for_each_columns(this->windows, window, heads * width, [&](Columns& columns) {
        this->bias.read_types(columns, at.types.get());
        for (; columns.head < heads; ++columns.head) weigh_columns(columns, at, true);
      });
    }
    for_each_columns(this->windows, window, heads * width, [&](Columns& columns) {
      this->bias.read_types(columns, at.types.get());
      for (; columns.head < heads; ++columns.head) {
        weigh_columns(columns, at, size <= kColumns);
        const KnownSoftmax<V> known = softmax_of(columns.head, at);
        this->differentiate(columns, at, [&](int64_t) { return known; });
        add_columns<T>(columns, this->in.key, masked, at.product.get(),
                       at.of_first.get() + columns.head * channels);
        if (of_types != nullptr && !masked) add_types(columns, at, of_types);
      }
    });
    if (!masked && !all_finite(at.of_first.get(), heads * width)) {
      return run(window, true, at, of_types);
    }
    for (int64_t head = 0; head < heads; ++head) {
      for (int64_t i = 0; i < std::min<int64_t>(kWindow, grad_query.nodes - row); ++i) {
        delta[(row + i) * heads + head] = softmax_of(head, at).delta[i];
      }
    }
    store_lanes<T>(at.of_first.get(), this->scale, grad_query, row);
  }

  // Weights of columns, and if asked for what they add to the mean of gradients.
  FASTGRAPH_INLINE void weigh_columns(const Columns& columns, const Memory<T>& at,
                                      bool adds) const {
    const int64_t begin = columns.head * this->in.query.width * kWindow;
    multiply_all_columns<T>(columns, this->in.key, this->scale, at.first.get() + begin,
                            at.score.get());
    multiply_all_columns<T>(columns, this->in.value, A{1}, at.second.get() + begin,
                            at.product.get());
    const KnownSoftmax<V> known = softmax_of(columns.head, at);
    this->weigh(columns, at, [&](int64_t) { return known; });
    if (!adds) return;
    V sum{};
    for (int64_t c = 0; c < columns.size() * kWindow; c += kWindow) {
      const V weight = load<kWindow>(at.score.get() + c);
      sum = multiply_add<A, kWindow>(weight, load<kWindow>(at.product.get() + c), sum);
    }
    store<kWindow>(at.softmax.get() + (3 * columns.head + 2) * kWindow, known.delta + sum);
  }

  // What is known of the softmaxes of a head, to working memory and from there.
  void read_softmax(int64_t row, int64_t head, const Memory<T>& at) const {
    A* const to = at.softmax.get() + 3 * head * kWindow;
    std::fill_n(to, 3 * kWindow, A{0});
    for (int64_t i = 0; i < std::min<int64_t>(kWindow, grad_query.nodes - row); ++i) {
      to[i] = this->given.stats.at(row + i, head)[0];
      to[kWindow + i] = this->given.stats.at(row + i, head)[1];
      to[2 * kWindow + i] = -this->given.of_logsum(row + i, head);
    }
  }
  FASTGRAPH_INLINE KnownSoftmax<V> softmax_of(int64_t head, const Memory<T>& at) const {
    const A* const from = at.softmax.get() + 3 * head * kWindow;
    return {load<kWindow>(from), load<kWindow>(from + kWindow), load<kWindow>(from + 2 * kWindow)};
  }

  // Gradients of scores to those of types, [types, heads].
  void add_types(const Columns& columns, const Memory<T>& at, A* of_types) const {
    for (int64_t i = 0; i < columns.size(); ++i) {
      for (auto left = static_cast<uint32_t>(columns.lanes(i)); left != 0; left &= left - 1) {
        const int64_t place = i * kWindow + __builtin_ctz(left);
        of_types[at.types[place] * this->in.query.heads + columns.head] += at.product[place];
      }
    }
  }
};

template <typename T>
struct OfKeys : Pass<T> {
  using A = Accumulator<T>;
  using V = BlockOf<A>;

  const A* delta;
  Heads<T> grad_key;
  Heads<T> grad_value;

  void run(int64_t window, bool masked, const Memory<T>& at) const {
    const auto& in = this->in;
    const auto& grad = this->given.grad;
    const int64_t row = window * kWindow, heads = in.query.heads;
    const int64_t width = in.query.width, channels = width * kWindow;
    load_lanes<T>(in.key, row, at.first.get());
    load_lanes<T>(in.value, row, at.second.get());
    std::fill_n(at.of_first.get(), heads * channels, A{0});
    std::fill_n(at.of_second.get(), heads * channels, A{0});
    for_each_columns(this->windows, window, heads * width, [&](Columns& columns) {
      this->bias.read_types(columns, at.types.get());
      for (; columns.head < heads; ++columns.head) {
        const int64_t begin = columns.head * channels;
        multiply_all_columns<T>(columns, in.query, this->scale, at.first.get() + begin,
                                at.score.get());
        multiply_all_columns<T>(columns, grad, A{1}, at.second.get() + begin, at.product.get());
        const auto known = [&](int64_t i) {
          const int64_t node = columns.windows.node[columns.begin + i];
          const A* const stats = this->given.stats.at(node, columns.head);
          return KnownSoftmax<V>{splat<A, kWindow>(stats[0]), splat<A, kWindow>(stats[1]),
                                 splat<A, kWindow>(delta[node * heads + columns.head])};
        };
        this->weigh(columns, at, known);
        this->differentiate(columns, at, known);
        add_columns<T>(columns, in.query, masked, at.product.get(), at.of_first.get() + begin);
        add_columns<T>(columns, grad, masked, at.score.get(), at.of_second.get() + begin);
      }
    });
    const bool finite = all_finite(at.of_first.get(), heads * width) &&
                        all_finite(at.of_second.get(), heads * width);
    if (!masked && !finite) return run(window, true, at);
    store_lanes<T>(at.of_first.get(), this->scale, grad_key, row);
    store_lanes<T>(at.of_second.get(), A{1}, grad_value, row);
  }
};

}  // namespace

template <typename T>
void block_attention_backward_queries(const Windows& windows, const BlockAttentionInputs<T>& in,
                                      double scale, const SoftmaxGradients<T>& given,
                                      Accumulator<T>* delta, Heads<T> grad_query, T* grad_table) {
  using A = Accumulator<T>;
  const ColumnBias<T> bias(in.bias);
  const OfQueries<T> pass{{windows, in, bias, static_cast<A>(scale), given}, delta, grad_query};
  const int64_t heads = in.query.heads;
  const int64_t size = grad_table == nullptr ? 0 : in.bias.values.rows * heads;
  const auto of_groups = scratch<A>(kWindowGroups * size);
  std::fill_n(of_groups.get(), kWindowGroups * size, A{0});
  for_each_window<Memory<T>>(
      windows, heads, in.query.width, [&](int64_t group, int64_t window, const Memory<T>& at) {
        pass.run(window, false, at, size > 0 ? of_groups.get() + group * size : nullptr);
      });
  for (int64_t i = 0; i < size; ++i) {
    A sum{0};
    for (int64_t group = 0; group < kWindowGroups; ++group) sum += of_groups[group * size + i];
    store_one(grad_table + i, sum);
  }
}

template <typename T>
void block_attention_backward_keys(const Windows& windows, const BlockAttentionInputs<T>& in,
                                   double scale, const SoftmaxGradients<T>& given,
                                   const Accumulator<T>* delta, Heads<T> grad_key,
                                   Heads<T> grad_value) {
  using A = Accumulator<T>;
  const ColumnBias<T> bias(in.bias);
  const OfKeys<T> pass{
      {windows, in, bias, static_cast<A>(scale), given}, delta, grad_key, grad_value};
  for_each_window<Memory<T>>(
      windows, in.query.heads, in.query.width,
      [&](int64_t, int64_t window, const Memory<T>& at) { pass.run(window, false, at); });
}

FASTGRAPH_INSTANTIATE(block_attention_backward_queries)
FASTGRAPH_INSTANTIATE(block_attention_backward_keys)

}  // namespace fastgraph
