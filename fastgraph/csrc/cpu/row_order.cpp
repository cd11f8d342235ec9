// An order of the rows of a square matrix in which those with columns in common are close to each
// other, so that what one has gathered is still in the cache for the next.
//
// Rows form clusters by label propagation (Raghavan, Albert and Kumara, Near linear time algorithm
// to detect community structures in large-scale networks, 2007) of bounded size (Meyerhenke,
// Sanders and Schulz, Partitioning complex networks via size-constrained clustering, 2014). A walk
// along the strongest links between clusters puts them in order.
#include <algorithm>
#include <numeric>
#include <vector>

#include "cpu/kernels.h"
#include "fastgraph/parallel.h"
#include "fastgraph/result.h"

namespace fastgraph {
namespace {

// The cache of one core, about.
constexpr int64_t kCacheBytes = 1 << 20;

// If so many caches hold all that is gathered, no order is needed.
constexpr int64_t kFewCaches = 4;

// The rows that the cache holds are those of so many clusters or more: the walk brings small ones
// together better than label propagation makes large ones.
constexpr int64_t kCachedClusters = 16;

// What remains of a link after each step of the walk, and when it is forgotten.
constexpr double kRemains = 0.5;
constexpr double kForgotten = 1e-3;

// Label propagation ends when hardly any row changes its label, or after so many sweeps.
constexpr int kSweeps = 8;
constexpr double kHardlyAny = 0.02;

// Entries of a row, evenly spread, that label propagation looks at.
constexpr int64_t kSample = 256;

// Narrower rows cost so little to gather that finding an order would take longer than it saves.
constexpr int64_t kNarrow = 128;

// What visiting a row that is far from the last one costs besides a miss, in bytes that could be
// gathered meanwhile: its own features, its result and what its edges carry are not where the
// processor expects them. Attention has more of all these. Sums have little but the result, and
// nothing waits for one that is written past the caches.
constexpr double kJumpOfSums = 1 << 10;
constexpr double kJumpOfAttention = 1 << 12;

// The part of the cost that another order must leave at most, to be worth the time to find it.
constexpr double kWorthwhile = 0.8;

struct Reads {
  int64_t misses = 0;
  int64_t columns = 0;  // different ones
};

// What is read when the rows are visited in this order by a core whose cache holds so many columns,
// and is emptied whenever it is full.
Reads count_reads(const Csr& graph, const std::vector<int32_t>& order, int64_t cached) {
  std::vector<int32_t> filling_of(graph.num_cols, -1);
  int32_t filling = 0;
  int64_t room = cached;
  Reads reads;
  for (const int32_t row : order) {
    for (int64_t e = graph.rowptr[row]; e < graph.rowptr[row + 1]; ++e) {
      int32_t& last = filling_of[graph.col[e]];
      if (last == filling) continue;
      if (room == 0) {
        ++filling;
        room = cached;
      }
      reads.columns += last < 0;
      last = filling;
      --room;
      ++reads.misses;
    }
  }
  return reads;
}

// The strength of the links that lead to each of some clusters.
class Links {
 public:
  explicit Links(int64_t num_clusters) : strength_(num_clusters, 0) {}

  void add(int32_t cluster) {
    if (strength_[cluster] == 0) found_.push_back(cluster);
    strength_[cluster] += 1;
  }

  // Calls body(cluster, strength) for the clusters that links lead to, and lets this part of their
  // strength remain.
  template <typename Body>
  void weaken(double part, const Body& body) {
    size_t kept = 0;
    for (const int32_t cluster : found_) {
      double& strength = strength_[cluster];
      body(cluster, strength);
      strength *= part;
      if (strength > kForgotten) {
        found_[kept++] = cluster;
      } else {
        strength = 0;
      }
    }
    found_.resize(kept);
  }

 private:
  std::vector<double> strength_;
  std::vector<int32_t> found_;
};

// A label for each row: the one that most of its columns have, among clusters that are not full.
std::vector<int32_t> propagate_labels(const Csr& graph, int64_t max_size) {
  std::vector<int32_t> label(graph.num_rows), size(graph.num_rows, 1);
  std::iota(label.begin(), label.end(), 0);
  Links links(graph.num_rows);
  int64_t changes = graph.num_rows;
  for (int sweep = 0; sweep < kSweeps && changes > kHardlyAny * graph.num_rows; ++sweep) {
    changes = 0;
    for (int64_t row = 0; row < graph.num_rows; ++row) {
      const int64_t begin = graph.rowptr[row], end = graph.rowptr[row + 1];
      const int64_t step = 1 + (end - begin) / kSample;
      for (int64_t e = begin; e < end; e += step) links.add(label[graph.col[e]]);
      const int32_t own = label[row];
      int32_t best = own;
      double most = 0;
      links.weaken(0, [&](int32_t cluster, double strength) {
        const bool fits = cluster == own || size[cluster] < max_size;
        if (fits && (strength > most || (strength == most && cluster == own))) {
          best = cluster;
          most = strength;
        }
      });
      --size[own];
      ++size[best];
      label[row] = best;
      changes += best != own;
    }
  }
  return label;
}

// Rows by cluster; clusters follow each other as their first rows do.
struct Clusters {
  std::vector<int32_t> of_row;
  std::vector<int64_t> begin;  // where the rows of each begin
  std::vector<int32_t> rows;

