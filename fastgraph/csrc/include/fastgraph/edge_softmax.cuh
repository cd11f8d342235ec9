// Attention over neighbourhoods on the GPU: its forward pass, of which each operator describes its
// own scores. edge_softmax.h tells the ideas, which are the same, edge_groups.cuh who does the
// work, and edge_softmax_backward.cuh has the other passes.
//
// Scores and products must round alike in all passes for a saturated softmax to cancel, so where
// the compiler could merge a multiplication into the next subtraction, times() forbids it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "fastgraph/edge_groups.cuh"

namespace fastgraph::cuda {

inline __device__ float times(float a, float b) { return __fmul_rn(a, b); }
inline __device__ double times(double a, double b) { return __dmul_rn(a, b); }
// For differences of scores, up to 0: 2^y of y = x log2(e), which is rounded, and e^(x - y ln(2)).
inline __device__ float exponential(float x) {
  constexpr float kZero = -105;  // whose exponential is 0 in float32
  x = larger_or_nan(x, kZero);
  const float y = times(x, 1.44269504f);
  const float left = fmaf(y, 1.90465421e-9f, fmaf(y, -0.693147182f, x));
  const float power = exp2_of(y);
  return fmaf(power, left, power);
}
inline __device__ double exponential(double x) { return exp(x); }

// Calls run(std::bool_constant) with whether edges carry features.
template <typename Inputs, typename Run>
cudaError_t with_edges(const Inputs& in, const Run& run) {
  return in.edge.width > 0 ? run(std::true_type{}) : run(std::false_type{});
}

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

  __device__ void add(A weight, const typename L::Share& value) {
    sums.each([&](A& sum, int q, int i) { sum += weight * value.at(q, i); });
  }
};

// Writes a row's largest score and inverse sum of exponentials, zeros for an empty one, and returns
// the latter. A row is empty, too, if biases leave it no finite score.
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
// value of an entry; own_score(row, head, batch), that of a lane's entry, if kScores is false; and
// kTogether, whether it is instructions that take its time, so that neighbouring groups may take
// the heads of a node: then gathered_bytes() tells how large all that is gathered is.
template <typename S>
struct ForwardPass {
  using T = typename S::Element;
  using A = Accumulator<T>;

  CutCsr graph;
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
      const bool empty = span.begin == span.end || (S::kBiased && softmax.total == 0);
      const A inverse = finish_stats(outputs.stats.at(span.row, part.head), softmax.largest,
                                     softmax.total, empty, writes);
      // Found before the loops, what is added would occupy registers all the time.
      const T* addend = outputs.addend_of(computed_here(span.row), part.head);
      part.store(softmax.sums, outputs.out, span.row, inverse, addend);
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
  constexpr int kMost = L::template kInFlight<S::kRows>;
  const int64_t heads = pass.outputs.out.heads, task = task_of<L>(heads);
  if (task >= pass.graph.num_tasks) return;
  const Span span = span_of(pass.graph, task);
  for_each_head<L>(heads, pass.outputs.out.width, [&](const Part<L>& part) {
    OnlineSoftmax<L> softmax;
    softmax.clear();
    const auto held = pass.scores.hold(part, span.row);
    for_each_batch(pass.graph, span, part.lanes, [&](const Batch& batch) {
      const A own_keep = pass.keep(batch.edge, part.head);
      const A own_bias = find_own_bias(pass.scores, part, batch);
      A own_score = 0;
      if constexpr (S::kScores) {
        for_each_entries<kMost, S::kEdges>(batch, part.lanes, [&](const auto& entries) {
          constexpr int kCount = std::decay_t<decltype(entries)>::kCount;
          const auto gathered = pass.scores.gather(part, entries);
          const auto dots =
              find_dots(pass.scores, part, span.row, held, entries, gathered, own_bias);
          A largest = dots.score[0];
#pragma unroll
          for (int u = 1; u < kCount; ++u) largest = larger(largest, dots.score[u]);
          softmax.raise(largest);
#pragma unroll
          for (int u = 0; u < kCount; ++u) {
            const A p = weight_of(dots.score[u], softmax.largest);
            const A weight = p * part.lanes.from(own_keep, entries.first + u);
            softmax.total += p;
            softmax.add(weight, S::value(gathered, u));
            if (part.lanes.lane == entries.first + u) own_score = dots.score[u];
          }
        });
      } else {
        // Each lane finds the weight of its own entry, and the total of its own ones.
        own_score = pass.scores.own_score(span.row, part.head, batch);
        const bool mine = part.lanes.lane < batch.count;
        softmax.raise(part.lanes.largest(own_score));
        const A p = mine ? weight_of(own_score, softmax.largest) : A{0};
        softmax.total += p;
        for_each_entries<kMost, S::kEdges>(batch, part.lanes, [&](const auto& entries) {
          constexpr int kCount = std::decay_t<decltype(entries)>::kCount;
          const auto gathered = pass.scores.gather(part, entries);
#pragma unroll
          for (int u = 0; u < kCount; ++u) {
            softmax.add(part.lanes.from(p * own_keep, entries.first + u), S::value(gathered, u));
          }
        });
      }
      if (pass.score != nullptr && part.lanes.lane < batch.count) {
        pass.score[batch.entry * heads + part.head] = own_score;
      }
    });
    if constexpr (!S::kScores) softmax.total = part.lanes.sum(softmax.total);
    pass.finish(part, span, softmax);
  });
}

