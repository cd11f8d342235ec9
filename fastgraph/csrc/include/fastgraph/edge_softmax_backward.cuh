// The backward passes of attention on the GPU, of which each operator describes its own: over
// destinations, then over sources. See edge_softmax.cuh.
#pragma once

#include <type_traits>

#include "fastgraph/edge_softmax.cuh"

namespace fastgraph::cuda {

// ---- Over destinations

// The gradient of the weight of a lane's entry.
template <typename T>
__device__ Accumulator<T> grad_of_weight(const SoftmaxGradients<T>& given, const Batch& batch,
                                         int head) {
  return given.grad_alpha.data ? widened(given.grad_alpha.row(batch.edge)[head]) : 0;
}

// A piece does not know the delta of its row. Its sums over p (product - center), for a center of
// its own, come with the same sums over p alone, by which a second kernel corrects them. Where
// gradients of edges need delta itself, a kernel before finds it.
template <typename T>
struct DestinationPass {
  using Element = T;
  using A = Accumulator<T>;
  static constexpr bool kProducts = true, kCorrects = false, kBiased = false;

  CutCsr graph;
  Keep<A> keep;
  SoftmaxGradients<T> given;
  RowResult<A> delta;
  RowResult<T> result;
  // Where pieces are corrected, and without data otherwise:
  Heads<A> center;             // of pieces
  Heads<A> weights;            // like result.pieces, over p alone
  Heads<A> parameter_weights;  // those over p of what the gradient of a parameter adds up, if any,
  Heads<A> parameter;          // and what it has to have besides, a node for each cut row

  DestinationPass(Queue& queue, const CutCsr& rows, const Dropout& dropout,
                  const SoftmaxGradients<T>& gradients, A* deltas, Heads<T> results)
      : graph(rows),
        keep(dropout),
        given(gradients),
        delta(queue, rows.num_pieces, {deltas, rows.num_rows, gradients.grad.heads, 1}),
        result(queue, rows.num_pieces, results),
        center{},
        weights{},
        parameter_weights{},
        parameter{} {}

  __device__ int64_t dot_width() const { return given.grad.width; }
  FASTGRAPH_BOTH bool corrects_pieces() const { return center.data != nullptr; }

  void correct_pieces(Queue& queue) {
    const int64_t heads = result.rows.heads, width = result.rows.width;
    center = of_pieces(queue, heads, 1);
    weights = of_pieces(queue, heads, width);
  }
  Heads<A> of_pieces(Queue& queue, int64_t heads, int64_t width) const {
    const int64_t pieces = graph.num_pieces;
    return {queue.scratch<A>(pieces * heads * width), pieces, heads, width};
  }

