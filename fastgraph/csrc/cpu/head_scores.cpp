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
  const Result<T> result(grad_x);
  const int64_t size = att.nodes * att.heads * att.width;
  const int64_t slots = wants_att ? num_node_tasks(x.nodes) : 0;
  const auto sums = scratch<A>(slots * size);
  std::fill(sums.get(), sums.get() + slots * size, A{0});
  for_each_node_task(x.nodes, 2 * size, [&](int64_t task, int64_t begin, int64_t end) {
    const Heads<A> sum{sums.get() + (wants_att ? task * size : 0), att.nodes, att.heads, att.width};
    for (int64_t node = begin; node < end; ++node) {
      for (int64_t head = 0; head < x.heads; ++head) {
        const T* other = addend.data == nullptr ? nullptr : addend.at(node, head);
        const SumRow<T> target(result.row(node, head), other);
        for_each_part<kLanes<T>, 1>(0, x.width, [&](auto chunk, int64_t f) {
          constexpr int N = decltype(chunk)::kLanes;
          const Vector<A, N> own = load<N>(x.at(node, head) + f);
          Vector<A, N> total{};
          for (int64_t k = 0; k < att.nodes; ++k) {
            const A g = load_one(grad.at(k, node) + head);
            if (wants_att) {
              A* target = sum.at(k, head) + f;
              store<N>(target, load<N>(target) + g * own);
            }
            if (wants_x) total += g * load<N>(att.at(k, head) + f);
          }
          if (wants_x) target.template store<N>(f, total);
        });
      }
    }
  });
  if (wants_att) sum_slots<T>(sums.get(), slots, size, size, grad_att.data);
}

FASTGRAPH_INSTANTIATE(head_scores)
FASTGRAPH_INSTANTIATE(head_scores_backward)

}  // namespace fastgraph
