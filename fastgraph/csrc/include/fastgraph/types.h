// The element types of tensors, known to CPU and CUDA kernels alike.
#pragma once

#include <cstdint>
#include <type_traits>

namespace fastgraph {

struct bfloat16 {
  uint16_t bits;
};
struct float16 {
  uint16_t bits;
};

// The type in which values of type T are multiplied, compared and added up.
template <typename T>
using Accumulator = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename T>
constexpr bool is_half = sizeof(T) == 2;

}  // namespace fastgraph
