// The least that a gathering kernel can do: read the same rows in the same order.
//
// Compiled by measure/gather.py for the machine it runs on; called through ctypes after torch was
// loaded, so that the OpenMP symbols resolve to torch's runtime.
#include <algorithm>
#include <cstdint>

namespace {

// As wide as the machine's registers, and at most half as many sums as there are of those: with
// more they would live in memory.
#ifdef __AVX512F__
constexpr int64_t kLanes = 16;
#else
constexpr int64_t kLanes = 8;
#endif
constexpr int kRegisters = kLanes;
constexpr int64_t kEdgesInBlock = 1024;

typedef float Vector __attribute__((vector_size(kLanes * sizeof(float)), aligned(4)));

inline const Vector* vectors(const float* row) { return reinterpret_cast<const Vector*>(row); }

// Calls body(row) for all rows; blocks hold about the same number of edges.
template <typename Body>
void for_each_row(const int64_t* rowptr, int64_t num_rows, Body body) {
  const int64_t num_blocks = std::max<int64_t>(1, rowptr[num_rows] / kEdgesInBlock);
#pragma omp parallel for schedule(dynamic)
  for (int64_t block = 0; block < num_blocks; ++block) {
    const auto boundary = [&](int64_t b) {
      const int64_t edge = rowptr[num_rows] / num_blocks * b;
      return b == num_blocks ? num_rows
                             : std::lower_bound(rowptr, rowptr + num_rows, edge) - rowptr;
    };
    for (int64_t row = boundary(block), end = boundary(block + 1); row < end; ++row) body(row);
  }
}

}  // namespace

extern "C" {

// Reads x[col[e], :] of every edge into one set of registers; checksum[r] depends on all of them.
// channels must be a multiple of kLanes * 8.
void gather_read(const int64_t* rowptr, const int32_t* col, const float* x, float* checksum,
                 int64_t num_rows, int64_t channels) {
  constexpr int kSums = 8;
  for_each_row(rowptr, num_rows, [=](int64_t row) {
    Vector sums[kSums] = {};
    for (int64_t e = rowptr[row]; e < rowptr[row + 1]; ++e) {
      const Vector* source = vectors(x + col[e] * channels);
      for (int64_t v = 0; v < channels / kLanes; v += kSums) {
#pragma GCC unroll 8
        for (int s = 0; s < kSums; ++s) sums[s] += source[v + s];
      }
    }
    Vector total = sums[0];
    for (int s = 1; s < kSums; ++s) total += sums[s];
    checksum[row] = 0;
    for (int64_t lane = 0; lane < kLanes; ++lane) checksum[row] += total[lane];
  });
}

// The same with a sum for every channel, written out once per row: an unweighted sum. Rows wider
// than the registers are gathered in several passes.
// channels must be a multiple of kLanes * kRegisters.
void gather_sum(const int64_t* rowptr, const int32_t* col, const float* x, float* out,
                int64_t num_rows, int64_t channels) {
  for_each_row(rowptr, num_rows, [=](int64_t row) {
    Vector* target = reinterpret_cast<Vector*>(out + row * channels);
    for (int64_t v = 0; v < channels / kLanes; v += kRegisters) {
      Vector sums[kRegisters] = {};
      for (int64_t e = rowptr[row]; e < rowptr[row + 1]; ++e) {
        const Vector* source = vectors(x + col[e] * channels) + v;
#pragma GCC unroll 16
        for (int s = 0; s < kRegisters; ++s) sums[s] += source[s];
      }
#pragma GCC unroll 16
      for (int s = 0; s < kRegisters; ++s) target[v + s] = sums[s];
    }
  });
}

}  // extern "C"
