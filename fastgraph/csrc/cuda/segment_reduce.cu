// A group of lanes finds the extrema of a row's entries, or of a piece of a long row, for as many
// columns as it holds in registers; the grid's y direction covers the others. The gradient is
// gathered in the same way over the transpose.
#include <type_traits>

#include "cuda/kernels.h"
#include "fastgraph/lanes.cuh"
#include "fastgraph/pieces.cuh"

namespace fastgraph::cuda {
namespace {

// What is recorded beside the extremum itself.
enum class Record { kNothing, kTies, kWinner };

// The running extremum of one column, and how many values equal it or which edge it came from. A
// minimum is the negated maximum of negated values, which is exact. A NaN replaces everything, a
// later NaN an earlier one, and a tie keeps the earlier.
template <typename A, Record kRecord>
struct Running {
  A best = -INFINITY;
  int32_t record = kRecord == Record::kWinner ? -1 : 0;

  __device__ void update(A value, int32_t value_record) {
    if (kRecord == Record::kTies && value == best) record += value_record;
    if (!(value > best || value != value)) return;
    best = value;
    record = value_record;
  }
};

template <typename T>
struct Extremum {
  using A = Accumulator<T>;

  Csr graph;
  int64_t pieces;
  const T* weight;
  A sign;
  Matrix<const T> x;
  Matrix<T> out;
  int32_t* record;
  Matrix<A> partial;  // a row for each piece
  int32_t* partial_record;
  unsigned part = 0;  // of the columns, where this grid begins
};

// Updates with sign * weight * x[col] of the entries of the span, in order. Each lane reads the
// column and the coefficient of one entry; the group then takes them one by one.
template <Record kRecord, int kValues, int kLanes, typename T, typename R>
__device__ void update_all(const Extremum<T>& op, const Span& span, int64_t first,
                           Lanes<kLanes> lanes, R (&running)[kValues]) {
  using A = Accumulator<T>;
  const T* x = op.x.data + first;
  const int64_t width = op.x.width;
  for (int64_t base = span.begin; base < span.end; base += kLanes) {
    const int count = static_cast<int>(min(span.end - base, static_cast<int64_t>(kLanes)));
    const int64_t entry = base + min(lanes.lane, count - 1);
    const int32_t own_col = __ldg(op.graph.col + entry);
    const bool needs_edge = kRecord == Record::kWinner || op.weight != nullptr;
    const auto own_edge = needs_edge ? static_cast<int32_t>(op.graph.edge(entry)) : 0;
    const A own = op.weight ? op.sign * widened(op.weight[own_edge]) : op.sign;
    for (int j = 0; j < count; j += kInFlight) {
      RowShare<T, kValues, kLanes, 1> rows[kInFlight];
      A factor[kInFlight];
      int32_t record[kInFlight];
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        const int source = min(j + u, count - 1);
        const int64_t col = lanes.from(own_col, source);
        factor[u] = lanes.from(own, source);
        record[u] = kRecord == Record::kWinner ? lanes.from(own_edge, source) : 1;
        rows[u].load(x + col * width, lanes.lane, j + u < count ? width - first : 0);
      }
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        if (j + u >= count) break;
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
          const A value = factor[u] * rows[u].at(0, i);
          // Messages that upstream would have stored in T tie after that rounding.
          running[i].update(kRecord == Record::kWinner ? value : rounded<T>(value), record[u]);
        }
      }
    }
  }
}

template <typename T, Record kRecord>
__device__ T finished_value(const Extremum<T>& op, bool empty,
                            const Running<Accumulator<T>, kRecord>& r) {
  return narrowed<T>(op.sign * (empty ? 0 : r.best));
}

// A NaN equals nothing; a zero ties with the zero that upstream's output starts from.
template <typename A, Record kRecord>
__device__ int32_t finished_record(bool empty, const Running<A, kRecord>& r) {
  if (kRecord == Record::kWinner) return r.record;
  return (r.best == r.best ? r.record : 0) + (!empty && r.best == 0 ? 1 : 0);
}