  // Of a piece that is corrected.
  template <typename L>
  __device__ void store_piece(const Part<L>& part, const Span& span, A of_piece,
                              A own_center) const {
    if (part.lanes.lane != 0) return;
    delta.store_one(span, part.head, of_piece);
    *center.at(span.piece, part.head) = own_center;
  }
};

// Calls body(batch, weight, product) for the batches of a span, with the weight of a lane's entry,
// without dropout, and its product, with it.
template <typename L, typename P, typename Held, typename Body>
__device__ void for_each_product(const P& pass, const Part<L>& part, const Span& span,
                                 const Held& held, const Body& body) {
  using A = typename L::A;
  constexpr int kMost = L::template kInFlight<P::kRows>;
  const A* stats = pass.given.stats.at(span.row, part.head);
  const A largest = stats[0], inverse = stats[1];
  for_each_batch(pass.graph, span, part.lanes, [&](const Batch& batch) {
    A score = 0, product = grad_of_weight(pass.given, batch, part.head);
    const A bias = find_own_bias(pass, part, batch);
    if constexpr (!P::kScores) score = pass.own_score(span.row, part.head, batch);
    for_each_entries<kMost, P::kEdges>(batch, part.lanes, [&](const auto& entries) {
      const auto gathered = pass.gather(part, entries);
      const auto own = find_own_dots(pass, part, span.row, held, entries, gathered, bias);
      score += own.score[0];
      product += own.product[0];
    });
    const bool mine = part.lanes.lane < batch.count;
    const A weight = mine ? exponential(score - largest) * inverse : A{0};
    body(batch, weight, mine ? times(pass.keep(batch.edge, part.head), product) : A{0});
  });
}

// What pieces add to the delta of their rows. Left to choose, the compiler would spill registers.
template <typename L, typename P>
constexpr int kDeltaBlocks = kBlocks<L, P> == 0 && L::kPacks == 1 ? 5 : kBlocks<L, P>;
template <typename L, typename P>
__global__ void __launch_bounds__(kBlockThreads, kDeltaBlocks<L, P>) piece_deltas(P pass) {
  using A = typename L::A;
  const int64_t task = group_index<L::kLanes>();
  if (task >= pass.graph.num_pieces) return;
  const Span span = span_of(pass.graph, task);
  for_each_head<L>(pass.given.grad.heads, 0, [&](const Part<L>& part) {
    const auto held = pass.hold(part, span.row);
    A delta = 0;
    for_each_product(pass, part, span, held,
                     [&](const Batch&, A weight, A product) { delta += weight * product; });
    delta = part.lanes.sum(delta);
    if (part.lanes.lane == 0) pass.delta.store_one(span, part.head, delta);
  });
}

// delta of rows that were cut, less the gradient of the logarithm of the sum of exponentials. Where
// the pieces are summed up, this would spill registers.
template <typename T>
__global__ void __launch_bounds__(kBlockThreads) subtract_of_logsum(DestinationPass<T> pass) {
  for_each_merged(pass.graph, pass.given.stats.heads, [&](const CutRow& row, int64_t head) {
    *pass.delta.rows.at(row.row, head) -= pass.given.of_logsum(row.row, head);
  });
}

// The delta of a whole row, less the gradient of the logarithm of the sum of exponentials, from the
// sum `found`; it is written.
template <typename L, typename P>
__device__ typename L::A settle_delta(const P& pass, const Part<L>& part, const Span& span,
                                      typename L::A found) {
  found -= pass.given.of_logsum(span.row, part.head);
  if (part.lanes.lane == 0 && part.first == 0) pass.delta.store_one(span, part.head, found);
  return found;
}

// The entries of a span: each lane knows those that it reads.
template <typename L>
struct EntrySoftmax {
  using A = typename L::A;
  static constexpr int kBatches = kChunk / L::kLanes;

  A weight[kBatches];   // without dropout
  A product[kBatches];  // with it
  A delta;              // of the row, or the center of a piece

  // The gradient of the score of a lane's entry.
  __device__ A gradient(const Batch& batch) const {
    return weight[batch.number] * (product[batch.number] - delta);
  }
};

// Visits the entries of a span twice: for delta, then, with the rows in the cache, for gradients.
template <typename L, typename P, typename Held, typename Totals>
__device__ void visit_twice(const P& pass, const Part<L>& part, const Span& span, const Held& held,
                            Totals& totals) {
  using A = typename L::A;
  EntrySoftmax<L> softmax;
  A delta = 0, total = 0;
  for_each_product(pass, part, span, held, [&](const Batch& batch, A weight, A product) {
    softmax.weight[batch.number] = weight;
    softmax.product[batch.number] = product;
    delta += weight * product;
    if constexpr (P::kCorrects) total += weight;
  });
  delta = part.lanes.sum(delta);
  if (span.piece < 0) {
    softmax.delta = settle_delta(pass, part, span, delta);
  } else if (P::kCorrects && pass.corrects_pieces()) {
    total = part.lanes.sum(total);
    softmax.delta = total > 0 ? delta / total : A{0};
    pass.store_piece(part, span, delta, softmax.delta);
  } else {
    softmax.delta = *pass.delta.rows.at(span.row, part.head);
  }
  pass.add_gradients(part, span, held, softmax, totals);
}

// The softmax of a span's row, and what a lane knows of its entry in a batch.
template <typename A>
struct RowSoftmax {
  A largest, inverse, keep, grad_of_weight, bias;

