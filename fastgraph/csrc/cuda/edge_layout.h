// Where the values of an edge program stand in the memory of a warp, and its instructions with
// these places; what warps there are.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "fastgraph/edge_products.cuh"
#include "fastgraph/edge_run.h"
#include "fastgraph/lanes.cuh"

namespace fastgraph::cuda {

struct EdgeGrid {
  unsigned blocks;
  unsigned warps;  // in each
};

template <typename T>
class EdgeLayout {
 public:
  using A = Accumulator<T>;

  EdgeLayout(const EdgeCode& code, const T* const* operands, void* const* outputs)
      : code_(code), shared_bytes_(code.multiplies() ? kMultipliedBytes : kSharedBytes) {
    find_matrices();
    int widest = 1;
    for (int64_t s = 0; s < code.num_slots; ++s) {
      if (!is_matrix(s)) widest = std::max(widest, slot(s).width);
    }
    block = std::clamp(kPacksAtOnce >> shift_of(packs(widest), kPacksAtOnce), 1, kWarp);
    if (code.multiplies()) block = std::max(2 * block, kTileEdges);
    block = std::min(block, kWarp);
    const int preferred = block;
    int64_t size = place();
    const auto halve = [&](int least, int64_t most) {
      while (block > least && bytes(size) > most) {
        block /= 2;
        size = place();
      }
    };
    // With a part of a tile of edges, more warps would do no more.
    halve(code.multiplies() ? kTileEdges : 1, shared_bytes_ / kPreferredWarps);
    halve(1, shared_bytes_);
    add_loads(operands);
    add_steps(operands);
    is_large = bytes(size) > shared_bytes_ || loads.size() > kFewLoads ||
               steps.size() > kFewSteps || code.num_reductions > kFewResults;
    if (is_large) {
      block = preferred;
      size = place();
      loads.clear();
      steps.clear();
      add_loads(operands);
      add_steps(operands);
    }
    has_room = size <= std::numeric_limits<int32_t>::max();
    memory_size_ = size;
    if (has_room) add_results(outputs);
  }

  // All but the graph and its memory.
  void describe(EdgeRun<T>& run) const {
    run.block = block;
    run.memory_size = static_cast<int32_t>(memory_size_);
    run.partial_size = partial_size_;
    std::copy(loads_end_, loads_end_ + 4, run.loads_end);
    std::copy(steps_end_, steps_end_ + 3, run.steps_end);
    run.num_results = static_cast<int32_t>(results.size());
    run.takes_edges = loads_end_[3] > loads_end_[2];
    run.has_outer = code_.has_outer();
    for (const auto& result : results) {
      run.takes_edges = run.takes_edges || result.kind == EdgeReductionKind::kEdge;
    }
  }

  // Warps for so many tasks, which take one after the other.
  EdgeGrid grid(int64_t tasks, bool is_generated) const {
    const int64_t own = bytes(memory_size_);
    int64_t warps = 1, most = std::clamp<int64_t>(kMostBytes / own, 1, kMostLarge);
    if (!is_large || is_generated) {
      warps = kBlockThreads / kWarp;
      while (!is_generated && warps * own > shared_bytes_) warps /= 2;
      most = kMostBlocks;
      for (const auto& result : results) {
        if (result.kind == EdgeReductionKind::kTotal) most = std::min(most, kMostWithTotals);
      }
    }
    int64_t outer = 1;
    for (const auto& result : results) {
      if (result.is_outer()) outer += bytes(int64_t{result.width} * result.heads);
    }
    if (outer > 1) most = std::clamp<int64_t>(kMostBytes / outer, 1, std::min(most, kMostLarge));
    return {static_cast<unsigned>(std::min(ceil_div(tasks, warps), most)),
            static_cast<unsigned>(warps)};
  }

  int block;  // edges at once
  bool is_large, has_room;
  std::vector<EdgeLoad<T>> loads;
  std::vector<EdgeStep> steps;
  std::vector<EdgeResult<T>> results;

