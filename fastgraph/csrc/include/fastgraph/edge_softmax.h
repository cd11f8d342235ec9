// Attention over neighbourhoods without a tensor of size edges x channels.
//
// A pass visits the entries of each row in blocks whose scores are computed together. A long row
// has several blocks for each head and sums that grow from one to the next; a row of few entries
// has one block, which heads share. The forward pass keeps a running softmax (Milakov and
// Gimelshein, Online normalizer calculation for softmax, 2018). What it leaves for the backward
// passes are the largest score and the inverse of the sum of exponentials of each row and head; a
// single log-sum-exp could not hold both when scores are large. The gradient of a score is p
// (product - delta), where product is keep <grad_out, value> and delta the sum of p product over
// the row. delta is not taken from <out, grad_out>, which equals it in exact arithmetic only: where
// one edge holds all the weight, both roundings must cancel. The pass over destinations leaves two
// numbers for each entry and head, keep p and the gradient of the score, so that the pass over
// sources only gathers; computing them again would cost it twice the time.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "fastgraph/attention_arguments.h"
#include "fastgraph/chunks.h"
#include "fastgraph/exponential.h"
#include "fastgraph/memory.h"
#include "fastgraph/parallel.h"
#include "fastgraph/philox.h"
#include "fastgraph/result.h"
#include "fastgraph/schedule.h"
#include "fastgraph/simd.h"
#include "fastgraph/views.h"

namespace fastgraph {

// Entries whose scores are computed together: their rows stay in the first cache.
constexpr int kBlock = 16;

template <typename A>
using BlockOf = Vector<A, kBlock>;

// Some entries of one row. Vectors over a block of them have `stride` lanes for each of its heads,
// of which the first `count` are in use, one for each entry.
struct Entries {
  const Csr& graph;
  int64_t row;
  int64_t head;   // the first
  int64_t entry;  // the first
  int count;

  int64_t col(int i) const { return graph.col[entry + i]; }
  int64_t edge(int i) const { return graph.edge(entry + i); }
};

// Entries seen by one head.
struct EdgeBlock : Entries {
  static constexpr int heads = 1;
  static constexpr int stride = kBlock;
};

// All entries of a row of few, seen by several heads.
struct SharedBlock : Entries {
  int heads;   // heads * stride <= kBlock
  int stride;  // a power of 2
};

// Calls body(lane, i, h) for the lanes in use: entry i seen by head h of the block.
template <typename Block, typename Body>
inline void for_each_lane(const Block& block, const Body& body) {
  for (int h = 0; h < block.heads; ++h) {
    for (int i = 0; i < block.count; ++i) body(h * block.stride + i, i, h);
  }
}

// The entries [begin, end) of a row, seen by all heads.
struct RowEntries {
  const Csr& graph;
  int64_t row;
  int64_t heads;
  int64_t begin;
  int64_t end;

  // Calls body(block, place), place counting the calls. All heads see some entries before any sees
  // the next ones, so that what is gathered is read in pieces as long as a node has features.
  template <typename Body>
  void for_each_block(const Body& body) const {
    int64_t place = 0;
    for (int64_t entry = begin; entry < end; entry += kBlock) {
      const int count = static_cast<int>(std::min<int64_t>(kBlock, end - entry));
      for (int64_t head = 0; head < heads; ++head) {
        body(EdgeBlock{{graph, row, head, entry, count}}, place++);
      }
    }
  }

  // Whether one block holds what a head sees of the row.
  bool few() const { return begin < end && end - begin <= kBlock; }

