// Sums of neighbours by tensor cores: a warp multiplies the blocks of a window, 16 x 8, by the rows
// of features that stand in their columns, for as many columns of these as it holds in registers.
//
// A slot without an edge is a factor of 0, which makes NaN of an infinite feature in a row that has
// nothing to do with it. So a warp whose sums are not finite in the end adds up once more, slot by
// slot. No sum depends on the order of threads.
#include "cuda/kernels.h"
#include "fastgraph/pieces.cuh"
#include "fastgraph/tiles.cuh"

namespace fastgraph::cuda {
namespace {

template <typename T>
struct SpmmTiles {
  CutCsr windows;
  Tiles tiles;
  const T* weight;
  const float* row_scale;
  Matrix<const T> x;
  Matrix<T> out;
  Matrix<float> partial;  // kTileRows for each piece
  unsigned part = 0;      // of the columns, where this grid begins
};

// A block's bits, by the half of its rows.
struct Slots {
  uint64_t of[kHalves];

  static __device__ Slots load(const Tiles& tiles, int64_t block) {
    return {{tiles.bits[kHalves * block], tiles.bits[kHalves * block + 1]}};
  }

  __device__ bool has_edge(int half, int slot) const { return of[half] >> slot & 1; }

  // Edges of the block before this slot.
  __device__ int before(int half, int slot) const {
    const int in_half = popcount(of[half] & ((uint64_t{1} << slot) - 1));
    return half == 0 ? in_half : popcount(of[0]) + in_half;
  }
};

// The factors of two columns from `col` on, for both rows of this lane: 0 where there is no edge.
// Without a condition, loads are on their way together.
template <typename T>
__device__ Factors factors_of(const SpmmTiles<T>& op, int64_t block, int group, int col) {
  const Slots slots = Slots::load(op.tiles, block);
  const int slot = group * kTileCols + col;
  Factors factors;
  const auto each = [&](const auto& body) {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
#pragma unroll
      for (int k = 0; k < 2; ++k) body(h, k, slots.has_edge(h, slot + k));
    }
  };
  if (op.weight == nullptr) {
    each([&](int h, int k, bool has_edge) { factors.of[h][k] = has_edge ? 1 : 0; });
    return factors;
  }
  const int64_t first = op.tiles.first[block];  // which is there in any block
  int32_t edge[kHalves][2];
  each([&](int h, int k, bool has_edge) {
    edge[h][k] = op.tiles.edge_id[first + (has_edge ? slots.before(h, slot + k) : 0)];
  });
  each([&](int h, int k, bool has_edge) {
    const float weight = widened(op.weight[edge[h][k]]);
    factors.of[h][k] = has_edge ? weight : 0;
  });
  return factors;
}

template <typename T, int kPacks>
__device__ void multiply_blocks(const SpmmTiles<T>& op, const Span& span, int64_t first,
                                Place place, TileSums<T, kPacks>& sums) {
  constexpr int kValues = kPack<T>;
  const int col = 2 * place.in_group;
  for (int64_t block = span.begin; block < span.end; ++block) {
    const auto columns = load_pack<2>(op.tiles.col + block * kTileCols + col);
    Pack<T, kValues> rows[kPacks][2];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int64_t from = first + p * sums.kWidth + place.group * kValues;
      const GatheredRows<T, kValues> x(op.x.data, op.x.width, op.x.width, from);
#pragma unroll
      for (int k = 0; k < 2; ++k) rows[p][k] = x.load(max(columns.values[k], 0));
    }
    const Factors factors = factors_of(op, block, place.group, col);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) multiply(sums.c[p], factors, rows[p]);
  }
}

// The same slot by slot, in float32.
template <typename T, int kPacks>
__device__ void add_slots(const SpmmTiles<T>& op, const Span& span, int64_t first, Place place,
                          TileSums<T, kPacks>& sums) {
  sums.clear();
#pragma unroll 1
  for (int64_t block = span.begin; block < span.end; ++block) {
    const Slots slots = Slots::load(op.tiles, block);
#pragma unroll 1
    for (int slot = 0; slot < kTileCols; ++slot) {
      const Factors pair = factors_of(op, block, place.group, slot & ~1);
      const int32_t col = op.tiles.col[block * kTileCols + slot];
      float factor[kHalves];
      bool has_edge[kHalves];
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        factor[h] = slot & 1 ? pair.of[h][1] : pair.of[h][0];
        has_edge[h] = slots.has_edge(h, place.group * kTileCols + slot);
      }
      if (!has_edge[0] && !has_edge[1]) continue;
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int64_t column = first + sums.column(place, p, i);
          if (column >= op.x.width) continue;
          const auto pack = load_pack<kPack<T>>(op.x.row(col) + column);
#pragma unroll
          for (int h = 0; h < kHalves; ++h) {
            if (!has_edge[h]) continue;
#pragma unroll
            for (int n = 0; n < kPack<T>; ++n) {
              sums.c[p][n][2 * h + i] += factor[h] * widened(pack.values[n]);
            }
          }
        }
      }
    }
  }
}

