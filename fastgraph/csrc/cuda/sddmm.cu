// For each entry the dot product of two rows. A group of lanes takes some consecutive entries,
// whatever rows they stand in, so that long rows need no cutting; entries of one row find its
// features in the cache.
#include "cuda/kernels.h"
#include "fastgraph/lanes.cuh"
#include "fastgraph/pieces.cuh"

namespace fastgraph::cuda {
namespace {

// Entries of a group: enough to be worth the search for the row of the first.
constexpr int64_t kTaken = 32;

template <typename T>
struct Sddmm {
  using A = Accumulator<T>;

  Csr graph;
  const A* row_scale;
  Matrix<const T> grad;
  Matrix<const T> x;
  T* out;
};

// The row in which an entry stands, found from an earlier row with steps that double.
inline __device__ int64_t row_from(const Csr& graph, int64_t row, int64_t entry) {
  int64_t step = 1;
  while (row + step < graph.num_rows && __ldg(graph.rowptr + row + step) <= entry) {
    row += step;
    step *= 2;
  }
  return row_between(graph, row, min(row + step, graph.num_rows) - 1, entry);
}

// Each lane finds the row and the column of one entry and writes its result; the group computes
// them, a few at a time.
template <typename T, int kValues, int kLanes>
__global__ void __launch_bounds__(kBlockThreads) sddmm_entries(Sddmm<T> op) {
  using A = Accumulator<T>;
  const int64_t begin = group_index<kLanes>() * kTaken;
  if (begin >= op.graph.num_entries) return;
  const auto lanes = Lanes<kLanes>::mine();
  const int64_t end = min(begin + kTaken, op.graph.num_entries), width = op.x.width;
  int64_t row = row_of(op.graph, begin);
  for (int64_t base = begin; base < end; base += kLanes) {
    const int count = static_cast<int>(min(end - base, static_cast<int64_t>(kLanes)));
    const int64_t entry = base + min(lanes.lane, count - 1);
    row = row_from(op.graph, row, entry);
    const auto own_row = static_cast<int32_t>(row);
    const int32_t own_col = __ldg(op.graph.col + entry);
    A own = 0;
    for_each_consecutive<kInFlight>(count, [&](auto some) {
      constexpr int kCount = decltype(some)::kCount;
      int32_t left[kCount], right[kCount];
      A dots[kCount] = {};
#pragma unroll
      for (int u = 0; u < kCount; ++u) {
        left[u] = lanes.from(own_row, some.first + u);
        right[u] = lanes.from(own_col, some.first + u);
      }
#pragma unroll 1
      for (int64_t first = 0; first < width; first += kValues * kLanes) {
        const int64_t column = first + lanes.lane * kValues;
        const GatheredRows<T, kValues> grad(op.grad.data, width, width, column);
        const GatheredRows<T, kValues> x(op.x.data, width, width, column);
        Pack<T, kValues> a[kCount], b[kCount];
#pragma unroll
        for (int u = 0; u < kCount; ++u) {
          a[u] = grad.load(left[u]);
          b[u] = x.load(right[u]);
        }
#pragma unroll
        for (int u = 0; u < kCount; ++u) {
          A dot = 0;
#pragma unroll
          for (int i = 0; i < kValues; ++i)
            dot += widened(a[u].values[i]) * widened(b[u].values[i]);
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
    const A scale = op.row_scale ? __ldg(op.row_scale + row) : 1;
    op.out[op.graph.edge(entry)] = narrowed<T>(scale * own);
  }
}

template <int kValues, int kLanes, typename T>
cudaError_t run(const Sddmm<T>& op, Stream stream) {
  const int64_t groups = ceil_div(op.graph.num_entries, kTaken);
  const auto blocks = static_cast<unsigned>(ceil_div(groups * kLanes, kBlockThreads));
  return launch({"sddmm_entries", blocks, kBlockThreads, 0, stream},
                sddmm_entries<T, kValues, kLanes>, op);
}

}  // namespace

template <typename T>
cudaError_t sddmm(Queue& queue, const Csr& graph, const Accumulator<T>* row_scale,
                  Matrix<const T> grad, Matrix<const T> x, Matrix<T> out) {
  const Sddmm<T> op{graph, row_scale, grad, x, out.data};
  const bool packed = fits_packs<T>(x.width, {grad.data, x.data});
  return with_split<T>(x.width, packed, [&](auto split) {
    return run<split.kValues, split.kLanes>(op, queue.stream());
  });
}

FASTGRAPH_INSTANTIATE(sddmm)

}  // namespace fastgraph::cuda