  // Calls body(block) for the blocks, as few as there can be, that hold a row of few entries.
  template <typename Body>
  void for_each_shared_block(const Body& body) const {
    const int count = static_cast<int>(end - begin);
    int stride = 1;
    while (stride < count) stride *= 2;
    for (int64_t head = 0; head < heads; head += kBlock / stride) {
      const int shared = static_cast<int>(std::min<int64_t>(kBlock / stride, heads - head));
      body(SharedBlock{{graph, row, head, begin, count}, shared, stride});
    }
  }
};

// 0 for dropped entries, 1 / (1 - rate) for the others; a function of seed, edge and head.
template <typename A, typename Block>
BlockOf<A> kept(const Dropout& dropout, const Block& block) {
  if (dropout.rate == 0) return splat<A, kBlock>(1);
  Vector<uint32_t, kBlock> edge{}, head{};
  for_each_lane(block, [&](int lane, int i, int h) {
    edge[lane] = static_cast<uint32_t>(block.edge(i));
    head[lane] = static_cast<uint32_t>(block.head + h);
  });
  const auto bits = philox<kBlock>(dropout.seed, edge, head);
  const auto threshold = static_cast<uint32_t>(std::min(dropout.rate * 0x1p32, 0x1p32 - 1));
  const A scale = dropout.rate < 1 ? static_cast<A>(1 / (1 - dropout.rate)) : A{0};
  A factor[kBlock];
  for (int i = 0; i < kBlock; ++i) factor[i] = bits[i] < threshold ? A{0} : scale;
  return load<kBlock>(factor);
}

// The first channels of the nodes that entries lead to, all of them unless told.
template <typename T>
struct NodeRows {
  Heads<const T> x;
  int64_t width;
  bool seen = false;  // the pass has just read the same rows

  explicit NodeRows(Heads<const T> all) : NodeRows(all, all.width) {}
  NodeRows(Heads<const T> all, int64_t count) : x(all), width(count) {}

  static NodeRows seen_before(Heads<const T> all) {
    NodeRows rows(all);
    rows.seen = true;
    return rows;
  }

  const T* at(const Entries& block, int i, int h = 0) const {
    return x.at(block.col(i), block.head + h);
  }

  // Asks for what entries further on will need where entry i reads kCount values at f.
  template <int kCount>
  FASTGRAPH_PREFETCHES void expect(const Entries& block, int i, int h, int64_t f) const {
    const int64_t entry = block.entry + i + kAhead;
    if (seen || entry >= block.graph.num_entries) return;
    prefetch<kCount * sizeof(T)>(x.at(block.graph.col[entry], block.head + h) + f);
  }
};

// What the edges of entries carry, the same for all heads; nothing if the width is 0.
template <typename T>
struct EdgeRows {
  Matrix<const T> x;
  int64_t width;

  explicit EdgeRows(Matrix<const T> all) : x(all), width(all.width) {}

  const T* at(const Entries& block, int i, int = 0) const { return x.row(block.edge(i)); }

