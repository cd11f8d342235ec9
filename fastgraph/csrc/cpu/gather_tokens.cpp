// InputTokens of LargeGT (Dwivedi et al., 2023, Algorithm 2): rows of a table, which has all tokens
// of a node side by side, one after the other. Rows are bytes here, whatever is in them.
#include "cpu/gather_tokens.h"

#include <algorithm>
#include <cstring>

#include "cpu/mapped_pages.h"
#include "fastgraph/memory.h"
#include "fastgraph/parallel.h"
#include "fastgraph/simd.h"

namespace fastgraph {
namespace {

constexpr int64_t kRowsOfTask = 64;
// Bytes. A result of less may be read from the caches afterwards.
constexpr int64_t kLarge = int64_t{1} << 24;

// The whole cache lines of `to` go past the caches, as the result is much larger than they are.
inline void copy_past_caches(const char* from, int64_t bytes, char* to) {
  constexpr int kLanes = kVectorBytes / 8;
  const int64_t before = -reinterpret_cast<uintptr_t>(to) % kVectorBytes;
  if (bytes < before + kVectorBytes) {
    std::memcpy(to, from, bytes);
    return;
  }
  std::memcpy(to, from, before);
  int64_t at = before;
  for (; at + kVectorBytes <= bytes; at += kVectorBytes) {
    Vector<int64_t, kLanes> words;
    std::memcpy(&words, from + at, kVectorBytes);
    stream_raw<kLanes>(reinterpret_cast<int64_t*>(to + at), words);
  }
  std::memcpy(to + at, from + at, bytes - at);
}

}  // namespace

int64_t gather_tokens(const TokenTable& table, const TokenCache& cache, const int32_t* nodes,
                      int64_t count, char* out, BadIndex& bad) {
  int64_t hits = 0;
  for (int64_t i = 0; i < count; ++i) {
    const bool in_table = nodes[i] >= 0 && nodes[i] < table.num_rows;
    if (in_table && !cache.holds(nodes[i])) continue;
    const int64_t place = in_table ? cache.place(nodes[i]) : -1;
    if (place < 0 || place >= cache.num_rows) {
      bad = {nodes[i], in_table};
      return -1;
    }
    ++hits;
  }
  const int64_t bytes = table.row_bytes;
  if (bytes == 0) return hits;  // rows may have no memory then
  const bool past_caches = kStreams && count * bytes >= kLarge;
  const auto row_of = [&](int32_t node) {
    return cache.holds(node) ? cache.rows + cache.place(node) * bytes : table.rows + node * bytes;
  };
  const int64_t num_tasks = (count + kRowsOfTask - 1) / kRowsOfTask;
  if (table.is_elsewhere) {
    for_each_task(num_tasks, kParallelThreshold, [&](int64_t task) {
      const int64_t end = std::min((task + 1) * kRowsOfTask, count);
      for (int64_t i = task * kRowsOfTask; i < end; ++i) {
        if (!cache.holds(nodes[i])) ask_for_pages(table.rows + nodes[i] * bytes, bytes);
      }
    });
  }
  for_each_task(num_tasks, count * (bytes / 4 + 1), [&](int64_t task) {
    const int64_t begin = task * kRowsOfTask, end = std::min(begin + kRowsOfTask, count);
    for (int64_t i = begin; i < end; ++i) {
      if (i + kAhead < count) prefetch(row_of(nodes[i + kAhead]), bytes);
      const char* from = row_of(nodes[i]);
      if (past_caches) {
        copy_past_caches(from, bytes, out + i * bytes);
      } else {
        std::memcpy(out + i * bytes, from, bytes);
      }
    }
  });
  return hits;
}

}  // namespace fastgraph
