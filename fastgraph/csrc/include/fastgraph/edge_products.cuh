// Products of values of edges with matrices, and sums of their outer products. Those of float are
// computed by tensor cores, with each factor as the sum of two numbers of tf32: errors are those of
// float. Which edges stand beside an edge is no matter for its bits.
//
// A tensor core makes NaN of an infinite factor, as the second number of others is 0. So what is
// not finite in the end is added up once more, number by number, as all of double is.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "fastgraph/lanes.cuh"
#include "fastgraph/tiles.cuh"

namespace fastgraph::cuda {

// A pack in one store to memory of any kind; store_pack is for the GPU's alone.
template <typename A>
__device__ void put_pack(A* p, const Pack<A, kPack<A>>& pack) {
  using V = std::conditional_t<std::is_same_v<A, float>, float4, double2>;
  V vector;
  memcpy(&vector, &pack, sizeof(V));
  *reinterpret_cast<V*>(p) = vector;
}

// Rows of values of edges, in whole packs; the same one for all edges where they are 0 apart.
template <typename A>
struct EdgeRows {
  static constexpr int kValues = kPack<A>;
  using P = Pack<A, kValues>;

  const A* first;
  int32_t apart;
  int edges;

  __device__ const A* row(int g) const { return first + g * apart; }
  __device__ P pack(int g, int column) const { return load_pack<kValues>(row(g) + column); }
};

// A matrix in the caller's memory.
template <typename T, bool kPacked>
struct EdgeMatrix {
  using A = Accumulator<T>;
  static constexpr int kValues = kPack<A>;
  using P = Pack<A, kValues>;

  const T* rows;
  int depth, width;

  // A pack of row k; what is outside the matrix is 0.
  __device__ P pack(int k, int column) const {
    const T* const values = rows + static_cast<int64_t>(k) * width + column;
    P pack;
    if constexpr (kPacked) {
      Pack<T, kValues> own{};
      if (k < depth && column < width) own = load_pack<kValues>(values);
#pragma unroll
      for (int i = 0; i < kValues; ++i) pack.values[i] = widened(own.values[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        pack.values[i] = k < depth && column + i < width ? widened(values[i]) : A{0};
      }
    }
    return pack;
  }
};

// Floats as the sums of two numbers of tf32, but for their last bit at most: tensor cores ignore
// what they have no room for.
template <int kCount>
struct Halved {
  uint32_t high[kCount], low[kCount];