template <typename T, int kPacks>
__global__ void __launch_bounds__(kBlockThreads) spmm_windows(SpmmTiles<T> op) {
  using Sums = TileSums<T, kPacks>;
  const int64_t task = group_index<kWarp>();
  if (task >= op.windows.num_tasks) return;
  const Span span = span_of(op.windows, task);
  const auto place = Place::mine();
  const int64_t first = static_cast<int64_t>(op.part + blockIdx.y) * (kPacks * Sums::kWidth);
  Sums sums;
  sums.clear();
  multiply_blocks(op, span, first, place, sums);
  if (Lanes<kWarp>::mine().ballot(!sums.are_finite())) add_slots(op, span, first, place, sums);
  sums.each(place, [&](int h, int column, float* const* values) {
    if (first + column >= op.x.width) return;
    const int64_t in_window = place.group + h * kHalf;
    if (span.piece >= 0) {
      Pack<float, kPack<T>> pack;
#pragma unroll
      for (int n = 0; n < kPack<T>; ++n) pack.values[n] = *values[n];
      store_pack(op.partial.row(span.piece * kTileRows + in_window) + first + column, pack);
      return;
    }
    const int64_t row = span.row * static_cast<int64_t>(kTileRows) + in_window;
    if (row >= op.out.rows) return;
    const float scale = op.row_scale ? op.row_scale[row] : 1;
    Pack<T, kPack<T>> pack;
#pragma unroll
    for (int n = 0; n < kPack<T>; ++n) pack.values[n] = narrowed<T>(*values[n] * scale);
    store_pack(op.out.row(row) + first + column, pack);
  });
}

// The sums of windows that were cut, from those of their pieces.
template <typename T>
__global__ void __launch_bounds__(kBlockThreads) spmm_windows_merge(SpmmTiles<T> op) {
  for_each_merged(op.windows, op.out.width, [&](const CutRow& window, int64_t f) {
    const int64_t first = window.row * static_cast<int64_t>(kTileRows);
    for (int64_t r = 0; r < kTileRows && first + r < op.out.rows; ++r) {
      float sum = 0;
      for_each_piece(window,
                     [&](int64_t piece) { sum += op.partial.row(piece * kTileRows + r)[f]; });
      const float scale = op.row_scale ? op.row_scale[first + r] : 1;
      op.out.row(first + r)[f] = narrowed<T>(sum * scale);
    }
  });
}

}  // namespace

template <typename T>
cudaError_t spmm_tiles(Queue& queue, const CutCsr& windows, const Tiles& tiles, const T* weight,
                       const float* row_scale, Matrix<const T> x, Matrix<T> out) {
  // So that a warp has as many columns, and sums, of either type.
  constexpr int kPacks = kPack<bfloat16> / kPack<T>;
  const int64_t rows = windows.num_pieces * kTileRows;
  SpmmTiles<T> op{windows, tiles, weight, row_scale, x, out, {}};
  op.partial = {queue.scratch<float>(rows * x.width), rows, x.width};
  const auto blocks = static_cast<unsigned>(ceil_div(windows.num_tasks * kWarp, kBlockThreads));
  const cudaError_t error = for_each_grid<kPacks * TileSums<T, kPacks>::kWidth>(
      x.width, [&](unsigned part, unsigned parts) {
        op.part = part;
        return launch({"spmm_windows", {blocks, parts}, kBlockThreads, 0, queue.stream()},
                      spmm_windows<T, kPacks>, op);
      });
  if (error != cudaSuccess) return error;
  return launch(
      {"spmm_windows_merge", merge_grid(windows, x.width), kBlockThreads, 0, queue.stream()},
      spmm_windows_merge<T>, op);
}

template decltype(spmm_tiles<float>) spmm_tiles<float>;
template decltype(spmm_tiles<bfloat16>) spmm_tiles<bfloat16>;

}  // namespace fastgraph::cuda
