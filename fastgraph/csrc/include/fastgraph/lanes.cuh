// Groups of lanes that share a row, and what they load and store together.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "fastgraph/platform.cuh"
#include "fastgraph/types.h"
#include "fastgraph/views.h"

namespace fastgraph {

constexpr int kWarp = 32;
constexpr int kBlockThreads = 128;

// Rows that a group has on their way from memory at the same time, where one of its lanes holds a
// pack of each at most.
constexpr int kInFlight = 4;

// The larger of two values, of which a NaN counts for nothing.
inline __device__ float larger(float a, float b) { return fmaxf(a, b); }
inline __device__ double larger(double a, double b) { return fmax(a, b); }

// kCount consecutive lanes of a warp, a power of two. Groups of a warp may take different paths.
template <int kCount>
struct Lanes {
  int lane;       // within the group
  unsigned mask;  // the group's lanes in its warp

  static __device__ Lanes mine() {
    const int in_warp = threadIdx.x % kWarp;
    const unsigned all = 0xffffffffu >> (kWarp - kCount);
    return {in_warp % kCount, all << (in_warp / kCount * kCount)};
  }

  template <typename T>
  __device__ T from(T value, int source) const {
    return __shfl_sync(mask, value, source, kCount);
  }

  // A bit for each lane of the group, set where the predicate holds.
  __device__ uint32_t ballot(bool predicate) const {
    const uint32_t of_warp = __ballot_sync(mask, predicate);
    return of_warp >> (threadIdx.x % kWarp - lane);
  }

  // The largest of the group's values, of which a NaN counts for nothing.
  template <typename A>
  __device__ A largest(A value) const {
#pragma unroll
    for (int bits = kCount / 2; bits > 0; bits /= 2) {
      value = larger(value, __shfl_xor_sync(mask, value, bits, kCount));
    }
    return value;
  }

  // The sum over the group, with the same bits in each lane.
  template <typename A>
  __device__ A sum(A value) const {
#pragma unroll
    for (int bits = kCount / 2; bits > 0; bits /= 2) {
      value += __shfl_xor_sync(mask, value, bits, kCount);
    }
    return value;
  }

