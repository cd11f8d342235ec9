// Runs kernels and watches them.
//
// Divergence: threads that should meet are compared when the last of them has come or nobody can
// run any more. Races, overruns, uninitialised reads and misaligned accesses: kernels are compiled
// with the compiler's instrumentation for ThreadSanitizer, whose functions are ours (at the end),
// so each access to the arena below is seen before it happens. Bytes know who wrote and read them
// last. Two threads are ordered by barriers only: by __syncthreads within a block, by __syncwarp
// between the lanes in its mask; a shuffle orders no memory, and nothing orders two blocks of a
// launch. Under AddressSanitizer buffers are heap objects of their own instead, and it does the
// watching.
#include <dlfcn.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "simt.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace simt {
namespace {

constexpr int kMaxThreads = 1024;
constexpr size_t kStackBytes = size_t{256} << 10;
constexpr size_t kMaxSharedBytes = size_t{227} << 10;

// ---- Fibers

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
  ucontext_t context;  // where the fiber starts, and where it is left with SIMT_PORTABLE
  void* stack_pointer = nullptr;
  void* fake_stack = nullptr;

  int warp() const { return id / warpSize; }
  int lane() const { return id % warpSize; }
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
  Body body = nullptr;
  void* closure = nullptr;
  void* dynamic_shared = nullptr;
  const void* scheduler_stack = nullptr;
  size_t scheduler_stack_bytes = 0;
};
Machine machine;

// xorshift64 (Marsaglia, Xorshift RNGs, 2003)
uint64_t draw(uint64_t bound) {
  machine.random ^= machine.random << 13;
  machine.random ^= machine.random >> 7;
  machine.random ^= machine.random << 17;
  return machine.random % bound;
}

#if defined(__x86_64__) && !defined(SIMT_PORTABLE)
// Saves the registers that a call preserves on the stack that is left, and takes those on the
// other. swapcontext makes a system call each time, and a warp's shuffle switches 32 times.
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
void switch_context(Fiber& from, Fiber& to) { simt_switch(&from.stack_pointer, to.stack_pointer); }
void prepare_context(Fiber& fiber, void (*entry)()) {
  void** top = reinterpret_cast<void**>(fiber.stack + kStackBytes) - 2;
  *top = reinterpret_cast<void*>(entry);  // where simt_switch returns to
  fiber.stack_pointer = top - 6;          // below it the six registers
}
#else
void switch_context(Fiber& from, Fiber& to) { swapcontext(&from.context, &to.context); }
void prepare_context(Fiber& fiber, void (*entry)()) {
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack;
  fiber.context.uc_stack.ss_size = kStackBytes;
  makecontext(&fiber.context, entry, 0);
}
#endif

void enter(Fiber& fiber) {
  machine.current = &fiber;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&machine.scheduler.fake_stack, fiber.stack, kStackBytes);
#endif
  switch_context(machine.scheduler, fiber);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(machine.scheduler.fake_stack, nullptr, nullptr);
#endif
  machine.current = nullptr;
}

// Back to the scheduler, which decides who is next.
void leave() {
  Fiber& fiber = *machine.current;
#if defined(__SANITIZE_ADDRESS__)
  // What the sanitizer keeps beside the stack goes with the thread.
  void** const kept = fiber.state == State::kExited ? nullptr : &fiber.fake_stack;
  __sanitizer_start_switch_fiber(kept, machine.scheduler_stack, machine.scheduler_stack_bytes);
#endif
  switch_context(fiber, machine.scheduler);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fiber.fake_stack, nullptr, nullptr);
#endif
}

std::string text(const dim3& d) {
  return "(" + std::to_string(d.x) + "," + std::to_string(d.y) + "," + std::to_string(d.z) + ")";
}
std::string text(const Fiber& fiber) { return "thread " + text(fiber.coordinates.thread); }
std::string text(Place place) {
  const std::string file = place.file;
  return file.substr(file.rfind('/') + 1) + ":" + std::to_string(place.line);
}

