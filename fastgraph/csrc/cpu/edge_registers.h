// The registers of an edge program: values of a few edges at once, and its instructions on them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <vector>

#include "cpu/edge_channels.h"
#include "cpu/edge_heads.h"
#include "cpu/edge_layout.h"
#include "cpu/edge_products.h"
#include "cpu/edge_rows.h"
#include "cpu/running_softmax.h"
#include "fastgraph/chunks.h"
#include "fastgraph/edge_code.h"
#include "fastgraph/elementary.h"
#include "fastgraph/inline.h"
#include "fastgraph/memory.h"
#include "fastgraph/simd.h"
#include "fastgraph/views.h"

namespace fastgraph {

// out[c] = f(in[c]...) for c < width, a vector at a time.
template <typename A, typename F, typename... In>
FASTGRAPH_INLINE void for_each_vector(A* out, int64_t width, const F& f, const In*... in) {
  constexpr int N = kLanes<A>;
  int64_t c = 0;
#pragma GCC unroll 4
  for (; c + N <= width; c += N) store<N>(out + c, f(load<N>(in + c)...));
  if (c == width) return;
  const auto part = [&](const A* p) {
    Vector<A, N> v{};
    std::memcpy(&v, p + c, (width - c) * sizeof(A));
    return v;
  };
  const Vector<A, N> last = f(part(in)...);
  std::memcpy(out + c, &last, (width - c) * sizeof(A));
}

// The values of all slots for a block of edges, and the instructions that compute them.
template <typename T>
class EdgeRegisters {
 public:
  using A = Accumulator<T>;
  static constexpr int N = kLanes<A>;
  using V = Vector<A, N>;
  using I = Vector<Bits<A>, N>;

  EdgeRegisters(const OrderedCsr& graph, const EdgeCode& code, const EdgeLayout& layout,
                const T* const* operands)
      : graph_(graph),
        code_(code),
        layout_(layout),
        operands_(operands),
        memory_(scratch<A>(layout.size)),
        at_(scratch<const A*>(code.num_slots * kMostEdges)) {
    std::fill_n(memory_.get(), layout.size, A{});
    for (int32_t s = 0; s < code.num_slots; ++s) {
      const EdgeSlot slot = code.slots[s];
      place(s, layout.block, EdgeLayout::has_edges(slot) ? slot.width : 0);
      if (slot.kind == EdgeSlotKind::kConstant) *own(s) = static_cast<A>(code.constants[s]);
      if (slot.kind == EdgeSlotKind::kParameter) put_all(s);
      of_kind_[static_cast<int>(slot.kind)].push_back(s);
    }
    for (const auto kind : {EdgeSlotKind::kGathered, EdgeSlotKind::kEdge}) {
      for (const int32_t s : of(kind)) {
        if (is_in_place(width(s), is_half<T>)) ahead_.push_back({operands[s], 0, width(s)});
      }
      if (kind == EdgeSlotKind::kGathered) num_gathered_ = static_cast<int64_t>(ahead_.size());
    }
    num_ahead_ = static_cast<int64_t>(ahead_.size());
    for (int64_t i = 0; i < code.num_instructions; ++i) add_product(code.instructions[i]);
    run(0, 1);
    for (const auto kind :
         {EdgeSlotKind::kParameter, EdgeSlotKind::kConstant, EdgeSlotKind::kOfProgram}) {
      for (const int32_t s : of(kind)) repeat(s);
    }
  }

  // The channels of a slot for an edge of the block; of rows and parameters for any.
  const A* at(int32_t slot, int64_t g) const { return at_[slot * kMostEdges + g]; }

  // The same for all edges of the block.
  const A* const* rows(int32_t slot) const { return &at_[slot * kMostEdges]; }

  int64_t width(int32_t slot) const { return code_.slots[slot].width; }

  // All that depends on the rows of a block.
  void begin_rows(const EdgeRows& rows) {
    for (const int32_t s : of(EdgeSlotKind::kRow)) {
      place(s, rows.count, width(s));
      put_rows(s, rows.count, 0, [&](int64_t r) { return rows.row[r]; });
    }
    for (const int32_t s : of(EdgeSlotKind::kOfRow)) place(s, rows.count, width(s));
    run(1, rows.count);
    if (rows.count == rows.edges) return;
    for (const auto kind : {EdgeSlotKind::kRow, EdgeSlotKind::kOfRow}) {
      for (const int32_t s : of(kind)) spread_rows(s, rows);
    }
  }

