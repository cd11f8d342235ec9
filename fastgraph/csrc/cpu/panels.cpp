#include "cpu/panels.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "fastgraph/row_batch.h"

namespace fastgraph {
namespace {

std::atomic<int64_t> forced{0};

// A panel may be larger than the own cache, as rows that are gathered often stay in it; narrower
// ones would have the graph visited more often. One of a head, which reads little else, gains up to
// three times a cache of 1 MiB.
constexpr double kCachesOfPanel = 1.5;
constexpr double kMostCachesOfHead = 3;
constexpr double kBytesOfHead = 3 << 20;

// Narrower panels would spend more on entries than they save.
constexpr int64_t kLeastLines = 2;

// Features that fit into so many caches are gathered as fast without panels.
constexpr int64_t kFewCaches = 4;

// How often rows must be gathered, on average: each panel visits all entries again. Where heads
// have to be visited anyway, less often, unless vectors hold several of them.
constexpr int64_t kGathers = 32;
constexpr int64_t kGathersOfHead = 16;
constexpr int64_t kGathersOfManyHeads = 64;

// The bytes of the second cache, which most processors have one of for each core; 0 where the
// system does not tell.
int64_t own_cache() {
#if defined(_SC_LEVEL2_CACHE_SIZE)
  static const int64_t bytes = std::max<int64_t>(0, sysconf(_SC_LEVEL2_CACHE_SIZE));
  return bytes;
#else
  return 0;
#endif
}

// Of so many, as many as a panel of so many bytes can have.
int64_t fitting_channels(int64_t num_cols, int64_t channels, int64_t item_bytes,
                         double panel_bytes) {
  if (num_cols == 0) return 0;
  const auto lines = static_cast<int64_t>(panel_bytes) / (num_cols * kCacheLine);
  const int64_t most = lines * (kCacheLine / item_bytes);
  if (most >= channels) return channels;
  return lines < kLeastLines ? 0 : most;
}

// As many for a head, where its rows are gathered kTimes on average, and 0 elsewhere.
template <int64_t kTimes>
int64_t channels_of_gathered_head(int64_t num_rows, int64_t num_cols, int64_t num_entries,
                                  int64_t channels, int64_t item_bytes, int64_t cache_bytes) {
  const auto cache = static_cast<double>(cache_bytes);
  const double most = std::max(kBytesOfHead, kCachesOfPanel * cache);
  if (num_entries < kTimes * std::max(num_rows, num_cols)) return 0;
  return fitting_channels(num_cols, channels, item_bytes,
                          std::min(kMostCachesOfHead * cache, most));
}

// By a rule for the processor at hand, unless panels are forced.
int64_t chosen_channels(PanelRule* rule, const Csr& graph, int64_t channels, int64_t item_bytes) {
  if (graph.num_cols == 0 || channels == 0) return 0;
  const int64_t chosen = forced.load(std::memory_order_relaxed);
  const int64_t of_line = kCacheLine / item_bytes;
  if (chosen > 0) return (std::min(chosen, channels) + of_line - 1) / of_line * of_line;
  if (chosen < 0) return 0;
  return rule(graph.num_rows, graph.num_cols, graph.num_entries, channels, item_bytes, own_cache());
}

}  // namespace

PanelRule* head_panel_rule(int64_t heads) {
  return heads_fill_vectors(heads) ? channels_of_gathered_head<kGathersOfManyHeads>
                                   : channels_of_gathered_head<kGathersOfHead>;
}

int64_t panel_channels(int64_t num_rows, int64_t num_cols, int64_t num_entries, int64_t channels,
                       int64_t item_bytes, int64_t cache_bytes) {
  if (num_cols * channels * item_bytes <= kFewCaches * cache_bytes) return 0;
  if (num_entries < kGathers * std::max(num_rows, num_cols)) return 0;
  return fitting_channels(num_cols, channels, item_bytes,
                          kCachesOfPanel * static_cast<double>(cache_bytes));
}

int64_t panel_channels(const Csr& graph, int64_t channels, int64_t item_bytes) {
  return chosen_channels(panel_channels, graph, channels, item_bytes);
}

int64_t head_panel_channels(const Csr& graph, int64_t heads, int64_t channels, int64_t item_bytes) {
  return chosen_channels(head_panel_rule(heads), graph, channels, item_bytes);
}

void force_panels(int64_t channels) { forced.store(channels, std::memory_order_relaxed); }

}  // namespace fastgraph
