// Making compressed rows of edges, checking and transposing them.
#include <algorithm>
#include <atomic>
#include <numeric>
#include <vector>

#include "cpu/indices.h"
#include "cpu/kernels.h"
#include "fastgraph/memory.h"
#include "fastgraph/parallel.h"

namespace fastgraph {
namespace {

// Edges or rows per task of a streaming pass.
constexpr int64_t kStep = 1 << 14;

inline int64_t num_steps(int64_t size) { return (size + kStep - 1) / kStep; }

// A stable counting sort of edges by row, one table of counters per chunk of edges: edge i of a
// chunk goes behind all edges of its row in earlier chunks, so the order is that of a serial sort
// whatever the number of chunks.
class CountingSort {
 public:
  CountingSort(int64_t num_edges, int64_t num_rows)
      : num_edges_(num_edges),
        num_rows_(num_rows),
        // More tables than this would cost more than the edges themselves.
        num_chunks_(std::clamp<int64_t>(2 * num_edges / (num_rows + 1), 1, max_threads())),
        counters_(scratch<int32_t>(num_chunks_ * num_rows)) {}

  int64_t num_chunks() const { return num_chunks_; }

  // Calls body(chunk, begin, end, counters of the chunk) for every chunk.
  template <typename Body>
  void for_each_chunk(const Body& body) const {
    for_each_task(num_chunks_, num_edges_, [&](int64_t chunk) {
      body(chunk, num_edges_ * chunk / num_chunks_, num_edges_ * (chunk + 1) / num_chunks_,
           counters_.get() + chunk * num_rows_);
    });
  }

  // Turns counts into the position of the first edge of each (row, chunk), leaving room for one
  // more behind the edges of each of the first num_longer rows.
  void scan(int64_t* rowptr, int64_t num_longer = 0) const {
    const int64_t steps = num_steps(num_rows_);
    std::vector<int64_t> start(steps + 1, 0);
    const int64_t work = num_rows_ * num_chunks_;
    for_each_task(steps, work, [&](int64_t step) {
      int64_t total = std::max<int64_t>(std::min(first(step + 1), num_longer) - first(step), 0);
      for (int64_t chunk = 0; chunk < num_chunks_; ++chunk) {
        const int32_t* counter = counters_.get() + chunk * num_rows_;
        for (int64_t row = first(step); row < first(step + 1); ++row) total += counter[row];
      }
      start[step + 1] = total;
    });
    for (int64_t step = 0; step < steps; ++step) start[step + 1] += start[step];
    for_each_task(steps, work, [&](int64_t step) {
      int64_t position = start[step];
      for (int64_t row = first(step); row < first(step + 1); ++row) {
        rowptr[row] = position;
        for (int64_t chunk = 0; chunk < num_chunks_; ++chunk) {
          int32_t& counter = counters_[chunk * num_rows_ + row];
          const int32_t count = counter;
          counter = static_cast<int32_t>(position);
          position += count;
        }
        position += row < num_longer;
      }
    });
    rowptr[num_rows_] = start[steps];
  }

 private:
  int64_t first(int64_t step) const { return std::min(step * kStep, num_rows_); }

