// A table of biases by types of entries, head by head in the dtype of scores.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "fastgraph/inline.h"
#include "fastgraph/memory.h"
#include "fastgraph/score_bias.h"
#include "fastgraph/simd.h"
#include "fastgraph/types.h"

namespace fastgraph {

// N types as integers as wide as A.
template <typename A, int N, typename Type>
FASTGRAPH_INLINE Vector<Bits<A>, N> load_types(const Type* types) {
  // Compilers would widen bytes one by one.
#if defined(__AVX2__)
  if constexpr (sizeof(Type) == 1) {
    __m128i bytes = _mm_setzero_si128();
    std::memcpy(&bytes, types, N);
    if constexpr (N == 8 && sizeof(A) == 4) return (Vector<Bits<A>, N>)_mm256_cvtepu8_epi32(bytes);
    if constexpr (N == 4) return (Vector<Bits<A>, N>)_mm256_cvtepu8_epi64(bytes);
#if defined(__AVX512F__)
    if constexpr (N == 16) return (Vector<Bits<A>, N>)_mm512_cvtepu8_epi32(bytes);
    if constexpr (N == 8 && sizeof(A) == 8) return (Vector<Bits<A>, N>)_mm512_cvtepu8_epi64(bytes);
#endif
  }
#endif
  return __builtin_convertvector(load_raw<N>(types), Vector<Bits<A>, N>);
}

template <typename T>
class BiasTable {
 public:
  using A = Accumulator<T>;
  static constexpr int N = kLanes<A>;

  explicit BiasTable(const ScoreBias<T>& bias)
      : types_(bias.types.given() ? bias.values.rows : 0),
        row_(vectors() > 0 ? vectors() * N : types_),
        values_(scratch<A>(bias.types.given() ? row_ * bias.values.width : 0)) {
    if (!bias.types.given()) return;
    std::fill_n(values_.get(), row_ * bias.values.width, A{0});
    for (int64_t type = 0; type < types_; ++type) {
      for (int64_t head = 0; head < bias.values.width; ++head) {
        values_[head * row_ + type] = load_one(bias.values.row(type) + head);
      }
    }
  }

  // Vectors that hold a head's part, where permutations of them take any values sooner than loads
  // of one value after the other do: 2, 4 or 8; otherwise 0.
  int vectors() const {
    if (kVectorBytes < 32 || types_ > kMostVectors * N) return 0;
    return types_ <= 2 * N ? 2 : types_ <= 4 * N ? 4 : 8;
  }

  // True if two vectors hold a head's part, of which one permutation takes any values.
  bool is_in_registers() const { return vectors() == 2; }

  const A* of_head(int64_t head) const { return values_.get() + head * row_; }

  // body(values), where values.write(types, to) writes a head's biases of as many types as a vector
  // has.
  template <typename Body>
  void visit(int64_t head, const Body& body) const {
    const A* const own = of_head(head);
    switch (vectors()) {
      case 2: return body(Permuted<2>(own));
      case 4: return body(Permuted<4>(own));
      case 8: return body(Permuted<8>(own));
      default: return body(Loaded{own});
    }
  }

 private:
  static constexpr int kMostVectors = 8;
  using I = Vector<Bits<A>, N>;
  using V = Vector<A, N>;

  template <int kVectors>
  struct Permuted {
    V part[kVectors];

    explicit Permuted(const A* own) {
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i) part[i] = load<N>(own + i * N);
    }

    template <typename Type>
    FASTGRAPH_INLINE void write(const Type* types, A* to) const {
      const I type = load_types<A, N>(types);
      V found[kVectors / 2];
#pragma GCC unroll 4
      for (int i = 0; i < kVectors / 2; ++i) {
        found[i] = __builtin_shuffle(part[2 * i], part[2 * i + 1], type);
      }
#pragma GCC unroll 2
      for (int left = kVectors / 4; left > 0; left /= 2) {
        const I is_upper = (type & (kVectors / 2 / left * N)) != 0;
#pragma GCC unroll 2
        for (int i = 0; i < left; ++i) {
          found[i] = is_upper ? found[2 * i + 1] : found[2 * i];
        }
      }
      store<N>(to, found[0]);
    }
  };

  struct Loaded {
    const A* own;

    template <typename Type>
    FASTGRAPH_INLINE void write(const Type* types, A* to) const {
#pragma GCC unroll 16
      for (int i = 0; i < N; ++i) to[i] = own[types[i]];
    }
  };

  int64_t types_;
  int64_t row_;
  Scratch<A> values_;  // [heads, row_]
};

}  // namespace fastgraph
