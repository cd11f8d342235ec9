// Numbers of distinct values.
#include <cstdint>
#include <limits>

#include "cpu/node_numbers.h"
#include "cpu/sampling.h"

namespace fastgraph {
namespace {

// Values that an array has entries for; others go to a table.
constexpr int64_t kMostDense = int64_t{1} << 22;

template <typename Index, typename Numbers>
void number_values(Numbers& numbers, const std::vector<Values<Index>>& values,
                   const std::vector<Index*>& positions, Buffer<Index>& distinct) {
  const uint64_t stamp = numbers.stamp();
  for (size_t list = 0; list < values.size(); ++list) {
    for (int64_t i = 0; i < values[list].size; ++i) {
      const Index value = values[list].data[i];
      uint64_t* const entry = numbers.entry(static_cast<uint64_t>(value));
      if (*entry >= (stamp | kClaim)) {
        *entry = stamp | static_cast<uint64_t>(distinct.size());
        distinct.push(value);
      }
      positions[list][i] = static_cast<Index>(*entry & (kClaim - 1));
    }
  }
}

}  // namespace

template <typename Index>
SampleDefect unique_and_compact(const std::vector<Values<Index>>& values,
                                const std::vector<Index*>& positions, Buffer<Index>& distinct) {
  int64_t total = 0, largest = -1;
  for (size_t list = 0; list < values.size(); ++list) {
    for (int64_t i = 0; i < values[list].size; ++i) {
      const int64_t value = values[list].data[i];
      if (value < 0) return {SampleDefect::kRow, static_cast<int64_t>(list), i, value, 0};
      largest = std::max(largest, value);
    }
    total += values[list].size;
  }
  if (total > std::numeric_limits<int32_t>::max()) return {SampleDefect::kTooLarge, 0, 0, total, 0};
  distinct.reserve(total);
  if (largest < kMostDense) {
    DenseNumbers numbers(largest + 1);
    number_values(numbers, values, positions, distinct);
  } else {
    HashedNumbers numbers(0);
    numbers.reserve(total);
    number_values(numbers, values, positions, distinct);
  }
  distinct.trim();
  return {};
}

template SampleDefect unique_and_compact(const std::vector<Values<int32_t>>&,
                                         const std::vector<int32_t*>&, Buffer<int32_t>&);
template SampleDefect unique_and_compact(const std::vector<Values<int64_t>>&,
                                         const std::vector<int64_t*>&, Buffer<int64_t>&);

}  // namespace fastgraph
