// Dot products of each node's heads with a few vectors: what GAT scores nodes by.
//
// A group of lanes takes a head of some nodes. Neighbouring groups take neighbouring heads, so that
// they read memory in order; the nodes of a group are far apart, so that all of them meet the
// same vectors.
#include "cuda/kernels.h"
#include "fastgraph/block_sums.cuh"
#include "fastgraph/lanes.cuh"

namespace fastgraph::cuda {
namespace {

// Gradients of vectors are sums over the nodes. Groups of at most this many threads in all leave
// theirs, each of at least so many nodes, and a second kernel adds them up in order.
constexpr int64_t kSummingThreads = 1 << 16;
constexpr int64_t kNodesOfSlot = 16;

// The vectors whose gradients a group sums in one visit to the nodes.
constexpr int kVectors = 2;

// The head of a group, and the first of its nodes; the next ones are `slots` further each time.
struct Start {
  int64_t head;
  int64_t node;
};

template <int kLanes>
__device__ Start start_of_group(int64_t heads) {
  const int64_t group = group_index<kLanes>();
  return {group % heads, group / heads};
}

template <typename T>
struct HeadScores {
  int64_t slots;
  Heads<const T> x;
  Heads<const T> att;
  Heads<T> scores;
};

template <typename T, int kValues, int kLanes>
__global__ void __launch_bounds__(kBlockThreads) head_scores_nodes(HeadScores<T> op) {
  using A = Accumulator<T>;
  using Row = RowShare<T, kValues, kLanes, 1>;
  const auto [head, node] = start_of_group<kLanes>(op.x.heads);
  if (node >= op.slots) return;
  const auto lanes = Lanes<kLanes>::mine();
  for (int64_t k = 0; k < op.att.nodes; ++k) {
    A dots[kInFlight] = {};
    for (int64_t first = 0; first < op.x.width; first += Row::kWidth) {
      const int64_t width = op.x.width - first;
      Row att, rows[kInFlight];
      att.load(op.att.at(k, head) + first, lanes.lane, width);
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        const int64_t n = node + u * op.slots;
        rows[u].load(op.x.at(n, head) + first, lanes.lane, n < op.x.nodes ? width : 0);
      }
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
#pragma unroll
        for (int i = 0; i < kValues; ++i) dots[u] += att.at(0, i) * rows[u].at(0, i);
      }
    }
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const int64_t n = node + u * op.slots;
      const A dot = lanes.sum(dots[u]);
      if (lanes.lane == 0 && n < op.x.nodes) op.scores.at(k, n)[head] = narrowed<T>(dot);
    }
  }
}

template <typename T>
struct HeadScoresBackward {
  using A = Accumulator<T>;

  int64_t slots;
  Heads<const T> x;
  Heads<const T> att;
  Heads<const T> grad;
  Heads<const T> addend;  // to grad_x, or no data
  Heads<T> grad_x;
  Heads<T> grad_att;
  int64_t sum_slots;
  A* sums;            // [sum_slots, vectors, heads, width]
  unsigned part = 0;  // of the columns, where this grid begins
};

// 0 for nodes and vectors that there are not.
template <typename T>
__device__ Accumulator<T> grad_of(const Heads<const T>& grad, int64_t node, int64_t k,
                                  int64_t head) {
  return k < grad.nodes && node < grad.heads ? widened(grad.at(k, node)[head]) : 0;
}

// grad_x of each node: the sum over vectors of grad * att, and what else there is.
template <typename T, int kValues, int kLanes>
__global__ void __launch_bounds__(kBlockThreads) head_scores_grad_x(HeadScoresBackward<T> op) {
  using A = Accumulator<T>;
  using Row = RowShare<T, kValues, kLanes, 1>;
  const auto [head, node] = start_of_group<kLanes>(op.x.heads);
  if (node >= op.slots) return;
  const auto lanes = Lanes<kLanes>::mine();
  for (int64_t first = 0; first < op.x.width; first += Row::kWidth) {
    const int64_t width = op.x.width - first;
    RowSums<A, kValues, kLanes, 1> sums[kInFlight];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) sums[u].clear();
    for (int64_t k = 0; k < op.att.nodes; ++k) {
      Row att;
      att.load(op.att.at(k, head) + first, lanes.lane, width);
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        const A grad = grad_of(op.grad, node + u * op.slots, k, head);
        sums[u].each([&](A& sum, int q, int i) { sum += grad * att.at(q, i); });
      }
    }
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const int64_t n = node + u * op.slots;
      if (n >= op.x.nodes) continue;
      if (op.addend.data != nullptr) {
        Row addend;
        addend.load(op.addend.at(n, head) + first, lanes.lane, width);
        sums[u].each([&](A& sum, int q, int i) { sum += addend.at(q, i); });
      }
      sums[u].store(op.grad_x.at(n, head) + first, lanes.lane, width, 1);
    }
  }
}

