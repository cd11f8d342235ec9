// Threads and memory of the process.
#include <omp.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>

#include "cpu/threads.h"
#include "fastgraph/memory.h"
#include "fastgraph/parallel.h"

namespace fastgraph {
namespace {

std::atomic<bool> serial{false};

}  // namespace

void run_serially() { serial.store(true, std::memory_order_relaxed); }

bool forked() { return serial.load(std::memory_order_relaxed); }

int max_threads() { return forked() ? 1 : omp_get_max_threads(); }

void use_threads(int count) { omp_set_num_threads(count); }

namespace {

const int registered = pthread_atfork(nullptr, nullptr, run_serially);

}  // namespace

void prefer_huge_pages(void* data, int64_t bytes) {
  // madvise wants whole pages; a huge page that only partly belongs to the tensor is left alone.
  const auto begin = (reinterpret_cast<uintptr_t>(data) + kHugePage - 1) & ~(kHugePage - 1);
  const auto end = (reinterpret_cast<uintptr_t>(data) + bytes) & ~(kHugePage - 1);
  // Failing changes nothing but the time taken.
  if (begin < end) (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

}  // namespace fastgraph
