// Counter-based random bits: Philox4x32-10 (Salmon et al., Parallel random numbers: as easy as
// 1, 2, 3, SC 2011). A function of its arguments alone, so forward and backward passes make the
// same bits in any order and on any number of threads.
#pragma once

#include <cstdint>

#include "fastgraph/simd.h"

namespace fastgraph {

// The first of the four words for the counters (counter[lane], second[lane], 0, 0).
template <int N>
inline Vector<uint32_t, N> philox(uint64_t key, Vector<uint32_t, N> counter,
                                  Vector<uint32_t, N> second) {
  using U = Vector<uint32_t, N>;
  using W = Vector<uint64_t, N>;
  constexpr uint64_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
  uint32_t key0 = static_cast<uint32_t>(key), key1 = static_cast<uint32_t>(key >> 32);
  U c0 = counter, c1 = second, c2{}, c3{};
  for (int round = 0; round < 10; ++round) {
    const W product0 = __builtin_convertvector(c0, W) * kMultiplier0;
    const W product1 = __builtin_convertvector(c2, W) * kMultiplier1;
    c0 = __builtin_convertvector(product1 >> 32, U) ^ c1 ^ key0;
    c2 = __builtin_convertvector(product0 >> 32, U) ^ c3 ^ key1;
    c1 = __builtin_convertvector(product1, U);
    c3 = __builtin_convertvector(product0, U);
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  return c0;
}

}  // namespace fastgraph