  explicit Clusters(const std::vector<int32_t>& label)
      : of_row(label.size()), begin(1, 0), rows(label.size()) {
    std::vector<int32_t> cluster_of(label.size(), -1);
    for (size_t row = 0; row < label.size(); ++row) {
      int32_t& cluster = cluster_of[label[row]];
      if (cluster < 0) {
        cluster = static_cast<int32_t>(count());
        begin.push_back(0);
      }
      of_row[row] = cluster;
      ++begin[cluster + 1];
    }
    std::partial_sum(begin.begin(), begin.end(), begin.begin());
    std::vector<int64_t> next(begin.begin(), begin.end() - 1);
    for (size_t row = 0; row < label.size(); ++row) {
      rows[next[of_row[row]]++] = static_cast<int32_t>(row);
    }
  }

  int64_t count() const { return static_cast<int64_t>(begin.size()) - 1; }
  int64_t size(int64_t cluster) const { return begin[cluster + 1] - begin[cluster]; }
};

// All rows, cluster after cluster: the next is the one with the strongest links for its size, those
// from the last one before older ones, or else the first that is left.
std::vector<int32_t> walk(const Csr& graph, const Clusters& clusters) {
  std::vector<int32_t> order;
  order.reserve(graph.num_rows);
  std::vector<bool> visited(clusters.count(), false);
  Links links(clusters.count());
  const auto visit = [&](int32_t cluster) {
    visited[cluster] = true;
    for (int64_t i = clusters.begin[cluster]; i < clusters.begin[cluster + 1]; ++i) {
      const int32_t row = clusters.rows[i];
      order.push_back(row);
      for (int64_t e = graph.rowptr[row]; e < graph.rowptr[row + 1]; ++e) {
        const int32_t other = clusters.of_row[graph.col[e]];
        if (!visited[other]) links.add(other);
      }
    }
    int32_t strongest = -1;
    double most = 0;
    links.weaken(kRemains, [&](int32_t other, double strength) {
      const double density = strength / clusters.size(other);
      if (!visited[other] && density > most) {
        strongest = other;
        most = density;
      }
    });
    return strongest;
  };
  for (int32_t first = 0; first < clusters.count(); ++first) {
    for (int32_t next = first; next >= 0 && !visited[next];) next = visit(next);
  }
  return order;
}

// The rows in this order.
void copy_rows(const Csr& graph, const std::vector<int32_t>& order, MutableCsr ordered) {
  constexpr int64_t kRowsOfTask = 1024;
  ordered.rowptr[0] = 0;
  for (int64_t place = 0; place < graph.num_rows; ++place) {
    const int32_t row = order[place];
    ordered.row_id[place] = row;
    ordered.rowptr[place + 1] = ordered.rowptr[place] + graph.rowptr[row + 1] - graph.rowptr[row];
  }
  const int64_t num_tasks = (graph.num_rows + kRowsOfTask - 1) / kRowsOfTask;
  for_each_task(num_tasks, graph.num_entries, [&](int64_t task) {
    const int64_t end = std::min(graph.num_rows, (task + 1) * kRowsOfTask);
    for (int64_t place = task * kRowsOfTask; place < end; ++place) {
      int64_t to = ordered.rowptr[place];
      const int32_t row = order[place];
      for (int64_t e = graph.rowptr[row]; e < graph.rowptr[row + 1]; ++e, ++to) {
        ordered.col[to] = graph.col[e];
        ordered.edge_id[to] = static_cast<int32_t>(graph.edge(e));
      }
    }
  });
}

// Rows of so many bytes that the cache holds.
int64_t cached_rows(int64_t row_bytes) {
  return kCacheBytes / std::clamp<int64_t>(row_bytes, 1, kCacheBytes / 64);
}

std::vector<int32_t> ascending(int64_t num_rows) {
  std::vector<int32_t> order(num_rows);
  std::iota(order.begin(), order.end(), 0);
  return order;
}

}  // namespace

int64_t count_reads(Csr graph, int64_t row_bytes) {
  const int32_t* const end = graph.col + graph.num_entries;
  graph.num_cols = graph.num_entries ? *std::max_element(graph.col, end) + int64_t{1} : 0;
  return count_reads(graph, ascending(graph.num_rows), cached_rows(row_bytes)).misses;
}

RowOrder order_rows(const Csr& graph, int64_t row_bytes, MutableCsr ordered) {
  const int64_t cached = cached_rows(row_bytes);
  if (row_bytes < kNarrow || graph.num_cols <= kFewCaches * cached) return RowOrder::kNone;
  std::vector<int32_t> order = ascending(graph.num_rows);
  const Reads before = count_reads(graph, order, cached);
  const int64_t num_jumps = std::count_if(order.begin(), order.end(), [&](int32_t row) {
    return graph.rowptr[row] < graph.rowptr[row + 1];
  });
  const auto enough = [&](double jump_bytes) {
    return kWorthwhile * before.misses - num_jumps * (1 + jump_bytes / row_bytes);
  };
  const bool past_caches = goes_past_caches(graph.num_rows, row_bytes);
  const double enough_for_sums = enough(past_caches ? 0 : kJumpOfSums);
  // In any order each of the columns is read once.
  if (enough_for_sums <= before.columns) return RowOrder::kNone;
  order = walk(graph, Clusters(propagate_labels(graph, cached / kCachedClusters)));
  const int64_t misses = count_reads(graph, order, cached).misses;
  if (misses > enough_for_sums) return RowOrder::kNone;
  copy_rows(graph, order, ordered);
  return misses > enough(kJumpOfAttention) ? RowOrder::kForSums : RowOrder::kForAll;
}

}  // namespace fastgraph