  // Of the sums over the group of kEach values of each lane, with the bits that sum() gives them,
  // the one of which this lane is a holder. At each step lanes hand half of what they add up to
  // others, which add up that: together they take as many steps as for one sum, of fewer each.
  template <typename A, int kEach>
  __device__ A own_sum(A (&values)[kEach]) const {
    static_assert(kEach <= kCount);
    int bits = kCount / 2;
#pragma unroll
    for (int left = kEach / 2; left > 0; left /= 2, bits /= 2) {
      const bool upper = (lane & bits) != 0;
#pragma unroll
      for (int i = 0; i < left; ++i) {
        const A given = upper ? values[i] : values[i + left];
        const A kept = upper ? values[i + left] : values[i];
        values[i] = kept + __shfl_xor_sync(mask, given, bits, kCount);
      }
    }
    A sum = values[0];
#pragma unroll
    for (; bits > 0; bits /= 2) sum += __shfl_xor_sync(mask, sum, bits, kCount);
    return sum;
  }
  // The number of the sum of which a lane is a holder, and what the first holder of one has.
  template <int kEach>
  __device__ int held() const {
    return lane / (kCount / kEach);
  }
  template <int kEach, typename A>
  __device__ A from_holder(A value, int number) const {
    return from(value, number * (kCount / kEach));
  }
};

// The number of this group among all in the grid's x direction.
template <int kCount>
__device__ int64_t group_index() {
  return (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kCount;
}

inline __device__ float widened(float value) { return value; }
inline __device__ double widened(double value) { return value; }
inline __device__ float widened(bfloat16 value) {
  return __uint_as_float(static_cast<uint32_t>(value.bits) << 16);
}
inline __device__ float widened(float16 value) {
  return __half2float(__ushort_as_half(value.bits));
}

template <typename T>
__device__ __forceinline__ T narrowed(Accumulator<T> value) {
  if constexpr (std::is_same_v<T, bfloat16>) {
    return {__bfloat16_as_ushort(__float2bfloat16_rn(value))};
  } else if constexpr (std::is_same_v<T, float16>) {
    return {__half_as_ushort(__float2half_rn(value))};
  } else {
    return value;
  }
}

// The value that an operator computing in T itself would have: one rounding for half types.
template <typename T>
__device__ Accumulator<T> rounded(Accumulator<T> value) {
  return widened(narrowed<T>(value));
}

FASTGRAPH_BOTH inline constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// As many as a grid takes in the directions y and z; blocks stride over the others.
inline unsigned grid_size(int64_t count) {
  return static_cast<unsigned>(std::min<int64_t>(count, 65535));
}

// Calls start(part, parts) for grids that together cover the columns of a row, in parts of kWidth,
// in their y direction: each takes `parts` from `part` on. Blocks that stride over parts would need
// more registers.
template <int kWidth, typename Start>
cudaError_t for_each_grid(int64_t width, const Start& start) {
  cudaError_t error = cudaSuccess;
  const int64_t all = ceil_div(width, kWidth);
  for (int64_t part = 0; part < all && error == cudaSuccess;) {
    const unsigned parts = grid_size(all - part);
    error = start(static_cast<unsigned>(part), parts);
    part += parts;
  }
  return error;
}

// Values that one instruction loads or stores: the alignment tells the compiler that it may.
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Pack {
  T values[kCount];
};

template <int kCount, typename T>
__device__ Pack<T, kCount> load_pack(const T* p) {
  return *reinterpret_cast<const Pack<T, kCount>*>(p);
}

// What packs of so many bytes are stored by: the compiler takes a struct apart, and would store its
// values one by one.
template <int kBytes>
using Stored = std::conditional_t<kBytes % sizeof(float4) == 0, float4, float2>;

template <int kCount, typename T>
__device__ void store_pack(T* p, const Pack<T, kCount>& pack) {
  using P = Pack<T, kCount>;
  using V = Stored<sizeof(P)>;
  constexpr int kVectors = sizeof(P) / sizeof(V);
  if constexpr (kVectors > 0) {
    V vectors[kVectors];
    memcpy(vectors, &pack, sizeof(P));
#pragma unroll
    for (int v = 0; v < kVectors; ++v) __stwb(reinterpret_cast<V*>(p) + v, vectors[v]);
  } else {
    *reinterpret_cast<P*>(p) = pack;
  }
}

// As many values as 16 bytes hold.
template <typename T>
constexpr int kPack = 16 / static_cast<int>(sizeof(T));

// Whether rows of `width` values consist of whole packs, and the arrays, of values or of what
// belongs to each of them, begin where a pack of theirs may.
template <typename T, typename... Elements>
bool fits_packs(int64_t width, const Elements*... arrays) {
  const auto is_aligned = [](auto* p) {
    return reinterpret_cast<uintptr_t>(p) % (kPack<T> * sizeof(*p)) == 0;
  };
  return width % kPack<T> == 0 && (is_aligned(arrays) && ...);
}

// A group's share of a row: of each kPacks * kLanes packs lane l holds those at l, l + kLanes, ...
// Columns at and beyond `width` hold zeros and are not touched in memory.
template <typename T, int kValues, int kLanes, int kPacks>
struct RowShare {
  using P = Pack<T, kValues>;
  static constexpr int kWidth = kValues * kLanes * kPacks;

  P packs[kPacks];

  static __device__ int column(int lane, int q) { return (q * kLanes + lane) * kValues; }

  __device__ void load(const T* row, int lane, int64_t width) {
#pragma unroll
    for (int q = 0; q < kPacks; ++q) {
      const int f = column(lane, q);
      packs[q] = f < width ? *reinterpret_cast<const P*>(row + f) : P{};
    }
  }

  // Value i of pack q.
  __device__ Accumulator<T> at(int q, int i) const { return widened(packs[q].values[i]); }
};

// Rows that a lane gathers kValues values of, from its own column on. Bindings see to it that a row
// has less than 2^31 bytes, so that its address is one multiplication and addition.
template <typename T, int kValues>
struct GatheredRows {
  const char* first;  // of row 0
  int32_t stride;     // bytes from one row to the next

  // Lanes at and beyond the end of rows read their last values: without a condition, loads are on
  // their way together.
  __device__ GatheredRows(const T* rows, int64_t width, int64_t row_width, int64_t column)
      : first(reinterpret_cast<const char*>(rows + max(min(column, width - kValues), int64_t{0}))),
        stride(static_cast<int32_t>(row_width * sizeof(T))) {}

  __device__ __forceinline__ Pack<T, kValues> load(int32_t row) const {
    return *reinterpret_cast<const Pack<T, kValues>*>(first + wide_product(row, stride));
  }
};

// Sums in a group's layout of a row.
template <typename A, int kValues, int kLanes, int kPacks>
struct RowSums {
  A values[kPacks][kValues];

  __device__ void clear() {
    each([](A& value, int, int) { value = 0; });
  }

  // Calls body(value, q, i) for each value of this lane.
  template <typename Body>
  __device__ void each(const Body& body) {
#pragma unroll
    for (int q = 0; q < kPacks; ++q) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) body(values[q][i], q, i);
    }
  }

