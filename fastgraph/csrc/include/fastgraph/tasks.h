// What the groups of lanes of a GPU work on, listed once for each matrix (cuda/tasks.cu).
//
// A row with more entries than a chunk is cut into pieces of equal length, as few as fit into one:
// each is computed on its own, and a second kernel merges them in order. Pieces are the first
// tasks, because they take longest. The whole rows follow in windows, so that what neighbouring
// rows gather stays in the cache, and the longest first in each window, so that the groups of a
// warp have rows of about equal length. All of this depends on the matrix alone, and so do the
// results' bits.
#pragma once

#include <cstdint>

#include "fastgraph/views.h"

namespace fastgraph::cuda {

// No chunk is larger, and so no task.
constexpr int kChunk = 256;

// A task: some entries of a row. The result is the row's if piece is -1.
struct alignas(16) Span {
  int32_t row;
  int32_t begin;
  int32_t end;
  int32_t piece;
};

// A row that was cut, and its pieces.
struct alignas(16) CutRow {
  int32_t row;
  int32_t piece_begin;
  int32_t piece_end;
  int32_t unused;  // so that a row of the list is as long as a task
};

// Where tasks are listed; with the rows that were cut behind them, as many as rows and pieces.
struct TaskList {
  Span* tasks;
  CutRow* cut_rows;
  int64_t num_pieces;
  int64_t num_cut;
};

// A matrix with its tasks.
struct CutCsr : Csr {
  const Span* tasks;
  const CutRow* cut_rows;
  int64_t num_tasks;
  int64_t num_pieces;
  int64_t num_cut;
};

}  // namespace fastgraph::cuda
