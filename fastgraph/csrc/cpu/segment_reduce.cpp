// Maxima and minima of the rows of x that the entries of a row lead to.
#include <algorithm>
#include <limits>
#include <type_traits>

#include "cpu/kernels.h"
#include "fastgraph/chunks.h"
#include "fastgraph/memory.h"
#include "fastgraph/nan_watch.h"
#include "fastgraph/parallel.h"
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

// How many shares a record of ties stands for: ~edge says which edge alone has the only one.
template <typename I>
FASTGRAPH_INLINE I num_shares(I record) {
  return record < 0 ? record - record + 1 : record;
}

// The running extremum of one chunk. A minimum is the negated maximum of negated values, which
// is exact. A NaN replaces everything, a later NaN an earlier one, and a tie keeps the earlier.
template <typename A, int N, Record kRecord>
struct Running {
  using V = Vector<A, N>;
  using I = Vector<Bits<A>, N>;

  V best;
  I record;  // which edge best came from; of ties, ~edge or how many values equal it

  void reset() {
    best = splat<A, N>(-std::numeric_limits<A>::infinity());
    record = splat<Bits<A>, N>(kRecord == Record::kWinner ? -1 : 0);
  }

  // For entries, one by one; counted() comes after the last. Unless kNans, value is a number.
  template <bool kNans>
  void update(V value, I value_record) {
    if constexpr (kRecord == Record::kTies) {
      // The first one that equals what a search starts from counts as two.
      const I more = record + 1;
      record = value == best ? (more > 2 ? more : splat<Bits<A>, N>(2)) : record;
    }
    replace<kNans>(value, value_record);
  }
  void counted() {
    if constexpr (kRecord == Record::kTies) {
      record += (best == splat<A, N>(-std::numeric_limits<A>::infinity())) & (record > 0);
    }
  }

  // For what was found of other entries, all of which come later.
  void merge(V later_best, I later_record) {
    if constexpr (kRecord == Record::kTies) {
      record = later_best == best ? num_shares(record) + num_shares(later_record) : record;
    }
    replace<true>(later_best, later_record);
  }

 private:
  template <bool kNans>
  void replace(V value, I value_record) {
    I take = value > best;
    if constexpr (kNans) take |= value != value;
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

  // What an entry has in the columns of C that begin at f goes into the search `running`.
  template <typename C, bool kWeighted, Record kRecord, bool kNans, typename Watch>
  FASTGRAPH_INLINE void see(const Task& task, const A* coefficient, int64_t e, int64_t f,
                            Running<A, C::kLanes, kRecord>* running, Watch& watch,
                            int watched) const {
    constexpr int N = C::kLanes;
    const T* source = x.row(graph.col[e]) + f;
    const T* expected = e + kAhead < task.entry_end ? x.row(graph.col[e + kAhead]) + f : source;
    const Bits<A> edge = kRecord == Record::kNothing ? 0 : graph.edge(e);
    const auto edges = splat<Bits<A>, N>(kRecord == Record::kTies ? ~edge : edge);
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
      if constexpr (!kNans) watch.see(watched + q, value);
    }
  }

