// Adding up what tasks have left behind, in an order that does not depend on the threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "fastgraph/memory.h"
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

}  // namespace fastgraph
