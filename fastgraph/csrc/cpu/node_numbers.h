// Numbers of nodes within a sample: a key for each node of the graph, and an entry for each key.
//
// An entry is a stamp in its upper half and a value in its lower: a node's number, or, with the
// highest bit set, the slot of an edge that claims to have found it. Stamps fall from call to call,
// so that in one call a number is less than any claim, a claim is less than a later one, and all
// of them are less than what earlier calls have left. Hence the least value ever offered to an
// entry is the right one, in whatever order threads offer them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "fastgraph/memory.h"

namespace fastgraph {

constexpr uint64_t kClaim = uint64_t{1} << 31;

inline uint64_t load_entry(const uint64_t* entry) {
  return __atomic_load_n(entry, __ATOMIC_RELAXED);
}

inline void store_entry(uint64_t* entry, uint64_t value) {
  __atomic_store_n(entry, value, __ATOMIC_RELAXED);
}

// True if `value` was less than what was there.
inline bool offer(uint64_t* entry, uint64_t value) {
  uint64_t there = load_entry(entry);
  while (value < there) {
    if (__atomic_compare_exchange_n(entry, &there, value, true, __ATOMIC_RELAXED,
                                    __ATOMIC_RELAXED)) {
      return true;
    }
  }
  return false;
}

// An array with an entry for each node: memory that a thread keeps for all its calls.
class DenseNumbers {
 public:
  explicit DenseNumbers(int64_t num_keys) {
    Kept& kept = kept_by_thread();
    if (kept.size < num_keys || kept.stamp == 0) {
      const int64_t size = std::max(kept.size, num_keys);
      kept.size = 0;
      kept.entries.reset();
      kept.entries = scratch_in_huge_pages<uint64_t>(std::max<int64_t>(size, 1));
      std::fill_n(kept.entries.get(), size, ~uint64_t{0});
      kept.size = size;
      kept.stamp = ~uint32_t{0};
    }
    stamp_ = static_cast<uint64_t>(--kept.stamp) << 32;
    entries_ = kept.entries.get();
  }

  uint64_t stamp() const { return stamp_; }
  void reserve(int64_t) {}
  uint64_t* entry(uint64_t key) const { return entries_ + key; }
  uint64_t* find(uint64_t key) const { return entries_ + key; }

 private:
  struct Kept {
    Scratch<uint64_t> entries;
    int64_t size = 0;
    uint32_t stamp = 0;
  };
  static Kept& kept_by_thread() {
    thread_local Kept kept;
    return kept;
  }

  uint64_t* entries_;
  uint64_t stamp_;
};

// A hash table with linear probing; all threads may insert, but for those that reserve.
class HashedNumbers {
 public:
  explicit HashedNumbers(int64_t) { resize(10); }

  uint64_t stamp() const { return 0; }

  // Room for so many keys, half of which leaves empty places enough.
  void reserve(int64_t num_keys) {
    int bits = bits_;
    while ((int64_t{1} << bits) < 2 * num_keys) ++bits;
    if (bits == bits_) return;
    const Scratch<Place> before = std::move(places_);
    const int64_t size = int64_t{1} << bits_;
    resize(bits);
    for (int64_t i = 0; i < size; ++i) {
      if (before[i].key != kEmpty) *entry(before[i].key) = before[i].value;
    }
  }

  // Inserts the key if it is not there.
  uint64_t* entry(uint64_t key) const {
    for (uint64_t at = home(key);; at = (at + 1) & mask_) {
      Place& place = places_[at];
      uint64_t there = __atomic_load_n(&place.key, __ATOMIC_RELAXED);
      if (there == key) return &place.value;
      if (there == kEmpty && (__atomic_compare_exchange_n(&place.key, &there, key, false,
                                                          __ATOMIC_RELAXED, __ATOMIC_RELAXED) ||
                              there == key)) {
        return &place.value;
      }
    }
  }

  // Null if it is not there.
  uint64_t* find(uint64_t key) const {
    for (uint64_t at = home(key);; at = (at + 1) & mask_) {
      if (places_[at].key == key) return &places_[at].value;
      if (places_[at].key == kEmpty) return nullptr;
    }
  }

 private:
  static constexpr uint64_t kEmpty = ~uint64_t{0};  // keys have 63 bits
  struct Place {
    uint64_t key, value;
  };

  uint64_t home(uint64_t key) const { return (key * 0x9e3779b97f4a7c15u) >> (64 - bits_); }

  void resize(int bits) {
    places_ = scratch<Place>(int64_t{1} << bits);
    std::memset(static_cast<void*>(places_.get()), 0xff, sizeof(Place) << bits);
    bits_ = bits;
    mask_ = (uint64_t{1} << bits) - 1;
  }

  Scratch<Place> places_;
  int bits_ = 0;
  uint64_t mask_ = 0;
};

}  // namespace fastgraph
