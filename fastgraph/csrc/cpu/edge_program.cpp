// Edge programs: an interpreter of instructions on registers that hold a few edges each, and
// reductions of what these leave. Nothing of the size of edges times channels is stored.
#include "cpu/edge_program.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "cpu/edge_registers.h"
#include "cpu/edge_rows.h"
#include "cpu/edge_sums.h"
#include "cpu/kernels.h"
#include "cpu/reused.h"
#include "cpu/running_softmax.h"
#include "fastgraph/partial_sums.h"
#include "fastgraph/result.h"
#include "fastgraph/schedule.h"

namespace fastgraph {
namespace {

// Of tasks, where there are sums of outer products, and the least edges of one.
constexpr int64_t kMostGroups = 64;
constexpr int64_t kLeastOfGroup = 512;

template <typename T>
class EdgeProgram {
 public:
  using A = Accumulator<T>;
  using Registers = EdgeRegisters<T>;
  using Sums = EdgeSums<T>;
  using Kept = typename Sums::Kept;
  using Whole = typename Sums::Whole;
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
        num_groups_(groups(code, num_tasks_, graph.num_entries)),
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
      begin_.push_back(code.goes_on(r - 1) ? begin_.back() : sums_size_);
      total_begin_.push_back(is_outer ? outer_size_ : totals_size_);
      if (is_outer) {
        outer_size_ += width * code.slots[reduction.factor].width;
        continue;
      }
      if (!is_of_edges && !code.goes_on(r)) sums_size_ += state_size(reduction);
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
    Reused<Work> works;
    for_each_task(num_groups_, (graph_.num_entries + graph_.num_rows) * work, [&](int64_t group) {
      auto own = works.take([&] { return std::make_unique<Work>(*this); });
      run_group(group, *own);
      works.give(std::move(own));
    });
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

  // What a thread computes with.
  struct Work {
    explicit Work(const EdgeProgram& of)
        : registers(of.graph_, of.code_, of.layout_, of.operands_),
          sums(scratch<A>(kMostEdges * of.sums_size_)) {}

    Registers registers;
    Scratch<A> sums;  // of each row of a block
    EdgeRows rows;
  };

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
  // are in memory at once, where there are few edges no more than their rows take.
  static int64_t groups(const EdgeCode& code, int64_t num_tasks, int64_t num_entries) {
    if (!code.has_outer()) return num_tasks;
    return std::min({num_tasks, kMostGroups, num_entries / kLeastOfGroup + 1});
  }

  void run_group(int64_t group, Work& own) {
    std::vector<OuterSum<A>> outer;
    for (int64_t r = 0; r < code_.num_reductions; ++r) {
      const EdgeReduction& reduction = code_.reductions[r];
      if (!reduction.is_outer()) continue;
      outer.emplace_back(width_of(reduction), heads_of(reduction),
                         outer_.get() + group * outer_size_ + total_begin_[r]);
    }
    const int64_t end = (group + 1) * num_tasks_ / num_groups_;
    for (int64_t i = group * num_tasks_ / num_groups_; i < end; ++i) run(i, own, outer.data());
    for (auto& sum : outer) sum.finish();
  }

  void run(int64_t number, Work& own, OuterSum<A>* outer) {
    const Task& task = schedule_.tasks[number];
    A* const totals = totals_.get() + number * totals_size_;
    std::fill_n(totals, totals_size_, A{});
    for (int64_t place = task.place_begin; place < task.place_end;) {
      const EntryRange entries = task.entries(graph_, place);
      if (entries.empty()) {
        clear(graph_.row(place++));
      } else if (!task.whole() || entries.end - entries.begin > layout_.block) {
        run_long(task, place++, own, totals, outer);
      } else {
        place = run_short(task, place, own, totals, outer);
      }
    }
  }