  // Rows of edges mostly follow each other in memory.
  template <int kCount>
  void expect(const Entries&, int, int, int64_t) const {}
};

// One value for each edge and head, [edges, heads]; without data a zero.
template <typename T, typename Block>
inline BlockOf<Accumulator<T>> load_edges(const Block& block, Matrix<const T> x) {
  BlockOf<Accumulator<T>> values{};
  if (x.data == nullptr) return values;
  for_each_lane(block, [&](int lane, int i, int h) {
    values[lane] = load_one(x.row(block.edge(i)) + block.head + h);
  });
  return values;
}

// The reverse; without data nothing is written.
template <typename T, typename Block>
inline void store_edges(const Block& block, BlockOf<Accumulator<T>> values, Matrix<T> x) {
  if (x.data == nullptr) return;
  for_each_lane(block, [&](int lane, int i, int h) {
    store_one(x.row(block.edge(i)) + block.head + h, values[lane]);
  });
}

// The sums of vectors that stand for the lanes in use, and zeros; writes v.
template <typename A, int N, typename Block>
inline BlockOf<A> sums_of_block(const Block& block, Vector<A, N> (&v)[kBlock]) {
  for (int h = 0; h + 1 < block.heads; ++h) {
    for (int i = block.count; i < block.stride; ++i) v[h * block.stride + i] = Vector<A, N>{};
  }
  const int count = (block.heads - 1) * block.stride + block.count;
  Vector<A, N> sums[kBlock / N] = {};
#pragma GCC unroll 16
  for (int i = 0; i < kBlock / N; ++i) {
    if (i * N < count) sums[i] = sums_of<A, N>(v + i * N, std::min(count - i * N, N));
  }
  BlockOf<A> result;
  std::memcpy(&result, sums, sizeof(result));
  return result;
}

// <own, rows[i]> of each entry i; `own` are the channels of the row's node from `first` on.
template <typename T, typename Rows, typename Block>
inline BlockOf<Accumulator<T>> dots(const Block& block, Heads<const T> nodes, int64_t first,
                                    const Rows& rows) {
  using A = Accumulator<T>;
  BlockOf<A> result{};
  for_each_part<kLanes<T>, 4>(0, rows.width, [&](auto chunk, int64_t f) {
    using C = decltype(chunk);
    using V = Vector<A, C::kLanes>;
    V mine[C::kCount], sums[kBlock];
    for (int h = 0; h < block.heads; ++h) {
      const T* own = nodes.at(block.row, block.head + h) + first + f;
#pragma GCC unroll 4
      for (int q = 0; q < C::kCount; ++q) mine[q] = load<C::kLanes>(own + q * C::kLanes);
      for (int i = 0; i < block.count; ++i) {
        rows.template expect<C::kWidth>(block, i, h, f);
        const T* row = rows.at(block, i, h) + f;
        V sum{};
#pragma GCC unroll 4
        for (int q = 0; q < C::kCount; ++q) {
          sum = multiply_add<A, C::kLanes>(mine[q], load<C::kLanes>(row + q * C::kLanes), sum);
        }
        sums[h * block.stride + i] = sum;
      }
    }
    result += sums_of_block<A, C::kLanes>(block, sums);
  });
  return result;
}

// The beginning of sums that start from nothing.
template <typename A>
struct Zeros {
  template <int N>
  Vector<A, N> operator()(std::integral_constant<int, N>, int64_t) const {
    return Vector<A, N>{};
  }
};

// The sum over the entries of weight[i] * rows[i] for head h of the block, N channels at a time: it
// starts from before(N, f) and is given to after(N, f, sum).
template <typename A, typename Rows, typename Before, typename After, typename Block>
inline void sum_rows(const Block& block, int h, BlockOf<A> weight, const Rows& rows,
                     const Before& before, const After& after) {
  constexpr int kWide = kVectorBytes / static_cast<int>(sizeof(A));
  for_each_part<kWide, 8>(0, rows.width, [&](auto chunk, int64_t f) {
    using C = decltype(chunk);
    constexpr std::integral_constant<int, C::kLanes> kLane{};
    Vector<A, C::kLanes> total[C::kCount];
#pragma GCC unroll 8
    for (int q = 0; q < C::kCount; ++q) total[q] = before(kLane, f + q * C::kLanes);
    for (int i = 0; i < block.count; ++i) {
      rows.template expect<C::kWidth>(block, i, h, f);
      const auto* row = rows.at(block, i, h) + f;
      const auto w = splat<A, C::kLanes>(weight[h * block.stride + i]);
#pragma GCC unroll 8
      for (int q = 0; q < C::kCount; ++q) {
        total[q] = multiply_add<A, C::kLanes>(w, load<C::kLanes>(row + q * C::kLanes), total[q]);
      }
    }
#pragma GCC unroll 8
    for (int q = 0; q < C::kCount; ++q) after(kLane, f + q * C::kLanes, total[q]);
  });
}

// sum = rescale * sum + the sum over a block of one head of weight[i] * rows[i].
template <typename A, typename Rows>
inline void add_rows(const EdgeBlock& block, BlockOf<A> weight, const Rows& rows, A rescale,
                     A* sum) {
  sum_rows<A>(
      block, 0, weight, rows,
      [&](auto lanes, int64_t f) { return rescale * load<decltype(lanes)::value>(sum + f); },
      [&](auto lanes, int64_t f, auto total) { store<decltype(lanes)::value>(sum + f, total); });
}

// scale * the sum over a row of few entries of weight[i] * rows[i] for head h of the block, as the
// channels of `out` from `first` on.
template <typename T, typename Rows>
inline void store_sum(const SharedBlock& block, int h, BlockOf<Accumulator<T>> weight,
                      const Rows& rows, Accumulator<T> scale, const Result<T>& out,
                      int64_t first = 0) {
  using A = Accumulator<T>;
  sum_rows<A>(block, h, weight, rows, Zeros<A>{}, [&](auto lanes, int64_t f, auto total) {
    constexpr int N = decltype(lanes)::value;
    out.template store<N>(block.row, block.head + h, first + f, scale * total);
  });
}

namespace detail {

// v[lane ^ kStep].
template <int kStep, typename A, size_t... kLane>
inline BlockOf<A> exchanged(BlockOf<A> v, std::index_sequence<kLane...>) {
#if defined(__clang__)
  return __builtin_shufflevector(v, v, (kLane ^ kStep)...);
#else
  return __builtin_shuffle(v, Vector<Bits<A>, kBlock>{(kLane ^ kStep)...});
#endif
}

template <int kStep, typename A, typename Combine>
inline BlockOf<A> combine_entries(int stride, BlockOf<A> v, const Combine& combine) {
  if constexpr (kStep > 0) {
    if (kStep < stride) {
      v = combine(v, exchanged<kStep, A>(v, std::make_index_sequence<kBlock>{}));
    }
    return combine_entries<kStep / 2, A>(stride, v, combine);
  } else {
    return v;
  }
}

}  // namespace detail

// The sum over the entries, in every lane of a head.
template <typename A>
inline BlockOf<A> sum_of_entries(const SharedBlock& block, BlockOf<A> v) {
  const auto add = [](BlockOf<A> a, BlockOf<A> b) { return a + b; };
  return detail::combine_entries<kBlock / 2, A>(block.stride, v, add);
}

// The largest value of the entries, in every lane of a head; a NaN may be passed over.
template <typename A>
inline BlockOf<A> max_of_entries(const SharedBlock& block, BlockOf<A> v) {
  const auto larger_of = [](BlockOf<A> a, BlockOf<A> b) { return a > b ? a : b; };
  return detail::combine_entries<kBlock / 2, A>(block.stride, v, larger_of);
}

// Lanes that are not in use take no part in a softmax.
template <typename A, typename Block>
inline BlockOf<A> masked(const Block& block, BlockOf<A> score) {
  using B = Bits<A>;
  const auto entry = lane_numbers<B, kBlock>() & static_cast<B>(block.stride - 1);
  const auto used = entry < splat<B, kBlock>(static_cast<B>(block.count));
  return used ? score : splat<A, kBlock>(-std::numeric_limits<A>::infinity());
}

// A softmax over a row of few entries: its weights are exponential * inverse_sum.
template <typename A>
struct Softmax {
  BlockOf<A> exponential;
  BlockOf<A> largest;
  BlockOf<A> inverse_sum;
};

template <typename A>
inline Softmax<A> softmax_of_few(const SharedBlock& block, BlockOf<A> score) {
  score = masked<A>(block, score);
  const BlockOf<A> lowest = splat<A, kBlock>(-std::numeric_limits<A>::infinity());
  BlockOf<A> largest = max_of_entries<A>(block, score);
  largest = largest > lowest ? largest : lowest;
  // What exponentials are taken relative to; -infinity - -infinity would be NaN.
  const BlockOf<A> origin = largest > lowest ? largest : BlockOf<A>{};
  const BlockOf<A> exponential = exp_of_negative<kBlock>(score - origin);
  return {exponential, largest, 1 / sum_of_entries<A>(block, exponential)};
}

// exp(score - largest) / sum, from what a forward pass left of each softmax.
template <typename A>
inline BlockOf<A> softmax_of(BlockOf<A> score, BlockOf<A> largest, BlockOf<A> inverse_sum) {
  return exp_of_negative<kBlock>(score - largest) * inverse_sum;
}

// The running softmax of a row: state holds the weighted values, the largest score and the sum.
// `Scores` gives the scores of a block.
template <typename T, typename Scores>
struct OnlineSoftmax {
  using A = Accumulator<T>;

