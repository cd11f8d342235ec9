// A warp that runs an edge program on rows, or on pieces of long ones: it interprets the
// instructions on a few edges at a time, and reduces what they leave.
#pragma once

#include <cmath>
#include <cstdint>

#include "fastgraph/edge_values.cuh"
#include "fastgraph/tasks.h"

namespace fastgraph::cuda {

// The largest value of some, and how many have it: none if it is NaN, as nothing equals that.
template <typename A>
struct Largest {
  A value = -INFINITY;
  A count = 0;

  __device__ void take(A other, A of_other) {
    if (other > value || other != other) {
      value = other;
      count = other == other ? of_other : A{0};
    } else if (other == value) {
      count += of_other;
    }
  }
};

inline __device__ int sign_of(EdgeReductionKind kind) {
  return kind == EdgeReductionKind::kMin ? -1 : 1;
}

// Where an extremum is 0 the zeros that upstream's output begins with take a share.
template <typename A>
__device__ int32_t shares(A value, int32_t count) {
  return count + (value == 0 ? 1 : 0);
}

template <typename T, bool kLarge, bool kMultiplies>
class EdgeWarp {
 public:
  using A = Accumulator<T>;
  using Values = EdgeValues<T, kLarge, kMultiplies>;
  using P = typename Values::P;
  using Result = EdgeResult<T>;
  static constexpr int kValues = Values::kValues;

  // `edges` has a number for each warp of the block.
  __device__ EdgeWarp(const EdgeRun<T>& run, A* memory, int* edges)
      : run_(run),
        values_(run, memory),
        lane_(static_cast<int>(threadIdx.x) % kWarp),
        edges_(edges) {}

  // Before the first row.
  __device__ void begin() const {
    for_each_result([&](const Result& result) {
      if (result.kind == EdgeReductionKind::kTotal) fill(result.totals, result.width, 0);
      if (!result.is_outer()) return;
      const OuterSums<A> sums = sums_of(result);
      for (int i = static_cast<int>(threadIdx.x); i < sums.size(); i += blockDim.x) {
        sums.sums[i] = 0;
      }
    });
  }

  // The instructions stand here once, whether they are for the program, for a row or for edges: the
  // kernel is large enough.
  __device__ void run(const Span& span) {
    for_each_result([&](const Result& result) { begin(result); });
    __syncwarp();
    for (int32_t first = span.begin; first < span.end;) {
      const int edges = often_ < 2 ? 1 : min(span.end - first, run_.block);
      const int32_t own_edge = load(span.row, first, edges);
      __syncwarp();
      values_.run(often_, edges);
      __syncwarp();
      if (often_ < 2) {
        ++often_;
        continue;
      }
      for_each_result([&](const Result& result) { reduce(result, own_edge, edges); });
      __syncwarp();
      add_outer_products(edges);
      first += edges;
    }
    often_ = min(often_, 1);
    for_each_result([&](const Result& result) { finish(result, span); });
    __syncwarp();
  }

  // Behind the last one: the sums over all of them.
  __device__ void end(int64_t warp) const {
    while (add_outer_products(kNoMore)) continue;
    for_each_result([&](const Result& result) {
      if (result.kind != EdgeReductionKind::kTotal) return;
      for (int c = lane_; c < packs(result); c += kWarp) {
        const P own = values_.get(values_.at(result.totals + c * kValues));
        for_each_value(result.width, c, [&](int column, int i) {
          result.sums[warp * result.width + column] = own.values[i];
        });
      }
    });
  }

 private:
  static constexpr int kNoMore = -1;

  template <typename Body>
  __device__ __forceinline__ void for_each_result(const Body& body) const {
    for (int i = 0; i < run_.num_results; ++i) {
      if constexpr (kLarge) {
        body(run_.many_results[i]);
      } else {
        body(run_.few_results[i]);
      }
    }
  }