  // A row, or a piece of one, with more edges than a block.
  void run_long(const Task& task, int64_t place, Work& own, A* totals, OuterSum<A>* outer) {
    const int64_t row = graph_.row(place);
    const EntryRange entries = task.entries(graph_, place);
    const int64_t count = entries.end - entries.begin;
    A* const sums = own.sums.get();
    own.rows.clear();
    own.rows.add(row, layout_.block);
    own.registers.begin_rows(own.rows);
    begin(sums);
    for (int64_t e = entries.begin; e < entries.end; e += layout_.block) {
      const int64_t edges = std::min(layout_.block, entries.end - e);
      own.registers.put_edges(e, edges);
      own.registers.run_block(edges);
      reduce(own.registers, e, edges, sums, outer);
    }
    if (task.whole()) {
      finish(own.registers, row, count, sums, totals);
    } else {
      piece_entries_[task.piece] = count;
      std::memcpy(partial_.get() + task.piece * sums_size_, sums, sums_size_ * sizeof(A));
    }
  }

  // The row at a place, and as many of those behind it as fit into a block. The place that comes
  // next.
  int64_t run_short(const Task& task, int64_t place, Work& own, A* totals, OuterSum<A>* outer) {
    const int64_t first = graph_.rowptr[place];
    own.rows.clear();
    for (; place < task.place_end; ++place) {
      const EntryRange entries = task.entries(graph_, place);
      const int64_t edges = entries.end - entries.begin;
      if (own.rows.edges + edges > layout_.block) break;
      const int64_t row = graph_.row(place);
      if (edges == 0) {
        clear(row);
      } else {
        own.rows.add(row, edges);
      }
    }
    for (int64_t next = place; next < std::min(place + own.rows.count, task.place_end); ++next) {
      own.registers.expect_row(graph_.row(next));
    }
    own.registers.begin_rows(own.rows);
    own.registers.put_edges(first, own.rows.edges);
    own.registers.run_block(own.rows.edges);
    reduce(own, first, totals, outer);
    return place;
  }

  // What a row begins with.
  void begin(A* sums) const {
    for (int64_t r = 0; r < code_.num_reductions; ++r) {
      if (has_state(code_.reductions[r])) begin(code_.reductions[r], sums + begin_[r]);
    }
  }

  void begin(const EdgeReduction& reduction, A* own) const {
    const int64_t width = width_of(reduction);
    if (reduction.is_softmax()) {
      softmax(reduction, own).begin();
    } else if (!reduction.is_extremum()) {
      std::fill_n(own, width, A{});
    } else {
      std::fill_n(own, width, -std::numeric_limits<A>::infinity());
      std::fill_n(own + width, width, A{});  // as bits, the number 0
    }
  }

  // Goes on with a long row.
  void reduce(Registers& registers, int64_t first, int64_t edges, A* sums,
              OuterSum<A>* outer) const {
    for (int64_t r = 0; r < code_.num_reductions; ++r) {
      const EdgeReduction& reduction = code_.reductions[r];
      A* const own = sums + begin_[r];
      if (reduction.kind == EdgeReductionKind::kEdge) {
        write(registers, reduction, results_[r], first, edges);
      } else if (reduction.is_extremum()) {
        Sums::extremum(registers, reduction, 0, edges, own);
      } else if (reduction.is_softmax()) {
        auto running = softmax(reduction, own);
        running.raise(registers.rows(reduction.factor), edges);
        const A* largest[kMostEdges];
        std::fill_n(largest, edges, running.largest);
        registers.exponentials(reduction.factor, largest, reduction.row_factor, edges);
        running.add(registers.rows(reduction.row_factor), edges);
        Sums::add(registers, reduction.value, reduction.row_factor, 0, edges, Kept{own});
      } else if (reduction.is_outer()) {
        outer++->add(registers.rows(reduction.value), registers.rows(reduction.factor), edges);
      } else {
        Sums::add(registers, reduction.value, reduction.factor, 0, edges, Kept{own});
      }
      registers.have_expected();
    }
  }

