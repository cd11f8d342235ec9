// Cutting a sparse matrix into tasks of about equal work. The cut depends on the matrix alone, so
// results do not depend on the number of threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "fastgraph/memory.h"
#include "fastgraph/parallel.h"
#include "fastgraph/views.h"

namespace fastgraph {

// A row with more entries is cut into pieces of this many, which are computed on their own and
// merged in order.
constexpr int64_t kMaxPiece = 4096;

// Entries plus rows in a task of whole rows; rows count because an empty one costs something too.
constexpr int64_t kTaskWork = 1024;

// A small matrix is cut into about this many tasks, so that threads have something to share, but
// into none of less than the least work.
constexpr int64_t kFewTasks = 64;
constexpr int64_t kLeastTaskWork = 256;

struct EntryRange {
  int64_t begin;
  int64_t end;

  bool empty() const { return begin == end; }
};

// Some rows, or a piece of one.
struct Task {
  int64_t place_begin;
  int64_t place_end;
  int64_t entry_begin;
  int64_t entry_end;
  int64_t piece;  // where the partial result of a cut row goes; -1 for whole rows

  bool whole() const { return piece < 0; }

  // The entries of the row at a place of this task.
  EntryRange entries(const OrderedCsr& graph, int64_t place) const {
    if (whole()) return {graph.rowptr[place], graph.rowptr[place + 1]};
    return {entry_begin, entry_end};
  }

  // Asks for what the row at the next place has in x. The processor does not expect it by itself,
  // not even where rows follow each other in memory: what is gathered in between hides the pattern.
  template <typename T>
  FASTGRAPH_INLINE void expect_next(const OrderedCsr& graph, int64_t place,
                                    const Matrix<T>& x) const {
    if (place + 1 < place_end) prefetch(x.row(graph.row(place + 1)), x.width);
  }
};

struct CutRow {
  int64_t row;
  int64_t piece_begin;
  int64_t piece_end;
};

struct Schedule {
  std::vector<Task> tasks;
  std::vector<CutRow> cut_rows;
  int64_t num_pieces = 0;
};

inline Schedule make_schedule(const OrderedCsr& graph) {
  const int64_t total = graph.num_entries + graph.num_rows;
  const int64_t work = std::clamp(total / kFewTasks, kLeastTaskWork, kTaskWork);
  Schedule schedule;
  schedule.tasks.reserve(total / (work / 2) + 1);
  const int64_t* rowptr = graph.rowptr;
  for (int64_t place = 0; place < graph.num_rows;) {
    const int64_t limit = rowptr[place] + place + work;
    // First row end beyond the limit, searched in the only range where it can be.
    int64_t low = place, high = std::min(graph.num_rows, place + work);
    while (low < high) {
      const int64_t middle = low + (high - low + 1) / 2;
      if (rowptr[middle] + middle <= limit) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    const int64_t end = std::max(low, place + 1);
    const int64_t first = rowptr[place], last = rowptr[end];
    if (last - first <= kMaxPiece) {
      schedule.tasks.push_back({place, end, first, last, -1});
    } else {
      CutRow cut{graph.row(place), schedule.num_pieces, schedule.num_pieces};
      for (int64_t entry = first; entry < last; entry += kMaxPiece) {
        const int64_t stop = std::min(entry + kMaxPiece, last);
        schedule.tasks.push_back({place, end, entry, stop, cut.piece_end++});
      }
      schedule.num_pieces = cut.piece_end;
      schedule.cut_rows.push_back(cut);
    }
    place = end;
  }
  return schedule;
}

// Calls run(task) for all tasks, which together take about `work` elementary operations, and then
// merge(cut row) for the rows that were cut, whose pieces have `width` values each.
template <typename Run, typename Merge>
void run_schedule(const Schedule& schedule, int64_t work, int64_t width, const Run& run,
                  const Merge& merge) {
  for_each_task(static_cast<int64_t>(schedule.tasks.size()), work,
                [&](int64_t i) { run(schedule.tasks[i]); });
  for_each_task(static_cast<int64_t>(schedule.cut_rows.size()), schedule.num_pieces * width,
                [&](int64_t i) { merge(schedule.cut_rows[i]); });
}

}  // namespace fastgraph