  int64_t num_edges_;
  int64_t num_rows_;
  int64_t num_chunks_;
  Scratch<int32_t> counters_;
};

// Copies columns while rows ascend and every index is in range; false as soon as one is not.
template <typename Index>
bool copy_if_sorted(Indices<Index> row, Indices<Index> col, const MutableCsr& graph) {
  std::atomic<bool> sorted{true};
  for_each_task(num_steps(row.size), row.size, [&](int64_t step) {
    if (!sorted.load(std::memory_order_relaxed)) return;
    const int64_t begin = step * kStep, end = std::min(begin + kStep, row.size);
    bool good =
        in_range(row[begin], graph.num_rows) && (begin == 0 || row[begin - 1] <= row[begin]);
    constexpr int64_t kStride = 512;  // looked at without a branch in between
    for (int64_t from = begin; good && from < end; from += kStride) {
      const int64_t to = std::min(from + kStride, end);
      for (int64_t i = from; i < to; ++i) {
        const int64_t r = row[i], c = col[i], before = row[i > begin ? i - 1 : i];
        good &= in_range(r, graph.num_rows) & in_range(c, graph.num_cols) & (before <= r);
        graph.col[i] = static_cast<int32_t>(c);
      }
    }
    if (!good) sorted.store(false, std::memory_order_relaxed);
  });
  return sorted.load();
}

template <typename Index>
void fill_rowptr_sorted(Indices<Index> row, int64_t* rowptr, int64_t num_rows) {
  for_each_task(num_steps(row.size), row.size, [&](int64_t step) {
    const int64_t begin = step * kStep, end = std::min(begin + kStep, row.size);
    int64_t before = begin == 0 ? -1 : row[begin - 1];
    for (int64_t i = begin; i < end; ++i) {
      while (before < row[i]) rowptr[++before] = i;
    }
  });
  const int64_t last = row.size ? row[row.size - 1] : -1;
  std::fill(rowptr + last + 1, rowptr + num_rows + 1, row.size);
}

}  // namespace

template <typename Index>
BuildResult build_csr(Indices<Index> row, Indices<Index> col, MutableCsr graph, BadIndex& bad) {
  if (copy_if_sorted(row, col, graph)) {
    fill_rowptr_sorted(row, graph.rowptr, graph.num_rows);
    return BuildResult::kSorted;
  }
  const CountingSort sort(row.size, graph.num_rows);
  std::atomic<bool> valid{true};
  sort.for_each_chunk([&](int64_t, int64_t begin, int64_t end, int32_t* counter) {
    std::fill_n(counter, graph.num_rows, 0);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t r = row[i];
      if (!in_range(r, graph.num_rows)) {
        valid.store(false, std::memory_order_relaxed);
        return;
      }
      ++counter[r];
    }
  });
  if (valid.load()) {
    sort.scan(graph.rowptr);
    sort.for_each_chunk([&](int64_t, int64_t begin, int64_t end, int32_t* next) {
      bool good = true;  // of columns, which nothing depends on before all are there
      for (int64_t i = begin; i < end; ++i) {
        const int32_t position = next[row[i]]++;
        good &= in_range(col[i], graph.num_cols);
        graph.col[position] = static_cast<int32_t>(col[i]);
        if (graph.edge_id) graph.edge_id[position] = static_cast<int32_t>(i);
      }
      if (!good) valid.store(false, std::memory_order_relaxed);
    });
  }
  if (!valid.load()) {
    bad = find_bad_index(row, col, graph.num_rows, graph.num_cols);
    return BuildResult::kBadIndex;
  }
  return BuildResult::kPermuted;
}

template <typename Index>
int64_t build_csr_with_loops(Indices<Index> row, Indices<Index> col, int64_t num_loops,
                             MutableCsr graph, BadIndex& bad) {
  const CountingSort sort(row.size, graph.num_rows);
  std::vector<int64_t> first_id(sort.num_chunks() + 1, 0);  // of the edges that each chunk keeps
  std::atomic<bool> valid{true};
  sort.for_each_chunk([&](int64_t chunk, int64_t begin, int64_t end, int32_t* counter) {
    std::fill_n(counter, graph.num_rows, 0);
    int64_t kept = 0;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t r = row[i], c = col[i];
      if (r == c) continue;
      if (!in_range(r, graph.num_rows) || !in_range(c, graph.num_cols)) {
        valid.store(false, std::memory_order_relaxed);
        return;
      }
      ++counter[r];
      ++kept;
    }
    first_id[chunk + 1] = kept;
  });
  if (!valid.load()) {
    bad = find_bad_index(row, col, graph.num_rows, graph.num_cols, true);
    return -1;
  }
  std::partial_sum(first_id.begin(), first_id.end(), first_id.begin());
  sort.scan(graph.rowptr, num_loops);
  sort.for_each_chunk([&](int64_t chunk, int64_t begin, int64_t end, int32_t* next) {
    auto id = static_cast<int32_t>(first_id[chunk]);
    for (int64_t i = begin; i < end; ++i) {
      if (row[i] == col[i]) continue;
      const int32_t position = next[row[i]]++;
      graph.col[position] = static_cast<int32_t>(col[i]);
      if (graph.edge_id) graph.edge_id[position] = id++;
    }
  });
  const int64_t num_kept = first_id.back();
  for_each_task(num_steps(num_loops), num_loops, [&](int64_t step) {
    for (int64_t node = step * kStep; node < std::min((step + 1) * kStep, num_loops); ++node) {
      const int64_t position = graph.rowptr[node + 1] - 1;
      graph.col[position] = static_cast<int32_t>(node);
      if (graph.edge_id) graph.edge_id[position] = static_cast<int32_t>(num_kept + node);
    }
  });
  return num_kept;
}

