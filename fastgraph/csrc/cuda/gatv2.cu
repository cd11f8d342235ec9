// Additive attention: the score of an entry is <att, leaky_relu(z)>, where z = x_src[col] +
// x_dst[row] + weight_edge^T edge.
//
// A group of lanes holds a head of one destination in registers and visits its entries once, with a
// running softmax (Milakov and Gimelshein, Online normalizer calculation for softmax, 2018). The
// grid's y direction are the heads, so that blocks at work together gather from the same columns.
#include "cuda/kernels.h"
#include "fastgraph/lanes.cuh"
#include "fastgraph/philox.cuh"
#include "fastgraph/pieces.cuh"

namespace fastgraph::cuda {
namespace {

template <typename T>
struct Gatv2 {
  Csr graph;
  int64_t pieces;
  Gatv2Inputs<T> in;
  float slope;
  uint64_t seed;
  uint32_t threshold;  // entries whose random bits are below it are dropped
  float keep;          // the factor of the others; 1 without dropout
  SoftmaxOutputs<T> outputs;
  Heads<float> partial;  // what the pieces add up to
  float* partial_stats;  // [pieces, heads, 2]: largest score, sum of exponentials

  __device__ float* stats_of(int64_t row, int head) const { return outputs.stats.at(row, head); }
  __device__ float* stats_of_piece(int64_t piece, int head) const {
    return partial_stats + 2 * (piece * outputs.out.heads + head);
  }
};

// 0 for a dropped edge.
template <typename T>
__device__ float keep_factor(const Gatv2<T>& op, int32_t edge, int head) {
  if (op.threshold == 0) return op.keep;
  const uint32_t bits = philox(op.seed, static_cast<uint32_t>(edge), static_cast<uint32_t>(head));
  return bits < op.threshold ? 0.0f : op.keep;
}

// exp(score - largest); where there is no finite score yet, -infinity - -infinity would be NaN.
inline __device__ float weight_of(float score, float largest) {
  return expf(score - (largest == -INFINITY ? 0.0f : largest));
}

template <typename Sums>
struct OnlineSoftmax {
  float largest;
  float total;
  Sums sums;

  __device__ void clear() {
    largest = -INFINITY;
    total = 0;
    sums.clear();
  }

