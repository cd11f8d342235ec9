// The values of an edge program in the memory of a warp: operands of a few edges at once, and
// instructions on them. Rows of values consist of whole packs, of which a lane has the same ones in
// all values of a width, so that only what looks at other channels waits for other lanes.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "fastgraph/edge_products.cuh"
#include "fastgraph/edge_run.h"
#include "fastgraph/lanes.cuh"
#include "fastgraph/pieces.cuh"

namespace fastgraph::cuda {

constexpr unsigned kAllLanes = 0xffffffffu;

// As many packs as hold a row of values.
template <typename A>
FASTGRAPH_BOTH constexpr int packs_of(int width) {
  return (width + kPack<A> - 1) / kPack<A>;
}

// The share of a lane in values of some width: 2^shift lanes have the packs of an edge, and the
// next lanes those of the next one.
struct LaneShare {
  int pack, packs_apart;
  int edge, edges_apart;

  __device__ explicit LaneShare(int shift) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    packs_apart = 1 << shift;
    pack = lane & (packs_apart - 1);
    edge = lane >> shift;
    edges_apart = kWarp >> shift;
  }
};

// Calls body(g, c) for this lane's packs c of its edges g.
template <typename Body>
__device__ __forceinline__ void for_each_pack(int shift, int packs, int edges, const Body& body) {
  const LaneShare share(shift);
  for (int c = share.pack; c < packs; c += share.packs_apart) {
#pragma unroll 2
    for (int g = share.edge; g < edges; g += share.edges_apart) body(g, c);
  }
}

// What is subtracted from scores before the exponential: the largest, or 0 where none is finite.
template <typename A>
__device__ A subtracted(A largest) {
  return largest == -INFINITY ? A{0} : largest;
}

template <typename T, bool kLarge, bool kMultiplies>
class EdgeValues {
 public:
  using A = Accumulator<T>;
  static constexpr int kValues = kPack<A>;
  using P = Pack<A, kValues>;

  __device__ EdgeValues(const EdgeRun<T>& run, A* memory) : run_(run), memory_(memory) {}

  __device__ A* at(int32_t place) const { return memory_ + place; }
  __device__ P get(const A* p) const { return load_pack<kValues>(p); }

  __device__ void put(A* p, const P& pack) const { put_pack(p, pack); }

  __device__ int32_t stride(int32_t width) const { return packs_of<A>(width) * kValues; }

  // Instructions of one kind, of which 0 are those for the program, 1 for a row and 2 for an edge,
  // on so many edges.
  __device__ void run(int often, int edges) const {
    for (int i = often == 0 ? 0 : run_.steps_end[often - 1]; i < run_.steps_end[often]; ++i) {
      if constexpr (kLarge) {
        run(run_.many_steps[i], edges);
      } else {
        run(run_.few_steps[i], edges);
      }
    }
  }

  // Numbers, and the operands of the program, of a row, or of some edges: kind 0, 1, 2 and 3, the
  // last of which are those that edges have themselves. Lane g holds the row for edge g.
  __device__ void load(int kind, int32_t own_row, int edges) const {
    for (int i = kind == 0 ? 0 : run_.loads_end[kind - 1]; i < run_.loads_end[kind]; ++i) {
      if constexpr (kLarge) {
        load(run_.many_loads[i], own_row, edges);
      } else {
        load(run_.few_loads[i], own_row, edges);
      }
    }
  }

