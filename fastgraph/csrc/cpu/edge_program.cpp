// Edge programs: an interpreter of instructions on registers that hold a few edges each, and
// reductions of what these leave. Nothing of the size of edges times channels is stored.
#include "cpu/edge_program.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "cpu/edge_registers.h"
#include "cpu/kernels.h"
#include "cpu/running_softmax.h"
#include "fastgraph/nan_watch.h"
#include "fastgraph/partial_sums.h"
#include "fastgraph/result.h"
#include "fastgraph/schedule.h"

namespace fastgraph {
namespace {

// Of tasks, where there are sums of outer products.
constexpr int64_t kMostGroups = 64;

template <typename T>
class EdgeProgram {
 public:
  using A = Accumulator<T>;
  using Registers = EdgeRegisters<T>;
  static constexpr int N = kLanes<A>;

  EdgeProgram(const OrderedCsr& graph, const EdgeCode& code, const T* const* operands,
              void* const* outputs)
      : graph_(graph),
        code_(code),
        operands_(operands),
        outputs_(outputs),
        layout_(code, sizeof(A), is_half<T>),
        schedule_(make_schedule(graph)),
        num_tasks_(static_cast<int64_t>(schedule_.tasks.size())),
        num_groups_(groups(code, num_tasks_)),
        piece_entries_(schedule_.num_pieces) {
    for (int64_t r = 0; r < code.num_reductions; ++r) {
      const EdgeReduction& reduction = code.reductions[r];
      const int64_t width = width_of(reduction);
      const bool is_of_edges = reduction.kind == EdgeReductionKind::kEdge;
      const int64_t rows = is_of_edges ? graph.num_entries : graph.num_rows;
      const bool is_outer = reduction.is_outer();
      const bool has_rows = reduction.kind != EdgeReductionKind::kTotal && !is_outer;
      T* const out = static_cast<T*>(reduction.out < 0 ? nullptr : outputs[reduction.out]);
      results_.emplace_back(Matrix<T>{out, out && has_rows ? rows : 0, width});
      begin_.push_back(sums_size_);
      total_begin_.push_back(is_outer ? outer_size_ : totals_size_);
      if (is_outer) {
        outer_size_ += width * code.slots[reduction.factor].width;
        continue;
      }
      if (!is_of_edges) sums_size_ += state_size(reduction);
      if (!has_rows) totals_size_ += width;
    }
    // Whole vectors are read and written, of types that alternate.
    partial_ = scratch<A>(schedule_.num_pieces * sums_size_);
    const auto num_cut = static_cast<int64_t>(schedule_.cut_rows.size());
    totals_ = scratch<A>((num_tasks_ + num_cut) * totals_size_);
    outer_ = scratch<A>(num_groups_ * outer_size_);
  }

  void run() {
    int64_t work = 1;
    for (int64_t s = 0; s < code_.num_slots; ++s) {
      if (code_.slots[s].often() == 2) work += code_.slots[s].width;
    }
    for_each_task(num_groups_, (graph_.num_entries + graph_.num_rows) * work,
                  [&](int64_t group) { run_group(group); });
    const auto num_cut = static_cast<int64_t>(schedule_.cut_rows.size());
    for_each_task(num_cut, schedule_.num_pieces * sums_size_, [&](int64_t i) { merge(i); });
    for (int64_t r = 0; r < code_.num_reductions; ++r) {
      const EdgeReduction& reduction = code_.reductions[r];
      if (reduction.is_outer()) {
        sum_slots<T>(outer_.get() + total_begin_[r], num_groups_, outer_size_,
                     width_of(reduction) * heads_of(reduction),
                     static_cast<T*>(outputs_[reduction.out]));
      }
      if (reduction.kind != EdgeReductionKind::kTotal) continue;
      sum_slots<T>(totals_.get() + total_begin_[r], num_tasks_ + num_cut, totals_size_,
                   width_of(reduction), static_cast<T*>(outputs_[reduction.out]));
    }
  }

 private:
  int64_t width_of(const EdgeReduction& reduction) const {
    return code_.slots[reduction.value].width;
  }

  // Whether a row has anything of a reduction until all of its edges are known.
  static bool has_state(const EdgeReduction& reduction) {
    return reduction.kind != EdgeReductionKind::kEdge && !reduction.is_outer();
  }

