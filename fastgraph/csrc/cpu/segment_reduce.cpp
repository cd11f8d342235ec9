// Maxima and minima of the rows of x that the entries of a row lead to.
#include <algorithm>
#include <limits>

#include "cpu/kernels.h"
#include "fastgraph/chunks.h"
#include "fastgraph/memory.h"
#include "fastgraph/nan_watch.h"
#include "fastgraph/parallel.h"
#include "fastgraph/partial_sums.h"
#include "fastgraph/result.h"
#include "fastgraph/schedule.h"

namespace fastgraph {
namespace {

// What is recorded beside the extremum itself.
enum class Record { kNothing, kTies, kWinner };

// Vectors of a row that are reduced at once: more where that leaves registers.
template <Record kRecord>
constexpr int kVectors =
    kRecord == Record::kNothing && kVectorBytes == 64 ? 2 * kVectorsOfChunk : kVectorsOfChunk;

// The running extremum of one chunk. A minimum is the negated maximum of negated values, which
// is exact. A NaN replaces everything, a later NaN an earlier one, and a tie keeps the earlier.
template <typename A, int N, Record kRecord>
struct Running {
  using V = Vector<A, N>;
  using I = Vector<Bits<A>, N>;

  V best;
  I record;  // how many values equal best, or which edge it came from

  void reset() {
    best = splat<A, N>(-std::numeric_limits<A>::infinity());
    record = splat<Bits<A>, N>(kRecord == Record::kWinner ? -1 : 0);
  }

  // Unless kNans, value is a number.
  template <bool kNans>
  void update(V value, I value_record) {
    I take = value > best;
    if constexpr (kNans) take |= value != value;
    if constexpr (kRecord == Record::kTies) record = value == best ? record + value_record : record;
    if constexpr (kRecord != Record::kNothing) record = take ? value_record : record;
    best = kNans ? (take ? value : best) : larger<A, N>(value, best);
  }
};

template <typename T>
struct Extremum {
  using A = Accumulator<T>;

  const OrderedCsr& graph;
  const T* weight;
  A sign;
  Matrix<const T> x;
  Result<T> out;
  Result<int32_t> record;
  A* partial_best;
  int32_t* partial_record;

  void fill_coefficients(const Task& task, A* coefficient) const {
    for (int64_t e = task.entry_begin; e < task.entry_end; ++e) {
      coefficient[e - task.entry_begin] = weight ? sign * load_one(weight + graph.edge(e)) : sign;
    }
  }

  // Where the results of a row go.
  struct Target {
    ResultRow<T> out;
    ResultRow<int32_t> record;
  };

  template <Record kRecord>
  Target target(int64_t row) const {
    if constexpr (kRecord == Record::kNothing) return {out.row(row), {nullptr, false}};
    return {out.row(row), record.row(row)};
  }

  // The extremum of the columns of C that begin at f, over some entries of a row.
  // Unless kNans, nothing is written and false is returned if there may be a NaN.
  template <typename C, bool kWeighted, Record kRecord, bool kNans>
  bool reduce(const Task& task, const A* coefficient, Target target, EntryRange entries,
              int64_t f) const {
    constexpr int N = C::kLanes;
    const bool whole = task.whole();
    Running<A, N, kRecord> running[C::kCount];
    NanWatch<A, N, C::kCount> watch;
#pragma GCC unroll 16
    for (int q = 0; q < C::kCount; ++q) running[q].reset();
    for (int64_t e = entries.begin; e < entries.end; ++e) {
      const T* source = x.row(graph.col[e]) + f;
      const T* expected = e + kAhead < task.entry_end ? x.row(graph.col[e + kAhead]) + f : source;
      const Bits<A> edge = kRecord == Record::kWinner ? graph.edge(e) : 1;
      const auto edges = splat<Bits<A>, N>(edge);
#pragma GCC unroll 16
      for (int q = 0; q < C::kCount; ++q) {
        // Line by line: many at once would wait for each other.
        if (q * N * sizeof(T) % kCacheLine == 0) prefetch<kCacheLine>(expected + q * N);
        Vector<A, N> value = load<N>(source + q * N);
        if constexpr (kWeighted) {
          value *= coefficient[e - task.entry_begin];
          // Messages that upstream would have stored in T tie after that rounding.
          if constexpr (kRecord != Record::kWinner) value = round_to<T, N>(value);
        }
        running[q].template update<kNans>(value, edges);
        if constexpr (!kNans) watch.see(q, value);
      }
    }
    if (!kNans && watch.noticed()) return false;
#pragma GCC unroll 16
    for (int q = 0; q < C::kCount; ++q) {
      const int64_t column = f + q * N;
      if (whole) {
        finish<N, kRecord>(target, column, entries.empty(), running[q]);
      } else {
        const int64_t at = task.piece * x.width + column;
        store<N>(partial_best + at, running[q].best);
        store_raw<N>(partial_record + at, as_int32<N>(running[q].record));
      }
    }
    return true;
  }