// The softmax of a row, from those of its pieces: for_each(body) calls body(piece) for them, in
// order. Where it is `biased`, a row without finite scores is empty, too. All threads of a block
// find the sum of exponentials, each the values of its channels.
template <typename T, typename ForEach>
__device__ void merge_row(const SoftmaxOutputs<T>& outputs, int64_t row, int64_t head, bool empty,
                          bool biased, const Heads<Accumulator<T>>& sums_of_pieces,
                          const SoftmaxStats<Accumulator<T>>& stats_of_pieces,
                          const ForEach& for_each) {
  using A = Accumulator<T>;
  const Heads<T>& out = outputs.out;
  A largest = -INFINITY, total = 0;
  for_each([&](int64_t piece) {
    const A of_piece = stats_of_pieces.at(piece, head)[0];
    if (of_piece > largest) largest = of_piece;
  });
  for_each([&](int64_t piece) {
    const A* stats = stats_of_pieces.at(piece, head);
    total += weight_of(stats[0], largest) * stats[1];
  });
  const A inverse = finish_stats(outputs.stats.at(row, head), largest, total,
                                 empty || (biased && total == 0), threadIdx.x == 0);
  const T* addend = outputs.addend_of(row, head);
  for (int64_t f = threadIdx.x; f < out.width; f += kBlockThreads) {
    A sum = 0;
    for_each([&](int64_t piece) {
      const A weight = weight_of(stats_of_pieces.at(piece, head)[0], largest);
      sum += weight * sums_of_pieces.at(piece, head)[f];
    });
    sum *= inverse;
    if (addend != nullptr) sum += widened(addend[f]);
    out.at(row, head)[f] = narrowed<T>(sum);
  }
}

// The same for rows that were cut.
template <typename T>
__global__ void __launch_bounds__(kBlockThreads)
    merge_softmax(CutCsr graph, SoftmaxOutputs<T> outputs, bool biased,
                  Heads<Accumulator<T>> sums_of_pieces,
                  SoftmaxStats<Accumulator<T>> stats_of_pieces) {
  const CutRow row = graph.cut_rows[blockIdx.x];
  for (int64_t head = blockIdx.y; head < outputs.out.heads; head += gridDim.y) {
    merge_row(outputs, row.row, head, false, biased, sums_of_pieces, stats_of_pieces,
              [&](const auto& body) { for_each_piece(row, body); });
  }
}

