// Validation of what is added to scores, at the native boundary.
#pragma once

#include <cstdint>

#include "bindings/checks.h"
#include "fastgraph/score_bias.h"

namespace fastgraph {

// Types of entries, which are looked at where that is possible: they say where kernels read. On a
// GPU kernels do that themselves.
inline EntryTypes checked_types(const Tensor& types, int64_t entries, int64_t num_types,
                                const char* name) {
  check_place(types, name);
  const DLDataType dtype = types.dtype();
  const bool is_byte = dtype.code == kDLUInt && dtype.bits == 8;
  const bool is_signed =
      dtype.code == kDLInt && (dtype.bits == 16 || dtype.bits == 32 || dtype.bits == 64);
  if (dtype.lanes != 1 || !(is_byte || is_signed)) {
    TVM_FFI_THROW(TypeError) << name << " must be uint8, int16, int32 or int64, got "
                             << dtype_text(types);
  }
  check_shape(types, {entries}, name);
  if (!types.IsContiguous()) refuse_strides(types, name);
  const EntryTypes found{memory_of<const char>(types, name), dtype.bits / 8};
  if (entries == 0 || !kReadable) return found;
  found.visit([&](const auto* type) {
    auto least = *type, most = *type;
    for (int64_t i = 0; i < entries; ++i) {
      least = type[i] < least ? type[i] : least;
      most = type[i] > most ? type[i] : most;
    }
    if (least < 0 || most >= num_types) {
      TVM_FFI_THROW(IndexError) << name << " holds " << int64_t{least < 0 ? least : most}
                                << ", expected 0 <= type < " << num_types;
    }
  });
  return found;
}

// `values`, which `name` names, are [entries, heads], or with `types` [any number of types, heads].
template <typename T>
ScoreBias<T> checked_bias(const OptionalTensor& values, const OptionalTensor& types,
                          int64_t entries, int64_t heads, const char* types_name,
                          const char* name = "bias") {
  if (!values.has_value()) {
    if (types.has_value()) {
      TVM_FFI_THROW(ValueError) << types_name << " must be None without " << name
                                << ", got a tensor";
    }
    return {};
  }
  check_ndim(values.value(), 2, name);
  const int64_t rows = types.has_value() ? values.value().size(0) : entries;
  const auto bias = checked_matrix<const T>(values, rows, heads, name);
  if (!types.has_value()) return {bias, {}};
  return {bias, checked_types(types.value(), entries, rows, types_name)};
}

}  // namespace fastgraph