  template <bool kWeighted, Record kRecord>
  void run(const Task& task) const {
    A coefficient[kWeighted ? kMaxPiece : 1];
    if (kWeighted) fill_coefficients(task, coefficient);
    for (int64_t place = task.place_begin; place < task.place_end; ++place) {
      const Target own = target<kRecord>(graph.row(place));
      const EntryRange entries = task.entries(graph, place);
      for_each_chunk<kLanes<T>, kVectors<kRecord>>(0, x.width, [&](auto chunk, int64_t f) {
        using C = decltype(chunk);
        if (!reduce<C, kWeighted, kRecord, false>(task, coefficient, own, entries, f)) {
          reduce<C, kWeighted, kRecord, true>(task, coefficient, own, entries, f);
        }
      });
    }
  }

  template <int N>
  static Vector<int32_t, N> as_int32(Vector<Bits<A>, N> value) {
    return __builtin_convertvector(value, Vector<int32_t, N>);
  }

  template <int N, Record kRecord>
  void finish(Target target, int64_t column, bool empty, Running<A, N, kRecord> r) const {
    using I = typename Running<A, N, kRecord>::I;
    if (empty) r.best = splat<A, N>(0);
    target.out.template store<N>(column, sign * r.best);
    if constexpr (kRecord == Record::kTies) {
      // A NaN equals nothing; a zero ties with the zero that upstream's output starts from.
      I ties = r.record & (r.best == r.best);
      if (!empty) ties -= (r.best == splat<A, N>(0));
      target.record.template store<N>(column, as_int32<N>(ties));
    } else if constexpr (kRecord == Record::kWinner) {
      target.record.template store<N>(column, as_int32<N>(r.record));
    }
  }

  template <Record kRecord>
  void merge(const CutRow& cut) const {
    using R = Running<A, 1, kRecord>;
    const Target own = target<kRecord>(cut.row);
    for (int64_t f = 0; f < x.width; ++f) {
      R running;
      running.reset();
      for (int64_t piece = cut.piece_begin; piece < cut.piece_end; ++piece) {
        const int64_t at = piece * x.width + f;
        running.template update<true>(typename R::V{partial_best[at]},
                                      typename R::I{partial_record[at]});
      }
      finish<1, kRecord>(own, f, false, running);
    }
  }

  template <Record kRecord>
  void run(const Schedule& schedule) const {
    const bool weighted = weight || sign < 0;
    const int64_t work = (graph.num_entries + graph.num_rows) * x.width;
    run_schedule(
        schedule, work, x.width,
        [&](const Task& task) { weighted ? run<true, kRecord>(task) : run<false, kRecord>(task); },
        [&](const CutRow& cut) { merge<kRecord>(cut); });
  }
};

template <typename T>
struct ExtremumBackward {
  using A = Accumulator<T>;

  const OrderedCsr& graph;  // the transpose: a row of it is a row of x
  const T* weight;
  Matrix<const T> x;
  Matrix<const T> out;
  Matrix<const T> grad;
  const int32_t* winner;
  Result<T> grad_x;
  A* partial;

