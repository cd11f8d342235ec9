// Attention over neighbourhoods without a tensor of size edges x channels.
//
// A pass visits the entries of each row in blocks whose scores are computed together, one head
// after the other. The forward pass keeps a running softmax (Milakov and Gimelshein, Online
// normalizer calculation for softmax, 2018). What it leaves for the backward passes are the largest
// score and the inverse of the sum of exponentials of each row and head; a single log-sum-exp could
// not hold both when scores are large. The gradient of a score is p (product - delta), where
// product is keep <grad_out, value> and delta the sum of p product over the row. delta is not taken
// from <out, grad_out>, which equals it in exact arithmetic only: where one edge holds all the
// weight, both roundings must cancel. The pass over destinations leaves two numbers for each entry
// and head, keep p and the gradient of the score, so that the pass over sources only gathers;
// computing them again would cost it twice the time.
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

// Some entries of one row, seen by one head.
struct EdgeBlock {
  const Csr& graph;
  int64_t row;
  int64_t head;
  int64_t entry;
  int count;  // at most kBlock

  int64_t col(int i) const { return graph.col[entry + i]; }
  int64_t edge(int i) const { return graph.edge(entry + i); }
};

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
        body(EdgeBlock{graph, row, head, entry, count}, place++);
      }
    }
  }
};

// 0 for dropped entries, 1 / (1 - rate) for the others; a function of seed, edge and head.
template <typename A>
BlockOf<A> kept(const Dropout& dropout, const EdgeBlock& block) {
  if (dropout.rate == 0) return splat<A, kBlock>(1);
  Vector<uint32_t, kBlock> edge{};
  for (int i = 0; i < block.count; ++i) edge[i] = block.edge(i);
  const auto bits = philox<kBlock>(dropout.seed, edge, static_cast<uint32_t>(block.head));
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

  const T* at(const EdgeBlock& block, int i) const { return x.at(block.col(i), block.head); }

  // Asks for what entries further on will need where entry i reads kCount values at f.
  template <int kCount>
  FASTGRAPH_PREFETCHES void expect(const EdgeBlock& block, int i, int64_t f) const {
    const int64_t entry = block.entry + i + kAhead;
    if (seen || entry >= block.graph.num_entries) return;
    prefetch<kCount * sizeof(T)>(x.at(block.graph.col[entry], block.head) + f);
  }
};

// What the edges of entries carry, the same for all heads; nothing if the width is 0.
template <typename T>
struct EdgeRows {
  Matrix<const T> x;
  int64_t width;

  explicit EdgeRows(Matrix<const T> all) : x(all), width(all.width) {}

  const T* at(const EdgeBlock& block, int i) const { return x.row(block.edge(i)); }

  // Rows of edges mostly follow each other in memory.
  template <int kCount>
  void expect(const EdgeBlock&, int, int64_t) const {}
};

// One value for each edge and head, [edges, heads]; without data a zero.
template <typename T>
inline BlockOf<Accumulator<T>> load_edges(const EdgeBlock& block, Matrix<const T> x) {
  BlockOf<Accumulator<T>> values{};
  if (x.data == nullptr) return values;
  for (int i = 0; i < block.count; ++i) values[i] = load_one(x.row(block.edge(i)) + block.head);
  return values;
}

// The reverse; without data nothing is written.
template <typename T>
inline void store_edges(const EdgeBlock& block, BlockOf<Accumulator<T>> values, Matrix<T> x) {
  if (x.data == nullptr) return;
  for (int i = 0; i < block.count; ++i) store_one(x.row(block.edge(i)) + block.head, values[i]);
}

// The sums of the lanes of the first `count` vectors, and zeros; writes v.
template <typename A, int N>
inline BlockOf<A> sums_of_block(Vector<A, N> (&v)[kBlock], int count) {
  Vector<A, N> sums[kBlock / N] = {};
#pragma GCC unroll 16
  for (int i = 0; i < kBlock / N; ++i) {
    if (i * N < count) sums[i] = sums_of<A, N>(v + i * N, std::min(count - i * N, N));
  }
  BlockOf<A> result;
  std::memcpy(&result, sums, sizeof(result));
  return result;
}

