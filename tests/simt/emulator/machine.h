// The block that runs, its threads and what they wait for: what runtime.cpp and memory.cpp share.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <string>
#include <vector>

#include "simt.h"

namespace simt {

constexpr int kMaxThreads = 1024;

enum class State { kReady, kAtBarrier, kInCollective, kExited };

struct Fiber {
  int id;
  Coordinates coordinates;
  State state;
  Place place;
  // What it brings to a collective and takes away.
  Collective kind;
  unsigned mask;
  int source;
  uint64_t value;
  uint64_t result;
  // How much of each lane of its warp it knows of: that lane's own count at their last meeting.
  uint32_t known[warpSize];
  char* stack = nullptr;
  ucontext_t context;  // where the fiber starts and is left, if the machine is portable
  void* stack_pointer = nullptr;

  int warp() const { return id / warpSize; }
  int lane() const { return id % warpSize; }
};

struct Range {
  const char* begin;
  size_t bytes;

  bool has(const void* p) const {
    return p >= static_cast<const void*>(begin) && p < static_cast<const void*>(begin + bytes);
  }
};

struct Machine {
  Fiber fibers[kMaxThreads];
  Fiber scheduler;
  Fiber* current = nullptr;  // null outside of kernels
  const char* kernel = "";
  Coordinates block;
  int num_threads = 0;
  uint32_t launch_begin = 0;  // the serial number of the first block of this launch
  uint32_t serial = 0;        // of this block, among all that ever ran
  uint32_t epoch = 0;         // barriers of the block so far
  std::vector<int> ready;
  uint64_t seed = 0;
  uint64_t random = 0;
  std::string error;
  bool portable = false;  // whether the C library switches fibers
  Body body = nullptr;
  void* closure = nullptr;
  void* dynamic_shared = nullptr;
  size_t dynamic_bytes = 0;
  std::vector<Range> shared_arrays;  // all that ever were
};
extern Machine machine;

// xorshift64 (Marsaglia, Xorshift RNGs, 2003)
inline uint64_t draw(uint64_t bound) {
  machine.random ^= machine.random << 13;
  machine.random ^= machine.random >> 7;
  machine.random ^= machine.random << 17;
  return machine.random % bound;
}

std::string text(Place place);
std::string text(const Fiber& fiber);
std::string where(const Fiber& fiber);

// Ends the launch. The fibers are abandoned where they stand.
void fail(const Fiber& fiber, const std::string& what);

void make_ready(Fiber& fiber);
// Back to the scheduler, which decides who is next.
void leave();

// Makes memory as new: whoever reads it next before writing is told so.
void forget_contents(void* p, size_t bytes);

}  // namespace simt
