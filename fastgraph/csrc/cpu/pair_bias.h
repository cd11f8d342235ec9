// What is added to the scores of all pairs of a query and a key, block by block, and its gradient.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/bias_table.h"
#include "cpu/block_products.h"
#include "fastgraph/memory.h"
#include "fastgraph/parallel.h"
#include "fastgraph/score_bias.h"
#include "fastgraph/simd.h"
#include "fastgraph/types.h"

namespace fastgraph {

constexpr int64_t kMostKeysOfBlock = 128;

// Pairs of some queries and some keys of a graph, whose scores are rows of a block for each of some
// heads.
struct PairBlock {
  int64_t first;  // the number of the first pair
  int64_t row;    // pairs of a query, which is how far apart rows are in a bias
  int64_t queries;
  int64_t keys;  // no more than kMostKeysOfBlock
  int64_t wide;  // of a row of scores, padded
  int64_t head;  // the first one
  int64_t heads;
};

// What stands side by side for so many heads of a pair is read and written as a vector. A multiple
// of them is computed together.
constexpr int kHeadsOfVector = 4;

// Vectors of some pairs, one for each head, become vectors of the heads of one pair, or the
// reverse.
template <typename A>
FASTGRAPH_INLINE void exchange_heads(Vector<A, kHeadsOfVector> (&square)[kHeadsOfVector]) {
  detail::transpose_square<A, kHeadsOfVector>(square);
}

template <typename T>
class PairBias {
  using A = Accumulator<T>;

 public:
  PairBias(const ScoreBias<T>& bias, int64_t pairs) : bias_(bias), pairs_(pairs), table_(bias) {}

  bool given() const { return bias_.given(); }
  int64_t heads_together() const {
    if (!given()) return 1;
    return std::min<int64_t>(bias_.values.width, is_of_pairs() ? 2 * kHeads : kHeads);
  }

  // True if what a bias has for a pair is copied for the heads of a block together.
  bool is_of_pairs() const { return given() && !bias_.types.given(); }

  // Writes the bias of each score of the h-th of the heads, by the table.
  void look_up(const PairBlock& block, int64_t h, A* score) const {
    bias_.types.visit([&](const auto* types) {
      table_.visit(block.head + h, [&](const auto& at) { look_up_rows(block, types, at, score); });
    });
  }

  // The same of a bias of pairs and all heads, whose blocks are `step` values apart.
  void copy(const PairBlock& block, A* score, int64_t step) const {
    const int64_t width = bias_.values.width, keys = block.keys, wide = block.wide;
    for (int64_t i = 0; i < block.queries; ++i) {
      const T* const own = bias_.values.row(block.first + i * block.row) + block.head;
      for (int64_t h = 0; h < block.heads; h += kHeads) {
        A* const target = score + h * step + i * wide;
        const int64_t some = block.heads - h;
        const int64_t end = some < kHeads ? 0 : copy_vectors(own + h, width, keys, target, step);
        for (int64_t j = end; j < keys; ++j) {
          for (int64_t k = 0; k < std::min<int64_t>(some, kHeads); ++k) {
            target[k * step + j] = load_one(own + j * width + h + k);
          }
        }
      }
    }
  }

 private:
  static constexpr int N = kLanes<A>;
  static constexpr int kHeads = kHeadsOfVector;

  // Types are read up to the end of a vector, where there are so many.
  template <typename Type, typename At>
  void look_up_rows(const PairBlock& block, const Type* types, const At& at, A* score) const {
    const int64_t wide = block.wide;  // known to stay, whatever types and scores are
    for (int64_t i = 0; i < block.queries; ++i, score += wide) {
      const int64_t pair = block.first + i * block.row;
      const Type* own = types + pair;
      prefetch<2 * kCacheLine>(own + kRowsAhead * block.row);
      Type last[kMostKeysOfBlock + N];
      if (pair + wide > pairs_) {
        std::copy_n(own, block.keys, last);
        std::fill_n(last + block.keys, wide - block.keys, Type{0});
        own = last;
      }
      for (int64_t j = 0; j < wide; j += N) at.write(own + j, score + j);
    }
  }

  // Rows of a large graph are far apart, where the processor expects none.
  static constexpr int64_t kRowsAhead = 8;

  // A row of as many heads as a vector has, but for the last keys; returns where these begin.
  static int64_t copy_vectors(const T* own, int64_t width, int64_t keys, A* score, int64_t step) {
    int64_t j = 0;
    for (; j + kHeads <= keys; j += kHeads) {
      Vector<A, kHeads> square[kHeads];
#pragma GCC unroll 4
      for (int k = 0; k < kHeads; ++k) square[k] = load<kHeads>(own + (j + k) * width);
      exchange_heads<A>(square);
#pragma GCC unroll 4
      for (int h = 0; h < kHeads; ++h) store<kHeads>(score + h * step + j, square[h]);
    }
    return j;
  }

  ScoreBias<T> bias_;
  int64_t pairs_;
  BiasTable<T> table_;
};

// Of a table each group of units adds up its pairs. The sum of these sums is taken in the order of
// groups, so that it does not depend on threads.
template <typename T>
class PairBiasGradient {
  using A = Accumulator<T>;

 public:
  PairBiasGradient(const ScoreBias<T>& bias, T* gradient)
      : types_(bias.types),
        gradient_{gradient, bias.values.rows, bias.values.width},
        sums_(is_wanted() && types_.given() ? bias.values.rows * padded_heads() : 0),
        copies_(sums_ * kCopies > kMostSums ? 1 : kCopies) {}

  bool is_wanted() const { return gradient_.data != nullptr; }
  // A group of fewer pairs would take longer to begin and to end than to compute.
  int64_t least_pairs() const { return sums_ > 0 ? 4 * gradient_.rows : 0; }
  void expect_groups(int64_t groups) { of_groups_ = scratch<A>(groups * sums_); }

