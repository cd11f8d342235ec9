// Attention over neighbourhoods on the GPU. edge_softmax.h tells the ideas, which are the same.
//
// A group of lanes holds a head of one node in registers and walks over the entries of its row, a
// batch at a time. Each lane reads the column of one entry of the batch, draws its dropout and
// knows its softmax; the group then takes several entries at a time, whose rows all lanes gather
// together. The grid's y direction are the heads, so that blocks at work together gather from the
// same columns.
//
// Scores and products must round alike in all passes for a saturated softmax to cancel, so where
// the compiler could merge a multiplication into the next subtraction, times() forbids it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/queue.h"
#include "fastgraph/attention_arguments.h"
#include "fastgraph/lanes.cuh"
#include "fastgraph/philox.cuh"
#include "fastgraph/pieces.cuh"

namespace fastgraph::cuda {

inline __device__ float times(float a, float b) { return __fmul_rn(a, b); }
inline __device__ double times(double a, double b) { return __dmul_rn(a, b); }
inline __device__ float exponential(float x) { return expf(x); }
inline __device__ double exponential(double x) { return exp(x); }

// ---- How a group holds a head

// kPacks packs of kValues values in each of kLanes lanes. A head that does not fit (kWhole is
// false) is taken in parts of that size, one after another, and dot products are made anew for
// each.
template <typename T, int kValuesOf, int kLanesOf, int kPacksOf, bool kWholeOf = true>
struct Layout {
  using Element = T;
  using A = Accumulator<T>;
  static constexpr int kValues = kValuesOf, kLanes = kLanesOf, kPacks = kPacksOf;
  static constexpr bool kWhole = kWholeOf;
  using Share = RowShare<T, kValues, kLanes, kPacks>;
  using Sums = RowSums<A, kValues, kLanes, kPacks>;

  // Entries that a group takes at the same time, to have their rows on the way together, if each
  // needs registers for kRows rows: they get 48. More than 4 would leave most of them idle at the
  // end of the short rows that most graphs have.
  static constexpr int kRegisters = kPacks * kValues * sizeof(A) / 4;
  template <int kRows>
  static constexpr int kInFlight = 48 / (kRows * kRegisters) >= 4   ? 4
                                   : 48 / (kRows * kRegisters) >= 2 ? 2
                                                                    : 1;
};

// Blocks that have to fit on a multiprocessor, 0 to let the compiler choose. It would keep too many
// registers in memory for the sake of another block where edges have features, heads are wide or
// sums double.
template <typename L, typename Pass>
constexpr int kBlocks = Pass::kEdges || !L::kWhole || sizeof(typename L::A) == 8 ? 2 : 0;

// Calls run with the layout for heads of a width; `packed` tells whether they consist of packs.
// Narrow heads are shared by fewer lanes, so that a warp takes several nodes.
template <typename T, typename Run>
cudaError_t with_layout(int64_t width, bool packed, const Run& run) {
  constexpr int kValues = kPack<T>;
  if (!packed) {
    if (width <= 8) return run(Layout<T, 1, 8, 1>{});
    if (width <= 32) return run(Layout<T, 1, 32, 1>{});
    return run(Layout<T, 1, 32, 4, false>{});
  }
  const int64_t packs = width / kValues;
  if (packs <= 4) return run(Layout<T, kValues, 4, 1>{});
  if (packs <= 8) return run(Layout<T, kValues, 8, 1>{});
  if (packs <= 16) return run(Layout<T, kValues, 16, 1>{});
  if (packs <= 32) return run(Layout<T, kValues, 32, 1>{});
  if (packs <= 64) return run(Layout<T, kValues, 32, 2>{});
  return run(Layout<T, kValues, 32, std::min(4, 16 / kValues), false>{});
}

// Calls body(q, i) for value i of each pack q in a layout.
template <typename L, typename Body>
__device__ void for_each_value(const Body& body) {
#pragma unroll
  for (int q = 0; q < L::kPacks; ++q) {
#pragma unroll
    for (int i = 0; i < L::kValues; ++i) body(q, i);
  }
}

// Some entries of a batch, of which the first `count` take part; the others repeat the last.
template <int kCount>
struct Entries {
  int count;
  int lane[kCount];  // the one that has read it
  int32_t col[kCount];
  uint32_t edge[kCount];  // set if the edges carry something that is gathered
};

// What a group works on: a head, from the channel `first` on.
template <typename L>
struct Part {
  using T = typename L::Element;
  using Share = typename L::Share;
  using Sums = typename L::Sums;