template <typename T, Record kRecord, int kValues, int kLanes>
__global__ void __launch_bounds__(kBlockThreads) extremum_rows(Extremum<T> op) {
  using R = Running<Accumulator<T>, kRecord>;
  const int64_t task = group_index<kLanes>();
  if (task >= op.pieces + op.graph.num_rows) return;
  const Span span = span_of(op.graph, task, op.pieces);
  if (span.row < 0) return;
  const auto lanes = Lanes<kLanes>::mine();
  const int64_t first = static_cast<int64_t>(op.part + blockIdx.y) * (kValues * kLanes);
  R running[kValues];
  update_all<kRecord>(op, span, first, lanes, running);
  const int64_t f = first + lanes.lane * kValues;
  if (f >= op.x.width) return;
  const bool empty = span.begin == span.end;
  Pack<int32_t, kValues> records;
  if (span.piece >= 0) {
    Pack<Accumulator<T>, kValues> bests;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      bests.values[i] = running[i].best;
      records.values[i] = running[i].record;
    }
    store_pack(op.partial.row(span.piece) + f, bests);
    if (kRecord != Record::kNothing) {
      store_pack(op.partial_record + span.piece * op.x.width + f, records);
    }
  } else {
    Pack<T, kValues> values;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      values.values[i] = finished_value(op, empty, running[i]);
      records.values[i] = finished_record(empty, running[i]);
    }
    store_pack(op.out.row(span.row) + f, values);
    if (kRecord != Record::kNothing) {
      store_pack(op.record + span.row * op.x.width + f, records);
    }
  }
}

// The extrema of long rows, from those of their pieces.
template <typename T, Record kRecord>
__global__ void __launch_bounds__(kBlockThreads) extremum_merge(Extremum<T> op) {
  for_each_long_row(op.graph, [&](int64_t row, int64_t begin, int64_t end) {
    const int64_t width = op.out.width;
    for (int64_t f = threadIdx.x; f < width; f += blockDim.x) {
      Running<Accumulator<T>, kRecord> running;
      for_each_piece(begin, end, [&](int64_t piece) {
        const bool recorded = kRecord != Record::kNothing;
        running.update(op.partial.row(piece)[f],
                       recorded ? op.partial_record[piece * width + f] : 0);
      });
      op.out.row(row)[f] = finished_value(op, false, running);
      if (kRecord != Record::kNothing) {
        op.record[row * width + f] = finished_record(false, running);
      }
    }
  });
}

template <typename T, int kValues>
__global__ void __launch_bounds__(kBlockThreads)
    divide_packs(const T* grad, const int32_t* ties, T* share, int64_t count) {
  const int64_t first = group_index<1>() * kValues;
  if (first >= count) return;
  auto pack = load_pack<kValues>(grad + first);
  const auto shares = load_pack<kValues>(ties + first);
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    const auto number = static_cast<Accumulator<T>>(shares.values[i]);
    pack.values[i] = narrowed<T>(widened(pack.values[i]) / number);
  }
  store_pack(share + first, pack);
}

template <typename T>
struct ExtremumBackward {
  using A = Accumulator<T>;

  Csr graph;  // the transpose: a row of it is a row of x
  int64_t pieces;
  const T* weight;
  Matrix<const T> x;
  Matrix<const T> out;
  Matrix<const T> grad;
  Matrix<const int32_t> winner;
  Matrix<T> grad_x;
  Matrix<A> partial;  // a row for each piece
  unsigned part = 0;  // of the columns, where this grid begins
};