std::string where(const Fiber& fiber) {
  return std::string("kernel ") + machine.kernel + ", block " + text(machine.block.block) + ", " +
         text(fiber);
}

// Ends the launch. The fibers are abandoned where they stand.
void fail(const Fiber& fiber, const std::string& what) {
  if (machine.error.empty()) machine.error = where(fiber) + ": " + what;
  if (machine.current != nullptr) leave();
}

void make_ready(Fiber& fiber) {
  fiber.state = State::kReady;
  machine.ready.push_back(fiber.id);
}

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

bool same(Place a, Place b) { return a.line == b.line && std::strcmp(a.file, b.file) == 0; }

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
    if (other.kind == Collective::kSyncWarp) ++warp[l].known[l];
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
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &machine.scheduler_stack,
                                  &machine.scheduler_stack_bytes);
#endif
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

// ---- Memory

#if defined(__SANITIZE_ADDRESS__)

void* obtain(size_t bytes, const char*) {
  void* p = nullptr;
  if (posix_memalign(&p, 256, std::max<size_t>(bytes, 1)) != 0) std::abort();
  std::memset(p, 0xff, bytes);
  return p;
}
void free_buffer(void* p) { std::free(p); }
void forget_contents(void* p, size_t bytes) { std::memset(p, 0xff, bytes); }

// Called when a sanitizer has found something: it knows the line, this the thread.
void tell_where() {
  if (machine.current != nullptr) std::fprintf(stderr, "%s\n", where(*machine.current).c_str());
}
const bool tells_where = (__sanitizer_set_death_callback(tell_where), true);

#else

// All memory of the emulated GPU. Shared arrays live forever, each belongs to a declaration.
constexpr size_t kArenaBytes = size_t{64} << 20;
constexpr size_t kGap = 256;  // around buffers, and their alignment as with cudaMalloc

struct Access {
  uint32_t serial;  // of the block, 0 for none
  uint32_t epoch;
  uint32_t count;  // of the lane in its warp
  uint16_t thread;
  uint16_t atomic;
};

// Of readers the two last ones are known: a write after more may miss a race in one order of
// threads, and finds it in another.
struct Byte {
  Access write;
  Access read[2];
  bool written;
  uint16_t buffer;  // 0 for none
};

struct Buffer {
  char* begin;
  size_t bytes;
  std::string name;
  bool live;
};

template <typename T>
T* reserve(size_t count) {
  void* p = mmap(nullptr, count * sizeof(T), PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) std::abort();
  return static_cast<T*>(p);
}

struct Memory {
  char* arena = reserve<char>(kArenaBytes);
  Byte* bytes = reserve<Byte>(kArenaBytes);
  std::vector<Buffer> buffers{{}};  // in ascending order; number 0 stands for none
  size_t used = kGap;

  bool contains(const void* p) const { return p >= arena && p < arena + kArenaBytes; }
  Byte* of(const void* p) { return bytes + (static_cast<const char*>(p) - arena); }
};
Memory memory;

void forget_contents(void* p, size_t bytes) {
  Byte* state = memory.of(p);
  for (size_t i = 0; i < bytes; ++i) state[i] = {{}, {}, false, state[i].buffer};
  std::memset(p, 0xff, bytes);  // NaN, or an index that leads nowhere
}

void* obtain(size_t bytes, const char* name) {
  const size_t end = memory.used + (bytes + kGap - 1) / kGap * kGap + kGap;
  if (end > kArenaBytes) std::abort();
  char* p = memory.arena + memory.used;
  memory.used = end;
  const auto number = static_cast<uint16_t>(memory.buffers.size());
  memory.buffers.push_back({p, bytes, name, true});
  for (size_t i = 0; i < bytes; ++i) memory.of(p)[i].buffer = number;
  forget_contents(p, bytes);
  return p;
}

