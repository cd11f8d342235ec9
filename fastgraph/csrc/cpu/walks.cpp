// Random walks, and pairs of nodes without an edge.
#include <algorithm>
#include <cstdint>

#include "cpu/draws.h"
#include "cpu/sampling.h"
#include "fastgraph/parallel.h"

namespace fastgraph {
namespace {

constexpr int64_t kWalksOfTask = 64;
constexpr int64_t kWorkOfStep = 32;
// Candidates of a step before it is drawn from the weights of all edges.
constexpr int kMostRejected = 16;

Draws draws_of(uint64_t key, int64_t item) {
  return {key, static_cast<uint32_t>(item), static_cast<uint32_t>(item >> 32)};
}

template <typename Ptr, typename Index>
bool has_edge(const Adjacency<Ptr, Index>& graph, int64_t from, int64_t to) {
  const Index* const begin = graph.col + graph.rowptr[from];
  const Index* const end = graph.col + graph.rowptr[from + 1];
  return std::find(begin, end, static_cast<Index>(to)) != end;
}

// The edges of a node; false if they are not in the graph.
template <typename Ptr, typename Index>
bool edges_of(const Adjacency<Ptr, Index>& graph, int64_t node, int64_t& begin, int64_t& end) {
  begin = graph.rowptr[node];
  end = graph.rowptr[node + 1];
  return begin >= 0 && begin <= end && end <= graph.num_edges;
}

// The next edge of a walk that came from `before`, among [begin, end), of which none names a node
// that is not there.
template <typename Ptr, typename Index>
int64_t biased_step(const Adjacency<Ptr, Index>& graph, const WalkBias& bias, int64_t before,
                    int64_t begin, int64_t end, Draws& draws) {
  const double to_before = 1 / bias.p, away = 1 / bias.q;
  const auto weight = [&](int64_t e) {
    const int64_t node = graph.col[e];
    if (node == before) return to_before;
    return has_edge(graph, before, node) ? 1.0 : away;
  };
  const double most = std::max({to_before, 1.0, away});
  for (int i = 0; i < kMostRejected; ++i) {
    const int64_t e = begin + draw_below(draws, end - begin);
    if (to_unit(draws.next64()) * most < weight(e)) return e;
  }
  double sum = 0;
  for (int64_t e = begin; e < end; ++e) sum += weight(e);
  double at = to_unit(draws.next64()) * sum;
  for (int64_t e = begin; e < end - 1; ++e) {
    at -= weight(e);
    if (at < 0) return e;
  }
  return end - 1;
}

// Writes a walk from nodes[0] on.
template <typename Ptr, typename Index>
SampleDefect walk(const Adjacency<Ptr, Index>& graph, int64_t length, const WalkBias& bias,
                  Draws draws, Index* nodes, Ptr* edges) {
  int64_t before = -1;
  for (int64_t step = 0; step < length; ++step) {
    const int64_t node = nodes[step];
    int64_t begin, end;
    if (!edges_of(graph, node, begin, end)) return {SampleDefect::kColptr, 0, node, end, 0};
    int64_t e = -1;
    if (begin < end) {
      const bool biased = before >= 0 && !bias.is_uniform();
      e = biased ? biased_step(graph, bias, before, begin, end, draws)
                 : begin + draw_below(draws, end - begin);
    }
    nodes[step + 1] = e < 0 ? nodes[step] : graph.col[e];
    if (edges) edges[step] = static_cast<Ptr>(e);
    const int64_t next = nodes[step + 1];
    if (next < 0 || next >= graph.num_nodes) return {SampleDefect::kRow, 0, e, next, 0};
    before = node;
  }
  return {};
}

}  // namespace

template <typename Ptr, typename Index>
SampleDefect random_walk(const Adjacency<Ptr, Index>& graph, const Index* seeds, int64_t num_walks,
                         int64_t length, const WalkBias& bias, uint64_t random_seed, Index* nodes,
                         Ptr* edges) {
  for (int64_t i = 0; i < num_walks; ++i) {
    if (seeds[i] < 0 || seeds[i] >= graph.num_nodes) {
      return {SampleDefect::kSeed, 0, i, seeds[i], 0};
    }
  }
  const int64_t num_tasks = (num_walks + kWalksOfTask - 1) / kWalksOfTask;
  std::vector<SampleDefect> defects(num_tasks);
  for_each_task(num_tasks, num_walks * length * kWorkOfStep, [&](int64_t task) {
    const int64_t end = std::min((task + 1) * kWalksOfTask, num_walks);
    for (int64_t i = task * kWalksOfTask; i < end && !defects[task].kind; ++i) {
      Index* const own = nodes + i * (length + 1);
      own[0] = seeds[i];
      defects[task] = walk(graph, length, bias, draws_of(random_seed, i), own,
                           edges ? edges + i * length : nullptr);
    }
  });
  for (const SampleDefect& defect : defects) {
    if (defect.kind) return defect;
  }
  return {};
}

template <typename Ptr, typename Index>
SampleDefect draw_negatives(const Adjacency<Ptr, Index>& graph, int64_t num_other, bool loops,
                            int64_t num_pairs, uint64_t random_seed, Index* other, Index* node) {
  const int64_t num_tasks = (num_pairs + kWalksOfTask - 1) / kWalksOfTask;
  std::vector<SampleDefect> defects(num_tasks);
  for_each_task(num_tasks, num_pairs * kWorkOfStep, [&](int64_t task) {
    const int64_t end_of_task = std::min((task + 1) * kWalksOfTask, num_pairs);
    for (int64_t i = task * kWalksOfTask; i < end_of_task; ++i) {
      Draws draws = draws_of(random_seed, i);
      other[i] = node[i] = -1;
      for (int attempt = 0; attempt < kMostAttempts; ++attempt) {
        const int64_t a = draw_below(draws, num_other), b = draw_below(draws, graph.num_nodes);
        int64_t begin, end;
        if (!edges_of(graph, b, begin, end)) {
          defects[task] = {SampleDefect::kColptr, 0, b, end, 0};
          return;
        }
        if ((!loops && a == b) || has_edge(graph, b, a)) continue;
        other[i] = static_cast<Index>(a);
        node[i] = static_cast<Index>(b);
        break;
      }
    }
  });
  for (const SampleDefect& defect : defects) {
    if (defect.kind) return defect;
  }
  return {};
}

#define FASTGRAPH_INSTANTIATE_WALKS(Ptr, Index)                                                   \
  template SampleDefect random_walk(const Adjacency<Ptr, Index>&, const Index*, int64_t, int64_t, \
                                    const WalkBias&, uint64_t, Index*, Ptr*);                     \
  template SampleDefect draw_negatives(const Adjacency<Ptr, Index>&, int64_t, bool, int64_t,      \
                                       uint64_t, Index*, Index*);
FASTGRAPH_INSTANTIATE_WALKS(int32_t, int32_t)
FASTGRAPH_INSTANTIATE_WALKS(int32_t, int64_t)
FASTGRAPH_INSTANTIATE_WALKS(int64_t, int32_t)
FASTGRAPH_INSTANTIATE_WALKS(int64_t, int64_t)

}  // namespace fastgraph
