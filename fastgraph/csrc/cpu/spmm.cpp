// Sums of the rows of x that the entries of a row lead to.
#include "cpu/kernels.h"
#include "cpu/panels.h"
#include "fastgraph/chunks.h"
#include "fastgraph/memory.h"
#include "fastgraph/partial_sums.h"
#include "fastgraph/result.h"
#include "fastgraph/schedule.h"

namespace fastgraph {
namespace {

// How many coefficients an entry has.
enum class Coefficients { kNone, kOne, kOfHeads };

// sum += coefficient[e] * x[col[e]] over the entries [begin, end), in order. With kOfHeads each
// entry has `stride` coefficients, and `head` tells which of them is that of a vector. `stop` is
// where the task ends: rows are prefetched across the end of this one.
template <typename C, Coefficients kCoefficients, typename T, typename V>
inline void add_entries(const T* x, int64_t width, const int32_t* col,
                        const Accumulator<T>* coefficient, int64_t stride,
                        const int64_t (&head)[C::kCount], int64_t begin, int64_t end, int64_t stop,
                        V (&sum)[C::kCount]) {
  for (int64_t e = begin; e < end; ++e) {
    if (e + kAhead < stop) prefetch<C::kWidth * sizeof(T)>(x + col[e + kAhead] * width);
    const T* source = x + col[e] * width;
    const Accumulator<T> one = kCoefficients == Coefficients::kOne ? coefficient[e] : 1;
#pragma GCC unroll 16
    for (int q = 0; q < C::kCount; ++q) {
      const V value = load<C::kLanes>(source + q * C::kLanes);
      if constexpr (kCoefficients == Coefficients::kNone) {
        sum[q] += value;
      } else if constexpr (kCoefficients == Coefficients::kOne) {
        sum[q] += one * value;
      } else {
        sum[q] += coefficient[e * stride + head[q]] * value;
      }
    }
  }
}

template <typename T>
struct Spmm {
  using A = Accumulator<T>;

  const OrderedCsr& graph;
  Matrix<const T> weight;  // of edges and heads
  const A* row_scale;
  const A* col_scale;
  int64_t heads;
  int64_t width;  // of all heads
  Result<T> out;
  A* partial;  // one row for each piece of a cut row

  bool has_coefficients() const { return weight.data != nullptr || col_scale != nullptr; }

  void fill_coefficients(const Task& task, A* coefficient) const {
    for (int64_t e = task.entry_begin; e < task.entry_end; ++e) {
      const A scale = col_scale ? col_scale[graph.col[e]] : A{1};
      A* of_entry = coefficient + (e - task.entry_begin) * heads;
      if (weight.data == nullptr) {
        *of_entry = scale;
        continue;
      }
      if (e + kAhead < task.entry_end) {
        prefetch(weight.row(graph.edge(e + kAhead)), heads);
      }
      const T* own = weight.row(graph.edge(e));
      for (int64_t h = 0; h < heads; ++h) of_entry[h] = scale * load_one(own + h);
    }
  }

  // One coefficient for an entry fits on the stack, those of heads need memory.
  void run(const Task& task, Matrix<const T> x) const {
    if (!has_coefficients()) return add_any_rows<Coefficients::kNone>(task, x, nullptr);
    if (heads == 1) {
      A coefficient[kMaxPiece];
      fill_coefficients(task, coefficient);
      return add_any_rows<Coefficients::kOne>(task, x, coefficient);
    }
    const auto coefficient = scratch<A>((task.entry_end - task.entry_begin) * heads);
    fill_coefficients(task, coefficient.get());
    add_rows<Coefficients::kOfHeads>(task, x, 0, coefficient.get());
  }

  // The same for the channels of a panel, from `first` on, with the coefficients of all entries.
  // There is one head.
  void run(const Task& task, Matrix<const T> panel, int64_t first, const A* coefficients) const {
    if (!has_coefficients()) return add_rows<Coefficients::kNone>(task, panel, first, nullptr);
    add_rows<Coefficients::kOne>(task, panel, first, coefficients + task.entry_begin);
  }

  template <Coefficients kCoefficients>
  void add_any_rows(const Task& task, Matrix<const T> x, const A* coefficient) const {
    switch (x.width) {
      case 1: return add_narrow_rows<kCoefficients, 1>(task, x, coefficient);
      case 2: return add_narrow_rows<kCoefficients, 2>(task, x, coefficient);
      default: return add_rows<kCoefficients>(task, x, 0, coefficient);
    }
  }

