// A table of biases by types of entries, head by head in the dtype of scores.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/score_bias.h"
#include "fastgraph/memory.h"
#include "fastgraph/simd.h"
#include "fastgraph/types.h"

namespace fastgraph {

template <typename T>
class BiasTable {
 public:
  using A = Accumulator<T>;
  static constexpr int N = kLanes<A>;

  explicit BiasTable(const ScoreBias<T>& bias)
      : types_(bias.types.given() ? bias.values.rows : 0),
        row_(is_in_registers() ? 2 * N : types_),
        values_(scratch<A>(bias.types.given() ? row_ * bias.values.width : 0)) {
    if (!bias.types.given()) return;
    std::fill_n(values_.get(), row_ * bias.values.width, A{0});
    for (int64_t type = 0; type < types_; ++type) {
      for (int64_t head = 0; head < bias.values.width; ++head) {
        values_[head * row_ + type] = load_one(bias.values.row(type) + head);
      }
    }
  }

  // True if two vectors hold a head's part, of which a permutation takes any values.
  bool is_in_registers() const { return kVectorBytes >= 32 && types_ <= 2 * N; }

  const A* of_head(int64_t head) const { return values_.get() + head * row_; }

 private:
  int64_t types_;
  int64_t row_;
  Scratch<A> values_;  // [heads, row_]
};

}  // namespace fastgraph
