// Panels: some channels of all nodes, next to each other.
//
// A kernel that gathers rows of features reads each of them once for every entry that leads to it.
// Where all features are too many for a core's own cache, they come from the one that cores share,
// or from memory. So where rows are gathered often, a few channels at a time are copied together,
// as many as the own cache holds, and the graph is visited once for each panel. Without the copy
// rows would be as far from each other as before, and few of the cache's sets would hold them all.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "fastgraph/memory.h"
#include "fastgraph/parallel.h"
#include "fastgraph/views.h"

namespace fastgraph {

// How many channels of the features that entries of a matrix lead to make a panel, a multiple of
// what a cache line holds, if a core's own cache has so many bytes; 0 where the kernel had better
// gather all of them at once.
int64_t panel_channels(int64_t num_rows, int64_t num_cols, int64_t num_entries, int64_t channels,
                       int64_t item_bytes, int64_t cache_bytes);

// The same for the processor at hand, unless panels are forced.
int64_t panel_channels(const Csr& graph, int64_t channels, int64_t item_bytes);

// For tests and measurements: panels of so many channels, or none (-1), whatever the matrix is, in
// all calls from now on; 0 leaves it to panel_channels() again. Results do not depend on it.
void force_panels(int64_t channels);

// Memory for one panel at a time.
template <typename T>
class Panel {
 public:
  Panel(Matrix<const T> x, int64_t most_channels)
      : x_(x), memory_(scratch<T>(x.rows * std::min(most_channels, x.width))) {
    prefer_huge_pages(memory_.get(), x.rows * std::min(most_channels, x.width) * kBytes);
  }

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

// Calls body(panel, its first channel) for panels of so many channels that together hold all of x,
// or with x itself if `channels` is 0.
template <typename T, typename Body>
void for_each_panel(Matrix<const T> x, int64_t channels, const Body& body) {
  if (channels == 0) return body(x, int64_t{0});
  const Panel<T> panel(x, channels);
  for (int64_t first = 0; first < x.width; first += channels) {
    body(panel.copy(first, std::min(channels, x.width - first)), first);
  }
}

// Some heads, all of them unless told.
struct HeadRange {
  int64_t begin;
  int64_t end;

  HeadRange(int64_t count) : HeadRange(0, count) {}
  HeadRange(int64_t first, int64_t behind) : begin(first), end(behind) {}
  int64_t count() const { return end - begin; }
};

// The channels of some heads, or those of one from `first_channel` on.
template <typename T>
struct HeadPanel {
  HeadRange heads;
  int64_t first_channel;
  Heads<const T> x;
};

// Calls body(panel) for panels of about so many channels that together hold all of x, or with x
// itself if `channels` is 0. A head is cut only where it has more, at multiples of `unit`.
template <typename T, typename Body>
void for_each_panel(Heads<const T> x, int64_t channels, int64_t unit, const Body& body) {
  if (channels == 0) return body(HeadPanel<T>{x.heads, 0, x});
  const bool cut = channels < x.width;
  const int64_t heads = cut ? 1 : std::min(channels / x.width, x.heads);
  const int64_t width = cut ? std::min(std::max(channels / unit, int64_t{1}) * unit, x.width) : x.width;
  const Panel<T> panel({x.data, x.nodes, x.heads * x.width}, heads * width);
  for (int64_t head = 0; head < x.heads; head += heads) {
    const HeadRange range(head, std::min(head + heads, x.heads));
    for (int64_t first = 0; first < x.width; first += width) {
      const int64_t own = std::min(width, x.width - first);
      const Matrix<const T> part = panel.copy(head * x.width + first, range.count() * own);
      body(HeadPanel<T>{range, first, {part.data, part.rows, range.count(), own}});
    }
  }
}

}  // namespace fastgraph