  Scores scores;
  NodeRows<T> value;
  EdgeRows<T> edge_value;  // channels of the output that follow those of `value`
  Dropout dropout;
  SoftmaxOutputs<T> outputs;
  Result<T> out{outputs.out};

  bool knows_few() const { return true; }
  int64_t num_values() const { return value.width + edge_value.width; }
  int64_t state_size() const { return num_values() + 2; }
  int64_t buffer_size() const { return 0; }
  void begin(const RowEntries&, bool, A*) const {}

  void reset(A* state) const { state[num_values()] = -std::numeric_limits<A>::infinity(); }

  // The factor by which what was added up so far shrinks when a larger score appears.
  static A raise(A& largest, A& sum, A score) {
    if (!(score > largest)) return 1;
    const bool first = largest == -std::numeric_limits<A>::infinity();
    const A rescale = first ? A{0} : std::exp(largest - score);
    largest = score;
    sum *= rescale;
    return rescale;
  }

  // What exponentials are taken relative to; -infinity - -infinity would be NaN.
  static A origin(A largest) {
    return largest == -std::numeric_limits<A>::infinity() ? A{0} : largest;
  }

  void absorb(const EdgeBlock& block, A*, A* state) const {
    A& largest = state[num_values()];
    A& sum = state[num_values() + 1];
    const BlockOf<A> score = masked<A>(block, scores(block));
    const A rescale = raise(largest, sum, max_of<A, kBlock>(score));
    BlockOf<A> p = exp_of_negative<kBlock>(score - splat<A, kBlock>(origin(largest)));
    sum += sum_of<A, kBlock>(p);
    if (dropout.rate > 0) p *= kept<A>(dropout, block);
    add_rows<A>(block, p, value, rescale, state);
    if (edge_value.width > 0) add_rows<A>(block, p, edge_value, rescale, state + value.width);
  }

