#include "cpu/kernels.h"
#include "fastgraph/dot.h"
#include "fastgraph/memory.h"
#include "fastgraph/parallel.h"
#include "fastgraph/schedule.h"

namespace fastgraph {

template <typename T>
void sddmm(const Csr& graph, const Accumulator<T>* row_scale, Matrix<const T> grad,
           Matrix<const T> x, T* out) {
  using A = Accumulator<T>;
  const Schedule schedule = make_schedule(graph);
  const int64_t work = graph.num_entries * (x.width + 1);
  for_each_task(schedule.tasks.size(), work, [&](int64_t i) {
    const Task& task = schedule.tasks[i];
    for (int64_t row = task.row_begin; row < task.row_end; ++row) {
      const A scale = row_scale ? row_scale[row] : A{1};
      const int64_t begin = std::max(graph.rowptr[row], task.entry_begin);
      const int64_t end = std::min(graph.rowptr[row + 1], task.entry_end);
      for (int64_t e = begin; e < end; ++e) {
        if (e + kAhead < task.entry_end) {
          const T* next = x.row(graph.col[e + kAhead]);
          for (int64_t f = 0; f < x.width; f += kCacheLine / sizeof(T)) prefetch<1>(next + f);
        }
        const A value = dot(grad.row(row), x.row(graph.col[e]), x.width);
        store_one(out + graph.edge(e), scale * value);
      }
    }
  });
}

FASTGRAPH_INSTANTIATE(sddmm)

}  // namespace fastgraph