  // How many numbers a row has for a reduction until all of its edges are known.
  int64_t state_size(const EdgeReduction& reduction) const {
    const int64_t width = width_of(reduction);
    if (reduction.is_softmax()) return RunningSoftmax<A>::size(width, heads_of(reduction));
    return (reduction.is_extremum() ? 2 : 1) * width;
  }

  // The width of scores, or of the second value of outer products.
  int64_t heads_of(const EdgeReduction& softmax) const { return code_.slots[softmax.factor].width; }

  RunningSoftmax<A> softmax(const EdgeReduction& reduction, A* own) const {
    return {own, width_of(reduction), heads_of(reduction)};
  }

  // Tasks that add to the same sums of outer products, one after the other. Of few such sums all
  // are in memory at once.
  static int64_t groups(const EdgeCode& code, int64_t num_tasks) {
    return code.has_outer() ? std::min(num_tasks, kMostGroups) : num_tasks;
  }

  void run_group(int64_t group) {
    std::vector<OuterSum<A>> outer;
    for (int64_t r = 0; r < code_.num_reductions; ++r) {
      const EdgeReduction& reduction = code_.reductions[r];
      if (!reduction.is_outer()) continue;
      outer.emplace_back(width_of(reduction), heads_of(reduction),
                         outer_.get() + group * outer_size_ + total_begin_[r]);
    }
    const int64_t end = (group + 1) * num_tasks_ / num_groups_;
    for (int64_t i = group * num_tasks_ / num_groups_; i < end; ++i) run(i, outer.data());
    for (auto& sum : outer) sum.finish();
  }

  void run(int64_t number, OuterSum<A>* outer) {
    const Task& task = schedule_.tasks[number];
    Registers registers(graph_, code_, layout_, operands_);
    const auto sums = scratch<A>(sums_size_);
    A* const totals = totals_.get() + number * totals_size_;
    std::fill_n(totals, totals_size_, A{});
    for (int64_t place = task.place_begin; place < task.place_end; ++place) {
      const int64_t row = graph_.row(place);
      const EntryRange entries = task.entries(graph_, place);
      if (entries.empty()) {
        clear(row);
        continue;
      }
      const int64_t count = entries.end - entries.begin;
      registers.begin_row(row, std::min(layout_.block, count));
      begin(sums.get());
      for (int64_t e = entries.begin; e < entries.end; e += layout_.block) {
        const int64_t edges = std::min(layout_.block, entries.end - e);
        registers.put_edges(e, edges, task.entry_end);
        registers.run_block(edges);
        reduce(registers, e, edges, sums.get(), outer);
      }
      if (task.whole()) {
        finish(registers, row, count, sums.get(), totals);
      } else {
        piece_entries_[task.piece] = count;
        std::memcpy(partial_.get() + task.piece * sums_size_, sums.get(), sums_size_ * sizeof(A));
      }
    }
  }

  // What a row begins with.
  void begin(A* sums) const {
    for (int64_t r = 0; r < code_.num_reductions; ++r) {
      const EdgeReduction& reduction = code_.reductions[r];
      if (!has_state(reduction)) continue;
      const int64_t width = width_of(reduction);
      A* const own = sums + begin_[r];
      if (reduction.is_softmax()) {
        softmax(reduction, own).begin();
      } else if (!reduction.is_extremum()) {
        std::fill_n(own, width, A{});
      } else {
        std::fill_n(own, width, -std::numeric_limits<A>::infinity());
        std::fill_n(own + width, width, A{});  // as bits, the number 0
      }
    }
  }

  void reduce(Registers& registers, int64_t first, int64_t edges, A* sums,
              OuterSum<A>* outer) const {
    for (int64_t r = 0; r < code_.num_reductions; ++r) {
      const EdgeReduction& reduction = code_.reductions[r];
      A* const own = sums + begin_[r];
      if (reduction.kind == EdgeReductionKind::kEdge) {
        write(registers, reduction, results_[r], first, edges);
      } else if (reduction.is_extremum()) {
        const A sign = reduction.kind == EdgeReductionKind::kMax ? A{1} : A{-1};
        if (reduction.record < 0) {
          extremum<false>(registers, reduction, sign, edges, own);
        } else {
          extremum<true>(registers, reduction, sign, edges, own);
        }
      } else if (reduction.is_softmax()) {
        const int32_t exponentials = reduction.row_factor;
        auto running = softmax(reduction, own);
        running.raise(registers.rows(reduction.factor), edges);
        registers.exponentials(reduction.factor, running.largest, exponentials, edges);
        running.add(registers.rows(exponentials), edges);
        add(registers, reduction.value, exponentials, edges, own);
      } else if (reduction.is_outer()) {
        outer++->add(registers.rows(reduction.value), registers.rows(reduction.factor), edges);
      } else {
        add(registers, reduction.value, reduction.factor, edges, own);
      }
      registers.have_expected();
    }
  }

