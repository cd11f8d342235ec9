// The distinct nodes of the smallest priorities among all that are offered, in any order and as
// often as they like (bottom-k sampling: Cohen and Kaplan, Summarizing data using bottom-k
// sketches, PODC 2007).
//
// Priorities are a bijection of nodes, so they alone are kept. Those above a bound, the last one
// that is wanted so far, are passed over; others are collected, and when there are several times as
// many as are wanted, these are sorted, and the bound falls.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cpu/priorities.h"
#include "fastgraph/memory.h"
#include "fastgraph/simd.h"

namespace fastgraph {

class Smallest {
 public:
  // How many are wanted, at least 1.
  explicit Smallest(int64_t wanted)
      : wanted_(wanted),
        capacity_(std::max<int64_t>(kTimes * wanted, kLeast)),
        values_(scratch<uint32_t>(capacity_ + kSlack)),
        sorted_(scratch<uint32_t>(capacity_ + kSlack)) {}

  // Begins anew. A node that is excluded is passed over.
  void clear(OrderKeys keys, int64_t excluded = -1) {
    keys_ = keys;
    size_ = 0;
    bound_ = kAll;
    excludes_ = excluded >= 0;
    excluded_ = priority_of(static_cast<uint32_t>(excluded), keys);
  }

  // Offers nodes. Returns the largest of them as unsigned numbers, so that one that is negative or
  // has more than 32 bits, of which nothing else may be expected, is found out.
  template <typename Index>
  uint64_t offer(const Index* nodes, int64_t count) {
#if defined(__AVX512F__)
    return offer_vectors(nodes, count);
#else
    constexpr int N = kVectorBytes / 4;
    uint64_t largest = 0;
    int64_t t = 0;
    for (; t + N <= count; t += N) {
      Vector<uint32_t, N> node;
      for (int lane = 0; lane < N; ++lane) {
        largest = std::max(largest, unsigned_of(nodes[t + lane]));
        node[lane] = static_cast<uint32_t>(nodes[t + lane]);
      }
      const Vector<uint32_t, N> priority = priority_of(node, keys_);
      make_room();
      for (int lane = 0; lane < N; ++lane) push(priority[lane]);
    }
    make_room();
    for (; t < count; ++t) {
      largest = std::max(largest, unsigned_of(nodes[t]));
      push(priority_of(static_cast<uint32_t>(nodes[t]), keys_));
    }
    return largest;
#endif
  }

  // Sorts what is left in the end.
  void finish() { cut(); }

  int64_t size() const { return size_; }
  // After finish(), in ascending order.
  uint32_t priority(int64_t i) const { return values_[i]; }
  uint32_t node(int64_t i) const { return node_of(values_[i], keys_); }

  template <typename Node>
  void write_nodes(Node* out) const {
    for (int64_t i = 0; i < size_; ++i) out[i] = static_cast<Node>(node_of(values_[i], keys_));
  }

 private:
  static constexpr int64_t kTimes = 8;
  static constexpr int64_t kLeast = 512;
  static constexpr int64_t kSlack = 32;
  static constexpr uint32_t kAll = 0xffffffff;
  static constexpr int64_t kFew = 24;   // are sorted by insertion alone
  static constexpr int kMostBits = 16;  // of the number of buckets
  static constexpr int64_t kOfBucket = 2;

  template <typename Index>
  static uint64_t unsigned_of(Index node) {
    return static_cast<std::make_unsigned_t<Index>>(node);
  }

  void push(uint32_t priority) {
    values_[size_] = priority;
    size_ += priority <= bound_;
  }