// Memory is used again when nothing that came later is alive.
void free_buffer(void* p) {
  Buffer& buffer = memory.buffers[memory.of(p)->buffer];
  buffer.live = false;
  for (size_t i = 0; i < buffer.bytes; ++i) memory.of(p)[i].buffer = 0;
  while (!memory.buffers.back().live && memory.buffers.size() > 1) {
    memory.used = memory.buffers.back().begin - memory.arena;
    memory.buffers.pop_back();
  }
}

// The buffer that an address outside of all buffers was probably meant for.
const Buffer* nearest(const char* p) {
  const Buffer* best = nullptr;
  ptrdiff_t least = kGap;
  for (const Buffer& buffer : memory.buffers) {
    if (!buffer.live) continue;
    const char* end = buffer.begin + buffer.bytes;
    const ptrdiff_t distance = p < buffer.begin ? buffer.begin - p : p - end;
    if (distance < least) {
      best = &buffer;
      least = distance;
    }
  }
  return best;
}

std::string text(const Buffer* buffer, const char* p) {
  if (buffer == nullptr) return "address outside of all buffers";
  return buffer->name + (p < buffer->begin ? "" : "+") + std::to_string(p - buffer->begin) +
         " of " + std::to_string(buffer->bytes) + " bytes";
}

// Whether nothing orders an earlier access before one of this thread now.
bool unordered(const Access& earlier, const Fiber& me) {
  if (earlier.serial < machine.launch_begin) return false;
  if (earlier.serial != machine.serial) return true;
  if (earlier.thread == me.id || earlier.epoch < machine.epoch) return false;
  const bool same_warp = earlier.thread / warpSize == me.warp();
  return !(same_warp && me.known[earlier.thread % warpSize] > earlier.count);
}

std::string text(const Access& access) {
  if (access.serial != machine.serial) return "another block";
  return text(machine.fibers[access.thread]);
}

enum class Kind { kRead, kWrite, kAtomic };

// Where in the source an instruction stands, if the tools to find it are there.
std::string line_of(const void* instruction) {
  Dl_info info;
  if (dladdr(instruction, &info) == 0) return "";
  const auto offset = static_cast<const char*>(instruction) - static_cast<char*>(info.dli_fbase);
  char command[512], line[256] = "";
  std::snprintf(command, sizeof(command), "addr2line -s -e '%s' %#tx 2>/dev/null", info.dli_fname,
                offset - 1);
  FILE* pipe = popen(command, "r");
  if (pipe == nullptr) return "";
  const bool found = std::fgets(line, sizeof(line), pipe) != nullptr && line[0] != '?';
  pclose(pipe);
  const std::string text = line;
  return found ? " at " + text.substr(0, text.find_first_of(" \n")) : "";
}

// How often a thread is interrupted at an access: about once in so many.
constexpr int kInterrupt = 64;

void access(const void* address, size_t size, Kind kind, const void* instruction) {
  const char* p = static_cast<const char*>(address);
  if (machine.current == nullptr || !memory.contains(p)) return;  // registers and parameters
  if (draw(kInterrupt) == 0) {
    make_ready(*machine.current);
    leave();
  }
  Fiber& me = *machine.current;
  const char* verb = kind == Kind::kRead ? "reads " : "writes ";
  const Access mine{machine.serial, machine.epoch, me.known[me.lane()],
                    static_cast<uint16_t>(me.id), kind == Kind::kAtomic};
  for (size_t i = 0; i < size; ++i, ++p) {
    Byte& byte = *memory.of(p);
    const Buffer* buffer = byte.buffer ? &memory.buffers[byte.buffer] : nullptr;
    const auto report = [&](const std::string& problem, const std::string& rest) {
      const Buffer* meant = buffer != nullptr ? buffer : nearest(p);
      fail(me, problem + ": " + verb + text(meant, p) + line_of(instruction) + rest);
    };
    if (buffer == nullptr) return report("overrun", "");
    if (i == 0 && (size & (size - 1)) == 0 && reinterpret_cast<uintptr_t>(p) % size != 0) {
      return report("misaligned access of " + std::to_string(size) + " bytes", "");
    }
    if (kind != Kind::kWrite && !byte.written) return report("uninitialised memory", "");
    const bool atomic = kind == Kind::kAtomic;
    if (!(atomic && byte.write.atomic) && unordered(byte.write, me)) {
      return report("race", ", which " + text(byte.write) + " wrote with no barrier between");
    }
    if (kind != Kind::kRead) {
      for (const Access& read : byte.read) {
        if (!unordered(read, me)) continue;
        return report("race", ", which " + text(read) + " read with no barrier between");
      }
      byte.write = mine;
      byte.written = true;
    } else {
      if (byte.read[0].serial != machine.serial || byte.read[0].thread != mine.thread) {
        byte.read[1] = byte.read[0];
      }
      byte.read[0] = mine;
    }
  }
}

