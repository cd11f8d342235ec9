// The function that runs an edge program: checks its code, which is on the host, as it does
// tensors.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <string>
#include <vector>

#include "bindings/checks.h"
#include "fastgraph/edge_code.h"

namespace fastgraph {
namespace {

using Tensors = tvm::ffi::Array<tvm::ffi::Tensor>;

[[noreturn]] void refuse(const char* name, int64_t number, const std::string& expected) {
  TVM_FFI_THROW(ValueError) << name << " " << number << " must " << expected;
}

// The widest rows of slots, so that their sizes in bytes are no overflow.
constexpr int32_t kMostChannels = 1 << 24;

void check_slots(const EdgeCode& code) {
  bool were_operands = true;
  for (int64_t s = 0; s < code.num_slots; ++s) {
    const EdgeSlot slot = code.slots[s];
    if (slot.kind < EdgeSlotKind::kRow || slot.kind > EdgeSlotKind::kOfEdge) {
      refuse("slot", s, "have a kind of slots, got " + std::to_string(static_cast<int>(slot.kind)));
    }
    const bool is_wrong_constant = slot.kind == EdgeSlotKind::kConstant && slot.width != 1;
    if (slot.width < 1 || slot.width > kMostChannels || is_wrong_constant) {
      refuse("slot", s, "have a width that fits its kind, got " + std::to_string(slot.width));
    }
    if (slot.is_operand() && !were_operands) refuse("slot", s, "stand before what is computed");
    were_operands = slot.is_operand();
  }
}

void check_slot(const EdgeCode& code, int32_t slot, const char* name, int64_t number) {
  if (slot < 0 || slot >= code.num_slots) {
    refuse(
        name, number,
        "name slots in [0, " + std::to_string(code.num_slots) + "), got " + std::to_string(slot));
  }
}

void check_product(const EdgeCode& code, int64_t number) {
  constexpr const char* kName = "instruction";
  const EdgeInstruction& product = code.instructions[number];
  check_slot(code, product.argument[0], kName, number);
  check_slot(code, product.argument[1], kName, number);
  const EdgeSlot out = code.slots[product.out], value = code.slots[product.argument[0]];
  const EdgeSlot matrix = code.slots[product.argument[1]];
  if (matrix.kind != EdgeSlotKind::kParameter) refuse(kName, number, "take a matrix that is given");
  if (value.often() > out.often()) {
    refuse(kName, number, "not be computed less often than it changes");
  }
  if (int64_t{value.width} * out.width != matrix.width) {
    refuse(kName, number, "have a matrix that fits its value and its result");
  }
  if (product.out == product.argument[0] || product.out == product.argument[1]) {
    refuse(kName, number, "not write its argument");
  }
}

// Of an instruction that looks at the places of channels, whose argument and result are slots.
void check_places(const EdgeCode& code, int64_t number) {
  constexpr const char* kName = "instruction";
  const EdgeInstruction& placed = code.instructions[number];
  const EdgeSlot in = code.slots[placed.argument[0]], out = code.slots[placed.out];
  if (in.often() > out.often()) refuse(kName, number, "not be computed less often than it changes");
  if (placed.out == placed.argument[0]) refuse(kName, number, "not write its argument");
  const int64_t heads = placed.heads(), start = placed.start();
  if (heads < 1 || in.width % heads != 0 || out.width % heads != 0) {
    refuse(kName, number, "have heads of its argument and of its result");
  }
  const int64_t of_in = in.width / heads, of_out = out.width / heads;
  const bool is_slice = placed.operation == EdgeOperation::kSlice;
  const int64_t part = is_slice ? of_out : of_in, whole = is_slice ? of_in : of_out;
  const bool is_first = placed.operation == EdgeOperation::kFirst;
  if (start < 0 || start + part > whole || (is_first && part != whole)) {
    refuse(kName, number, "have channels that its heads have");
  }
}

void check_instructions(const EdgeCode& code) {
  constexpr const char* kName = "instruction";
  for (int64_t i = 0; i < code.num_instructions; ++i) {
    const EdgeInstruction& instruction = code.instructions[i];
    const auto operation = static_cast<int32_t>(instruction.operation);
    if (operation < 0 || operation >= kNumEdgeOperations) {
      refuse(kName, i, "have an operation, got " + std::to_string(operation));
    }
    check_slot(code, instruction.out, kName, i);
    const EdgeSlot out = code.slots[instruction.out];
    if (out.kind < EdgeSlotKind::kOfProgram) refuse(kName, i, "not write an operand or a number");
    if (instruction.operation == EdgeOperation::kProduct) {
      check_product(code, i);
      continue;
    }
    if (instruction.has_places()) {
      check_slot(code, instruction.argument[0], kName, i);
      check_places(code, i);
      continue;
    }
    for (int k = 0; k < instruction.arity(); ++k) {
      const int32_t argument = instruction.argument[k];
      check_slot(code, argument, kName, i);
      const EdgeSlot in = code.slots[argument];
      if (in.often() > out.often()) refuse(kName, i, "not be computed less often than it changes");
      const bool widens = instruction.widens(), narrows = instruction.narrows();
      const bool fits = narrows  ? in.width % out.width == 0
                        : widens ? out.width % in.width == 0
                                 : in.width == out.width;
      const bool is_equal = in.width == code.slots[instruction.argument[0]].width;
      if (!fits || !is_equal) refuse(kName, i, "have arguments of widths that fit its result");
      const bool overwrites = (narrows || widens) && argument == instruction.out;
      if (overwrites) refuse(kName, i, "not write its argument");
    }
  }
}

void check_softmax(const EdgeCode& code, int64_t number, int64_t num_outputs) {
  constexpr const char* kName = "reduction";
  const EdgeReduction& reduction = code.reductions[number];
  check_slot(code, reduction.factor, kName, number);
  check_slot(code, reduction.row_factor, kName, number);
  const EdgeSlot score = code.slots[reduction.factor], own = code.slots[reduction.row_factor];
  if (code.slots[reduction.value].width % score.width != 0) {
    refuse(kName, number, "have scores whose width divides that of its value");
  }
  if (own.kind != EdgeSlotKind::kOfEdge || own.width != score.width ||
      reduction.row_factor == reduction.factor || reduction.row_factor == reduction.value) {
    refuse(kName, number, "have a slot of its own for the exponentials of scores");
  }
  const int32_t results[] = {reduction.out, reduction.record, reduction.scale};
  const bool has_some = std::any_of(results, results + 3, [](int32_t out) { return out >= 0; });
  const bool fit = std::all_of(results, results + 3,
                               [&](int32_t out) { return out >= -1 && out < num_outputs; });
  if (!has_some || !fit) {
    refuse(kName, number, "name outputs in [0, " + std::to_string(num_outputs) + ")");
  }
}

void check_outer(const EdgeCode& code, int64_t number, int64_t num_outputs) {
  constexpr const char* kName = "reduction";
  const EdgeReduction& reduction = code.reductions[number];
  check_slot(code, reduction.factor, kName, number);
  const int64_t width = code.slots[reduction.value].width;
  if (width * code.slots[reduction.factor].width > kMostChannels) {
    refuse(kName, number, "have a result that is not too large");
  }
  if (reduction.row_factor >= 0) refuse(kName, number, "have no factor of rows");
  if (reduction.out < 0 || reduction.out >= num_outputs || reduction.record != -1) {
    refuse(kName, number, "name outputs in [0, " + std::to_string(num_outputs) + ")");
  }
}

#ifdef FASTGRAPH_GENERATED_KERNELS
constexpr bool kSumsByTerms = false;
#else
constexpr bool kSumsByTerms = true;
#endif

// Of a reduction of rows that goes on with the sums of the one before.
void check_term(const EdgeCode& code, int64_t number) {
  const EdgeReduction &term = code.reductions[number], &first = code.reductions[number - 1];
  const bool is_as_wide = code.slots[term.value].width == code.slots[first.value].width;
  const bool is_alike = term.kind == first.kind && term.row_factor == first.row_factor;
  if (!kSumsByTerms || !is_as_wide || !is_alike) {
    refuse("reduction", number, "have an output of its own");
  }
}

void check_reductions(const EdgeCode& code, int64_t num_outputs) {
  constexpr const char* kName = "reduction";
  for (int64_t r = 0; r < code.num_reductions; ++r) {
    const EdgeReduction& reduction = code.reductions[r];
    const auto kind = static_cast<int32_t>(reduction.kind);
    if (kind < 0 || kind >= kNumEdgeReductions) {
      refuse(kName, r, "have a kind, got " + std::to_string(kind));
    }
    check_slot(code, reduction.value, kName, r);
    const int32_t width = code.slots[reduction.value].width;
    if (code.goes_on(r - 1)) check_term(code, r);
    const bool is_sum = !reduction.is_extremum() && reduction.kind != EdgeReductionKind::kEdge;
    if (reduction.is_softmax()) {
      check_softmax(code, r, num_outputs);
      continue;
    }
    if (reduction.is_outer()) {
      check_outer(code, r, num_outputs);
      continue;
    }
    if (!is_sum && (reduction.factor >= 0 || reduction.row_factor >= 0)) {
      refuse(kName, r, "have factors in sums only");
    }
    if (reduction.factor >= 0) {
      check_slot(code, reduction.factor, kName, r);
      if (width % code.slots[reduction.factor].width != 0) {
        refuse(kName, r, "have a factor whose width divides that of its value");
      }
    }
    if (reduction.row_factor >= 0) {
      check_slot(code, reduction.row_factor, kName, r);
      const EdgeSlot slot = code.slots[reduction.row_factor];
      if (slot.often() == 2 || slot.width != width) {
        refuse(kName, r, "have a factor of rows that has the width of its value");
      }
    }
    const bool may_lack_out = reduction.is_extremum() && reduction.record >= 0;
    if (reduction.out < (may_lack_out ? -1 : 0) || reduction.out >= num_outputs ||
        reduction.record < -1 || reduction.record >= (reduction.is_extremum() ? num_outputs : 0)) {
      refuse(kName, r, "name outputs in [0, " + std::to_string(num_outputs) + ")");
    }
  }
}

// A table of the program, which only the host reads.
template <typename T>
const T* checked_table(const Tensor& tensor, std::initializer_list<int64_t> shape,
                       const char* name) {
  if (tensor.device().device_type != kDLCPU) {
    TVM_FFI_THROW(ValueError) << name << " must be on the CPU, got device type "
                              << tensor.device().device_type;
  }
  check_dtype(tensor, kDType<T>, name);
  check_shape(tensor, shape, name);
  if (!tensor.IsContiguous()) refuse_strides(tensor, name);
  return reinterpret_cast<const T*>(static_cast<const char*>(tensor.data_ptr()) +
                                    tensor.byte_offset());
}

EdgeCode checked_code(const Tensor& slots, const Tensor& constants, const Tensor& instructions,
                      const Tensor& reductions, int64_t num_outputs) {
  check_ndim(slots, 2, "slots");
  check_ndim(instructions, 2, "instructions");
  check_ndim(reductions, 2, "reductions");
  const int64_t num_slots = slots.size(0), num_instructions = instructions.size(0);
  const int64_t num_reductions = reductions.size(0);
  const EdgeCode code{
      reinterpret_cast<const EdgeSlot*>(checked_table<int32_t>(slots, {num_slots, 2}, "slots")),
      checked_table<double>(constants, {num_slots}, "constants"),
      num_slots,
      reinterpret_cast<const EdgeInstruction*>(
          checked_table<int32_t>(instructions, {num_instructions, 5}, "instructions")),
      num_instructions,
      reinterpret_cast<const EdgeReduction*>(
          checked_table<int32_t>(reductions, {num_reductions, 7}, "reductions")),
      num_reductions};
  check_slots(code);
  check_instructions(code);
  check_reductions(code, num_outputs);
  return code;
}

template <typename T>
const T* checked_operand(const EdgeSlot slot, const Tensor& tensor, const Csr& graph) {
  constexpr const char* kName = "operands";
  check_row<T>(slot.width, tensor, kName);
  switch (slot.kind) {
    case EdgeSlotKind::kParameter: return checked<const T>(tensor, {slot.width}, kName);
    case EdgeSlotKind::kRow: return checked<const T>(tensor, {graph.num_rows, slot.width}, kName);
    case EdgeSlotKind::kEdge:
      return checked<const T>(tensor, {graph.num_entries, slot.width}, kName);
    default: return checked<const T>(tensor, {graph.num_cols, slot.width}, kName);
  }
}

// One operand for each slot of one, and as many outputs as reductions have results. With the
// address of a kernel that was generated for the program, and the blocks that share columns; 0 for
// none.
void run_edge_program(Tensor rowptr, Tensor col, OptionalTensor edge_id, int64_t num_cut,
                      OptionalTensor order, int64_t num_cols, Tensor slots, Tensor constants,
                      Tensor instructions, Tensor reductions, Tensors operands, Tensors outputs,
                      int64_t kernel, int64_t chunks) {
  const auto num_outputs = static_cast<int64_t>(outputs.size());
  EdgeCode code = checked_code(slots, constants, instructions, reductions, num_outputs);
  code.kernel = reinterpret_cast<const void*>(kernel);
  code.chunks = static_cast<unsigned>(chunks);
  const auto num_operands = static_cast<int64_t>(operands.size());
  int64_t expected = 0;
  while (expected < code.num_slots && code.slots[expected].is_operand()) ++expected;
  if (num_operands != expected || num_operands == 0) {
    TVM_FFI_THROW(ValueError) << "operands must be one for each of " << expected
                              << " slots and at least one, got " << num_operands;
  }
  checked_size(num_cols, "num_cols");
  Call call(operands[0]);
  const Rows graph = checked_csr(rowptr, col, edge_id, num_cut, order, num_cols, kByRow);
  dispatch_features(operands[0], "operands", [&](auto type) {
    using T = decltype(type);
    std::vector<const T*> inputs(code.num_slots);
    for (int64_t s = 0; s < num_operands; ++s) {
      inputs[s] = checked_operand<T>(code.slots[s], operands[s], graph);
    }
    std::vector<void*> results(num_outputs);
    for (int64_t r = 0; r < code.num_reductions; ++r) {
      const EdgeReduction& reduction = code.reductions[r];
      const int64_t width = code.slots[reduction.value].width;
      if (reduction.is_softmax()) {
        const int64_t heads = code.slots[reduction.factor].width;
        for (const int32_t record : {reduction.record, reduction.scale}) {
          if (record < 0) continue;
          results[record] = checked<T>(outputs[record], {graph.num_rows, heads}, "outputs");
        }
      } else if (reduction.record >= 0) {
        results[reduction.record] =
            checked<int32_t>(outputs[reduction.record], {graph.num_rows, width}, "outputs");
      }
      if (reduction.out < 0) continue;
      const Tensor out = outputs[reduction.out];
      if (reduction.is_outer()) {
        const int64_t other = code.slots[reduction.factor].width;
        results[reduction.out] = checked<T>(out, {width * other}, "outputs");
      } else if (reduction.kind == EdgeReductionKind::kTotal) {
        results[reduction.out] = checked<T>(out, {width}, "outputs");
      } else {
        const bool is_of_edges = reduction.kind == EdgeReductionKind::kEdge;
        const int64_t rows = is_of_edges ? graph.num_entries : graph.num_rows;
        results[reduction.out] = checked<T>(out, {rows, width}, "outputs");
      }
    }
    call.run(kernels::edge_program<T>, graph, code, inputs.data(), results.data());
  });
}

void bind_edge_program(Tensor rowptr, Tensor col, OptionalTensor edge_id, int64_t num_cut,
                       OptionalTensor order, int64_t num_cols, Tensor slots, Tensor constants,
                       Tensor instructions, Tensor reductions, Tensors operands, Tensors outputs) {
  run_edge_program(rowptr, col, edge_id, num_cut, order, num_cols, slots, constants, instructions,
                   reductions, operands, outputs, 0, 1);
}

}  // namespace
}  // namespace fastgraph

TVM_FFI_DLL_EXPORT_TYPED_FUNC(edge_program, fastgraph::bind_edge_program);
#ifdef FASTGRAPH_GENERATED_KERNELS
TVM_FFI_DLL_EXPORT_TYPED_FUNC(generated_edge_program, fastgraph::run_edge_program);
#endif