  // The sums of so few columns that what vectors need for each row and entry would take longer than
  // the additions. Their order, and so each bit, is that of wider rows.
  template <Coefficients kCoefficients, int W>
  void add_narrow_rows(const Task& task, Matrix<const T> x, const A* coefficient) const {
    for (int64_t place = task.place_begin; place < task.place_end; ++place) {
      const int64_t row = graph.row(place);
      const EntryRange entries = task.entries(graph, place);
      A sum[W] = {};
      for (int64_t e = entries.begin; e < entries.end; ++e) {
        const T* source = x.data + graph.col[e] * W;
        for (int f = 0; f < W; ++f) {
          if constexpr (kCoefficients == Coefficients::kNone) {
            sum[f] += load_one(source + f);
          } else {
            sum[f] += coefficient[e - task.entry_begin] * load_one(source + f);
          }
        }
      }
      const A scale = row_scale ? row_scale[row] : A{1};
      for (int f = 0; f < W; ++f) {
        if (task.whole()) {
          out.row(row).template store<1>(f, Vector<A, 1>{scale * sum[f]});
        } else {
          partial[task.piece * W + f] = sum[f];
        }
      }
    }
  }

  // The sums for the columns from `first` on, those of x. Heads that fill whole vectors are added
  // up side by side, others one by one.
  template <Coefficients kCoefficients>
  void add_rows(const Task& task, Matrix<const T> x, int64_t first, const A* coefficient) const {
    const int64_t of_head = width / heads;
    const int64_t range = heads == 1 || of_head % kLanes<T> == 0 ? x.width : of_head;
    const int64_t first_entry = task.entry_begin;
    const bool whole = task.whole();
    for (int64_t place = task.place_begin; place < task.place_end; ++place) {
      const int64_t row = graph.row(place);
      const EntryRange entries = task.entries(graph, place);
      const A scale = row_scale ? row_scale[row] : A{1};
      const ResultRow<T> target = out.row(row);
      const auto add_chunk = [&](auto chunk, int64_t f) {
        using C = decltype(chunk);
        int64_t head[C::kCount];
        if constexpr (kCoefficients == Coefficients::kOfHeads) {
          for (int q = 0; q < C::kCount; ++q) head[q] = (f + q * C::kLanes) / of_head;
        }
        Vector<A, C::kLanes> sum[C::kCount] = {};
        add_entries<C, kCoefficients>(x.data + f, x.width, graph.col + first_entry, coefficient,
                                      heads, head, entries.begin - first_entry,
                                      entries.end - first_entry, task.entry_end - first_entry, sum);
#pragma GCC unroll 16
        for (int q = 0; q < C::kCount; ++q) {
          const int64_t column = first + f + q * C::kLanes;
          if (whole) {
            target.template store<C::kLanes>(column, scale * sum[q]);
          } else {
            store<C::kLanes>(partial + task.piece * width + column, sum[q]);
          }
        }
      };
      for (int64_t begin = 0; begin < x.width; begin += range) {
        for_each_chunk<kLanes<T>, kVectorsOfChunk>(begin, begin + range, add_chunk);
      }
    }
  }

  void merge(const CutRow& cut) const {
    merge_pieces<T>(partial, cut, width, row_scale ? row_scale[cut.row] : A{1}, out);
  }
};

}  // namespace

template <typename T>
void spmm(const OrderedCsr& graph, Matrix<const T> weight, const Accumulator<T>* row_scale,
          const Accumulator<T>* col_scale, Matrix<const T> x, Matrix<T> out) {
  using A = Accumulator<T>;
  const int64_t heads = weight.data ? weight.width : 1;
  const Schedule schedule = make_schedule(graph);
  const auto partial = scratch<A>(schedule.num_pieces * x.width);
  const Result<T> result(Heads<T>{out.data, out.rows, heads, out.width / heads});
  const Spmm<T> op{graph, weight, row_scale, col_scale, heads, x.width, result, partial.get()};
  const int64_t work = graph.num_entries + graph.num_rows;  // for each column
  // Coefficients of heads would be read again for each panel, which takes what panels save.
  const int64_t channels = heads == 1 ? panel_channels(graph, x.width, sizeof(T)) : 0;
  if (channels == 0) {
    return run_schedule(
        schedule, work * x.width, x.width, [&](const Task& task) { op.run(task, x); },
        [&](const CutRow& cut) { op.merge(cut); });
  }
  const auto num_tasks = static_cast<int64_t>(schedule.tasks.size());
  const auto coefficients = scratch<A>(op.has_coefficients() ? graph.num_entries : 0);
  if (op.has_coefficients()) {
    for_each_task(num_tasks, work, [&](int64_t i) {
      const Task& task = schedule.tasks[i];
      op.fill_coefficients(task, &coefficients[task.entry_begin]);
    });
  }
  for_each_panel<T>(x, channels, [&](Matrix<const T> panel, int64_t first) {
    for_each_task(num_tasks, work * panel.width,
                  [&](int64_t i) { op.run(schedule.tasks[i], panel, first, coefficients.get()); });
  });
  for_each_task(static_cast<int64_t>(schedule.cut_rows.size()), schedule.num_pieces * x.width,
                [&](int64_t i) { op.merge(schedule.cut_rows[i]); });
}

FASTGRAPH_INSTANTIATE(spmm)

}  // namespace fastgraph
