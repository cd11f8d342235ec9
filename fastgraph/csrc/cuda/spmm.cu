// A group of lanes sums the entries of a row, or of a piece of a long one, for as many columns as
// it holds in registers; the grid's y direction covers the others.
#include "cuda/kernels.h"
#include "fastgraph/lanes.cuh"
#include "fastgraph/pieces.cuh"

namespace fastgraph::cuda {
namespace {

template <typename T>
struct Spmm {
  using A = Accumulator<T>;

  CutCsr graph;
  const T* weight;
  const A* row_scale;
  const A* col_scale;
  Matrix<const T> x;
  Matrix<T> out;
  Matrix<A> partial;  // a row for each piece
  unsigned part = 0;  // of the columns, where this grid begins
};

template <typename T>
__device__ Accumulator<T> coefficient(const Spmm<T>& op, int64_t entry, int32_t col) {
  const Accumulator<T> w = op.weight ? widened(op.weight[op.graph.edge(entry)]) : 1;
  return op.col_scale ? w * __ldg(op.col_scale + col) : w;
}

// sum += coefficient * x[col] over the entries of the span, in order. Each lane reads the column
// and the coefficient of one entry; the group then takes them one by one.
template <typename T, int kValues, int kLanes>
__device__ void add_entries(const Spmm<T>& op, const Span& span, int64_t first, Lanes<kLanes> lanes,
                            RowSums<Accumulator<T>, kValues, kLanes, 1>& sum) {
  using A = Accumulator<T>;
  const int64_t width = op.x.width;
  const GatheredRows<T, kValues> x(op.x.data, width, width, first + lanes.lane * kValues);
  for (int64_t base = span.begin; base < span.end; base += kLanes) {
    const int count = static_cast<int>(min(span.end - base, static_cast<int64_t>(kLanes)));
    const int64_t entry = base + min(lanes.lane, count - 1);
    const int32_t own_col = __ldg(op.graph.col + entry);
    const A own = coefficient(op, entry, own_col);
    for_each_consecutive<kInFlight>(count, [&](auto some) {
      constexpr int kCount = decltype(some)::kCount;
      Pack<T, kValues> rows[kCount];
      A factor[kCount];
#pragma unroll
      for (int u = 0; u < kCount; ++u) {
        rows[u] = x.load(lanes.from(own_col, some.first + u));
        factor[u] = lanes.from(own, some.first + u);
      }
#pragma unroll
      for (int u = 0; u < kCount; ++u) {
        sum.each([&](A& value, int, int i) { value += factor[u] * widened(rows[u].values[i]); });
      }
    });
  }
}

template <typename T, int kValues, int kLanes>
__global__ void __launch_bounds__(kBlockThreads) spmm_rows(Spmm<T> op) {
  const int64_t task = group_index<kLanes>();
  if (task >= op.graph.num_tasks) return;
  const Span span = span_of(op.graph, task);
  const auto lanes = Lanes<kLanes>::mine();
  const int64_t first = static_cast<int64_t>(op.part + blockIdx.y) * (kValues * kLanes);
  RowSums<Accumulator<T>, kValues, kLanes, 1> sum;
  sum.clear();
  add_entries(op, span, first, lanes, sum);
  const int64_t width = op.x.width - first;
  if (span.piece >= 0) {
    sum.store(op.partial.row(span.piece) + first, lanes.lane, width, 1);
  } else {
    const Accumulator<T> scale = op.row_scale ? op.row_scale[span.row] : 1;
    sum.store(op.out.row(span.row) + first, lanes.lane, width, scale);
  }
}

// The sums of rows that were cut, from those of their pieces.
template <typename T>
__global__ void __launch_bounds__(kBlockThreads) spmm_merge(Spmm<T> op) {
  for_each_merged(op.graph, op.out.width, [&](const CutRow& row, int64_t f) {
    Accumulator<T> sum = 0;
    for_each_piece(row, [&](int64_t piece) { sum += op.partial.row(piece)[f]; });
    const Accumulator<T> scale = op.row_scale ? op.row_scale[row.row] : 1;
    op.out.row(row.row)[f] = narrowed<T>(sum * scale);
  });
}

template <int kValues, int kLanes, typename T>
cudaError_t run(Spmm<T> op, Stream stream) {
  const auto blocks = static_cast<unsigned>(ceil_div(op.graph.num_tasks * kLanes, kBlockThreads));
  return for_each_grid<kValues * kLanes>(op.x.width, [&](unsigned part, unsigned parts) {
    op.part = part;
    return launch({"spmm_rows", {blocks, parts}, kBlockThreads, 0, stream},
                  spmm_rows<T, kValues, kLanes>, op);
  });
}

}  // namespace

template <typename T>
cudaError_t spmm(Queue& queue, const CutCsr& graph, Matrix<const T> weight,
                 const Accumulator<T>* row_scale, const Accumulator<T>* col_scale,
                 Matrix<const T> x, Matrix<T> out) {
  auto* partial = queue.scratch<Accumulator<T>>(graph.num_pieces * x.width);
  const Spmm<T> op{
      graph, weight.data, row_scale, col_scale, x, out, {partial, graph.num_pieces, x.width}};
  const bool packed = fits_packs<T>(x.width, x.data, out.data, partial);
  const cudaError_t error = with_split<T>(x.width, packed, [&](auto split) {
    return run<split.kValues, split.kLanes>(op, queue.stream());
  });
  if (error != cudaSuccess) return error;
  return launch({"spmm_merge", merge_grid(graph, x.width), kBlockThreads, 0, queue.stream()},
                spmm_merge<T>, op);
}

FASTGRAPH_INSTANTIATE(spmm)

}  // namespace fastgraph::cuda
