// Lengths of shortest paths up to a bound, by a breadth-first search from each node.
#include "cpu/shortest_paths.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "cpu/reused.h"
#include "fastgraph/parallel.h"

namespace fastgraph {
namespace {

constexpr int64_t kSearchesOfTask = 16;
// Elementary operations of a search, without which few searches are run by one thread.
constexpr int64_t kWorkOfSearch = 1 << 10;

// A search among nodes [first, first + size). Distances are in memory of the caller's, all
// longest + 1 before; what was found is kept in its order, with the size of each level.
struct Search {
  const Graph& graph;
  int64_t longest;
  std::vector<int64_t> found;

  SampleDefect run(int64_t start, int64_t first, int64_t size, uint8_t* distance) {
    found.assign(1, start);
    distance[start - first] = 0;
    size_t next = 0;
    for (int64_t steps = 1; steps <= longest && next < found.size(); ++steps) {
      for (const size_t end = found.size(); next < end; ++next) {
        const int64_t at = found[next];
        const int64_t begin = graph.rowptr[at], last = graph.rowptr[at + 1];
        if (begin < 0 || begin > last || last > graph.num_edges) {
          return {SampleDefect::kColptr, 0, at, last, 0};
        }
        for (int64_t e = begin; e < last; ++e) {
          const int64_t node = graph.col[e];
          if (node < 0 || node >= graph.num_nodes) return {SampleDefect::kRow, 0, e, node, 0};
          const int64_t place = node - first;
          if (place < 0 || place >= size || distance[place] <= longest) continue;
          distance[place] = static_cast<uint8_t>(steps);
          found.push_back(node);
        }
      }
    }
    return {};
  }
};

// A search among all nodes, which puts its memory back.
struct WholeSearch {
  Search search;
  std::vector<uint8_t> distance;

  WholeSearch(const Graph& graph, int64_t longest)
      : search{graph, longest, {}},
        distance(static_cast<size_t>(graph.num_nodes), static_cast<uint8_t>(longest + 1)) {}

  SampleDefect run(int64_t start) {
    return search.run(start, 0, search.graph.num_nodes, distance.data());
  }
  void clear() {
    for (const int64_t node : search.found) {
      distance[static_cast<size_t>(node)] = static_cast<uint8_t>(search.longest + 1);
    }
  }
};

// Calls body(work, i) for each of `count` searches, which all belong to a task's memory, and gives
// the first defect.
template <typename Work, typename Make, typename Body>
SampleDefect search_all(int64_t count, const Make& make, const Body& body) {
  const int64_t num_tasks = (count + kSearchesOfTask - 1) / kSearchesOfTask;
  std::vector<SampleDefect> defects(static_cast<size_t>(num_tasks));
  Reused<Work> reused;
  for_each_task(num_tasks, count * kWorkOfSearch, [&](int64_t task) {
    auto work = reused.take(make);
    SampleDefect& defect = defects[static_cast<size_t>(task)];
    const int64_t end = std::min((task + 1) * kSearchesOfTask, count);
    for (int64_t i = task * kSearchesOfTask; i < end && !defect.kind; ++i) defect = body(*work, i);
    reused.give(std::move(work));
  });
  for (const SampleDefect& defect : defects) {
    if (defect.kind) return defect;
  }
  return {};
}

}  // namespace

SampleDefect distances_in_ranges(const Graph& graph, const Ranges& ranges, int64_t longest,
                                 uint8_t* out) {
  for (int64_t i = 0; i < ranges.count; ++i) {
    const int64_t size = ranges.begin[i + 1] - ranges.begin[i];
    const int64_t node = ranges.node[i], first = ranges.first[i];
    if (node >= graph.num_nodes || first < 0 || node < first || node - first >= size) {
      return {SampleDefect::kSeed, 0, i, node, 0};
    }
  }
  std::fill_n(out, ranges.begin[ranges.count], static_cast<uint8_t>(longest + 1));
  const auto make = [&] { return std::unique_ptr<Search>(new Search{graph, longest, {}}); };
  return search_all<Search>(ranges.count, make, [&](Search& search, int64_t i) {
    const int64_t begin = ranges.begin[i];
    return search.run(ranges.node[i], ranges.first[i], ranges.begin[i + 1] - begin, out + begin);
  });
}

SampleDefect distances_of_entries(const Graph& graph, const int64_t* ptr, const int64_t* key,
                                  int64_t num_entries, int64_t longest, uint8_t* out) {
  for (int64_t e = 0; e < num_entries; ++e) {
    if (key[e] < 0 || key[e] >= graph.num_nodes) return {SampleDefect::kSeed, 0, e, key[e], 0};
  }
  const auto make = [&] { return std::make_unique<WholeSearch>(graph, longest); };
  return search_all<WholeSearch>(graph.num_nodes, make, [&](WholeSearch& work, int64_t row) {
    if (ptr[row] == ptr[row + 1]) return SampleDefect{};
    const SampleDefect defect = work.run(row);
    for (int64_t e = ptr[row]; e < ptr[row + 1]; ++e) {
      out[e] = work.distance[static_cast<size_t>(key[e])];
    }
    work.clear();
    return defect;
  });
}

SampleDefect nodes_within(const Graph& graph, int64_t longest, NodesWithin& found) {
  struct List {
    std::vector<int64_t> node;
    std::vector<uint8_t> distance;
  };
  const int64_t size = graph.num_nodes;
  std::vector<List> lists(static_cast<size_t>(size));
  const auto make = [&] { return std::make_unique<WholeSearch>(graph, longest); };
  const auto defect = search_all<WholeSearch>(size, make, [&](WholeSearch& work, int64_t row) {
    const SampleDefect own = work.run(row);
    List& list = lists[static_cast<size_t>(row)];
    list.node = work.search.found;
    for (const int64_t node : list.node) {
      list.distance.push_back(work.distance[static_cast<size_t>(node)]);
    }
    work.clear();
    return own;
  });
  int64_t total = 0;
  for (const List& list : lists) total += static_cast<int64_t>(list.node.size());
  found.count.reserve(size);
  found.node.reserve(total);
  found.distance.reserve(total);
  for (const List& list : lists) {
    found.count.push(static_cast<int64_t>(list.node.size()));
    for (const int64_t node : list.node) found.node.push(node);
    for (const uint8_t distance : list.distance) found.distance.push(distance);
  }
  return defect;
}

}  // namespace fastgraph
