// What is added to the scores of attention: a number for each entry, a pair of nodes or an edge,
// and head, or one for each type of entries and head. On the CPU and in CUDA alike.
#pragma once

#include <cstdint>

#include "fastgraph/views.h"

namespace fastgraph {

// The types of entries, in the dtype that they came in.
struct EntryTypes {
  const void* data;
  int bytes;  // 1: without a sign; 2, 4 or 8: with one; 0: there are none

  FASTGRAPH_BOTH bool given() const { return bytes > 0; }

  FASTGRAPH_BOTH int64_t at(int64_t entry) const {
    switch (bytes) {
      case 1: return static_cast<const uint8_t*>(data)[entry];
      case 2: return static_cast<const int16_t*>(data)[entry];
      case 4: return static_cast<const int32_t*>(data)[entry];
      default: return static_cast<const int64_t*>(data)[entry];
    }
  }

  // body(types), a pointer to those of all entries.
  template <typename Body>
  void visit(const Body& body) const {
    switch (bytes) {
      case 1: return body(static_cast<const uint8_t*>(data));
      case 2: return body(static_cast<const int16_t*>(data));
      case 4: return body(static_cast<const int32_t*>(data));
      default: return body(static_cast<const int64_t*>(data));
    }
  }
};

template <typename T>
struct ScoreBias {
  Matrix<const T> values;  // [entries or types, heads], or no data
  EntryTypes types;

  FASTGRAPH_BOTH bool given() const { return values.data != nullptr; }
};

// A number of each edge and head, and one of its type, each of which may be left out.
template <typename T>
struct EdgeBiases {
  ScoreBias<T> of_edges;
  ScoreBias<T> of_types;
};

// Their gradients, [edges, heads] and [types, heads], or no data.
template <typename T>
struct EdgeBiasGradients {
  Matrix<T> of_edges;
  Matrix<T> of_types;
};

}  // namespace fastgraph
