// What is added to the scores of attention: a number for each entry, a pair of nodes or an edge,
// and head, or one for each type of entries and head.
#pragma once

#include <cstdint>

#include "fastgraph/views.h"

namespace fastgraph {

// The types of entries, in the dtype that they came in.
struct EntryTypes {
  const void* data;
  int bytes;  // 1: without a sign; 2, 4 or 8: with one; 0: there are none

  bool given() const { return bytes > 0; }

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

  bool given() const { return values.data != nullptr; }
};

}  // namespace fastgraph