// sum += what the entries of the span have won of their rows' gradients, in order.
template <bool kWinner, int kValues, int kLanes, typename T>
__device__ void add_shares(const ExtremumBackward<T>& op, const Span& span, int64_t first,
                           Lanes<kLanes> lanes, RowSums<Accumulator<T>, kValues, kLanes, 1>& sum) {
  using A = Accumulator<T>;
  // What tells whether a value has won: the edge that did, or the value that did.
  using Mark = std::conditional_t<kWinner, int32_t, T>;
  const Mark* mark;
  if constexpr (kWinner) {
    mark = op.winner.data + first;
  } else {
    mark = op.out.data + first;
  }
  const int64_t width = op.x.width;
  RowShare<T, kValues, kLanes, 1> own;
  own.load(op.x.row(span.row) + first, lanes.lane, kWinner ? 0 : width - first);
  for (int64_t base = span.begin; base < span.end; base += kLanes) {
    const int count = static_cast<int>(min(span.end - base, static_cast<int64_t>(kLanes)));
    const int64_t entry = base + min(lanes.lane, count - 1);
    const int32_t own_row = __ldg(op.graph.col + entry);
    const bool needs_edge = kWinner || op.weight != nullptr;
    const auto own_edge = needs_edge ? static_cast<int32_t>(op.graph.edge(entry)) : 0;
    const A own_weight = op.weight ? widened(op.weight[own_edge]) : 1;
    for (int j = 0; j < count; j += kInFlight) {
      RowShare<Mark, kValues, kLanes, 1> marks[kInFlight];
      RowShare<T, kValues, kLanes, 1> grads[kInFlight];
      A weight[kInFlight];
      int32_t edge[kInFlight];
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        const int source = min(j + u, count - 1);
        const int64_t offset = lanes.from(own_row, source) * width;
        weight[u] = lanes.from(own_weight, source);
        edge[u] = kWinner ? lanes.from(own_edge, source) : 0;
        const int64_t rest = j + u < count ? width - first : 0;
        marks[u].load(mark + offset, lanes.lane, rest);
        grads[u].load(op.grad.data + first + offset, lanes.lane, rest);
      }
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        if (j + u >= count) break;
        sum.each([&](A& value, int q, int i) {
          if constexpr (kWinner) {
            if (marks[u].packs[q].values[i] == edge[u]) value += weight[u] * grads[u].at(q, i);
          } else {
            const bool won = rounded<T>(weight[u] * own.at(q, i)) == marks[u].at(q, i);
            // A product, not a choice, because upstream's 0 * inf is NaN.
            value += weight[u] * ((won ? A{1} : A{0}) * grads[u].at(q, i));
          }
        });
      }
    }
  }
}

template <typename T, bool kWinner, int kValues, int kLanes>
__global__ void __launch_bounds__(kBlockThreads) backward_rows(ExtremumBackward<T> op) {
  const int64_t task = group_index<kLanes>();
  if (task >= op.pieces + op.graph.num_rows) return;
  const Span span = span_of(op.graph, task, op.pieces);
  if (span.row < 0) return;
  const auto lanes = Lanes<kLanes>::mine();
  const int64_t first = static_cast<int64_t>(op.part + blockIdx.y) * (kValues * kLanes);
  RowSums<Accumulator<T>, kValues, kLanes, 1> sum;
  sum.clear();
  add_shares<kWinner>(op, span, first, lanes, sum);
  const int64_t width = op.x.width - first;
  if (span.piece >= 0) {
    sum.store(op.partial.row(span.piece) + first, lanes.lane, width, 1);
  } else {
    sum.store(op.grad_x.row(span.row) + first, lanes.lane, width, 1);
  }
}

template <typename T>
__global__ void __launch_bounds__(kBlockThreads) backward_merge(ExtremumBackward<T> op) {
  for_each_long_row(op.graph, [&](int64_t row, int64_t begin, int64_t end) {
    for (int64_t f = threadIdx.x; f < op.x.width; f += blockDim.x) {
      Accumulator<T> sum = 0;
      for_each_piece(begin, end, [&](int64_t piece) { sum += op.partial.row(piece)[f]; });
      op.grad_x.row(row)[f] = narrowed<T>(sum);
    }
  });
}

// Starts a group of kLanes lanes for each piece and row, and for as many columns as it holds.
template <int kValues, int kLanes, typename Op>
cudaError_t launch_rows(const char* name, Stream stream, void (*kernel)(Op), Op op) {
  const int64_t groups = op.pieces + op.graph.num_rows;
  const auto blocks = static_cast<unsigned>(ceil_div(groups * kLanes, kBlockThreads));
  return for_each_grid<kValues * kLanes>(op.x.width, [&](unsigned part, unsigned parts) {
    op.part = part;
    return launch({name, {blocks, parts}, kBlockThreads, 0, stream}, kernel, op);
  });
}

template <typename Op>
unsigned blocks_to_merge(const Op& op) {
  return op.pieces == 0 ? 0 : merge_blocks(op.graph);
}