  Lanes<L::kLanes> lanes;
  int head;
  int64_t first;

  // Whether pack q of this lane lies in a row of that width.
  __device__ bool covers(int q, int64_t width) const {
    return first + Share::column(lanes.lane, q) < width;
  }

  // The share of a row, zeros beyond its width.
  __device__ Share load(const T* row, int64_t width) const {
    Share share;
    share.load(row + first, lanes.lane, width - first);
    return share;
  }

  // The share of a node's head, zeros if it is not wanted.
  __device__ Share load(Heads<const T> x, int64_t node, bool wanted = true) const {
    return load(x.at(node, head), wanted ? x.width : 0);
  }

  template <int kCount>
  __device__ void gather(Heads<const T> x, const Entries<kCount>& entries,
                         Share (&rows)[kCount]) const {
#pragma unroll
    for (int u = 0; u < kCount; ++u) rows[u] = load(x, entries.col[u], u < entries.count);
  }

  template <typename To>
  __device__ void store(const Sums& sums, Heads<To> x, int64_t node, typename L::A factor) const {
    sums.store(x.at(node, head) + first, lanes.lane, x.width - first, factor);
  }
};

// Calls body(part) for the parts of a head.
template <typename L, typename Body>
__device__ void for_each_part(Lanes<L::kLanes> lanes, int head, int64_t width, const Body& body) {
  if constexpr (L::kWhole) {
    body(Part<L>{lanes, head, 0});
  } else {
    int64_t first = 0;
    do {  // heads without channels have one part
      body(Part<L>{lanes, head, first});
      first += L::Share::kWidth;
    } while (first < width);
  }
}

// The same for the heads that belong to this block.
template <typename L, typename Body>
__device__ void for_each_head(int64_t heads, int64_t width, const Body& body) {
  const auto lanes = Lanes<L::kLanes>::mine();
  for (int64_t head = blockIdx.y; head < heads; head += gridDim.y) {
    for_each_part<L>(lanes, static_cast<int>(head), width, body);
  }
}

// As many as a grid takes in the directions y and z; blocks stride over the others.
inline unsigned grid_size(int64_t count) {
  return static_cast<unsigned>(std::min<int64_t>(count, 65535));
}

// ---- How a group walks over the entries of a span

// Entries of which each lane reads one; those beyond the last read the last once more.
struct Batch {
  int number;  // in its span
  int count;
  int64_t entry;
  int32_t col;
  uint32_t edge;
};

template <int kLanes, typename Body>
__device__ void for_each_batch(const Csr& graph, const Span& span, Lanes<kLanes> lanes,
                               const Body& body) {
  int number = 0;
  for (int64_t base = span.begin; base < span.end; base += kLanes, ++number) {
    const int count = static_cast<int>(min(span.end - base, static_cast<int64_t>(kLanes)));
    const int64_t entry = base + min(lanes.lane, count - 1);
    const auto edge = static_cast<uint32_t>(graph.edge(entry));
    body(Batch{number, count, entry, __ldg(graph.col + entry), edge});
  }
}

// Calls body(entries) for the entries of a batch, kCount at a time.
template <int kCount, bool kEdges, int kLanes, typename Body>
__device__ void for_each_entries(const Batch& batch, Lanes<kLanes> lanes, const Body& body) {
  for (int j = 0; j < batch.count; j += kCount) {
    Entries<kCount> entries;
    entries.count = min(batch.count - j, kCount);
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      entries.lane[u] = min(j + u, batch.count - 1);
      entries.col[u] = lanes.from(batch.col, entries.lane[u]);
      if constexpr (kEdges) entries.edge[u] = lanes.from(batch.edge, entries.lane[u]);
    }
    body(entries);
  }
}

// 0 for dropped edges, 1 / (1 - rate) for the others; see Dropout.
template <typename A>
struct Keep {
  uint64_t seed;
  uint32_t threshold;  // edges whose random bits are below it are dropped
  A scale;

