// Sums and extrema of the values of some edges of a row.
#pragma once

#include <cstdint>

#include "cpu/edge_heads.h"
#include "cpu/edge_registers.h"
#include "fastgraph/chunks.h"
#include "fastgraph/edge_code.h"
#include "fastgraph/nan_watch.h"
#include "fastgraph/result.h"
#include "fastgraph/simd.h"

namespace fastgraph {

template <typename T>
struct EdgeSums {
  using A = Accumulator<T>;
  using Registers = EdgeRegisters<T>;
  static constexpr int N = kLanes<A>;

  // What the values of an edge are multiplied by: nothing, as many values, one for each of some
  // heads of few channels, or one.
  enum class Factor { kNone, kOfChannels, kOfHeads, kOfHead };

  // Where the sums of a row are that has more edges.
  struct Kept {
    template <int kLane>
    Vector<A, kLane> begin(int64_t c) const {
      return load<kLane>(sums + c);
    }
    template <int kLane>
    void end(int64_t c, Vector<A, kLane> sum) const {
      fastgraph::store<kLane>(sums + c, sum);
    }

    A* sums;
  };

  // Where those of a whole row go.
  struct Whole {
    template <int kLane>
    Vector<A, kLane> begin(int64_t) const {
      return Vector<A, kLane>{};
    }
    template <int kLane>
    void end(int64_t c, Vector<A, kLane> sum) const {
      if (scale != nullptr) sum *= load<kLane>(scale + c);
      if (count != 1) sum /= splat<A, kLane>(count);
      out.template store<kLane>(c, sum);
    }

    ResultRow<T> out;
    const A* scale;
    A count;
  };

  // sums += value * factor, edge by edge, for so many edges of the block.
  template <typename Sums>
  static void add(const Registers& registers, int32_t value, int32_t factor, int64_t first,
                  int64_t edges, const Sums& sums) {
    const int64_t width = registers.width(value);
    const Edges some{first, edges, registers.rows(value) + first, nullptr, 1};
    if (factor < 0) return add_part<Factor::kNone>(registers, some, 0, width, sums);
    const int64_t heads = registers.width(factor), of_head = width / heads;
    const Edges all{first, edges, some.values, registers.rows(factor) + first, of_head};
    if (of_head == 1) return add_part<Factor::kOfChannels>(registers, all, 0, width, sums);
    if (has_several_heads<N>(of_head) && heads < kNarrow) {
      return add_part<Factor::kOfHeads>(registers, all, 0, width, sums);
    }
    for (int64_t h = 0; h < heads; ++h) {
      add_part<Factor::kOfHead>(registers, all, h * of_head, (h + 1) * of_head, sums);
    }
  }

  // Some edges of a block, with their values and factors.
  struct Edges {
    int64_t first, count;
    const A* const* values;
    const A* const* factors;
    int64_t of_head;  // channels for each factor
  };

  // The same for the columns [begin, end), those of a head if its factor is one number.
  template <Factor kFactor, typename Sums>
  static void add_part(const Registers& registers, const Edges& edges, int64_t begin, int64_t end,
                       const Sums& sums) {
    for_each_part<N, kVectorsOfChunk>(begin, end, [&](auto chunk, int64_t f) {
      using C = decltype(chunk);
      constexpr int kLane = C::kLanes;
      [[maybe_unused]] const auto heads = heads_of_lanes<A, kLane>(edges.of_head);
      [[maybe_unused]] const int64_t head = f / edges.of_head, in_vector = kLane / edges.of_head;
      Vector<A, kLane> sum[C::kCount];
#pragma GCC unroll 16
      for (int q = 0; q < C::kCount; ++q) sum[q] = sums.template begin<kLane>(f + q * kLane);
      for (int64_t g = 0; g < edges.count; ++g) {
        if (f == 0) registers.expect(edges.first + g);
        const A* value = edges.values[g] + f;
        // GCC would keep the sum of f and the place of each vector in registers, and run out of
        // them.
        asm("" : "+r"(value));
        const A* const factor = kFactor == Factor::kNone ? nullptr : edges.factors[g];
        const A one = kFactor == Factor::kOfHead ? factor[head] : A{1};
#pragma GCC unroll 16
        for (int q = 0; q < C::kCount; ++q) {
          const auto own = load<kLane>(value + q * kLane);
          if constexpr (kFactor == Factor::kNone) {
            sum[q] += own;
          } else if constexpr (kFactor == Factor::kOfHead) {
            sum[q] += one * own;
          } else if constexpr (kFactor == Factor::kOfHeads) {
            sum[q] += own * of_heads<A, kLane>(factor + head + q * in_vector, heads);
          } else {
            sum[q] += own * load<kLane>(factor + f + q * kLane);
          }
        }
      }
#pragma GCC unroll 16
      for (int q = 0; q < C::kCount; ++q) sums.template end<kLane>(f + q * kLane, sum[q]);
    });
  }

