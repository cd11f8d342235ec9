// Sums of the rows of x that the entries of a row lead to.
#include "cpu/kernels.h"
#include "fastgraph/chunks.h"
#include "fastgraph/memory.h"
#include "fastgraph/partial_sums.h"
#include "fastgraph/result.h"
#include "fastgraph/schedule.h"

namespace fastgraph {
namespace {

// sum += coefficient[e] * x[col[e]] over the entries [begin, end), in order. `stop` is where the
// task ends: rows are prefetched across the end of this one.
template <typename C, bool kWeighted, typename T, typename V>
inline void add_entries(const T* x, int64_t width, const int32_t* col,
                        const Accumulator<T>* coefficient, int64_t begin, int64_t end, int64_t stop,
                        V (&sum)[C::kCount]) {
  for (int64_t e = begin; e < end; ++e) {
    if (e + kAhead < stop) prefetch<C::kWidth * sizeof(T)>(x + col[e + kAhead] * width);
    const T* source = x + col[e] * width;
#pragma GCC unroll 16
    for (int q = 0; q < C::kCount; ++q) {
      const V value = load<C::kLanes>(source + q * C::kLanes);
      sum[q] += kWeighted ? coefficient[e] * value : value;
    }
  }
}

template <typename T>
struct Spmm {
  using A = Accumulator<T>;

  const OrderedCsr& graph;
  const T* weight;
  const A* row_scale;
  const A* col_scale;
  Matrix<const T> x;
  Result<T> out;
  A* partial;  // one row for each piece of a cut row

  void fill_coefficients(const Task& task, A* coefficient) const {
    for (int64_t e = task.entry_begin; e < task.entry_end; ++e) {
      const A w = weight ? load_one(weight + graph.edge(e)) : A{1};
      coefficient[e - task.entry_begin] = col_scale ? w * col_scale[graph.col[e]] : w;
    }
  }

  template <bool kWeighted>
  void run(const Task& task) const {
    A coefficient[kWeighted ? kMaxPiece : 1];
    if (kWeighted) fill_coefficients(task, coefficient);
    const int64_t first = task.entry_begin;
    const bool whole = task.whole();
    for (int64_t place = task.place_begin; place < task.place_end; ++place) {
      const int64_t row = graph.row(place);
      const EntryRange entries = task.entries(graph, place);
      const A scale = row_scale ? row_scale[row] : A{1};
      const ResultRow<T> target = out.row(row);
      for_each_chunk<kLanes<T>, kVectorsOfChunk>(0, x.width, [&](auto chunk, int64_t f) {
        using C = decltype(chunk);
        Vector<A, C::kLanes> sum[C::kCount] = {};
        add_entries<C, kWeighted>(x.data + f, x.width, graph.col + first, coefficient,
                                  entries.begin - first, entries.end - first,
                                  task.entry_end - first, sum);
#pragma GCC unroll 16
        for (int q = 0; q < C::kCount; ++q) {
          const int64_t column = f + q * C::kLanes;
          if (whole) {
            target.template store<C::kLanes>(column, scale * sum[q]);
          } else {
            store<C::kLanes>(partial + task.piece * x.width + column, sum[q]);
          }
        }
      });
    }
  }

  void merge(const CutRow& cut) const {
    merge_pieces<T>(partial, cut, x.width, row_scale ? row_scale[cut.row] : A{1}, out);
  }
};

}  // namespace

template <typename T>
void spmm(const OrderedCsr& graph, const T* weight, const Accumulator<T>* row_scale,
          const Accumulator<T>* col_scale, Matrix<const T> x, Matrix<T> out) {
  const Schedule schedule = make_schedule(graph);
  const auto partial = scratch<Accumulator<T>>(schedule.num_pieces * x.width);
  const Spmm<T> op{graph, weight, row_scale, col_scale, x, Result<T>(out), partial.get()};
  const int64_t work = (graph.num_entries + graph.num_rows) * x.width;
  run_schedule(
      schedule, work, x.width,
      [&](const Task& task) {
        weight || col_scale ? op.template run<true>(task) : op.template run<false>(task);
      },
      [&](const CutRow& cut) { op.merge(cut); });
}

FASTGRAPH_INSTANTIATE(spmm)

}  // namespace fastgraph
