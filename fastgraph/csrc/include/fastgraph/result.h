// What CPU kernels write.
#pragma once

#include <cstdint>

#include "fastgraph/memory.h"
#include "fastgraph/simd.h"
#include "fastgraph/views.h"

namespace fastgraph {

// Whether a result of this size is written past the caches, provided that it begins with a cache
// line: its memory need not be read first, and what the kernel reads stays in them. Larger than the
// own caches of a few cores, it would leave these before anything else could read it.
inline bool goes_past_caches(int64_t rows, int64_t row_bytes) {
  constexpr int64_t kLarge = int64_t{1} << 24;
  return kStreams && row_bytes > 0 && row_bytes % kCacheLine == 0 &&
         rows > (kLarge - 1) / row_bytes;
}

// One row of a result. Kernels that write several vectors of it hold it as a local variable, which
// no store can change: members would be read again after each.
template <typename T>
class ResultRow {
 public:
  ResultRow(T* data, bool past_caches) : data_(data), past_caches_(past_caches) {}

  // Writes N columns. Past the caches go those that begin at a multiple of their size: the rest of
  // a row whose parts have other widths does not.
  template <int N, typename V>
  void store(int64_t column, V values) const {
    if constexpr (is_half<T>) {
      write<N>(reinterpret_cast<uint16_t*>(data_) + column, narrow<N>(values, T{}));
    } else {
      write<N>(data_ + column, values);
    }
  }

 private:
  template <int N, typename U, typename V>
  void write(U* p, V values) const {
    if (past_caches_ && reinterpret_cast<uintptr_t>(p) % (N * sizeof(U)) == 0) {
      stream_raw<N>(p, values);
    } else {
      store_raw<N>(p, values);
    }
  }

  T* data_;
  bool past_caches_;
};

// One row of a result that has another row added to what is stored, unless that is null.
template <typename T>
class SumRow {
 public:
  SumRow(ResultRow<T> sum, const T* addend) : sum_(sum), addend_(addend) {}

  template <int N>
  void store(int64_t column, Vector<Accumulator<T>, N> values) const {
    if (addend_ != nullptr) values += load<N>(addend_ + column);
    sum_.template store<N>(column, values);
  }

 private:
  ResultRow<T> sum_;
  const T* addend_;
};

// A tensor whose values are written once each and not read.
template <typename T>
class Result {
 public:
  explicit Result(Matrix<T> to) : Result(Heads<T>{to.data, to.rows, 1, to.width}) {}

  explicit Result(Heads<T> to) : to_(to) {
    const auto address = reinterpret_cast<uintptr_t>(to.data);
    const int64_t row_bytes = to.width * static_cast<int64_t>(sizeof(T));
    past_caches_ = address % kCacheLine == 0 && goes_past_caches(to.nodes * to.heads, row_bytes);
    prefer_huge_pages(to.data, to.bytes());
  }

  ResultRow<T> row(int64_t node, int64_t head = 0) const {
    return {to_.at(node, head), past_caches_};
  }

 private:
  Heads<T> to_;
  bool past_caches_;
};

}  // namespace fastgraph