  void absorb_few(const SharedBlock& block, int64_t, A*) const {
    const Softmax<A> softmax = softmax_of_few<A>(block, scores(block));
    BlockOf<A> p = softmax.exponential;
    if (dropout.rate > 0) p *= kept<A>(dropout, block);
    for (int h = 0; h < block.heads; ++h) {
      A* own = outputs.stats.at(block.row, block.head + h);
      own[0] = softmax.largest[h * block.stride];
      own[1] = softmax.inverse_sum[h * block.stride];
      store_sum<T>(block, h, p, value, own[1], out);
      if (edge_value.width > 0) store_sum<T>(block, h, p, edge_value, own[1], out, value.width);
    }
  }

  void merge(const A* piece, A* state) const {
    const int64_t values = num_values();
    A& largest = state[values];
    const A rescale = raise(largest, state[values + 1], piece[values]);
    const A weight = std::exp(piece[values] - origin(largest));
    state[values + 1] += weight * piece[values + 1];
    for (int64_t f = 0; f < values; ++f) state[f] = rescale * state[f] + weight * piece[f];
  }

  void finish(int64_t row, int64_t head, bool empty, int64_t, const A* state) const {
    A* own = outputs.stats.at(row, head);
    own[0] = empty ? A{0} : state[num_values()];
    own[1] = empty ? A{0} : 1 / state[num_values() + 1];
    for_each_part<kLanes<T>, 1>(0, outputs.out.width, [&](auto chunk, int64_t f) {
      constexpr int N = decltype(chunk)::kLanes;
      out.template store<N>(row, head, f, load<N>(state + f) * own[1]);
    });
  }
};

// Sums over a row, as backward passes make them.
template <typename A>
struct RowSums {
  int64_t size;

