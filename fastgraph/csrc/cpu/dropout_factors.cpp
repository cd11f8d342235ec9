#include "cpu/dropout_factors.h"

#include <algorithm>

#include "cpu/kernels.h"
#include "fastgraph/dropout.h"
#include "fastgraph/parallel.h"

namespace fastgraph {

template <typename T>
void dropout_factors(const int64_t* numbers, int64_t first_head, Dropout dropout, Matrix<T> out) {
  using A = Accumulator<T>;
  constexpr int N = kVectorBytes / 8;
  using Lanes = Vector<uint64_t, N>;
  constexpr int64_t kEdges = 1 << 10;  // of a task
  const KeptFactors<A> factors(dropout.rate);
  const int64_t heads = out.width, last_head = first_head + heads;
  for_each_task((out.rows + kEdges - 1) / kEdges, out.rows * heads, [&](int64_t task) {
    const int64_t end = std::min((task + 1) * kEdges, out.rows);
    for (int64_t e = task * kEdges; e < end; e += N) {
      const int64_t count = std::min<int64_t>(N, end - e);
      uint64_t own[N] = {};
      for (int64_t i = 0; i < count; ++i) own[i] = static_cast<uint64_t>(numbers[e + i]);
      const Lanes edges = load_raw<N>(own);
      for (int64_t four = first_head / 4; 4 * four < last_head; ++four) {
        Lanes words[4] = {edges, splat<uint64_t, N>(static_cast<uint64_t>(four)), edges >> 32, {}};
        philox_blocks<N>(dropout.seed, words);
        A found[4 * N];
        store_in_turns<N>(words, factors, found);
        const int64_t from = std::max(first_head, 4 * four), to = std::min(last_head, 4 * four + 4);
        for (int64_t i = 0; i < count; ++i) {
          T* const row = out.row(e + i);
          for (int64_t h = from; h < to; ++h) store_one(row + h - first_head, found[4 * i + h % 4]);
        }
      }
    }
  });
}

FASTGRAPH_INSTANTIATE(dropout_factors)

}  // namespace fastgraph
