// Where kernels run.
#pragma once

#include <cstdint>

#include "fastgraph/platform.cuh"

namespace fastgraph::cuda {

// The caller's stream, and memory for what kernels pass on to each other.
class Queue {
 public:
  explicit Queue(Stream stream) : stream_(stream) {}
  virtual ~Queue() = default;

  Stream stream() const { return stream_; }

  // Of the last cache, which all multiprocessors share.
  virtual int64_t cache_bytes() const = 0;

  // Room for `count` values, aligned as cudaMalloc does it; it lasts until what was put on the
  // stream before the queue goes away is done. Null for a count of 0.
  template <typename T>
  T* scratch(int64_t count) {
    return count == 0 ? nullptr : static_cast<T*>(allocate(count * sizeof(T)));
  }

 private:
  virtual void* allocate(int64_t bytes) = 0;

  Stream stream_;
};

}  // namespace fastgraph::cuda