  explicit __device__ Halved(const float (&values)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      high[i] = tf32_of(values[i]);
      low[i] = __float_as_uint(values[i] - __uint_as_float(high[i]));
    }
  }
};

// c += a b, the smallest parts first.
inline __device__ void multiply(float (&c)[4], const Halved<4>& a, const Halved<2>& b) {
  mma_tf32(c, a.low, b.high);
  mma_tf32(c, a.high, b.low);
  mma_tf32(c, a.high, b.high);
}

template <typename P>
__device__ bool is_finite(const P& pack) {
  auto none = 0 * pack.values[0];  // NaN if one of them is not finite
#pragma unroll
  for (int i = 1; i < EdgeRows<decltype(none)>::kValues; ++i) none += 0 * pack.values[i];
  return none == 0;
}

// A pack of the product of a row with a matrix, row by row of this.
template <typename A, typename T, bool kPacked>
__device__ Pack<A, kPack<A>> multiply_row(const A* x, const EdgeMatrix<T, kPacked>& matrix,
                                          int column) {
  Pack<A, kPack<A>> sum{};
  for (int k = 0; k < matrix.depth; ++k) {
    const auto row = matrix.pack(k, column);
#pragma unroll
    for (int i = 0; i < kPack<A>; ++i) sum.values[i] += x[k] * row.values[i];
  }
  return sum;
}

// Tiles of products: of the edges of kTiles times 8, and of columns of the matrix.
constexpr int kTileEdges = 8, kTileWidth = 32, kTileDepth = 16;

// A tile, for the edges from `first` and the columns from `column` on. Columns stand in the rows of
// the instruction, and edges in its columns: of the 16 rows of two instructions lane 4 g + t holds
// the four columns from 4 g on, and of the 16 columns of x those from 4 t on.
template <int kTiles, typename T, bool kPacked>
__device__ void multiply_tile(const EdgeRows<float>& x, const EdgeMatrix<T, kPacked>& matrix,
                              int first, int column, float* out, int32_t out_apart) {
  using P = Pack<float, 4>;
  const auto place = Place::mine();
  const int own_column = column + 4 * place.group;
  float sums[kTiles][2][4] = {};
  for (int begin = 0; begin < matrix.depth; begin += kTileDepth) {
    const int k = begin + 4 * place.in_group;
    P rows[4], values[kTiles];
#pragma unroll
    for (int i = 0; i < 4; ++i) rows[i] = matrix.pack(k + i, own_column);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int edge = first + n * kTileEdges + place.group;
      values[n] = k < matrix.depth && edge < x.edges ? x.pack(edge, k) : P{};
#pragma unroll
      for (int i = 1; i < 4; ++i) {
        if (k + i >= matrix.depth) values[n].values[i] = 0;
      }
    }
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        const Halved<4> a({rows[j].values[2 * q], rows[j].values[2 * q + 1],
                           rows[j + 1].values[2 * q], rows[j + 1].values[2 * q + 1]});
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          multiply(sums[n][q], a, Halved<2>({values[n].values[j], values[n].values[j + 1]}));
        }
      }
    }
  }
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int edge = first + n * kTileEdges + 2 * place.in_group + i;
      if (edge >= x.edges || own_column >= matrix.width) continue;
      P pack{{sums[n][0][i], sums[n][0][2 + i], sums[n][1][i], sums[n][1][2 + i]}};
      if (!is_finite(pack)) pack = multiply_row(x.row(edge), matrix, own_column);
      put_pack(out + edge * out_apart + own_column, pack);
    }
  }
}

// out = x * matrix, by a warp.
template <typename A, typename T, bool kPacked>
__device__ void multiply_edges(const EdgeRows<A>& x, const EdgeMatrix<T, kPacked>& matrix, A* out,
                               int32_t out_apart) {
  if constexpr (std::is_same_v<A, float>) {
    for (int column = 0; column < matrix.width; column += kTileWidth) {
      for (int first = 0; first < x.edges; first += 2 * kTileEdges) {
        if (x.edges - first > kTileEdges) {
          multiply_tile<2>(x, matrix, first, column, out, out_apart);
        } else {
          multiply_tile<1>(x, matrix, first, column, out, out_apart);
        }
      }
    }
  } else {
    const int packs = static_cast<int>(ceil_div(matrix.width, kPack<A>));
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    for (int i = lane; i < packs * x.edges; i += kWarp) {
      const int edge = i / packs, column = i % packs * kPack<A>;
      put_pack(out + edge * out_apart + column, multiply_row(x.row(edge), matrix, column));
    }
  }
}

// The values of all edges that the warps of a block have in their memories, of which two slots are
// multiplied.
template <typename A>
struct EdgePairs {
  const A* memory;      // of the first warp
  int32_t memory_size;  // of each
  const int* edges;     // of each; less than 1 for none
  int warps;
  int32_t value, value_apart;
  int32_t factor, factor_apart;

  // Calls body(x, y) for the rows of each warp, in order.
  template <typename Body>
  __device__ __forceinline__ void for_each_warp(const Body& body) const {
    for (int w = 0; w < warps; ++w) {
      const A* const own = memory + static_cast<int64_t>(w) * memory_size;
      body(EdgeRows<A>{own + value, value_apart, edges[w]},
           EdgeRows<A>{own + factor, factor_apart, edges[w]});
    }
  }
};

// The sum of outer products in the memory of the GPU, which a block adds to.
template <typename A>
struct OuterSums {
  static constexpr int kValues = kPack<A>;
  using P = Pack<A, kValues>;

  A* sums;
  int depth, width;

