// The memory of the emulated GPU, and who may touch it.
//
// Races, overruns, uninitialised reads and misaligned accesses: kernels are compiled with the
// compiler's instrumentation for ThreadSanitizer, whose functions are ours (at the end), so each
// access to the arena below is seen before it happens. Bytes know who wrote and read them last. Two
// threads are ordered by barriers only: by __syncthreads within a block, by __syncwarp between the
// lanes in its mask; a shuffle orders no memory, and nothing orders two blocks of a launch.
#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "machine.h"

namespace simt {
namespace {

// All memory of the emulated GPU. Shared arrays live forever, each belongs to a declaration.
constexpr size_t kArenaBytes = size_t{64} << 20;
constexpr size_t kGap = 256;  // around buffers, and their alignment as with cudaMalloc
// On both sides of it lies nothing, so that addresses far off are known to be wrong, too.
constexpr size_t kAstray = size_t{1} << 30;

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

void* reserve(size_t bytes, int protection) {
  void* p = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) std::abort();
  return p;
}

char* make_arena() {
  char* p = static_cast<char*>(reserve(kAstray + kArenaBytes + kAstray, PROT_NONE)) + kAstray;
  if (mprotect(p, kArenaBytes, PROT_READ | PROT_WRITE) != 0) std::abort();
  return p;
}

struct Memory {
  char* arena = make_arena();
  Byte* bytes = static_cast<Byte*>(reserve(kArenaBytes * sizeof(Byte), PROT_READ | PROT_WRITE));
  std::vector<Buffer> buffers{{}};  // in ascending order; number 0 stands for none
  size_t used = kGap;

  bool contains(const char* p) const { return p >= arena && p < arena + kArenaBytes; }
  bool is_meant(const char* p) const {
    return p >= arena - kAstray && p < arena + kArenaBytes + kAstray;
  }
  const Buffer* buffer_of(const char* p) {
    if (!contains(p)) return nullptr;
    const uint16_t number = of(p)->buffer;
    return number ? &buffers[number] : nullptr;
  }
  Byte* of(const void* p) { return bytes + (static_cast<const char*>(p) - arena); }
};
Memory memory;

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
  if (machine.current == nullptr || !memory.is_meant(p)) return;  // registers and parameters
  if (draw(kInterrupt) == 0) {
    make_ready(*machine.current);
    leave();
  }
  Fiber& me = *machine.current;
  const char* verb = kind == Kind::kRead ? "reads " : "writes ";
  const Access mine{machine.serial, machine.epoch, me.known[me.lane()],
                    static_cast<uint16_t>(me.id), kind == Kind::kAtomic};
  for (size_t i = 0; i < size; ++i, ++p) {
    const Buffer* buffer = memory.buffer_of(p);
    const auto report = [&](const std::string& problem, const std::string& rest) {
      const Buffer* meant = buffer != nullptr ? buffer : nearest(p);
      fail(me, problem + ": " + verb + text(meant, p) + line_of(instruction) + rest);
    };
    if (buffer == nullptr) return report("overrun", "");
    Byte& byte = *memory.of(p);
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

}  // namespace

void forget_contents(void* p, size_t bytes) {
  Byte* state = memory.of(p);
  for (size_t i = 0; i < bytes; ++i) state[i] = {{}, {}, false, state[i].buffer};
  std::memset(p, 0xff, bytes);  // NaN, or an index that leads nowhere
}

void* allocate(size_t bytes, const char* name) {
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
void release(void* p) {
  Buffer& buffer = memory.buffers[memory.of(p)->buffer];
  buffer.live = false;
  for (size_t i = 0; i < buffer.bytes; ++i) memory.of(p)[i].buffer = 0;
  while (!memory.buffers.back().live && memory.buffers.size() > 1) {
    memory.used = memory.buffers.back().begin - memory.arena;
    memory.buffers.pop_back();
  }
}

float atomic_add(float* address, float value) {
  access(address, sizeof(float), Kind::kAtomic, __builtin_return_address(0));
  const float old = *address;
  *address = old + value;
  return old;
}

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

}  // namespace simt

// What code compiled with -fsanitize=thread calls before each access.
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
