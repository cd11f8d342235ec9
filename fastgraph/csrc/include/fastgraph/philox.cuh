// The random bits of philox.h, one number at a time.
#pragma once

#include <cstdint>

#include "fastgraph/platform.cuh"

namespace fastgraph {

// Word head % 4 of the block of Philox4x32-10 for the counter (edge, head / 4, 0, 0).
inline __device__ uint32_t philox(uint64_t key, uint32_t edge, uint32_t head) {
  constexpr uint32_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
  uint32_t key0 = static_cast<uint32_t>(key), key1 = static_cast<uint32_t>(key >> 32);
  uint32_t c0 = edge, c1 = head / 4, c2 = 0, c3 = 0;
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint32_t high0 = __umulhi(kMultiplier0, c0), low0 = kMultiplier0 * c0;
    const uint32_t high1 = __umulhi(kMultiplier1, c2), low1 = kMultiplier1 * c2;
    c0 = high1 ^ c1 ^ key0;
    c2 = high0 ^ c3 ^ key1;
    c1 = low1;
    c3 = low0;
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  const uint32_t even = head & 2 ? c2 : c0, odd = head & 2 ? c3 : c1;
  return head & 1 ? odd : even;
}

}  // namespace fastgraph
