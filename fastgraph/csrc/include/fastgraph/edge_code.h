// Edge programs as kernels take them: values in slots, instructions on them, and reductions.
// fastgraph/edge_programs/lowering.py writes them.
#pragma once

#include <algorithm>
#include <cstdint>

namespace fastgraph {

// What a slot holds: an operand, of which row, gathered node, edge or program have one; a number;
// or what is computed once, for each row, or for each edge.
enum class EdgeSlotKind : int32_t {
  kRow,
  kGathered,
  kEdge,
  kParameter,
  kConstant,
  kOfProgram,
  kOfRow,
  kOfEdge,
};

struct EdgeSlot {
  EdgeSlotKind kind;
  int32_t width;

  bool is_operand() const { return kind <= EdgeSlotKind::kParameter; }

  // 0 for values that never change, 1 for those that do with the row, 2 with the edge.
  int often() const {
    switch (kind) {
      case EdgeSlotKind::kParameter:
      case EdgeSlotKind::kConstant:
      case EdgeSlotKind::kOfProgram: return 0;
      case EdgeSlotKind::kRow:
      case EdgeSlotKind::kOfRow: return 1;
      default: return 2;
    }
  }
};

enum class EdgeOperation : int32_t {
  kAdd,
  kSub,
  kMul,
  kDiv,
  kMaximum,
  kMinimum,
  kPow,
  kAtan2,
  kEq,
  kNe,
  kLt,
  kLe,
  kWhere,
  kClamp,
  kNeg,
  kAbs,
  kSign,
  kSqrt,
  kExp,
  kExpm1,
  kLog,
  kLog1p,
  kSin,
  kCos,
  kErf,
  kSigmoid,
  kTanh,
  kSoftplus,
  kRelu,
  kLeakyRelu,
  kElu,
  kRound,
  kSpread,    // each value for the channels of its head
  kTile,      // all values for each head
  kFold,      // the sum of each head's channels
  kSumTiles,  // the sum of all heads, channel by channel
  kDot,       // the sum of each head's products
  kGate,      // the second, or 0 where the first is not above it: the gradient of relu
  kSlope,     // 1, or the second where the first is not above 0: the slope of leaky relu
  kProduct,   // of a row of numbers with a matrix that has a row for each of them
  kFoldMax,   // the largest of each head's channels
  kFirst,     // 1 for the first channel of each head that is not 0, and 0 for all others
  kSlice,     // some channels of each head
  kPad,       // the channels of each head among zeros
};
constexpr int32_t kNumEdgeOperations = static_cast<int32_t>(EdgeOperation::kPad) + 1;

struct EdgeInstruction {
  EdgeOperation operation;
  int32_t out;
  int32_t argument[3];

  // Of those that look at the places of channels in their heads: how many of these there are, and
  // which channel is the first one of a slice.
  bool has_places() const { return operation >= EdgeOperation::kFirst; }
  int32_t heads() const { return argument[1]; }
  int32_t start() const { return argument[2]; }

  // How many arguments it takes. An element-wise function of one takes the sum of two where there
  // is a second.
  int arity() const {
    using Op = EdgeOperation;
    if (operation == Op::kWhere || operation == Op::kClamp) return 3;
    if (operation >= Op::kNeg && operation <= Op::kRelu) return argument[1] < 0 ? 1 : 2;
    const bool is_sum = operation == Op::kFold || operation == Op::kSumTiles;
    const bool is_unary = operation == Op::kRound || widens() || is_sum || operation > Op::kProduct;
    return is_unary ? 1 : 2;
  }

  // Whether the result is wider than the argument, or narrower; else both are as wide.
  bool widens() const {
    return operation == EdgeOperation::kSpread || operation == EdgeOperation::kTile;
  }
  bool narrows() const {
    return operation == EdgeOperation::kFold || operation == EdgeOperation::kSumTiles ||
           operation == EdgeOperation::kDot || operation == EdgeOperation::kFoldMax;
  }
};

enum class EdgeReductionKind : int32_t { kSum, kMean, kMax, kMin, kEdge, kTotal, kSoftmax, kOuter };
constexpr int32_t kNumEdgeReductions = static_cast<int32_t>(EdgeReductionKind::kOuter) + 1;

// Of value * factor over edges, times row_factor; -1 stands for nothing. A factor may be narrower.
// A softmax weighs values by the exponentials of scores, which are the factor, as narrow; in place
// of the row factor it has the slot where exponentials go. Outer products are those of the value
// and the factor, summed over all edges. Of sums that follow each other with one output, which CPUs
// know, each goes on with what the one before has.
struct EdgeReduction {
  EdgeReductionKind kind;
  int32_t value;
  int32_t factor;
  int32_t row_factor;
  int32_t out;     // number of the result
  int32_t record;  // of an extremum: that of the number of shares, int32; of a softmax: of maxima
  int32_t scale;   // of a softmax: that of 1 over the sums of exponentials

  bool is_outer() const { return kind == EdgeReductionKind::kOuter; }
  bool is_sum_of_rows() const {
    return kind == EdgeReductionKind::kSum || kind == EdgeReductionKind::kMean;
  }
  bool is_softmax() const { return kind == EdgeReductionKind::kSoftmax; }
  bool is_extremum() const {
    return kind == EdgeReductionKind::kMax || kind == EdgeReductionKind::kMin;
  }
};

// Views of all of it. Arguments stand before what takes them, and operands first.
struct EdgeCode {
  const EdgeSlot* slots;
  const double* constants;  // of slots
  int64_t num_slots;
  const EdgeInstruction* instructions;
  int64_t num_instructions;
  const EdgeReduction* reductions;
  int64_t num_reductions;
  // A kernel that was generated for this program alone, and blocks of it that share the columns of
  // a row; null where there is none.
  const void* kernel = nullptr;
  unsigned chunks = 1;

  // Whether the reduction that follows goes on with the sums of one: both have the same output.
  bool goes_on(int64_t r) const {
    return r >= 0 && r + 1 < num_reductions && reductions[r].is_sum_of_rows() &&
           reductions[r].out == reductions[r + 1].out;
  }

  // Whether it multiplies values of edges by matrices, or sums their outer products.
  bool multiplies() const {
    return std::any_of(instructions, instructions + num_instructions,
                       [](const auto& i) { return i.operation == EdgeOperation::kProduct; }) ||
           has_outer();
  }
  bool has_outer() const {
    return std::any_of(reductions, reductions + num_reductions,
                       [](const auto& r) { return r.is_outer(); });
  }
};

}  // namespace fastgraph