  __device__ A weight_of(A score) const { return exponential(score - largest) * inverse; }
};

// Weights, without dropout, and products, with it, of some entries, in all lanes. Of many lanes
// each finds one of them, and tells the others.
template <typename P, typename L, typename Held, int kCount, typename Gathered>
__device__ void find_weights(const P& pass, const Part<L>& part, int64_t row, const Held& held,
                             const Entries<kCount>& entries, const Gathered& gathered,
                             const RowSoftmax<typename L::A>& softmax,
                             typename L::A (&weight)[kCount], typename L::A (&product)[kCount]) {
  using A = typename L::A;
  constexpr int kEach = 2 * kCount;
  const auto& lanes = part.lanes;
  const auto product_of = [&](A dot, int u) {
    const A direct = lanes.from(softmax.grad_of_weight, entries.first + u);
    return times(lanes.from(softmax.keep, entries.first + u), direct + dot);
  };
  if constexpr (kEach <= L::kLanes && L::kManyLanes) {
    Joined<P, A, kCount> sums(find_parts(pass, part, row, held, entries, gathered));
    const A dot = lanes.own_sum(sums.values);
    const int number = lanes.template held<kEach>();
    const A own_product = product_of(dot, number % kCount);
    A own_score = pass.score_of_dot(dot);
    if constexpr (P::kBiased) {
      own_score += lanes.from(softmax.bias, entries.first + number % kCount);
    }
    const A own = number < kCount ? softmax.weight_of(own_score) : own_product;
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      weight[u] = lanes.template from_holder<kEach>(own, u);
      product[u] = lanes.template from_holder<kEach>(own, kCount + u);
    }
  } else {
    const auto dots = find_dots(pass, part, row, held, entries, gathered, softmax.bias);
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      weight[u] = softmax.weight_of(dots.score[u]);
      product[u] = product_of(dots.product[u], u);
    }
  }
}

// Visits them once: sums over p (product - center) stand in for those over p (product - delta)
// until delta is known, and are corrected by the same sums over p alone. For a saturated softmax to
// cancel, the center is the mean of the products so far, found afresh: a correction of the last
// center would be rounded like that, whatever little weight it had.
template <typename L, typename P, typename Held, typename Totals>
__device__ void visit_once(const P& pass, const Part<L>& part, const Span& span, const Held& held,
                           Totals& totals) {
  using A = typename L::A;
  constexpr int kMost = L::template kInFlight<P::kRows>;
  const A* stats = pass.given.stats.at(span.row, part.head);
  RowSoftmax<A> softmax{stats[0], stats[1], 0, 0, 0};
  A center = 0, total = 0, weighted = 0, delta = 0;  // the last of what a lane knows
  typename P::template Sums<L> sums;
  sums.clear();
  for_each_batch(pass.graph, span, part.lanes, [&](const Batch& batch) {
    softmax.keep = pass.keep(batch.edge, part.head);
    softmax.grad_of_weight = grad_of_weight(pass.given, batch, part.head);
    softmax.bias = find_own_bias(pass, part, batch);
    for_each_entries<kMost, false>(batch, part.lanes, [&](const auto& entries) {
      constexpr int kCount = std::decay_t<decltype(entries)>::kCount;
      const auto gathered = pass.gather(part, entries);
      A weight[kCount], product[kCount], gradient[kCount];
      find_weights(pass, part, span.row, held, entries, gathered, softmax, weight, product);
#pragma unroll
      for (int u = 0; u < kCount; ++u) {
        total += weight[u];
        weighted += weight[u] * product[u];
        if (part.lanes.lane == entries.first + u) delta += weight[u] * product[u];
      }
      if (total > 0) {
        const A mean = weighted / total;
        sums.shift(mean - center);
        center = mean;
      }
#pragma unroll
      for (int u = 0; u < kCount; ++u) gradient[u] = weight[u] * (product[u] - center);
      pass.add(part, held, gathered, entries, weight, gradient, sums);
    });
  });
  delta = part.lanes.sum(delta);
  if (span.piece < 0) {
    sums.shift(settle_delta(pass, part, span, delta) - center);
  } else {
    pass.store_piece(part, span, delta, center);
  }
  pass.finish(part, span, held, sums, totals);
}

// Whether a pass visits entries once. For heads in parts a lane would hold more than it has
// registers for.
template <typename L, typename P>
constexpr bool kVisitsOnce = P::kOnce && L::kWhole;

// Left to choose, the compiler would spill registers for a sixth block, or leave it at four, and
// with a bias, of wide rows, for a fifth. With five, two of GATv2's sums are in memory, which
// change once for each row.
template <typename L, typename P>
constexpr int kDestinationBlocks = kBlocks<L, P> != 0 || !P::kOnce || !L::kManyLanes ? kBlocks<L, P>
                                   : L::kRegisters <= 4                              ? 5
                                   : P::kBiased                                      ? 4
                                                                                     : 0;