  // For as many values as kSlack.
  void make_room() {
    if (size_ > capacity_ - kSlack) cut();
  }

#if defined(__AVX512F__)
  uint64_t offer_vectors(const int32_t* nodes, int64_t count) {
    __m512i largest = _mm512_setzero_si512();
    for (int64_t t = 0; t < count; t += 16) {
      const __mmask16 used = count - t >= 16 ? 0xffff : (1u << (count - t)) - 1;
      const __m512i node = _mm512_maskz_loadu_epi32(used, nodes + t);
      largest = _mm512_max_epu32(largest, node);
      offer_vector(node, used);
    }
    return _mm512_reduce_max_epu32(largest);
  }

  uint64_t offer_vectors(const int64_t* nodes, int64_t count) {
    __m512i largest = _mm512_setzero_si512();
    for (int64_t t = 0; t < count; t += 16) {
      const __mmask16 used = count - t >= 16 ? 0xffff : (1u << (count - t)) - 1;
      const __m512i low = _mm512_maskz_loadu_epi64(static_cast<__mmask8>(used), nodes + t);
      const __m512i high =
          _mm512_maskz_loadu_epi64(static_cast<__mmask8>(used >> 8), nodes + t + 8);
      largest = _mm512_max_epu64(largest, _mm512_max_epu64(low, high));
      offer_vector(_mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi64_epi32(low)),
                                      _mm512_cvtepi64_epi32(high), 1),
                   used);
    }
    return _mm512_reduce_max_epu64(largest);
  }

  void offer_vector(__m512i node, __mmask16 used) {
    const auto priority = (__m512i)priority_of((Vector<uint32_t, 16>)node, keys_);
    const __mmask16 kept =
        _mm512_mask_cmple_epu32_mask(used, priority, _mm512_set1_epi32(static_cast<int>(bound_)));
    if (!kept) return;
    _mm512_storeu_si512(values_.get() + size_, _mm512_maskz_compress_epi32(kept, priority));
    size_ += __builtin_popcount(kept);
    make_room();
  }
#endif

  // Leaves the distinct values that are wanted, in ascending order.
  __attribute__((noinline)) void cut() {
    sort();
    uint32_t* const begin = values_.get();
    uint32_t* end = std::unique(begin, begin + size_);
    if (excludes_) {
      uint32_t* const found = std::lower_bound(begin, end, excluded_);
      if (found < end && *found == excluded_) end = std::copy(found + 1, end, found);
    }
    size_ = end - begin;
    if (size_ < wanted_) return;
    size_ = wanted_;
    bound_ = std::max<uint32_t>(begin[wanted_ - 1], 1) - 1;
  }

  // Priorities are even between 0 and the bound, so that buckets of equal widths are as good as
  // sorted.
  void sort() {
    if (size_ > kFew) {
      int bits = 1;
      while (bits < kMostBits && (kOfBucket << bits) < size_) ++bits;
      // The last of the wanted is above the bound by one, which may be a bucket of its own.
      starts_.assign((size_t{1} << bits) + 2, 0);
      const uint64_t scale = (uint64_t{1} << (bits + 32)) / (uint64_t{bound_} + 1);
      for (int64_t i = 0; i < size_; ++i) ++starts_[(values_[i] * scale >> 32) + 1];
      for (size_t b = 1; b < starts_.size(); ++b) starts_[b] += starts_[b - 1];
      for (int64_t i = 0; i < size_; ++i) {
        sorted_[starts_[values_[i] * scale >> 32]++] = values_[i];
      }
      std::swap(values_, sorted_);
    }
    for (int64_t i = 1; i < size_; ++i) {
      const uint32_t value = values_[i];
      int64_t at = i;
      for (; at > 0 && values_[at - 1] > value; --at) values_[at] = values_[at - 1];
      values_[at] = value;
    }
  }

  int64_t wanted_, capacity_;
  Scratch<uint32_t> values_, sorted_;
  std::vector<uint32_t> starts_;  // of buckets
  OrderKeys keys_{};
  int64_t size_ = 0;
  uint32_t bound_ = kAll;
  bool excludes_ = false;
  uint32_t excluded_ = 0;
};

}  // namespace fastgraph