  // The gradient of the columns of C that begin at f, over some entries of a row.
  template <typename C, bool kWinner, bool kWeighted>
  void reduce(const Task& task, int64_t own_row, EntryRange entries, int64_t f) const {
    constexpr int N = C::kLanes;
    using V = Vector<A, N>;
    using I = Vector<Bits<A>, N>;
    const bool whole = task.whole();
    const ResultRow<T> target = grad_x.row(own_row);
    V own[C::kCount], sum[C::kCount];
#pragma GCC unroll 16
    for (int q = 0; q < C::kCount; ++q) {
      own[q] = load<N>(x.row(own_row) + f + q * N);
      sum[q] = V{};
    }
    for (int64_t e = entries.begin; e < entries.end; ++e) {
      if (e + kAhead < task.entry_end) {
        const int64_t ahead = graph.col[e + kAhead];
        if constexpr (kWinner) {
          prefetch<C::kWidth * sizeof(int32_t)>(winner + ahead * x.width + f);
        } else {
          prefetch<C::kWidth * sizeof(T)>(out.row(ahead) + f);
        }
        prefetch<C::kWidth * sizeof(T)>(grad.row(ahead) + f);
      }
      const int64_t row = graph.col[e];
      const int64_t edge = graph.edge(e);
      const A w = kWeighted ? load_one(weight + edge) : A{1};
#pragma GCC unroll 16
      for (int q = 0; q < C::kCount; ++q) {
        const int64_t column = f + q * N;
        if constexpr (kWinner) {
          const auto winners = load_raw<N>(winner + row * x.width + column);
          const I won = __builtin_convertvector(winners, I) == splat<Bits<A>, N>(edge);
          const V g = load<N>(grad.row(row) + column);
          sum[q] += won ? (kWeighted ? w * g : g) : V{};
        } else {
          const V value = kWeighted ? round_to<T, N>(w * own[q]) : own[q];
          const I won = value == load<N>(out.row(row) + column);
          // A product, not a choice, because upstream's 0 * inf is NaN.
          const V one_or_zero = won ? splat<A, N>(1) : V{};
          const V g = load<N>(grad.row(row) + column);
          sum[q] = kWeighted ? sum[q] + w * (one_or_zero * g)
                             : multiply_add<A, N>(one_or_zero, g, sum[q]);
        }
      }
    }
#pragma GCC unroll 16
    for (int q = 0; q < C::kCount; ++q) {
      const int64_t column = f + q * N;
      if (whole) {
        target.template store<N>(column, sum[q]);
      } else {
        store<N>(partial + task.piece * x.width + column, sum[q]);
      }
    }
  }

  template <bool kWinner, bool kWeighted>
  void run(const Task& task) const {
    for (int64_t place = task.place_begin; place < task.place_end; ++place) {
      const int64_t row = graph.row(place);
      const EntryRange entries = task.entries(graph, place);
      task.expect_next(graph, place, x);
      for_each_chunk<kLanes<T>, kVectorsOfChunk>(0, x.width, [&](auto chunk, int64_t f) {
        reduce<decltype(chunk), kWinner, kWeighted>(task, row, entries, f);
      });
    }
  }
};

// Rows of so many entries on average have few winners among them: as many as channels, at most.
constexpr int64_t kManyEntries = 32;

// Channels are what threads share then.
constexpr int64_t kLeastPanels = 4;

// The gradient of the winners where they are few: each is added to the row of x that its edge leads
// from, and what has not won is not read. A task has the channels of one cache line, so that tasks
// never write to the same place, and every sum has its terms in the order of the rows of grad.
template <typename T>
struct WinnerGradients {
  using A = Accumulator<T>;

  static constexpr int64_t kOfPanel = kCacheLine / sizeof(A);

  const OrderedCsr& graph;  // the transpose
  const T* weight;
  Matrix<const T> grad;
  const int32_t* winner;
  Matrix<T> grad_x;
  int32_t* source;  // of each edge, written by find_sources()

  static int64_t num_panels(int64_t width) { return (width + kOfPanel - 1) / kOfPanel; }

  static bool is_faster(const Csr& transpose, int64_t width) {
    return transpose.num_entries >= kManyEntries * transpose.num_cols &&
           num_panels(width) >= kLeastPanels;
  }

  void find_sources(const Task& task) const {
    for (int64_t place = task.place_begin; place < task.place_end; ++place) {
      const EntryRange entries = task.entries(graph, place);
      const auto row = static_cast<int32_t>(graph.row(place));
      for (int64_t e = entries.begin; e < entries.end; ++e) source[graph.edge(e)] = row;
    }
  }