  // Asks for what a row has.
  FASTGRAPH_INLINE void expect_row(int64_t row) const {
    for (const int32_t s : of(EdgeSlotKind::kRow)) {
      prefetch_row(operands_[s] + row * width(s), width(s));
    }
  }

  // Has the operands of some entries in the block. Those that follow come next.
  void put_edges(int64_t first, int64_t edges) {
    const int32_t* const col = graph_.col + first;
    const int64_t left = graph_.num_entries - first;
    for (const int32_t s : of(EdgeSlotKind::kGathered)) {
      put_rows(s, edges, left, [=](int64_t g) -> int64_t { return col[g]; });
    }
    for (const int32_t s : of(EdgeSlotKind::kEdge)) {
      put_rows(s, edges, left, [&](int64_t g) { return graph_.edge(first + g); });
    }
    next_ = first + layout_.ahead;
    num_next_ = ahead_.empty() ? 0 : left - layout_.ahead;
  }

  // Asks for the operands of the entry that comes next in the place of an edge. Whatever goes over
  // the edges of a block first does so as it goes: the processor would wait for all of them at
  // once.
  FASTGRAPH_INLINE void expect(int64_t g) const {
    if (g >= num_next_) return;
    const Matrix<const T>* const ahead = ahead_.data();
    const int64_t node = graph_.col[next_ + g];
    for (int64_t i = 0; i < num_gathered_; ++i) prefetch_row(ahead[i].row(node), ahead[i].width);
    if (num_ahead_ == num_gathered_) return;
    const int64_t edge = graph_.edge(next_ + g);
    for (int64_t i = num_gathered_; i < num_ahead_; ++i) {
      prefetch_row(ahead[i].row(edge), ahead[i].width);
    }
  }
  void have_expected() { num_next_ = 0; }

  // The instructions on the edges of a block.
  void run_block(int64_t edges) { run(2, edges); }

  // out = exp(score - largest) for the edges of a block, of each of which there are the largest
  // scores of its row.
  void exponentials(int32_t score, const A* const* largest, int32_t out, int64_t edges) {
    const int64_t heads = width(score);
    const auto f = [](V x, V most) { return exponential<A, N>(x - subtracted<A, N>(most)); };
    if (heads >= kNarrow) {
      for (int64_t g = 0; g < edges; ++g) {
        for_each_vector(own(out) + g * heads, heads, f, at(score, g), largest[g]);
      }
      return;
    }
    const int64_t count = edges * heads, whole = (count + N - 1) / N * N;
    A of_each[kMostEdges * kNarrow];
    for (int64_t g = 0; g < edges; ++g) std::copy_n(largest[g], heads, of_each + g * heads);
    std::fill(of_each + count, of_each + whole, A{});
    for_each_vector(own(out), whole, f, at(score, 0), of_each);
  }

 private:
  const std::vector<int32_t>& of(EdgeSlotKind kind) const {
    return of_kind_[static_cast<int>(kind)];
  }

  // A loop over lines takes longer than asking for them.
  static FASTGRAPH_INLINE void prefetch_row(const T* row, int64_t width) {
    constexpr int64_t kLines = 4 * kCacheLine / sizeof(T);
    if (width % kLines != 0 || width > 8 * kLines) return prefetch(row, width);
    for (int64_t c = 0; c < width; c += kLines) prefetch<4 * kCacheLine>(row + c);
  }

  A* own(int32_t slot) const { return memory_.get() + layout_.begin[slot]; }

  // Each width that operands often have, as a constant, or whichever it is.
  template <typename F>
  static FASTGRAPH_INLINE void with_width(int64_t width, const F& f) {
    switch (width) {
      case 1: return f(std::integral_constant<int64_t, 1>{});
      case 2: return f(std::integral_constant<int64_t, 2>{});
      case 4: return f(std::integral_constant<int64_t, 4>{});
      case 8: return f(std::integral_constant<int64_t, 8>{});
      case 16: return f(std::integral_constant<int64_t, 16>{});
      default: return f(width);
    }
  }

  static FASTGRAPH_INLINE void copy_row(const T* from, int64_t width, A* to) {
    for_each_chunk<N, 1>(0, width, [&](auto chunk, int64_t c) {
      using C = decltype(chunk);
      for (int q = 0; q < C::kCount; ++q) {
        const int64_t f = c + q * C::kLanes;
        store<C::kLanes>(to + f, load<C::kLanes>(from + f));
      }
    });
  }

