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

// How many shares a record of ties stands for: ~edge says which edge alone has the only one.
inline __device__ int32_t num_shares(int32_t record) { return record < 0 ? 1 : record; }

// The running extremum of one column, and how many values equal it or which edge it came from. A
// minimum is the negated maximum of negated values, which is exact. A NaN replaces everything, a
// later NaN an earlier one, and a tie keeps the earlier.
template <typename A, Record kRecord>
struct Running {
  A best = -INFINITY;
  int32_t record = kRecord == Record::kWinner ? -1 : 0;

  // For entries, one by one; counted() comes after the last.
  __device__ void update(A value, int32_t value_record) {
    if constexpr (kRecord == Record::kNothing && std::is_same_v<A, float>) {
      best = larger_or_nan(best, value);
      return;
    }
    // One instruction; it counts the first one that equals what a search starts from as two.
    if (kRecord == Record::kTies && value == best) record = max(record + 1, 2);
    replace(value, value_record);
  }
  __device__ void counted() {
    if (kRecord == Record::kTies && best == -INFINITY && record > 0) --record;
  }

  // For what was found of other entries, all of which come later.
  __device__ void merge(const Running& later) {
    if (kRecord == Record::kTies && later.best == best) {
      record = num_shares(record) + num_shares(later.record);
    }
    replace(later.best, later.record);
  }

 private:
  __device__ void replace(A value, int32_t value_record) {
    if (!(value > best || value != value)) return;
    best = value;
    record = value_record;
  }
};

template <typename T>
struct Extremum {
  using A = Accumulator<T>;

