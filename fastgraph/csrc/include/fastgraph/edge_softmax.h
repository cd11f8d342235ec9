// Attention over neighbourhoods without a tensor of size edges x channels.
//
// A pass visits the entries of each row in blocks whose scores are computed together. A long row
// has several blocks for each head and sums that grow from one to the next; a row of few entries
// has one block, which heads share. The forward pass keeps a running softmax (Milakov and
// Gimelshein, Online normalizer calculation for softmax, 2018). What it leaves for the backward
// passes are the largest score and the inverse of the sum of exponentials of each row and head; a
// single log-sum-exp could not hold both when scores are large. The gradient of a score is p
// (product - delta), where product is keep <grad_out, value> and delta the sum of p product over
// the row, less the gradient of the logarithm of the sum of exponentials, if that has one. delta is
// not taken from <out, grad_out>, which equals it in exact arithmetic only: where one edge holds
// all the weight, both roundings must cancel. The pass over destinations leaves two numbers for
// each entry and head, keep p and the gradient of the score, so that the pass over sources only
// gathers; computing them again would cost it twice the time. GAT, whose scores cost little, has
// other passes.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "fastgraph/attention_arguments.h"
#include "fastgraph/chunks.h"
#include "fastgraph/dropout.h"
#include "fastgraph/edge_blocks.h"
#include "fastgraph/exponential.h"
#include "fastgraph/memory.h"
#include "fastgraph/parallel.h"
#include "fastgraph/result.h"
#include "fastgraph/row_batch.h"
#include "fastgraph/schedule.h"
#include "fastgraph/simd.h"
#include "fastgraph/views.h"

namespace fastgraph {

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

// Inlined, since GCC 12 does not align the stack of a call as this would expect it of its argument,
// where that is larger than a register (blocks of double without AVX-512).
template <typename A>
FASTGRAPH_INLINE Softmax<A> softmax_of_few(const SharedBlock& block, BlockOf<A> score) {
  score = masked<A>(block, score);
  const BlockOf<A> lowest = splat<A, kBlock>(-std::numeric_limits<A>::infinity());
  BlockOf<A> largest = max_of_entries<A>(block, score);
  largest = largest > lowest ? largest : lowest;
  const BlockOf<A> origin =
      largest > lowest ? largest : BlockOf<A>{};  // as softmax_origin() has it
  const BlockOf<A> exponential = exp_of_negative<kBlock>(score - origin);
  return {exponential, largest, 1 / sum_of_entries<A>(block, exponential)};
}

// True if the scores of a head are all -infinity, which is rare: statistics need not be read.
template <typename A>
inline bool has_head_without_share(const Softmax<A>& softmax) {
  const BlockOf<A> lowest = splat<A, kBlock>(-std::numeric_limits<A>::infinity());
  const BlockOf<A> is_lowest = softmax.largest == lowest ? splat<A, kBlock>(1) : BlockOf<A>{};
  return sum_of<A, kBlock>(is_lowest) > 0;
}

// What exponentials are taken relative to; -infinity - -infinity would be NaN.
template <typename A>
inline A softmax_origin(A largest) {
  return largest == -std::numeric_limits<A>::infinity() ? A{0} : largest;
}

// The factor by which what was added up so far shrinks when a larger score appears.
template <typename A>
inline A raise_softmax(A& largest, A& sum, A score) {
  if (!(score > largest)) return 1;
  const bool first = largest == -std::numeric_limits<A>::infinity();
  const A rescale = first ? A{0} : std::exp(largest - score);
  largest = score;
  sum *= rescale;
  return rescale;
}

// Adds a piece of a row to others: weighted values, then the largest score and the sum of
// exponentials.
template <typename A>
inline void merge_softmax(const A* piece, int64_t values, A* state) {
  A& largest = state[values];
  const A rescale = raise_softmax(largest, state[values + 1], piece[values]);
  const A weight = std::exp(piece[values] - softmax_origin(largest));
  state[values + 1] += weight * piece[values + 1];
  for (int64_t f = 0; f < values; ++f) state[f] = rescale * state[f] + weight * piece[f];
}

// What a backward pass over destinations finds of a block: its scores, and the products of its
// values with the gradient of the output.
template <typename A>
struct Dots {
  BlockOf<A> score;
  BlockOf<A> product;
};

// What passes from a backward pass over destinations to the one over sources.
template <typename A>
struct EdgeGradients {
  BlockOf<A> weight;  // the weights themselves, with dropout
  BlockOf<A> score;   // gradients of the scores, or of what these are made of
};

// exp(score - largest) / sum, from what a forward pass left of each softmax. That pass may have
// added up the largest score in another order, and no weight is above 1.
template <typename A>
inline BlockOf<A> softmax_of(BlockOf<A> score, BlockOf<A> largest, BlockOf<A> inverse_sum) {
  const BlockOf<A> above = score - largest;
  return exp_of_negative<kBlock>(above > BlockOf<A>{} ? BlockOf<A>{} : above) * inverse_sum;
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

  int64_t longest_batched_row() const {
    return fastgraph::longest_batched_row(outputs.out.heads, value.width);
  }
  void absorb_batch(const RowBatch& batch, int64_t) const {
    BatchValues<A> p(batch);
    BatchValues<A> inverse_sum(batch);
    scores.of_batch(batch, p.data);
    softmax_of_batch<A>(batch, outputs.stats, p.data, inverse_sum.data);
    drop<A>(batch, dropout, p.data);
    batch.for_each_row([&](int64_t row, EntryRange entries, int64_t place) {
      const A* scale = inverse_sum.data + place;
      const auto store_from = [&](int64_t first) {
        return [&, first](auto piece, int64_t head, int64_t f, auto sum) {
          using P = decltype(piece);
          row_of(row, head).template store<P::kLanes>(first + f, of_heads<P>(scale + head) * sum);
        };
      };
      sum_entries<T>(batch, entries, p.data, value, edge_value.width == 0, store_from(0));
      if (edge_value.width == 0) return;
      sum_entries<T>(batch, entries, p.data, edge_value, false, store_from(value.width));
    });
  }

  bool knows_few() const { return true; }
  int64_t num_values() const { return value.width + edge_value.width; }
  int64_t state_size() const { return num_values() + 2; }
  int64_t buffer_size() const { return 0; }
  FASTGRAPH_INLINE void expect_row(int64_t row) const { scores.expect_row(row); }
  SumRow<T> row_of(int64_t row, int64_t head) const {
    return {out.row(row, head), outputs.addend_of(row, head)};
  }
  void begin(const RowEntries&, bool, A*, A*) const {}

  void reset(A* state) const {
    std::fill_n(state, state_size(), A{0});
    state[num_values()] = -std::numeric_limits<A>::infinity();
  }

  void absorb(const EdgeBlock& block, A*, A* state) const {
    A& largest = state[num_values()];
    A& sum = state[num_values() + 1];
    const BlockOf<A> score = masked<A>(block, scores(block));
    const A rescale = raise_softmax(largest, sum, max_of<A, kBlock>(score));
    BlockOf<A> p = exp_of_negative<kBlock>(score - splat<A, kBlock>(softmax_origin(largest)));
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
      const SumRow<T> target = row_of(block.row, block.head + h);
      store_sum<T>(block, h, p, value, own[1], target);
      if (edge_value.width > 0) store_sum<T>(block, h, p, edge_value, own[1], target, value.width);
    }
  }

