// How many edges an edge program computes together, and where their values are.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cpu/edge_rows.h"
#include "fastgraph/edge_code.h"

namespace fastgraph {

// The least edges that registers hold, and how many bytes of them there should be: they and what is
// gathered for the next ones fit into a core's first cache.
constexpr int64_t kLeastEdges = 4;
constexpr int64_t kRegisterBytes = 1 << 14;

// The same where edges are multiplied by matrices, of which each row serves all edges of a block:
// into its second cache.
constexpr int64_t kMultipliedBytes = 1 << 16;

// Of wide values a block has few edges, unless what is computed and gathered for more of them takes
// no more bytes than these: as much is gathered for the next block meanwhile.
constexpr int64_t kFewWideEdges = 16;
constexpr int64_t kWideBytes = 20 << 10;

// Values of fewer channels stand next to each other for all edges of a block, so that instructions
// go over them in whole vectors.
constexpr int64_t kNarrow = 32;

// Whether operands of so many channels are read where they are: others are copied, as they are
// narrow or of another type.
constexpr bool is_in_place(int64_t width, bool is_half) { return width >= kNarrow && !is_half; }

// Where the values of slots are, in elements of a task's memory.
struct EdgeLayout {
  int64_t block;  // edges at once
  int64_t ahead;  // operands are asked for so many edges before; narrow ones take less time
  std::vector<int64_t> begin;
  int64_t size = 0;

  EdgeLayout(const EdgeCode& code, int64_t item_bytes, bool is_half) {
    int64_t bytes = 1;  // of all that is computed or kept for one edge
    int64_t gathered = 0;
    bool is_narrow = true;
    for (int64_t s = 0; s < code.num_slots; ++s) {
      const EdgeSlot slot = code.slots[s];
      if (slot.kind == EdgeSlotKind::kOfEdge) bytes += slot.width * item_bytes;
      if (slot.kind == EdgeSlotKind::kGathered) gathered += slot.width * item_bytes;
      is_narrow = is_narrow && slot.width < kNarrow;
    }
    const int64_t most = code.multiplies() ? kMultipliedBytes : kRegisterBytes;
    const bool fits = kMostWideEdges * (bytes + gathered) <= kWideBytes;
    const int64_t of_wide = fits ? kMostWideEdges : kFewWideEdges;
    block = std::clamp(most / bytes, kLeastEdges, is_narrow ? kMostEdges : of_wide);
    ahead = is_narrow ? 2 * block : block;
    for (int64_t s = 0; s < code.num_slots; ++s) {
      const EdgeSlot slot = code.slots[s];
      begin.push_back(size);
      if (slot.is_operand() && is_in_place(slot.width, is_half)) continue;
      size += round_up((has_edges(slot) ? block : 1) * slot.width);
    }
    size = round_up(size + 1);  // vectors may begin with the last value
  }

  // Whether a slot has room for all edges of a block: for their values, or for those of as many
  // rows.
  static bool has_edges(const EdgeSlot& slot) { return slot.often() > 0 || slot.width < kNarrow; }

  // So that the last vector of a register is its own.
  static int64_t round_up(int64_t size) { return (size + 15) / 16 * 16; }
};

}  // namespace fastgraph