  // out = exp(score - largest), with one of the largest for each score of an edge.
  __device__ void exponentials(int32_t out, int32_t score, bool moves, const A* largest,
                               int32_t heads, int shift, int edges) const {
    const int32_t row = stride(heads), score_row = moves ? row : 0;
    for_each_pack(shift, packs_of<A>(heads), edges, [&](int g, int c) {
      P x = get(at(score + g * score_row + c * kValues));
      const P most = get(largest + c * kValues);
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        x.values[i] = std::exp(x.values[i] - subtracted(most.values[i]));
      }
      put(at(out + g * row + c * kValues), x);
    });
  }

 private:
  // Pack c of a row of an operand; what is beyond the end of the row is 0.
  template <bool kPacked>
  __device__ P row_pack(const EdgeLoad<T>& load, int32_t row, int c) const {
    const T* const values = load.rows + static_cast<int64_t>(row) * load.width;
    P pack;
    if constexpr (kPacked) {
      const auto own = load_pack<kValues>(values + c * kValues);
#pragma unroll
      for (int i = 0; i < kValues; ++i) pack.values[i] = widened(own.values[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        const int column = c * kValues + i;
        pack.values[i] = column < load.width ? widened(values[column]) : A{0};
      }
    }
    return pack;
  }

  // The rows of some edges are on their way from memory together; those beyond the last one are
  // that again, and are not kept.
  template <bool kPacked, int kCount>
  __device__ void gather(const EdgeLoad<T>& load, int32_t own_row, int edges) const {
    const LaneShare share(load.shift);
    const int packs = packs_of<A>(load.width);
    for (int first = 0; first < edges; first += kCount * share.edges_apart) {
      int32_t rows[kCount];
#pragma unroll
      for (int u = 0; u < kCount; ++u) {
        const int g = first + u * share.edges_apart + share.edge;
        rows[u] = __shfl_sync(kAllLanes, own_row, min(g, edges - 1));
      }
      for (int c = share.pack; c < packs; c += share.packs_apart) {
        P values[kCount];
#pragma unroll
        for (int u = 0; u < kCount; ++u) values[u] = row_pack<kPacked>(load, rows[u], c);
#pragma unroll
        for (int u = 0; u < kCount; ++u) {
          const int g = first + u * share.edges_apart + share.edge;
          if (g < edges) put(at(load.at + (g * packs + c) * kValues), values[u]);
        }
      }
    }
  }

  __device__ void load(const EdgeLoad<T>& load, int32_t own_row, int edges) const {
    if (load.rows == nullptr) {
      P pack;
#pragma unroll
      for (int i = 0; i < kValues; ++i) pack.values[i] = static_cast<A>(load.constant);
      return for_each_pack(load.shift, 1, 1, [&](int, int) { put(at(load.at), pack); });
    }
    const bool is_at_once = edges <= kWarp >> load.shift;
    if (load.packed) {
      is_at_once ? gather<true, 1>(load, own_row, edges)
                 : gather<true, kInFlight>(load, own_row, edges);
    } else {
      is_at_once ? gather<false, 1>(load, own_row, edges)
                 : gather<false, kInFlight>(load, own_row, edges);
    }
  }

  // out = f(arguments), value by value. A function of one takes the sum of two if there is a
  // second.
  template <typename F>
  __device__ __forceinline__ void map(const EdgeStep& step, int edges, const F& f) const {
    const int packs = packs_of<A>(step.width);
    const int32_t row = packs * kValues;
    const auto row_of = [&](int k) { return step.moves >> k & 1 ? row : 0; };
    const int32_t a_row = row_of(0), b_row = row_of(1), c_row = row_of(2);
    const A* const a = at(step.argument[0]);
    const A* const b = at(step.argument[1]);
    const A* const c = at(step.argument[2]);
    const bool is_of_sum = step.arity == 2;
    for_each_pack(step.shift, packs, edges, [&](int g, int p) {
      P x = get(a + g * a_row + p * kValues);
      if constexpr (std::is_invocable_v<F, A>) {
        if (is_of_sum) {
          const P y = get(b + g * b_row + p * kValues);
#pragma unroll
          for (int i = 0; i < kValues; ++i) x.values[i] += y.values[i];
        }
#pragma unroll
        for (int i = 0; i < kValues; ++i) x.values[i] = f(x.values[i]);
      } else if constexpr (std::is_invocable_v<F, A, A>) {
        const P y = get(b + g * b_row + p * kValues);
#pragma unroll
        for (int i = 0; i < kValues; ++i) x.values[i] = f(x.values[i], y.values[i]);
      } else {
        const P y = get(b + g * b_row + p * kValues), z = get(c + g * c_row + p * kValues);
#pragma unroll
        for (int i = 0; i < kValues; ++i) x.values[i] = f(x.values[i], y.values[i], z.values[i]);
      }
      put(at(step.out + g * row + p * kValues), x);
    });
  }

  // For each channel of the result the value source(channel) of the argument; 0 for -1.
  template <typename Source>
  __device__ __forceinline__ void widen(const EdgeStep& step, int edges,
                                        const Source& source) const {
    const int packs = packs_of<A>(step.width);
    const int32_t in_row = step.moves & 1 ? stride(step.in_width) : 0;
    const LaneShare share(step.shift);
    __syncwarp();
    for (int c = share.pack; c < packs; c += share.packs_apart) {
      int channel[kValues];
#pragma unroll
      for (int i = 0; i < kValues; ++i) channel[i] = source(min(c * kValues + i, step.width - 1));
      for (int g = share.edge; g < edges; g += share.edges_apart) {
        const A* const from = at(step.argument[0] + g * in_row);
        P pack;
#pragma unroll
        for (int i = 0; i < kValues; ++i) pack.values[i] = channel[i] < 0 ? A{0} : from[channel[i]];
        put(at(step.out + (g * packs + c) * kValues), pack);
      }
    }
    __syncwarp();
  }

  // Each value for the channels of its head.
  __device__ void spread(const EdgeStep& step, int edges) const {
    const int of_head = step.width / step.in_width;
    widen(step, edges, [=](int channel) { return channel / of_head; });
  }

  // All values for each head.
  __device__ void tile(const EdgeStep& step, int edges) const {
    widen(step, edges, [=](int channel) { return channel % step.in_width; });
  }

  // Some channels of each head.
  __device__ void slice(const EdgeStep& step, int edges) const {
    const int heads = step.argument[1], start = step.argument[2];
    const int of_in = step.in_width / heads, of_out = step.width / heads;
    widen(step, edges,
          [=](int channel) { return channel / of_out * of_in + start + channel % of_out; });
  }

  // The channels of each head among zeros.
  __device__ void pad(const EdgeStep& step, int edges) const {
    const int heads = step.argument[1], start = step.argument[2];
    const int of_in = step.in_width / heads, of_out = step.width / heads;
    widen(step, edges, [=](int channel) {
      const int own = channel % of_out - start;
      return own < 0 || own >= of_in ? -1 : channel / of_out * of_in + own;
    });
  }

  // Calls body(from, to, h) for each head of each edge, whose lane has it alone.
  template <typename Body>
  __device__ __forceinline__ void for_each_head(const EdgeStep& step, int edges, int heads,
                                                const Body& body) const {
    const int32_t row = stride(step.width), in_row = step.moves & 1 ? stride(step.in_width) : 0;
    const int of_in = step.in_width / heads, of_out = step.width / heads;
    __syncwarp();
    for (int i = static_cast<int>(threadIdx.x) % kWarp; i < edges * heads; i += kWarp) {
      const int g = i / heads, h = i % heads;
      A* const to = at(step.out + g * row);
      body(at(step.argument[0] + g * in_row) + h * of_in, of_in, to + h * of_out);
      for (int rest = step.width; h == heads - 1 && rest < row; ++rest) to[rest] = 0;
    }
    __syncwarp();
  }

  // The largest of the channels of each head.
  __device__ void fold_max(const EdgeStep& step, int edges) const {
    for_each_head(step, edges, step.width, [](const A* x, int count, A* most) {
      *most = x[0];
      for (int c = 1; c < count; ++c) {
        if (x[c] > *most || x[c] != x[c]) *most = *most != *most ? *most : x[c];
      }
    });
  }

  // 1 for the first channel of each head that is not 0, and 0 for all others.
  __device__ void first(const EdgeStep& step, int edges) const {
    for_each_head(step, edges, step.argument[1], [](const A* x, int count, A* to) {
      bool was = false;
      for (int c = 0; c < count; ++c) {
        to[c] = !was && x[c] != 0 ? A{1} : A{0};
        was = was || x[c] != 0;
      }
    });
  }

  // The sum of all heads, channel by channel.
  __device__ void sum_tiles(const EdgeStep& step, int edges) const {
    const int packs = packs_of<A>(step.width);
    const int32_t in_row = step.moves & 1 ? stride(step.in_width) : 0;
    const LaneShare share(step.shift);
    __syncwarp();
    for (int c = share.pack; c < packs; c += share.packs_apart) {
      for (int g = share.edge; g < edges; g += share.edges_apart) {
        const A* const from = at(step.argument[0] + g * in_row);
        P pack;
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
          const int channel = min(c * kValues + i, step.width - 1);
          pack.values[i] = 0;
          for (int k = channel; k < step.in_width; k += step.width) pack.values[i] += from[k];
        }
        put(at(step.out + (g * packs + c) * kValues), pack);
      }
    }
    __syncwarp();
  }

  // The sum of f(arguments) over the channels of each head, for which some lanes add up those that
  // are as many apart.
  template <typename F>
  __device__ __forceinline__ void sum_heads(const EdgeStep& step, int edges, const F& f) const {
    const int heads = step.width;
    const int of_head = step.in_width / heads;
    const int32_t row = stride(heads), in_row = stride(step.in_width);
    const int32_t a_row = step.moves & 1 ? in_row : 0, b_row = step.moves & 2 ? in_row : 0;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    int lanes = 1;
    while (lanes < kWarp && lanes < of_head) lanes *= 2;
    const int at_once = kWarp / lanes, own = lane / lanes, count = edges * heads;
    __syncwarp();
    for (int first = 0; first < count; first += at_once) {
      const int g = min(first + own, count - 1) / heads, h = min(first + own, count - 1) % heads;
      const A* const a = at(step.argument[0] + g * a_row + h * of_head);
      const A* const b = at(step.argument[1] + g * b_row + h * of_head);
      A sum = 0;
      for (int c = lane % lanes; c < of_head; c += lanes) {
        if constexpr (std::is_invocable_v<F, A>) {
          sum += f(a[c]);
        } else {
          sum += f(a[c], b[c]);
        }
      }
      for (int bits = lanes / 2; bits > 0; bits /= 2) {
        sum += __shfl_xor_sync(kAllLanes, sum, bits);
      }
      if (lane % lanes != 0 || first + own >= count) continue;
      A* const out = at(step.out + g * row);
      out[h] = sum;
      for (int rest = heads; h == heads - 1 && rest < row; ++rest) out[rest] = 0;
    }
    __syncwarp();
  }

  // The product with a matrix.
  __device__ void multiply(const EdgeStep& step, int edges) const {
    const EdgeLoad<T>* loads = run_.few_loads;
    if constexpr (kLarge) loads = run_.many_loads;
    const EdgeLoad<T>& matrix = loads[step.argument[1]];
    const EdgeRows<A> x{at(step.argument[0]), step.moves & 1 ? stride(step.in_width) : 0, edges};
    const auto by = [&](const auto& given) {
      multiply_edges(x, given, at(step.out), stride(step.width));
    };
    __syncwarp();
    if (matrix.packed) {
      by(EdgeMatrix<T, true>{matrix.rows, step.in_width, step.width});
    } else {
      by(EdgeMatrix<T, false>{matrix.rows, step.in_width, step.width});
    }
    __syncwarp();
  }

  __device__ void run(const EdgeStep& step, int edges) const {
    using Op = EdgeOperation;
    const auto of = [&](const auto& f) { map(step, edges, f); };
    const auto truth = [](bool mask) { return mask ? A{1} : A{0}; };
    switch (static_cast<Op>(step.operation)) {
      case Op::kAdd: return of([](A a, A b) { return a + b; });
      case Op::kSub: return of([](A a, A b) { return a - b; });
      case Op::kMul: return of([](A a, A b) { return a * b; });
      case Op::kDiv: return of([](A a, A b) { return a / b; });
      case Op::kMaximum: return of([](A a, A b) { return a > b || a != a ? a : b; });
      case Op::kMinimum: return of([](A a, A b) { return a < b || a != a ? a : b; });
      case Op::kPow: return of([](A a, A b) { return std::pow(a, b); });
      case Op::kAtan2: return of([](A a, A b) { return std::atan2(a, b); });
      case Op::kEq: return of([=](A a, A b) { return truth(a == b); });
      case Op::kNe: return of([=](A a, A b) { return truth(a != b); });
      case Op::kLt: return of([=](A a, A b) { return truth(a < b); });
      case Op::kLe: return of([=](A a, A b) { return truth(a <= b); });
      case Op::kWhere: return of([](A mask, A a, A b) { return mask != 0 ? a : b; });
      case Op::kClamp:
        return of([](A x, A low, A high) {
          x = x < low ? low : x;
          return x > high ? high : x;
        });
      case Op::kNeg: return of([](A x) { return -x; });
      case Op::kAbs: return of([](A x) { return std::fabs(x); });
      case Op::kSign: return of([=](A x) { return truth(x > 0) - truth(x < 0); });
      case Op::kSqrt: return of([](A x) { return std::sqrt(x); });
      case Op::kExp: return of([](A x) { return std::exp(x); });
      case Op::kExpm1: return of([](A x) { return std::expm1(x); });
      case Op::kLog: return of([](A x) { return std::log(x); });
      case Op::kLog1p: return of([](A x) { return std::log1p(x); });
      case Op::kSin: return of([](A x) { return std::sin(x); });
      case Op::kCos: return of([](A x) { return std::cos(x); });
      case Op::kErf: return of([](A x) { return std::erf(x); });
      case Op::kSigmoid: return of([](A x) { return A{1} / (A{1} + std::exp(-x)); });
      case Op::kTanh: return of([](A x) { return std::tanh(x); });
      case Op::kSoftplus: return of([](A x) { return x > 20 ? x : std::log1p(std::exp(x)); });
      case Op::kRelu: return of([](A x) { return x <= 0 ? A{0} : x; });
      case Op::kLeakyRelu: return of([](A x, A slope) { return x > 0 ? x : x * slope; });
      case Op::kElu: return of([](A x, A alpha) { return x > 0 ? x : alpha * std::expm1(x); });
      case Op::kRound: return of([](A x) { return rounded<T>(x); });
      case Op::kSpread: return spread(step, edges);
      case Op::kTile: return tile(step, edges);
      case Op::kSumTiles: return sum_tiles(step, edges);
      case Op::kFold: return sum_heads(step, edges, [](A a) { return a; });
      case Op::kDot: return sum_heads(step, edges, [](A a, A b) { return a * b; });
      case Op::kGate: return of([](A x, A gradient) { return x <= 0 ? A{0} : gradient; });
      case Op::kSlope: return of([](A x, A slope) { return x > 0 ? A{1} : slope; });
      case Op::kProduct:
        if constexpr (kMultiplies) multiply(step, edges);
        return;
      case Op::kFoldMax: return fold_max(step, edges);
      case Op::kFirst: return first(step, edges);
      case Op::kSlice: return slice(step, edges);
      case Op::kPad: return pad(step, edges);
    }
  }

  const EdgeRun<T>& run_;
  A* memory_;
};

}  // namespace fastgraph::cuda