  explicit Keep(const Dropout& dropout)
      : seed(dropout.seed),
        threshold(static_cast<uint32_t>(std::min(dropout.rate * 0x1p32, 0x1p32 - 1))),
        scale(dropout.rate < 1 ? static_cast<A>(1 / (1 - dropout.rate)) : A{0}) {}

  __device__ A operator()(uint32_t edge, int head) const {
    if (threshold == 0) return scale;
    return philox(seed, edge, static_cast<uint32_t>(head)) < threshold ? A{0} : scale;
  }
};

// What a group finds of some entries together: what their scores are made of, and the products of
// their values with the gradient of the output.
template <typename A, int kCount>
struct Dots {
  A score[kCount];
  A product[kCount];
};

// dot += this lane's part of <own, others[u]>.
template <typename L, int kCount>
__device__ void add_products(const typename L::Share& own,
                             const typename L::Share (&others)[kCount],
                             typename L::A (&dot)[kCount]) {
#pragma unroll
  for (int u = 0; u < kCount; ++u) {
    for_each_value<L>([&](int q, int i) { dot[u] += own.at(q, i) * others[u].at(q, i); });
  }
}

// A pass provides hold(part, row), what a group holds of its row; gather(part, entries), the rows
// of some entries; add_dots(part, held, gathered, entries, dots), which adds a lane's part of the
// dot products, as wide as dot_width(), that it asks for by kScores and kProducts; and
// score_of_dot(dot). kEdges tells whether it needs to know the edges of entries, and kRows for how
// many rows each entry takes registers.
template <typename P, typename L, typename Held, int kCount, typename Gathered>
__device__ Dots<typename L::A, kCount> find_dots(const P& pass, const Part<L>& part, int64_t row,
                                                 const Held& held, const Entries<kCount>& entries,
                                                 const Gathered& gathered) {
  Dots<typename L::A, kCount> dots = {};
  if constexpr (L::kWhole) {
    pass.add_dots(part, held, gathered, entries, dots);
  } else {
    for_each_part<L>(part.lanes, part.head, pass.dot_width(), [&](const Part<L>& other) {
      pass.add_dots(other, pass.hold(other, row), pass.gather(other, entries), entries, dots);
    });
  }
#pragma unroll
  for (int u = 0; u < kCount; ++u) {
    if constexpr (P::kScores) dots.score[u] = pass.score_of_dot(part.lanes.sum(dots.score[u]));
    if constexpr (P::kProducts) dots.product[u] = part.lanes.sum(dots.product[u]);
  }
  return dots;
}

// ---- Results of rows

// Where the sums over rows go, and those over the pieces of long rows until they are merged.
template <typename T>
struct RowResult {
  Heads<T> rows;
  Heads<Accumulator<T>> pieces;

  RowResult(Queue& queue, int64_t num_pieces, Heads<T> out)
      : rows(out),
        pieces{queue.scratch<Accumulator<T>>(num_pieces * out.heads * out.width), num_pieces,
               out.heads, out.width} {}

  template <typename L>
  __device__ void store(const Part<L>& part, const Span& span, const typename L::Sums& sums) const {
    if (span.piece >= 0) {
      part.store(sums, pieces, span.piece, 1);
    } else {
      part.store(sums, rows, span.row, 1);
    }
  }

  // For results of one channel.
  __device__ void store_one(const Span& span, int head, Accumulator<T> sum) const {
    if (span.piece >= 0) {
      *pieces.at(span.piece, head) = sum;
    } else {
      *rows.at(span.row, head) = narrowed<T>(sum);
    }
  }
};

// The sums over long rows, from those over their pieces.
template <typename T>
__global__ void __launch_bounds__(kBlockThreads) merge_pieces(Csr graph, RowResult<T> result) {
  const int64_t width = result.rows.heads * result.rows.width;
  const int64_t stride = static_cast<int64_t>(gridDim.y) * kBlockThreads;
  for_each_long_row(graph, [&](int64_t row, int64_t begin, int64_t end) {
    int64_t f = static_cast<int64_t>(blockIdx.y) * kBlockThreads + threadIdx.x;
    for (; f < width; f += stride) {
      Accumulator<T> sum = 0;
      for_each_piece(begin, end, [&](int64_t piece) { sum += result.pieces.at(piece, 0)[f]; });
      result.rows.at(row, 0)[f] = narrowed<T>(sum);
    }
  });
}