  __device__ int size() const { return depth * width; }

  // Adds to a pack of row k, which a single thread does.
  __device__ void add(int k, int column, const P& pack) const {
    A* const to = sums + static_cast<int64_t>(k) * width + column;
    if (width % kValues == 0) {
      P sum = load_pack<kValues>(to);
#pragma unroll
      for (int i = 0; i < kValues; ++i) sum.values[i] += pack.values[i];
      store_pack(to, sum);
    } else {
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        if (column + i < width) to[i] += pack.values[i];
      }
    }
  }
};

// The same pack of the outer products of some edges, one after the other.
template <typename A>
__device__ Pack<A, kPack<A>> outer_row(const EdgePairs<A>& pairs, int k, int column) {
  Pack<A, kPack<A>> sum{};
  pairs.for_each_warp([&](const EdgeRows<A>& x, const EdgeRows<A>& y) {
    for (int g = 0; g < x.edges; ++g) {
      const A value = x.row(g)[k];
      const auto other = y.pack(g, column);
#pragma unroll
      for (int i = 0; i < kPack<A>; ++i) sum.values[i] += value * other.values[i];
    }
  });
  return sum;
}

// Adds to kTileWidth rows and as many columns of the sums. In the instruction these are its rows
// and columns, and edges what it sums over: lane 4 g + t holds the four values and the four others
// from 4 g on, of edges t and t + 4.
inline __device__ void add_outer_tile(const EdgePairs<float>& pairs, int row, int column,
                                      const OuterSums<float>& to) {
  using P = Pack<float, 4>;
  const auto place = Place::mine();
  const int own_row = row + 4 * place.group, own_column = column + 4 * place.group;
  float sums[2][4][4] = {};
  pairs.for_each_warp([&](const EdgeRows<float>& x, const EdgeRows<float>& y) {
    for (int first = 0; first < x.edges; first += kTileEdges) {
      P values[2], others[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int edge = first + 4 * h + place.in_group;
        const bool is_one = edge < x.edges;
        values[h] = is_one && own_row < to.depth ? x.pack(edge, own_row) : P{};
        others[h] = is_one && own_column < to.width ? y.pack(edge, own_column) : P{};
      }
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        const Halved<4> a({values[0].values[2 * q], values[0].values[2 * q + 1],
                           values[1].values[2 * q], values[1].values[2 * q + 1]});
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          multiply(sums[q][j], a, Halved<2>({others[0].values[j], others[1].values[j]}));
        }
      }
    }
  });
#pragma unroll
  for (int r = 0; r < 4; ++r) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int k = own_row + r;
      const int f = column + 4 * (2 * place.in_group + i);
      if (k >= to.depth || f >= to.width) continue;
      P pack;
#pragma unroll
      for (int j = 0; j < 4; ++j) pack.values[j] = sums[r / 2][j][2 * (r % 2) + i];
      if (!is_finite(pack)) pack = outer_row(pairs, k, f);
      to.add(k, f, pack);
    }
  }
}

// Adds outer products of all pairs, by all warps of a block.
template <typename A>
__device__ void add_outer(const EdgePairs<A>& pairs, const OuterSums<A>& to) {
  if constexpr (std::is_same_v<A, float>) {
    const auto warp = static_cast<int>(threadIdx.x) / kWarp;
    const int across = static_cast<int>(ceil_div(to.width, kTileWidth));
    const int tiles = across * static_cast<int>(ceil_div(to.depth, kTileWidth));
    for (int i = warp; i < tiles; i += pairs.warps) {
      add_outer_tile(pairs, i / across * kTileWidth, i % across * kTileWidth, to);
    }
  } else {
    const int packs = static_cast<int>(ceil_div(to.width, kPack<A>));
    for (int i = static_cast<int>(threadIdx.x); i < packs * to.depth; i += pairs.warps * kWarp) {
      const int k = i / packs, column = i % packs * kPack<A>;
      to.add(k, column, outer_row(pairs, k, column));
    }
  }
}

}  // namespace fastgraph::cuda
