// Adding up what tasks have left behind, in an order that does not depend on the threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "fastgraph/memory.h"
#include "fastgraph/result.h"
#include "fastgraph/schedule.h"
#include "fastgraph/simd.h"

namespace fastgraph {

// total[f] = the sum over slots of sums[slot * stride + f], for f < width.
template <typename T>
void sum_slots(const Accumulator<T>* sums, int64_t slots, int64_t stride, int64_t width, T* total) {
  const auto wide = scratch<double>(width);
  std::fill(wide.get(), wide.get() + width, 0.0);
  for (int64_t slot = 0; slot < slots; ++slot) {
    for (int64_t f = 0; f < width; ++f) wide[f] += sums[slot * stride + f];
  }
  for (int64_t f = 0; f < width; ++f) store_one(total + f, static_cast<Accumulator<T>>(wide[f]));
}

// The row of `out` that was cut: scale * the sum of its pieces, each a row of `sums`.
template <typename T>
void merge_pieces(const Accumulator<T>* sums, const CutRow& cut, int64_t width,
                  Accumulator<T> scale, const Result<T>& out) {
  using A = Accumulator<T>;
  const ResultRow<T> target = out.row(cut.row);
  for (int64_t f = 0; f < width; ++f) {
    A sum = 0;
    for (int64_t piece = cut.piece_begin; piece < cut.piece_end; ++piece) {
      sum += sums[piece * width + f];
    }
    target.template store<1>(f, Vector<A, 1>{scale * sum});
  }
}

}  // namespace fastgraph