  // Has rows of an operand in the places of some edges or rows. Where they are copied, those that
  // come next are asked for, of so many in all.
  template <typename Row>
  FASTGRAPH_INLINE void put_rows(int32_t slot, int64_t edges, int64_t in_all, const Row& row) {
    const T* const values = operands_[slot];
    A* const to = own(slot);
    const int64_t ahead = layout_.ahead, num_next = in_all - ahead;
    with_width(width(slot), [&](auto count) {
      if constexpr (!is_half<T>) {
        if (is_in_place(count, false)) {
          const A** const at = &at_[slot * kMostEdges];
          for (int64_t g = 0; g < edges; ++g) at[g] = values + row(g) * count;
          return;
        }
      }
      for (int64_t g = 0; g < edges; ++g) {
        if (g < num_next) prefetch_row(values + row(g + ahead) * count, count);
        copy_row(values + row(g) * count, count, to + g * count);
      }
    });
  }

  // The same for all edges alike.
  void put_all(int32_t slot) {
    if constexpr (!is_half<T>) {
      if (is_in_place(width(slot), false)) {
        std::fill_n(&at_[slot * kMostEdges], layout_.block, operands_[slot]);
        return;
      }
    }
    copy_row(operands_[slot], width(slot), own(slot));
  }

  // What is the same for all edges of a block, for all of them, if it is narrow.
  void repeat(int32_t slot) {
    const int64_t count = width(slot);
    if (count >= kNarrow) return;
    A* const to = own(slot);
    for (int64_t i = count; i < layout_.block * count; ++i) to[i] = to[i - count];
  }

  // Has the values of some edges in the slot's own memory.
  void place(int32_t slot, int64_t edges, int64_t width) {
    const A** const at = &at_[slot * kMostEdges];
    for (int64_t g = 0; g < edges; ++g) at[g] = own(slot) + g * width;
  }

  // What rows have, for their edges. No row is behind the place of an edge of it.
  void spread_rows(int32_t slot, const EdgeRows& rows) {
    const int64_t count = width(slot);
    const A** const at = &at_[slot * kMostEdges];
    A* const to = own(slot);
    for (int64_t g = rows.edges - 1; g > 0; --g) {
      const int64_t r = rows.of_edge[g];
      if (count >= kNarrow) {
        at[g] = at[r];
      } else if (count == 1) {
        to[g] = to[r];
      } else if (r != g) {
        std::memcpy(to + g * count, to + r * count, count * sizeof(A));
      }
    }
  }

  // Instructions whose results change so often.
  void run(int often, int64_t edges) {
    for (int64_t i = 0; i < code_.num_instructions; ++i) {
      const EdgeInstruction& instruction = code_.instructions[i];
      if (code_.slots[instruction.out].often() == often) run(instruction, edges);
    }
  }

  template <typename F>
  FASTGRAPH_INLINE void map(const EdgeInstruction& i, int64_t edges, const F& f) {
    const int32_t a = i.argument[0], b = i.argument[1], c = i.argument[2];
    const int64_t count = width(i.out);
    A* const out = own(i.out);
    const bool is_narrow = count < kNarrow;
    const auto rows = [&](int64_t times, int64_t channels) {
      for (int64_t g = 0; g < times; ++g) {
        if (!is_narrow) expect(g);
        if constexpr (std::is_invocable_v<F, V>) {
          if (b < 0) {
            for_each_vector(out + g * count, channels, f, at(a, g));
          } else {
            const auto of_sum = [&](V first, V second) { return f(first + second); };
            for_each_vector(out + g * count, channels, of_sum, at(a, g), at(b, g));
          }
        } else if constexpr (std::is_invocable_v<F, V, V>) {
          for_each_vector(out + g * count, channels, f, at(a, g), at(b, g));
        } else {
          for_each_vector(out + g * count, channels, f, at(a, g), at(b, g), at(c, g));
        }
      }
    };
    if (is_narrow) {
      rows(1, (edges * count + N - 1) / N * N);
    } else {
      rows(edges, count);
      have_expected();
    }
  }