#endif

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
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(fiber.stack, kStackBytes);
#endif
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
  if (array == nullptr) *slot = array = new Array{obtain(bytes, name), 0};
  if (array->serial != machine.serial) forget_contents(array->data, bytes);
  array->serial = machine.serial;
  return array->data;
}

void* dynamic_shared() { return machine.dynamic_shared; }

float atomic_add(float* address, float value) {
#if !defined(__SANITIZE_ADDRESS__)
  access(address, sizeof(float), Kind::kAtomic, __builtin_return_address(0));
#endif
  const float old = *address;
  *address = old + value;
  return old;
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
  if (shared_bytes > 0) machine.dynamic_shared = obtain(shared_bytes, "dynamic shared memory");
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
  if (shared_bytes > 0) free_buffer(machine.dynamic_shared);
  machine.dynamic_shared = nullptr;
  return machine.error.empty() ? cudaSuccess : cudaErrorLaunchFailure;
}

void begin() { machine.error.clear(); }
const char* error() { return machine.error.c_str(); }
void* allocate(size_t bytes, const char* name) { return obtain(bytes, name); }
void release(void* address) { free_buffer(address); }

#if defined(__SANITIZE_ADDRESS__)
void write(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }
void read(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }
#else
void write(void* to, const void* from, size_t bytes) {
  std::memcpy(to, from, bytes);
  for (size_t i = 0; i < bytes; ++i) memory.of(to)[i].written = true;
}
void read(void* to, const void* from, size_t bytes) {
  const Byte* state = memory.of(from);
  for (size_t i = 0; i < bytes; ++i) {
    if (state[i].written) static_cast<char*>(to)[i] = static_cast<const char*>(from)[i];
  }
}
#endif

}  // namespace simt

// The order in which threads run from now on.
extern "C" __attribute__((visibility("default"))) void simt_seed(uint64_t seed) {
  simt::machine.seed = seed;
}

// ---- What code compiled with -fsanitize=thread calls before each access

#if !defined(__SANITIZE_ADDRESS__)
#define SIMT_SEE(p, size, kind) simt::access(p, size, kind, __builtin_return_address(0))
#define SIMT_ACCESS(size)                                                              \
  extern "C" void __tsan_read##size(void* p) { SIMT_SEE(p, size, simt::Kind::kRead); } \
  extern "C" void __tsan_write##size(void* p) { SIMT_SEE(p, size, simt::Kind::kWrite); }
SIMT_ACCESS(1)
SIMT_ACCESS(2)
SIMT_ACCESS(4)
SIMT_ACCESS(8)
SIMT_ACCESS(16)
#undef SIMT_ACCESS
extern "C" void __tsan_read_range(void* p, size_t n) { SIMT_SEE(p, n, simt::Kind::kRead); }
extern "C" void __tsan_write_range(void* p, size_t n) { SIMT_SEE(p, n, simt::Kind::kWrite); }
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
extern "C" void __tsan_init() {}
#endif
