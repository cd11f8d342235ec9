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

// The dot products of `count` pairs of rows, known to the whole group.
template <int kValues, int kLanes, typename T>
__device__ void find_dots(const T* const (&a)[kInFlight], const T* const (&b)[kInFlight], int count,
                          int64_t width, Lanes<kLanes> lanes, Accumulator<T> (&dots)[kInFlight]) {
  using Share = RowShare<T, kValues, kLanes, 1>;
#pragma unroll
  for (int u = 0; u < kInFlight; ++u) dots[u] = 0;
  for (int64_t first = 0; first < width; first += Share::kWidth) {
    Share left[kInFlight], right[kInFlight];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const int64_t rest = u < count ? width - first : 0;
      left[u].load(a[u] + first, lanes.lane, rest);
      right[u].load(b[u] + first, lanes.lane, rest);
    }
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) dots[u] += left[u].at(0, i) * right[u].at(0, i);
    }
  }
#pragma unroll
  for (int u = 0; u < kInFlight; ++u) dots[u] = lanes.sum(dots[u]);
}

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
  for (int64_t base = span.begin; base < span.end; base += kLanes) {
    const int count = static_cast<int>(min(span.end - base, static_cast<int64_t>(kLanes)));
    const int64_t entry = base + min(lanes.lane, count - 1);
    const int32_t own_col = __ldg(op.graph.col + entry);
    A own = 0;
    for (int j = 0; j < count; j += kInFlight) {
      const T *grad[kInFlight], *x[kInFlight];
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        const int source = min(j + u, count - 1);
        grad[u] = op.grad.row(span.row);
        x[u] = op.x.row(lanes.from(own_col, source));
      }
      A dots[kInFlight];
      find_dots<kValues>(grad, x, count - j, op.x.width, lanes, dots);
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        if (lanes.lane == j + u) own = dots[u];
      }
    }
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
  const bool packed = fits_packs<T>(x.width, {grad.data, x.data});
  return with_split<T>(x.width, packed, [&](auto split) {
    return run<split.kValues, split.kLanes>(op, queue.stream());
  });
}

FASTGRAPH_INSTANTIATE(sddmm)

}  // namespace fastgraph::cuda