  void merge(const A* piece, A* state) const { merge_softmax(piece, num_values(), state); }

  void finish(int64_t row, int64_t head, bool empty, int64_t, const A* state) const {
    A* own = outputs.stats.at(row, head);
    own[0] = empty ? A{0} : state[num_values()];
    const A scale = empty ? A{0} : 1 / state[num_values() + 1];
    own[1] = scale;
    const SumRow<T> target = row_of(row, head);
    for_each_part<kLanes<T>, 1>(0, num_values(), [&](auto chunk, int64_t f) {
      constexpr int N = decltype(chunk)::kLanes;
      target.template store<N>(f, load<N>(state + f) * scale);
    });
  }
};

// Sums over a row, as backward passes make them.
template <typename A>
struct RowSums {
  int64_t size;

  int64_t longest_batched_row() const { return 0; }
  void absorb_batch(const RowBatch&, int64_t) const {}
  bool knows_few() const { return false; }
  void absorb_few(const SharedBlock&, int64_t, A*) const {}
  int64_t state_size() const { return size; }
  int64_t buffer_size() const { return 0; }
  void expect_row(int64_t) const {}
  void begin(const RowEntries&, bool, A*, A*) const {}
  void absorb(const EdgeBlock&, const A*, A*) const {}
  void reset(A* state) const { std::fill_n(state, size, A{0}); }
  void merge(const A* piece, A* state) const {
    for (int64_t f = 0; f < size; ++f) state[f] += piece[f];
  }
};

// Number of different `slot` arguments that finish() gets from run_pass().
inline int64_t num_slots(const Schedule& schedule) {
  return static_cast<int64_t>(schedule.tasks.size() + schedule.cut_rows.size());
}