template <typename T>
cudaError_t merge(Queue& queue, const Csr& graph, const RowResult<T>& result) {
  if (result.pieces.nodes == 0) return cudaSuccess;
  const int64_t width = result.rows.heads * result.rows.width;
  const dim3 grid(merge_blocks(graph), grid_size(ceil_div(width, kBlockThreads)));
  return launch({"merge_pieces", grid, kBlockThreads, 0, queue.stream()}, merge_pieces<T>, graph,
                result);
}

// Blocks of a kernel that takes so many groups.
template <typename L>
unsigned blocks_for(int64_t groups) {
  return static_cast<unsigned>(ceil_div(groups * L::kLanes, kBlockThreads));
}

// ---- The forward pass

// exp(score - largest); where there is no finite score yet, -infinity - -infinity would be NaN.
template <typename A>
__device__ A weight_of(A score, A largest) {
  return exponential(score - (largest == -INFINITY ? A{0} : largest));
}

template <typename L>
struct OnlineSoftmax {
  using A = typename L::A;

  A largest;
  A total;
  typename L::Sums sums;

  __device__ void clear() {
    largest = -INFINITY;
    total = 0;
    sums.clear();
  }

  // Makes room for a larger score: what was added up so far shrinks.
  __device__ void raise(A score) {
    if (!(score > largest)) return;
    const A rescale = exponential(largest - score);
    largest = score;
    total *= rescale;
    sums.each([&](A& value, int, int) { value *= rescale; });
  }
};

// Writes a row's largest score and inverse sum of exponentials, zeros for an empty one, and returns
// the latter.
template <typename A>
__device__ A finish_stats(A* stats, A largest, A total, bool empty, bool writes) {
  const A inverse = empty ? A{0} : 1 / total;
  if (writes) {
    stats[0] = empty ? A{0} : largest;
    stats[1] = inverse;
  }
  return inverse;
}

// S provides the scores: besides what find_dots() asks for, value(gathered, u), the share of the
// value of an entry, and own_score(row, head, batch), that of a lane's entry, if kScores is false.
template <typename S>
struct ForwardPass {
  using T = typename S::Element;
  using A = Accumulator<T>;

  Csr graph;
  int64_t pieces;
  Keep<A> keep;
  S scores;
  SoftmaxOutputs<T> outputs;
  Heads<A> sums_of_pieces;
  SoftmaxStats<A> stats_of_pieces;  // largest score, sum of exponentials
  A* score;                         // [entries, heads], or null if nobody asks

  // Of a span, all of whose entries the softmax has seen.
  template <typename L>
  __device__ void finish(const Part<L>& part, const Span& span,
                         const OnlineSoftmax<L>& softmax) const {
    const bool writes = part.lanes.lane == 0 && part.first == 0;
    if (span.piece < 0) {
      const A inverse = finish_stats(outputs.stats.at(span.row, part.head), softmax.largest,
                                     softmax.total, span.begin == span.end, writes);
      part.store(softmax.sums, outputs.out, span.row, inverse);
      return;
    }
    if (writes) {
      A* stats = stats_of_pieces.at(span.piece, part.head);
      stats[0] = softmax.largest;
      stats[1] = softmax.total;
    }
    part.store(softmax.sums, sums_of_pieces, span.piece, 1);
  }
};

