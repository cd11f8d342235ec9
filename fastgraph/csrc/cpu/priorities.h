// A random order of all 32-bit numbers for each pair of keys, by a bijection: no two nodes have one
// priority, and a priority says whose it is. Rounds of multiplications and shifts are those of
// triple32 (Wellons, Prospecting for hash functions, 2018), with a key before the first and the
// second.
#pragma once

#include <cstdint>

#include "cpu/draws.h"

namespace fastgraph {

struct OrderKeys {
  uint32_t first, second;
};

// Streams of random numbers of a node.
constexpr uint32_t kOrderStream = 0, kThinningStream = 1, kDrawStream = 2;

// The keys of an item; number 0 or 1.
inline OrderKeys order_keys(uint64_t random_seed, int64_t item, uint32_t stream, int number = 0) {
  Draws draws(random_seed, static_cast<uint32_t>(item), stream);
  OrderKeys keys{draws.next(), draws.next()};
  if (number) keys = {draws.next(), draws.next()};
  return keys;
}

constexpr uint32_t kMultiplier1 = 0xed5ad4bb, kMultiplier2 = 0xac4c1b51, kMultiplier3 = 0x31848bab;

// Of an odd number, modulo 2^32 (Newton's iteration: each step doubles the bits that are right).
constexpr uint32_t inverse_of(uint32_t odd) {
  uint32_t inverse = odd;
  for (int step = 0; step < 4; ++step) inverse *= 2 - odd * inverse;
  return inverse;
}

// V is uint32_t or a vector of it.
template <typename V>
inline V priority_of(V node, OrderKeys keys) {
  V x = node ^ keys.first;
  x ^= x >> 17;
  x *= kMultiplier1;
  x ^= x >> 11;
  x ^= keys.second;
  x *= kMultiplier2;
  x ^= x >> 15;
  x *= kMultiplier3;
  return x ^ (x >> 14);
}

template <typename V>
inline V node_of(V priority, OrderKeys keys) {
  V x = priority ^ (priority >> 14) ^ (priority >> 28);
  x *= inverse_of(kMultiplier3);
  x ^= (x >> 15) ^ (x >> 30);
  x *= inverse_of(kMultiplier2);
  x ^= keys.second;
  x ^= (x >> 11) ^ (x >> 22);
  x *= inverse_of(kMultiplier1);
  x ^= x >> 17;
  return x ^ keys.first;
}

}  // namespace fastgraph
