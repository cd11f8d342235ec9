// Groups of lanes that walk over the entries of rows, for attention.
//
// A group of lanes holds a head of one node in registers and walks over the entries of its row, a
// batch at a time. Each lane reads the column of one entry of the batch, draws its dropout and
// knows its softmax; the group then takes several entries at a time, whose rows all lanes gather
// together. The grid's y direction are the heads, so that blocks at work together gather from the
// same columns.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cuda/queue.h"
#include "fastgraph/attention_arguments.h"
#include "fastgraph/lanes.cuh"
#include "fastgraph/philox.cuh"
#include "fastgraph/pieces.cuh"

namespace fastgraph::cuda {

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
  static constexpr bool kTogether = false;  // see HeadsOfNode
  // Whether it saves steps that each lane holds one of several sums, and not all of them.
  static constexpr bool kManyLanes = kLanes >= 16;
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

// A layout for which neighbouring groups take the heads of one node. A head is held by half as many
// lanes as elsewhere: what is done once for a head of an entry is done for twice as many of them by
// each instruction, and no group of a warp waits for the longer row of another one. A lane adds up
// first what two lanes would, so the bits are the same. Blocks at work together gather all columns.
template <typename T, int kValuesOf, int kLanesOf, int kPacksOf>
struct HeadsOfNode : Layout<T, kValuesOf, kLanesOf, kPacksOf> {
  static constexpr bool kTogether = true;
};

// Blocks that have to fit on a multiprocessor, 0 to let the compiler choose. It would keep too many
// registers in memory for the sake of another block where edges have features, heads are wide or
// sums double; and where scores are found beforehand, wait for one row before it asks for the next.
template <typename L, typename Pass>
constexpr int kBlocks = Pass::kEdges || !L::kWhole || sizeof(typename L::A) == 8 ? 2
                        : Pass::kScores || L::kPacks > 1                         ? 0
                                                                                 : 6;

// Heads that are gathered. A lane always reads, so heads without channels are read from elsewhere.
template <typename T>
Heads<const T> gathered_heads(Heads<const T> x, const Csr& graph) {
  if (x.width == 0) x.data = reinterpret_cast<const T*>(graph.rowptr);
  return x;
}

// Whether a type has every layout. For tests float alone has, and others have one of each kind:
// whole or in parts, of single values or of packs.
template <typename T>
#if defined(FASTGRAPH_FEW_LAYOUTS)
constexpr bool kEveryLayout = std::is_same_v<T, float>;
#else
constexpr bool kEveryLayout = true;
#endif

// Calls run with the layout for heads of a width; `packed` tells whether they consist of packs, at
// least of one. Narrow heads are shared by fewer lanes, so that a warp takes several nodes.
template <typename T, typename Run>
cudaError_t with_layout(int64_t width, bool packed, const Run& run) {
  constexpr int kValues = kPack<T>;
  if (!packed || width == 0) {
    if (width <= 8) return run(Layout<T, 1, 8, 1>{});
    if constexpr (kEveryLayout<T>) {
      if (width <= 32) return run(Layout<T, 1, 32, 1>{});
    }
    return run(Layout<T, 1, 32, 4, false>{});
  }
  const int64_t packs = width / kValues;
  if constexpr (kEveryLayout<T>) {
    if (packs <= 4) return run(Layout<T, kValues, 4, 1>{});
    if (packs <= 8) return run(Layout<T, kValues, 8, 1>{});
  }
  if (packs <= 16) return run(Layout<T, kValues, 16, 1>{});
  if constexpr (kEveryLayout<T>) {
    if (packs <= 32) return run(Layout<T, kValues, 32, 1>{});
    if (packs <= 64) return run(Layout<T, kValues, 32, 2>{});
  }
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

// Consecutive entries of a batch, the first of which the lane `first` has read.
template <int kCountOf>
struct Entries {
  static constexpr int kCount = kCountOf;
  int first;
  int32_t col[kCount];
  int32_t edge[kCount];  // set if the edges carry something that is gathered
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

  // The share of a node's head, zeros beyond its width.
  __device__ Share load(Heads<const T> x, int64_t node) const {
    return load(x.at(node, head), x.width);
  }

  // Pack q of this lane in all nodes; beyond the width, values that count for nothing.
  __device__ GatheredRows<T, L::kValues> rows_of(Heads<const T> x, int q) const {
    return {x.at(0, head), x.width, x.heads * x.width, first + Share::column(lanes.lane, q)};
  }

  template <int kCount>
  __device__ void gather(Heads<const T> x, const Entries<kCount>& entries,
                         Share (&rows)[kCount]) const {
#pragma unroll
    for (int q = 0; q < L::kPacks; ++q) {
      const auto nodes = rows_of(x, q);
#pragma unroll
      for (int u = 0; u < kCount; ++u) rows[u].packs[q] = nodes.load(entries.col[u]);
    }
  }

  template <typename To>
  __device__ void store(const Sums& sums, Heads<To> x, int64_t node, typename L::A factor,
                        const To* addend = nullptr) const {
    if (addend != nullptr) addend += first;
    sums.store(x.at(node, head) + first, lanes.lane, x.width - first, factor, addend);
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

// The task of this group, if each has a group, or one for each head.
template <typename L>
__device__ int64_t task_of(int64_t heads) {
  const int64_t group = group_index<L::kLanes>();
  if constexpr (L::kTogether) {
    return static_cast<uint32_t>(group) / static_cast<uint32_t>(heads);
  } else {
    return group;
  }
}

// Calls body(part) for the parts of the heads that belong to this block, or to this group.
template <typename L, typename Body>
__device__ void for_each_head(int64_t heads, int64_t width, const Body& body) {
  const auto lanes = Lanes<L::kLanes>::mine();
  if constexpr (L::kTogether) {
    const auto group = static_cast<uint32_t>(group_index<L::kLanes>());
    body(Part<L>{lanes, static_cast<int>(group % static_cast<uint32_t>(heads)), 0});
  } else {
    for (int64_t head = blockIdx.y; head < heads; head += gridDim.y) {
      for_each_part<L>(lanes, static_cast<int>(head), width, body);
    }
  }
}

// ---- How a group walks over the entries of a span

// Entries of which each lane reads one; those beyond the last read the last once more.
struct Batch {
  int number;  // in its span
  int count;
  int64_t entry;
  int32_t col;
  int32_t edge;
};

template <int kLanes, typename Body>
__device__ void for_each_batch(const Csr& graph, const Span& span, Lanes<kLanes> lanes,
                               const Body& body) {
  int number = 0;
  for (int64_t base = span.begin; base < span.end; base += kLanes, ++number) {
    const int count = static_cast<int>(min(span.end - base, static_cast<int64_t>(kLanes)));
    const int64_t entry = base + min(lanes.lane, count - 1);
    const auto edge = static_cast<int32_t>(graph.edge(entry));
    body(Batch{number, count, entry, __ldg(graph.col + entry), edge});
  }
}

// Calls body(entries) for the entries of a batch, kMost at a time and then fewer.
template <int kMost, bool kEdges, int kLanes, typename Body>
__device__ void for_each_entries(const Batch& batch, Lanes<kLanes> lanes, const Body& body) {
  for_each_consecutive<kMost>(batch.count, [&](auto some) {
    Entries<decltype(some)::kCount> entries;
    entries.first = some.first;
#pragma unroll
    for (int u = 0; u < entries.kCount; ++u) {
      entries.col[u] = lanes.from(batch.col, some.first + u);
      if constexpr (kEdges) entries.edge[u] = lanes.from(batch.edge, some.first + u);
    }
    body(entries);
  });
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

  __device__ A operator()(int64_t edge, int head) const {
    if (threshold == 0) return scale;
    return philox(seed, static_cast<uint32_t>(edge), static_cast<uint32_t>(head)) < threshold
               ? A{0}
               : scale;
  }
};

// What a group finds of some entries together: what their scores are made of, and the products of
// their values with the gradient of the output, if it asks for both.
template <typename A, int kCount>
struct Dots {
  A score[kCount];
  A product[kCount];
};

// The sum of term(q, i) over the values of this lane that lie in a row of that width.
template <typename L, typename Term>
__device__ typename L::A sum_within(const Part<L>& part, int64_t width, const Term& term) {
  using A = typename L::A;
  A sum = -A{0};  // unlike 0, nothing that has to be added
#pragma unroll
  for (int q = 0; q < L::kPacks; ++q) {
    A of_pack = -A{0};
#pragma unroll
    for (int i = 0; i < L::kValues; ++i) of_pack += term(q, i);
    sum += part.covers(q, width) ? of_pack : A{0};
  }
  return sum;
}

// dot += this lane's part of <own, others[u]>, for rows of that width.
template <typename L, int kCount>
__device__ void add_products(const Part<L>& part, int64_t width, const typename L::Share& own,
                             const typename L::Share (&others)[kCount],
                             typename L::A (&dot)[kCount]) {
#pragma unroll
  for (int u = 0; u < kCount; ++u) {
    dot[u] +=
        sum_within(part, width, [&](int q, int i) { return own.at(q, i) * others[u].at(q, i); });
  }
}

// What a pass that is kBiased adds to the score of a lane's entry. Each lane asks before rows are
// gathered: among these, one load would wait for another.
template <typename P, typename L>
__device__ typename L::A find_own_bias(const P& pass, const Part<L>& part, const Batch& batch) {
  if constexpr (P::kBiased) {
    return pass.bias_of(batch.edge, part.head);
  } else {
    return 0;
  }
}

// A pass provides hold(part, row), what a group holds of its row; gather(part, entries), the rows
// of some entries; add_dots(part, held, gathered, entries, dots), which adds a lane's part of the
// dot products, as wide as dot_width(), that it asks for by kScores and kProducts; and
// score_of_dot(dot). kEdges tells whether it needs to know the edges of entries, kBiased whether
// bias_of(edge, head) is added to their scores, and kRows for how many rows each entry takes
// registers.
template <typename P, typename L, typename Held, int kCount, typename Gathered>
__device__ Dots<typename L::A, kCount> find_parts(const P& pass, const Part<L>& part, int64_t row,
                                                  const Held& held, const Entries<kCount>& entries,
                                                  const Gathered& gathered) {
  Dots<typename L::A, kCount> dots;
#pragma unroll
  for (int u = 0; u < kCount; ++u) dots.score[u] = dots.product[u] = -typename L::A{0};
  if constexpr (L::kWhole) {
    pass.add_dots(part, held, gathered, entries, dots);
  } else {
    for_each_part<L>(part.lanes, part.head, pass.dot_width(), [&](const Part<L>& other) {
      pass.add_dots(other, pass.hold(other, row), pass.gather(other, entries), entries, dots);
    });
  }
  return dots;
}

// What find_parts() tells of the lanes, summed up over all of them.
template <typename P, typename L, typename Held, int kCount, typename Gathered>
__device__ Dots<typename L::A, kCount> find_dots(const P& pass, const Part<L>& part, int64_t row,
                                                 const Held& held, const Entries<kCount>& entries,
                                                 const Gathered& gathered, typename L::A own_bias) {
  auto dots = find_parts(pass, part, row, held, entries, gathered);
#pragma unroll
  for (int u = 0; u < kCount; ++u) {
    if constexpr (P::kScores) dots.score[u] = pass.score_of_dot(part.lanes.sum(dots.score[u]));
    if constexpr (P::kBiased) dots.score[u] += part.lanes.from(own_bias, entries.first + u);
    if constexpr (P::kProducts) dots.product[u] = part.lanes.sum(dots.product[u]);
  }
  return dots;
}

// Scores, and then products, as far as a pass asks for them.
template <typename P, typename A, int kCount>
struct Joined {
  static constexpr int kFirstProduct = P::kScores ? kCount : 0;
  static constexpr int kEach = kFirstProduct + (P::kProducts ? kCount : 0);
  A values[kEach];

  explicit __device__ Joined(const Dots<A, kCount>& dots) {
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      if constexpr (P::kScores) values[u] = dots.score[u];
      if constexpr (P::kProducts) values[kFirstProduct + u] = dots.product[u];
    }
  }
};

// Those of the entry that a lane has read, zeros in the lanes of others.
template <typename P, typename L, typename Held, int kCount, typename Gathered>
__device__ Dots<typename L::A, 1> find_own_dots(const P& pass, const Part<L>& part, int64_t row,
                                                const Held& held, const Entries<kCount>& entries,
                                                const Gathered& gathered, typename L::A own_bias) {
  using A = typename L::A;
  using Sums = Joined<P, A, kCount>;
  Dots<A, 1> own{{0}, {0}};
  const int number = part.lanes.lane - entries.first;
  if constexpr (L::kManyLanes) {
    Sums sums(find_parts(pass, part, row, held, entries, gathered));
    const A sum = part.lanes.own_sum(sums.values);
    const auto dot = [&](int first) {
      return part.lanes.template from_holder<Sums::kEach>(sum, first + (number & (kCount - 1)));
    };
    const bool mine = number >= 0 && number < kCount;
    if constexpr (P::kScores) {
      A score = pass.score_of_dot(dot(0));
      if constexpr (P::kBiased) score += own_bias;
      if (mine) own.score[0] = score;
    }
    const A product = dot(Sums::kFirstProduct);
    if (mine) own.product[0] = product;
  } else {
    const auto dots = find_dots(pass, part, row, held, entries, gathered, own_bias);
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      if (number != u) continue;
      if constexpr (P::kScores) own.score[0] = dots.score[u];
      own.product[0] = dots.product[u];
    }
  }
  return own;
}

// ---- Results of rows

// Where the sums over rows go, and those over pieces until they are merged.
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

// The sums over rows that were cut, from those over their pieces.
template <typename T>
__global__ void __launch_bounds__(kBlockThreads) merge_pieces(CutCsr graph, RowResult<T> result) {
  const int64_t width = result.rows.heads * result.rows.width;
  for_each_merged(graph, width, [&](const CutRow& row, int64_t f) {
    Accumulator<T> sum = 0;
    for_each_piece(row, [&](int64_t piece) { sum += result.pieces.at(piece, 0)[f]; });
    result.rows.at(row.row, 0)[f] = narrowed<T>(sum);
  });
}

template <typename T>
cudaError_t merge(Queue& queue, const CutCsr& graph, const RowResult<T>& result) {
  const dim3 grid = merge_grid(graph, result.rows.heads * result.rows.width);
  return launch({"merge_pieces", grid, kBlockThreads, 0, queue.stream()}, merge_pieces<T>, graph,
                result);
}

// Blocks of a kernel that takes so many groups.
template <typename L>
unsigned blocks_for(int64_t groups) {
  return static_cast<unsigned>(ceil_div(groups * L::kLanes, kBlockThreads));
}

}  // namespace fastgraph::cuda