  CutCsr graph;
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
template <Record kRecord, bool kWeighted, int kValues, int kLanes, typename T, typename R>
__device__ void update_all(const Extremum<T>& op, const Span& span, int64_t first,
                           Lanes<kLanes> lanes, R (&running)[kValues]) {
  using A = Accumulator<T>;
  const int64_t width = op.x.width;
  const GatheredRows<T, kValues> x(op.x.data, width, width, first + lanes.lane * kValues);
  for (int64_t base = span.begin; base < span.end; base += kLanes) {
    const int count = static_cast<int>(min(span.end - base, static_cast<int64_t>(kLanes)));
    const int64_t entry = base + min(lanes.lane, count - 1);
    const int32_t own_col = __ldg(op.graph.col + entry);
    constexpr bool kNeedsEdge = kRecord != Record::kNothing || kWeighted;
    const auto own_edge = kNeedsEdge ? static_cast<int32_t>(op.graph.edge(entry)) : 0;
    const int32_t own_record = kRecord == Record::kTies ? ~own_edge : own_edge;
    const A own = kWeighted ? op.sign * widened(op.weight[own_edge]) : op.sign;
    for_each_consecutive<kInFlight>(count, [&](auto some) {
      constexpr int kCount = decltype(some)::kCount;
      Pack<T, kValues> rows[kCount];
      A factor[kCount];
      int32_t record[kCount];
#pragma unroll
      for (int u = 0; u < kCount; ++u) {
        rows[u] = x.load(lanes.from(own_col, some.first + u));
        factor[u] = kWeighted ? lanes.from(own, some.first + u) : own;
        record[u] = kRecord == Record::kNothing ? 0 : lanes.from(own_record, some.first + u);
      }
#pragma unroll
      for (int u = 0; u < kCount; ++u) {
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
          const A value = factor[u] * widened(rows[u].values[i]);
          // Messages that upstream would have stored in T tie after that rounding; a sign is exact.
          constexpr bool kExact = kRecord == Record::kWinner || !kWeighted;
          running[i].update(kExact ? value : rounded<T>(value), record[u]);
        }
      }
    });
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
  if (r.best != r.best) return 0;
  return !empty && r.best == 0 ? num_shares(r.record) + 1 : r.record;
}

template <typename T, Record kRecord, bool kWeighted, int kValues, int kLanes>
__global__ void __launch_bounds__(kBlockThreads) extremum_rows(Extremum<T> op) {
  using R = Running<Accumulator<T>, kRecord>;
  const int64_t task = group_index<kLanes>();
  if (task >= op.graph.num_tasks) return;
  const Span span = span_of(op.graph, task);
  const auto lanes = Lanes<kLanes>::mine();
  const int64_t first = static_cast<int64_t>(op.part + blockIdx.y) * (kValues * kLanes);
  R running[kValues];
  update_all<kRecord, kWeighted>(op, span, first, lanes, running);
  for (R& r : running) r.counted();
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

// The extrema of rows that were cut, from those of their pieces.
template <typename T, Record kRecord>
__global__ void __launch_bounds__(kBlockThreads) extremum_merge(Extremum<T> op) {
  const int64_t width = op.out.width;
  for_each_merged(op.graph, width, [&](const CutRow& row, int64_t f) {
    Running<Accumulator<T>, kRecord> running;
    for_each_piece(row, [&](int64_t piece) {
      const bool recorded = kRecord != Record::kNothing;
      const int32_t record = recorded ? op.partial_record[piece * width + f] : 0;
      running.merge({op.partial.row(piece)[f], record});
    });
    op.out.row(row.row)[f] = finished_value(op, false, running);
    if (kRecord != Record::kNothing) {
      op.record[row.row * width + f] = finished_record(false, running);
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
    const auto number = static_cast<Accumulator<T>>(num_shares(shares.values[i]));
    pack.values[i] = narrowed<T>(widened(pack.values[i]) / number);
  }
  store_pack(share + first, pack);
}

// ---- The gradient
//
// Of the entries that a value has, one has won as a rule. So what decides that is one byte for each
// value: a lane looks at the bytes of all of its entries first, and then at the gradients of those
// that may have won. A byte is a code of the edge that has; or says that lanes have to look.

constexpr uint32_t kLook = 255;
inline __device__ uint32_t code_of(int32_t edge) {
  return min(static_cast<uint32_t>(edge) & 255, 254u);
}

// Rows with fewer entries on average have a winner for nearly every lane at each of them.
constexpr int64_t kLeastEntriesForCodes = 8;

// Whether x - x is 0.
template <typename A>
__device__ bool is_finite(A x) {
  return x - x == 0;
}

// kWinner: `record` is the edge that has won. Otherwise it is the number of ties or ~edge, and
// losers of a gradient that is not finite have to look, because upstream's 0 * inf is NaN.
template <typename T, bool kWinner, int kValues>
__global__ void __launch_bounds__(kBlockThreads)
    code_winners(const T* grad, const int32_t* record, uint8_t* codes, int64_t count) {
  const int64_t first = group_index<1>() * kValues;
  if (first >= count) return;
  const auto records = load_pack<kValues>(record + first);
  Pack<T, kValues> grads{};
  if constexpr (!kWinner) grads = load_pack<kValues>(grad + first);
  Pack<uint8_t, kValues> pack;
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    const int32_t value = records.values[i];
    const bool known = kWinner || (value < 0 && is_finite(widened(grads.values[i])));
    pack.values[i] = static_cast<uint8_t>(known ? code_of(kWinner ? value : ~value) : kLook);
  }
  store_pack(codes + first, pack);
}

// The codes of kValues values, in words. Those shorter than a word are followed by zeros.
template <int kValues>
struct Codes {
  static constexpr int kWords = (kValues + 3) / 4;
  uint32_t words[kWords];

  __device__ void load(const uint8_t* p) {
    if constexpr (kValues >= 4) {
      const auto pack = load_pack<kWords>(reinterpret_cast<const uint32_t*>(p));
#pragma unroll
      for (int w = 0; w < kWords; ++w) words[w] = pack.values[w];
    } else {
      const auto pack = load_pack<kValues>(p);
      words[0] = pack.values[0];
      if constexpr (kValues == 2) words[0] |= static_cast<uint32_t>(pack.values[1]) << 8;
    }
  }

  // False only if no byte is `code` and none is kLook. `code` stands in all bytes of a word.
  __device__ bool may_hold(uint32_t code) const {
    constexpr uint32_t kOnes = 0x01010101, kTops = 0x80808080;
    uint32_t found = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const uint32_t other = words[w] ^ code;  // a byte is 0 where it was `code`
      found |= ((other - kOnes) & ~other) | ((~words[w] - kOnes) & words[w]);
    }
    return (found & kTops) != 0;
  }
};

template <typename T>
struct ExtremumBackward {
  using A = Accumulator<T>;

  CutCsr graph;  // the transpose: a row of it is a row of x
  const T* weight;
  Matrix<const T> x;
  Matrix<const T> out;
  Matrix<const T> grad;
  Matrix<const int32_t> winner;
  const uint8_t* codes;  // of each value of grad; null if all entries have to look
  Matrix<T> grad_x;
  Matrix<A> partial;  // a row for each piece
  unsigned part = 0;  // of the columns, where this grid begins
};

// Which of a batch of entries, each of whose row, code and weight is a lane's own, may have won
// one of this lane's values: a bit for each. Codes of several entries are on their way at a time;
// the last ones of a batch are looked at twice rather than not.
template <int kValues, int kLanes, typename T>
__device__ uint32_t candidates(const ExtremumBackward<T>& op, Lanes<kLanes> lanes, int count,
                               int64_t column, int32_t own_row, int32_t own_edge,
                               Accumulator<T> own_weight) {
  const uint32_t all = 0xffffffffu >> (kWarp - count);
  if (op.codes == nullptr) return all;
  constexpr int kAtOnce = kLanes < 8 ? kLanes : 8;
  // Where a weight is not finite, upstream's product with 0 is NaN.
  const uint32_t looks = lanes.ballot(!is_finite(own_weight)) & all;
  const uint32_t own_code = code_of(own_edge) * 0x01010101u;
  uint32_t found = looks;
  const uint8_t* const mine = op.codes + column;
  for (int j = 0; j < count; j += kAtOnce) {
    Codes<kValues> codes[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int64_t row = lanes.from(own_row, min(j + u, count - 1));
      codes[u].load(mine + row * op.x.width);
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int source = min(j + u, count - 1);
      if (codes[u].may_hold(lanes.from(own_code, source))) found |= 1u << source;
    }
  }
  return found;
}

// sum += what the entries of the span have won of their rows' gradients, in order.
template <bool kWinner, int kValues, int kLanes, typename T>
__device__ void add_shares(const ExtremumBackward<T>& op, const Span& span, int64_t first,
                           Lanes<kLanes> lanes, RowSums<Accumulator<T>, kValues, kLanes, 1>& sum) {
  using A = Accumulator<T>;
  constexpr int kAtOnce = 2;  // of one lane, which waits for the gradients of all
  // What tells whether a value has won: the edge that did, or the value that did.
  using Mark = std::conditional_t<kWinner, int32_t, T>;
  const Mark* mark;
  if constexpr (kWinner) {
    mark = op.winner.data;
  } else {
    mark = op.out.data;
  }
  const int64_t width = op.x.width;
  const int64_t own_column = first + lanes.lane * kValues;
  const bool inside = own_column < width;
  const int64_t column = inside ? own_column : first;  // those beyond read what another does
  Pack<T, kValues> own{};
  if (!kWinner && inside) own = load_pack<kValues>(op.x.row(span.row) + column);
  for (int64_t base = span.begin; base < span.end; base += kLanes) {
    const int count = static_cast<int>(min(span.end - base, static_cast<int64_t>(kLanes)));
    const int64_t entry = base + min(lanes.lane, count - 1);
    const int32_t own_row = __ldg(op.graph.col + entry);
    const auto own_edge = static_cast<int32_t>(op.graph.edge(entry));
    const A own_weight = op.weight ? widened(op.weight[own_edge]) : 1;
    uint32_t left = candidates<kValues>(op, lanes, count, column, own_row, own_edge, own_weight);
    if (!inside) left = 0;
    // Each lane takes the next entries of its own.
    while (lanes.ballot(left != 0) != 0) {
      Pack<Mark, kValues> marks[kAtOnce];
      Pack<T, kValues> grads[kAtOnce];
      A weight[kAtOnce];
      int32_t edge[kAtOnce];
      bool taken[kAtOnce];
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        taken[u] = left != 0;
        const int source = taken[u] ? __ffs(static_cast<int>(left)) - 1 : 0;
        left &= left - 1;
        const int64_t offset = lanes.from(own_row, source) * width + column;
        weight[u] = lanes.from(own_weight, source);
        edge[u] = kWinner ? lanes.from(own_edge, source) : 0;
        if (taken[u]) {
          marks[u] = load_pack<kValues>(mark + offset);
          grads[u] = load_pack<kValues>(op.grad.data + offset);
        }
      }
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        if (!taken[u]) break;
        sum.each([&](A& value, int, int i) {
          const A grad = widened(grads[u].values[i]);
          if constexpr (kWinner) {
            if (marks[u].values[i] == edge[u]) value += weight[u] * grad;
          } else {
            const bool won =
                rounded<T>(weight[u] * widened(own.values[i])) == widened(marks[u].values[i]);
            // A product, not a choice, because upstream's 0 * inf is NaN.
            value += weight[u] * ((won ? A{1} : A{0}) * grad);
          }
        });
      }
    }
  }
}