  bool knows_few() const { return false; }
  void absorb_few(const SharedBlock&, int64_t, A*) const {}
  int64_t state_size() const { return size; }
  int64_t buffer_size() const { return 0; }
  void begin(const RowEntries&, bool, A*) const {}
  void reset(A*) const {}
  void merge(const A* piece, A* state) const {
    for (int64_t f = 0; f < size; ++f) state[f] += piece[f];
  }
};

// Number of different `slot` arguments that finish() gets from run_pass().
inline int64_t num_slots(const Schedule& schedule) {
  return static_cast<int64_t>(schedule.tasks.size() + schedule.cut_rows.size());
}

// Runs a pass over all rows and heads. A pass provides state_size(), reset(state), which finds
// zeros, absorb(block, buffer, state), merge(piece, state) and finish(row, head, empty, slot,
// state); calls of finish with the same slot do not overlap. Before a row, or a piece of one, is
// absorbed, begin(entries, whole, buffer) sees it; each block has buffer_size() values of the
// buffer, where absorb finds what begin left. A pass that knows_few() does all
// that in absorb_few(block, slot, room) for rows of few entries, with room for state_size() values.
// The result does not depend on the number of threads.
template <typename A, typename Pass>
void run_pass(const Csr& graph, const Schedule& schedule, int64_t heads, int64_t width,
              const Pass& pass) {
  constexpr int64_t kOfLine = kCacheLine / sizeof(A);
  const int64_t size = (pass.state_size() + kOfLine - 1) / kOfLine * kOfLine;
  const auto partial = scratch<A>(schedule.num_pieces * heads * size);
  const int64_t num_tasks = static_cast<int64_t>(schedule.tasks.size());
  const int64_t work = (graph.num_entries + graph.num_rows) * heads * (width + 1);
  for_each_task(num_tasks, work, [&](int64_t t) {
    const Task& task = schedule.tasks[t];
    const bool whole = task.piece < 0;
    const int64_t max_blocks = (task.entry_end - task.entry_begin + kBlock - 1) / kBlock * heads;
    const auto own = scratch<A>(heads * size), buffer = scratch<A>(max_blocks * pass.buffer_size());
    A* states = whole ? own.get() : &partial[task.piece * heads * size];
    for (int64_t row = task.row_begin; row < task.row_end; ++row) {
      const int64_t begin = std::max(graph.rowptr[row], task.entry_begin);
      const int64_t end = std::min(graph.rowptr[row + 1], task.entry_end);
      const RowEntries entries{graph, row, heads, begin, end};
      if (whole && entries.few() && pass.knows_few()) {
        entries.for_each_shared_block(
            [&](const SharedBlock& block) { pass.absorb_few(block, t, states); });
        continue;
      }
      std::fill_n(states, heads * size, A{0});
      for (int64_t head = 0; head < heads; ++head) pass.reset(states + head * size);
      pass.begin(entries, whole, buffer.get());
      entries.for_each_block([&](const EdgeBlock& block, int64_t place) {
        pass.absorb(block, &buffer[place * pass.buffer_size()], states + block.head * size);
      });
      for (int64_t head = 0; whole && head < heads; ++head) {
        pass.finish(row, head, begin == end, t, states + head * size);
      }
    }
  });
  const int64_t num_cut = static_cast<int64_t>(schedule.cut_rows.size());
  for_each_task(num_cut, schedule.num_pieces * heads * size, [&](int64_t c) {
    const CutRow& cut = schedule.cut_rows[c];
    const auto state = scratch<A>(size);
    for (int64_t head = 0; head < heads; ++head) {
      std::fill_n(state.get(), size, A{0});
      pass.reset(state.get());
      for (int64_t piece = cut.piece_begin; piece < cut.piece_end; ++piece) {
        pass.merge(&partial[(piece * heads + head) * size], state.get());
      }
      pass.finish(cut.row, head, false, num_tasks + c, state.get());
    }
  });
}

// The weights themselves, once a forward pass has left the statistics.
template <typename T, typename Scores>
struct Weights : RowSums<Accumulator<T>> {
  using A = Accumulator<T>;

