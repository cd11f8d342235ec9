// Noticing NaNs beside a computation that loses them.
#pragma once

#include "fastgraph/inline.h"
#include "fastgraph/simd.h"

namespace fastgraph {

// Watches kCount vectors of N values each, as often as they come. A NaN stays in a sum, so they are
// added up; infinities of both signs make one, too, and are noticed for nothing.
template <typename A, int N, int kCount>
class NanWatch {
 public:
  FASTGRAPH_INLINE void see(int q, Vector<A, N> value) { sum_[q % kSums] += value; }

  FASTGRAPH_INLINE bool noticed() const {
    Vector<A, N> sum = sum_[0];
#pragma GCC unroll 4
    for (int i = 1; i < kSums; ++i) sum += sum_[i];
    const A total = sum_of<A, N>(sum);
    return total != total;
  }

 private:
  static constexpr int kSums = kCount < 4 ? kCount : 4;
  Vector<A, N> sum_[kSums] = {};
};

#if defined(__AVX512F__)

// One instruction compares two vectors, the second of which must come next, and remembers for each
// lane whether all were numbers.
template <int kCount>
class NanWatch<float, 16, kCount> {
 public:
  FASTGRAPH_INLINE NanWatch() {
#pragma GCC unroll 4
    for (int i = 0; i < kMasks; ++i) numbers_[i] = kAll;
  }

  FASTGRAPH_INLINE void see(int q, Vector<float, 16> value) {
    if (q % 2 == 0) first_ = value;
    if (q % 2 == 1 || kCount == 1) {
      __mmask16& numbers = numbers_[q / 2 % kMasks];
      numbers = _mm512_mask_cmp_ps_mask(numbers, (__m512)first_, (__m512)value, _CMP_ORD_Q);
    }
  }

  FASTGRAPH_INLINE bool noticed() const {
    __mmask16 numbers = kAll;
#pragma GCC unroll 4
    for (int i = 0; i < kMasks; ++i) numbers &= numbers_[i];
    return numbers != kAll;
  }

 private:
  static constexpr int kMasks = kCount < 8 ? (kCount + 1) / 2 : 4;
  static constexpr __mmask16 kAll = 0xffff;

  __mmask16 numbers_[kMasks];
  Vector<float, 16> first_;
};

#endif

}  // namespace fastgraph
