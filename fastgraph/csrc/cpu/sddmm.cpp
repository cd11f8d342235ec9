#include "cpu/kernels.h"
#include "fastgraph/memory.h"
#include "fastgraph/parallel.h"
#include "fastgraph/schedule.h"

namespace fastgraph {
namespace {

constexpr int64_t kAhead = 8;

// The order of additions depends on the width alone.
template <typename T>
inline Accumulator<T> dot(const T* a, const T* b, int64_t width) {
  using A = Accumulator<T>;
  constexpr int kLane = kLanes<T>;
  constexpr int kChains = 4;  // independent sums, to hide the latency of an addition
  Vector<A, kLane> sum[kChains] = {};
  int64_t f = 0;
  for (; f + kChains * kLane <= width; f += kChains * kLane) {
#pragma GCC unroll 4
    for (int q = 0; q < kChains; ++q) {
      sum[q] += load<kLane>(a + f + q * kLane) * load<kLane>(b + f + q * kLane);
    }
  }
  for (; f + kLane <= width; f += kLane) sum[0] += load<kLane>(a + f) * load<kLane>(b + f);
  const Vector<A, kLane> lanes = (sum[0] + sum[1]) + (sum[2] + sum[3]);
  A total = 0;
  for (; f < width; ++f) total += load_one(a + f) * load_one(b + f);
  for (int lane = 0; lane < kLane; ++lane) total += lanes[lane];
  return total;
}

}  // namespace

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

template void sddmm(const Csr&, const float*, Matrix<const float>, Matrix<const float>, float*);
template void sddmm(const Csr&, const double*, Matrix<const double>, Matrix<const double>, double*);
template void sddmm(const Csr&, const float*, Matrix<const bfloat16>, Matrix<const bfloat16>,
                    bfloat16*);
template void sddmm(const Csr&, const float*, Matrix<const float16>, Matrix<const float16>,
                    float16*);

}  // namespace fastgraph
