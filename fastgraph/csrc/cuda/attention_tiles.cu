// Dot-product attention by tensor cores: a warp holds the queries of a window of 16 rows,
// multiplies them by the keys that stand in the columns of a block, 16 x 8, and the softmax of
// these scores by the values. The softmax is found online (Milakov and Gimelshein, arXiv
// 1805.02867), and what lanes hold of the scores is what they hold of the factors of values, so
// that nothing is passed on (Dao et al., NeurIPS 2022).
//
// Both backward passes are those of rows, which find weights again from scores and stats. So scores
// are those of float32: rounded to tf32, the weights of a row would not add up to 1 there.
//
// A slot without an edge has a score of -infinity, whatever the product is, and a weight of 0,
// which makes NaN of an infinite value. So a warp whose results are not finite finds them once
// more, slot by slot. No result depends on the order of threads.
#include "cuda/kernels.h"
#include "fastgraph/edge_softmax.cuh"
#include "fastgraph/tiles.cuh"

namespace fastgraph::cuda {
namespace {

template <typename T>
struct AttentionTiles {
  CutCsr windows;
  Tiles tiles;
  const int64_t* rowptr;
  AttentionInputs<T> in;
  float scale;
  SoftmaxOutputs<T> outputs;
  Heads<float> sums_of_pieces;  // kTileRows for each piece
  SoftmaxStats<float> stats_of_pieces;

  // A row of this lane, maybe beyond the last, and where the results of its piece are.
  __device__ int64_t row(const Span& span, Place place, int h) const {
    return span.row * static_cast<int64_t>(kTileRows) + place.group + h * kHalf;
  }
  __device__ int64_t piece(const Span& span, Place place, int h) const {
    return span.piece * static_cast<int64_t>(kTileRows) + place.group + h * kHalf;
  }
  __device__ bool is_empty(int64_t row) const { return rowptr[row] == rowptr[row + 1]; }
};

// 16 bytes of a head as registers of tensor cores hold them, and heads of these.
using Words = Pack<uint32_t, 4>;
template <typename T>
__device__ Heads<const uint32_t> words_of(Heads<const T> x) {
  constexpr int kOfWord = sizeof(uint32_t) / sizeof(T);
  return {reinterpret_cast<const uint32_t*>(x.data), x.nodes, x.heads, x.width / kOfWord};
}

// A float as the sum of two numbers of tf32, but for its last two bits at most: tensor cores ignore
// those that they have no room for.
struct Split {
  uint32_t high, low;

  explicit __device__ Split(uint32_t bits) : high(bits & ~0x1fffu) {
    low = __float_as_uint(__uint_as_float(bits) - __uint_as_float(high));
  }
};

// c += a b of two words of the heads of two queries and a key. A lane's words are the same channels
// of all of them; which channel of the instruction they are is no matter.
inline __device__ void multiply_words(float, float (&c)[4], const uint32_t (&a)[4],
                                      const uint32_t (&b)[2]) {
  const Split of_a[4] = {Split(a[0]), Split(a[1]), Split(a[2]), Split(a[3])};
  const Split of_b[2] = {Split(b[0]), Split(b[1])};
  const uint32_t a_high[4] = {of_a[0].high, of_a[1].high, of_a[2].high, of_a[3].high};
  const uint32_t a_low[4] = {of_a[0].low, of_a[1].low, of_a[2].low, of_a[3].low};
  const uint32_t b_high[2] = {of_b[0].high, of_b[1].high}, b_low[2] = {of_b[0].low, of_b[1].low};
  mma_tf32(c, a_low, b_high);
  mma_tf32(c, a_high, b_low);
  mma_tf32(c, a_high, b_high);
}
inline __device__ void multiply_words(bfloat16, float (&c)[4], const uint32_t (&a)[4],
                                      const uint32_t (&b)[2]) {
  mma_bf16(c, a, b);
}

// Of the four lanes that share rows.
inline __device__ float sum_of_four(float value) {
  value += __shfl_xor_sync(0xffffffffu, value, 1);
  return value + __shfl_xor_sync(0xffffffffu, value, 2);
}
inline __device__ float largest_of_four(float value) {
  value = larger(value, __shfl_xor_sync(0xffffffffu, value, 1));
  return larger(value, __shfl_xor_sync(0xffffffffu, value, 2));
}

// The bits of a block's slots in the rows of a lane.
struct RowSlots {
  uint32_t of[kHalves];

