// Dot products of the rows of two matrices that each entry of a sparse one joins.
#include <algorithm>

#include "cpu/kernels.h"
#include "fastgraph/dot.h"
#include "fastgraph/memory.h"
#include "fastgraph/parallel.h"
#include "fastgraph/schedule.h"

namespace fastgraph {

template <typename T>
void sddmm(const OrderedCsr& graph, const Accumulator<T>* row_scale, Matrix<const T> grad,
           Matrix<const T> x, T* out) {
  using A = Accumulator<T>;
  const Schedule schedule = make_schedule(graph);
  const int64_t work = graph.num_entries * (x.width + 1);
  for_each_task(schedule.tasks.size(), work, [&](int64_t i) {
    const Task& task = schedule.tasks[i];
    for (int64_t place = task.place_begin; place < task.place_end; ++place) {
      const int64_t row = graph.row(place);
      task.expect_next(graph, place, grad);
      const A scale = row_scale ? row_scale[row] : A{1};
      const EntryRange entries = task.entries(graph, place);
      for (int64_t e = entries.begin; e < entries.end; ++e) {
        if (e + kAhead < task.entry_end) prefetch(x.row(graph.col[e + kAhead]), x.width);
        const A value = dot(grad.row(row), x.row(graph.col[e]), x.width);
        store_one(out + graph.edge(e), scale * value);
      }
    }
  });
}

FASTGRAPH_INSTANTIATE(sddmm)

}  // namespace fastgraph