  // The results of short rows.
  void reduce(Work& own, int64_t first, A* totals, OuterSum<A>* outer) const {
    Registers& registers = own.registers;
    const EdgeRows& rows = own.rows;
    for (int64_t r = 0; r < code_.num_reductions; ++r) {
      const EdgeReduction& reduction = code_.reductions[r];
      if (reduction.kind == EdgeReductionKind::kEdge) {
        write(registers, reduction, results_[r], first, rows.edges);
      } else if (reduction.is_outer()) {
        outer++->add(registers.rows(reduction.value), registers.rows(reduction.factor), rows.edges);
      } else if (reduction.is_softmax()) {
        weigh(own, reduction, results_[r], own.sums.get() + begin_[r]);
      } else {
        for (int64_t i = 0; i < rows.count; ++i) reduce_row(own, r, i, totals);
      }
      registers.have_expected();
    }
  }

  // The row at a place in a block.
  void reduce_row(Work& own, int64_t r, int64_t place, A* totals) const {
    const EdgeReduction& reduction = code_.reductions[r];
    const int64_t row = own.rows.row[place], begin = own.rows.begin[place];
    const int64_t edges = own.rows.begin[place + 1] - begin;
    A* const sums = own.sums.get() + place * sums_size_ + begin_[r];
    if (code_.goes_on(r - 1) || code_.goes_on(r)) {
      if (!code_.goes_on(r - 1)) this->begin(reduction, sums);
      Sums::add(own.registers, reduction.value, reduction.factor, begin, edges, Kept{sums});
      if (code_.goes_on(r)) return;
      Sums::store_sum(sums, whole(own.registers, reduction, results_[r], begin, row, edges),
                      width_of(reduction));
      return;
    }
    if (reduction.kind == EdgeReductionKind::kSum || reduction.kind == EdgeReductionKind::kMean) {
      Sums::add(own.registers, reduction.value, reduction.factor, begin, edges,
                whole(own.registers, reduction, results_[r], begin, row, edges));
      return;
    }
    this->begin(reduction, sums);
    if (reduction.is_extremum()) {
      Sums::extremum(own.registers, reduction, begin, edges, sums);
      store_extremum(reduction, row, sums, width_of(reduction));
    } else {
      Sums::add(own.registers, reduction.value, reduction.factor, begin, edges, Kept{sums});
      add_total(r, row_factor(own.registers, reduction, begin), sums, totals);
    }
  }

