// Dot products of each node's heads with a few vectors: what GAT scores nodes by.
#include <algorithm>

#include "cpu/kernels.h"
#include "fastgraph/dot.h"
#include "fastgraph/memory.h"
#include "fastgraph/parallel.h"
#include "fastgraph/partial_sums.h"
#include "fastgraph/result.h"

namespace fastgraph {
namespace {

constexpr int64_t kNodesOfTask = 256;

int64_t num_node_tasks(int64_t nodes) { return (nodes + kNodesOfTask - 1) / kNodesOfTask; }

// Calls body(task, first node, end) for a cut of the nodes that does not depend on the threads.
template <typename Body>
void for_each_node_task(int64_t nodes, int64_t work_of_node, const Body& body) {
  for_each_task(num_node_tasks(nodes), nodes * work_of_node, [&](int64_t task) {
    const int64_t begin = task * kNodesOfTask;
    body(task, begin, std::min(begin + kNodesOfTask, nodes));
  });
}

// The backward pass. Where a node has one score or two of a head, as in all layers of GAT, the
// vectors and the sums of their gradients stay in registers for all nodes of a task. Sums have
// their terms in the order of the nodes either way.
template <typename T>
struct Backward {
  using A = Accumulator<T>;

  Heads<const T> x;
  Heads<const T> att;
  Heads<const T> grad;
  Heads<const T> addend;
  Result<T> grad_x;
  bool wants_x;
  bool wants_att;

  SumRow<T> target(int64_t node, int64_t head) const {
    const T* other = addend.data == nullptr ? nullptr : addend.at(node, head);
    return {grad_x.row(node, head), other};
  }

  // Of nodes with kCount scores of a head.
  template <int kCount>
  void of_few(int64_t begin, int64_t end, int64_t head, Heads<A> sums) const {
    for_each_part<kLanes<T>, 2>(0, x.width, [&](auto chunk, int64_t f) {
      using C = decltype(chunk);
      constexpr int N = C::kLanes;
      const auto self = *this;  // which no store can change
      Vector<A, N> vectors[kCount][C::kCount], found[kCount][C::kCount] = {};
      for (int k = 0; k < kCount; ++k) {
        for (int q = 0; q < C::kCount; ++q) {
          vectors[k][q] = load<N>(self.att.at(k, head) + f + q * N);
        }
      }
      for (int64_t node = begin; node < end; ++node) {
        const T* own = self.x.at(node, head) + f;
        const SumRow<T> to = self.target(node, head);
#pragma GCC unroll 2
        for (int q = 0; q < C::kCount; ++q) {
          const Vector<A, N> value = load<N>(own + q * N);
          Vector<A, N> total{};
#pragma GCC unroll 2
          for (int k = 0; k < kCount; ++k) {
            const A g = load_one(self.grad.at(k, node) + head);
            found[k][q] += g * value;
            total += g * vectors[k][q];
          }
          if (self.wants_x) to.template store<N>(f + q * N, total);
        }
      }
      for (int k = 0; k < kCount && self.wants_att; ++k) {
        for (int q = 0; q < C::kCount; ++q) store<N>(sums.at(k, head) + f + q * N, found[k][q]);
      }
    });
  }

  void of_any(int64_t begin, int64_t end, int64_t head, Heads<A> sums) const {
    for (int64_t node = begin; node < end; ++node) {
      const SumRow<T> to = target(node, head);
      for_each_part<kLanes<T>, 1>(0, x.width, [&](auto chunk, int64_t f) {
        constexpr int N = decltype(chunk)::kLanes;
        const Vector<A, N> own = load<N>(x.at(node, head) + f);
        Vector<A, N> total{};
        for (int64_t k = 0; k < att.nodes; ++k) {
          const A g = load_one(grad.at(k, node) + head);
          if (wants_att) {
            A* sum = sums.at(k, head) + f;
            store<N>(sum, load<N>(sum) + g * own);
          }
          if (wants_x) total += g * load<N>(att.at(k, head) + f);
        }
        if (wants_x) to.template store<N>(f, total);
      });
    }
  }

  // `sums`, as large as att, are zero.
  void run(int64_t begin, int64_t end, Heads<A> sums) const {
    for (int64_t head = 0; head < x.heads; ++head) {
      if (att.nodes == 1) {
        of_few<1>(begin, end, head, sums);
      } else if (att.nodes == 2) {
        of_few<2>(begin, end, head, sums);
      } else {
        of_any(begin, end, head, sums);
      }
    }
  }
};

}  // namespace

template <typename T>
void head_scores(Heads<const T> x, Heads<const T> att, Heads<T> scores) {
  const int64_t size = att.nodes * x.heads;
  for_each_node_task(x.nodes, size * x.width, [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t node = begin; node < end; ++node) {
      for (int64_t head = 0; head < x.heads; ++head) {
        for (int64_t k = 0; k < att.nodes; ++k) {
          store_one(scores.at(k, node) + head, dot(x.at(node, head), att.at(k, head), x.width));
        }
      }
    }
  });
}

template <typename T>
void head_scores_backward(Heads<const T> x, Heads<const T> att, Heads<const T> grad,
                          Heads<const T> addend, Heads<T> grad_x, Heads<T> grad_att) {
  using A = Accumulator<T>;
  const bool wants_x = grad_x.data != nullptr, wants_att = grad_att.data != nullptr;
  const int64_t size = att.nodes * att.heads * att.width;
  const int64_t slots = wants_att ? num_node_tasks(x.nodes) : 0;
  const auto sums = scratch<A>(slots * size);
  std::fill(sums.get(), sums.get() + slots * size, A{0});
  const Backward<T> backward{x, att, grad, addend, Result<T>(grad_x), wants_x, wants_att};
  for_each_node_task(x.nodes, 2 * size, [&](int64_t task, int64_t begin, int64_t end) {
    A* const of_task = sums.get() + (wants_att ? task * size : 0);
    backward.run(begin, end, {of_task, att.nodes, att.heads, att.width});
  });
  if (wants_att) sum_slots<T>(sums.get(), slots, size, size, grad_att.data);
}

FASTGRAPH_INSTANTIATE(head_scores)
FASTGRAPH_INSTANTIATE(head_scores_backward)

}  // namespace fastgraph