  __device__ RowSlots(const Tiles& tiles, int64_t block, Place place) {
    const auto* const rows = reinterpret_cast<const uint8_t*>(tiles.bits) + block * kTileRows;
#pragma unroll
    for (int h = 0; h < kHalves; ++h) of[h] = rows[place.group + h * kHalf];
  }

  __device__ bool has_edge(int half, int column) const { return of[half] >> column & 1; }
};

// The softmax of the rows of a lane, group and group + 8, and its sums of values.
template <typename T, int kPacks>
struct TileSoftmax {
  float largest[kHalves];
  float total[kHalves];  // of what this lane has added
  TileSums<T, kPacks> sums;

  __device__ void clear() {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      largest[h] = -INFINITY;
      total[h] = 0;
    }
    sums.clear();
  }

  // Makes room for a larger score of half h: what was added up so far shrinks.
  __device__ void raise(int h, float score) {
    const float before = largest[h];
    largest[h] = larger(before, score);
    const float rescale = weight_of(before, largest[h]);
    total[h] *= rescale;
    sums.scale(h, rescale);
  }

  // The weights of a block's slots, of which this lane's are those of Factors.
  __device__ Factors weights_of(const float (&product)[4], float scale, const RowSlots& slots,
                                Place place) {
    Factors score;
    float most[kHalves];
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const bool has_edge = slots.has_edge(h, 2 * place.in_group + k);
        score.of[h][k] = has_edge ? times(scale, product[2 * h + k]) : -INFINITY;
      }
      most[h] = largest_of_four(larger(score.of[h][0], score.of[h][1]));
    }
    if (Lanes<kWarp>::mine().ballot(most[0] > largest[0] || most[1] > largest[1])) {
#pragma unroll
      for (int h = 0; h < kHalves; ++h) raise(h, most[h]);
    }
    Factors weights;
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
#pragma unroll
      for (int k = 0; k < 2; ++k) weights.of[h][k] = weight_of(score.of[h][k], largest[h]);
      total[h] += weights.of[h][0] + weights.of[h][1];
    }
    return weights;
  }

  __device__ bool is_finite() const {
    return sums.are_finite() && 0 * total[0] + 0 * total[1] == 0;
  }
};

// The scores of a block, of which a lane has those of Factors.
template <typename T, int kChunks>
__device__ void multiply_heads(const Words (&query)[kChunks][kHalves], const Words (&key)[kChunks],
                               float (&score)[4]) {
#pragma unroll
  for (int j = 0; j < kChunks; ++j) {
#pragma unroll
    for (int n = 0; n < 4; n += 2) {
      const uint32_t a[4] = {query[j][0].values[n], query[j][1].values[n],
                             query[j][0].values[n + 1], query[j][1].values[n + 1]};
      const uint32_t b[2] = {key[j].values[n], key[j].values[n + 1]};
      multiply_words(T{}, score, a, b);
    }
  }
}

