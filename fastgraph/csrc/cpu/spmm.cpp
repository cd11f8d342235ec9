// Sums of the rows of x that the entries of a row lead to.
#include "cpu/kernels.h"
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
  Heads<const T> x;
  Result<T> out;
  A* partial;  // one row for each piece of a cut row

  int64_t width() const { return x.heads * x.width; }

  void fill_coefficients(const Task& task, A* coefficient) const {
    for (int64_t e = task.entry_begin; e < task.entry_end; ++e) {
      const A scale = col_scale ? col_scale[graph.col[e]] : A{1};
      A* of_entry = coefficient + (e - task.entry_begin) * x.heads;
      if (weight.data == nullptr) {
        *of_entry = scale;
        continue;
      }
      if (e + kAhead < task.entry_end) {
        prefetch(weight.row(graph.edge(e + kAhead)), x.heads);
      }
      const T* own = weight.row(graph.edge(e));
      for (int64_t h = 0; h < x.heads; ++h) of_entry[h] = scale * load_one(own + h);
    }
  }

  // One coefficient for an entry fits on the stack, those of heads need memory.
  void run(const Task& task) const {
    if (weight.data == nullptr && col_scale == nullptr) {
      return add_rows<Coefficients::kNone>(task, nullptr);
    }
    if (x.heads == 1) {
      A coefficient[kMaxPiece];
      fill_coefficients(task, coefficient);
      return add_rows<Coefficients::kOne>(task, coefficient);
    }
    const auto coefficient = scratch<A>((task.entry_end - task.entry_begin) * x.heads);
    fill_coefficients(task, coefficient.get());
    add_rows<Coefficients::kOfHeads>(task, coefficient.get());
  }

  // Heads that fill whole vectors are added up side by side, others one by one.
  template <Coefficients kCoefficients>
  void add_rows(const Task& task, const A* coefficient) const {
    const int64_t range = x.width % kLanes<T> == 0 ? width() : x.width;
    const int64_t first = task.entry_begin;
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
          for (int q = 0; q < C::kCount; ++q) head[q] = (f + q * C::kLanes) / x.width;
        }
        Vector<A, C::kLanes> sum[C::kCount] = {};
        add_entries<C, kCoefficients>(x.data + f, width(), graph.col + first, coefficient, x.heads,
                                      head, entries.begin - first, entries.end - first,
                                      task.entry_end - first, sum);
#pragma GCC unroll 16
        for (int q = 0; q < C::kCount; ++q) {
          const int64_t column = f + q * C::kLanes;
          if (whole) {
            target.template store<C::kLanes>(column, scale * sum[q]);
          } else {
            store<C::kLanes>(partial + task.piece * width() + column, sum[q]);
          }
        }
      };
      for (int64_t begin = 0; begin < width(); begin += range) {
        for_each_chunk<kLanes<T>, kVectorsOfChunk>(begin, begin + range, add_chunk);
      }
    }
  }

  void merge(const CutRow& cut) const {
    merge_pieces<T>(partial, cut, width(), row_scale ? row_scale[cut.row] : A{1}, out);
  }
};

}  // namespace

template <typename T>
void spmm(const OrderedCsr& graph, Matrix<const T> weight, const Accumulator<T>* row_scale,
          const Accumulator<T>* col_scale, Matrix<const T> x, Matrix<T> out) {
  const int64_t heads = weight.data ? weight.width : 1;
  const Schedule schedule = make_schedule(graph);
  const auto partial = scratch<Accumulator<T>>(schedule.num_pieces * x.width);
  const Spmm<T> op{graph,
                   weight,
                   row_scale,
                   col_scale,
                   {x.data, x.rows, heads, x.width / heads},
                   Result<T>(Heads<T>{out.data, out.rows, heads, out.width / heads}),
                   partial.get()};
  const int64_t work = (graph.num_entries + graph.num_rows) * x.width;
  run_schedule(
      schedule, work, x.width, [&](const Task& task) { op.run(task); },
      [&](const CutRow& cut) { op.merge(cut); });
}

FASTGRAPH_INSTANTIATE(spmm)

}  // namespace fastgraph