// Besides what find_dots() asks for, P provides result_width(), the channels of what it writes;
// Totals, sums over all rows of a group; add_gradients(part, span, held, softmax, totals); and
// store_totals(part, totals). Where no edge has a gradient of its own, kOnce, besides: Sums, with
// shift(x), by which sums over gradients lose x times those over weights; add(part, held, gathered,
// entries, weight, gradient, sums); and finish(part, span, held, sums, totals), which stores the
// sums over weights, too, of a piece. kCorrects tells that add_gradients does, if it is asked to.
template <typename L, typename P>
__global__ void __launch_bounds__(kBlockThreads, kDestinationBlocks<L, P>)
    destination_rows(P pass) {
  const int64_t groups = static_cast<int64_t>(gridDim.x) * (kBlockThreads / L::kLanes);
  for_each_head<L>(pass.given.grad.heads, pass.result_width(), [&](const Part<L>& part) {
    typename P::template Totals<L> totals;
    totals.clear();
    for (int64_t task = group_index<L::kLanes>(); task < pass.graph.num_tasks; task += groups) {
      const Span span = span_of(pass.graph, task);
      const auto held = pass.hold(part, span.row);
      if constexpr (kVisitsOnce<L, P>) {
        visit_once(pass, part, span, held, totals);
      } else {
        visit_twice(pass, part, span, held, totals);
      }
    }
    pass.store_totals(part, totals);
  });
}

// For passes that add up nothing over all rows.
template <typename L>
struct NoTotals {
  __device__ void clear() {}
};

// Results and delta of rows that were cut, from those of their pieces, which are corrected.
template <typename T>
__global__ void __launch_bounds__(kBlockThreads) merge_corrected(DestinationPass<T> pass) {
  using A = Accumulator<T>;
  const Heads<T>& rows = pass.result.rows;
  for_each_merged(pass.graph, rows.heads * rows.width, [&](const CutRow& row, int64_t f) {
    const int64_t head = static_cast<uint32_t>(f) / static_cast<uint32_t>(rows.width);
    A delta = 0, sum = 0, parameter = 0;
    for_each_piece(row, [&](int64_t piece) { delta += *pass.delta.pieces.at(piece, head); });
    delta -= pass.given.of_logsum(row.row, head);
    if (f == head * rows.width) *pass.delta.rows.at(row.row, head) = delta;
    for_each_piece(row, [&](int64_t piece) {
      const A by = delta - *pass.center.at(piece, head);
      sum += pass.result.pieces.at(piece, 0)[f] - by * pass.weights.at(piece, 0)[f];
      if (pass.parameter.data) parameter -= by * pass.parameter_weights.at(piece, 0)[f];
    });
    rows.at(row.row, 0)[f] = narrowed<T>(sum);
    if (pass.parameter.data) pass.parameter.at(blockIdx.x, 0)[f] = parameter;
  });
}

// delta of rows that were cut, by a pass of its own.
template <typename L, typename P>
cudaError_t run_deltas(Queue& queue, const char* name, const P& pass, unsigned heads) {
  using T = typename P::Element;
  if (pass.graph.num_pieces == 0) return cudaSuccess;
  const dim3 blocks(blocks_for<L>(pass.graph.num_pieces), heads);
  cudaError_t error =
      launch({name, blocks, kBlockThreads, 0, queue.stream()}, piece_deltas<L, P>, pass);
  if (error == cudaSuccess) error = merge(queue, pass.graph, pass.delta);
  if (error != cudaSuccess || pass.given.grad_logsum.data == nullptr) return error;
  const dim3 of_rows = merge_grid(pass.graph, pass.given.stats.heads);
  return launch({"subtract_of_logsum", of_rows, kBlockThreads, 0, queue.stream()},
                subtract_of_logsum<T>, static_cast<const DestinationPass<T>&>(pass));
}

template <typename L, typename P>
cudaError_t run_destinations(Queue& queue, const char* name, const P& pass, dim3 grid) {
  using T = typename P::Element;
  cudaError_t error = cudaSuccess;
  if constexpr (!kVisitsOnce<L, P>) {
    if (!pass.corrects_pieces()) error = run_deltas<L>(queue, name, pass, grid.y);
  }
  if (error == cudaSuccess) {
    error = launch({name, grid, kBlockThreads, 0, queue.stream()}, destination_rows<L, P>, pass);
  }
  if (error != cudaSuccess) return error;
  if (!pass.corrects_pieces()) return merge(queue, pass.graph, pass.result);
  const Heads<T>& rows = pass.result.rows;
  return launch({"merge_corrected", merge_grid(pass.graph, rows.heads * rows.width), kBlockThreads,
                 0, queue.stream()},
                merge_corrected<T>, static_cast<const DestinationPass<T>&>(pass));
}

