// What tokens of nodes are copied from, and to.
#pragma once

#include <cstdint>

#include "cpu/kernels.h"

namespace fastgraph {

// Rows of bytes; those of a file that is mapped into memory, for example.
struct TokenTable {
  const char* rows;
  int64_t num_rows;
  int64_t row_bytes;
  // In a file of which little is in memory, so that all rows are asked for first.
  bool is_elsewhere;
};

// Copies of some rows of a table, in ascending order.
struct TokenCache {
  const uint64_t* bits;   // one for each row of the table, or null for none
  const int32_t* before;  // how many rows are held before those of a word of bits
  const char* rows;
  int64_t num_rows;

  bool holds(int64_t row) const { return bits != nullptr && (bits[row / 64] >> (row % 64) & 1); }
  int64_t place(int64_t row) const {
    const uint64_t lower = bits[row / 64] & ((uint64_t{1} << (row % 64)) - 1);
    return int64_t{before[row / 64]} + __builtin_popcountll(lower);
  }
};

// Writes the rows of some nodes one after the other, those that the cache holds from there. Returns
// how many these are, or -1 if a node has no row: in the cache, which says that it has, if
// bad.in_row.
int64_t gather_tokens(const TokenTable& table, const TokenCache& cache, const int32_t* nodes,
                      int64_t count, char* out, BadIndex& bad);

}  // namespace fastgraph
