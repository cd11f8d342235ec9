// Sampling of one layer: edges of some nodes, at most so many of each, or of each of their types.
//
// Nodes are cut into chunks, which count their edges, so that each knows where these go, and draw
// them. What is drawn depends on the seed and on the position of the node alone; by layers, on the
// neighbours.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "cpu/draws.h"
#include "cpu/edge_draws.h"
#include "cpu/layer_draws.h"
#include "cpu/sampling.h"
#include "fastgraph/parallel.h"

namespace fastgraph {
namespace {

constexpr int64_t kChunk = 64;
constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
// Elementary operations for an edge that is drawn, and for one that may be.
constexpr int64_t kWorkOfEdge = 8;
constexpr int64_t kWorkOfRange = 2;

// The edges of one type, or of all, that lead to a node.
struct Segment {
  int64_t position;
  int64_t type;
  EdgeRange range;
  int64_t place;  // of the first that is drawn, within the chunk
};

struct Chunk {
  int64_t first, last;  // positions of nodes
  std::vector<Segment> segments;
  int64_t num_candidates = 0;
  int64_t num_edges = 0;
  int64_t place = 0;  // of the first edge
  SampleDefect defect = {};
};

template <typename Ptr, typename Index>
class LayerSampler {
 public:
  LayerSampler(const LayerRequest<Ptr, Index>& request, Layer<Ptr, Index>& layer)
      : request_(request), relation_(request.relation), layer_(layer) {}

  SampleDefect run() {
    for (int64_t first = 0; first < request_.num_seeds; first += kChunk) {
      Chunk chunk{};
      chunk.first = first;
      chunk.last = std::min(first + kChunk, request_.num_seeds);
      chunks_.push_back(std::move(chunk));
    }
    layer_.colptr.reserve(request_.num_seeds + 1);
    layer_.colptr.set_size(request_.num_seeds + 1);
    layer_.colptr[0] = 0;
    const int64_t work = request_.num_seeds * kWorkOfRange * kChunk;
    for_each_chunk(work, [&](Chunk& chunk) { count(chunk); });
    int64_t num_edges = 0, num_candidates = 0;
    for (Chunk& chunk : chunks_) {
      if (chunk.defect.kind) return chunk.defect;
      chunk.place = num_edges;
      num_edges += chunk.num_edges;
      num_candidates += chunk.num_candidates;
    }
    if (num_edges > kMost) return {SampleDefect::kTooLarge, 0, 0, num_edges, 0};
    layer_.edge.reserve(num_edges);
    layer_.edge.set_size(num_edges);
    layer_.row.reserve(num_edges);
    layer_.row.set_size(num_edges);
    const bool reads_all = request_.by_layer || relation_.is_weighted();
    for_each_chunk((reads_all ? num_candidates : num_edges) * kWorkOfEdge,
                   [&](Chunk& chunk) { draw(chunk); });
    return {};
  }

 private:
  template <typename Body>
  void for_each_chunk(int64_t work, const Body& body) {
    for_each_task(static_cast<int64_t>(chunks_.size()), work, [&](int64_t i) { body(chunks_[i]); });
  }

  // True if all edges with a weight are taken, and nothing is drawn.
  bool takes_all(EdgeRange range, int64_t fanout) const {
    if (fanout < 0) return true;
    return !request_.replace && !relation_.is_weighted() && fanout >= range.population;
  }

  void count(Chunk& chunk) {
    for (int64_t position = chunk.first; position < chunk.last; ++position) {
      const int64_t node = request_.seeds[position];
      if (node < 0 || node >= relation_.num_dst) {
        chunk.defect = {SampleDefect::kSeed, 0, position, node, 0};
        return;
      }
      const int64_t begin = relation_.colptr[node], end = relation_.colptr[node + 1];
      if (begin < 0 || end < begin || end > relation_.num_edges) {
        chunk.defect = {SampleDefect::kColptr, 0, node, end, 0};
        return;
      }
      const int64_t before = chunk.num_edges;
      chunk.num_candidates += end - begin;
      for (int64_t e = begin; e < end;) {
        const int64_t type = request_.edge_type ? request_.edge_type[e] : 0;
        if (type < 0 || type >= request_.num_types) {
          chunk.defect = {SampleDefect::kEdgeType, 0, e, type, 0};
          return;
        }
        const int64_t next = request_.edge_type ? request_.edge_type.end_of_type(e, end) : end;
        chunk.defect = count_segment(chunk, position, type, {e, next - e, 0});
        if (chunk.defect.kind) {
          if (chunk.defect.kind == SampleDefect::kTotal) chunk.defect.position = node;
          return;
        }
        e = next;
      }
      layer_.colptr[position + 1] = static_cast<Ptr>(chunk.num_edges - before);
    }
  }

