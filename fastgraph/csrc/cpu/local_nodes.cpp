// Local nodes (Dwivedi et al., Graph transformers for large graphs, 2023, algorithm 1): for each
// node a sample of the nodes that are one or two hops away.
//
// A node puts all nodes in an order of its own, and takes the first of those that it meets. So its
// sample depends on nothing but the graph, the size and the seed, and takes memory for itself
// alone.
#include "cpu/local_nodes.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "cpu/edge_draws.h"
#include "cpu/mapped_pages.h"
#include "cpu/reused.h"
#include "cpu/smallest.h"
#include "fastgraph/parallel.h"

namespace fastgraph {
namespace {

constexpr int64_t kNodesOfTask = 64;
// Elementary operations for a node, without which few nodes are sampled by one thread.
constexpr int64_t kWorkOfNode = 1 << 10;
// How many neighbours ahead their lists are asked for, and where these begin.
constexpr int64_t kListsAhead = 4, kStartsAhead = 12;
// How many entries of a list are asked for; the processor expects the others by itself.
constexpr int64_t kExpected = 32;
// The same of pages that are asked for on a disk.
constexpr int64_t kListsAsked = 32, kStartsAsked = 256;

template <typename Index>
struct List {
  const Index* nodes = nullptr;
  int64_t size = 0;
};

// False if the list is not in the graph.
template <typename Ptr, typename Index>
bool find_list(const NeighborLists<Ptr, Index>& lists, int64_t node, List<Index>& list) {
  const int64_t begin = lists.graph.rowptr[node], end = lists.graph.rowptr[node + 1];
  if (begin < 0 || begin > end || end > lists.graph.num_edges) return false;
  list = {lists.graph.col + begin, end - begin};
  if (list.size <= lists.cap) return true;
  const int64_t* const last = lists.hubs + lists.num_hubs;
  const int64_t* const hub = std::lower_bound(lists.hubs, last, node);
  if (hub == last || *hub != node) return false;  // the graph has changed since it was thinned
  const int64_t place = hub - lists.hubs;
  list = {lists.thinned + place * lists.cap, std::min(lists.counts[place], lists.cap)};
  return true;
}

template <typename Ptr, typename Index>
class Sampler {
 public:
  explicit Sampler(const LocalNodesRequest<Ptr, Index>& request)
      : request_(request), wanted_(request.k - 1), first_(wanted_), second_(wanted_) {
    found_.resize(static_cast<size_t>(wanted_));
  }

  // Writes the row of a node.
  SampleDefect sample(int64_t node, int32_t* row, LocalNodesCounts& counts) {
    const OrderKeys keys = order_keys(request_.random_seed, node, kOrderStream);
    if (request_.release) {
      first_.clear(keys);
      second_.clear(order_keys(request_.random_seed, node, kOrderStream, 1));
    } else {
      first_.clear(keys, node);
    }
    if (const SampleDefect defect = look_around(node, counts); defect.kind) return defect;
    first_.finish();
    if (request_.release) second_.finish();
    const int64_t found = first_.size() + (request_.release ? second_.size() : 0);
    row[0] = static_cast<int32_t>(node);
    counts.few += found < wanted_;
    counts.none += found == 0;
    if (found == 0) {
      draw_from_all(node, row + 1);
    } else if (request_.release) {
      found < wanted_ ? repeat(row + 1) : merge(row + 1);
    } else if (found < wanted_) {
      draw_from_found(node, row + 1);
    } else {
      first_.write_nodes(row + 1);
    }
    return {};
  }

  // Asks the system for the lists of nodes, of which it may have none in memory.
  void ask(const int64_t* nodes, int64_t count) const {
    for (int64_t i = 0; i < count; ++i) ask_start(nodes[i]);
    for (int64_t i = 0; i < count; ++i) ask_list(nodes[i]);
  }

 private:
  // Offers the nodes of one hop and of two.
  SampleDefect look_around(int64_t node, LocalNodesCounts& counts) {
    Smallest& second = request_.release ? second_ : first_;
    for (int64_t a = 0; a < request_.num_lists; ++a) {
      List<Index> near;
      if (!find_list(request_.lists[a], node, near)) return broken(a, node);
      counts.candidates += near.size;
      if (first_.offer(near.nodes, near.size) >= limit()) return foreign(a, near);
      if (request_.is_elsewhere) ask_first(near);
      for (int64_t t = 0; t < near.size; ++t) {
        request_.is_elsewhere ? ask_next(near, t) : expect(near, t);
        const auto through = static_cast<int64_t>(near.nodes[t]);
        // Another process may have written since, and what is out of the graph must not be read.
        if (static_cast<uint64_t>(through) >= limit()) return foreign(a, near);
        for (int64_t b = 0; b < request_.num_lists; ++b) {
          List<Index> far;
          if (!find_list(request_.lists[b], through, far)) return broken(b, through);
          counts.candidates += far.size;
          if (second.offer(far.nodes, far.size) >= limit()) return foreign(b, far);
        }
      }
    }
    return {};
  }

