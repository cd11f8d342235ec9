// Dropout of attention: a function of seed, edge and head alone, which every pass draws again.
//
// The word of an edge and a head is number head % 4 of the Philox block for the counter (edge,
// head / 4, 0, 0), so that four heads share one block.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "fastgraph/attention_arguments.h"
#include "fastgraph/edge_blocks.h"
#include "fastgraph/memory.h"
#include "fastgraph/parallel.h"
#include "fastgraph/philox.h"
#include "fastgraph/row_batch.h"
#include "fastgraph/simd.h"

namespace fastgraph {

// Lanes of two vectors in turns, a[0], b[0], a[1]: the first or the second half of them.
template <int N, size_t... kLane>
inline Vector<uint64_t, N> in_turns(Vector<uint64_t, N> a, Vector<uint64_t, N> b, int half,
                                    std::index_sequence<kLane...>) {
#if defined(__clang__)
  if (half == 0) return __builtin_shufflevector(a, b, (kLane / 2 + kLane % 2 * N)...);
  return __builtin_shufflevector(a, b, (N / 2 + kLane / 2 + kLane % 2 * N)...);
#else
  using I = Vector<int64_t, N>;
  if (half == 0) return __builtin_shuffle(a, b, I{(kLane / 2 + kLane % 2 * N)...});
  return __builtin_shuffle(a, b, I{(N / 2 + kLane / 2 + kLane % 2 * N)...});
#endif
}
template <int N>
inline Vector<uint64_t, N> in_turns(Vector<uint64_t, N> a, Vector<uint64_t, N> b, int half) {
  return in_turns<N>(a, b, half, std::make_index_sequence<N>{});
}

// What words are to become: 0 for dropped entries, 1 / (1 - rate) for the others.
template <typename A>
struct KeptFactors {
  uint32_t threshold;
  A scale;

  explicit KeptFactors(double rate)
      : threshold(static_cast<uint32_t>(std::min(rate * 0x1p32, 0x1p32 - 1))),
        scale(rate < 1 ? static_cast<A>(1 / (1 - rate)) : A{0}) {}

  template <int N>
  Vector<A, N> of(Vector<uint32_t, N> words) const {
    return unless<N>(words < splat<uint32_t, N>(threshold));
  }
  template <int N>
  Vector<A, N> unless(Vector<int32_t, N> is_dropped) const {
    using B = Vector<Bits<A>, N>;
    return (Vector<A, N>)(~__builtin_convertvector(is_dropped, B) & (B)splat<A, N>(scale));
  }
};

// The numbers of the edges of N entries from one on, of which `count` are in use, the others any.
template <int N>
inline Vector<uint32_t, N> edges_of(const Csr& graph, int64_t entry, int64_t count) {
  using U = Vector<uint32_t, N>;
  if (graph.edge_id == nullptr) return lane_numbers<uint32_t, N>() + static_cast<uint32_t>(entry);
  const int32_t* ids = graph.edge_id + entry;
  if (entry + N <= graph.num_entries) return (U)load_raw<N>(ids);
  uint32_t edges[N] = {};
  for (int64_t i = 0; i < count; ++i) edges[i] = static_cast<uint32_t>(ids[i]);
  return load_raw<N>(edges);
}

// The factors of an edge and a head in each lane.
template <typename A>
inline BlockOf<A> kept_of(const Dropout& dropout, Vector<uint32_t, kBlock> edges,
                          Vector<uint32_t, kBlock> heads) {
  constexpr int N = std::min(kBlock, kVectorBytes / 8);
  using Lanes = Vector<uint64_t, N>;
  uint32_t edge[kBlock], head[kBlock], words[kBlock];
  store_raw<kBlock>(edge, edges);
  store_raw<kBlock>(head, heads);
#pragma GCC unroll 8
  for (int lane = 0; lane < kBlock; lane += N) {  // of which none waits for another
    const auto of = __builtin_convertvector(load_raw<N>(head + lane), Lanes);
    Lanes c[4] = {__builtin_convertvector(load_raw<N>(edge + lane), Lanes), of >> 2, {}, {}};
    philox_blocks<N>(dropout.seed, c);
    const auto is_odd = (of & 1) != 0, is_upper = (of & 2) != 0;
    const Lanes chosen = is_upper ? (is_odd ? c[3] : c[2]) : (is_odd ? c[1] : c[0]);
    store_raw<N>(words + lane, __builtin_convertvector(chosen, Vector<uint32_t, N>));
  }
  return KeptFactors<A>(dropout.rate).template of<kBlock>(load_raw<kBlock>(words));
}

// The factors of the entries of a block.
template <typename A>
inline BlockOf<A> kept(const Dropout& dropout, const EdgeBlock& block) {
  if (dropout.rate == 0) return splat<A, kBlock>(1);
  return kept_of<A>(dropout, edges_of<kBlock>(block.graph, block.entry, block.count),
                    splat<uint32_t, kBlock>(static_cast<uint32_t>(block.head)));
}
template <typename A>
inline BlockOf<A> kept(const Dropout& dropout, const SharedBlock& block) {
  if (dropout.rate == 0) return splat<A, kBlock>(1);
  uint32_t edges[kBlock] = {}, heads[kBlock] = {};
  for_each_lane(block, [&](int lane, int i, int h) {
    edges[lane] = static_cast<uint32_t>(block.edge(i));
    heads[lane] = static_cast<uint32_t>(block.head + h);
  });
  return kept_of<A>(dropout, load_raw<kBlock>(edges), load_raw<kBlock>(heads));
}

// Factors for four words in each of N lanes, those of a lane side by side.
template <int N, typename A>
inline void store_in_turns(const Vector<uint64_t, N> (&words)[4], const KeptFactors<A>& factors,
                           A (&found)[4 * N]) {
  // Two words of each lane, which a little-endian machine has in this order.
  constexpr uint64_t kLower = 0xffffffffu;
  const auto first = (words[0] & kLower) | (words[1] << 32);
  const auto second = (words[2] & kLower) | (words[3] << 32);
  for (int half = 0; half < 2; ++half) {
    const auto pairs = in_turns<N>(first, second, half);
    const auto kept = factors.template of<2 * N>((Vector<uint32_t, 2 * N>)pairs);
    store<2 * N>(found + half * 2 * N, kept);
  }
}

// Multiplies numbers of a batch by the factors of dropout.
template <typename A, typename... Numbers>
inline void drop(const RowBatch& batch, const Dropout& dropout, Numbers*... numbers) {
  if (dropout.rate == 0) return;
  if (batch.heads == 1) {
    for (int64_t e = batch.begin; e < batch.end; e += kBlock) {
      const int count = static_cast<int>(std::min<int64_t>(kBlock, batch.end - e));
      const BlockOf<A> factor = kept<A>(dropout, EdgeBlock{{batch.graph, 0, 0, e, count}});
      const int64_t at = batch.at(e);
      (store<kBlock>(numbers + at, load<kBlock>(numbers + at) * factor), ...);
    }
    return;
  }
  constexpr int N = kVectorBytes / 8;
  using Lanes = Vector<uint64_t, N>;
  const KeptFactors<A> factors(dropout.rate);
  for (int64_t e = batch.begin; e < batch.end; e += N) {
    const int64_t count = std::min<int64_t>(N, batch.end - e);
    const auto edges = __builtin_convertvector(edges_of<N>(batch.graph, e, count), Lanes);
    for (int64_t head = 0; head < batch.heads; head += 4) {
      Lanes words[4] = {edges, splat<uint64_t, N>(static_cast<uint64_t>(head / 4)), {}, {}};
      philox_blocks<N>(dropout.seed, words);
      A found[4 * N];
      store_in_turns<N>(words, factors, found);
      const int64_t heads = std::min<int64_t>(4, batch.heads - head);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t at = batch.at(e + i) + head;
        if (heads == 4) {
          const auto factor = load<4>(found + 4 * i);
          (store<4>(numbers + at, load<4>(numbers + at) * factor), ...);
        } else {
          for (int64_t h = 0; h < heads; ++h) ((numbers[at + h] *= found[4 * i + h]), ...);
        }
      }
    }
  }
}