  void spread(const EdgeInstruction& i, int64_t edges) {
    const int64_t heads = width(i.argument[0]), of_head = width(i.out) / heads;
    const bool has_several = has_several_heads<N>(of_head) && heads < kNarrow;
    const auto of_lanes = heads_of_lanes<A, N>(of_head);
    for (int64_t g = 0; g < edges; ++g) {
      const A* const from = at(i.argument[0], g);
      A* const to = own(i.out) + g * width(i.out);
      int64_t h = 0;
      for (; has_several && (h + N / of_head) <= heads; h += N / of_head) {
        store<N>(to + h * of_head, of_heads<A, N>(from + h, of_lanes));
      }
      for (; h < heads; ++h) std::fill_n(to + h * of_head, of_head, from[h]);
    }
  }

  // All channels for each head.
  void tile(const EdgeInstruction& i, int64_t edges) {
    const int64_t count = width(i.argument[0]), all = width(i.out);
    for (int64_t g = 0; g < edges; ++g) {
      const A* const from = at(i.argument[0], g);
      A* const to = own(i.out) + g * all;
      for (int64_t first = 0; first < all; first += count) {
        std::memcpy(to + first, from, count * sizeof(A));
      }
    }
  }

  // The sum of all heads, channel by channel.
  void sum_tiles(const EdgeInstruction& i, int64_t edges) {
    const int64_t count = width(i.out), all = width(i.argument[0]);
    for (int64_t g = 0; g < edges; ++g) {
      const A* const from = at(i.argument[0], g);
      A* const to = own(i.out) + g * count;
      for_each_part<N, 4>(0, count, [&](auto chunk, int64_t c) {
        using C = decltype(chunk);
        constexpr int kLane = C::kLanes;
        Vector<A, kLane> sum[C::kCount];
        for (int q = 0; q < C::kCount; ++q) sum[q] = load<kLane>(from + c + q * kLane);
        for (int64_t first = count; first < all; first += count) {
          for (int q = 0; q < C::kCount; ++q) sum[q] += load<kLane>(from + first + c + q * kLane);
        }
        for (int q = 0; q < C::kCount; ++q) store<kLane>(to + c + q * kLane, sum[q]);
      });
    }
  }

  // For each head and edge the sum of f(in...) over the channels. f takes vectors of any length.
  template <typename F, typename... In>
  FASTGRAPH_INLINE void sum_heads(int32_t out, int64_t width, int64_t edges, const F& f,
                                  const In*... in) {
    const int64_t of_head = width / this->width(out);
    if (of_head % N == 0) return sum_vectors<N>(out, of_head, edges, f, in...);
    if constexpr (N > 8) {
      if (of_head % 8 == 0) return sum_vectors<8>(out, of_head, edges, f, in...);
    }
    if constexpr (N > 4) {
      if (of_head % 4 == 0) return sum_vectors<4>(out, of_head, edges, f, in...);
    }
    if (of_head < 4) return sum_few(out, of_head, edges, f, in...);
    for (int64_t g = 0; g < edges; ++g) {
      for (int64_t h = 0; h * of_head < width; ++h) {
        A sum = 0;
        for_each_part<N, 1>(h * of_head, (h + 1) * of_head, [&](auto chunk, int64_t c) {
          constexpr int kLane = decltype(chunk)::kLanes;
          sum += sum_of<A, kLane>(f(load<kLane>(in[g] + c)...));
        });
        own(out)[g * this->width(out) + h] = sum;
      }
    }
  }

  // The same for heads of two or three channels, or one.
  template <typename F, typename... In>
  void sum_few(int32_t out, int64_t of_head, int64_t edges, const F& f, const In*... in) {
    const int64_t heads = width(out);
    A* to = own(out);
    for (int64_t g = 0; g < edges; ++g) {
      for (int64_t h = 0; h < heads; ++h) {
        A sum = 0;
        for (int64_t c = h * of_head; c < (h + 1) * of_head; ++c) {
          sum += f(Vector<A, 1>{in[g][c]}...)[0];
        }
        *to++ = sum;
      }
    }
  }