  void write(const Registers& registers, const EdgeReduction& reduction, const Result<T>& result,
             int64_t first, int64_t edges) const {
    for (int64_t g = 0; g < edges; ++g) {
      registers.expect(g);
      const A* const value = registers.at(reduction.value, g);
      const ResultRow<T> row = result.row(graph_.edge(first + g));
      for_each_chunk<N, 1>(0, width_of(reduction), [&](auto chunk, int64_t f) {
        using C = decltype(chunk);
        for (int q = 0; q < C::kCount; ++q) {
          const int64_t c = f + q * C::kLanes;
          row.template store<C::kLanes>(c, load<C::kLanes>(value + c));
        }
      });
    }
  }

  // What the values of an edge are multiplied by: nothing, as many values, or one for each head.
  enum class Factor { kNone, kOfChannels, kOfHead };

  // sums += value * factor, edge by edge.
  static void add(const Registers& registers, int32_t value, int32_t factor, int64_t edges,
                  A* sums) {
    const int64_t width = registers.width(value);
    const A* const* const values = registers.rows(value);
    if (factor < 0) {
      return add<Factor::kNone>(registers, values, nullptr, 0, 0, width, edges, sums);
    }
    const A* const* const factors = registers.rows(factor);
    const int64_t heads = registers.width(factor);
    if (heads == width) {
      return add<Factor::kOfChannels>(registers, values, factors, 0, 0, width, edges, sums);
    }
    const int64_t of_head = width / heads;
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t begin = h * of_head;
      add<Factor::kOfHead>(registers, values, factors, h, begin, begin + of_head, edges, sums);
    }
  }

  // The same for the columns [begin, end), those of a head if its factor is one number.
  template <Factor kFactor>
  static void add(const Registers& registers, const A* const* values, const A* const* factors,
                  int64_t head, int64_t begin, int64_t end, int64_t edges, A* sums) {
    for_each_part<N, kVectorsOfChunk>(begin, end, [&](auto chunk, int64_t f) {
      using C = decltype(chunk);
      constexpr int kLane = C::kLanes;
      Vector<A, kLane> sum[C::kCount];
#pragma GCC unroll 16
      for (int q = 0; q < C::kCount; ++q) sum[q] = load<kLane>(sums + f + q * kLane);
      for (int64_t g = 0; g < edges; ++g) {
        if (f == 0) registers.expect(g);
        const A* value = values[g] + f;
        // GCC would keep the sum of f and the place of each vector in registers, and run out of
        // them.
        asm("" : "+r"(value));
        const A* const factor = kFactor == Factor::kNone ? nullptr : factors[g];
        const A one = kFactor == Factor::kOfHead ? factor[head] : A{1};
#pragma GCC unroll 16
        for (int q = 0; q < C::kCount; ++q) {
          const auto own = load<kLane>(value + q * kLane);
          if constexpr (kFactor == Factor::kNone) {
            sum[q] += own;
          } else if constexpr (kFactor == Factor::kOfHead) {
            sum[q] += one * own;
          } else {
            sum[q] += own * load<kLane>(factor + f + q * kLane);
          }
        }
      }
#pragma GCC unroll 16
      for (int q = 0; q < C::kCount; ++q) store<kLane>(sums + f + q * kLane, sum[q]);
    });
  }

  // The largest sign * value, and behind all of them how many edges attain it: none if it is NaN,
  // as nothing equals that.
  template <bool kTies>
  void extremum(const Registers& registers, const EdgeReduction& reduction, A sign, int64_t edges,
                A* sums) const {
    const int64_t width = width_of(reduction);
    const A* const* const values = registers.rows(reduction.value);
    auto* const ties = reinterpret_cast<Bits<A>*>(sums + width);
    for_each_part<N, 4>(0, width, [&](auto chunk, int64_t f) {
      using C = decltype(chunk);
      if (!extremum<C, kTies, false>(registers, values, sign, edges, f, sums, ties)) {
        extremum<C, kTies, true>(registers, values, sign, edges, f, sums, ties);
      }
    });
  }