// <own, rows[i]> of each entry i.
template <typename T, typename Rows>
inline BlockOf<Accumulator<T>> dots(const EdgeBlock& block, const T* own, const Rows& rows) {
  using A = Accumulator<T>;
  BlockOf<A> result{};
  for_each_part<kLanes<T>, 4>(0, rows.width, [&](auto chunk, int64_t f) {
    using C = decltype(chunk);
    using V = Vector<A, C::kLanes>;
    V mine[C::kCount], sums[kBlock];
#pragma GCC unroll 4
    for (int q = 0; q < C::kCount; ++q) mine[q] = load<C::kLanes>(own + f + q * C::kLanes);
    for (int i = 0; i < block.count; ++i) {
      rows.template expect<C::kWidth>(block, i, f);
      const T* row = rows.at(block, i) + f;
      V sum{};
#pragma GCC unroll 4
      for (int q = 0; q < C::kCount; ++q) {
        sum = multiply_add<A, C::kLanes>(mine[q], load<C::kLanes>(row + q * C::kLanes), sum);
      }
      sums[i] = sum;
    }
    result += sums_of_block<A, C::kLanes>(sums, block.count);
  });
  return result;
}

// sum = rescale * sum + the sum over the block of weight[i] * rows[i].
template <typename A, typename Rows>
inline void add_rows(const EdgeBlock& block, BlockOf<A> weight, const Rows& rows, A rescale,
                     A* sum) {
  constexpr int kWide = kVectorBytes / static_cast<int>(sizeof(A));
  for_each_part<kWide, 8>(0, rows.width, [&](auto chunk, int64_t f) {
    using C = decltype(chunk);
    Vector<A, C::kLanes> total[C::kCount];
#pragma GCC unroll 8
    for (int q = 0; q < C::kCount; ++q) {
      total[q] = rescale * load<C::kLanes>(sum + f + q * C::kLanes);
    }
    for (int i = 0; i < block.count; ++i) {
      rows.template expect<C::kWidth>(block, i, f);
      const auto* row = rows.at(block, i) + f;
      const auto w = splat<A, C::kLanes>(weight[i]);
#pragma GCC unroll 8
      for (int q = 0; q < C::kCount; ++q) {
        total[q] = multiply_add<A, C::kLanes>(w, load<C::kLanes>(row + q * C::kLanes), total[q]);
      }
    }
#pragma GCC unroll 8
    for (int q = 0; q < C::kCount; ++q) store<C::kLanes>(sum + f + q * C::kLanes, total[q]);
  });
}

// Lanes beyond the block's entries take no part in a softmax.
template <typename A>
inline BlockOf<A> masked(const EdgeBlock& block, BlockOf<A> score) {
  return first_lanes<A, kBlock>(block.count, score, -std::numeric_limits<A>::infinity());
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
// buffer, where absorb finds what begin left. The result does not depend on the number of threads.
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
      std::fill_n(states, heads * size, A{0});
      for (int64_t head = 0; head < heads; ++head) pass.reset(states + head * size);
      const RowEntries entries{graph, row, heads, begin, end};
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

  // The weights of a block with dropout, after begin().
  BlockOf<A> weights(const EdgeBlock& block, const A* buffer) const {
    return load<kBlock>(buffer) * kept<A>(dropout, block);
  }

  // Where leave() will write is scattered, and stores wait for each other's cache lines.
  FASTGRAPH_PREFETCHES void expect_writes(const EdgeBlock& block) const {
    for (int i = 0; i < block.count; ++i) {
      __builtin_prefetch(between + 2 * block.edge(i) * this->stats.heads, 1);
    }
  }

  // Leaves the weights of a block and the gradients of its scores, or of what these are made of.
  void leave(const EdgeBlock& block, BlockOf<A> weight, BlockOf<A> gradient) const {
    for (int i = 0; i < block.count; ++i) {
      A* own = between + 2 * (block.edge(i) * this->stats.heads + block.head);
      own[0] = weight[i];
      own[1] = gradient[i];
    }
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

  EdgeGradients gradients(const EdgeBlock& block) const {
    EdgeGradients found{};
    for (int i = 0; i < block.count; ++i) {
      const A* own = between + 2 * (block.edge(i) * grad.heads + block.head);
      found.weight[i] = own[0];
      found.score[i] = own[1];
    }
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
