// Edge programs: warps take rows, or pieces of long ones, and all lanes of a warp the same way
// through the instructions. Nothing of the size of edges times channels is stored.
#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "cuda/edge_layout.h"
#include "cuda/kernels.h"
#include "fastgraph/block_sums.cuh"
#include "fastgraph/edge_warp.cuh"
#include "generated/edge_kernel.h"

namespace fastgraph::cuda {
namespace {

using generated::EdgeArguments;

// Registers of products would be missing elsewhere.
template <typename T, bool kLarge, bool kMultiplies>
__global__ void __launch_bounds__(kBlockThreads)
    edge_program_rows(FASTGRAPH_GRID_CONSTANT const EdgeRun<T> run) {
  using A = Accumulator<T>;
  FASTGRAPH_DYNAMIC_SHARED(A, shared);
  const int own = static_cast<int>(threadIdx.x) / kWarp;
  const int64_t in_block = blockDim.x / kWarp, warps = in_block * gridDim.x;
  const int64_t warp = in_block * blockIdx.x + own;
  A* const memory = kLarge ? run.memory + warp * run.memory_size : shared + own * run.memory_size;
  FASTGRAPH_SHARED(int, edges_of_warps, kBlockThreads / kWarp);
  EdgeWarp<T, kLarge, kMultiplies> edges(run, memory, edges_of_warps);
  edges.begin();
  for (int64_t task = warp; task < run.graph.num_tasks; task += warps) {
    edges.run(span_of(run.graph, task));
  }
  edges.end(warp);
}

// What pieces of a row leave for a column of a result, put together.
template <typename T, bool kLarge>
__device__ void merge(const EdgeRun<T>& run, const EdgeResult<T>& result, const CutRow& row,
                      int column) {
  using A = Accumulator<T>;
  const int64_t place = static_cast<int64_t>(row.row) * result.width + column;
  const int32_t stride = packs_of<A>(result.width) * kPack<A>;
  const auto of = [&](int64_t piece) {
    return run.partial + piece * run.partial_size + result.partial;
  };
  if (result.kind == EdgeReductionKind::kSoftmax) {
    const int32_t of_head = result.width / result.heads, head = column / of_head;
    const int32_t totals = stride + packs_of<A>(result.heads) * kPack<A>;
    A largest = -INFINITY, sum = 0, total = 0;
    for_each_piece(row, [&](int64_t p) { largest = larger(largest, of(p)[stride + head]); });
    for_each_piece(row, [&](int64_t p) {
      const A factor = std::exp(of(p)[stride + head] - subtracted(largest));
      sum += of(p)[column] * factor;
      total += of(p)[totals + head] * factor;
    });
    if (result.out != nullptr) result.out[place] = narrowed<T>(sum * (A{1} / total));
    if (column % of_head != 0) return;
    return EdgeWarp<T, kLarge, false>::store_records(result, row.row, head, false, largest, total);
  }
  if (result.is_extremum()) {
    Largest<A> best;
    int32_t count = 0;
    for_each_piece(row, [&](int64_t p) {
      // Of many pieces, their number may be none that float has.
      best.take(of(p)[column], 0);
    });
    for_each_piece(row, [&](int64_t p) {
      if (of(p)[column] == best.value) count += static_cast<int32_t>(of(p)[stride + column]);
    });
    if (result.out != nullptr) {
      result.out[place] = narrowed<T>(sign_of(result.kind) * best.value);
    }
    auto* const ties = static_cast<int32_t*>(result.record);
    if (ties != nullptr) ties[place] = shares(best.value, count);
    return;
  }
  A sum = 0;
  for_each_piece(row, [&](int64_t p) { sum += of(p)[column]; });
  if (result.kind == EdgeReductionKind::kMean) {
    sum /= static_cast<A>(run.graph.rowptr[row.row + 1] - run.graph.rowptr[row.row]);
  }
  result.out[place] = narrowed<T>(sum);
}

// The rows that were cut.
template <typename T, bool kLarge>
__global__ void __launch_bounds__(kBlockThreads)
    edge_program_merge(FASTGRAPH_GRID_CONSTANT const EdgeRun<T> run, int64_t width) {
  for_each_merged(run.graph, width, [&](const CutRow& row, int64_t f) {
    for (int i = 0; i < run.num_results; ++i) {
      const auto& result = kLarge ? run.many_results[i] : run.few_results[i];
      if (!result.is_merged()) continue;
      if (f < result.width) return merge<T, kLarge>(run, result, row, static_cast<int>(f));
      f -= result.width;
    }
  });
}

// Some words of what a large program consists of.
struct Words {
  static constexpr int kCount = 512;
  uint32_t values[kCount];
};

__global__ void __launch_bounds__(kBlockThreads)
    put_words(FASTGRAPH_GRID_CONSTANT const Words words, uint32_t* to, int count) {
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kBlockThreads)
    to[i] = words.values[i];
}

// A copy of some records in the GPU's memory. They come as arguments of kernels: memory of the host
// would have to stay until the GPU has read it.
template <typename Record>
cudaError_t copy(Queue& queue, const std::vector<Record>& records, const Record** found) {
  static_assert(sizeof(Record) % sizeof(uint32_t) == 0);
  const auto count = static_cast<int64_t>(records.size() * sizeof(Record) / sizeof(uint32_t));
  auto* const to = queue.scratch<uint32_t>(count);
  *found = reinterpret_cast<const Record*>(to);
  cudaError_t error = cudaSuccess;
  for (int64_t first = 0; first < count && error == cudaSuccess; first += Words::kCount) {
    const int some = static_cast<int>(std::min<int64_t>(Words::kCount, count - first));
    Words words{};
    std::memcpy(words.values, reinterpret_cast<const char*>(records.data()) + first * 4, some * 4);
    error = launch({"put_words", 1, kBlockThreads, 0, queue.stream()}, put_words, words, to + first,
                   some);
  }
  return error;
}

// Whether the kernel that was generated for a program can be used: it has room for all arguments,
// and vectors of values can be read and written where these are.
template <typename T>
bool takes(const EdgeCode& code, const T* const* operands,
           const std::vector<EdgeResult<T>>& results) {
  const auto is_odd = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 != 0; };
  int64_t count = 0;
  for (; count < code.num_slots && code.slots[count].is_operand(); ++count) {
    if (is_odd(operands[count])) return false;
  }
  const auto is_odd_result = [&](const EdgeResult<T>& result) { return is_odd(result.out); };
  return count <= generated::kMostOperands && code.num_reductions <= generated::kMostReductions &&
         std::none_of(results.begin(), results.end(), is_odd_result);
}

