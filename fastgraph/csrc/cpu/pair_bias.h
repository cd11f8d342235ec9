// What is added to the scores of all pairs of a query and a key, row by row, and its gradient.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu/bias_table.h"
#include "cpu/score_bias.h"
#include "fastgraph/memory.h"
#include "fastgraph/parallel.h"
#include "fastgraph/simd.h"
#include "fastgraph/types.h"

namespace fastgraph {

template <typename T>
class PairBias {
  using A = Accumulator<T>;

 public:
  explicit PairBias(const ScoreBias<T>& bias) : bias_(bias), table_(bias) {}

  bool given() const { return bias_.given(); }

  // To the scores of so many pairs from this one on, and anything up to the end of a vector.
  void add(int64_t pair, int64_t count, int64_t head, A* score) const {
    if (!bias_.given()) return;
    if (!bias_.types.given()) {
      const T* const own = bias_.values.row(pair) + head;
      for (int64_t j = 0; j < count; ++j) score[j] += load_one(own + j * bias_.values.width);
      return;
    }
    const A* const own = table_.of_head(head);
    bias_.types.visit([&](const auto* types) {
      if (table_.is_in_registers()) {
        add_from_registers(own, types + pair, count, score);
      } else {
        for (int64_t j = 0; j < count; ++j) score[j] += own[types[pair + j]];
      }
    });
  }

 private:
  static constexpr int N = kLanes<A>;
  static constexpr int64_t kAtOnce = 128;

  // Types are widened some way ahead: a load waits for narrower stores to the same place.
  template <typename Type>
  void add_from_registers(const A* own, const Type* types, int64_t count, A* score) const {
    using I = Vector<Bits<A>, N>;
    const auto first = load<N>(own), second = load<N>(own + N);
    alignas(kCacheLine) Bits<A> wide[kAtOnce] = {};
    for (int64_t begin = 0; begin < count; begin += kAtOnce) {
      const int64_t some = std::min(kAtOnce, count - begin);
#pragma omp simd
      for (int64_t j = 0; j < some; ++j) wide[j] = types[begin + j];
      for (int64_t j = 0; j < some; j += N) {
        I type;
        std::memcpy(&type, wide + j, sizeof(type));
        A* const target = score + begin + j;
        store<N>(target, load<N>(target) + __builtin_shuffle(first, second, type));
      }
    }
  }

  ScoreBias<T> bias_;
  BiasTable<T> table_;
};

// Of a table each group of units adds up its pairs. The sum of these sums is taken in the order of
// groups, so that it does not depend on threads.
template <typename T>
class PairBiasGradient {
  using A = Accumulator<T>;

 public:
  // Lanes of sums of types are no more values than this, which a cache holds.
  static constexpr int64_t kMostLanes = 1 << 14;

  PairBiasGradient(const ScoreBias<T>& bias, T* gradient)
      : types_(bias.types),
        gradient_{gradient, bias.values.rows, bias.values.width},
        sums_(is_wanted() && types_.given() ? bias.values.rows * bias.values.width : 0),
        lanes_(sums_ * kLanes<A> > kMostLanes ? 1 : kLanes<A>) {}

  bool is_wanted() const { return gradient_.data != nullptr; }
  // A group of fewer pairs would take longer to begin and to end than to compute.
  int64_t least_pairs() const { return sums_ > 0 ? 4 * gradient_.rows : 0; }
  void expect_groups(int64_t groups) { of_groups_ = scratch<A>(groups * sums_); }

  // Values of working memory that a group needs.
  int64_t size() const { return sums_ * lanes_; }
  void begin_group(A* memory) const { std::fill_n(memory, size(), A{0}); }

  // Of so many pairs from this one on, whose scores have these gradients.
  void add(const A* of_score, int64_t pair, int64_t count, int64_t head, A* memory) const {
    if (!is_wanted()) return;
    if (sums_ == 0) {
      for (int64_t j = 0; j < count; ++j) {
        store_one(gradient_.row(pair + j) + head, of_score[j]);
      }
      return;
    }
    // Pairs of a type that follow each other add to different lanes, so that none waits.
    A* const own = memory + head * gradient_.rows * lanes_;
    types_.visit([&](const auto* types) {
      for (int64_t j = 0; j < count; ++j) {
        own[types[pair + j] * lanes_ + (j & (lanes_ - 1))] += of_score[j];
      }
    });
  }

  void end_group(int64_t group, const A* memory) const {
    A* const own = of_groups_.get() + group * sums_;
    for (int64_t i = 0; i < sums_; ++i) {
      own[i] = 0;
      for (int64_t lane = 0; lane < lanes_; ++lane) own[i] += memory[i * lanes_ + lane];
    }
  }

  // The gradient of the table, once all groups have ended.
  void finish(int64_t groups) const {
    for (int64_t i = 0; i < sums_; ++i) {
      A sum = 0;
      for (int64_t group = 0; group < groups; ++group) sum += of_groups_[group * sums_ + i];
      store_one(gradient_.row(i % gradient_.rows) + i / gradient_.rows, sum);
    }
  }

 private:
  EntryTypes types_;
  Matrix<T> gradient_;
  int64_t sums_;   // heads * types
  int64_t lanes_;  // of each sum
  Scratch<A> of_groups_;
};

}  // namespace fastgraph