  // The same where heads are whole vectors. How many of them a head has is known to the compiler
  // where it often is so many.
  template <int kLane, typename F, typename... In>
  FASTGRAPH_INLINE void sum_vectors(int32_t out, int64_t of_head, int64_t edges, const F& f,
                                    const In*... in) {
    switch (of_head / kLane) {
      case 1: return sum_vectors<kLane>(std::integral_constant<int64_t, 1>{}, out, edges, f, in...);
      case 2: return sum_vectors<kLane>(std::integral_constant<int64_t, 2>{}, out, edges, f, in...);
      case 4: return sum_vectors<kLane>(std::integral_constant<int64_t, 4>{}, out, edges, f, in...);
      case 8: return sum_vectors<kLane>(std::integral_constant<int64_t, 8>{}, out, edges, f, in...);
      default: return sum_vectors<kLane>(of_head / kLane, out, edges, f, in...);
    }
  }

  // As many sums at once as a vector has lanes, of whichever edges.
  template <int kLane, typename Count, typename F, typename... In>
  void sum_vectors(Count vectors, int32_t out, int64_t edges, const F& f, const In*... in) {
    const int64_t heads = width(out), count = edges * heads;
    const auto sum = [&](int64_t g, int64_t begin) {
      auto found = f(load<kLane>(in[g] + begin)...);
      for (int64_t q = 1; q < vectors; ++q) {
        found += f(load<kLane>(in[g] + begin + q * kLane)...);
      }
      return found;
    };
    int64_t g = 0, h = 0;
    for (int64_t first = 0; first < count; first += kLane) {
      const int taken = static_cast<int>(std::min<int64_t>(kLane, count - first));
      Vector<A, kLane> sums[kLane];
      if (heads == 1 && taken == kLane) {
#pragma GCC unroll 16
        for (int k = 0; k < kLane; ++k) sums[k] = sum(g + k, 0);
        g += kLane;
      } else {
        for (int k = 0; k < taken; ++k) {
          sums[k] = sum(g, h * vectors * kLane);
          if (++h == heads) {
            h = 0;
            ++g;
          }
        }
      }
      store<kLane>(own(out) + first, sums_of<A, kLane>(sums, taken));
    }
  }

  // The product that an instruction is; nothing for others.
  void add_product(const EdgeInstruction& i) {
    if (i.operation != EdgeOperation::kProduct) return;
    products_.resize(code_.num_instructions);
    const int64_t depth = width(i.argument[0]);
    products_[&i - code_.instructions].emplace(at(i.argument[1], 0), depth, width(i.out));
  }

  void multiply(const EdgeInstruction& i, int64_t edges) {
    for (int64_t g = 0; g < edges; ++g) expect(g);
    have_expected();
    auto& product = *products_[&i - code_.instructions];
    product.template run<kMostEdges>(rows(i.argument[0]), edges, own(i.out));
  }

