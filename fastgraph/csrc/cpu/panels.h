// Panels: some channels of all nodes, next to each other.
//
// A kernel that gathers rows of features reads each of them once for every entry that leads to it.
// Where all features are too many for a core's own cache, they come from the one that cores share,
// or from memory. So where rows are gathered often, a few channels at a time are copied together,
// about as many as the own cache holds, and the graph is visited once for each panel. Without the
// copy rows would be as far from each other as before, and few sets of the cache would hold them
// all.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "fastgraph/memory.h"
#include "fastgraph/parallel.h"
#include "fastgraph/views.h"

namespace fastgraph {

using PanelRule = int64_t(int64_t num_rows, int64_t num_cols, int64_t num_entries, int64_t channels,
                          int64_t item_bytes, int64_t cache_bytes);

// How many channels of the features that entries of a matrix lead to make a panel, a multiple of
// what a cache line holds, if a core's own cache has so many bytes; 0 where the kernel had better
// gather all of them at once.
PanelRule panel_channels;

// The same of the channels of one head, for kernels that gain by taking one head after the other
// wherever rows are gathered often: more often where the alternative has many heads in a vector.
PanelRule* head_panel_rule(int64_t heads);

// Both for the processor at hand, unless panels are forced.
int64_t panel_channels(const Csr& graph, int64_t channels, int64_t item_bytes);
int64_t head_panel_channels(const Csr& graph, int64_t heads, int64_t channels, int64_t item_bytes);

// For tests and measurements: panels of so many channels, or none (-1), whatever the matrix is, in
// all calls from now on, but for what GAT takes with heads side by side; 0 leaves it to the rules
// again. Sums do not depend on it.
void force_panels(int64_t channels);

// Memory for one panel at a time.
template <typename T>
class Panel {
 public:
  Panel(Matrix<const T> x, int64_t most_channels)
      : x_(x), memory_(scratch_in_huge_pages<T>(x.rows * std::min(most_channels, x.width))) {}

  // A copy of the channels [first, first + count), at the place of the one before.
  Matrix<const T> copy(int64_t first, int64_t count) const {
    constexpr int64_t kRowsOfTask = 512;
    T* const to = memory_.get();
    for_each_task((x_.rows + kRowsOfTask - 1) / kRowsOfTask, x_.rows * count, [&](int64_t task) {
      const int64_t end = std::min(x_.rows, (task + 1) * kRowsOfTask);
      for (int64_t row = task * kRowsOfTask; row < end; ++row) {
        std::memcpy(to + row * count, x_.row(row) + first, count * kBytes);
      }
    });
    return {to, x_.rows, count};
  }

 private:
  static constexpr int64_t kBytes = sizeof(T);

  Matrix<const T> x_;
  Scratch<T> memory_;
};

// Calls body(panel, its first channel) for panels of so many channels that together hold all of x.
template <typename T, typename Body>
void for_each_panel(Matrix<const T> x, int64_t channels, const Body& body) {
  const Panel<T> panel(x, channels);
  for (int64_t first = 0; first < x.width; first += channels) {
    body(panel.copy(first, std::min(channels, x.width - first)), first);
  }
}

}  // namespace fastgraph