  // Softmaxes of short rows.
  void weigh(Work& own, const EdgeReduction& reduction, const Result<T>& result, A* sums) const {
    Registers& registers = own.registers;
    const EdgeRows& rows = own.rows;
    const A* largest[kMostEdges];
    const A* const* const scores = registers.rows(reduction.factor);
    for (int64_t i = 0; i < rows.count; ++i) {
      const int64_t begin = rows.begin[i], edges = rows.begin[i + 1] - begin;
      auto state = softmax(reduction, sums + i * sums_size_);
      state.begin(scores + begin, edges);
      std::fill_n(largest + begin, edges, state.largest);
    }
    registers.exponentials(reduction.factor, largest, reduction.row_factor, rows.edges);
    const A* const* const exponentials = registers.rows(reduction.row_factor);
    for (int64_t i = 0; i < rows.count; ++i) {
      const int64_t begin = rows.begin[i], edges = rows.begin[i + 1] - begin;
      A* const state = sums + i * sums_size_;
      softmax(reduction, state).add(exponentials + begin, edges);
      Sums::add(registers, reduction.value, reduction.row_factor, begin, edges, Kept{state});
      store_softmax(reduction, rows.row[i], softmax(reduction, state), result);
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

  // Of a row that has so many edges, one of which is at a place of the block.
  Whole whole(const Registers& registers, const EdgeReduction& reduction, const Result<T>& result,
              int64_t place, int64_t row, int64_t edges) const {
    const bool is_mean = reduction.kind == EdgeReductionKind::kMean;
    return {result.row(row), row_factor(registers, reduction, place),
            is_mean ? static_cast<A>(edges) : A{1}};
  }

  // What the sums of a row are multiplied by, one of whose edges is at a place of the block.
  const A* row_factor(const Registers& registers, const EdgeReduction& reduction,
                      int64_t place) const {
    return reduction.row_factor < 0 ? nullptr : registers.at(reduction.row_factor, place);
  }

  // The results of a long row, of so many edges.
  void finish(const Registers& registers, int64_t row, int64_t count, A* sums, A* totals) const {
    for (int64_t r = 0; r < code_.num_reductions; ++r) {
      const EdgeReduction& reduction = code_.reductions[r];
      if (code_.goes_on(r)) continue;
      A* const own = sums + begin_[r];
      switch (reduction.kind) {
        case EdgeReductionKind::kEdge:
        case EdgeReductionKind::kOuter: break;
        case EdgeReductionKind::kTotal:
          add_total(r, row_factor(registers, reduction, 0), own, totals);
          break;
        case EdgeReductionKind::kSum:
        case EdgeReductionKind::kMean:
          Sums::store_sum(own, whole(registers, reduction, results_[r], 0, row, count),
                          width_of(reduction));
          break;
        case EdgeReductionKind::kMax:
        case EdgeReductionKind::kMin:
          store_extremum(reduction, row, own, width_of(reduction));
          break;
        case EdgeReductionKind::kSoftmax:
          store_softmax(reduction, row, softmax(reduction, own), results_[r]);
          break;
      }
    }
  }

  void add_total(int64_t r, const A* scale, const A* sums, A* totals) const {
    A* const total = totals + total_begin_[r];
    for (int64_t c = 0; c < width_of(code_.reductions[r]); ++c) {
      total[c] += scale ? scale[c] * sums[c] : sums[c];
    }
  }

  void store_extremum(const EdgeReduction& reduction, int64_t row, const A* best,
                      int64_t width) const {
    const auto* const counts = reinterpret_cast<const Bits<A>*>(best + width);
    const A sign = Sums::sign_of(reduction);
    T* const out = row_of<T>(reduction.out, row, width);
    int32_t* const ties = row_of<int32_t>(reduction.record, row, width);
    for_each_part<N, 1>(0, width, [&](auto chunk, int64_t c) {
      constexpr int kLane = decltype(chunk)::kLanes;
      const auto found = load<kLane>(best + c);
      if (out != nullptr) store<kLane>(out + c, sign * found);
      if (ties == nullptr) return;
      // Where an extremum is 0 the zeros that upstream's output begins with take a share.
      const auto count = load_raw<kLane>(counts + c) - (found == Vector<A, kLane>{});
      for (int k = 0; k < kLane; ++k) ties[c + k] = static_cast<int32_t>(count[k]);
    });
  }

  // The records of a softmax, and its sums divided by the exponentials'.
  void store_softmax(const EdgeReduction& reduction, int64_t row, RunningSoftmax<A> own,
                     const Result<T>& result) const {
    T* const largest = row_of<T>(reduction.record, row, own.heads);
    T* const scale = row_of<T>(reduction.scale, row, own.heads);
    own.finish();
    for_each_part<N, 1>(0, own.heads, [&](auto chunk, int64_t h) {
      constexpr int kLane = decltype(chunk)::kLanes;
      // A gradient subtracts the number that is kept, which may have been rounded.
      const auto most = load<kLane>(own.largest + h), kept = round_to<T, kLane>(most);
      auto inverse = load<kLane>(own.totals + h);
      if (largest != nullptr) store<kLane>(largest + h, kept);
      if (is_half<T>) inverse *= exponential<A, kLane>(kept - most);
      if (scale != nullptr) store<kLane>(scale + h, inverse);
    });
    if (reduction.out < 0) return;
    Sums::store_sum(own.sums, Whole{result.row(row), nullptr, A{1}}, width_of(reduction));
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
    EdgeRows rows;
    rows.clear();
    rows.add(cut.row, 1);
    registers.begin_rows(rows);
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
      if (!has_state(reduction) || code_.goes_on(r)) continue;
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
        Sums::template take<true, true, 1>(Vector<A, 1>{other[c]}, Vector<Bits<A>, 1>{of_other[c]},
                                           best, count);
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