// Which entries dropout keeps, a bit for each head, for who takes one head after the other: so four
// heads still share what is drawn.
template <typename A>
class KeptEntries {
 public:
  KeptEntries(const Csr& graph, int64_t heads, const Dropout& dropout)
      : factors_(dropout.rate), bytes_((graph.num_entries + 7) / 8 + kMore) {
    if (dropout.rate == 0) return;
    bits_ = scratch<uint8_t>(heads * bytes_);
    constexpr int64_t kBytes = 1 << 9;  // of a task
    const int64_t bytes = (graph.num_entries + 7) / 8;
    for_each_task((bytes + kBytes - 1) / kBytes, graph.num_entries * heads, [&](int64_t task) {
      const int64_t end = std::min((task + 1) * kBytes, bytes);
      for (int64_t byte = task * kBytes; byte < end; ++byte) draw(graph, heads, dropout.seed, byte);
    });
  }

  bool are_all() const { return bits_ == nullptr; }

  // The factors of kBlock entries from one on; of those behind the last any.
  BlockOf<A> factors(int64_t entry, int64_t head) const {
    uint32_t bits;
    std::memcpy(&bits, bits_.get() + head * bytes_ + entry / 8, sizeof(bits));
    const auto own = splat<uint32_t, kBlock>(1) << lane_numbers<uint32_t, kBlock>();
    return factors_.template unless<kBlock>((splat<uint32_t, kBlock>(bits >> entry % 8) & own) ==
                                            0);
  }

 private:
  static constexpr int kMore = sizeof(uint32_t);  // who reads a block may read so many behind it
  static_assert(kBlock + 7 <= 32);

  // The bits of eight entries, of all heads.
  void draw(const Csr& graph, int64_t heads, uint64_t seed, int64_t byte) const {
    constexpr int N = std::min(8, kVectorBytes / 8);
    using Lanes = Vector<uint64_t, N>;
    const auto threshold = splat<uint64_t, N>(factors_.threshold);
    const auto bit = splat<uint64_t, N>(1) << lane_numbers<uint64_t, N>();
    for (int64_t head = 0; head < heads; head += 4) {
      uint64_t kept[4] = {};
      for (int lane = 0; lane < 8; lane += N) {
        const int64_t entry = 8 * byte + lane;
        const auto edges = edges_of<N>(graph, entry, graph.num_entries - entry);
        Lanes words[4] = {__builtin_convertvector(edges, Lanes),
                          splat<uint64_t, N>(static_cast<uint64_t>(head / 4)),
                          {},
                          {}};
        philox_blocks<N>(seed, words);
        for (int w = 0; w < 4; ++w) {
          const Lanes found = (Lanes)((words[w] & 0xffffffffu) >= threshold) & bit;
          for (int l = 0; l < N; ++l) kept[w] |= found[l] << lane;
        }
      }
      for (int64_t w = 0; w < std::min<int64_t>(4, heads - head); ++w) {
        bits_[(head + w) * bytes_ + byte] = static_cast<uint8_t>(kept[w]);
      }
    }
  }

  KeptFactors<A> factors_;
  int64_t bytes_;
  Scratch<uint8_t> bits_;
};

}  // namespace fastgraph
