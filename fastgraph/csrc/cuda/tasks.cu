// Lists the tasks of a matrix; tasks.h says which they are. A block sorts the rows of a window.
// Where rows are cut, the windows count those first, and a last kernel lists their pieces.
#include "cuda/kernels.h"
#include "fastgraph/lanes.cuh"

namespace fastgraph::cuda {
namespace {

constexpr int kWindow = 1024;
constexpr int kThreads = 256;
constexpr int kOfThread = kWindow / kThreads;

// Rows that are cut, in the upper half, and their pieces, so that one addition adds both.
using Counts = uint64_t;
inline __device__ int64_t rows_in(Counts counts) { return static_cast<int64_t>(counts >> 32); }
inline __device__ int64_t pieces_in(Counts counts) { return static_cast<uint32_t>(counts); }

struct Listing {
  const int64_t* rowptr;
  int64_t num_rows;
  int64_t num_windows;
  int64_t chunk;
  int64_t num_pieces;
  Span* tasks;
  CutRow* cut_rows;
  Counts* before;  // what the windows before each have, and all of them; null if no row is cut

  __device__ int64_t length(int64_t row) const {
    return __ldg(rowptr + row + 1) - __ldg(rowptr + row);
  }
  __device__ Counts counts(int64_t row) const {
    const int64_t entries = length(row);
    if (entries <= chunk) return 0;
    return (Counts{1} << 32) + static_cast<Counts>((entries + chunk - 1) / chunk);
  }
  __device__ int64_t rows_of_window(int64_t first) const {
    return min(num_rows - first, static_cast<int64_t>(kWindow));
  }
};

// before[w + 1] = what window w has; a warp takes each.
__global__ void __launch_bounds__(kThreads) count_cut_rows(Listing op) {
  const int64_t window = group_index<kWarp>();
  if (window >= op.num_windows) return;
  const auto lanes = Lanes<kWarp>::mine();
  const int64_t first = window * kWindow, count = op.rows_of_window(first);
  Counts sum = 0;
  for (int64_t i = lanes.lane; i < count; i += kWarp) sum += op.counts(first + i);
  sum = lanes.sum(sum);
  if (lanes.lane == 0) op.before[window + 1] = sum;
}

// Makes each of `count` values, kWindow at most, the sum of those up to it. All threads of the
// block must come, and find the sums when they leave.
__device__ void add_up(Counts* values, int64_t count) {
  for (int step = 1; step < count; step *= 2) {
    __syncthreads();
    Counts sums[kOfThread];
#pragma unroll
    for (int k = 0; k < kOfThread; ++k) {
      const int i = static_cast<int>(threadIdx.x) + k * kThreads;
      if (i < count) sums[k] = values[i] + (i < step ? 0 : values[i - step]);
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kOfThread; ++k) {
      const int i = static_cast<int>(threadIdx.x) + k * kThreads;
      if (i < count) values[i] = sums[k];
    }
  }
  __syncthreads();
}

// One block.
__global__ void __launch_bounds__(kThreads) add_up_windows(Counts* before, int64_t num_windows) {
  FASTGRAPH_SHARED(Counts, sums, kWindow);
  Counts all = 0;
  if (threadIdx.x == 0) before[0] = 0;
  for (int64_t first = 1; first <= num_windows; first += kWindow) {
    const int64_t count = min(num_windows + 1 - first, static_cast<int64_t>(kWindow));
    for (int64_t i = threadIdx.x; i < count; i += kThreads) sums[i] = before[first + i];
    add_up(sums, count);
    for (int64_t i = threadIdx.x; i < count; i += kThreads) before[first + i] = all + sums[i];
    all += sums[count - 1];
    __syncthreads();  // before the next ones overwrite these
  }
}

// Sorts `size` keys, a power of two, by a bitonic network. All threads of the block must come, and
// find them sorted when they leave.
__device__ void sort(uint32_t* keys, int size) {
  for (int run = 2; run <= size; run *= 2) {
    for (int distance = run / 2; distance > 0; distance /= 2) {
      __syncthreads();
      for (int pair = threadIdx.x; pair < size / 2; pair += kThreads) {
        const int low = 2 * pair - pair % distance, high = low + distance;
        const uint32_t a = keys[low], b = keys[high];
        const bool rises = (low & run) == 0;
        if ((a > b) == rises) {
          keys[low] = b;
          keys[high] = a;
        }
      }
    }
  }
  __syncthreads();
}

// The tasks of a window's whole rows, and the list of those that are cut. No two keys are equal, so
// the network, which is not stable, gives one order.
__global__ void __launch_bounds__(kThreads) list_rows(Listing op) {
  FASTGRAPH_SHARED(uint32_t, keys, kWindow);
  FASTGRAPH_SHARED(Counts, sums, kWindow);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kWindow;
  const auto count = static_cast<int>(op.rows_of_window(first));
  int size = 1;
  while (size < count) size *= 2;
  for (int i = threadIdx.x; i < size; i += kThreads) {
    constexpr uint32_t kNone = 0xffffffff;
    const int64_t length = i < count ? op.length(first + i) : 0;
    const int64_t shorter = op.before != nullptr && length > op.chunk ? kChunk + 1  // behind all
                                                                      : kChunk - length;
    keys[i] = i < count ? static_cast<uint32_t>(shorter * kWindow + i) : kNone;
  }
  sort(keys, size);
  const Counts before = op.before ? op.before[blockIdx.x] : 0;
  const Counts here = op.before ? op.before[blockIdx.x + 1] - before : 0;
  const auto cut = static_cast<int>(rows_in(here));
  Span* const tasks = op.tasks + op.num_pieces + first - rows_in(before);
  for (int place = threadIdx.x; place < count - cut; place += kThreads) {
    const int64_t row = first + keys[place] % kWindow;
    const int64_t begin = __ldg(op.rowptr + row), end = __ldg(op.rowptr + row + 1);
    tasks[place] = {static_cast<int32_t>(row), static_cast<int32_t>(begin),
                    static_cast<int32_t>(end), -1};
  }
  if (cut == 0) return;
  const uint32_t* const cut_keys = keys + (count - cut);
  for (int i = threadIdx.x; i < cut; i += kThreads) {
    sums[i] = op.counts(first + cut_keys[i] % kWindow);
  }
  add_up(sums, cut);
  CutRow* const cut_rows = op.cut_rows + rows_in(before);
  for (int i = threadIdx.x; i < cut; i += kThreads) {
    const int64_t begin = pieces_in(before) + (i > 0 ? pieces_in(sums[i - 1]) : 0);
    const int64_t end = pieces_in(before) + pieces_in(sums[i]);
    cut_rows[i] = {static_cast<int32_t>(first + cut_keys[i] % kWindow), static_cast<int32_t>(begin),
                   static_cast<int32_t>(end), 0};
  }
}

// The tasks of pieces; a thread takes each, and searches for its row.
__global__ void __launch_bounds__(kThreads) list_pieces(Listing op, int64_t num_cut) {
  const int64_t piece = group_index<1>();
  if (piece >= op.num_pieces) return;
  int64_t low = 0, high = num_cut - 1;
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (op.cut_rows[middle].piece_begin <= piece) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const CutRow row = op.cut_rows[low];
  const int64_t begin = __ldg(op.rowptr + row.row), length = op.length(row.row);
  const int64_t pieces = row.piece_end - row.piece_begin, number = piece - row.piece_begin;
  op.tasks[piece] = {row.row, static_cast<int32_t>(begin + length * number / pieces),
                     static_cast<int32_t>(begin + length * (number + 1) / pieces),
                     static_cast<int32_t>(piece)};
}

}  // namespace

cudaError_t make_tasks(Queue& queue, const int64_t* rowptr, int64_t num_rows, int64_t chunk,
                       const TaskList& list) {
  const int64_t windows = ceil_div(num_rows, kWindow);
  const bool cuts = list.num_cut > 0;
  auto* before = queue.scratch<Counts>(cuts ? windows + 1 : 0);
  const Listing op{rowptr,          num_rows,   windows,       chunk,
                   list.num_pieces, list.tasks, list.cut_rows, before};
  const auto blocks = [](int64_t threads) {
    return static_cast<unsigned>(ceil_div(threads, kThreads));
  };
  cudaError_t error = cudaSuccess;
  if (cuts) {
    error = launch({"count_cut_rows", blocks(windows * kWarp), kThreads, 0, queue.stream()},
                   count_cut_rows, op);
    if (error != cudaSuccess) return error;
    error =
        launch({"add_up_windows", 1, kThreads, 0, queue.stream()}, add_up_windows, before, windows);
    if (error != cudaSuccess) return error;
  }
  error = launch({"list_rows", static_cast<unsigned>(windows), kThreads, 0, queue.stream()},
                 list_rows, op);
  if (error != cudaSuccess) return error;
  return launch({"list_pieces", blocks(list.num_pieces), kThreads, 0, queue.stream()}, list_pieces,
                op, list.num_cut);
}

}  // namespace fastgraph::cuda
