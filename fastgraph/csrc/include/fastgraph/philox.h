// Counter-based random bits: Philox4x32-10 (Salmon et al., Parallel random numbers: as easy as
// 1, 2, 3, SC 2011). A function of its arguments alone, so forward and backward passes make the
// same bits in any order and on any number of threads.
#pragma once

#include <cstdint>

#include "fastgraph/simd.h"

namespace fastgraph {

// The blocks for N counters (c[0], c[1], c[2], 0): the words stand in the lower halves of lanes.
template <int N>
inline void philox_blocks(uint64_t key, Vector<uint64_t, N> c[4]) {
  uint32_t key0 = static_cast<uint32_t>(key), key1 = static_cast<uint32_t>(key >> 32);
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
    // The upper halves hold what is left of products, at which none of these operations looks.
    const auto product0 = times<N>(c[0], splat<uint64_t, N>(0xD2511F53));
    const auto product1 = times<N>(c[2], splat<uint64_t, N>(0xCD9E8D57));
    c[0] = (product1 >> 32) ^ c[1] ^ static_cast<uint64_t>(key0);
    c[2] = (product0 >> 32) ^ c[3] ^ static_cast<uint64_t>(key1);
    c[1] = product1;
    c[3] = product0;
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
}

}  // namespace fastgraph
