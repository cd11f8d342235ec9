// Where the values of an edge program stand in the memory of a warp, and its instructions with
// these places; what warps there are.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

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

  EdgeLayout(const EdgeCode& code, const T* const* operands, void* const* outputs) : code_(code) {
    int widest = 1;
    for (int64_t s = 0; s < code.num_slots; ++s) widest = std::max(widest, slot(s).width);
    block = std::clamp(kPacksAtOnce >> shift_of(packs(widest), kPacksAtOnce), 1, kWarp);
    const int preferred = block;
    int64_t size = place();
    while (block > 1 && bytes(size) > kPreferredBytes) {
      block /= 2;
      size = place();
    }
    add_loads(operands);
    add_steps();
    is_large = bytes(size) > kSharedBytes || loads.size() > kFewLoads || steps.size() > kFewSteps ||
               code.num_reductions > kFewResults;
    if (is_large) {
      block = preferred;
      size = place();
      loads.clear();
      steps.clear();
      add_loads(operands);
      add_steps();
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
      while (!is_generated && warps * own > kSharedBytes) warps /= 2;
      most = kMostBlocks;
      for (const auto& result : results) {
        if (result.kind == EdgeReductionKind::kTotal) most = kMostWithTotals;
      }
    }
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
  // Of shared memory: what a block may have, and for a warp what lets several blocks of four run.
  static constexpr int64_t kSharedBytes = 48 << 10;
  static constexpr int64_t kPreferredBytes = 12 << 10;
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

  // The elements that values and the state of reductions take.
  int64_t place() {
    int64_t size = 0;
    at_.clear();
    states_.clear();
    for (int64_t s = 0; s < code_.num_slots; ++s) {
      at_.push_back(size);
      size += (slot(s).often() == 2 ? block : 1) * stride(slot(s).width);
    }
    for (int64_t r = 0; r < code_.num_reductions; ++r) {
      const EdgeReduction& reduction = code_.reductions[r];
      const int width = slot(reduction.value).width;
      states_.push_back(size);
      if (reduction.kind == EdgeReductionKind::kEdge) continue;
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
        if (slot(s).kind != kind) continue;
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

  void add_steps() {
    for (int often = 0; often < 3; ++often) {
      for (int64_t i = 0; i < code_.num_instructions; ++i) {
        const EdgeInstruction& instruction = code_.instructions[i];
        if (slot(instruction.out).often() == often) add_step(instruction);
      }
      steps_end_[often] = static_cast<int32_t>(steps.size());
    }
  }

  void add_step(const EdgeInstruction& instruction) {
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
  std::vector<int64_t> at_, states_;  // of each slot, and of each reduction
  int64_t memory_size_ = 0;
  int32_t partial_size_ = 0;
  int32_t loads_end_[4], steps_end_[3];
};

}  // namespace fastgraph::cuda
