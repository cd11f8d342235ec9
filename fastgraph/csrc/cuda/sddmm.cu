// For each entry the dot product of two rows. A group of lanes takes the entries of a row, or of a
// piece of a long one.
#include "cuda/kernels.h"
#include "fastgraph/lanes.cuh"
#include "fastgraph/pieces.cuh"

namespace fastgraph::cuda {
namespace {

template <typename T>
struct Sddmm {
  using A = Accumulator<T>;

  CutCsr graph;
  const A* row_scale;
  Matrix<const T> grad;
  Matrix<const T> x;
  T* out;
};

// Each lane finds the column of one entry and writes its result; the group computes them, a few at
// a time.
template <typename T, int kValues, int kLanes>
__global__ void __launch_bounds__(kBlockThreads) sddmm_entries(Sddmm<T> op) {
  using A = Accumulator<T>;
  const int64_t task = group_index<kLanes>();
  if (task >= op.graph.num_tasks) return;
  const Span span = span_of(op.graph, task);
  const auto lanes = Lanes<kLanes>::mine();
  const A scale = op.row_scale ? __ldg(op.row_scale + span.row) : 1;
  const int64_t width = op.x.width;
  for (int64_t base = span.begin; base < span.end; base += kLanes) {
    const int count = static_cast<int>(min(span.end - base, static_cast<int64_t>(kLanes)));
    const int64_t entry = base + min(lanes.lane, count - 1);
    const int32_t own_col = __ldg(op.graph.col + entry);
    A own = 0;
    for_each_consecutive<kInFlight>(count, [&](auto some) {
      constexpr int kCount = decltype(some)::kCount;
      int32_t cols[kCount];
      A dots[kCount] = {};
#pragma unroll
      for (int u = 0; u < kCount; ++u) cols[u] = lanes.from(own_col, some.first + u);
#pragma unroll 1
      for (int64_t first = 0; first < width; first += kValues * kLanes) {
        const int64_t column = first + lanes.lane * kValues;
        const GatheredRows<T, kValues> grad(op.grad.data, width, width, column);
        const GatheredRows<T, kValues> x(op.x.data, width, width, column);
        const Pack<T, kValues> a = grad.load(span.row);
        Pack<T, kValues> b[kCount];
#pragma unroll
        for (int u = 0; u < kCount; ++u) b[u] = x.load(cols[u]);
#pragma unroll
        for (int u = 0; u < kCount; ++u) {
          A dot = 0;
#pragma unroll
          for (int i = 0; i < kValues; ++i) dot += widened(a.values[i]) * widened(b[u].values[i]);
          dots[u] += column < width ? dot : A{0};
        }
      }
#pragma unroll
      for (int u = 0; u < kCount; ++u) {
        const A dot = lanes.sum(dots[u]);
        if (lanes.lane == some.first + u) own = dot;
      }
    });
    if (lanes.lane >= count) continue;
    op.out[op.graph.edge(entry)] = narrowed<T>(scale * own);
  }
}

template <int kValues, int kLanes, typename T>
cudaError_t run(const Sddmm<T>& op, Stream stream) {
  const auto blocks = static_cast<unsigned>(ceil_div(op.graph.num_tasks * kLanes, kBlockThreads));
  return launch({"sddmm_entries", blocks, kBlockThreads, 0, stream},
                sddmm_entries<T, kValues, kLanes>, op);
}

}  // namespace

template <typename T>
cudaError_t sddmm(Queue& queue, const CutCsr& graph, const Accumulator<T>* row_scale,
                  Matrix<const T> grad, Matrix<const T> x, Matrix<T> out) {
  const Sddmm<T> op{graph, row_scale, grad, x, out.data};
  const bool packed = fits_packs<T>(x.width, grad.data, x.data);
  return with_split<T>(x.width, packed, [&](auto split) {
    return run<split.kValues, split.kLanes>(op, queue.stream());
  });
}

FASTGRAPH_INSTANTIATE(sddmm)

}  // namespace fastgraph::cuda