template <Record kRecord>
struct Forward {
  template <int kValues, int kLanes, typename T>
  static cudaError_t rows(const Extremum<T>& op, Stream stream) {
    return launch_rows<kValues, kLanes>("extremum_rows", stream,
                                        extremum_rows<T, kRecord, kValues, kLanes>, op);
  }
  template <typename T>
  static cudaError_t merge(const Extremum<T>& op, Stream stream) {
    return launch({"extremum_merge", blocks_to_merge(op), kBlockThreads, 0, stream},
                  extremum_merge<T, kRecord>, op);
  }
};

template <bool kWinner>
struct Backward {
  template <int kValues, int kLanes, typename T>
  static cudaError_t rows(const ExtremumBackward<T>& op, Stream stream) {
    return launch_rows<kValues, kLanes>("backward_rows", stream,
                                        backward_rows<T, kWinner, kValues, kLanes>, op);
  }
  template <typename T>
  static cudaError_t merge(const ExtremumBackward<T>& op, Stream stream) {
    return launch({"backward_merge", blocks_to_merge(op), kBlockThreads, 0, stream},
                  backward_merge<T>, op);
  }
};

template <typename Pass, typename T, template <typename> class Op>
cudaError_t run(const Op<T>& op, bool packed, Stream stream) {
  const cudaError_t error = with_split<T>(op.x.width, packed, [&](auto split) {
    return Pass::template rows<split.kValues, split.kLanes>(op, stream);
  });
  return error == cudaSuccess ? Pass::merge(op, stream) : error;
}

}  // namespace

template <typename T>
cudaError_t segment_reduce(Queue& queue, const Csr& graph, const T* weight, bool is_max,
                           Matrix<const T> x, Matrix<T> out, int32_t* ties, int32_t* winner) {
  using A = Accumulator<T>;
  int32_t* const record = ties ? ties : winner;
  const int64_t pieces = num_pieces(graph);
  auto* const partial = queue.scratch<A>(pieces * x.width);
  auto* const partial_record = queue.scratch<int32_t>(record ? pieces * x.width : 0);
  const Extremum<T> op{graph,
                       pieces,
                       weight,
                       is_max ? A{1} : A{-1},
                       x,
                       out,
                       record,
                       {partial, pieces, x.width},
                       partial_record};
  const bool packed = fits_packs<T>(x.width, {x.data, out.data, record, partial, partial_record});
  if (ties) return run<Forward<Record::kTies>>(op, packed, queue.stream());
  if (winner) return run<Forward<Record::kWinner>>(op, packed, queue.stream());
  return run<Forward<Record::kNothing>>(op, packed, queue.stream());
}

template <typename T>
cudaError_t divide_by_ties(Queue& queue, Matrix<const T> grad, const int32_t* ties,
                           Matrix<T> share) {
  const int64_t count = grad.rows * grad.width;
  const auto run = [&](auto* kernel, int64_t values) {
    const auto blocks = static_cast<unsigned>(ceil_div(count, values * kBlockThreads));
    return launch({"divide_packs", blocks, kBlockThreads, 0, queue.stream()}, kernel, grad.data,
                  ties, share.data, count);
  };
  const bool packed = fits_packs<T>(count, {grad.data, ties, share.data});
  return packed ? run(divide_packs<T, kPack<T>>, kPack<T>) : run(divide_packs<T, 1>, 1);
}

template <typename T>
cudaError_t segment_reduce_backward(Queue& queue, const Csr& transpose, const T* weight,
                                    Matrix<const T> x, Matrix<const T> out, Matrix<const T> grad,
                                    const int32_t* winner, Matrix<T> grad_x) {
  const int64_t pieces = num_pieces(transpose);
  auto* const partial = queue.scratch<Accumulator<T>>(pieces * x.width);
  const ExtremumBackward<T> op{transpose,
                               pieces,
                               weight,
                               x,
                               out,
                               grad,
                               {winner, out.rows, out.width},
                               grad_x,
                               {partial, pieces, x.width}};
  const bool packed =
      fits_packs<T>(x.width, {x.data, out.data, grad.data, winner, grad_x.data, partial});
  return winner ? run<Backward<true>>(op, packed, queue.stream())
                : run<Backward<false>>(op, packed, queue.stream());
}

FASTGRAPH_INSTANTIATE(segment_reduce)
FASTGRAPH_INSTANTIATE(divide_by_ties)
FASTGRAPH_INSTANTIATE(segment_reduce_backward)

}  // namespace fastgraph::cuda