// Adds grad * x of one group's nodes, for as many columns as it holds in registers; the grid's y
// direction covers the others.
template <typename T, int kValues, int kLanes>
__global__ void __launch_bounds__(kBlockThreads) head_scores_sums(HeadScoresBackward<T> op) {
  using A = Accumulator<T>;
  using Row = RowShare<T, kValues, kLanes, 1>;
  const auto [head, slot] = start_of_group<kLanes>(op.x.heads);
  if (slot >= op.sum_slots) return;
  const auto lanes = Lanes<kLanes>::mine();
  const int64_t first = static_cast<int64_t>(op.part + blockIdx.y) * Row::kWidth;
  const int64_t width = op.x.width - first;
  const Heads<A> partial{op.sums, op.sum_slots * op.att.nodes, op.x.heads, op.x.width};
  for (int64_t k = 0; k < op.att.nodes; k += kVectors) {
    RowSums<A, kValues, kLanes, 1> sums[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) sums[v].clear();
    for (int64_t begin = slot; begin < op.x.nodes; begin += kInFlight * op.sum_slots) {
      Row rows[kInFlight];
      A grad[kInFlight][kVectors];
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        const int64_t n = begin + u * op.sum_slots;
        rows[u].load(op.x.at(n, head) + first, lanes.lane, n < op.x.nodes ? width : 0);
#pragma unroll
        for (int v = 0; v < kVectors; ++v) grad[u][v] = grad_of(op.grad, n, k + v, head);
      }
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          sums[v].each([&](A& sum, int q, int i) { sum += grad[u][v] * rows[u].at(q, i); });
        }
      }
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (k + v >= op.att.nodes) break;
      A* to = partial.at(slot * op.att.nodes + k + v, head) + first;
      sums[v].store(to, lanes.lane, width, 1);
    }
  }
}

template <int kLanes>
unsigned blocks_of(int64_t groups) {
  return static_cast<unsigned>(ceil_div(groups * kLanes, kBlockThreads));
}

struct Forward {
  template <int kValues, int kLanes, typename T>
  static cudaError_t run(Queue& queue, const HeadScores<T>& op) {
    const unsigned blocks = blocks_of<kLanes>(op.slots * op.x.heads);
    return launch({"head_scores_nodes", blocks, kBlockThreads, 0, queue.stream()},
                  head_scores_nodes<T, kValues, kLanes>, op);
  }
};

struct Backward {
  template <int kValues, int kLanes, typename T>
  static cudaError_t run(Queue& queue, HeadScoresBackward<T> op) {
    const int64_t heads = op.x.heads, size = op.att.nodes * heads * op.att.width;
    const int64_t parts = ceil_div(op.x.width, kValues * kLanes);
    if (heads == 0 || parts == 0) return cudaSuccess;
    op.sum_slots =
        min(ceil_div(op.x.nodes, kNodesOfSlot), ceil_div(kSummingThreads, heads * parts * kLanes));
    op.sums = queue.scratch<Accumulator<T>>(op.sum_slots * size);
    const unsigned blocks = blocks_of<kLanes>(op.slots * heads);
    const unsigned summing = blocks_of<kLanes>(op.sum_slots * heads);
    cudaError_t error = launch({"head_scores_grad_x", blocks, kBlockThreads, 0, queue.stream()},
                               head_scores_grad_x<T, kValues, kLanes>, op);
    if (error != cudaSuccess) return error;
    error = for_each_grid<kValues * kLanes>(op.x.width, [&](unsigned part, unsigned columns) {
      op.part = part;
      return launch({"head_scores_sums", {summing, columns}, kBlockThreads, 0, queue.stream()},
                    head_scores_sums<T, kValues, kLanes>, op);
    });
    if (error != cudaSuccess) return error;
    return run_add_rows<T>(queue, {op.sums, op.sum_slots, size}, op.grad_att.data);
  }
};

// Narrow heads are shared by fewer lanes, so that a warp takes several.
template <typename Pass, int kValues, typename Op>
cudaError_t run_lanes(Queue& queue, const Op& op) {
  const int64_t packs = ceil_div(op.x.width, kValues);
  if (packs <= 4) return Pass::template run<kValues, 4>(queue, op);
  if (packs <= 8) return Pass::template run<kValues, 8>(queue, op);
  if (packs <= 16) return Pass::template run<kValues, 16>(queue, op);
  return Pass::template run<kValues, 32>(queue, op);
}

}  // namespace

template <typename T>
cudaError_t head_scores(Queue& queue, Heads<const T> x, Heads<const T> att, Heads<T> scores) {
  const HeadScores<T> op{ceil_div(x.nodes, kInFlight), x, att, scores};
  const bool packed = fits_packs<T>(x.width, x.data, att.data);
  return packed ? run_lanes<Forward, kPack<T>>(queue, op) : run_lanes<Forward, 1>(queue, op);
}

template <typename T>
cudaError_t head_scores_backward(Queue& queue, Heads<const T> x, Heads<const T> att,
                                 Heads<const T> grad, Heads<const T> addend, Heads<T> grad_x,
                                 Heads<T> grad_att) {
  const int64_t slots = ceil_div(x.nodes, kInFlight);
  const HeadScoresBackward<T> op{slots, x, att, grad, addend, grad_x, grad_att, 0, nullptr};
  const bool packed = fits_packs<T>(x.width, x.data, att.data, addend.data, grad_x.data);
  return packed ? run_lanes<Backward, kPack<T>>(queue, op) : run_lanes<Backward, 1>(queue, op);
}

FASTGRAPH_INSTANTIATE(head_scores)
FASTGRAPH_INSTANTIATE(head_scores_backward)

}  // namespace fastgraph::cuda