template <typename L, typename S>
__global__ void __launch_bounds__(kBlockThreads, kBlocks<L, S>) softmax_rows(ForwardPass<S> pass) {
  using A = typename L::A;
  constexpr int kCount = L::template kInFlight<S::kRows>;
  const int64_t task = group_index<L::kLanes>(), heads = pass.outputs.out.heads;
  if (task >= pass.pieces + pass.graph.num_rows) return;
  const Span span = span_of(pass.graph, task, pass.pieces);
  if (span.row < 0) return;
  for_each_head<L>(heads, pass.outputs.out.width, [&](const Part<L>& part) {
    OnlineSoftmax<L> softmax;
    softmax.clear();
    const auto held = pass.scores.hold(part, span.row);
    for_each_batch(pass.graph, span, part.lanes, [&](const Batch& batch) {
      const A own_keep = pass.keep(batch.edge, part.head);
      A own_score = 0;
      if constexpr (!S::kScores) own_score = pass.scores.own_score(span.row, part.head, batch);
      for_each_entries<kCount, S::kEdges>(batch, part.lanes, [&](const Entries<kCount>& entries) {
        const auto gathered = pass.scores.gather(part, entries);
        Dots<A, kCount> dots;
        if constexpr (S::kScores) {
          dots = find_dots(pass.scores, part, span.row, held, entries, gathered);
        }
        A keep[kCount], largest = -INFINITY;
#pragma unroll
        for (int u = 0; u < kCount; ++u) {
          if constexpr (!S::kScores) dots.score[u] = part.lanes.from(own_score, entries.lane[u]);
          keep[u] = part.lanes.from(own_keep, entries.lane[u]);
          if (u < entries.count && dots.score[u] > largest) largest = dots.score[u];
        }
        softmax.raise(largest);
#pragma unroll
        for (int u = 0; u < kCount; ++u) {
          if (u >= entries.count) break;
          const A p = weight_of(dots.score[u], softmax.largest);
          const A weight = p * keep[u];
          const auto& value = S::value(gathered, u);
          softmax.total += p;
          softmax.sums.each([&](A& sum, int q, int i) { sum += weight * value.at(q, i); });
          if (pass.score != nullptr && part.lanes.lane == entries.lane[u]) {
            pass.score[batch.entry * heads + part.head] = dots.score[u];
          }
        }
      });
    });
    pass.finish(part, span, softmax);
  });
}

// The softmax of long rows, from those of their pieces. All threads find the sum of exponentials,
// each the values of its channels.
template <typename T>
__global__ void __launch_bounds__(kBlockThreads)
    merge_softmax(Csr graph, SoftmaxOutputs<T> outputs, Heads<Accumulator<T>> sums_of_pieces,
                  SoftmaxStats<Accumulator<T>> stats_of_pieces) {
  using A = Accumulator<T>;
  const Heads<T>& out = outputs.out;
  for_each_long_row(graph, [&](int64_t row, int64_t begin, int64_t end) {
    for (int64_t head = blockIdx.y; head < out.heads; head += gridDim.y) {
      A largest = -INFINITY, total = 0;
      for_each_piece(begin, end, [&](int64_t piece) {
        const A of_piece = stats_of_pieces.at(piece, head)[0];
        if (of_piece > largest) largest = of_piece;
      });
      for_each_piece(begin, end, [&](int64_t piece) {
        const A* stats = stats_of_pieces.at(piece, head);
        total += weight_of(stats[0], largest) * stats[1];
      });
      const A inverse =
          finish_stats(outputs.stats.at(row, head), largest, total, false, threadIdx.x == 0);
      for (int64_t f = threadIdx.x; f < out.width; f += kBlockThreads) {
        A sum = 0;
        for_each_piece(begin, end, [&](int64_t piece) {
          const A weight = weight_of(stats_of_pieces.at(piece, head)[0], largest);
          sum += weight * sums_of_pieces.at(piece, head)[f];
        });
        out.at(row, head)[f] = narrowed<T>(sum * inverse);
      }
    }
  });
}

// The weights of all entries, once their scores and the stats are known.
constexpr int kWeightLanes = 8;
template <typename T>
__global__ void __launch_bounds__(kBlockThreads)
    softmax_weights(Csr graph, int64_t pieces, Keep<Accumulator<T>> keep, SoftmaxOutputs<T> outputs,
                    const Accumulator<T>* score) {
  using A = Accumulator<T>;
  const int64_t task = group_index<kWeightLanes>(), heads = outputs.out.heads;
  if (task >= pieces + graph.num_rows) return;
  const Span span = span_of(graph, task, pieces);
  if (span.row < 0) return;
  const int lane = Lanes<kWeightLanes>::mine().lane;
  for (int64_t i = span.begin * heads + lane; i < span.end * heads; i += kWeightLanes) {
    const int64_t edge = graph.edge(i / heads), head = i % heads;
    const A* stats = outputs.stats.at(span.row, head);
    const A weight = weight_of(score[i], stats[0]) * stats[1];
    const A factor = keep(static_cast<uint32_t>(edge), static_cast<int>(head));
    outputs.alpha.row(edge)[head] = narrowed<T>(weight * factor);
  }
}