// ---- Over sources, along the transposed graph

template <typename T>
struct SourcePass {
  using Element = T;
  using A = Accumulator<T>;
  static constexpr bool kProducts = true, kBiased = false;

  CutCsr graph;
  Keep<A> keep;
  SoftmaxGradients<T> given;
  const A* delta;  // [destinations, heads]

  SourcePass(const CutCsr& transpose, const Dropout& dropout, const SoftmaxGradients<T>& gradients,
             const A* deltas)
      : graph(transpose), keep(dropout), given(gradients), delta(deltas) {
    given.grad = gathered_heads(given.grad, transpose);
  }

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

  __device__ A weight_of(A score) const { return exponential(score - largest) * inverse; }
  // Of the score of an entry, from its weight and product.
  __device__ A gradient(A weight, A product) const {
    return weight * (times(keep, product) - delta);
  }
};

// Besides what find_dots() asks for, P provides result_width(); Sums over a row; add(part, held,
// gathered, entries, of_value, of_score, sums), where the factors are what the entries contribute
// to gradients of values and scores; add_own(row, head, batch, of_score, sums), the same for a
// lane's entry, if kScores is false; store_score(edge, head, of_score), if it is kBiased; and
// store(part, span, sums).
template <typename L, typename P>
__global__ void __launch_bounds__(kBlockThreads, kBlocks<L, P>) source_rows(P pass) {
  using A = typename L::A;
  constexpr int kMost = L::template kInFlight<P::kRows>;
  const int64_t task = group_index<L::kLanes>();
  if (task >= pass.graph.num_tasks) return;
  const Span span = span_of(pass.graph, task);
  for_each_head<L>(pass.given.grad.heads, pass.result_width(), [&](const Part<L>& part) {
    const auto held = pass.hold(part, span.row);
    typename P::template Sums<L> sums;
    sums.clear();
    for_each_batch(pass.graph, span, part.lanes, [&](const Batch& batch) {
      const OwnSoftmax<A> own(pass, batch, part.head);
      const A bias = find_own_bias(pass, part, batch);
      A p = 0, product = own.grad_of_weight, of_bias = 0;  // of this lane's entry
      if constexpr (!P::kScores) p = own.weight_of(pass.own_score(span.row, part.head, batch));
      for_each_entries<kMost, P::kEdges>(batch, part.lanes, [&](const auto& entries) {
        constexpr int kCount = std::decay_t<decltype(entries)>::kCount;
        const auto gathered = pass.gather(part, entries);
        const auto dots = find_own_dots(pass, part, span.row, held, entries, gathered, bias);
        product += dots.product[0];
        A of_value[kCount], of_score[kCount] = {};
        if constexpr (P::kScores) p = own.weight_of(dots.score[0]);
        const A gradient = own.gradient(p, product);
        if constexpr (P::kBiased) {
          const int number = part.lanes.lane - entries.first;
          if (number >= 0 && number < kCount) of_bias = gradient;
        }
#pragma unroll
        for (int u = 0; u < kCount; ++u) {
          of_value[u] = part.lanes.from(own.keep * p, entries.first + u);
          if constexpr (P::kScores) of_score[u] = part.lanes.from(gradient, entries.first + u);
        }
        pass.add(part, held, gathered, entries, of_value, of_score, sums);
      });
      if constexpr (!P::kScores) {
        const bool mine = part.lanes.lane < batch.count;
        if (mine) pass.add_own(span.row, part.head, batch, own.gradient(p, product), sums);
      }
      if constexpr (P::kBiased) {
        const bool mine = part.lanes.lane < batch.count && part.first == 0;
        if (mine) pass.store_score(batch.edge, part.head, of_bias);
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
    const dim3 grid(blocks_for<L>(pass.graph.num_tasks), grid_size(pass.given.grad.heads));
    return launch({name, grid, kBlockThreads, 0, queue.stream()}, source_rows<L, P>, pass);
  });
}

}  // namespace fastgraph::cuda