  // Calls body(column, i) for the values of pack c of a row of so many.
  template <typename Body>
  __device__ __forceinline__ static void for_each_value(int width, int c, const Body& body) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if (c * kValues + i < width) body(c * kValues + i, i);
    }
  }

  __device__ static int packs(const Result& result) { return packs_of<A>(result.width); }
  __device__ int32_t row(const Result& result) const { return values_.stride(result.width); }

  __device__ void fill(int32_t place, int width, A value) const {
    P pack;
#pragma unroll
    for (int i = 0; i < kValues; ++i) pack.values[i] = value;
    for (int c = lane_; c < packs_of<A>(width); c += kWarp) {
      values_.put(values_.at(place + c * kValues), pack);
    }
  }

  // The operands of what changes as often. Returns the edge of this lane.
  __device__ int32_t load(int32_t row, int32_t first, int edges) const {
    int32_t own[] = {0, row, 0, 0};
    if (often_ == 2) {
      const int64_t entry = first + min(lane_, edges - 1);
      own[2] = __ldg(run_.graph.col + entry);
      if (run_.takes_edges) own[3] = static_cast<int32_t>(run_.graph.edge(entry));
    }
    const int last = often_ == 2 ? 3 : often_;
    for (int kind = often_; kind <= last; ++kind) values_.load(kind, own[kind], edges);
    return own[3];
  }

  // What a row begins with. Behind the copies of sums a softmax has the largest scores, the sums of
  // exponentials, and what sums are multiplied by.
  __device__ void begin(const Result& result) const {
    const int32_t all = result.state_copies * row(result);
    if (result.kind == EdgeReductionKind::kEdge || result.is_outer()) return;
    fill(result.state, all, result.is_extremum() ? -INFINITY : A{0});
    if (result.is_extremum()) fill(result.state + all, all, 0);
    if (result.kind == EdgeReductionKind::kSoftmax) {
      fill(largest_of(result), result.heads, -INFINITY);
      fill(exponentials_of(result), result.heads, 0);
    }
  }

  __device__ int32_t largest_of(const Result& softmax) const {
    return softmax.state + softmax.state_copies * row(softmax);
  }
  __device__ int32_t exponentials_of(const Result& softmax) const {
    return largest_of(softmax) + values_.stride(softmax.heads);
  }
  __device__ int32_t rescale_of(const Result& softmax) const {
    return exponentials_of(softmax) + values_.stride(softmax.heads);
  }

  __device__ void reduce(const Result& result, int32_t own_edge, int edges) const {
    switch (result.kind) {
      case EdgeReductionKind::kEdge: return write(result, own_edge, edges);
      case EdgeReductionKind::kMax:
      case EdgeReductionKind::kMin: return extremum(result, edges);
      case EdgeReductionKind::kSoftmax: return softmax(result, edges);
      case EdgeReductionKind::kOuter: return;  // of all warps together
      default:
        if (result.factor < 0) return add<Factor::kNone>(result, result.factor, false, edges);
        if (result.heads == result.width) {
          return add<Factor::kOfChannels>(result, result.factor, result.factor_moves, edges);
        }
        return add<Factor::kOfHead>(result, result.factor, result.factor_moves, edges);
    }
  }

  // Those of a block.
  __device__ OuterSums<A> sums_of(const Result& outer) const {
    const int64_t size = static_cast<int64_t>(outer.width) * outer.heads;
    return {outer.sums + blockIdx.x * size, outer.width, outer.heads};
  }

  // Sums of outer products are added to by all warps of a block together, once each of them has
  // some edges or no more. Returns whether any of them had.
  __device__ bool add_outer_products(int edges) const {
    if (!kMultiplies || !run_.has_outer) return false;
    const int own = static_cast<int>(threadIdx.x) / kWarp, warps = blockDim.x / kWarp;
    if (lane_ == 0) edges_[own] = edges;
    __syncthreads();
    bool has_some = false;
    for (int w = 0; w < warps; ++w) has_some = has_some || edges_[w] != kNoMore;
    if (has_some) {
      const A* const memory = values_.at(0) - static_cast<int64_t>(own) * run_.memory_size;
      for_each_result([&](const Result& result) {
        if (!result.is_outer()) return;
        const int32_t apart = result.value_moves ? row(result) : 0;
        const int32_t factor_apart = result.factor_moves ? values_.stride(result.heads) : 0;
        const EdgePairs<A> pairs{memory, run_.memory_size, edges_,      warps, result.value,
                                 apart,  result.factor,    factor_apart};
        add_outer(pairs, sums_of(result));
      });
    }
    __syncthreads();
    return has_some;
  }

  // What the values of an edge are multiplied by: nothing, as many values, or one for each head.
  enum class Factor { kNone, kOfChannels, kOfHead };

  // sums += value * factor, of the edges of this lane.
  template <Factor kFactor>
  __device__ void add(const Result& result, int32_t factor, bool factor_moves, int edges) const {
    const LaneShare share(result.shift);
    if (share.edge >= edges) return;
    const int32_t value_row = result.value_moves ? row(result) : 0;
    const int32_t factor_row = factor_moves ? values_.stride(result.heads) : 0;
    const int of_head = kFactor == Factor::kOfHead ? result.width / result.heads : 1;
    for (int c = share.pack; c < packs(result); c += share.packs_apart) {
      int head[kValues];
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        head[i] = kFactor == Factor::kOfHead ? min(c * kValues + i, result.width - 1) / of_head : 0;
      }
      A* const own = values_.at(result.state + share.edge * row(result) + c * kValues);
      P sum = values_.get(own);
#pragma unroll 2
      for (int g = share.edge; g < edges; g += share.edges_apart) {
        const P value = values_.get(values_.at(result.value + g * value_row + c * kValues));
        const A* const factors = values_.at(factor + g * factor_row);
        P times;
        if constexpr (kFactor == Factor::kOfChannels) times = values_.get(factors + c * kValues);
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
          if constexpr (kFactor == Factor::kNone) {
            sum.values[i] += value.values[i];
          } else if constexpr (kFactor == Factor::kOfChannels) {
            sum.values[i] += value.values[i] * times.values[i];
          } else {
            sum.values[i] += value.values[i] * factors[head[i]];
          }
        }
      }
      values_.put(own, sum);
    }
  }

  __device__ void write(const Result& result, int32_t own_edge, int edges) const {
    const int32_t value_row = result.value_moves ? row(result) : 0;
    const LaneShare share(result.shift);
    for (int first = 0; first < edges; first += share.edges_apart) {
      const int g = first + share.edge;
      const int64_t edge = __shfl_sync(kAllLanes, own_edge, min(g, edges - 1));
      for (int c = share.pack; g < edges && c < packs(result); c += share.packs_apart) {
        const P value = values_.get(values_.at(result.value + g * value_row + c * kValues));
        store(result, edge, c, value);
      }
    }
  }

  __device__ void extremum(const Result& result, int edges) const {
    const LaneShare share(result.shift);
    if (share.edge >= edges) return;
    const int32_t value_row = result.value_moves ? row(result) : 0;
    const int32_t all = result.state_copies * row(result);
    const A sign = sign_of(result.kind);
    for (int c = share.pack; c < packs(result); c += share.packs_apart) {
      A* const own = values_.at(result.state + share.edge * row(result) + c * kValues);
      P best = values_.get(own), count = values_.get(own + all);
      for (int g = share.edge; g < edges; g += share.edges_apart) {
        const P value = values_.get(values_.at(result.value + g * value_row + c * kValues));
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
          Largest<A> largest{best.values[i], count.values[i]};
          largest.take(sign * rounded<T>(value.values[i]), 1);
          best.values[i] = largest.value;
          count.values[i] = largest.count;
        }
      }
      values_.put(own, best);
      values_.put(own + all, count);
    }
  }

  // Raises the largest scores to those of some edges, and sums are what they would be if these had
  // been known before; then adds what these have.
  __device__ void softmax(const Result& result, int edges) const {
    const int32_t heads_row = values_.stride(result.heads);
    const int32_t score_row = result.factor_moves ? heads_row : 0;
    const int32_t exponentials = result.row_factor;
    __syncwarp();
    for (int c = lane_; c < packs_of<A>(result.heads); c += kWarp) {
      A* const largest = values_.at(largest_of(result) + c * kValues);
      A* const total = values_.at(exponentials_of(result) + c * kValues);
      P most = values_.get(largest), rescale = values_.get(total), all = rescale;
      for (int i = 0; i < kValues; ++i) {
        const A before = most.values[i];
        for (int g = 0; g < edges; ++g) {
          const A* const scores = values_.at(result.factor + g * score_row + c * kValues);
          most.values[i] = larger(most.values[i], scores[i]);
        }
        const A now = most.values[i];
        rescale.values[i] = now > before ? std::exp(before - subtracted(now)) : A{1};
        all.values[i] *= rescale.values[i];
      }
      values_.put(largest, most);
      values_.put(total, all);
      values_.put(values_.at(rescale_of(result) + c * kValues), rescale);
    }
    __syncwarp();
    int shift = 0;
    while (1 << shift < min(packs_of<A>(result.heads), kWarp)) ++shift;
    values_.exponentials(exponentials, result.factor, result.factor_moves,
                         values_.at(largest_of(result)), result.heads, shift, edges);
    __syncwarp();
    for (int c = lane_; c < packs_of<A>(result.heads); c += kWarp) {
      A* const total = values_.at(exponentials_of(result) + c * kValues);
      P all = values_.get(total);
      for (int g = 0; g < edges; ++g) {
        const P own = values_.get(values_.at(exponentials + g * heads_row + c * kValues));
#pragma unroll
        for (int i = 0; i < kValues; ++i) all.values[i] += own.values[i];
      }
      values_.put(total, all);
    }
    rescale_sums(result);
    add<Factor::kOfHead>(result, exponentials, true, edges);
  }

  // Those of all copies, each by the lanes that add to them.
  __device__ void rescale_sums(const Result& result) const {
    const int of_head = result.width / result.heads;
    const A* const rescale = values_.at(rescale_of(result));
    for_each_pack(result.shift, packs(result), result.state_copies, [&](int copy, int c) {
      A* const own = values_.at(result.state + copy * row(result) + c * kValues);
      P sum = values_.get(own);
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        sum.values[i] *= rescale[min(c * kValues + i, result.width - 1) / of_head];
      }
      values_.put(own, sum);
    });
  }

  // The result of a row, or what a piece of it leaves.
  __device__ void finish(const Result& result, const Span& span) const {
    switch (result.kind) {
      case EdgeReductionKind::kEdge:
      case EdgeReductionKind::kOuter: return;
      case EdgeReductionKind::kMax:
      case EdgeReductionKind::kMin: return finish_extremum(result, span);
      case EdgeReductionKind::kSoftmax: return finish_softmax(result, span);
      default: return finish_sum(result, span);
    }
  }

  // The sum of the copies.
  __device__ P sum_of(const Result& result, int c) const {
    P sum = values_.get(values_.at(result.state + c * kValues));
    for (int copy = 1; copy < result.state_copies; ++copy) {
      const P other = values_.get(values_.at(result.state + copy * row(result) + c * kValues));
#pragma unroll
      for (int i = 0; i < kValues; ++i) sum.values[i] += other.values[i];
    }
    return sum;
  }

  __device__ void finish_sum(const Result& result, const Span& span) const {
    const bool is_total = result.kind == EdgeReductionKind::kTotal;
    const bool is_empty = span.begin == span.end;
    if (is_total && is_empty) return;
    for (int c = lane_; c < packs(result); c += kWarp) {
      P sum = sum_of(result, c);
      if (result.row_factor >= 0 && !is_empty) {
        const P scale = values_.get(values_.at(result.row_factor + c * kValues));
#pragma unroll
        for (int i = 0; i < kValues; ++i) sum.values[i] *= scale.values[i];
      }
      if (is_total) {
        A* const totals = values_.at(result.totals + c * kValues);
        const P before = values_.get(totals);
#pragma unroll
        for (int i = 0; i < kValues; ++i) sum.values[i] += before.values[i];
        values_.put(totals, sum);
      } else if (span.piece >= 0) {
        store_pack(piece(result, span) + c * kValues, sum);
      } else {
        if (result.kind == EdgeReductionKind::kMean) {
          const A count = max(span.end - span.begin, 1);
#pragma unroll
          for (int i = 0; i < kValues; ++i) sum.values[i] /= count;
        }
        store(result, span.row, c, sum);
      }
    }
  }

  __device__ void finish_extremum(const Result& result, const Span& span) const {
    const int32_t all = result.state_copies * row(result);
    const A sign = sign_of(result.kind);
    for (int c = lane_; c < packs(result); c += kWarp) {
      P best, count;
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        Largest<A> largest;
        for (int copy = 0; copy < result.state_copies; ++copy) {
          const A* const own = values_.at(result.state + copy * row(result) + c * kValues);
          largest.take(own[i], own[all + i]);
        }
        best.values[i] = largest.value;
        count.values[i] = largest.count;
      }
      if (span.piece >= 0) {
        A* const kept = piece(result, span) + c * kValues;
        store_pack(kept, best);
        store_pack(kept + row(result), count);
        continue;
      }
      auto* const ties = static_cast<int32_t*>(result.record);
      for_each_value(result.width, c, [&](int column, int i) {
        if (ties == nullptr) return;
        const auto counted = static_cast<int32_t>(count.values[i]);
        ties[static_cast<int64_t>(span.row) * result.width + column] =
            span.begin == span.end ? 0 : shares(best.values[i], counted);
      });
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        best.values[i] = span.begin == span.end ? A{0} : sign * best.values[i];
      }
      if (result.out != nullptr) store(result, span.row, c, best);
    }
  }

  __device__ void finish_softmax(const Result& result, const Span& span) const {
    const bool is_empty = span.begin == span.end;
    const int of_head = result.width / result.heads;
    const A* const largest = values_.at(largest_of(result));
    const A* const totals = values_.at(exponentials_of(result));
    for (int c = lane_; c < packs(result); c += kWarp) {
      P sum = sum_of(result, c);
      if (span.piece >= 0) {
        store_pack(piece(result, span) + c * kValues, sum);
        continue;
      }
      for_each_value(result.width, c, [&](int column, int i) {
        sum.values[i] *= is_empty ? A{0} : A{1} / totals[column / of_head];
      });
      if (result.out != nullptr) store(result, span.row, c, sum);
    }
    if (span.piece >= 0) {
      const int32_t heads_row = values_.stride(result.heads);
      A* const kept = piece(result, span) + row(result);
      for (int c = lane_; c < packs_of<A>(result.heads); c += kWarp) {
        store_pack(kept + c * kValues, values_.get(largest + c * kValues));
        store_pack(kept + heads_row + c * kValues, values_.get(totals + c * kValues));
      }
      return;
    }
    for (int h = lane_; h < result.heads; h += kWarp) {
      store_records(result, span.row, h, is_empty, largest[h], totals[h]);
    }
  }

 public:
  // The largest score and the scale of a head. A gradient subtracts the number that is kept, which
  // may have been rounded.
  __device__ static void store_records(const Result& result, int64_t row, int head, bool is_empty,
                                       A largest, A total) {
    const int64_t place = row * result.heads + head;
    const A kept = rounded<T>(largest), inverse = A{1} / total;
    if (auto* const record = static_cast<T*>(result.record)) {
      record[place] = narrowed<T>(is_empty ? A{0} : kept);
    }
    if (result.scale == nullptr) return;
    const A scale = is_half<T> ? inverse * std::exp(kept - largest) : inverse;
    result.scale[place] = narrowed<T>(is_empty ? A{0} : scale);
  }

 private:
  __device__ A* piece(const Result& result, const Span& span) const {
    return run_.partial + static_cast<int64_t>(span.piece) * run_.partial_size + result.partial;
  }

  // Pack c of a row of the output.
  __device__ void store(const Result& result, int64_t row, int c, const P& values) const {
    T* const out = result.out + row * result.width;
    if (result.packed) {
      Pack<T, kValues> narrow;
#pragma unroll
      for (int i = 0; i < kValues; ++i) narrow.values[i] = narrowed<T>(values.values[i]);
      store_pack(out + c * kValues, narrow);
    } else {
      for_each_value(result.width, c,
                     [&](int column, int i) { out[column] = narrowed<T>(values.values[i]); });
    }
  }

  const EdgeRun<T>& run_;
  const Values values_;
  const int lane_;
  int* const edges_;
  int often_ = 0;  // 0 before what is for the program is there, 1 before what is for a row is
};

}  // namespace fastgraph::cuda