  // The extremum of the columns of C that begin at f, over some entries of a row. As each
  // comparison waits for the one before, a single vector has two searches, side by side, of half
  // the entries each. Unless kNans, nothing is written and false is returned if there may be a NaN.
  template <typename C, bool kWeighted, Record kRecord, bool kNans>
  bool reduce(const Task& task, const A* coefficient, Target target, EntryRange entries,
              int64_t f) const {
    constexpr int N = C::kLanes, kSearches = C::kCount == 1 ? 2 : 1;
    const bool whole = task.whole();
    Running<A, N, kRecord> running[kSearches][C::kCount];
    NanWatch<A, N, kSearches * C::kCount> watch;
#pragma GCC unroll 16
    for (int q = 0; q < kSearches * C::kCount; ++q) running[q / C::kCount][q % C::kCount].reset();
    const int64_t share = (entries.end - entries.begin) / kSearches;
    for (int64_t i = 0; i < share; ++i) {
#pragma GCC unroll 2
      for (int s = 0; s < kSearches; ++s) {
        see<C, kWeighted, kRecord, kNans>(task, coefficient, entries.begin + s * share + i, f,
                                          running[s], watch, s);
      }
    }
    for (int64_t e = entries.begin + kSearches * share; e < entries.end; ++e) {
      constexpr int kLast = kSearches - 1;
      see<C, kWeighted, kRecord, kNans>(task, coefficient, e, f, running[kLast], watch, kLast);
    }
    if (!kNans && watch.noticed()) return false;
#pragma GCC unroll 16
    for (int q = 0; q < C::kCount; ++q) {
      const int64_t column = f + q * N;
      Running<A, N, kRecord>& found = running[0][q];
      found.counted();
      if constexpr (kSearches == 2) {
        running[1][q].counted();
        found.merge(running[1][q].best, running[1][q].record);
      }
      if (whole) {
        finish<N, kRecord>(target, column, entries.empty(), found);
      } else {
        const int64_t at = task.piece * x.width + column;
        store<N>(partial_best + at, found.best);
        store_raw<N>(partial_record + at, as_int32<N>(found.record));
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
      if (!empty) ties = r.best == splat<A, N>(0) ? num_shares(ties) + 1 : ties;
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
        running.merge(typename R::V{partial_best[at]}, typename R::I{partial_record[at]});
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

template <typename A>
bool is_finite(A x) {
  return x - x == 0;
}

// The gradient, from what each row of grad has recorded. As a rule one edge has all of a value, and
// what has not won is not read. Tasks have some channels each, so that they never write to the same
// place, and every sum has its terms in the order of the rows of grad, however the channels are
// cut.
template <typename T, bool kSplits>
struct ExtremumBackward {
  using A = Accumulator<T>;

  // Channels are added in parts of what sums have in one cache line.
  static constexpr int64_t kOfLine = kCacheLine / sizeof(A);
  static constexpr int64_t kFewChannels = kOfLine / 4;

  // Sums that take no more than this stay in a core's own cache.
  static constexpr int64_t kBytesOfSums = 1 << 21;

  // Where sums are added to no more often, on average, it is not worth reading rows in parts.
  static constexpr int64_t kFewAdded = 4;

  // Rows with no more entries offer their gradients to each of them, a vector at once, instead of
  // looking for the one of each channel.
  static constexpr int64_t kFewEntries = 4;

  const Csr& graph;
  const T* weight;
  bool has_finite_weights;
  Matrix<const T> x;
  Matrix<const T> out;
  Matrix<const T> grad;
  const int32_t* record;
  const int32_t* entry;  // of each edge; null where that is its number
  Matrix<T> grad_x;

  // The sums of a task: `width` channels of all rows of x, from `first` on.
  template <typename Width>
  struct Panel {
    A* sums;
    int64_t first;
    Width width;
  };

  // All that a thread has where their sums stay in its cache, or are rarely used again, so that
  // rows are read once, and one line of sums elsewhere.
  int64_t channels_of_task() const {
    const int64_t shared = (grad.width + max_threads() - 1) / max_threads();
    const int64_t lines = (shared + kOfLine - 1) / kOfLine;
    const bool at_once = grad_x.rows * lines * kCacheLine <= kBytesOfSums ||
                         graph.num_entries <= kFewAdded * grad_x.rows;
    return at_once && lines > 1 ? lines * kOfLine : std::clamp(shared, kFewChannels, kOfLine);
  }

  // Whether the entries of a row have to be looked at: where several edges, or none, attain a value
  // of the line, or something is not finite, as upstream's 0 * inf is NaN.
  template <typename Width>
  FASTGRAPH_INLINE bool has_shares(const int32_t* records, const T* gradients, Width width) const {
    bool found = !has_finite_weights;
    for_each_part<kLanes<T>, 1>(0, width, [&](auto chunk, int64_t i) {
      constexpr int N = decltype(chunk)::kLanes;
      using I = Vector<Bits<A>, N>;
      const Vector<A, N> g = load<N>(gradients + i);
      const I known = __builtin_convertvector(load_raw<N>(records + i), I) < 0;
      found |= max_of<Bits<A>, N>(-(~known | (g - g != 0))) > 0;
    });
    return found;
  }

  // Adds what the entries of a row have of the gradient of `width` channels, which the panel has
  // from `begin` on: one by one, in their order. Without kShares one edge has all of a value.
  template <bool kShares, typename Columns, typename Width>
  void add_to_entries(const Panel<Columns>& panel, int64_t row, int64_t begin, Width width) const {
    const EntryRange entries{graph.rowptr[row], graph.rowptr[row + 1]};
    for_each_part<kLanes<T>, 1>(0, width, [&](auto chunk, int64_t i) {
      constexpr int N = decltype(chunk)::kLanes;
      using V = Vector<A, N>;
      using I = Vector<Bits<A>, N>;
      const int64_t column = panel.first + begin + i;
      const I recorded =
          __builtin_convertvector(load_raw<N>(record + row * grad.width + column), I);
      V share = load<N>(grad.row(row) + column), extremum{};
      if constexpr (kShares) {
        share = round_to<T, N>(share / __builtin_convertvector(num_shares(recorded), V));
        extremum = load<N>(out.row(row) + column);
      }
      for (int64_t e = entries.begin; e < entries.end; ++e) {
        const int64_t source = graph.col[e], edge = graph.edge(e);
        const A w = weight ? load_one(weight + edge) : A{1};
        const I wins = recorded == splat<Bits<A>, N>(kSplits ? ~edge : edge);
        V added;
        if constexpr (kShares) {
          if (e + kAhead < entries.end) {
            prefetch<kCacheLine>(x.row(graph.col[e + kAhead]) + column);
          }
          const V message = round_to<T, N>(w * load<N>(x.row(source) + column));
          const I attains = recorded < 0 ? wins : (recorded > 0) & (message == extremum);
          // Products, not a choice, because upstream's 0 * inf is NaN.
          const V one_or_zero = attains ? splat<A, N>(1) : V{};
          added = w * (one_or_zero * share);
        } else {
          added = wins ? w * share : V{};
        }
        A* sums = panel.sums + source * panel.width + begin + i;
        store<N>(sums, load<N>(sums) + added);
      }
    });
  }

  // Adds the gradients of a row to the sums of those edges that have won them.
  template <typename Columns, typename Width>
  void add_winners(const Panel<Columns>& panel, int64_t begin, Width width, const int32_t* records,
                   const T* gradients) const {
    for (int64_t i = 0; i < width; ++i) {
      const int64_t edge = kSplits ? ~records[i] : records[i];
      // Empty rows have none; no other number is written here, but anyone may have passed one.
      if (edge < 0 || edge >= graph.num_entries) continue;
      const int64_t source = graph.col[entry ? entry[edge] : edge];
      const A gradient = load_one(gradients + i);
      panel.sums[source * panel.width + begin + i] +=
          weight ? load_one(weight + edge) * gradient : gradient;
    }
  }

  // Asks for what leads from the edges of a row to their sources, where edges are numbered by rows.
  FASTGRAPH_INLINE void expect_sources(int64_t row) const {
    if (entry) return;
    constexpr int64_t kInts = kCacheLine / sizeof(int32_t), kMost = 16 * kInts;
    const int64_t begin = graph.rowptr[row];
    const int64_t end = std::min(graph.rowptr[row + 1], begin + kMost);
    for (int64_t e = begin; e < end; e += kInts) prefetch<kCacheLine>(graph.col + e);
  }

  template <typename Columns, typename Width>
  FASTGRAPH_INLINE void add_line(const Panel<Columns>& panel, int64_t row, int64_t begin,
                                 Width width) const {
    const int32_t* records = record + row * grad.width + panel.first + begin;
    const T* gradients = grad.row(row) + panel.first + begin;
    // One line of each row, of which the processor sees no pattern across pages.
    if (row + kAhead < grad.rows) {
      prefetch<kCacheLine>(records + kAhead * grad.width);
      prefetch<kCacheLine>(gradients + kAhead * grad.width);
    }
    if (kSplits && has_shares(records, gradients, width)) {
      add_to_entries<true>(panel, row, begin, width);
    } else if (graph.rowptr[row + 1] - graph.rowptr[row] <= kFewEntries) {
      add_to_entries<false>(panel, row, begin, width);
    } else {
      add_winners(panel, begin, width, records, gradients);
    }
  }

  template <typename Columns>
  void add_rows(const Panel<Columns>& panel) const {
    for (int64_t row = 0; row < grad.rows; ++row) {
      if (row + kAhead < grad.rows) expect_sources(row + kAhead);
      if (graph.rowptr[row] == graph.rowptr[row + 1]) continue;
      if constexpr (!std::is_same_v<Columns, int64_t>) {
        add_line(panel, row, 0, panel.width);
      } else {
        int64_t begin = 0;
        for (; begin + kOfLine <= panel.width; begin += kOfLine) {
          add_line(panel, row, begin, std::integral_constant<int64_t, kOfLine>{});
        }
        if (begin < panel.width) add_line(panel, row, begin, panel.width - begin);
      }
    }
  }

  // The gradient of some channels.
  void run(int64_t first, int64_t width) const {
    const bool in_place = std::is_same_v<T, A> && width == grad_x.width;
    const auto scratched = scratch<A>(in_place ? 0 : grad_x.rows * width);
    A* const sums = in_place ? reinterpret_cast<A*>(grad_x.data) : scratched.get();
    std::fill_n(sums, grad_x.rows * width, A{0});
    if (width == kOfLine) {
      using OfLine = std::integral_constant<int64_t, kOfLine>;
      add_rows(Panel<OfLine>{sums, first, OfLine{}});
    } else {
      add_rows(Panel<int64_t>{sums, first, width});
    }
    if (in_place) return;
    for (int64_t row = 0; row < grad_x.rows; ++row) {
      T* target = grad_x.row(row) + first;
      for (int64_t i = 0; i < width; ++i) store_one(target + i, sums[row * width + i]);
    }
  }

  void run() const {
    const int64_t channels = channels_of_task();
    for_each_task((grad.width + channels - 1) / channels, grad.rows * grad.width, [&](int64_t i) {
      run(i * channels, std::min(channels, grad.width - i * channels));
    });
  }
};

// The entry of each edge.
void find_entries(const Csr& graph, int32_t* entry) {
  constexpr int64_t kStep = 1 << 14;
  for_each_task((graph.num_entries + kStep - 1) / kStep, graph.num_entries, [&](int64_t step) {
    const int64_t end = std::min(graph.num_entries, (step + 1) * kStep);
    for (int64_t e = step * kStep; e < end; ++e) entry[graph.edge_id[e]] = static_cast<int32_t>(e);
  });
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
void segment_reduce_backward(const Csr& graph, const T* weight, Matrix<const T> x,
                             Matrix<const T> out, Matrix<const T> grad, const int32_t* ties,
                             const int32_t* winner, Matrix<T> grad_x) {
  const auto entry = scratch<int32_t>(graph.edge_id ? graph.num_entries : 0);
  if (graph.edge_id) find_entries(graph, entry.get());
  const int32_t* entries = graph.edge_id ? entry.get() : nullptr;
  bool finite = true;
  for (int64_t e = 0; weight && finite && e < graph.num_entries; ++e) {
    finite = is_finite(load_one(weight + e));
  }
  prefer_huge_pages(grad_x.data, grad_x.bytes());
  if (ties) {
    ExtremumBackward<T, true>{graph, weight, finite, x, out, grad, ties, entries, grad_x}.run();
  } else {
    ExtremumBackward<T, false>{graph, weight, finite, x, out, grad, winner, entries, grad_x}.run();
  }
}

FASTGRAPH_INSTANTIATE(segment_reduce)
FASTGRAPH_INSTANTIATE(segment_reduce_backward)

}  // namespace fastgraph