  // The largest sign * value, and behind all of them how many edges attain it: none if it is NaN,
  // as nothing equals that.
  static void extremum(const Registers& registers, const EdgeReduction& reduction, int64_t first,
                       int64_t edges, A* sums) {
    const Edges some{first, edges, registers.rows(reduction.value) + first, nullptr, 1};
    const A sign = sign_of(reduction);
    if (reduction.record < 0) {
      extremum<false>(registers, some, sign, registers.width(reduction.value), sums);
    } else {
      extremum<true>(registers, some, sign, registers.width(reduction.value), sums);
    }
  }

  static A sign_of(const EdgeReduction& extremum) {
    return extremum.kind == EdgeReductionKind::kMax ? A{1} : A{-1};
  }

  template <bool kTies>
  static void extremum(const Registers& registers, const Edges& edges, A sign, int64_t width,
                       A* sums) {
    auto* const ties = reinterpret_cast<Bits<A>*>(sums + width);
    for_each_part<N, 4>(0, width, [&](auto chunk, int64_t f) {
      using C = decltype(chunk);
      if (!extremum<C, kTies, false>(registers, edges, sign, f, sums, ties)) {
        extremum<C, kTies, true>(registers, edges, sign, f, sums, ties);
      }
    });
  }

  // The same for the columns of C that begin at f. Unless kNans, nothing is written and false is
  // returned if there may be a NaN.
  template <typename C, bool kTies, bool kNans>
  static bool extremum(const Registers& registers, const Edges& edges, A sign, int64_t f, A* sums,
                       Bits<A>* ties) {
    constexpr int kLane = C::kLanes;
    Vector<A, kLane> best[C::kCount];
    Vector<Bits<A>, kLane> count[C::kCount] = {};
    NanWatch<A, kLane, C::kCount> watch;
#pragma GCC unroll 16
    for (int q = 0; q < C::kCount; ++q) {
      best[q] = load<kLane>(sums + f + q * kLane);
      if constexpr (kTies) count[q] = load_raw<kLane>(ties + f + q * kLane);
    }
    for (int64_t g = 0; g < edges.count; ++g) {
      if (!kNans && f == 0) registers.expect(edges.first + g);
      const A* const value = edges.values[g] + f;
#pragma GCC unroll 16
      for (int q = 0; q < C::kCount; ++q) {
        const auto own = sign * round_to<T, kLane>(load<kLane>(value + q * kLane));
        take<kTies, kNans, kLane>(own, splat<Bits<A>, kLane>(1), best[q], count[q]);
        if constexpr (!kNans) watch.see(q, own);
      }
    }
    if (!kNans && watch.noticed()) return false;
#pragma GCC unroll 16
    for (int q = 0; q < C::kCount; ++q) {
      store<kLane>(sums + f + q * kLane, best[q]);
      if constexpr (kTies) store_raw<kLane>(ties + f + q * kLane, count[q]);
    }
    return true;
  }

  // Goes on with a value that so many edges have. Unless kNans, it is a number.
  template <bool kTies, bool kNans, int kLane, typename V, typename I>
  static FASTGRAPH_INLINE void take(V value, I of_value, V& best, I& count) {
    I is_new = value > best;
    if constexpr (kNans) is_new |= value != value;
    if constexpr (kTies) {
      const I equal = value == best;
      count = is_new ? of_value : count + (of_value & equal);
      if constexpr (kNans) count &= ~(is_new & (value != value));
    }
    best = kNans ? (is_new ? value : best) : larger<A, kLane>(value, best);
  }

  static void store_sum(const A* sums, const Whole& to, int64_t width) {
    for_each_chunk<N, 1>(0, width, [&](auto chunk, int64_t f) {
      using C = decltype(chunk);
      for (int q = 0; q < C::kCount; ++q) {
        const int64_t c = f + q * C::kLanes;
        to.template end<C::kLanes>(c, load<C::kLanes>(sums + c));
      }
    });
  }
};

}  // namespace fastgraph