// Blocks that have to fit on a multiprocessor. For the sake of another one the compiler would wait
// for the codes of one entry before it asks for the next one's.
constexpr int kGatheringBlocks = 5;

template <typename T, bool kWinner, int kValues, int kLanes>
__global__ void __launch_bounds__(kBlockThreads, kGatheringBlocks)
    backward_rows(ExtremumBackward<T> op) {
  const int64_t task = group_index<kLanes>();
  if (task >= op.graph.num_tasks) return;
  const Span span = span_of(op.graph, task);
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
  for_each_merged(op.graph, op.x.width, [&](const CutRow& row, int64_t f) {
    Accumulator<T> sum = 0;
    for_each_piece(row, [&](int64_t piece) { sum += op.partial.row(piece)[f]; });
    op.grad_x.row(row.row)[f] = narrowed<T>(sum);
  });
}

// Starts a group of kLanes lanes for each task, and for as many columns as it holds.
template <int kValues, int kLanes, typename Op>
cudaError_t launch_rows(const char* name, Stream stream, void (*kernel)(Op), Op op) {
  const auto blocks = static_cast<unsigned>(ceil_div(op.graph.num_tasks * kLanes, kBlockThreads));
  return for_each_grid<kValues * kLanes>(op.x.width, [&](unsigned part, unsigned parts) {
    op.part = part;
    return launch({name, {blocks, parts}, kBlockThreads, 0, stream}, kernel, op);
  });
}