  // Writes factor * sums, with `addend`, another row, added unless it is null.
  template <typename T>
  __device__ void store(T* row, int lane, int64_t width, A factor,
                        const T* addend = nullptr) const {
    using Share = RowShare<T, kValues, kLanes, kPacks>;
#pragma unroll
    for (int q = 0; q < kPacks; ++q) {
      const int f = Share::column(lane, q);
      if (f >= width) continue;
      typename Share::P pack{};
      if (addend != nullptr) pack = *reinterpret_cast<const typename Share::P*>(addend + f);
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        A value = values[q][i] * factor;
        if (addend != nullptr) value += widened(pack.values[i]);
        pack.values[i] = narrowed<T>(value);
      }
      store_pack(row + f, pack);
    }
  }
};

// kCount consecutive numbers.
template <int kCountOf>
struct Consecutive {
  static constexpr int kCount = kCountOf;
  int first;
};

template <int kMost, typename Body>
__device__ __forceinline__ void for_each_fewer(int first, int count, const Body& body) {
  if constexpr (kMost > 1) {
    constexpr int kCount = kMost / 2;
    if (count & kCount) {
      body(Consecutive<kCount>{first});
      first += kCount;
    }
    for_each_fewer<kCount>(first, count, body);
  }
}

// Calls body(Consecutive{}) for the numbers below `count`, in order: for kMost at a time, a power
// of two, as long as there are so many, then for half of that, a quarter and so on, each at most
// once. The body, compiled for each, asks for no number whether it is there, so that all of its
// loads are on their way together.
template <int kMost, typename Body>
__device__ __forceinline__ void for_each_consecutive(int count, const Body& body) {
  int first = 0;
#pragma unroll 1
  for (; first + kMost <= count; first += kMost) body(Consecutive<kMost>{first});
  for_each_fewer<kMost>(first, count, body);
}

// How many values of a row a lane takes at a time, and how many lanes share it.
template <int kValuesOf, int kLanesOf>
struct Split {
  static constexpr int kValues = kValuesOf, kLanes = kLanesOf;
};

// Calls run(Split{}) for rows of a width; `packed` tells whether they consist of packs. Narrow rows
// are shared by fewer lanes, so that a warp takes several.
template <typename T, typename Run>
auto with_split(int64_t width, bool packed, const Run& run) {
  const auto with_values = [&](auto values) {
    constexpr int kValues = decltype(values)::value;
    const int64_t packs = ceil_div(width, kValues);
    if (packs <= 8) return run(Split<kValues, 8>{});
    if (packs <= 16) return run(Split<kValues, 16>{});
    return run(Split<kValues, 32>{});
  };
  return packed ? with_values(std::integral_constant<int, kPack<T>>{})
                : with_values(std::integral_constant<int, 1>{});
}

}  // namespace fastgraph