// What a generated kernel takes.
template <typename T>
EdgeArguments arguments_of(const EdgeRun<T>& run, const EdgeCode& code, const T* const* operands,
                           const std::vector<EdgeResult<T>>& results) {
  EdgeArguments arguments{};
  arguments.col = run.graph.col;
  arguments.edge_id = run.graph.edge_id;
  arguments.tasks = reinterpret_cast<const int*>(run.graph.tasks);
  arguments.num_tasks = run.graph.num_tasks;
  arguments.partial = run.partial;
  arguments.partial_size = run.partial_size;
  for (int64_t s = 0; s < code.num_slots && code.slots[s].is_operand(); ++s) {
    arguments.operands[s] = operands[s];
  }
  for (size_t r = 0; r < results.size(); ++r) {
    arguments.partial_at[r] = results[r].partial;
    arguments.out[r] = results[r].out;
    arguments.record[r] = results[r].record;
    arguments.scale[r] = results[r].scale;
    arguments.warps[r] = results[r].sums;
  }
  return arguments;
}

// What warps leave of a sum over all edges, or blocks of one of outer products.
template <typename T>
Matrix<Accumulator<T>> rows_of(EdgeGrid grid, const EdgeResult<T>& result) {
  if (result.is_outer()) return {result.sums, grid.blocks, int64_t{result.width} * result.heads};
  return {result.sums, int64_t{grid.blocks} * grid.warps, result.width};
}

