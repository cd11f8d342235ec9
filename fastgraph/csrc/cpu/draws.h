// Random numbers of samplers: Philox4x32-10 (Salmon et al., Parallel random numbers: as easy as
// 1, 2, 3, SC 2011), of which word d of what is numbered (item, stream) is word d % 4 of the block
// for the counter (d / 4, item, stream, 0). Who asks for it, and beside what, does not matter.
#pragma once

#include <cstdint>

#include "fastgraph/philox.h"
#include "fastgraph/simd.h"

namespace fastgraph {

// What is drawn for one item, word after word, of which blocks are made in N lanes.
template <int N>
class DrawsInLanes {
 public:
  DrawsInLanes(uint64_t key, uint32_t item, uint32_t stream)
      : key_(key), item_(item), stream_(stream) {}

  uint32_t next() {
    if (number_ % kWords == 0) make(static_cast<uint32_t>(number_ / 4));
    return words_[number_++ % kWords];
  }

  uint64_t next64() {
    const uint64_t low = next();
    return low | static_cast<uint64_t>(next()) << 32;
  }

  // The same from the first word on, for who draws many.
  template <int M>
  DrawsInLanes<M> in_lanes() const {
    return {key_, item_, stream_};
  }

 private:
  static constexpr int kWords = 4 * N;

  void make(uint32_t block) {
    Vector<uint64_t, N> c[4] = {{}, splat<uint64_t, N>(item_), splat<uint64_t, N>(stream_), {}};
    for (int lane = 0; lane < N; ++lane) c[0][lane] = block + static_cast<uint32_t>(lane);
    philox_blocks<N>(key_, c);
    for (int lane = 0; lane < N; ++lane) {
      for (int w = 0; w < 4; ++w) words_[4 * lane + w] = static_cast<uint32_t>(c[w][lane]);
    }
  }

  uint64_t key_;
  uint32_t item_, stream_;
  uint64_t number_ = 0;
  uint32_t words_[kWords];
};

// Of few words, in the smallest vectors.
using Draws = DrawsInLanes<2>;

// A number below `bound` from 32 random bits, for bounds of up to 16 bits: none is more likely than
// another by more than a part in 2^16.
inline uint32_t below(uint32_t word, uint32_t bound) {
  return static_cast<uint32_t>((static_cast<uint64_t>(word) * bound) >> 32);
}

// The same from 64 bits for any bound.
inline uint64_t below(uint64_t word, uint64_t bound) {
  return static_cast<uint64_t>((static_cast<unsigned __int128>(word) * bound) >> 64);
}

// Up to this many a bound has 16 bits.
constexpr int64_t kFewChoices = 1 << 16;

// A number in [0, bound).
inline int64_t draw_below(Draws& draws, int64_t bound) {
  if (bound <= kFewChoices) return below(draws.next(), static_cast<uint32_t>(bound));
  return static_cast<int64_t>(below(draws.next64(), static_cast<uint64_t>(bound)));
}

// In (0, 1), of 32 bits.
inline double to_unit(uint32_t word) { return (word + 0.5) * 0x1p-32; }

// In [0, 1), of 53 bits.
inline double to_unit(uint64_t word) { return static_cast<double>(word >> 11) * 0x1p-53; }

}  // namespace fastgraph