 private:
  // Packs of the widest value that a warp works on at once: four for each lane.
  static constexpr int kPacksAtOnce = 4 * kWarp;
  // Of shared memory: what a block may have, more where edges are multiplied by matrices, which
  // every GPU from compute capability 8.0 on has; and so many warps of each should have room.
  static constexpr int64_t kSharedBytes = 48 << 10, kMultipliedBytes = 96 << 10;
  static constexpr int kPreferredWarps = 4;
  // Of the GPU's memory, for all warps of a large program; and as many of them as wait for it.
  static constexpr int64_t kMostBytes = 64 << 20, kMostLarge = 1024;
  // Blocks that begin one after another, as the GPU has room for them; each warp of them has sums.
  static constexpr int64_t kMostBlocks = 1 << 14, kMostWithTotals = 1 << 11;

  const EdgeSlot& slot(int64_t s) const { return code_.slots[s]; }
  static int packs(int64_t width) { return static_cast<int>(ceil_div(width, kPack<A>)); }
  static int64_t stride(int64_t width) { return packs(width) * int64_t{kPack<A>}; }
  static int64_t bytes(int64_t size) { return size * static_cast<int64_t>(sizeof(A)); }

  // 2^shift is the least power of two, at most `most`, that is as large as `count`.
  static int shift_of(int count, int most) {
    int shift = 0;
    while (1 << shift < std::min(count, most)) ++shift;
    return shift;
  }
  static int shift(int width) { return shift_of(packs(width), kWarp); }

  // Lanes that have packs of different edges each add up their own.
  int64_t copies(int width) const { return std::min(kWarp >> shift(width), block); }

  // Matrices that are taken by products alone are read where they are.
  void find_matrices() {
    is_taken_.assign(code_.num_slots, false);
    const auto take = [&](int32_t s) {
      if (s >= 0) is_taken_[s] = true;
    };
    for (int64_t i = 0; i < code_.num_instructions; ++i) {
      const EdgeInstruction& instruction = code_.instructions[i];
      const bool is_product = instruction.operation == EdgeOperation::kProduct;
      const int count = is_product ? 1 : instruction.arity();
      for (int k = 0; k < count; ++k) take(instruction.argument[k]);
    }
    for (int64_t r = 0; r < code_.num_reductions; ++r) {
      const EdgeReduction& reduction = code_.reductions[r];
      for (const int32_t s : {reduction.value, reduction.factor, reduction.row_factor}) take(s);
    }
  }
  bool is_matrix(int64_t s) const {
    return slot(s).kind == EdgeSlotKind::kParameter && !is_taken_[s];
  }

  // The elements that values and the state of reductions take.
  int64_t place() {
    int64_t size = 0;
    at_.clear();
    states_.clear();
    for (int64_t s = 0; s < code_.num_slots; ++s) {
      at_.push_back(size);
      if (is_matrix(s)) continue;
      size += (slot(s).often() == 2 ? block : 1) * stride(slot(s).width);
    }
    for (int64_t r = 0; r < code_.num_reductions; ++r) {
      const EdgeReduction& reduction = code_.reductions[r];
      const int width = slot(reduction.value).width;
      states_.push_back(size);
      if (reduction.kind == EdgeReductionKind::kEdge || reduction.is_outer()) continue;
      size += (reduction.is_extremum() ? 2 : 1) * copies(width) * stride(width);
      if (reduction.kind == EdgeReductionKind::kTotal) size += stride(width);
      if (reduction.is_softmax()) size += 3 * stride(slot(reduction.factor).width);
    }
    return size;
  }

  int32_t at(int32_t s) const { return s < 0 ? -1 : static_cast<int32_t>(at_[s]); }

  template <typename U>
  static bool is_packed(int width, const U* rows) {
    return width % kPack<A> == 0 && reinterpret_cast<uintptr_t>(rows) % (kPack<A> * sizeof(U)) == 0;
  }

