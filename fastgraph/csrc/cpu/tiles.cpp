// Tiles for tensor cores (fastgraph/tiles.h; as in TC-GNN, Wang, Feng and Ding, USENIX ATC 2023).
//
// An edge that is there n times needs n slots of its row, and a slot is a bit. So its column is
// packed n times: the k-th entry of a row in a column takes the k-th copy of that column.
#include <algorithm>
#include <atomic>
#include <vector>

#include "cpu/kernels.h"
#include "fastgraph/parallel.h"

namespace fastgraph {
namespace {

// Vectors serve so many windows, one after the other.
constexpr int64_t kWindowsOfTask = 16;

struct Item {
  uint64_t place;  // its column, and below that its row in the window
  int64_t entry;

  uint64_t col() const { return place / kTileRows; }
  int64_t row() const { return static_cast<int64_t>(place % kTileRows); }
};

// The entries of a window by column, row and place in memory.
class Window {
 public:
  void read(const Csr& graph, int64_t window) {
    items_.clear();
    const int64_t first = window * kTileRows;
    const int64_t end = std::min(first + kTileRows, graph.num_rows);
    for (int64_t row = first; row < end; ++row) {
      for (int64_t e = graph.rowptr[row]; e < graph.rowptr[row + 1]; ++e) {
        items_.push_back(
            {static_cast<uint64_t>(graph.col[e]) * kTileRows + static_cast<uint64_t>(row - first),
             e});
      }
    }
    std::sort(items_.begin(), items_.end(), [](const Item& a, const Item& b) {
      return a.place != b.place ? a.place < b.place : a.entry < b.entry;
    });
  }

  // Calls body(item, packed column) for every entry. The number of packed columns.
  template <typename Body>
  int64_t for_each(const Body& body) const {
    int64_t columns = 0;
    for (size_t i = 0; i < items_.size();) {
      const uint64_t col = items_[i].col();
      int64_t copies = 0;
      for (int64_t copy = 0; i < items_.size() && items_[i].col() == col; ++i) {
        const bool is_again = copies > 0 && items_[i].place == items_[i - 1].place;
        copy = is_again ? copy + 1 : 0;
        copies = std::max(copies, copy + 1);
        body(items_[i], columns + copy);
      }
      columns += copies;
    }
    return columns;
  }

 private:
  std::vector<Item> items_;
};

int64_t num_windows(const Csr& graph) { return (graph.num_rows + kTileRows - 1) / kTileRows; }

// Calls body(window, i) for the i-th window of the list.
template <typename Number, typename Body>
void for_each_window(const Csr& graph, int64_t count, const Number& number, const Body& body) {
  const int64_t tasks = (count + kWindowsOfTask - 1) / kWindowsOfTask;
  for_each_task(tasks, count * kTileRows + graph.num_entries, [&](int64_t task) {
    Window window;
    const int64_t end = std::min(count, (task + 1) * kWindowsOfTask);
    for (int64_t i = task * kWindowsOfTask; i < end; ++i) {
      window.read(graph, number(i));
      body(window, i);
    }
  });
}

// Bits of a block that are set before this one.
int64_t rank(const uint64_t* bits, int64_t bit) {
  const uint64_t below = (uint64_t{1} << bit % 64) - 1;
  const int64_t of_word = __builtin_popcountll(bits[bit / 64] & below);
  return bit < 64 ? of_word : __builtin_popcountll(bits[0]) + of_word;
}

}  // namespace

void count_tile_columns(const Csr& graph, Indices<int32_t> windows, int64_t* columns) {
  for_each_window(
      graph, windows.size, [&](int64_t i) { return windows[i]; },
      [&](const Window& window, int64_t i) {
        columns[i] = window.for_each([](const Item&, int64_t) {});
      });
}

int64_t fill_tiles(const Csr& graph, const MutableTiles& tiles) {
  const int64_t count = num_windows(graph);
  std::atomic<int64_t> wrong{count};
  for_each_window(
      graph, count, [](int64_t i) { return i; },
      [&](const Window& window, int64_t i) {
        const int64_t begin = tiles.ptr[i], end = tiles.ptr[i + 1];
        const int64_t columns = window.for_each([](const Item&, int64_t) {});
        const int64_t blocks = (columns + kTileCols - 1) / kTileCols;
        if (begin < 0 || end > tiles.num_blocks || end - begin != blocks) {
          int64_t least = wrong;
          while (i < least && !wrong.compare_exchange_weak(least, i)) continue;
          return;
        }
        std::fill(tiles.col + begin * kTileCols, tiles.col + end * kTileCols, -1);
        std::fill(tiles.bits + begin * kTileWords, tiles.bits + end * kTileWords, 0);
        const auto bit_of = [](const Item& item, int64_t column) {
          return item.row() * kTileCols + column % kTileCols;
        };
        window.for_each([&](const Item& item, int64_t column) {
          const int64_t block = begin + column / kTileCols, bit = bit_of(item, column);
          tiles.col[begin * kTileCols + column] = static_cast<int32_t>(item.col());
          tiles.bits[block * kTileWords + bit / 64] |= uint64_t{1} << bit % 64;
        });
        int64_t first = graph.rowptr[i * kTileRows];
        for (int64_t block = begin; block < end; ++block) {
          const uint64_t* bits = tiles.bits + block * kTileWords;
          tiles.first[block] = first;
          first += __builtin_popcountll(bits[0]) + __builtin_popcountll(bits[1]);
        }
        window.for_each([&](const Item& item, int64_t column) {
          const int64_t block = begin + column / kTileCols;
          const uint64_t* bits = tiles.bits + block * kTileWords;
          tiles.edge_id[tiles.first[block] + rank(bits, bit_of(item, column))] =
              static_cast<int32_t>(graph.edge(item.entry));
        });
      });
  tiles.first[tiles.num_blocks] = graph.num_entries;
  return wrong < count ? wrong.load() : -1;
}

}  // namespace fastgraph