template <Record kRecord>
struct Forward {
  template <int kValues, int kLanes, typename T>
  static cudaError_t rows(const Extremum<T>& op, Stream stream) {
    auto* const kernel = op.weight ? extremum_rows<T, kRecord, true, kValues, kLanes>
                                   : extremum_rows<T, kRecord, false, kValues, kLanes>;
    return launch_rows<kValues, kLanes>("extremum_rows", stream, kernel, op);
  }
  template <typename T>
  static cudaError_t merge(const Extremum<T>& op, Stream stream) {
    return launch({"extremum_merge", merge_grid(op.graph, op.x.width), kBlockThreads, 0, stream},
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
    return launch({"backward_merge", merge_grid(op.graph, op.x.width), kBlockThreads, 0, stream},
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
cudaError_t segment_reduce(Queue& queue, const CutCsr& graph, const T* weight, bool is_max,
                           Matrix<const T> x, Matrix<T> out, int32_t* ties, int32_t* winner) {
  using A = Accumulator<T>;
  int32_t* const record = ties ? ties : winner;
  const int64_t pieces = graph.num_pieces;
  auto* const partial = queue.scratch<A>(pieces * x.width);
  auto* const partial_record = queue.scratch<int32_t>(record ? pieces * x.width : 0);
  const Extremum<T> op{graph, weight, is_max ? A{1} : A{-1},      x,
                       out,   record, {partial, pieces, x.width}, partial_record};
  const bool packed = fits_packs<T>(x.width, x.data, out.data, record, partial, partial_record);
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
  const bool packed = fits_packs<T>(count, grad.data, ties, share.data);
  return packed ? run(divide_packs<T, kPack<T>>, kPack<T>) : run(divide_packs<T, 1>, 1);
}

template <typename T>
cudaError_t segment_reduce_backward(Queue& queue, const CutCsr& transpose, const T* weight,
                                    Matrix<const T> x, Matrix<const T> out, Matrix<const T> grad,
                                    const int32_t* ties, const int32_t* winner, Matrix<T> grad_x) {
  const int64_t pieces = transpose.num_pieces;
  auto* const partial = queue.scratch<Accumulator<T>>(pieces * x.width);
  const int32_t* const record = winner ? winner : ties;
  const int64_t values = out.rows * out.width;
  uint8_t* codes = nullptr;
  if (record != nullptr && transpose.num_entries >= kLeastEntriesForCodes * out.rows) {
    codes = queue.scratch<uint8_t>(values);
    const auto code = [&](auto* kernel, int64_t of_thread) {
      const auto blocks = static_cast<unsigned>(ceil_div(values, of_thread * kBlockThreads));
      return launch({"code_winners", blocks, kBlockThreads, 0, queue.stream()}, kernel, grad.data,
                    record, codes, values);
    };
    const bool whole = fits_packs<T>(values, grad.data, record, codes);
    const cudaError_t error = winner ? (whole ? code(code_winners<T, true, kPack<T>>, kPack<T>)
                                              : code(code_winners<T, true, 1>, 1))
                                     : (whole ? code(code_winners<T, false, kPack<T>>, kPack<T>)
                                              : code(code_winners<T, false, 1>, 1));
    if (error != cudaSuccess) return error;
  }
  const ExtremumBackward<T> op{transpose, weight, x,
                               out,       grad,   {winner, out.rows, out.width},
                               codes,     grad_x, {partial, pieces, x.width}};
  const bool packed =
      fits_packs<T>(x.width, x.data, out.data, grad.data, winner, grad_x.data, partial);
  return winner ? run<Backward<true>>(op, packed, queue.stream())
                : run<Backward<false>>(op, packed, queue.stream());
}

FASTGRAPH_INSTANTIATE(segment_reduce)
FASTGRAPH_INSTANTIATE(divide_by_ties)
FASTGRAPH_INSTANTIATE(segment_reduce_backward)

}  // namespace fastgraph::cuda