// The weights of all entries, once their scores and the stats are known.
constexpr int kWeightLanes = 8;
template <typename T>
__global__ void __launch_bounds__(kBlockThreads)
    softmax_weights(CutCsr graph, Keep<Accumulator<T>> keep, SoftmaxOutputs<T> outputs,
                    const Accumulator<T>* score) {
  using A = Accumulator<T>;
  const int64_t task = group_index<kWeightLanes>(), heads = outputs.out.heads;
  if (task >= graph.num_tasks) return;
  const Span span = span_of(graph, task);
  const int lane = Lanes<kWeightLanes>::mine().lane;
  for (int64_t i = span.begin * heads + lane; i < span.end * heads; i += kWeightLanes) {
    const int64_t edge = graph.edge(i / heads), head = i % heads;
    const A* stats = outputs.stats.at(span.row, head);
    const A weight = weight_of(score[i], stats[0]) * stats[1];
    const A factor = keep(edge, static_cast<int>(head));
    outputs.alpha.row(edge)[head] = narrowed<T>(weight * factor);
  }
}

// Calls run with the layout for the heads of a node, which neighbouring groups take where that is
// for S and the second cache has room for all of them, with a fifth left to what streams through.
// Two packs in 8 lanes are what a head of 64 channels of float32 needs, in 16 one of 128.
template <typename S, typename Run>
cudaError_t with_heads(const Queue& queue, const S& scores, int64_t num_tasks, int64_t heads,
                       bool packed, const Run& run) {
  using T = typename S::Element;
  const int64_t width = scores.dot_width();
  if constexpr (S::kTogether) {
    const int64_t packs = width / kPack<T>;
    const bool fits = packed && packs > 8 && num_tasks * heads <= INT32_MAX &&
                      scores.gathered_bytes() <= queue.cache_bytes() / 5 * 4;
    if (fits && packs <= 16 && heads % 4 == 0) return run(HeadsOfNode<T, kPack<T>, 8, 2>{});
    if (fits && packs > 16 && packs <= 32 && heads % 2 == 0) {
      return run(HeadsOfNode<T, kPack<T>, 16, 2>{});
    }
  }
  return with_layout<T>(width, packed, run);
}

template <typename S>
cudaError_t run_forward(Queue& queue, const char* name, const CutCsr& graph, const S& scores,
                        Dropout dropout, const SoftmaxOutputs<typename S::Element>& outputs,
                        bool packed) {
  using T = typename S::Element;
  using A = Accumulator<T>;
  const Heads<T>& out = outputs.out;
  const int64_t pieces = graph.num_pieces;
  const bool weights = outputs.alpha.data != nullptr;
  const ForwardPass<S> pass{
      graph,
      Keep<A>(dropout),
      scores,
      outputs,
      {queue.scratch<A>(pieces * out.heads * out.width), pieces, out.heads, out.width},
      {queue.scratch<A>(pieces * out.heads * 2), out.heads},
      weights ? queue.scratch<A>(graph.num_entries * out.heads) : nullptr};
  const unsigned heads = grid_size(out.heads);
  const auto run = [&](auto layout) {
    using L = decltype(layout);
    const dim3 grid = L::kTogether ? dim3(blocks_for<L>(graph.num_tasks * out.heads))
                                   : dim3(blocks_for<L>(graph.num_tasks), heads);
    return launch({name, grid, kBlockThreads, 0, queue.stream()}, softmax_rows<L, S>, pass);
  };
  cudaError_t error = with_heads(queue, scores, graph.num_tasks, out.heads, packed, run);
  if (error == cudaSuccess) {
    const dim3 grid(static_cast<unsigned>(graph.num_cut), heads);
    error = launch({"merge_softmax", grid, kBlockThreads, 0, queue.stream()}, merge_softmax<T>,
                   graph, outputs, S::kBiased, pass.sums_of_pieces, pass.stats_of_pieces);
  }
  if (error != cudaSuccess || pass.score == nullptr) return error;
  const auto blocks =
      static_cast<unsigned>(ceil_div(graph.num_tasks * kWeightLanes, kBlockThreads));
  return launch({"softmax_weights", blocks, kBlockThreads, 0, queue.stream()}, softmax_weights<T>,
                graph, pass.keep, outputs, pass.score);
}

}  // namespace fastgraph::cuda