  // Asks for what neighbours behind the t-th will need.
  void expect(const List<Index>& near, int64_t t) const {
    for (int64_t b = 0; b < request_.num_lists; ++b) {
      const Adjacency<Ptr, Index>& graph = request_.lists[b].graph;
      if (t + kStartsAhead < near.size) {
        __builtin_prefetch(graph.rowptr + near.nodes[t + kStartsAhead]);
      }
      if (t + kListsAhead < near.size) {
        const auto next = static_cast<int64_t>(near.nodes[t + kListsAhead]);
        List<Index> list;
        if (static_cast<uint64_t>(next) < limit() && find_list(request_.lists[b], next, list)) {
          prefetch(list.nodes, std::min<int64_t>(list.size, kExpected));
        }
      }
    }
  }

  void ask_first(const List<Index>& near) const {
    const int64_t starts = std::min(kStartsAsked, near.size);
    for (int64_t t = 0; t < starts; ++t) ask_start(near.nodes[t]);
    for (int64_t t = 0; t < std::min(kListsAsked, starts); ++t) ask_list(near.nodes[t]);
  }

  void ask_next(const List<Index>& near, int64_t t) const {
    if (t + kStartsAsked < near.size) ask_start(near.nodes[t + kStartsAsked]);
    if (t + kListsAsked < near.size) ask_list(near.nodes[t + kListsAsked]);
  }

  void ask_start(int64_t node) const {
    if (static_cast<uint64_t>(node) >= limit()) return;
    for (int64_t b = 0; b < request_.num_lists; ++b) {
      ask_for_pages(request_.lists[b].graph.rowptr + node, 2 * sizeof(Ptr));
    }
  }

  void ask_list(int64_t node) const {
    if (static_cast<uint64_t>(node) >= limit()) return;
    for (int64_t b = 0; b < request_.num_lists; ++b) {
      List<Index> list;
      if (!find_list(request_.lists[b], node, list)) continue;  // which is found again, as an error
      ask_for_pages(list.nodes, list.size * static_cast<int64_t>(sizeof(Index)));
    }
  }

  uint64_t limit() const { return static_cast<uint64_t>(request_.num_nodes); }

  SampleDefect broken(int64_t which, int64_t node) const {
    return {SampleDefect::kColptr, which, node, request_.lists[which].graph.rowptr[node + 1], 0};
  }

  SampleDefect foreign(int64_t which, const List<Index>& list) const {
    for (int64_t i = 0; i < list.size; ++i) {
      const auto node = static_cast<int64_t>(list.nodes[i]);
      if (static_cast<uint64_t>(node) < limit()) continue;
      return {SampleDefect::kRow, which, list.nodes + i - request_.lists[which].graph.col, node, 0};
    }
    return {SampleDefect::kRow, which, 0, -1, 0};
  }

  // Line 7: with replacement.
  void draw_from_found(int64_t node, int32_t* out) {
    constexpr int N = kVectorBytes / 8;
    first_.write_nodes(found_.data());
    const auto size = splat<uint64_t, N>(static_cast<uint64_t>(first_.size()));
    const auto item = splat<uint64_t, N>(static_cast<uint64_t>(node));
    for (int64_t d = 0; d < wanted_; d += 4 * N) {
      Vector<uint64_t, N> words[4] = {lane_numbers<uint64_t, N>() + static_cast<uint64_t>(d / 4),
                                      item,
                                      splat<uint64_t, N>(kDrawStream),
                                      {}};
      philox_blocks<N>(request_.random_seed, words);
      for (auto& word : words) word = times<N>(word, size) >> 32;
      const int64_t end = std::min<int64_t>(4 * N, wanted_ - d);
      for (int64_t i = 0; i < end; ++i) out[d + i] = found_[words[i % 4][i / 4]];
    }
  }

  // Line 9: of all nodes, without replacement where there are enough.
  void draw_from_all(int64_t node, int32_t* out) const {
    const Draws draws(request_.random_seed, static_cast<uint32_t>(node), kDrawStream);
    const EdgeRange all{0, request_.num_nodes, wanted_};
    if (request_.num_nodes < request_.k) {
      draw_with_replacement(draws, all, out);
    } else {
      draw_distinct(draws, all, out);
    }
  }

  // The release's way with short lists: nodes of one hop and of two, again and again.
  void repeat(int32_t* out) {
    const int64_t near = first_.size(), all = near + second_.size();
    first_.write_nodes(found_.data());
    second_.write_nodes(found_.data() + near);
    std::sort(found_.begin(), found_.begin() + near);
    std::sort(found_.begin() + near, found_.begin() + all);
    for (int64_t i = 0; i < wanted_; ++i) out[i] = found_[i % all];
  }

  // The first of both, as one list, in which a node may be twice.
  void merge(int32_t* out) const {
    int64_t a = 0, b = 0;
    for (int64_t i = 0; i < wanted_; ++i) {
      const bool is_near =
          b == second_.size() || (a < first_.size() && first_.priority(a) <= second_.priority(b));
      out[i] = static_cast<int32_t>(is_near ? first_.node(a++) : second_.node(b++));
    }
  }

