// Products of small matrices by a warp, in the layout of registers that the PTX ISA gives for
// mma.m16n8k8 and mma.m16n8k16 (sections "Matrix Fragments for mma.m16n8k8" and so on). Products
// are exact and so are their sums before the last rounding; hardware rounds sums in an order that
// is not documented.
#pragma once

#include <cstdint>

#include "simt.h"

namespace simt {

// To nearest, ties away from zero, in the upper 19 bits. NaN and infinity stay what they are.
inline uint32_t tf32_of(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  const bool is_finite = (bits & 0x7f800000u) != 0x7f800000u;
  return is_finite ? (bits + 0x1000u) & ~0x1fffu : bits;
}

namespace detail {

constexpr unsigned kAll = 0xffffffffu;

// c[row][n] += sum of a[row][k] * b[k][n] over `depth` k for the four that this lane holds, where
// a_of(half, k) and b_of(k, n) are collectives that give elements of row g + 8 * half and of column
// n.
template <typename A, typename B>
void multiply(float (&c)[4], int depth, const A& a_of, const B& b_of) {
  double sum[4] = {c[0], c[1], c[2], c[3]};
  for (int k = 0; k < depth; ++k) {
    const double a[2] = {a_of(0, k), a_of(1, k)};
    const double b[2] = {b_of(k, 0), b_of(k, 1)};
    for (int i = 0; i < 4; ++i) sum[i] += a[i / 2] * b[i % 2];
  }
  for (int i = 0; i < 4; ++i) c[i] = static_cast<float>(sum[i]);
}

// The same of pairs of bfloat16: registers a[half + 2 * j] and b[j] hold two of each of k = 8 j to
// 8 j + 7.
inline void multiply_pairs(float (&c)[4], int depth, const uint32_t* a, const uint32_t* b,
                           Place place) {
  const int group = lane() / 4, in_group = lane() % 4;
  const auto number = [](uint32_t pair, int k) {
    return bit_cast<float>(k % 2 ? pair & 0xffff0000u : pair << 16);
  };
  multiply(
      c, depth,
      [&](int half, int k) {
        return number(shuffle(kAll, a[half + 2 * (k / 8)], 4 * group + k % 8 / 2, place), k);
      },
      [&](int k, int i) {
        const int column = 2 * in_group + i;
        return number(shuffle(kAll, b[k / 8], 4 * column + k % 8 / 2, place), k);
      });
}

}  // namespace detail

inline void mma_tf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], SIMT_PLACE) {
  const int group = lane() / 4, in_group = lane() % 4;
  const auto number = [](uint32_t bits) { return bit_cast<float>(bits & ~0x1fffu); };
  detail::multiply(
      c, 8,
      [&](int half, int k) {
        return number(shuffle(detail::kAll, a[half + 2 * (k / 4)], 4 * group + k % 4, place));
      },
      [&](int k, int i) {
        const int column = 2 * in_group + i;
        return number(shuffle(detail::kAll, b[k / 4], 4 * column + k % 4, place));
      });
}

inline void mma_bf16(float (&c)[4], const uint32_t (&a)[2], uint32_t b, SIMT_PLACE) {
  detail::multiply_pairs(c, 8, a, &b, place);
}

inline void mma_bf16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], SIMT_PLACE) {
  detail::multiply_pairs(c, 16, a, b, place);
}

}  // namespace simt