  void add_loads(const T* const* operands) {
    using Kind = EdgeSlotKind;
    const auto add = [&](Kind kind) {
      for (int32_t s = 0; s < code_.num_slots; ++s) {
        if (slot(s).kind != kind || is_matrix(s)) continue;
        const int width = slot(s).width;
        const T* const rows = kind == Kind::kConstant ? nullptr : operands[s];
        loads.push_back(
            {rows, code_.constants[s], at(s), width, shift(width), is_packed(width, rows)});
      }
      return static_cast<int32_t>(loads.size());
    };
    add(Kind::kParameter);
    loads_end_[0] = add(Kind::kConstant);
    loads_end_[1] = add(Kind::kRow);
    loads_end_[2] = add(Kind::kGathered);
    loads_end_[3] = add(Kind::kEdge);
  }

  void add_steps(const T* const* operands) {
    for (int often = 0; often < 3; ++often) {
      for (int64_t i = 0; i < code_.num_instructions; ++i) {
        const EdgeInstruction& instruction = code_.instructions[i];
        if (slot(instruction.out).often() == often) add_step(instruction, operands);
      }
      steps_end_[often] = static_cast<int32_t>(steps.size());
    }
  }

  void add_step(const EdgeInstruction& instruction, const T* const* operands) {
    EdgeStep step{};
    step.out = at(instruction.out);
    step.width = slot(instruction.out).width;
    step.in_width = slot(instruction.argument[0]).width;
    step.operation = static_cast<uint8_t>(instruction.operation);
    step.arity = static_cast<uint8_t>(instruction.arity());
    step.shift = static_cast<uint8_t>(shift(step.width));
    for (int k = 0; k < instruction.arity(); ++k) {
      step.argument[k] = at(instruction.argument[k]);
      const bool moves = slot(instruction.argument[k]).often() == 2;
      step.moves = static_cast<uint8_t>(step.moves | (moves ? 1 << k : 0));
    }
    if (instruction.operation == EdgeOperation::kProduct) {
      const T* const matrix = operands[instruction.argument[1]];
      step.argument[1] = static_cast<int32_t>(loads.size());
      loads.push_back({matrix, 0, -1, step.width, step.shift, is_packed(step.width, matrix)});
    }
    if (instruction.has_places()) {
      step.argument[1] = instruction.heads();
      step.argument[2] = instruction.start();
    }
    steps.push_back(step);
  }

  void add_results(void* const* outputs) {
    const auto output = [&](int32_t number) { return number < 0 ? nullptr : outputs[number]; };
    for (int64_t r = 0; r < code_.num_reductions; ++r) {
      const EdgeReduction& reduction = code_.reductions[r];
      EdgeResult<T> result{};
      result.kind = reduction.kind;
      result.width = slot(reduction.value).width;
      result.heads = reduction.factor < 0 ? 0 : slot(reduction.factor).width;
      result.shift = shift(result.width);
      result.value = at(reduction.value);
      result.factor = at(reduction.factor);
      result.row_factor = at(reduction.row_factor);
      result.state = static_cast<int32_t>(states_[r]);
      result.state_copies = static_cast<int32_t>(copies(result.width));
      result.totals = static_cast<int32_t>(states_[r] + result.state_copies * stride(result.width));
      result.value_moves = slot(reduction.value).often() == 2;
      result.factor_moves = reduction.factor >= 0 && slot(reduction.factor).often() == 2;
      result.out = static_cast<T*>(output(reduction.out));
      result.record = output(reduction.record);
      result.scale = static_cast<T*>(output(reduction.scale));
      result.packed = is_packed(result.width, result.out);
      if (result.is_merged()) {
        result.partial = partial_size_;
        partial_size_ +=
            static_cast<int32_t>((result.is_extremum() ? 2 : 1) * stride(result.width));
        if (reduction.is_softmax()) {
          partial_size_ += static_cast<int32_t>(2 * stride(result.heads));
        }
      }
      results.push_back(result);
    }
  }

  const EdgeCode& code_;
  const int64_t shared_bytes_;
  std::vector<bool> is_taken_;        // of each slot: by more than products, as their matrix
  std::vector<int64_t> at_, states_;  // of each slot, and of each reduction
  int64_t memory_size_ = 0;
  int32_t partial_size_ = 0;
  int32_t loads_end_[4], steps_end_[3];
};

}  // namespace fastgraph::cuda