  // Values of working memory that a group needs.
  int64_t size() const { return sums_ * copies_; }
  void begin_group(A* memory) const { std::fill_n(memory, size(), A{0}); }

  // Of pairs whose scores have these gradients, in blocks of heads that are `step` values apart.
  // They are read up to the end of a vector of as many pairs as of heads, which narrow ones pad no
  // row to.
  void add(const PairBlock& block, const A* of_score, int64_t step, A* memory) const {
    if (!is_wanted()) return;
    if (sums_ > 0) {
      types_.visit([&](const auto* types) {
        for (int64_t h = 0; h < block.heads; h += kHeads) {
          if (copies_ == kCopies) {
            add_up<kCopies>(block, h, types, of_score, step, memory);
          } else {
            add_up<1>(block, h, types, of_score, step, memory);
          }
        }
      });
    } else {
      copy(block, of_score, step);
    }
  }

  void end_group(int64_t group, const A* memory) const {
    A* const own = of_groups_.get() + group * sums_;
    for (int64_t i = 0; i < sums_; i += kHeads) {
      Vector<A, kHeads> sum{};
      for (int64_t c = 0; c < copies_; ++c) sum += load<kHeads>(memory + i * copies_ + c * kHeads);
      store<kHeads>(own + i, sum);
    }
  }

  // The gradient of the table, once all groups have ended.
  void finish(int64_t groups) const {
    if (sums_ == 0) return;
    for (int64_t type = 0; type < gradient_.rows; ++type) {
      for (int64_t head = 0; head < gradient_.width; ++head) {
        const A* const own = of_groups_.get() + place(head / kHeads, type) * kHeads + head % kHeads;
        A sum = 0;
        for (int64_t group = 0; group < groups; ++group) sum += own[group * sums_];
        store_one(gradient_.row(type) + head, sum);
      }
    }
  }

 private:
  static constexpr int kHeads = kHeadsOfVector;
  static constexpr int64_t kCopies = 4;
  // Copies of sums are no more values than this, which a cache holds.
  static constexpr int64_t kMostSums = 1 << 14;

  int64_t padded_heads() const { return (gradient_.width + kHeads - 1) / kHeads * kHeads; }
  int64_t place(int64_t heads, int64_t type) const { return heads * gradient_.rows + type; }

  // Of the heads of a vector from the h-th on. Pairs of a type that follow each other add to
  // different copies, so that none waits.
  template <int64_t kEach, typename Type>
  void add_up(const PairBlock& block, int64_t h, const Type* types, const A* of_score, int64_t step,
              A* memory) const {
    A* const own = memory + place((block.head + h) / kHeads, 0) * kEach * kHeads;
    const int64_t keys = block.keys, wide = block.wide;
    const A* of_head[kHeads];  // the last one stands in for those that there are not
    for (int64_t k = 0; k < kHeads; ++k) {
      of_head[k] = of_score + std::min(h + k, block.heads - 1) * step;
    }
    for (int64_t i = 0; i < block.queries; ++i) {
      const Type* const type = types + block.first + i * block.row;
      for (int64_t j = 0; j < keys; j += kHeads) {
        Vector<A, kHeads> square[kHeads];
#pragma GCC unroll 4
        for (int k = 0; k < kHeads; ++k) square[k] = load<kHeads>(of_head[k] + i * wide + j);
        exchange_heads<A>(square);
        const auto add_one = [&](int k, int64_t type) {
          A* const sum = own + (type * kEach + k % kEach) * kHeads;
          store<kHeads>(sum, load<kHeads>(sum) + square[k]);
        };
        if (j + kHeads <= keys) {
          Type some[kHeads];  // before sums are written, where types could stand
          std::copy_n(type + j, kHeads, some);
#pragma GCC unroll 4
          for (int k = 0; k < kHeads; ++k) add_one(k, some[k]);
        } else {
          for (int k = 0; j + k < keys; ++k) add_one(k, type[j + k]);
        }
      }
    }
  }

  void copy(const PairBlock& block, const A* of_score, int64_t step) const {
    const int64_t width = gradient_.width, keys = block.keys, wide = block.wide;
    for (int64_t i = 0; i < block.queries; ++i) {
      T* const own = gradient_.row(block.first + i * block.row) + block.head;
      for (int64_t h = 0; h < block.heads; h += kHeads) {
        const A* const source = of_score + h * step + i * wide;
        const int64_t some = block.heads - h;
        const int64_t end = some < kHeads ? 0 : copy_vectors(source, step, keys, own + h, width);
        for (int64_t j = end; j < keys; ++j) {
          for (int64_t k = 0; k < std::min<int64_t>(some, kHeads); ++k) {
            store_one(own + j * width + h + k, source[k * step + j]);
          }
        }
      }
    }
  }

  // A row of as many heads as a vector has, but for the last keys; returns where these begin.
  static int64_t copy_vectors(const A* of_score, int64_t step, int64_t keys, T* own,
                              int64_t width) {
    int64_t j = 0;
    for (; j + kHeads <= keys; j += kHeads) {
      Vector<A, kHeads> square[kHeads];
#pragma GCC unroll 4
      for (int h = 0; h < kHeads; ++h) square[h] = load<kHeads>(of_score + h * step + j);
      exchange_heads<A>(square);
#pragma GCC unroll 4
      for (int k = 0; k < kHeads; ++k) store<kHeads>(own + (j + k) * width, square[k]);
    }
    return j;
  }

  EntryTypes types_;
  Matrix<T> gradient_;
  int64_t sums_;    // heads, padded, times types
  int64_t copies_;  // of each sum
  Scratch<A> of_groups_;
};

}  // namespace fastgraph
