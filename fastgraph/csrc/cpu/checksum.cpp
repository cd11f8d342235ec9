// A checksum of a tensor's content, to notice that it was edited: as fast as it can be read, 64
// bits that depend on every byte and its place, and not made to withstand an adversary.
//
// Blocks are hashed as in UMAC (Black et al., CRYPTO 1999): with a random key for each 32-bit half
// of each word, the sum of (low half + key) * (high half + key). Lanes keep that sum and the sum of
// its prefixes as well, as Fletcher's checksum does, so that two words that change together do not
// make up for each other.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>

#include "cpu/kernels.h"
#include "fastgraph/memory.h"
#include "fastgraph/parallel.h"
#include "fastgraph/simd.h"

namespace fastgraph {
namespace {

constexpr int kLaneWords = kVectorBytes / 8;
constexpr int kAbreast = 4;  // vectors
constexpr int kStepWords = kLaneWords * kAbreast;
constexpr int64_t kBlockWords = 1024;
constexpr int64_t kBlockBytes = 8 * kBlockWords;
constexpr int64_t kBlocksOfTask = 8;
// Bytes. Processors look ahead on their own, but stop at the end of each page.
constexpr int64_t kAhead = 4096;

// splitmix64 (Steele, Lea and Flood, OOPSLA 2014).
constexpr uint64_t mixed(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

constexpr uint64_t key(uint64_t number) { return mixed(0x9e3779b97f4a7c15u * (number + 1)); }

constexpr std::array<uint64_t, kBlockWords> make_keys() {
  std::array<uint64_t, kBlockWords> keys{};
  for (uint64_t i = 0; i < kBlockWords; ++i) keys[i] = key(i);
  return keys;
}

alignas(kCacheLine) constexpr std::array<uint64_t, kBlockWords> kKeys = make_keys();

// For words that come after each other, kStepWords at a time.
class BlockSum {
 public:
  FASTGRAPH_INLINE void add(const char* words, int64_t count) {
    for (int64_t first = 0; first < count; first += kStepWords) {
#pragma GCC unroll 4
      for (int64_t line = 0; line < kStepWords; line += kCacheLine / 8) {
        // As a number, because no pointer may be that far past what is read.
        const uintptr_t here = reinterpret_cast<uintptr_t>(words + 8 * (first + line));
        __builtin_prefetch(reinterpret_cast<const void*>(here + kAhead));
      }
#pragma GCC unroll 4
      for (int u = 0; u < kAbreast; ++u) {
        const int64_t at = first + u * kLaneWords;
        using Halves = Vector<uint32_t, 2 * kLaneWords>;
        const auto word =
            load_raw<2 * kLaneWords>(reinterpret_cast<const uint32_t*>(words + 8 * at));
        const auto own_key =
            load_raw<2 * kLaneWords>(reinterpret_cast<const uint32_t*>(kKeys.data() + at));
        const auto keyed = (Words)(Halves)(word + own_key);
        sum_[u] += times<kLaneWords>(keyed, keyed >> 32);
        prefixes_[u] += sum_[u];
      }
    }
  }

  uint64_t value() const {
    uint64_t value = 0;
    for (int u = 0; u < kAbreast; ++u) {
      for (int lane = 0; lane < kLaneWords; ++lane) {
        const uint64_t sum = sum_[u][lane];
        const uint64_t folded = prefixes_[u][lane] + (sum << 32 | sum >> 32);
        value += folded * (key(kBlockWords + u * kLaneWords + lane) | 1);
      }
    }
    return value;
  }

 private:
  using Words = Vector<uint64_t, kLaneWords>;
  Words sum_[kAbreast] = {};
  Words prefixes_[kAbreast] = {};
};

uint64_t block_value(const char* data, int64_t bytes) {
  BlockSum sum;
  const int64_t whole = bytes / (8 * kStepWords) * kStepWords;
  sum.add(data, whole);
  if (8 * whole == bytes) return sum.value();
  char rest[8 * kStepWords] = {};
  std::memcpy(rest, data + 8 * whole, bytes - 8 * whole);
  BlockSum last;
  last.add(rest, kStepWords);
  return sum.value() + mixed(last.value());
}

// The elements [first, first + count) of a row side by side.
template <typename T>
void gather(const char* row, int64_t stride, int64_t first, int64_t count, char* to) {
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(to + i * sizeof(T), row + (first + i) * stride * sizeof(T), sizeof(T));
  }
}

uint64_t row_checksum(const char* row, int64_t size, int64_t stride, int64_t item_bytes) {
  const int64_t block_items = kBlockBytes / item_bytes;
  const int64_t blocks = (size + block_items - 1) / block_items;
  const int64_t tasks = (blocks + kBlocksOfTask - 1) / kBlocksOfTask;
  std::atomic<uint64_t> total{0};
  for_each_task(tasks, size * item_bytes / 8, [&](int64_t task) {
    uint64_t sum = 0;
    const int64_t end = std::min((task + 1) * kBlocksOfTask, blocks);
    for (int64_t block = task * kBlocksOfTask; block < end; ++block) {
      const int64_t first = block * block_items, count = std::min(block_items, size - first);
      alignas(kCacheLine) char side_by_side[kBlockBytes];
      const char* data = row + first * item_bytes;
      if (stride != 1) {
        data = side_by_side;
        switch (item_bytes) {
          case 1: gather<uint8_t>(row, stride, first, count, side_by_side); break;
          case 2: gather<uint16_t>(row, stride, first, count, side_by_side); break;
          case 4: gather<uint32_t>(row, stride, first, count, side_by_side); break;
          default: gather<uint64_t>(row, stride, first, count, side_by_side); break;
        }
      }
      sum += mixed(block_value(data, count * item_bytes) + key(block));
    }
    total.fetch_add(sum, std::memory_order_relaxed);
  });
  return mixed(total + static_cast<uint64_t>(size));
}

}  // namespace

uint64_t checksum(const Strided& tensor) {
  uint64_t value = 0;
  for (int64_t row = 0; row < tensor.rows; ++row) {
    const char* data = tensor.data + row * tensor.row_stride * tensor.item_bytes;
    const uint64_t own = row_checksum(data, tensor.size, tensor.stride, tensor.item_bytes);
    value = mixed(value + key(row)) + own;
  }
  return value;
}

}  // namespace fastgraph
