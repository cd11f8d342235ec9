// Attention by sub-blocks, forward: the softmaxes of sixteen queries at once.
#include "cpu/block_attention.h"

#include <limits>

#include "cpu/block_lanes.h"
#include "cpu/kernels.h"
#include "fastgraph/exponential.h"

namespace fastgraph {
namespace {

template <typename T>
struct Forward {
  using A = Accumulator<T>;
  using V = BlockOf<A>;
  static constexpr A kLowest = -std::numeric_limits<A>::infinity();

  const Windows& windows;
  const BlockAttentionInputs<T>& in;
  const ColumnBias<T>& bias;
  A scale;
  Heads<T> out;
  SoftmaxStats<A> stats;

  struct Memory {
    Scratch<A> query, sum, score, largest, total;
    Scratch<int32_t> types;

    Memory(int64_t heads, int64_t width)
        : query(scratch<A>(heads * width * kWindow)),
          sum(scratch<A>(heads * width * kWindow)),
          score(scratch<A>(kColumns * kWindow)),
          largest(scratch<A>(heads * kWindow)),
          total(scratch<A>(heads * kWindow)),
          types(scratch<int32_t>(kColumns * kWindow)) {}
  };

  // Adds columns to the softmaxes of a head, and weighted values to their sums.
  FASTGRAPH_INLINE void absorb(const Columns& columns, bool masked, const Memory& at) const {
    const int64_t channels = in.query.width * kWindow, head = columns.head;
    A *const score = at.score.get(), *const sum = at.sum.get() + head * channels;
    A *const largest = at.largest.get() + head * kWindow, *const all =
                                                              at.total.get() + head * kWindow;
    multiply_all_columns<T>(columns, in.key, scale, at.query.get() + head * channels, score);
    bias.add(columns, at.types.get(), score);
    const V before = load<kWindow>(largest);
    V top = before;
    for (int64_t i = 0; i < columns.size(); ++i) {
      top = larger<A, kWindow>(load<kWindow>(score + i * kWindow), top);
    }
    const V origin = top == splat<A, kWindow>(kLowest) ? V{} : top;
    const V shrunk = exp_of_negative<kWindow>(before - origin);
    V total{};
    for (int64_t i = 0; i < columns.size(); ++i) {
      const V weight = exp_of_negative<kWindow>(load<kWindow>(score + i * kWindow) - origin);
      total += weight;
      store<kWindow>(score + i * kWindow, weight);
    }
    for (int64_t c = 0; c < channels; c += kWindow) {
      store<kWindow>(sum + c, shrunk * load<kWindow>(sum + c));
    }
    store<kWindow>(largest, top);
    store<kWindow>(all, load<kWindow>(all) * shrunk + total);
    add_columns<T>(columns, in.value, masked, score, sum);
  }

  void run(int64_t window, bool masked, const Memory& at) const {
    const int64_t row = window * kWindow, heads = in.query.heads, width = in.query.width;
    load_lanes<T>(in.query, row, at.query.get());
    std::fill_n(at.sum.get(), heads * width * kWindow, A{0});
    std::fill_n(at.largest.get(), heads * kWindow, kLowest);
    std::fill_n(at.total.get(), heads * kWindow, A{0});
    int32_t with_edges = 0;
    for_each_columns(windows, window, heads * width, [&](Columns& columns) {
      bias.read_types(columns, at.types.get());
      for (int64_t i = 0; i < columns.size(); ++i) with_edges |= columns.lanes(i);
      for (; columns.head < heads; ++columns.head) absorb(columns, masked, at);
    });
    if (!masked && !all_finite(at.sum.get(), heads * width)) return run(window, true, at);
    const auto undefined = lanes_of<A>(bias.given() ? 0 : with_edges);
    for (int64_t head = 0; head < heads; ++head) finish(row, head, undefined, at);
    store_lanes<T>(at.sum.get(), A{1}, out, row);
  }

  // Divides the sums of a head, and writes what is known of its softmaxes. Scores of -infinity
  // alone are those of a node without edges, or where they are `undefined` give NaN.
  void finish(int64_t row, int64_t head, LaneMask<A> undefined, const Memory& at) const {
    const V total = load<kWindow>(at.total.get() + head * kWindow);
    const V largest = load<kWindow>(at.largest.get() + head * kWindow);
    const V lowest = splat<A, kWindow>(kLowest);
    const V inverse = total == V{} ? (undefined ? -lowest : V{}) : 1 / total;
    const V known = largest == lowest ? (undefined ? lowest : V{}) : largest;
    A* const sum = at.sum.get() + head * in.query.width * kWindow;
    for (int64_t c = 0; c < in.query.width * kWindow; c += kWindow) {
      store<kWindow>(sum + c, inverse == V{} ? V{} : inverse * load<kWindow>(sum + c));
    }
    for (int64_t i = 0; i < std::min<int64_t>(kWindow, windows.nodes - row); ++i) {
      stats.at(row + i, head)[0] = known[i];
      stats.at(row + i, head)[1] = inverse[i];
    }
  }
};

}  // namespace

template <typename T>
void block_attention(const Windows& windows, const BlockAttentionInputs<T>& in, double scale,
                     Heads<T> out, SoftmaxStats<Accumulator<T>> stats) {
  using Memory = typename Forward<T>::Memory;
  const ColumnBias<T> bias(in.bias);
  const Forward<T> pass{windows, in, bias, static_cast<Accumulator<T>>(scale), out, stats};
  for_each_window<Memory>(
      windows, in.query.heads, in.query.width,
      [&](int64_t, int64_t window, const Memory& at) { pass.run(window, false, at); });
}

FASTGRAPH_INSTANTIATE(block_attention)

}  // namespace fastgraph