  SampleDefect count_segment(Chunk& chunk, int64_t position, int64_t type, EdgeRange range) const {
    const int64_t fanout = request_.fanouts[type];
    if (relation_.is_weighted()) {
      const int64_t most = fanout < 0 ? range.population : fanout;
      const SampleDefect defect =
          count_weighted(relation_, most, request_.replace && fanout >= 0, range);
      if (defect.kind) return defect;
    } else {
      range.count = takes_all(range, fanout) ? range.population : fanout;
    }
    if (range.count == 0) return {};
    chunk.segments.push_back({position, type, range, chunk.num_edges});
    chunk.num_edges += range.count;
    return {};
  }

  void draw(Chunk& chunk) {
    int64_t sum = chunk.place;
    for (int64_t position = chunk.first; position < chunk.last; ++position) {
      layer_.colptr[position + 1] = static_cast<Ptr>(sum += layer_.colptr[position + 1]);
    }
    // Segments of one type are drawn beside each other.
    const auto is_before = [](const Segment& a, const Segment& b) { return a.type < b.type; };
    if (request_.edge_type) {
      std::stable_sort(chunk.segments.begin(), chunk.segments.end(), is_before);
    }
    FewDraws<Ptr> few[kChunk];
    int64_t num_few = 0;
    Ptr* const edge = layer_.edge.data() + chunk.place;
    for (size_t i = 0; i < chunk.segments.size(); ++i) {
      const Segment& segment = chunk.segments[i];
      const EdgeRange range = segment.range;
      const int64_t fanout = request_.fanouts[segment.type];
      Ptr* const out = edge + segment.place;
      const bool is_few = !request_.by_layer && !relation_.is_weighted() &&
                          !takes_all(range, fanout) && fanout <= kFewDraws &&
                          range.population <= kFewChoices;
      if (is_few) {
        few[num_few++] = {static_cast<uint32_t>(segment.position),
                          static_cast<uint32_t>(range.population), range.begin, out};
      } else {
        draw_segment(segment, fanout, out);
      }
      const bool is_last =
          i + 1 == chunk.segments.size() || chunk.segments[i + 1].type != segment.type;
      if (is_last || num_few == kChunk) {
        draw_few(few, num_few, fanout, request_.replace, request_.random_seed,
                 static_cast<uint32_t>(segment.type), relation_.row);
        num_few = 0;
      }
    }
    if (request_.ascending) {
      for (const Segment& segment : chunk.segments) {
        std::sort(edge + segment.place, edge + segment.place + segment.range.count);
      }
    }
    Index* const row = layer_.row.data() + chunk.place;
    for (int64_t i = 0; i < chunk.num_edges; ++i) row[i] = relation_.row[edge[i]];
  }

  void draw_segment(const Segment& segment, int64_t fanout, Ptr* out) const {
    const EdgeRange range = segment.range;
    const uint64_t key = request_.random_seed;
    const Draws draws(key, static_cast<uint32_t>(segment.position),
                      static_cast<uint32_t>(segment.type));
    if (takes_all(range, fanout)) {
      for (int64_t e = range.begin; e < range.begin + range.population; ++e) {
        if (!relation_.is_weighted() || relation_.weight_of(e) > 0) *out++ = static_cast<Ptr>(e);
      }
    } else if (request_.by_layer && request_.replace) {
      draw_layer_with_replacement(relation_, range, key, out);
    } else if (request_.by_layer && relation_.is_weighted()) {
      draw_layer_by_weight(relation_, range, key, out);
    } else if (request_.by_layer) {
      draw_layer(relation_, range, key, out);
    } else if (relation_.is_weighted() && request_.replace) {
      draw_by_weight(relation_, draws, range, out);
    } else if (relation_.is_weighted()) {
      draw_distinct_by_weight(relation_, draws, range, out);
    } else if (request_.replace) {
      draw_with_replacement(draws, range, out);
    } else {
      draw_distinct(draws, range, out);
    }
  }

  const LayerRequest<Ptr, Index>& request_;
  const Relation<Ptr, Index>& relation_;
  Layer<Ptr, Index>& layer_;
  std::vector<Chunk> chunks_;
};

}  // namespace

template <typename Ptr, typename Index>
SampleDefect sample_layer(const LayerRequest<Ptr, Index>& request, Layer<Ptr, Index>& layer) {
  return LayerSampler<Ptr, Index>(request, layer).run();
}

template SampleDefect sample_layer(const LayerRequest<int32_t, int32_t>&, Layer<int32_t, int32_t>&);
template SampleDefect sample_layer(const LayerRequest<int64_t, int64_t>&, Layer<int64_t, int64_t>&);
template SampleDefect sample_layer(const LayerRequest<int64_t, int32_t>&, Layer<int64_t, int32_t>&);
template SampleDefect sample_layer(const LayerRequest<int32_t, int64_t>&, Layer<int32_t, int64_t>&);

}  // namespace fastgraph
