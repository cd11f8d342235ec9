// What a warp that multiplies blocks of tiles by rows of features holds in its registers, in the
// layout of mma.m16n8k8 (fastgraph/platform.cuh).
#pragma once

#include <cstdint>

#include "fastgraph/lanes.cuh"
#include "fastgraph/tiles.h"

namespace fastgraph::cuda {

// Rows of c that a lane holds are these apart, and so many.
constexpr int kHalves = 2;
constexpr int kHalf = kTileRows / kHalves;

// Two neighbouring columns of a block, for two rows: what a lane holds of it.
struct Factors {
  float of[kHalves][2];
};

// c[n] += factors * rows for the kPack<T> products of a pack; column g of the n-th product is value
// n of the packs of lanes 4 g to 4 g + 3.
inline __device__ void multiply(float (&c)[kPack<float>][4], const Factors& factors,
                                const Pack<float, kPack<float>> (&rows)[2]) {
  // Which columns are t and t + 4 of the instruction is no matter: 2 t and 2 t + 1 of the block.
  const uint32_t a[4] = {tf32_of(factors.of[0][0]), tf32_of(factors.of[1][0]),
                         tf32_of(factors.of[0][1]), tf32_of(factors.of[1][1])};
#pragma unroll
  for (int n = 0; n < kPack<float>; ++n) {
    const uint32_t b[2] = {tf32_of(rows[0].values[n]), tf32_of(rows[1].values[n])};
    mma_tf32(c[n], a, b);
  }
}

inline __device__ uint32_t pair_of(bfloat16 low, bfloat16 high) {
  return low.bits | static_cast<uint32_t>(high.bits) << 16;
}

inline __device__ void multiply(float (&c)[kPack<bfloat16>][4], const Factors& factors,
                                const Pack<bfloat16, kPack<bfloat16>> (&rows)[2]) {
  uint32_t a[kHalves];
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    a[h] = pair_of(narrowed<bfloat16>(factors.of[h][0]), narrowed<bfloat16>(factors.of[h][1]));
  }
#pragma unroll
  for (int n = 0; n < kPack<bfloat16>; ++n) {
    mma_bf16(c[n], a, pair_of(rows[0].values[n], rows[1].values[n]));
  }
}

// A lane's place in a warp that multiplies.
struct Place {
  int group;     // its row, and that 8 below
  int in_group;  // its pair of columns of a block, and of c

  static __device__ Place mine() {
    const int lane = threadIdx.x % kWarp;
    return {lane / 4, lane % 4};
  }
};

// The sums of a lane: of kPacks packs of 8 kPack<T> columns each, two packs for each of two rows.
template <typename T, int kPacks>
struct TileSums {
  static constexpr int kValues = kPack<T>;
  static constexpr int kWidth = kTileCols * kValues;  // of the columns for one pack of each lane

  float c[kPacks][kValues][4];

  __device__ void clear() {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
#pragma unroll
      for (int n = 0; n < kValues; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) c[p][n][i] = 0;
      }
    }
  }

  // The first column of pack i of a row, of two.
  static __device__ int column(Place place, int p, int i) {
    return p * kWidth + (2 * place.in_group + i) * kValues;
  }

  // Calls body(h, column, values) for each pack of sums, of row group + 8 h, from a column on.
  template <typename Body>
  __device__ void each(Place place, const Body& body) {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float* values[kValues];
#pragma unroll
        for (int n = 0; n < kValues; ++n) values[n] = &c[p][n][i];
        body(i / 2, column(place, p, i % 2), values);
      }
    }
  }

  // Those of row group + 8 h.
  __device__ void scale(int h, float factor) {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
#pragma unroll
      for (int n = 0; n < kValues; ++n) {
        c[p][n][2 * h] *= factor;
        c[p][n][2 * h + 1] *= factor;
      }
    }
  }

  __device__ bool are_finite() const {
    float none = 0;  // NaN if one of them is not finite
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
#pragma unroll
      for (int n = 0; n < kValues; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) none += 0 * c[p][n][i];
      }
    }
    return none == 0;
  }
};

}  // namespace fastgraph::cuda
