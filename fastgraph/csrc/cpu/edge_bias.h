// What is added to the scores of edges before their softmax.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/bias_table.h"
#include "fastgraph/edge_blocks.h"
#include "fastgraph/memory.h"
#include "fastgraph/parallel.h"
#include "fastgraph/row_batch.h"
#include "fastgraph/score_bias.h"
#include "fastgraph/simd.h"
#include "fastgraph/types.h"

namespace fastgraph {

// Nothing, in passes whose code has no room for more.
template <typename T>
struct NoBias {
  using A = Accumulator<T>;

  template <typename Block>
  FASTGRAPH_INLINE void expect(const Block&) const {}
  template <typename Block>
  FASTGRAPH_INLINE BlockOf<A> added(const Block&, BlockOf<A> score) const {
    return score;
  }
  void add_to_batch(const RowBatch&, A*) const {}
};

// The sum of both, for the entries of a graph. Types are brought into their order once: every head
// reads them again.
template <typename T>
class EdgeBias {
  using A = Accumulator<T>;

 public:
  EdgeBias(const EdgeBiases<T>& biases, const OrderedCsr& graph)
      : of_edges_(biases.of_edges.values), of_types_(biases.of_types), table_(of_types_) {
    if (!of_types_.given()) return;
    if (is_narrow()) {
      narrow_ = in_order<uint8_t>(graph);
    } else {
      wide_ = in_order<int32_t>(graph);
    }
  }

  // Before what scores are made of is loaded: a bias is found by the number of its edge, and those
  // of a row lie apart.
  template <typename Block>
  FASTGRAPH_INLINE void expect(const Block& block) const {
    if (of_edges_.data == nullptr) return;
    for (int i = 0; i < block.count; ++i) {
      __builtin_prefetch(of_edges_.row(block.edge(i)) + block.head);
    }
  }

  // With those of lanes in use; of others anything.
  template <typename Block>
  FASTGRAPH_INLINE BlockOf<A> added(const Block& block, BlockOf<A> score) const {
    if (of_edges_.data != nullptr) score += load_edges<T>(block, of_edges_);
    if (!of_types_.given()) return score;
    visit([&](const auto* types) { score += of_types(block, types + block.entry); });
    return score;
  }

  void add_to_batch(const RowBatch& batch, A* score) const {
    add_edges_of_batch<T>(batch, of_edges_, score);
    if (!of_types_.given()) return;
    visit([&](const auto* types) {
      with_head_lanes<A>(batch.heads, [&](auto lanes) {
        constexpr int N = decltype(lanes)::value;
        for (int64_t e = batch.begin; e < batch.end; ++e) {
          const T* row = of_types_.values.row(types[e]);
          for (int64_t h = 0; h < batch.heads; h += N) {
            A* own = score + batch.at(e) + h;
            store<N>(own, load<N>(own) + load<N>(row + h));
          }
        }
      });
    });
  }

 private:
  static constexpr int64_t kAtOnce = 1 << 14;

  bool is_narrow() const { return of_types_.values.rows <= 256; }

  template <typename Body>
  void visit(const Body& body) const {
    return is_narrow() ? body(narrow_.get()) : body(wide_.get());
  }

  // With those of a whole block behind them, for which types are read.
  template <typename Type>
  Scratch<Type> in_order(const OrderedCsr& graph) const {
    auto found = scratch<Type>(graph.num_entries + kBlock);
    of_types_.types.visit([&](const auto* types) {
      for_each_task((graph.num_entries + kAtOnce - 1) / kAtOnce, graph.num_entries, [&](int64_t t) {
        const int64_t end = std::min((t + 1) * kAtOnce, graph.num_entries);
        for (int64_t e = t * kAtOnce; e < end; ++e) {
          found[e] = static_cast<Type>(types[graph.edge(e)]);
        }
      });
    });
    std::fill_n(found.get() + graph.num_entries, kBlock, Type{0});
    return found;
  }

  template <typename Type>
  BlockOf<A> of_types(const EdgeBlock& block, const Type* types) const {
    const A* const own = table_.of_head(block.head);
    A found[kBlock];
    if (table_.is_in_registers()) {
      constexpr int N = BiasTable<T>::N;
      const auto first = load<N>(own), second = load<N>(own + N);
      Bits<A> wide[kBlock];
      for (int i = 0; i < kBlock; ++i) wide[i] = types[i];
      for (int i = 0; i < kBlock; i += N) {
        store<N>(found + i, __builtin_shuffle(first, second, load_raw<N>(wide + i)));
      }
    } else {
      for (int i = 0; i < kBlock; ++i) found[i] = own[types[i]];
    }
    return load<kBlock>(found);
  }

  template <typename Type>
  BlockOf<A> of_types(const SharedBlock& block, const Type* types) const {
    A found[kBlock] = {};
    for_each_lane(block, [&](int lane, int i, int h) {
      found[lane] = table_.of_head(block.head + h)[types[i]];
    });
    return load<kBlock>(found);
  }

  Matrix<const T> of_edges_;
  ScoreBias<T> of_types_;
  BiasTable<T> table_;
  Scratch<uint8_t> narrow_;
  Scratch<int32_t> wide_;
};

}  // namespace fastgraph