  const OnlineSoftmax<T, Scores>& forward;

  void absorb(const EdgeBlock& block, A*, A*) const {
    const A* own = forward.outputs.stats.at(block.row, block.head);
    const BlockOf<A> score = masked<A>(block, forward.scores(block));
    const BlockOf<A> p = softmax_of<A>(score, splat<A, kBlock>(own[0]), splat<A, kBlock>(own[1]));
    store_edges<T>(block, p * kept<A>(forward.dropout, block), forward.outputs.alpha);
  }
  void finish(int64_t, int64_t, bool, int64_t, const A*) const {}
};

template <typename T, typename Scores>
void run_forward(const Csr& graph, int64_t width, const OnlineSoftmax<T, Scores>& pass) {
  const SoftmaxOutputs<T>& outputs = pass.outputs;
  const Schedule schedule = make_schedule(graph);
  run_pass<Accumulator<T>>(graph, schedule, outputs.out.heads, width, pass);
  if (outputs.alpha.data == nullptr) return;
  run_pass<Accumulator<T>>(graph, schedule, outputs.out.heads, width,
                           Weights<T, Scores>{{0}, pass});
}

// The part of a backward pass over destinations that knows the softmax. `Pass` provides
// score(block) and product(block), without the factor keep.
template <typename T, typename Pass>
struct DestinationSoftmax : RowSums<Accumulator<T>>, SoftmaxGradients<T> {
  using A = Accumulator<T>;

  A* between;  // [edges, heads, 2], written: what leave() is given
  Dropout dropout;
  A* delta = nullptr;  // [rows, heads], from run_destination_pass()

  // p and keep * product of each entry.
  int64_t buffer_size() const { return 2 * kBlock; }

  A& delta_of(int64_t row, int64_t head) const { return delta[row * this->stats.heads + head]; }

  // Fills the buffer and returns the block's part of delta.
  A fill(const EdgeBlock& block, A* buffer) const {
    const Pass& pass = static_cast<const Pass&>(*this);
    const A* own = this->stats.at(block.row, block.head);
    const BlockOf<A> score = masked<A>(block, pass.score(block));
    const BlockOf<A> p = softmax_of<A>(score, splat<A, kBlock>(own[0]), splat<A, kBlock>(own[1]));
    const BlockOf<A> direct = load_edges<T>(block, this->grad_alpha);
    const BlockOf<A> product = kept<A>(dropout, block) * (pass.product(block) + direct);
    store<kBlock>(buffer, p);
    store<kBlock>(buffer + kBlock, product);
    return sum_of<A, kBlock>(p * product);
  }

  // A cut row's delta is there already.
  void begin(const RowEntries& entries, bool whole, A* buffer) const {
    if (whole) std::fill_n(&delta_of(entries.row, 0), entries.heads, A{0});
    entries.for_each_block([&](const EdgeBlock& block, int64_t place) {
      if (block.head == 0) expect_writes(block);
      const A part = fill(block, buffer + place * buffer_size());
      if (whole) delta_of(block.row, block.head) += part;
    });
  }