  // The same for the columns of C that begin at f. Unless kNans, nothing is written and false is
  // returned if there may be a NaN.
  template <typename C, bool kTies, bool kNans>
  static bool extremum(const Registers& registers, const A* const* values, A sign, int64_t edges,
                       int64_t f, A* sums, Bits<A>* ties) {
    constexpr int kLane = C::kLanes;
    Vector<A, kLane> best[C::kCount];
    Vector<Bits<A>, kLane> count[C::kCount] = {};
    NanWatch<A, kLane, C::kCount> watch;
#pragma GCC unroll 16
    for (int q = 0; q < C::kCount; ++q) {
      best[q] = load<kLane>(sums + f + q * kLane);
      if constexpr (kTies) count[q] = load_raw<kLane>(ties + f + q * kLane);
    }
    for (int64_t g = 0; g < edges; ++g) {
      if (!kNans && f == 0) registers.expect(g);
      const A* const value = values[g] + f;
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

  // The results of a row, of so many edges.
  void finish(const Registers& registers, int64_t row, int64_t count, A* sums, A* totals) const {
    for (int64_t r = 0; r < code_.num_reductions; ++r) {
      const EdgeReduction& reduction = code_.reductions[r];
      const int64_t width = width_of(reduction);
      A* const own = sums + begin_[r];
      const A* const scale =
          reduction.row_factor < 0 ? nullptr : registers.at(reduction.row_factor, 0);
      switch (reduction.kind) {
        case EdgeReductionKind::kEdge:
        case EdgeReductionKind::kOuter: break;
        case EdgeReductionKind::kTotal:
          for (int64_t c = 0; c < width; ++c) {
            totals[total_begin_[r] + c] += scale ? scale[c] * own[c] : own[c];
          }
          break;
        case EdgeReductionKind::kSum: store_sum(results_[r].row(row), own, scale, 1, width); break;
        case EdgeReductionKind::kMean:
          store_sum(results_[r].row(row), own, scale, static_cast<A>(count), width);
          break;
        case EdgeReductionKind::kMax: store_extremum(reduction, row, own, A{1}, width); break;
        case EdgeReductionKind::kMin: store_extremum(reduction, row, own, A{-1}, width); break;
        case EdgeReductionKind::kSoftmax:
          store_softmax(reduction, row, softmax(reduction, own));
          if (reduction.out >= 0) store_sum(results_[r].row(row), own, nullptr, 1, width);
          break;
      }
    }
  }

  static void store_sum(const ResultRow<T>& out, const A* sums, const A* scale, A count,
                        int64_t width) {
    for_each_chunk<N, 1>(0, width, [&](auto chunk, int64_t f) {
      using C = decltype(chunk);
      for (int q = 0; q < C::kCount; ++q) {
        const int64_t c = f + q * C::kLanes;
        auto sum = load<C::kLanes>(sums + c);
        if (scale != nullptr) sum *= load<C::kLanes>(scale + c);
        if (count != 1) sum /= splat<A, C::kLanes>(count);
        out.template store<C::kLanes>(c, sum);
      }
    });
  }

  void store_extremum(const EdgeReduction& reduction, int64_t row, const A* best, A sign,
                      int64_t width) const {
    const auto* const counts = reinterpret_cast<const Bits<A>*>(best + width);
    T* const out = row_of<T>(reduction.out, row, width);
    int32_t* const ties = row_of<int32_t>(reduction.record, row, width);
    for (int64_t c = 0; c < width; ++c) {
      if (out != nullptr) store_one(out + c, sign * best[c]);
      // Where an extremum is 0 the zeros that upstream's output begins with take a share.
      if (ties != nullptr) ties[c] = static_cast<int32_t>(counts[c] + (best[c] == 0));
    }
  }

  // The records of a softmax, and its sums divided by the exponentials'.
  void store_softmax(const EdgeReduction& reduction, int64_t row, RunningSoftmax<A> own) const {
    T* const largest = row_of<T>(reduction.record, row, own.heads);
    T* const scale = row_of<T>(reduction.scale, row, own.heads);
    for (int64_t h = 0; h < own.heads; ++h) {
      const A inverse = A{1} / own.totals[h];
      for (int64_t c = 0; c < own.of_head; ++c) own.sums[h * own.of_head + c] *= inverse;
      // A gradient subtracts the number that is kept, which may have been rounded.
      const A kept = round_to<T, 1>(Vector<A, 1>{own.largest[h]})[0];
      if (largest != nullptr) store_one(largest + h, kept);
      if (scale == nullptr) continue;
      store_one(scale + h, is_half<T> ? inverse * std::exp(kept - own.largest[h]) : inverse);
    }
  }

  template <typename U>
  U* row_of(int32_t output, int64_t row, int64_t width) const {
    return output < 0 ? nullptr : static_cast<U*>(outputs_[output]) + row * width;
  }

  // The results of a row without edges.
  void clear(int64_t row) const {
    for (int64_t r = 0; r < code_.num_reductions; ++r) {
      const EdgeReduction& reduction = code_.reductions[r];
      if (!has_state(reduction) || reduction.kind == EdgeReductionKind::kTotal) continue;
      const int64_t width = width_of(reduction);
      if (T* const out = row_of<T>(reduction.out, row, width)) std::fill_n(out, width, T{});
      if (reduction.is_softmax()) {
        for (const int32_t record : {reduction.record, reduction.scale}) {
          T* const out = row_of<T>(record, row, heads_of(reduction));
          if (out != nullptr) std::fill_n(out, heads_of(reduction), T{});
        }
        continue;
      }
      if (auto* const ties = row_of<int32_t>(reduction.record, row, width)) {
        std::fill_n(ties, width, 0);
      }
    }
  }

  // The row that was cut, of its pieces in order.
  void merge(int64_t number) {
    const CutRow& cut = schedule_.cut_rows[number];
    Registers registers(graph_, code_, layout_, operands_);
    registers.begin_row(cut.row, 1);
    A* const totals = totals_.get() + (num_tasks_ + number) * totals_size_;
    std::fill_n(totals, totals_size_, A{});
    const auto sums = scratch<A>(sums_size_);
    begin(sums.get());
    int64_t count = 0;
    for (int64_t piece = cut.piece_begin; piece < cut.piece_end; ++piece) {
      combine(sums.get(), partial_.get() + piece * sums_size_);
      count += piece_entries_[piece];
    }
    finish(registers, cut.row, count, sums.get(), totals);
  }

  // Changes what is later.
  void combine(A* sums, A* later) const {
    for (int64_t r = 0; r < code_.num_reductions; ++r) {
      const EdgeReduction& reduction = code_.reductions[r];
      if (!has_state(reduction)) continue;
      const int64_t width = width_of(reduction);
      A* const own = sums + begin_[r];
      A* const other = later + begin_[r];
      if (reduction.is_softmax()) {
        softmax(reduction, own).combine(softmax(reduction, other));
        continue;
      }
      auto* const ties = reinterpret_cast<Bits<A>*>(own + width);
      const auto* const of_other = reinterpret_cast<const Bits<A>*>(other + width);
      for (int64_t c = 0; c < width; ++c) {
        if (!reduction.is_extremum()) {
          own[c] += other[c];
          continue;
        }
        Vector<A, 1> best{own[c]};
        Vector<Bits<A>, 1> count{ties[c]};
        take<true, true, 1>(Vector<A, 1>{other[c]}, Vector<Bits<A>, 1>{of_other[c]}, best, count);
        own[c] = best[0];
        ties[c] = count[0];
      }
    }
  }

  const OrderedCsr& graph_;
  const EdgeCode& code_;
  const T* const* operands_;
  void* const* outputs_;
  const EdgeLayout layout_;
  const Schedule schedule_;
  const int64_t num_tasks_, num_groups_;
  std::vector<int64_t> piece_entries_;
  std::vector<Result<T>> results_;
  std::vector<int64_t> begin_, total_begin_;  // of each reduction, in sums and in totals
  int64_t sums_size_ = 0, totals_size_ = 0, outer_size_ = 0;
  Scratch<A> partial_;  // the sums of each piece of a cut row
  Scratch<A> totals_;   // of each task, and of each row that was cut
  Scratch<A> outer_;    // sums of outer products, of each group of tasks
};

}  // namespace

template <typename T>
void edge_program(const OrderedCsr& graph, const EdgeCode& code, const T* const* operands,
                  void* const* outputs) {
  EdgeProgram<T>(graph, code, operands, outputs).run();
}

FASTGRAPH_INSTANTIATE(edge_program)

}  // namespace fastgraph