// Runs a pass over all rows and heads. A pass provides state_size(), reset(state), which makes a
// state of nothing where absorb adds to one and where merge adds to zeros, absorb(block, buffer,
// state), merge(piece, state) and finish(row, head, empty, slot, state); calls of finish with the
// same slot do not overlap. Before a row, or a piece of one, is absorbed, begin(entries, whole,
// buffer, states) sees it; each block has buffer_size() values of the buffer, where absorb finds
// what begin left. A pass does all that in absorb_batch(batch, slot) for rows of at most
// longest_batched_row() entries. One that knows_few() does it in absorb_few(block, slot, room) for
// rows of few entries, with room for state_size() values. expect_row(row) may ask for what the row
// after the present one has. The result does not depend on the number of threads.
template <typename A, typename Pass>
void run_pass(const OrderedCsr& graph, const Schedule& schedule, int64_t heads, int64_t width,
              const Pass& pass) {
  constexpr int64_t kOfLine = kCacheLine / sizeof(A);
  const int64_t size = (pass.state_size() + kOfLine - 1) / kOfLine * kOfLine;
  const auto partial = scratch<A>(schedule.num_pieces * heads * size);
  const int64_t num_tasks = static_cast<int64_t>(schedule.tasks.size());
  const int64_t work = (graph.num_entries + graph.num_rows) * heads * (width + 1);
  const int64_t longest = pass.longest_batched_row();
  for_each_task(num_tasks, work, [&](int64_t t) {
    const Task& task = schedule.tasks[t];
    const bool whole = task.whole();
    const int64_t max_blocks = (task.entry_end - task.entry_begin + kBlock - 1) / kBlock * heads;
    TaskScratch<A, 1024> own(heads * size);
    TaskScratch<A, 4096> buffer(max_blocks * pass.buffer_size());
    A* states = whole ? own.get() : &partial[task.piece * heads * size];
    for (int64_t place = task.place_begin; place < task.place_end; ++place) {
      if (longest > 0 && whole) {
        const RowBatch batch = batch_from(graph, heads, place, task.place_end, longest);
        if (batch.place_end > place) {
          pass.absorb_batch(batch, t);
          place = batch.place_end - 1;
          continue;
        }
      }
      const int64_t row = graph.row(place);
      const EntryRange range = task.entries(graph, place);
      const RowEntries entries{graph, row, heads, range.begin, range.end};
      if (place + 1 < task.place_end) pass.expect_row(graph.row(place + 1));
      if (whole && entries.few() && pass.knows_few()) {
        entries.for_each_shared_block(
            [&](const SharedBlock& block) { pass.absorb_few(block, t, states); });
        continue;
      }
      for (int64_t head = 0; head < heads; ++head) pass.reset(states + head * size);
      pass.begin(entries, whole, buffer.get(), states);
      entries.for_each_block([&](const EdgeBlock& block, int64_t nth) {
        pass.absorb(block, buffer.get() + nth * pass.buffer_size(), states + block.head * size);
      });
      for (int64_t head = 0; whole && head < heads; ++head) {
        pass.finish(row, head, range.empty(), t, states + head * size);
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

// Before the weights are found, finish() may edit outputs and statistics.
template <typename T, typename Scores, typename Finish>
void run_forward(const OrderedCsr& graph, int64_t width, const OnlineSoftmax<T, Scores>& pass,
                 const Finish& finish) {
  const SoftmaxOutputs<T>& outputs = pass.outputs;
  const Schedule schedule = make_schedule(graph);
  run_pass<Accumulator<T>>(graph, schedule, outputs.out.heads, width, pass);
  finish();
  if (outputs.alpha.data == nullptr) return;
  run_pass<Accumulator<T>>(graph, schedule, outputs.out.heads, width,
                           Weights<T, Scores>{{0}, pass});
}
template <typename T, typename Scores>
void run_forward(const OrderedCsr& graph, int64_t width, const OnlineSoftmax<T, Scores>& pass) {
  run_forward<T, Scores>(graph, width, pass, [] {});
}

// Rows whose scores are all -infinity become as rows without entries.
template <typename T>
void empty_rows_without_share(const SoftmaxOutputs<T>& outputs) {
  using A = Accumulator<T>;
  constexpr A kInfinity = std::numeric_limits<A>::infinity();
  constexpr int64_t kRows = 1 << 10;  // of a task
  const Heads<T>& out = outputs.out;
  for_each_task((out.nodes + kRows - 1) / kRows, out.nodes * out.heads, [&](int64_t task) {
    const int64_t end = std::min((task + 1) * kRows, out.nodes);
    for (int64_t row = task * kRows; row < end; ++row) {
      for (int64_t head = 0; head < out.heads; ++head) {
        A* const own = outputs.stats.at(row, head);
        if (own[0] != -kInfinity || own[1] != kInfinity) continue;
        own[0] = own[1] = 0;
        const T* const addend = outputs.addend_of(row, head);
        for (int64_t f = 0; f < out.width; ++f) {
          store_one(out.at(row, head) + f, addend == nullptr ? A{0} : load_one(addend + f));
        }
      }
    }
  });
}

// Of each entry in the buffer of a block, where there is dropout.
constexpr int kMostNumbers = 3;

// The part of a backward pass over destinations that knows the softmax. `Pass` provides
// find_dots(block), whose products lack the factor keep. For each entry and head there are
// kNumbers that pass from this pass to another.
template <typename T, typename Pass, int kNumbers = 2>
struct DestinationSoftmax : RowSums<Accumulator<T>>, SoftmaxGradients<T> {
  using A = Accumulator<T>;

  A* between;  // [edges, heads, kNumbers], written: what leave() is given
  Dropout dropout;
  A* delta = nullptr;  // [rows, heads], from run_destination_pass()

  FASTGRAPH_INLINE void expect_row(int64_t row) const { prefetch_node(this->grad, row); }

  // p and keep * product of each entry, and with dropout keep * p.
  int64_t buffer_size() const { return (dropout.rate > 0 ? kMostNumbers : 2) * kBlock; }

  A& delta_of(int64_t row, int64_t head) const { return delta[row * this->stats.heads + head]; }

  // Fills the buffer and returns the block's part of delta.
  A fill(const EdgeBlock& block, A* buffer) const {
    const A* own = this->stats.at(block.row, block.head);
    const Dots<A> found = static_cast<const Pass&>(*this).find_dots(block);
    const BlockOf<A> score = masked<A>(block, found.score);
    const BlockOf<A> p = softmax_of<A>(score, splat<A, kBlock>(own[0]), splat<A, kBlock>(own[1]));
    const BlockOf<A> direct = load_edges<T>(block, this->grad_alpha);
    const BlockOf<A> keep = kept<A>(dropout, block);
    const BlockOf<A> product = keep * (found.product + direct);
    store<kBlock>(buffer, p);
    store<kBlock>(buffer + kBlock, product);
    if (dropout.rate > 0) store<kBlock>(buffer + 2 * kBlock, keep * p);
    return sum_of<A, kBlock>(p * product);
  }

  // A cut row's delta is there already.
  void begin(const RowEntries& entries, bool whole, A* buffer, A*) const {
    if (whole) std::fill_n(&delta_of(entries.row, 0), entries.heads, A{0});
    entries.for_each_block([&](const EdgeBlock& block, int64_t nth) {
      if (block.head == 0) expect_writes(block);
      const A part = fill(block, buffer + nth * buffer_size());
      if (whole) delta_of(block.row, block.head) += part;
    });
  }

  // The gradients of the scores of a block, after begin().
  BlockOf<A> score_gradients(const EdgeBlock& block, const A* buffer) const {
    const A of_row = delta_of(block.row, block.head) - this->of_logsum(block.row, block.head);
    return load<kBlock>(buffer) * (load<kBlock>(buffer + kBlock) - splat<A, kBlock>(of_row));
  }

  // Weights and gradients for a row of few entries, of which this was found.
  EdgeGradients<A> gradients_of_few(const SharedBlock& block, Dots<A> found) const {
    const Softmax<A> softmax = softmax_of_few<A>(block, found.score);
    BlockOf<A> p = softmax.exponential * softmax.inverse_sum;
    if (has_head_without_share<A>(softmax)) clear_heads_without_share(block, p);
    const BlockOf<A> keep = kept<A>(dropout, block);
    const BlockOf<A> direct = load_edges<T>(block, this->grad_alpha);
    const BlockOf<A> product = keep * (found.product + direct);
    BlockOf<A> of_row = sum_of_entries<A>(block, p * product);
    if (this->grad_logsum.data != nullptr) {
      for_each_lane(block, [&](int lane, int, int h) {
        of_row[lane] -= this->of_logsum(block.row, block.head + h);
      });
    }
    expect_writes(block);
    return {p * keep, p * (product - of_row)};
  }

  // Weights of heads that the forward pass, or who joined its result to others, said to have none.
  void clear_heads_without_share(const SharedBlock& block, BlockOf<A>& p) const {
    for (int h = 0; h < block.heads; ++h) {
      if (this->stats.at(block.row, block.head + h)[1] != 0) continue;
      for (int i = 0; i < block.stride; ++i) p[h * block.stride + i] = 0;
    }
  }

  // Scores of a batch become their gradients, where `product` is <grad, value> of each entry, and
  // go to the other pass together with the weights.
  void gradients_of_scores(const RowBatch& batch, A* product, A* p) const {
    BatchValues<A> weight(batch);
    gradients_of_scores(batch, product, p, weight.data);
  }
  void gradients_of_scores(const RowBatch& batch, A* product, A* p, A* weight) const {
    static_assert(kNumbers == 2);
    BatchValues<A> inverse_sum(batch);
    relative_to_largest<A>(batch, this->stats, p, inverse_sum.data);
    weights_of_batch<A>(batch, inverse_sum.data, p);
    std::copy_n(p, batch.size(), weight);
    add_edges_of_batch<T>(batch, this->grad_alpha, product);
    drop<A>(batch, dropout, weight, product);
    gradients_of_batch<A>(batch, this->grad_logsum, product, p);
    store_edge_pairs<A>(batch, weight, p, between);
  }

  // The weights of a block with dropout, after begin().
  BlockOf<A> weights(const A* buffer) const {
    return load<kBlock>(buffer + (dropout.rate > 0 ? 2 * kBlock : 0));
  }

  // Where leave() will write is scattered, and stores wait for each other's cache lines.
  FASTGRAPH_INLINE void expect_writes(const Entries& block) const {
    for (int i = 0; i < block.count; ++i) {
      __builtin_prefetch(between + kNumbers * block.edge(i) * this->stats.heads, 1);
    }
  }

  // Leaves the weights of a block and the gradients of its scores, or of what these are made of.
  template <typename Block>
  void leave(const Block& block, BlockOf<A> weight, BlockOf<A> gradient) const {
    static_assert(kNumbers == 2);
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

  // What the other pass has left is scattered, and mostly too much for the caches. Asks for the
  // first cache line of what each entry of a block further on will read.
  FASTGRAPH_INLINE void expect_reads(const Entries& block) const {
    const int64_t begin = block.entry + kBlock;
    const int64_t end = std::min(begin + block.count, block.graph.num_entries);
    for (int64_t entry = begin; entry < end; ++entry) {
      __builtin_prefetch(between + 2 * block.graph.edge(entry) * grad.heads);
    }
  }

  void gradients_of_batch(const RowBatch& batch, A* weight, A* score) const {
    with_head_lanes<A>(batch.heads, [&](auto lanes) {
      constexpr int N = decltype(lanes)::value;
      for (int64_t e = batch.begin; e < batch.end; ++e) {
        if (e + kAhead < batch.graph.num_entries) {
          __builtin_prefetch(between + 2 * batch.graph.edge(e + kAhead) * batch.heads);
        }
        const A* own = between + 2 * batch.graph.edge(e) * batch.heads;
        for (int64_t h = 0; h < batch.heads; h += N) {
          Vector<A, N> first, second;
          load_pairs<N>(own + 2 * h, first, second);
          store<N>(weight + batch.at(e) + h, first);
          store<N>(score + batch.at(e) + h, second);
        }
      }
    });
  }

  template <typename Block>
  EdgeGradients<A> gradients(const Block& block) const {
    EdgeGradients<A> found{};
    if (block.head == 0) expect_reads(block);
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
    A buffer[kMostNumbers * kBlock];
    state[0] += pass.fill(block, buffer);
  }
  void finish(int64_t row, int64_t head, bool, int64_t, const A* state) const {
    pass.delta_of(row, head) = state[0];
  }
};

template <typename T, typename Pass>
void find_delta_of_cut_rows(const OrderedCsr& graph, const Schedule& schedule, int64_t heads,
                            int64_t width, const Pass& pass) {
  Schedule cut{{}, schedule.cut_rows, schedule.num_pieces};
  for (const Task& task : schedule.tasks) {
    if (!task.whole()) cut.tasks.push_back(task);
  }
  run_pass<Accumulator<T>>(graph, cut, heads, width, DeltaOfCutRows<T, Pass>{{1}, pass});
}

template <typename T, typename Pass>
void run_destination_pass(const OrderedCsr& graph, const Schedule& schedule, int64_t heads,
                          int64_t width, Pass pass) {
  const auto delta = scratch<Accumulator<T>>(graph.num_rows * heads);
  pass.delta = delta.get();
  find_delta_of_cut_rows<T>(graph, schedule, heads, width, pass);
  run_pass<Accumulator<T>>(graph, schedule, heads, width, pass);
}

}  // namespace fastgraph
