// Runs kernels and watches them.
//
// Divergence: threads that should meet are compared when the last of them has come or nobody can
// run any more. memory.cpp watches what they read and write.
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "machine.h"

namespace simt {

Machine machine;

namespace {

constexpr size_t kStackBytes = size_t{256} << 10;
constexpr size_t kMaxSharedBytes = size_t{227} << 10;

// ---- Fibers

void switch_portably(Fiber& from, Fiber& to) { swapcontext(&from.context, &to.context); }
void prepare_portably(Fiber& fiber, void (*entry)()) {
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack;
  fiber.context.uc_stack.ss_size = kStackBytes;
  makecontext(&fiber.context, entry, 0);
}

#if defined(__x86_64__)
// Saves the registers that a call preserves on the stack that is left, and takes those on the
// other. swapcontext makes a system call each time, and a warp's shuffle switches 32 times; under
// AddressSanitizer it marks the whole of both stacks as well.
extern "C" void simt_switch(void** from, void* to);
asm(R"(
.text
.hidden simt_switch
.globl simt_switch
.type simt_switch, @function
simt_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
.size simt_switch, . - simt_switch
)");
void switch_context(Fiber& from, Fiber& to) {
  if (machine.portable) return switch_portably(from, to);
  simt_switch(&from.stack_pointer, to.stack_pointer);
}
void prepare_context(Fiber& fiber, void (*entry)()) {
  if (machine.portable) return prepare_portably(fiber, entry);
  void** top = reinterpret_cast<void**>(fiber.stack + kStackBytes) - 2;
  *top = reinterpret_cast<void*>(entry);  // where simt_switch returns to
  fiber.stack_pointer = top - 6;          // below it the six registers
}
#else
void switch_context(Fiber& from, Fiber& to) { switch_portably(from, to); }
void prepare_context(Fiber& fiber, void (*entry)()) { prepare_portably(fiber, entry); }
#endif

void enter(Fiber& fiber) {
  machine.current = &fiber;
  switch_context(machine.scheduler, fiber);
  machine.current = nullptr;
}

std::string text(const dim3& d) {
  return "(" + std::to_string(d.x) + "," + std::to_string(d.y) + "," + std::to_string(d.z) + ")";
}

}  // namespace

std::string text(Place place) {
  const std::string file = place.file;
  return file.substr(file.rfind('/') + 1) + ":" + std::to_string(place.line);
}

void leave() {
  Fiber& fiber = *machine.current;
  switch_context(fiber, machine.scheduler);
}

std::string text(const Fiber& fiber) { return "thread " + text(fiber.coordinates.thread); }

std::string where(const Fiber& fiber) {
  return std::string("kernel ") + machine.kernel + ", block " + text(machine.block.block) + ", " +
         text(fiber);
}

void fail(const Fiber& fiber, const std::string& what) {
  if (machine.error.empty()) machine.error = where(fiber) + ": " + what;
  if (machine.current != nullptr) leave();
}

void make_ready(Fiber& fiber) {
  fiber.state = State::kReady;
  machine.ready.push_back(fiber.id);
}

namespace {

const char* name_of(Collective kind) {
  switch (kind) {
    case Collective::kShuffle: return "a shuffle";
    case Collective::kBallot: return "__ballot_sync";
    case Collective::kSyncWarp: return "__syncwarp";
  }
  return "";
}

std::string doing(const Fiber& fiber) {
  switch (fiber.state) {
    case State::kExited: return text(fiber) + " has exited";
    case State::kAtBarrier: return text(fiber) + " waits in __syncthreads at " + text(fiber.place);
    case State::kInCollective: {
      char mask[16];
      std::snprintf(mask, sizeof(mask), "%08x", fiber.mask);
      return text(fiber) + " waits in " + name_of(fiber.kind) + " at " + text(fiber.place) +
             " for lanes " + mask;
    }
    case State::kReady: break;
  }
  return text(fiber) + " runs";
}

bool same(Place a, Place b) {
  return a.line == b.line && (a.file == b.file || std::strcmp(a.file, b.file) == 0);
}

// Carries out the collective that `fiber` waits in if all its lanes have come.
void try_collective(Fiber& fiber) {
  Fiber* warp = machine.fibers + fiber.warp() * warpSize;
  const int lanes = std::min(warpSize, machine.num_threads - fiber.warp() * warpSize);
  unsigned group = 0;
  for (int l = 0; l < lanes; ++l) {
    if (!(fiber.mask >> l & 1) || warp[l].state == State::kExited) continue;
    if (warp[l].state != State::kInCollective) return;
    group |= 1u << l;
  }
  unsigned votes = 0;
  uint32_t latest[warpSize] = {};
  for (int l = 0; l < lanes; ++l) {
    if (!(group >> l & 1)) continue;
    const Fiber& other = warp[l];
    if (other.kind != fiber.kind || other.mask != fiber.mask || !same(other.place, fiber.place)) {
      return fail(fiber, "divergent warp: " + doing(fiber) + ", but " + doing(other));
    }
    votes |= static_cast<unsigned>(other.value & 1) << l;
    if (other.kind != Collective::kSyncWarp) continue;
    ++warp[l].known[l];
    for (int k = 0; k < warpSize; ++k) latest[k] = std::max(latest[k], other.known[k]);
  }
  for (int l = 0; l < lanes; ++l) {
    if (!(group >> l & 1)) continue;
    Fiber& member = warp[l];
    switch (member.kind) {
      case Collective::kShuffle:
        if (!(group >> member.source & 1)) {
          return fail(member, "a shuffle at " + text(member.place) + " reads lane " +
                                  std::to_string(member.source) + ", which takes no part in it");
        }
        member.result = warp[member.source].value;
        break;
      case Collective::kBallot: member.result = votes; break;
      case Collective::kSyncWarp: std::copy(latest, latest + warpSize, member.known); break;
    }
  }
  for (int l = 0; l < lanes; ++l) {
    if (group >> l & 1) make_ready(warp[l]);
  }
}

void run_fiber() {
  machine.body(machine.closure);
  Fiber& fiber = *machine.current;
  fiber.state = State::kExited;
  const int first = fiber.warp() * warpSize;
  for (int i = first; i < std::min(first + warpSize, machine.num_threads); ++i) {
    Fiber& other = machine.fibers[i];
    if (other.state == State::kInCollective && (other.mask >> fiber.lane() & 1)) {
      try_collective(other);
    }
  }
  leave();
}

// Nobody can run, and collectives whose lanes had all come are done: lets a complete barrier go, or
// tells what is wrong. False if the block is done.
bool release_barrier() {
  Fiber* const begin = machine.fibers;
  Fiber* const end = begin + machine.num_threads;
  Fiber* waiting =
      std::find_if(begin, end, [](const Fiber& f) { return f.state != State::kExited; });
  if (waiting == end) return false;
  for (Fiber* other = begin; other < end; ++other) {
    if (other->state == waiting->state && same(other->place, waiting->place)) continue;
    fail(*waiting, "divergent barrier: " + doing(*waiting) + ", but " + doing(*other));
    return false;
  }
  ++machine.epoch;
  for (Fiber* fiber = begin; fiber < end; ++fiber) make_ready(*fiber);
  return true;
}

// ---- Blocks

void start_block(const dim3& block) {
  machine.block.block = block;
  ++machine.serial;
  machine.epoch = 0;
  machine.ready.clear();
  const dim3 size = machine.block.block_size;
  for (int i = 0; i < machine.num_threads; ++i) {
    Fiber& fiber = machine.fibers[i];
    fiber.id = i;
    fiber.coordinates = machine.block;
    fiber.coordinates.thread = dim3(i % size.x, i / size.x % size.y, i / size.x / size.y);
    fiber.place = {"", 0};
    std::fill(fiber.known, fiber.known + warpSize, 0);
    if (fiber.stack == nullptr) fiber.stack = new char[kStackBytes];
    prepare_context(fiber, run_fiber);
    make_ready(fiber);
  }
}

void run_block(const dim3& block) {
  start_block(block);
  do {
    while (!machine.ready.empty() && machine.error.empty()) {
      const size_t i = draw(machine.ready.size());
      Fiber& next = machine.fibers[machine.ready[i]];
      machine.ready[i] = machine.ready.back();
      machine.ready.pop_back();
      enter(next);
    }
  } while (machine.error.empty() && release_barrier());
}

}  // namespace

const Coordinates& here() { return machine.current->coordinates; }
int lane() { return machine.current->lane(); }

uint64_t meet(Collective kind, unsigned mask, uint64_t value, int source, Place place) {
  Fiber& me = *machine.current;
  me.state = State::kInCollective;
  me.kind = kind;
  me.mask = mask;
  me.value = value;
  me.source = source;
  me.place = place;
  if (!(mask >> me.lane() & 1)) fail(me, doing(me) + " and is none of them");
  try_collective(me);
  leave();
  return me.result;
}

void meet_block(Place place) {
  machine.current->state = State::kAtBarrier;
  machine.current->place = place;
  leave();
}

void* shared_array(void** slot, size_t bytes, const char* name) {
  struct Array {
    void* data;
    uint32_t serial;
  };
  static_assert(sizeof(Array) <= 16);
  auto* array = static_cast<Array*>(*slot);
  if (array == nullptr) {
    *slot = array = new Array{allocate(bytes, name), 0};
    machine.shared_arrays.push_back({static_cast<const char*>(array->data), bytes});
  }
  if (array->serial != machine.serial) forget_contents(array->data, bytes);
  array->serial = machine.serial;
  return array->data;
}

void* dynamic_shared() { return machine.dynamic_shared; }

void check_global(const void* address, Place place) {
  const auto& arrays = machine.shared_arrays;
  const Range dynamic{static_cast<const char*>(machine.dynamic_shared), machine.dynamic_bytes};
  if (dynamic.has(address) || std::any_of(arrays.begin(), arrays.end(),
                                          [=](const Range& array) { return array.has(address); })) {
    fail(*machine.current,
         "an address of shared memory in an instruction for the GPU's at " + text(place));
  }
}

cudaError_t run(const char* name, dim3 grid, dim3 block, size_t shared_bytes, Body body,
                void* closure) {
  const size_t threads = size_t{block.x} * block.y * block.z;
  const size_t blocks = size_t{grid.x} * grid.y * grid.z;
  machine.kernel = name;
  machine.error.clear();
  if (threads < 1 || threads > kMaxThreads || grid.y > 65535 || grid.z > 65535 ||
      shared_bytes > kMaxSharedBytes) {
    machine.error = std::string("kernel ") + name + ": impossible launch";
    return cudaErrorInvalidValue;
  }
  machine.block.grid_size = grid;
  machine.block.block_size = block;
  machine.num_threads = static_cast<int>(threads);
  machine.body = body;
  machine.closure = closure;
  machine.random = (machine.seed + 1) * 0x9E3779B97F4A7C15u;
  machine.launch_begin = machine.serial + 1;
  if (shared_bytes > 0) machine.dynamic_shared = allocate(shared_bytes, "dynamic shared memory");
  machine.dynamic_bytes = shared_bytes;
  std::vector<size_t> order(blocks);
  for (size_t i = 0; i < blocks; ++i) {
    order[i] = i;
    std::swap(order[i], order[draw(i + 1)]);
  }
  for (size_t i = 0; i < blocks && machine.error.empty(); ++i) {
    if (shared_bytes > 0) forget_contents(machine.dynamic_shared, shared_bytes);
    const size_t b = order[i];
    run_block(dim3(b % grid.x, b / grid.x % grid.y, b / grid.x / grid.y));
  }
  if (shared_bytes > 0) release(machine.dynamic_shared);
  machine.dynamic_shared = nullptr;
  return machine.error.empty() ? cudaSuccess : cudaErrorLaunchFailure;
}

void begin() { machine.error.clear(); }
const char* error() { return machine.error.c_str(); }
}  // namespace simt

// Whether threads are switched from now on as on processors for which nothing faster is known.
extern "C" __attribute__((visibility("default"))) void simt_portable(bool portable) {
  simt::machine.portable = portable;
}

// The order in which threads run from now on.
extern "C" __attribute__((visibility("default"))) void simt_seed(uint64_t seed) {
  simt::machine.seed = seed;
}