  // Makes room for a larger score: what was added up so far shrinks.
  __device__ void raise(float score) {
    if (!(score > largest)) return;
    const float rescale = expf(largest - score);
    largest = score;
    total *= rescale;
    sums.each([&](float& value, int, int) { value *= rescale; });
  }
};

// The layout of a head: kPacks packs of kValues values in each of kLanes lanes.
template <typename T, int kValuesOf, int kLanesOf, int kPacksOf, bool kEdgesOf>
struct Layout {
  static constexpr bool kEdges = kEdgesOf;  // whether edges have features
  static constexpr int kValues = kValuesOf, kLanes = kLanesOf, kPacks = kPacksOf;
  // Rows on their way at the same time, within 32 registers of each lane. More than 4 would leave
  // most of them idle at the end of the short rows that most graphs have.
  static constexpr int kInFlight = kValues * kPacks * sizeof(T) > 32 ? 2 : 4;
  using Share = RowShare<T, kValues, kLanes, kPacks>;
  using Sums = RowSums<kValues, kLanes, kPacks>;
};

// Some entries of a row, of which the first `count` take part; the others hold zeros.
template <typename L>
struct Entries {
  int count;
  int32_t edge[L::kInFlight];
  float keep[L::kInFlight];
  float score[L::kInFlight];
  typename L::Share src[L::kInFlight];
};

// The scores of the entries, known to the whole group. The projection of the edges is made where it
// is needed and never stored.
template <typename L, typename T>
__device__ void find_scores(const Gatv2<T>& op, int head, const typename L::Share& dst,
                            const typename L::Share& att, Lanes<L::kLanes> lanes,
                            Entries<L>& entries) {
  typename L::Sums z[L::kInFlight];
#pragma unroll
  for (int u = 0; u < L::kInFlight; ++u) {
    z[u].each([&](float& sum, int q, int i) { sum = entries.src[u].at(q, i) + dst.at(q, i); });
  }
  for (int64_t d = 0; L::kEdges && d < op.in.edge.width; ++d) {
    typename L::Share weight;
    weight.load(op.in.weight_edge.at(head, d), lanes.lane, op.in.x_src.width);
#pragma unroll
    for (int u = 0; u < L::kInFlight; ++u) {
      const float channel = widened(op.in.edge.row(entries.edge[u])[d]);
      z[u].each([&](float& sum, int q, int i) { sum += channel * weight.at(q, i); });
    }
  }
#pragma unroll
  for (int u = 0; u < L::kInFlight; ++u) {
    float dot = 0;
    z[u].each(
        [&](float& sum, int q, int i) { dot += att.at(q, i) * (sum > 0 ? sum : op.slope * sum); });
    entries.score[u] = lanes.sum(dot);
  }
}

// Calls body(entries) for the entries of the span, in order. Each lane reads the column and draws
// the dropout of one entry; the group then takes several at a time.
template <typename L, typename T, typename Body>
__device__ void for_each_entries(const Gatv2<T>& op, const Span& span, int head,
                                 Lanes<L::kLanes> lanes, const Body& body) {
  const int64_t width = op.in.x_src.width;
  typename L::Share dst, att;
  dst.load(op.in.x_dst.at(span.row, head), lanes.lane, width);
  att.load(op.in.att.at(0, head), lanes.lane, width);
  for (int64_t base = span.begin; base < span.end; base += L::kLanes) {
    const int count = static_cast<int>(min(span.end - base, static_cast<int64_t>(L::kLanes)));
    const int64_t entry = base + min(lanes.lane, count - 1);
    const int32_t own_col = __ldg(op.graph.col + entry);
    const auto own_edge = static_cast<int32_t>(op.graph.edge(entry));
    const float own_keep = keep_factor(op, own_edge, head);
    for (int j = 0; j < count; j += L::kInFlight) {
      Entries<L> entries;
      entries.count = min(count - j, L::kInFlight);
#pragma unroll
      for (int u = 0; u < L::kInFlight; ++u) {
        const int source = min(j + u, count - 1);
        const int32_t col = lanes.from(own_col, source);
        entries.edge[u] = lanes.from(own_edge, source);
        entries.keep[u] = lanes.from(own_keep, source);
        entries.src[u].load(op.in.x_src.at(col, head), lanes.lane, u < entries.count ? width : 0);
      }
      find_scores<L>(op, head, dst, att, lanes, entries);
      body(entries);
    }
  }
}

template <typename L>
__device__ void absorb(const Entries<L>& entries, OnlineSoftmax<typename L::Sums>& softmax) {
  float largest = -INFINITY;
#pragma unroll
  for (int u = 0; u < L::kInFlight; ++u) {
    if (u < entries.count) largest = fmaxf(largest, entries.score[u]);
  }
  softmax.raise(largest);
#pragma unroll
  for (int u = 0; u < L::kInFlight; ++u) {
    if (u >= entries.count) break;
    const float p = weight_of(entries.score[u], softmax.largest);
    softmax.total += p;
    const float weight = p * entries.keep[u];
    softmax.sums.each([&](float& sum, int q, int i) { sum += weight * entries.src[u].at(q, i); });
  }
}

// Writes a row's largest score and inverse sum of exponentials, zeros for an empty one, and returns
// the latter.
inline __device__ float finish_stats(float* stats, float largest, float total, bool empty,
                                     bool writes) {
  const float inverse = empty ? 0.0f : 1.0f / total;
  if (writes) {
    stats[0] = empty ? 0.0f : largest;
    stats[1] = inverse;
  }
  return inverse;
}

template <typename L, typename T>
__global__ void __launch_bounds__(kBlockThreads) gatv2_rows(Gatv2<T> op) {
  const int64_t task = group_index<L::kLanes>();
  if (task >= op.pieces + op.graph.num_rows) return;
  const Span span = span_of(op.graph, task, op.pieces);
  if (span.row < 0) return;
  const auto lanes = Lanes<L::kLanes>::mine();
  const int head = blockIdx.y;
  OnlineSoftmax<typename L::Sums> softmax;
  softmax.clear();
  if (span.begin < span.end) {
    for_each_entries<L>(op, span, head, lanes,
                        [&](const Entries<L>& entries) { absorb(entries, softmax); });
  }
  const Heads<T>& out = op.outputs.out;
  if (span.piece >= 0) {
    if (lanes.lane == 0) {
      float* stats = op.stats_of_piece(span.piece, head);
      stats[0] = softmax.largest;
      stats[1] = softmax.total;
    }
    softmax.sums.store(op.partial.at(span.piece, head), lanes.lane, out.width, 1.0f);
  } else {
    const float inverse = finish_stats(op.stats_of(span.row, head), softmax.largest, softmax.total,
                                       span.begin == span.end, lanes.lane == 0);
    softmax.sums.store(out.at(span.row, head), lanes.lane, out.width, inverse);
  }
}

// The weights of the entries, once the stats are known.
template <typename L, typename T>
__global__ void __launch_bounds__(kBlockThreads) gatv2_weights(Gatv2<T> op) {
  const int64_t task = group_index<L::kLanes>();
  if (task >= op.pieces + op.graph.num_rows) return;
  const Span span = span_of(op.graph, task, op.pieces);
  if (span.row < 0 || span.begin == span.end) return;
  const auto lanes = Lanes<L::kLanes>::mine();
  const int head = blockIdx.y;
  const float* stats = op.stats_of(span.row, head);
  const float largest = stats[0], inverse = stats[1];
  for_each_entries<L>(op, span, head, lanes, [&](const Entries<L>& entries) {
#pragma unroll
    for (int u = 0; u < L::kInFlight; ++u) {
      if (lanes.lane != u || u >= entries.count) continue;
      const float weight = weight_of(entries.score[u], largest) * inverse * entries.keep[u];
      op.outputs.alpha.row(entries.edge[u])[head] = narrowed<T>(weight);
    }
  });
}

// The softmax of long rows, from those of their pieces: a block for each row and head. All threads
// find the sum of exponentials, each the values of its channels.
template <typename T>
__global__ void __launch_bounds__(kBlockThreads) gatv2_merge(Gatv2<T> op) {
  const int head = blockIdx.y;
  const Heads<T>& out = op.outputs.out;
  for (int64_t row = blockIdx.x; row < op.graph.num_rows; row += gridDim.x) {
    const int64_t begin = op.graph.rowptr[row], end = op.graph.rowptr[row + 1];
    if (end - begin <= kChunk) continue;
    float largest = -INFINITY, total = 0;
    for_each_piece(begin, end, [&](int64_t piece) {
      largest = fmaxf(largest, op.stats_of_piece(piece, head)[0]);
    });
    for_each_piece(begin, end, [&](int64_t piece) {
      const float* stats = op.stats_of_piece(piece, head);
      total += weight_of(stats[0], largest) * stats[1];
    });
    const float inverse =
        finish_stats(op.stats_of(row, head), largest, total, false, threadIdx.x == 0);
    for (int64_t f = threadIdx.x; f < out.width; f += blockDim.x) {
      float sum = 0;
      for_each_piece(begin, end, [&](int64_t piece) {
        const float weight = weight_of(op.stats_of_piece(piece, head)[0], largest);
        sum += weight * op.partial.at(piece, head)[f];
      });
      out.at(row, head)[f] = narrowed<T>(sum * inverse);
    }
  }
}

template <typename L, typename T>
cudaError_t run_layout(const Gatv2<T>& op, Stream stream) {
  const int64_t groups = op.pieces + op.graph.num_rows;
  const auto blocks = static_cast<unsigned>(ceil_div(groups * L::kLanes, kBlockThreads));
  const auto rows = static_cast<unsigned>(min(op.graph.num_rows, kMergeBlocks));
  const auto heads = static_cast<unsigned>(op.outputs.out.heads);
  cudaError_t error =
      launch({"gatv2_rows", {blocks, heads}, kBlockThreads, 0, stream}, gatv2_rows<L, T>, op);
  if (error == cudaSuccess && op.pieces > 0) {
    error = launch({"gatv2_merge", {rows, heads}, kBlockThreads, 0, stream}, gatv2_merge<T>, op);
  }
  if (error != cudaSuccess || op.outputs.alpha.data == nullptr) return error;
  return launch({"gatv2_weights", {blocks, heads}, kBlockThreads, 0, stream}, gatv2_weights<L, T>,
                op);
}

template <int kValues, int kLanes, int kPacks, typename T>
cudaError_t run(const Gatv2<T>& op, Stream stream) {
  if (op.in.edge.width > 0) {
    return run_layout<Layout<T, kValues, kLanes, kPacks, true>>(op, stream);
  }
  return run_layout<Layout<T, kValues, kLanes, kPacks, false>>(op, stream);
}

// Narrow heads are shared by fewer lanes, so that a warp takes several nodes.
template <typename T>
cudaError_t run_packed(const Gatv2<T>& op, Stream stream) {
  constexpr int kValues = kPack<T>;
  const int64_t packs = op.outputs.out.width / kValues;
  if (packs <= 8) return run<kValues, 8, 1>(op, stream);
  if (packs <= 16) return run<kValues, 16, 1>(op, stream);
  if (packs <= 32) return run<kValues, 32, 1>(op, stream);
  if (packs <= 64) return run<kValues, 32, 2>(op, stream);
  return run<kValues, 32, static_cast<int>(kMaxHeadWidth) / (32 * kValues)>(op, stream);
}

template <typename T>
cudaError_t run_single(const Gatv2<T>& op, Stream stream) {
  const int64_t width = op.outputs.out.width;
  if (width <= 8) return run<1, 8, 1>(op, stream);
  if (width <= 32) return run<1, 32, 1>(op, stream);
  if (width <= 128) return run<1, 32, 4>(op, stream);
  return run<1, 32, static_cast<int>(kMaxHeadWidth) / 32>(op, stream);
}

}  // namespace

template <typename T>
cudaError_t gatv2(Queue& queue, const Csr& graph, const Gatv2Inputs<T>& in, double slope,
                  Dropout dropout, const SoftmaxOutputs<T>& outputs) {
  const Heads<T>& out = outputs.out;
  if (out.width > kMaxHeadWidth) return cudaErrorInvalidValue;
  const int64_t pieces = num_pieces(graph);
  const auto threshold = static_cast<uint32_t>(min(dropout.rate * 0x1p32, 0x1p32 - 1));
  const float keep = dropout.rate < 1 ? static_cast<float>(1 / (1 - dropout.rate)) : 0.0f;
  float* partial = queue.scratch<float>(pieces * out.heads * out.width);
  const Gatv2<T> op{graph,
                    pieces,
                    in,
                    static_cast<float>(slope),
                    dropout.seed,
                    threshold,
                    keep,
                    outputs,
                    {partial, pieces, out.heads, out.width},
                    queue.scratch<float>(pieces * out.heads * 2)};
  const bool packed = fits_packs<T>(out.width, {in.x_src.data, in.x_dst.data, in.att.data,
                                                in.weight_edge.data, out.data, partial});
  return packed ? run_packed(op, queue.stream()) : run_single(op, queue.stream());
}

FASTGRAPH_INSTANTIATE(gatv2)

}  // namespace fastgraph::cuda
