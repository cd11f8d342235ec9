// Layer-neighbour sampling (Balin and Catalyurek, Layer-neighbor sampling: defusing neighborhood
// explosion in GNNs, NeurIPS 2023, appendix A.3): a neighbour has one random number for all nodes
// of a layer, and each node takes the neighbours whose numbers are least.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "cpu/draws.h"
#include "cpu/edge_draws.h"
#include "cpu/sampling.h"

namespace fastgraph {

// Numbers of neighbours have the last word of their counters for themselves.
constexpr uint32_t kOfNeighbors = 1;

// Calls body(e, word) with the random word of the source of each edge of a range.
template <typename Index, typename Body>
void for_each_neighbor(const Index* row, EdgeRange range, uint64_t key, const Body& body) {
  constexpr int N = kVectorBytes / 8;
  using Lanes = Vector<uint64_t, N>;
  const int64_t end = range.begin + range.population;
  for (int64_t first = range.begin; first < end; first += N) {
    const int64_t used = std::min<int64_t>(end - first, N);
    Lanes node{};
    for (int64_t lane = 0; lane < used; ++lane) {
      node[lane] = static_cast<uint64_t>(static_cast<int64_t>(row[first + lane]));
    }
    Lanes c[4] = {Lanes{}, node & 0xffffffffu, node >> 32, splat<uint64_t, N>(kOfNeighbors)};
    philox_blocks<N>(key, c);
    for (int64_t lane = 0; lane < used; ++lane) {
      body(first + lane, static_cast<uint32_t>(c[0][lane]));
    }
  }
}

// The edges whose sources have the least numbers.
template <typename Ptr, typename Index>
void draw_layer(const Relation<Ptr, Index>& relation, EdgeRange range, uint64_t key, Ptr* out) {
  std::vector<std::pair<uint32_t, int64_t>> numbers;
  numbers.reserve(static_cast<size_t>(range.population));
  for_each_neighbor(relation.row, range, key,
                    [&](int64_t e, uint32_t word) { numbers.emplace_back(word, e); });
  std::nth_element(numbers.begin(), numbers.begin() + range.count - 1, numbers.end());
  for (int64_t d = 0; d < range.count; ++d) out[d] = static_cast<Ptr>(numbers[d].second);
}

// The same where numbers are divided by weights.
template <typename Ptr, typename Index>
void draw_layer_by_weight(const Relation<Ptr, Index>& relation, EdgeRange range, uint64_t key,
                          Ptr* out) {
  std::vector<std::pair<double, int64_t>> numbers;
  for_each_neighbor(relation.row, range, key, [&](int64_t e, uint32_t word) {
    const double weight = relation.weight_of(e);
    if (weight > 0) numbers.emplace_back(to_unit(word) / weight, e);
  });
  std::nth_element(numbers.begin(), numbers.begin() + range.count - 1, numbers.end());
  for (int64_t d = 0; d < range.count; ++d) out[d] = static_cast<Ptr>(numbers[d].second);
}

// With replacement: as many numbers for a neighbour as are drawn, of which it meets the least
// first.
template <typename Ptr, typename Index>
void draw_layer_with_replacement(const Relation<Ptr, Index>& relation, EdgeRange range,
                                 uint64_t key, Ptr* out) {
  struct Next {
    double number;  // divided by the weight
    int64_t edge;
    int64_t times;                             // that it was drawn before
    double least;                              // of the numbers that are left
    bool operator<(const Next& other) const {  // on top of a heap is the least number
      return std::pair(number, edge) > std::pair(other.number, other.edge);
    }
  };
  const auto draw_next = [&](int64_t e, int64_t times, double above) {
    const auto node = static_cast<uint64_t>(static_cast<int64_t>(relation.row[e]));
    Vector<uint64_t, 2> c[4] = {{static_cast<uint64_t>(times), 0},
                                {node & 0xffffffffu, 0},
                                {node >> 32, 0},
                                {kOfNeighbors, 0}};
    philox_blocks<2>(key, c);
    const double unit = to_unit(static_cast<uint32_t>(c[0][0]));
    // The least of those that are left, uniform in (above, 1).
    const auto left = static_cast<double>(range.count - times);
    const double least = above + (1 - above) * -std::expm1(std::log1p(-unit) / left);
    const double weight = relation.is_weighted() ? relation.weight_of(e) : 1;
    return Next{least / weight, e, times, least};
  };
  std::vector<Next> heap;
  for (int64_t e = range.begin; e < range.begin + range.population; ++e) {
    if (!relation.is_weighted() || relation.weight_of(e) > 0) heap.push_back(draw_next(e, 0, 0));
  }
  std::make_heap(heap.begin(), heap.end());
  for (int64_t d = 0; d < range.count; ++d) {
    std::pop_heap(heap.begin(), heap.end());
    const Next taken = heap.back();
    heap.pop_back();
    out[d] = static_cast<Ptr>(taken.edge);
    if (taken.times + 1 == range.count) continue;
    heap.push_back(draw_next(taken.edge, taken.times + 1, taken.least));
    std::push_heap(heap.begin(), heap.end());
  }
}

}  // namespace fastgraph