template <typename S>
cudaError_t run_forward(Queue& queue, const char* name, const Csr& graph, const S& scores,
                        Dropout dropout, const SoftmaxOutputs<typename S::Element>& outputs,
                        bool packed) {
  using T = typename S::Element;
  using A = Accumulator<T>;
  const Heads<T>& out = outputs.out;
  const int64_t pieces = num_pieces(graph);
  const bool weights = outputs.alpha.data != nullptr;
  const ForwardPass<S> pass{
      graph,
      pieces,
      Keep<A>(dropout),
      scores,
      outputs,
      {queue.scratch<A>(pieces * out.heads * out.width), pieces, out.heads, out.width},
      {queue.scratch<A>(pieces * out.heads * 2), out.heads},
      weights ? queue.scratch<A>(graph.num_entries * out.heads) : nullptr};
  const unsigned heads = grid_size(out.heads);
  cudaError_t error = with_layout<T>(scores.dot_width(), packed, [&](auto layout) {
    using L = decltype(layout);
    const dim3 grid(blocks_for<L>(pieces + graph.num_rows), heads);
    return launch({name, grid, kBlockThreads, 0, queue.stream()}, softmax_rows<L, S>, pass);
  });
  if (error == cudaSuccess && pieces > 0) {
    const dim3 grid(merge_blocks(graph), heads);
    error = launch({"merge_softmax", grid, kBlockThreads, 0, queue.stream()}, merge_softmax<T>,
                   graph, outputs, pass.sums_of_pieces, pass.stats_of_pieces);
  }
  if (error != cudaSuccess || pass.score == nullptr) return error;
  const auto blocks =
      static_cast<unsigned>(ceil_div((pieces + graph.num_rows) * kWeightLanes, kBlockThreads));
  return launch({"softmax_weights", blocks, kBlockThreads, 0, queue.stream()}, softmax_weights<T>,
                graph, pieces, pass.keep, outputs, pass.score);
}

// ---- The backward pass over destinations

// The gradient of the weight of a lane's entry.
template <typename T>
__device__ Accumulator<T> grad_of_weight(const SoftmaxGradients<T>& given, const Batch& batch,
                                         int head) {
  return given.grad_alpha.data ? widened(given.grad_alpha.row(batch.edge)[head]) : 0;
}

// A group visits the entries of a row twice: first for delta, then, with the rows in the cache, for
// the gradients. A kernel for the pieces of long rows alone (only_delta) goes before.
template <typename T>
struct DestinationPass {
  using Element = T;
  using A = Accumulator<T>;
  static constexpr bool kProducts = true;

  Csr graph;
  int64_t pieces;
  Keep<A> keep;
  SoftmaxGradients<T> given;
  RowResult<A> delta;
  int64_t tasks;
  bool only_delta;

  DestinationPass(Queue& queue, const Csr& rows, const Dropout& dropout,
                  const SoftmaxGradients<T>& gradients, A* deltas)
      : graph(rows),
        pieces(num_pieces(rows)),
        keep(dropout),
        given(gradients),
        delta(queue, pieces, {deltas, rows.num_rows, gradients.grad.heads, 1}),
        tasks(pieces + rows.num_rows),
        only_delta(false) {}

  __device__ int64_t dot_width() const { return given.grad.width; }
};

// The entries of a span: each lane knows those that it reads.
template <typename L>
struct EntrySoftmax {
  using A = typename L::A;
  static constexpr int kBatches = kChunk / L::kLanes;

  A weight[kBatches];   // without dropout
  A product[kBatches];  // with it
  A delta;              // of the row

  // The gradient of the score of a lane's entry.
  __device__ A gradient(const Batch& batch) const {
    return weight[batch.number] * (product[batch.number] - delta);
  }
};