  void run(int64_t panel) const {
    const int64_t first = panel * kOfPanel, count = std::min(kOfPanel, grad.width - first);
    const auto sums = scratch<A>(grad_x.rows * kOfPanel);
    std::fill_n(sums.get(), grad_x.rows * kOfPanel, A{0});
    for (int64_t row = 0; row < grad.rows; ++row) {
      const int32_t* winners = winner + row * grad.width + first;
      const T* gradients = grad.row(row) + first;
      for (int64_t i = 0; i < count; ++i) {
        const int64_t edge = winners[i];
        // Empty rows have none; no other number is written here, but anyone may have passed one.
        if (edge < 0 || edge >= graph.num_entries) continue;
        const A gradient = load_one(gradients + i);
        sums[source[edge] * kOfPanel + i] += weight ? load_one(weight + edge) * gradient : gradient;
      }
    }
    for (int64_t row = 0; row < grad_x.rows; ++row) {
      T* target = grad_x.row(row) + first;
      for (int64_t i = 0; i < count; ++i) store_one(target + i, sums[row * kOfPanel + i]);
    }
  }
};

// Maxima whose gradient goes to one edge each.
template <typename T>
void winners_backward(const OrderedCsr& transpose, const T* weight, Matrix<const T> grad,
                      const int32_t* winner, Matrix<T> grad_x) {
  const auto source = scratch<int32_t>(transpose.num_entries);
  const WinnerGradients<T> op{transpose, weight, grad, winner, grad_x, source.get()};
  const Schedule schedule = make_schedule(transpose);
  for_each_task(static_cast<int64_t>(schedule.tasks.size()), transpose.num_entries,
                [&](int64_t i) { op.find_sources(schedule.tasks[i]); });
  for_each_task(op.num_panels(grad.width), grad.rows * grad.width,
                [&](int64_t panel) { op.run(panel); });
}

}  // namespace

template <typename T>
void segment_reduce(const OrderedCsr& graph, const T* weight, bool is_max, Matrix<const T> x,
                    Matrix<T> out, int32_t* ties, int32_t* winner) {
  using A = Accumulator<T>;
  int32_t* record = ties ? ties : winner;
  const Matrix<int32_t> records{record, record ? out.rows : 0, out.width};
  const Schedule schedule = make_schedule(graph);
  const auto partial_best = scratch<A>(schedule.num_pieces * x.width);
  const auto partial_record = scratch<int32_t>(schedule.num_pieces * x.width);
  const Extremum<T> op{graph,
                       weight,
                       is_max ? A{1} : A{-1},
                       x,
                       Result<T>(out),
                       Result<int32_t>(records),
                       partial_best.get(),
                       partial_record.get()};
  if (ties) {
    op.template run<Record::kTies>(schedule);
  } else if (winner) {
    op.template run<Record::kWinner>(schedule);
  } else {
    op.template run<Record::kNothing>(schedule);
  }
}

template <typename T>
void divide_by_ties(Matrix<const T> grad, const int32_t* ties, Matrix<T> share) {
  using A = Accumulator<T>;
  constexpr int64_t kStep = 256;
  const Result<T> result(Matrix<T>{share.data, 1, share.rows * share.width});
  const ResultRow<T> target = result.row(0);
  for_each_task((grad.rows + kStep - 1) / kStep, grad.rows * grad.width, [&](int64_t step) {
    const int64_t begin = step * kStep * grad.width;
    const int64_t end = std::min(grad.rows, (step + 1) * kStep) * grad.width;
    for_each_chunk<kLanes<T>, 1>(begin, end, [&](auto chunk, int64_t first) {
      using C = decltype(chunk);
      constexpr int N = C::kLanes;
      for (int64_t i = first; i < first + C::kWidth; i += N) {
        const auto record = load_raw<N>(ties + i);
        const auto shares = record < 0 ? splat<int32_t, N>(1) : record;
        const auto count = __builtin_convertvector(shares, Vector<A, N>);
        target.template store<N>(i, load<N>(grad.data + i) / count);
      }
    });
  });
}

template <typename T>
void segment_reduce_backward(const OrderedCsr& transpose, const T* weight, Matrix<const T> x,
                             Matrix<const T> out, Matrix<const T> grad, const int32_t*,
                             const int32_t* winner, Matrix<T> grad_x) {
  using A = Accumulator<T>;
  if (winner && WinnerGradients<T>::is_faster(transpose, x.width)) {
    return winners_backward<T>(transpose, weight, grad, winner, grad_x);
  }
  const Schedule schedule = make_schedule(transpose);
  const auto partial = scratch<A>(schedule.num_pieces * x.width);
  const ExtremumBackward<T> op{transpose,         weight,       x, out, grad, winner,
                               Result<T>(grad_x), partial.get()};
  const int64_t work = (transpose.num_entries + transpose.num_rows) * x.width;
  run_schedule(
      schedule, work, x.width,
      [&](const Task& task) {
        if (winner) {
          weight ? op.template run<true, true>(task) : op.template run<true, false>(task);
        } else {
          weight ? op.template run<false, true>(task) : op.template run<false, false>(task);
        }
      },
      [&](const CutRow& cut) { merge_pieces<T>(op.partial, cut, x.width, A{1}, op.grad_x); });
}

FASTGRAPH_INSTANTIATE(segment_reduce)
FASTGRAPH_INSTANTIATE(segment_reduce_backward)
FASTGRAPH_INSTANTIATE(divide_by_ties)

}  // namespace fastgraph