template <typename T, int kPacks>
__device__ void add_blocks(const AttentionTiles<T>& op, const Span& span, int64_t head, Place place,
                           TileSoftmax<T, kPacks>& softmax) {
  constexpr int kChunks = 2 * kPacks;  // of a head, a pack in each of four lanes
  const auto queries = words_of(op.in.query), keys = words_of(op.in.key);
  const Heads<const T> values = op.in.value;
  const auto chunk = [&](int j) { return (4 * j + place.in_group) * 4; };
  Words query[kChunks][kHalves];
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    const int64_t row = min(op.row(span, place, h), queries.nodes - 1);
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      // Keys are read beyond the width, too.
      query[j][h] =
          chunk(j) < queries.width ? load_pack<4>(queries.at(row, head) + chunk(j)) : Words{};
    }
  }
  for (int64_t block = span.begin; block < span.end; ++block) {
    const int32_t* const cols = op.tiles.col + block * kTileCols;
    const int32_t col = max(cols[place.group], 0);
    const auto pair = load_pack<2>(cols + 2 * place.in_group);
    Words key[kChunks];
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      const GatheredRows<uint32_t, 4> rows(keys.at(0, head), keys.width, keys.heads * keys.width,
                                           chunk(j));
      key[j] = rows.load(col);
    }
    Pack<T, kPack<T>> value[kPacks][2];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const GatheredRows<T, kPack<T>> rows(values.at(0, head), values.width,
                                           values.heads * values.width,
                                           p * softmax.sums.kWidth + place.group * kPack<T>);
#pragma unroll
      for (int k = 0; k < 2; ++k) value[p][k] = rows.load(max(pair.values[k], 0));
    }
    const RowSlots slots(op.tiles, block, place);
    float score[4] = {};
    multiply_heads<T>(query, key, score);
    const Factors weights = softmax.weights_of(score, op.scale, slots, place);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) multiply(softmax.sums.c[p], weights, value[p]);
  }
}

// The same slot by slot, in float32.
template <typename T, int kPacks>
__device__ void add_slots(const AttentionTiles<T>& op, const Span& span, int64_t head, Place place,
                          TileSoftmax<T, kPacks>& softmax) {
  const AttentionInputs<T>& in = op.in;
  softmax.clear();
#pragma unroll 1
  for (int64_t block = span.begin; block < span.end; ++block) {
    const RowSlots slots(op.tiles, block, place);
#pragma unroll 1
    for (int column = 0; column < kTileCols; ++column) {
      const int32_t col = op.tiles.col[block * kTileCols + column];
      if (col < 0) break;
      float score[kHalves], weight[kHalves];
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        const T* const query = in.query.at(min(op.row(span, place, h), in.query.nodes - 1), head);
        const T* const key = in.key.at(col, head);
        float dot = 0;
#pragma unroll 1
        for (int64_t f = place.in_group; f < in.key.width; f += 4) {
          dot += widened(query[f]) * widened(key[f]);
        }
        score[h] = times(op.scale, sum_of_four(dot));
      }
      bool has_edge[kHalves];
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        has_edge[h] = slots.has_edge(h, column);
        if (!has_edge[h]) continue;
        softmax.raise(h, score[h]);
        weight[h] = weight_of(score[h], softmax.largest[h]);
        if (place.in_group == 0) softmax.total[h] += weight[h];
      }
      softmax.sums.each(place, [&](int h, int f, float* const* sums) {
        if (!has_edge[h] || f >= in.value.width) return;
        const auto value = load_pack<kPack<T>>(in.value.at(col, head) + f);
#pragma unroll
        for (int n = 0; n < kPack<T>; ++n) *sums[n] += weight[h] * widened(value.values[n]);
      });
    }
  }
}

template <typename T, int kPacks>
__device__ void store(const AttentionTiles<T>& op, const Span& span, int64_t head, Place place,
                      TileSoftmax<T, kPacks>& softmax) {
  const SoftmaxOutputs<T>& to = op.outputs;
  float factor[kHalves] = {1, 1};
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    const float total = sum_of_four(softmax.total[h]);
    const bool writes = place.in_group == 0;
    const int64_t row = op.row(span, place, h);
    if (span.piece >= 0) {
      float* const stats = op.stats_of_pieces.at(op.piece(span, place, h), head);
      if (writes) stats[0] = softmax.largest[h];
      if (writes) stats[1] = total;
    } else if (row < to.out.nodes) {
      factor[h] =
          finish_stats(to.stats.at(row, head), softmax.largest[h], total, op.is_empty(row), writes);
    }
  }
  softmax.sums.each(place, [&](int h, int f, float* const* sums) {
    if (f >= to.out.width) return;
    if (span.piece >= 0) {
      Pack<float, kPack<T>> pack;
#pragma unroll
      for (int n = 0; n < kPack<T>; ++n) pack.values[n] = *sums[n];
      store_pack(op.sums_of_pieces.at(op.piece(span, place, h), head) + f, pack);
      return;
    }
    const int64_t row = op.row(span, place, h);
    if (row >= to.out.nodes) return;
    const T* const addend = to.addend_of(row, head);
    Pack<T, kPack<T>> pack{};
    if (addend != nullptr) pack = load_pack<kPack<T>>(addend + f);
#pragma unroll
    for (int n = 0; n < kPack<T>; ++n) {
      pack.values[n] = narrowed<T>(*sums[n] * factor[h] + widened(pack.values[n]));
    }
    store_pack(to.out.at(row, head) + f, pack);
  });
}