// Fills in what is known without delta, and the span's part of that.
template <typename L, typename P, typename Held>
__device__ void fill(const P& pass, const Part<L>& part, const Span& span, const Held& held,
                     EntrySoftmax<L>& softmax) {
  using A = typename L::A;
  constexpr int kCount = L::template kInFlight<P::kRows>;
  const A* stats = pass.given.stats.at(span.row, part.head);
  const A largest = stats[0], inverse = stats[1];
  A delta = 0;
  for_each_batch(pass.graph, span, part.lanes, [&](const Batch& batch) {
    A score = 0, product = grad_of_weight(pass.given, batch, part.head);
    if constexpr (!P::kScores) score = pass.own_score(span.row, part.head, batch);
    for_each_entries<kCount, P::kEdges>(batch, part.lanes, [&](const Entries<kCount>& entries) {
      const auto gathered = pass.gather(part, entries);
      const auto dots = find_dots(pass, part, span.row, held, entries, gathered);
#pragma unroll
      for (int u = 0; u < kCount; ++u) {
        if (u >= entries.count || part.lanes.lane != entries.lane[u]) continue;
        if constexpr (P::kScores) score = dots.score[u];
        product += dots.product[u];
      }
    });
    const bool mine = part.lanes.lane < batch.count;
    const A weight = mine ? exponential(score - largest) * inverse : A{0};
    product = mine ? times(pass.keep(batch.edge, part.head), product) : A{0};
    softmax.weight[batch.number] = weight;
    softmax.product[batch.number] = product;
    delta += weight * product;
  });
  softmax.delta = part.lanes.sum(delta);
}

// Besides what find_dots() asks for, P provides result_width(), the channels of what it writes;
// Totals, sums over all rows of a group; add_gradients(part, span, held, softmax, totals); and
// store_totals(part, totals).
template <typename L, typename P>
__global__ void __launch_bounds__(kBlockThreads, kBlocks<L, P>) destination_rows(P pass) {
  const int64_t groups = static_cast<int64_t>(gridDim.x) * (kBlockThreads / L::kLanes);
  const int64_t width = pass.only_delta ? 0 : pass.result_width();
  for_each_head<L>(pass.given.grad.heads, width, [&](const Part<L>& part) {
    typename P::template Totals<L> totals;
    totals.clear();
    for (int64_t task = group_index<L::kLanes>(); task < pass.tasks; task += groups) {
      const Span span = span_of(pass.graph, task, pass.pieces);
      if (span.row < 0) continue;
      const auto held = pass.hold(part, span.row);
      EntrySoftmax<L> softmax;
      fill(pass, part, span, held, softmax);
      if (span.piece >= 0 && !pass.only_delta) {
        softmax.delta = *pass.delta.rows.at(span.row, part.head);
      } else if (part.lanes.lane == 0 && part.first == 0) {
        pass.delta.store_one(span, part.head, softmax.delta);
      }
      if (!pass.only_delta) pass.add_gradients(part, span, held, softmax, totals);
    }
    if (!pass.only_delta) pass.store_totals(part, totals);
  });
}

// For passes that add up nothing over all rows.
template <typename L>
struct NoTotals {
  __device__ void clear() {}
};

template <typename L, typename P>
cudaError_t run_destinations(Queue& queue, const char* name, P pass, dim3 grid) {
  if (pass.pieces > 0) {
    P first = pass;
    first.only_delta = true;
    first.tasks = pass.pieces;
    const dim3 blocks(std::min(grid.x, blocks_for<L>(pass.pieces)), grid.y);
    cudaError_t error =
        launch({name, blocks, kBlockThreads, 0, queue.stream()}, destination_rows<L, P>, first);
    if (error == cudaSuccess) error = merge(queue, pass.graph, pass.delta);
    if (error != cudaSuccess) return error;
  }
  return launch({name, grid, kBlockThreads, 0, queue.stream()}, destination_rows<L, P>, pass);
}

// ---- The backward pass over sources, along the transposed graph

template <typename T>
struct SourcePass {
  using Element = T;
  using A = Accumulator<T>;
  static constexpr bool kProducts = true;

  Csr graph;
  int64_t pieces;
  Keep<A> keep;
  SoftmaxGradients<T> given;
  const A* delta;  // [destinations, heads]

