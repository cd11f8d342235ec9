// Additive attention: the score of an entry is <att, leaky_relu(x_src[col] + x_dst[row])>.
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
  Heads<const T> x_src;
  Heads<const T> x_dst;
  const T* att;
  float slope;
  uint64_t seed;
  uint32_t threshold;  // entries whose random bits are below it are dropped
  float keep;          // the factor of the others; 1 without dropout
  Heads<T> out;
  float* stats;
  Heads<float> partial;  // what the pieces add up to
  float* partial_stats;  // [pieces, heads, 2]: largest score, sum of exponentials
};

// 0 for a dropped entry.
template <typename T>
__device__ float keep_factor(const Gatv2<T>& op, int64_t entry, int head) {
  if (op.threshold == 0) return op.keep;
  const auto edge = static_cast<uint32_t>(op.graph.edge(entry));
  return philox(op.seed, edge, static_cast<uint32_t>(head)) < op.threshold ? 0.0f : op.keep;
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
template <typename T, int kValuesOf, int kLanesOf, int kPacksOf>
struct Layout {
  static constexpr int kValues = kValuesOf, kLanes = kLanesOf, kPacks = kPacksOf;
  // Rows on their way at the same time, within 32 registers of each lane. More than 4 would leave
  // most of them idle at the end of the short rows that most graphs have.
  static constexpr int kInFlight = kValues * kPacks * sizeof(T) > 32 ? 2 : 4;
  using Share = RowShare<T, kValues, kLanes, kPacks>;
  using Sums = RowSums<kValues, kLanes, kPacks>;
};

// The score of one entry, known to the whole group.
template <typename L>
__device__ float score_of(const typename L::Share& src, const typename L::Share& dst,
                          const typename L::Share& att, float slope, Lanes<L::kLanes> lanes) {
  float dot = 0;
#pragma unroll
  for (int q = 0; q < L::kPacks; ++q) {
#pragma unroll
    for (int i = 0; i < L::kValues; ++i) {
      const float z = src.at(q, i) + dst.at(q, i);
      dot += att.at(q, i) * (z > 0 ? z : slope * z);
    }
  }
  return lanes.sum(dot);
}

// Takes in the entries of the span, in order. Each lane reads the column and draws the dropout of
// one entry; the group then takes several at a time.
template <typename L, typename T>
__device__ void absorb(const Gatv2<T>& op, const Span& span, int head, Lanes<L::kLanes> lanes,
                       OnlineSoftmax<typename L::Sums>& softmax) {
  const int64_t width = op.x_src.width;
  typename L::Share dst, att;
  dst.load(op.x_dst.at(span.row, head), lanes.lane, width);
  att.load(op.att + head * width, lanes.lane, width);
  for (int64_t base = span.begin; base < span.end; base += L::kLanes) {
    const int count = static_cast<int>(min(span.end - base, static_cast<int64_t>(L::kLanes)));
    const int64_t entry = base + min(lanes.lane, count - 1);
    const int32_t own_col = __ldg(op.graph.col + entry);
    const float own_keep = keep_factor(op, entry, head);
    for (int j = 0; j < count; j += L::kInFlight) {
      typename L::Share src[L::kInFlight];
      float score[L::kInFlight], keep[L::kInFlight];
#pragma unroll
      for (int u = 0; u < L::kInFlight; ++u) {
        const int source = min(j + u, count - 1);
        const int32_t col = lanes.from(own_col, source);
        keep[u] = lanes.from(own_keep, source);
        src[u].load(op.x_src.at(col, head), lanes.lane, j + u < count ? width : 0);
      }
      float largest = -INFINITY;
#pragma unroll
      for (int u = 0; u < L::kInFlight; ++u) {
        score[u] = score_of<L>(src[u], dst, att, op.slope, lanes);
        if (j + u < count) largest = fmaxf(largest, score[u]);
      }
      softmax.raise(largest);
#pragma unroll
      for (int u = 0; u < L::kInFlight; ++u) {
        if (j + u >= count) break;
        const float p = weight_of(score[u], softmax.largest);
        softmax.total += p;
        const float weight = p * keep[u];
        softmax.sums.each([&](float& sum, int q, int i) { sum += weight * src[u].at(q, i); });
      }
    }
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
  if (span.begin < span.end) absorb<L>(op, span, head, lanes, softmax);
  const int64_t width = op.out.width, heads = op.out.heads;
  if (span.piece >= 0) {
    float* stats = op.partial_stats + 2 * (span.piece * heads + head);
    if (lanes.lane == 0) {
      stats[0] = softmax.largest;
      stats[1] = softmax.total;
    }
    softmax.sums.store(op.partial.at(span.piece, head), lanes.lane, width, 1.0f);
  } else {
    float* stats = op.stats + 2 * (span.row * heads + head);
    const float inverse = finish_stats(stats, softmax.largest, softmax.total,
                                       span.begin == span.end, lanes.lane == 0);
    softmax.sums.store(op.out.at(span.row, head), lanes.lane, width, inverse);
  }
}

// The softmax of long rows, from those of their pieces: a block for each row and head. All threads
// find the sum of exponentials, each the values of its channels.
template <typename T>
__global__ void __launch_bounds__(kBlockThreads) gatv2_merge(Gatv2<T> op) {
  const int head = blockIdx.y;
  const int64_t width = op.out.width, heads = op.out.heads;
  for (int64_t row = blockIdx.x; row < op.graph.num_rows; row += gridDim.x) {
    const int64_t begin = op.graph.rowptr[row], end = op.graph.rowptr[row + 1];
    if (end - begin <= kChunk) continue;
    float largest = -INFINITY, total = 0;
    for_each_piece(begin, end, [&](int64_t piece) {
      largest = fmaxf(largest, op.partial_stats[2 * (piece * heads + head)]);
    });
    for_each_piece(begin, end, [&](int64_t piece) {
      const float* stats = op.partial_stats + 2 * (piece * heads + head);
      total += weight_of(stats[0], largest) * stats[1];
    });
    const float inverse =
        finish_stats(op.stats + 2 * (row * heads + head), largest, total, false, threadIdx.x == 0);
    for (int64_t f = threadIdx.x; f < width; f += blockDim.x) {
      float sum = 0;
      for_each_piece(begin, end, [&](int64_t piece) {
        const float score = op.partial_stats[2 * (piece * heads + head)];
        sum += weight_of(score, largest) * op.partial.at(piece, head)[f];
      });
      op.out.at(row, head)[f] = narrowed<T>(sum * inverse);
    }
  }
}

template <int kValues, int kLanes, int kPacks, typename T>
cudaError_t run(const Gatv2<T>& op, Stream stream) {
  const int64_t groups = op.pieces + op.graph.num_rows;
  const auto blocks = static_cast<unsigned>(ceil_div(groups * kLanes, kBlockThreads));
  const auto heads = static_cast<unsigned>(op.out.heads);
  return launch({"gatv2_rows", {blocks, heads}, kBlockThreads, 0, stream},
                gatv2_rows<Layout<T, kValues, kLanes, kPacks>, T>, op);
}

// Narrow heads are shared by fewer lanes, so that a warp takes several nodes.
template <typename T>
cudaError_t run_packed(const Gatv2<T>& op, Stream stream) {
  constexpr int kValues = kPack<T>;
  const int64_t packs = op.out.width / kValues;
  if (packs <= 8) return run<kValues, 8, 1>(op, stream);
  if (packs <= 16) return run<kValues, 16, 1>(op, stream);
  if (packs <= 32) return run<kValues, 32, 1>(op, stream);
  if (packs <= 64) return run<kValues, 32, 2>(op, stream);
  return run<kValues, 32, static_cast<int>(kMaxHeadWidth) / (32 * kValues)>(op, stream);
}

template <typename T>
cudaError_t run_single(const Gatv2<T>& op, Stream stream) {
  const int64_t width = op.out.width;
  if (width <= 8) return run<1, 8, 1>(op, stream);
  if (width <= 32) return run<1, 32, 1>(op, stream);
  if (width <= 128) return run<1, 32, 4>(op, stream);
  return run<1, 32, static_cast<int>(kMaxHeadWidth) / 32>(op, stream);
}

}  // namespace

int64_t gatv2_workspace(const Csr& graph, int64_t longest, int64_t heads, int64_t width) {
  return num_pieces(graph, longest) * heads * (width + 2);
}

template <typename T>
cudaError_t gatv2(const Csr& graph, int64_t longest, Heads<const T> x_src, Heads<const T> x_dst,
                  const T* att, float slope, Dropout dropout, Heads<T> out, float* stats,
                  float* workspace, Stream stream) {
  if (out.width > kMaxHeadWidth) return cudaErrorInvalidValue;
  const int64_t pieces = num_pieces(graph, longest);
  const auto threshold = static_cast<uint32_t>(min(dropout.rate * 0x1p32, 0x1p32 - 1));
  const float keep = dropout.rate < 1 ? static_cast<float>(1 / (1 - dropout.rate)) : 0.0f;
  const Heads<float> partial{workspace, pieces, out.heads, out.width};
  float* partial_stats = workspace + pieces * out.heads * out.width;
  const Gatv2<T> op{graph,     pieces, x_src, x_dst, att,     slope,        dropout.seed,
                    threshold, keep,   out,   stats, partial, partial_stats};
  const bool packed = fits_packs<T>(out.width, {x_src.data, x_dst.data, att, out.data, workspace});
  const cudaError_t error = packed ? run_packed(op, stream) : run_single(op, stream);
  if (error != cudaSuccess || pieces == 0) return error;
  const auto blocks = static_cast<unsigned>(min(graph.num_rows, kMergeBlocks));
  const auto heads = static_cast<unsigned>(out.heads);
  return launch({"gatv2_merge", {blocks, heads}, kBlockThreads, 0, stream}, gatv2_merge<T>, op);
}

#define FASTGRAPH_INSTANTIATE(T)                                                                   \
  template cudaError_t gatv2(const Csr&, int64_t, Heads<const T>, Heads<const T>, const T*, float, \
                             Dropout, Heads<T>, float*, float*, Stream);
FASTGRAPH_INSTANTIATE(float)
FASTGRAPH_INSTANTIATE(bfloat16)
FASTGRAPH_INSTANTIATE(float16)
#undef FASTGRAPH_INSTANTIATE

}  // namespace fastgraph::cuda