template <typename T, bool kLarge, bool kMultiplies>
cudaError_t run_all(Queue& queue, EdgeRun<T>& run, const EdgeLayout<T>& layout,
                    const EdgeCode& code, const T* const* operands) {
  using A = Accumulator<T>;
  const int64_t tasks = run.graph.num_tasks;
  const bool is_generated = code.kernel != nullptr && takes(code, operands, layout.results);
  const EdgeGrid grid = layout.grid(tasks, is_generated);
  run.partial = queue.scratch<A>(run.graph.num_pieces * run.partial_size);
  std::vector<EdgeResult<T>> results = layout.results;
  for (EdgeResult<T>& result : results) {
    if (!result.is_summed()) continue;
    const Matrix<A> sums = rows_of(grid, result);
    result.sums = queue.scratch<A>(sums.rows * sums.width);
  }
  if constexpr (kLarge) {
    if (!is_generated) run.memory = queue.scratch<A>(grid.blocks * grid.warps * run.memory_size);
    cudaError_t error = copy(queue, layout.loads, &run.many_loads);
    if (error == cudaSuccess) error = copy(queue, layout.steps, &run.many_steps);
    if (error == cudaSuccess) error = copy(queue, results, &run.many_results);
    if (error != cudaSuccess) return error;
  } else {
    std::copy(layout.loads.begin(), layout.loads.end(), run.few_loads);
    std::copy(layout.steps.begin(), layout.steps.end(), run.few_steps);
    std::copy(results.begin(), results.end(), run.few_results);
  }
  const unsigned threads = grid.warps * kWarp;
  cudaError_t error = cudaSuccess;
  if (is_generated) {
    error = launch_loaded({"edge_kernel", {grid.blocks, code.chunks}, threads, 0, queue.stream()},
                          code.kernel, arguments_of(run, code, operands, results));
  } else {
    const size_t shared = kLarge ? 0 : grid.warps * run.memory_size * sizeof(A);
    error = launch({"edge_program_rows", grid.blocks, threads, shared, queue.stream()},
                   edge_program_rows<T, kLarge, kMultiplies>, run);
  }
  int64_t merged = 0;
  for (const EdgeResult<T>& result : results) merged += result.is_merged() ? result.width : 0;
  if (error == cudaSuccess) {
    error = launch(
        {"edge_program_merge", merge_grid(run.graph, merged), kBlockThreads, 0, queue.stream()},
        edge_program_merge<T, kLarge>, run, merged);
  }
  for (const EdgeResult<T>& result : results) {
    if (error != cudaSuccess || !result.is_summed()) continue;
    error = run_add_rows(queue, rows_of(grid, result), result.out);
  }
  return error;
}

}  // namespace

template <typename T>
cudaError_t edge_program(Queue& queue, const CutCsr& graph, const EdgeCode& code,
                         const T* const* operands, void* const* outputs) {
  const EdgeLayout<T> layout(code, operands, outputs);
  if (!layout.has_room) return cudaErrorInvalidValue;
  EdgeRun<T> run{};
  run.graph = graph;
  layout.describe(run);
  const auto with = [&](auto multiplies) {
    constexpr bool kMultiplies = decltype(multiplies)::value;
    return layout.is_large ? run_all<T, true, kMultiplies>(queue, run, layout, code, operands)
                           : run_all<T, false, kMultiplies>(queue, run, layout, code, operands);
  };
  return code.multiplies() ? with(std::true_type{}) : with(std::false_type{});
}

FASTGRAPH_INSTANTIATE(edge_program)

}  // namespace fastgraph::cuda