  SourcePass(const Csr& transpose, const Dropout& dropout, const SoftmaxGradients<T>& gradients,
             const A* deltas)
      : graph(transpose),
        pieces(num_pieces(transpose)),
        keep(dropout),
        given(gradients),
        delta(deltas) {}

  __device__ int64_t dot_width() const { return given.grad.width; }
};

// What a lane knows of the softmax to which its entry belongs.
template <typename A>
struct OwnSoftmax {
  A largest, inverse, delta, keep, grad_of_weight;

  template <typename T>
  __device__ OwnSoftmax(const SourcePass<T>& pass, const Batch& batch, int head) {
    const auto stats = load_pack<2>(pass.given.stats.at(batch.col, head));
    largest = stats.values[0];
    inverse = stats.values[1];
    delta = __ldg(pass.delta + batch.col * pass.given.stats.heads + head);
    keep = pass.keep(batch.edge, head);
    grad_of_weight = cuda::grad_of_weight(pass.given, batch, head);
  }
};

// Besides what find_dots() asks for, P provides result_width(); Sums over a row; add(part, held,
// gathered, entries, of_value, of_score, sums), where the factors are what the entries contribute
// to gradients of values and scores; add_own(row, head, batch, of_score, sums), the same for a
// lane's entry, if kScores is false; and store(part, span, sums).
template <typename L, typename P>
__global__ void __launch_bounds__(kBlockThreads, kBlocks<L, P>) source_rows(P pass) {
  using A = typename L::A;
  constexpr int kCount = L::template kInFlight<P::kRows>;
  const int64_t task = group_index<L::kLanes>();
  if (task >= pass.pieces + pass.graph.num_rows) return;
  const Span span = span_of(pass.graph, task, pass.pieces);
  if (span.row < 0) return;
  for_each_head<L>(pass.given.grad.heads, pass.result_width(), [&](const Part<L>& part) {
    const auto held = pass.hold(part, span.row);
    typename P::template Sums<L> sums;
    sums.clear();
    for_each_batch(pass.graph, span, part.lanes, [&](const Batch& batch) {
      const OwnSoftmax<A> own(pass, batch, part.head);
      A score = 0, gradient = 0;
      if constexpr (!P::kScores) score = pass.own_score(span.row, part.head, batch);
      for_each_entries<kCount, P::kEdges>(batch, part.lanes, [&](const Entries<kCount>& entries) {
        const auto gathered = pass.gather(part, entries);
        const auto dots = find_dots(pass, part, span.row, held, entries, gathered);
        A product = own.grad_of_weight;
        bool mine = false;
#pragma unroll
        for (int u = 0; u < kCount; ++u) {
          if (u >= entries.count || part.lanes.lane != entries.lane[u]) continue;
          if constexpr (P::kScores) score = dots.score[u];
          product += dots.product[u];
          mine = true;
        }
        const A p = exponential(score - own.largest) * own.inverse;
        if (mine) gradient = p * (times(own.keep, product) - own.delta);
        A of_value[kCount], of_score[kCount];
#pragma unroll
        for (int u = 0; u < kCount; ++u) {
          of_value[u] = part.lanes.from(own.keep * p, entries.lane[u]);
          of_score[u] = part.lanes.from(gradient, entries.lane[u]);
        }
        pass.add(part, held, gathered, entries, of_value, of_score, sums);
      });
      if constexpr (!P::kScores) {
        const bool mine = part.lanes.lane < batch.count;
        if (mine) pass.add_own(span.row, part.head, batch, gradient, sums);
      }
    });
    pass.store(part, span, sums);
  });
}

template <typename P>
cudaError_t run_sources(Queue& queue, const char* name, const P& pass, bool packed) {
  using T = typename P::Element;
  return with_layout<T>(pass.given.grad.width, packed, [&](auto layout) {
    using L = decltype(layout);
    const dim3 grid(blocks_for<L>(pass.pieces + pass.graph.num_rows),
                    grid_size(pass.given.grad.heads));
    return launch({name, grid, kBlockThreads, 0, queue.stream()}, source_rows<L, P>, pass);
  });
}

}  // namespace fastgraph::cuda