  const LocalNodesRequest<Ptr, Index>& request_;
  int64_t wanted_;
  Smallest first_, second_;  // of one hop and of two in the release's way, else of both
  std::vector<int32_t> found_;
};

}  // namespace

template <typename Ptr, typename Index>
SampleDefect sample_local_nodes(const LocalNodesRequest<Ptr, Index>& request, int32_t* rows,
                                LocalNodesCounts& counts) {
  for (int64_t i = 0; i < request.num_rows; ++i) {
    const int64_t node = request.nodes[i];
    if (node < 0 || node >= request.num_nodes) return {SampleDefect::kSeed, 0, i, node, 0};
    if (request.k == 1) rows[i] = static_cast<int32_t>(node);
  }
  if (request.k == 1) return {};
  PagesAtRandom pages;
  for (int64_t a = 0; a < request.num_lists && request.is_elsewhere; ++a) {
    const NeighborLists<Ptr, Index>& lists = request.lists[a];
    const auto size = static_cast<int64_t>(sizeof(Index));
    pages.add(lists.graph.rowptr, (request.num_nodes + 1) * static_cast<int64_t>(sizeof(Ptr)));
    pages.add(lists.graph.col, lists.graph.num_edges * size);
    pages.add(lists.thinned, lists.num_hubs * lists.cap * size);
  }
  const int64_t num_tasks = (request.num_rows + kNodesOfTask - 1) / kNodesOfTask;
  std::vector<std::pair<SampleDefect, LocalNodesCounts>> results(num_tasks);
  Reused<Sampler<Ptr, Index>> samplers;
  for_each_task(num_tasks, request.num_rows * kWorkOfNode, [&](int64_t task) {
    auto sampler = samplers.take([&] { return std::make_unique<Sampler<Ptr, Index>>(request); });
    auto& [defect, counted] = results[task];
    const int64_t begin = task * kNodesOfTask;
    const int64_t end = std::min(begin + kNodesOfTask, request.num_rows);
    if (request.is_elsewhere) sampler->ask(request.nodes + begin, end - begin);
    for (int64_t i = begin; i < end && !defect.kind; ++i) {
      defect = sampler->sample(request.nodes[i], rows + i * request.k, counted);
    }
    samplers.give(std::move(sampler));
  });
  for (const auto& [defect, counted] : results) {
    if (defect.kind) return defect;
    counts.candidates += counted.candidates;
    counts.few += counted.few;
    counts.none += counted.none;
  }
  return {};
}

template <typename Ptr, typename Index>
SampleDefect thin_lists(const Adjacency<Ptr, Index>& graph, const int64_t* nodes, int64_t num_nodes,
                        int64_t cap, uint64_t random_seed, Index* thinned, int64_t* counts) {
  std::vector<SampleDefect> defects(num_nodes);
  Reused<Smallest> selections;
  for_each_task(num_nodes, num_nodes * cap, [&](int64_t task) {
    const int64_t node = nodes[task];
    if (node < 0 || node >= graph.num_nodes) {
      defects[task] = {SampleDefect::kSeed, 0, task, node, 0};
      return;
    }
    const int64_t begin = graph.rowptr[node], end = graph.rowptr[node + 1];
    if (begin < 0 || begin > end || end > graph.num_edges) {
      defects[task] = {SampleDefect::kColptr, 0, node, end, 0};
      return;
    }
    auto selection = selections.take([&] { return std::make_unique<Smallest>(cap); });
    selection->clear(order_keys(random_seed, node, kThinningStream));
    const auto limit = static_cast<uint64_t>(graph.num_nodes);
    if (selection->offer(graph.col + begin, end - begin) >= limit) {
      for (int64_t e = begin; e < end; ++e) {
        const auto other = static_cast<int64_t>(graph.col[e]);
        if (static_cast<uint64_t>(other) < limit) continue;
        defects[task] = {SampleDefect::kRow, 0, e, other, 0};
        break;
      }
    }
    selection->finish();
    selection->write_nodes(thinned + task * cap);
    std::fill(thinned + task * cap + selection->size(), thinned + (task + 1) * cap, Index{0});
    counts[task] = selection->size();
    selections.give(std::move(selection));
  });
  for (const SampleDefect& defect : defects) {
    if (defect.kind) return defect;
  }
  return {};
}

#define FASTGRAPH_INSTANTIATE_LOCAL_NODES(Ptr, Index)                                              \
  template SampleDefect sample_local_nodes(const LocalNodesRequest<Ptr, Index>&, int32_t*,         \
                                           LocalNodesCounts&);                                     \
  template SampleDefect thin_lists(const Adjacency<Ptr, Index>&, const int64_t*, int64_t, int64_t, \
                                   uint64_t, Index*, int64_t*);
FASTGRAPH_INSTANTIATE_LOCAL_NODES(int32_t, int32_t)
FASTGRAPH_INSTANTIATE_LOCAL_NODES(int32_t, int64_t)
FASTGRAPH_INSTANTIATE_LOCAL_NODES(int64_t, int32_t)
FASTGRAPH_INSTANTIATE_LOCAL_NODES(int64_t, int64_t)

}  // namespace fastgraph