  // The gradients of the scores of a block, after begin().
  BlockOf<A> score_gradients(const EdgeBlock& block, const A* buffer) const {
    const BlockOf<A> delta_of_row = splat<A, kBlock>(delta_of(block.row, block.head));
    return load<kBlock>(buffer) * (load<kBlock>(buffer + kBlock) - delta_of_row);
  }

  struct FewGradients {
    BlockOf<A> weight;  // with dropout
    BlockOf<A> score;
  };

  // The same for a row of few entries with these scores.
  FewGradients gradients_of_few(const SharedBlock& block, BlockOf<A> scores) const {
    const Softmax<A> softmax = softmax_of_few<A>(block, scores);
    const BlockOf<A> p = softmax.exponential * softmax.inverse_sum;
    const BlockOf<A> keep = kept<A>(dropout, block);
    const BlockOf<A> direct = load_edges<T>(block, this->grad_alpha);
    const BlockOf<A> product = keep * (static_cast<const Pass&>(*this).product(block) + direct);
    expect_writes(block);
    return {p * keep, p * (product - sum_of_entries<A>(block, p * product))};
  }

  // The weights of a block with dropout, after begin().
  BlockOf<A> weights(const EdgeBlock& block, const A* buffer) const {
    return load<kBlock>(buffer) * kept<A>(dropout, block);
  }

  // Where leave() will write is scattered, and stores wait for each other's cache lines.
  FASTGRAPH_PREFETCHES void expect_writes(const Entries& block) const {
    for (int i = 0; i < block.count; ++i) {
      __builtin_prefetch(between + 2 * block.edge(i) * this->stats.heads, 1);
    }
  }

  // Leaves the weights of a block and the gradients of its scores, or of what these are made of.
  template <typename Block>
  void leave(const Block& block, BlockOf<A> weight, BlockOf<A> gradient) const {
    for_each_lane(block, [&](int lane, int i, int h) {
      A* own = between + 2 * (block.edge(i) * this->stats.heads + block.head + h);
      own[0] = weight[lane];
      own[1] = gradient[lane];
    });
  }
};

// The part of a backward pass over sources, along the transposed graph, that reads what the pass
// over destinations has left.
template <typename T>
struct SourceSoftmax : RowSums<Accumulator<T>> {
  using A = Accumulator<T>;

  Heads<const T> grad;
  const A* between;

  struct EdgeGradients {
    BlockOf<A> weight;
    BlockOf<A> score;
  };

  template <typename Block>
  EdgeGradients gradients(const Block& block) const {
    EdgeGradients found{};
    for_each_lane(block, [&](int lane, int i, int h) {
      const A* own = between + 2 * (block.edge(i) * grad.heads + block.head + h);
      found.weight[lane] = own[0];
      found.score[lane] = own[1];
    });
    return found;
  }
};

// delta of the rows that are cut.
template <typename T, typename Pass>
struct DeltaOfCutRows : RowSums<Accumulator<T>> {
  using A = Accumulator<T>;

  const Pass& pass;

  void absorb(const EdgeBlock& block, A*, A* state) const {
    A buffer[2 * kBlock];
    state[0] += pass.fill(block, buffer);
  }
  void finish(int64_t row, int64_t head, bool, int64_t, const A* state) const {
    pass.delta_of(row, head) = state[0];
  }
};

template <typename T, typename Pass>
void run_destination_pass(const Csr& graph, const Schedule& schedule, int64_t heads, int64_t width,
                          Pass pass) {
  const auto delta = scratch<Accumulator<T>>(graph.num_rows * heads);
  pass.delta = delta.get();
  Schedule cut{{}, schedule.cut_rows, schedule.num_pieces};
  for (const Task& task : schedule.tasks) {
    if (task.piece >= 0) cut.tasks.push_back(task);
  }
  run_pass<Accumulator<T>>(graph, cut, heads, width, DeltaOfCutRows<T, Pass>{{1}, pass});
  run_pass<Accumulator<T>>(graph, schedule, heads, width, pass);
}

}  // namespace fastgraph
