// Which edges of a destination are drawn.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "cpu/draws.h"
#include "cpu/sampling.h"
#include "fastgraph/memory.h"

namespace fastgraph {

// Those that may be drawn, [begin, begin + population), and how many are.
struct EdgeRange {
  int64_t begin = 0;
  int64_t population = 0;
  int64_t count = 0;
};

// Numbers that were drawn before, for many draws: a table with linear probing.
class DrawnBefore {
 public:
  void clear(int64_t num_draws) {
    size_t size = 256;
    while (size < 2 * static_cast<size_t>(num_draws)) size *= 2;
    places_.assign(size, -1);
  }
  bool insert(int64_t value) {
    const size_t mask = places_.size() - 1;
    size_t at = (static_cast<uint64_t>(value) * 0x9e3779b97f4a7c15u) >> 32 & mask;
    while (places_[at] >= 0) {
      if (places_[at] == value) return false;
      at = (at + 1) & mask;
    }
    places_[at] = value;
    return true;
  }

 private:
  std::vector<int64_t> places_;
};

// Up to how many draws it is quickest to compare each with those before.
constexpr int64_t kFewDraws = 32;

// A node whose draws are made beside those of others, and where its edges go.
template <typename Ptr>
struct FewDraws {
  uint32_t item;
  uint32_t population;
  int64_t begin;
  Ptr* out;
};

// Floyd's sample (Bentley and Floyd, Programming pearls, CACM 1987): the last number that was
// possible takes the place of one that was drawn before. For at most kFewDraws of at most
// kFewChoices edges, a node in each lane.
template <typename Ptr, typename Index>
void draw_few(const FewDraws<Ptr>* nodes, int64_t num_nodes, int64_t num_draws, bool replace,
              uint64_t key, uint32_t stream, const Index* row) {
  constexpr int N = kVectorBytes / 8;
  using Lanes = Vector<uint64_t, N>;
  for (int64_t first = 0; first < num_nodes; first += N, nodes += N) {
    const int64_t used = std::min<int64_t>(num_nodes - first, N);
    Lanes item{}, population{};
    for (int64_t lane = 0; lane < used; ++lane) {
      item[lane] = nodes[lane].item;
      population[lane] = nodes[lane].population;
    }
    Lanes drawn[kFewDraws];
    Lanes words[4];
    for (int64_t d = 0; d < num_draws; ++d) {
      if (d % 4 == 0) {
        words[0] = splat<uint64_t, N>(static_cast<uint64_t>(d / 4));
        words[1] = item;
        words[2] = splat<uint64_t, N>(stream);
        words[3] = Lanes{};
        philox_blocks<N>(key, words);
      }
      if (replace) {
        drawn[d] = times<N>(words[d % 4], population) >> 32;
        continue;
      }
      const Lanes last = population - static_cast<uint64_t>(num_draws - d);
      const Lanes value = times<N>(words[d % 4], last + 1) >> 32;
      Vector<int64_t, N> equal{};
      for (int64_t before = 0; before < d; ++before) equal |= drawn[before] == value;
      drawn[d] = equal ? last : value;
    }
    for (int64_t lane = 0; lane < used; ++lane) {
      for (int64_t d = 0; d < num_draws; ++d) {
        const int64_t e = nodes[lane].begin + static_cast<int64_t>(drawn[d][lane]);
        nodes[lane].out[d] = static_cast<Ptr>(e);
        prefetch<1>(row + e);
      }
    }
  }
}

// The same for one node and any numbers.
template <typename Ptr>
void draw_distinct(Draws draws, EdgeRange range, Ptr* out) {
  DrawnBefore before;
  before.clear(range.count);
  for (int64_t d = 0; d < range.count; ++d) {
    const int64_t last = range.population - range.count + d;
    int64_t value = draw_below(draws, last + 1);
    if (!before.insert(value)) before.insert(value = last);
    out[d] = static_cast<Ptr>(range.begin + value);
  }
}

template <typename Ptr>
void draw_with_replacement(Draws draws, EdgeRange range, Ptr* out) {
  for (int64_t d = 0; d < range.count; ++d) {
    out[d] = static_cast<Ptr>(range.begin + draw_below(draws, range.population));
  }
}

// True if -log(unit) > least * weight by far more than rounding, without a logarithm:
// -log(u) >= 2 (1 - u) / (1 + u).
inline bool is_certainly_later(double unit, double weight, double least) {
  constexpr double kRounding = 1 + 1e-9;
  return 2 * (1 - unit) > kRounding * least * weight * (1 + unit);
}

// By weight without replacement: the edges with the least exponential times of rates that are their
// weights (Efraimidis and Spirakis, Weighted random sampling with a reservoir, IPL 2006), the least
// one first.
template <typename Ptr, typename Index>
void draw_distinct_by_weight(const Relation<Ptr, Index>& relation, Draws draws, EdgeRange range,
                             Ptr* out) {
  auto many = draws.in_lanes<kVectorBytes / 8>();
  std::vector<std::pair<double, int64_t>> least;  // a heap, the largest of them on top
  least.reserve(static_cast<size_t>(range.count) + 1);
  for (int64_t e = range.begin; e < range.begin + range.population; ++e) {
    const double unit = to_unit(many.next()), weight = relation.weight_of(e);
    if (weight == 0) continue;
    const bool is_full = static_cast<int64_t>(least.size()) == range.count;
    if (is_full && is_certainly_later(unit, weight, least.front().first)) continue;
    const std::pair<double, int64_t> candidate{-std::log(unit) / weight, e};
    if (is_full) {
      if (least.front() < candidate) continue;
      std::pop_heap(least.begin(), least.end());
      least.pop_back();
    }
    least.push_back(candidate);
    std::push_heap(least.begin(), least.end());
  }
  std::sort_heap(least.begin(), least.end());
  for (size_t d = 0; d < least.size(); ++d) out[d] = static_cast<Ptr>(least[d].second);
}

// By weight with replacement: by bisection of the sums up to each edge.
template <typename Ptr, typename Index>
void draw_by_weight(const Relation<Ptr, Index>& relation, Draws draws, EdgeRange range, Ptr* out) {
  std::vector<double> sums(static_cast<size_t>(range.population));
  double sum = 0;
  size_t last = 0;  // that has a weight, should a product be rounded to the sum of all
  for (size_t i = 0; i < sums.size(); ++i) {
    const double weight = relation.weight_of(range.begin + static_cast<int64_t>(i));
    if (weight > 0) last = i;
    sums[i] = sum += weight;
  }
  for (int64_t d = 0; d < range.count; ++d) {
    const double at = to_unit(draws.next64()) * sum;
    const auto found = std::upper_bound(sums.begin(), sums.end(), at) - sums.begin();
    out[d] = static_cast<Ptr>(range.begin + std::min(found, static_cast<int64_t>(last)));
  }
}

// How many edges of a range are drawn by weight.
template <typename Ptr, typename Index>
SampleDefect count_weighted(const Relation<Ptr, Index>& relation, int64_t fanout, bool replace,
                            EdgeRange& range) {
  int64_t positive = 0;
  double sum = 0;
  for (int64_t e = range.begin; e < range.begin + range.population; ++e) {
    const double weight = relation.weight_of(e);
    if (!(weight >= 0 && std::isfinite(weight))) return {SampleDefect::kWeight, 0, e, 0, weight};
    positive += weight > 0;
    sum += weight;
  }
  if (!std::isfinite(sum)) return {SampleDefect::kTotal, 0, 0, 0, sum};
  range.count = replace ? (positive ? fanout : 0) : std::min(fanout, positive);
  return {};
}

}  // namespace fastgraph