  void run(const EdgeInstruction& i, int64_t edges) {
    const V zero{}, one = splat<A, N>(1);
    const auto truth = [&](I mask) { return mask ? one : zero; };
    using Op = EdgeOperation;
    switch (i.operation) {
      case Op::kAdd: return map(i, edges, [](V a, V b) { return a + b; });
      case Op::kSub: return map(i, edges, [](V a, V b) { return a - b; });
      case Op::kMul: return map(i, edges, [](V a, V b) { return a * b; });
      case Op::kDiv: return map(i, edges, [](V a, V b) { return a / b; });
      case Op::kMaximum: return map(i, edges, [](V a, V b) { return (a > b) | (a != a) ? a : b; });
      case Op::kMinimum: return map(i, edges, [](V a, V b) { return (a < b) | (a != a) ? a : b; });
      case Op::kPow:
        return map(i, edges, [](V a, V b) {
          for (int k = 0; k < N; ++k) a[k] = std::pow(a[k], b[k]);
          return a;
        });
      case Op::kAtan2: return map(i, edges, [](V a, V b) { return angle<A, N>(a, b); });
      case Op::kEq: return map(i, edges, [&](V a, V b) { return truth(a == b); });
      case Op::kNe: return map(i, edges, [&](V a, V b) { return truth(a != b); });
      case Op::kLt: return map(i, edges, [&](V a, V b) { return truth(a < b); });
      case Op::kLe: return map(i, edges, [&](V a, V b) { return truth(a <= b); });
      case Op::kWhere: return map(i, edges, [&](V m, V a, V b) { return m != zero ? a : b; });
      case Op::kClamp:
        return map(i, edges, [](V x, V low, V high) {
          x = x < low ? low : x;
          return x > high ? high : x;
        });
      case Op::kNeg: return map(i, edges, [](V x) { return -x; });
      case Op::kAbs: return map(i, edges, [](V x) { return absolute<A, N>(x); });
      case Op::kSign: return map(i, edges, [&](V x) { return truth(x > zero) - truth(x < zero); });
      case Op::kSqrt: return map(i, edges, [](V x) { return square_root<A, N>(x); });
      case Op::kExp: return map(i, edges, [](V x) { return exponential<A, N>(x); });
      case Op::kExpm1: return map(i, edges, [](V x) { return exponential_minus_1<A, N>(x); });
      case Op::kLog: return map(i, edges, [](V x) { return logarithm<A, N>(x); });
      case Op::kLog1p: return map(i, edges, [](V x) { return logarithm_plus_1<A, N>(x); });
      case Op::kSin: return map_lanes(i, edges, [](A x) { return std::sin(x); });
      case Op::kCos: return map_lanes(i, edges, [](A x) { return std::cos(x); });
      case Op::kErf: return map(i, edges, [](V x) { return error_function<A, N>(x); });
      case Op::kSigmoid: return map(i, edges, [](V x) { return logistic<A, N>(x); });
      case Op::kTanh: return map(i, edges, [](V x) { return hyperbolic_tangent<A, N>(x); });
      case Op::kSoftplus:
        return map(i, edges, [](V x) {
          const V small = logarithm_plus_1<A, N>(exponential<A, N>(x));
          return x > splat<A, N>(20) ? x : small;
        });
      case Op::kRelu: return map(i, edges, [&](V x) { return x <= zero ? zero : x; });
      case Op::kLeakyRelu:
        return map(i, edges, [&](V x, V slope) { return x > zero ? x : x * slope; });
      case Op::kElu:
        return map(i, edges, [&](V x, V alpha) {
          return x > zero ? x : alpha * exponential_minus_1<A, N>(x);
        });
      case Op::kRound: return map(i, edges, [](V x) { return round_to<T, N>(x); });
      case Op::kSpread: return spread(i, edges);
      case Op::kTile: return tile(i, edges);
      case Op::kSumTiles: return sum_tiles(i, edges);
      case Op::kFold:
        return sum_heads(
            i.out, width(i.argument[0]), edges, [](auto a) { return a; }, rows(i.argument[0]));
      case Op::kDot:
        return sum_heads(
            i.out, width(i.argument[0]), edges, [](auto a, auto b) { return a * b; },
            rows(i.argument[0]), rows(i.argument[1]));
      case Op::kGate: return map(i, edges, [&](V x, V g) { return x <= zero ? zero : g; });
      case Op::kSlope: return map(i, edges, [&](V x, V slope) { return x > zero ? one : slope; });
      case Op::kProduct: return multiply(i, edges);
      case Op::kFoldMax: return run_heads(largest_of_heads<A>, i, width(i.out), edges);
      case Op::kFirst: return run_heads(first_of_heads<A>, i, i.heads(), edges);
      case Op::kSlice: return place_heads(slice_heads<A>, i, edges);
      case Op::kPad: return place_heads(pad_heads<A>, i, edges);
    }
  }

  template <typename F>
  void run_heads(const F& f, const EdgeInstruction& i, int64_t heads, int64_t edges) {
    f(rows(i.argument[0]), heads, width(i.argument[0]) / heads, edges, own(i.out));
  }

  template <typename F>
  void place_heads(const F& f, const EdgeInstruction& i, int64_t edges) {
    const int64_t heads = i.heads(), of_head = width(i.argument[0]) / heads;
    f(rows(i.argument[0]), heads, of_head, i.start(), width(i.out) / heads, edges, own(i.out));
  }

  template <typename F>
  void map_lanes(const EdgeInstruction& i, int64_t edges, const F& f) {
    map(i, edges, [&](V x) { return for_each_lane<A, N>(x, f); });
  }

  const OrderedCsr& graph_;
  const EdgeCode& code_;
  const EdgeLayout& layout_;
  const T* const* operands_;
  // The operands of nodes that are gathered, and behind them those of edges.
  std::vector<Matrix<const T>> ahead_;
  int64_t num_gathered_, num_ahead_;
  int64_t next_ = 0, num_next_ = 0;  // the entries that come next
  Scratch<A> memory_;
  Scratch<const A*> at_;
  std::vector<int32_t> of_kind_[8];
  std::vector<std::optional<Product<A>>> products_;  // of each instruction
};

}  // namespace fastgraph