template <typename Index>
CsrDefect check_csr(Indices<Index> ptr, Indices<Index> index, MutableCsr graph) {
  if (ptr[0] != 0) return {CsrDefect::kFirst, 0, ptr[0]};
  if (ptr[graph.num_rows] != index.size) {
    return {CsrDefect::kLast, graph.num_rows, ptr[graph.num_rows]};
  }
  for (int64_t row = 0; row < graph.num_rows; ++row) {
    if (ptr[row + 1] < ptr[row]) return {CsrDefect::kDecreasing, row + 1, ptr[row + 1]};
    graph.rowptr[row] = ptr[row];
  }
  graph.rowptr[graph.num_rows] = index.size;
  std::atomic<bool> valid{true};
  with_access(index, [&](auto at) {
    for_each_task(num_steps(index.size), index.size, [&](int64_t step) {
      const int64_t begin = step * kStep, end = std::min(begin + kStep, index.size);
      const auto last = static_cast<uint64_t>(graph.num_cols) - 1;
      // The highest bit is set as soon as an index is negative, or what is left from it to the
      // last. Without signs, as that may be more than int64 holds.
      uint64_t bits = 0;
      for (int64_t i = begin; i < end; ++i) {
        const auto value = static_cast<uint64_t>(static_cast<int64_t>(at(i)));
        bits |= value | (last - value);
        graph.col[i] = static_cast<int32_t>(value);
      }
      if (bits >> 63) valid.store(false, std::memory_order_relaxed);
    });
  });
  if (!valid.load()) {
    for (int64_t i = 0; i < index.size; ++i) {
      if (!in_range(index[i], graph.num_cols)) return {CsrDefect::kIndex, i, index[i]};
    }
  }
  return {};
}

void transpose_csr(const Csr& graph, MutableCsr transpose) {
  const CountingSort sort(graph.num_entries, graph.num_cols);
  sort.for_each_chunk([&](int64_t, int64_t begin, int64_t end, int32_t* counter) {
    std::fill_n(counter, graph.num_cols, 0);
    for (int64_t e = begin; e < end; ++e) ++counter[graph.col[e]];
  });
  sort.scan(transpose.rowptr);
  sort.for_each_chunk([&](int64_t, int64_t begin, int64_t end, int32_t* next) {
    const int64_t* rowptr = graph.rowptr;
    int64_t row = std::upper_bound(rowptr, rowptr + graph.num_rows + 1, begin) - rowptr - 1;
    for (int64_t e = begin; e < end; ++e) {
      while (rowptr[row + 1] <= e) ++row;
      const int32_t position = next[graph.col[e]]++;
      transpose.col[position] = static_cast<int32_t>(row);
      if (transpose.edge_id) transpose.edge_id[position] = static_cast<int32_t>(graph.edge(e));
    }
  });
}

void reverse_rows(const Csr& graph, int32_t* col) {
  const int64_t steps = num_steps(graph.num_rows);
  for_each_task(steps, graph.num_entries + graph.num_rows, [&](int64_t step) {
    const int64_t end = std::min((step + 1) * kStep, graph.num_rows);
    for (int64_t row = step * kStep; row < end; ++row) {
      const int64_t first = graph.rowptr[row], last = graph.rowptr[row + 1];
      std::reverse_copy(graph.col + first, graph.col + last, col + first);
    }
  });
}

template BuildResult build_csr(Indices<int32_t>, Indices<int32_t>, MutableCsr, BadIndex&);
template BuildResult build_csr(Indices<int64_t>, Indices<int64_t>, MutableCsr, BadIndex&);
template int64_t build_csr_with_loops(Indices<int32_t>, Indices<int32_t>, int64_t, MutableCsr,
                                      BadIndex&);
template int64_t build_csr_with_loops(Indices<int64_t>, Indices<int64_t>, int64_t, MutableCsr,
                                      BadIndex&);
template CsrDefect check_csr(Indices<int32_t>, Indices<int32_t>, MutableCsr);
template CsrDefect check_csr(Indices<int64_t>, Indices<int64_t>, MutableCsr);

}  // namespace fastgraph