template <typename T, int kPacks>
__global__ void __launch_bounds__(kBlockThreads) attention_windows(AttentionTiles<T> op) {
  const int64_t task = group_index<kWarp>();
  if (task >= op.windows.num_tasks) return;
  const Span span = span_of(op.windows, task);
  const auto place = Place::mine();
  for (int64_t head = blockIdx.y; head < op.outputs.out.heads; head += gridDim.y) {
    TileSoftmax<T, kPacks> softmax;
    softmax.clear();
    add_blocks(op, span, head, place, softmax);
    if (Lanes<kWarp>::mine().ballot(!softmax.is_finite())) {
      add_slots(op, span, head, place, softmax);
    }
    store(op, span, head, place, softmax);
  }
}

// The softmax of windows that were cut, from those of their pieces.
template <typename T>
__global__ void __launch_bounds__(kBlockThreads) attention_windows_merge(AttentionTiles<T> op) {
  const CutRow window = op.windows.cut_rows[blockIdx.x];
  const int64_t first = window.row * static_cast<int64_t>(kTileRows);
  for (int64_t head = blockIdx.y; head < op.outputs.out.heads; head += gridDim.y) {
    for (int64_t r = 0; r < kTileRows && first + r < op.outputs.out.nodes; ++r) {
      merge_row(op.outputs, first + r, head, op.is_empty(first + r), false, op.sums_of_pieces,
                op.stats_of_pieces, [&](const auto& body) {
                  for_each_piece(window, [&](int64_t piece) { body(piece * kTileRows + r); });
                });
    }
  }
}

}  // namespace

template <typename T>
cudaError_t attention_tiles(Queue& queue, const CutCsr& windows, const Tiles& tiles,
                            const int64_t* rowptr, const AttentionInputs<T>& in, double scale,
                            const SoftmaxOutputs<T>& outputs) {
  const int64_t rows = windows.num_pieces * kTileRows, heads = in.key.heads, width = in.key.width;
  const AttentionTiles<T> op{windows,
                             tiles,
                             rowptr,
                             in,
                             static_cast<float>(scale),
                             outputs,
                             {queue.scratch<float>(rows * heads * width), rows, heads, width},
                             {queue.scratch<float>(rows * heads * 2), heads}};
  const dim3 grid(static_cast<unsigned>(ceil_div(windows.num_tasks * kWarp, kBlockThreads)),
                  grid_size(heads));
  const bool is_narrow = width <= TileSums<T, 1>::kWidth;
  const cudaError_t error =
      launch({"attention_windows", grid, kBlockThreads, 0, queue.stream()},
             is_narrow ? attention_windows<T, 1> : attention_windows<T, 2>, op);
  if (error != cudaSuccess) return error;
  const dim3 cut(static_cast<unsigned>(windows.num_cut), grid_size(heads));
  return launch({"attention_windows_merge", cut, kBlockThreads, 0, queue.stream()},
                attention_windows_merge<T>, op);
}

template decltype(attention_tiles<float>) attention_tiles<float>;
template decltype(attention_tiles<bfloat16>) attention_tiles<bfloat16>;

}  // namespace fastgraph::cuda
