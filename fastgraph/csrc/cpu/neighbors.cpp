// Neighbour sampling over several hops and types of edges.
//
// In each hop the nodes that the hop before has found are cut into chunks, for one type of edges
// each. Chunks count their edges, so that each knows where its edges go; then they draw them, which
// depends on nothing but the seed and on whose edges they are. Nodes are numbered in the order of
// edges in which they are found first: of few threads one does so while the others draw; many claim
// nodes for edges, of which the first claim is left, and number those whose claims are left.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#include "cpu/draws.h"
#include "cpu/edge_draws.h"
#include "cpu/in_order.h"
#include "cpu/node_numbers.h"
#include "cpu/sample_chunk.h"
#include "cpu/sampling.h"
#include "fastgraph/parallel.h"

namespace fastgraph {
namespace {

// Nodes of a chunk: enough that drawing for them fills vectors, and few enough for threads to
// share.
constexpr int64_t kChunk = 64;
constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
// Graphs with at most so many nodes have an array of them; 32 MiB for each thread.
constexpr int64_t kMostDense = int64_t{1} << 22;
// Elementary operations for an edge that is drawn, and for a node whose edges are counted.
constexpr int64_t kWorkOfEdge = 8;
constexpr int64_t kWorkOfRange = 2;
constexpr int64_t kWorkOfWeights = 64;
// So many threads draw as fast as one numbers what they find: drawing is two thirds of the work of
// one thread, and claims make that of all half as much again.
constexpr int64_t kFewThreads = 4;
// Below so many claims one thread numbers what was found before the others would be awake.
constexpr int64_t kFewClaims = 1 << 13;

template <typename Ptr, typename Index, typename Numbers>
class Sampler {
 public:
  Sampler(const SampleRequest<Ptr, Index>& request, Sample<Ptr, Index>& sample, int64_t num_keys)
      : request_(request), sample_(sample), numbers_(num_keys) {}

  SampleDefect run() {
    prepare();
    if (const SampleDefect defect = take_seeds(); defect.kind) return defect;
    count_nodes(0);
    for (int64_t hop = 0; hop < request_.num_hops; ++hop) {
      if (const SampleDefect defect = take_hop(hop); defect.kind) return defect;
      count_nodes(hop + 1);
    }
    if (!request_.directed) {
      if (const SampleDefect defect = induce(); defect.kind) return defect;
    }
    for (auto& nodes : sample_.node) nodes.trim();
    for (auto& groups : sample_.batch) groups.trim();
    return {};
  }

 private:
  size_t num_types() const { return request_.types.size(); }
  size_t num_relations() const { return request_.relations.size(); }

  void prepare() {
    sample_.node.resize(num_types());
    sample_.batch.resize(num_types());
    sample_.row.resize(num_relations());
    sample_.col.resize(num_relations());
    sample_.edge.resize(num_relations());
    sample_.num_nodes.assign(num_types() * (request_.num_hops + 1), 0);
    sample_.num_edges.assign(num_relations() * request_.num_hops, 0);
    begin_.assign(num_types(), 0);
    end_.assign(num_types(), 0);
    for (const auto& relation : request_.relations) weighs_ = weighs_ || relation.is_weighted();
    int64_t num_groups = 0;
    for (const auto& type : request_.types) num_groups += type.num_seeds;
    // In a table, a key is a group and a type above a node; in an array, nodes of types follow each
    // other.
    const uint64_t num_owners = (request_.disjoint ? std::max<int64_t>(num_groups, 1) : 1) *
                                static_cast<uint64_t>(num_types());
    shift_ = 63;
    while (shift_ > 0 && (num_owners - 1) >> (63 - shift_)) --shift_;
    int64_t offset = 0;
    for (const auto& type : request_.types) {
      offset_.push_back(offset);
      if (kIsDense) offset += type.num_nodes;
      const int64_t most = std::numeric_limits<int64_t>::max() >> (63 - shift_);
      limit_.push_back(type.num_nodes < 0 ? most : std::min(type.num_nodes, most));
    }
  }

  // What is added to a node for its key.
  uint64_t base_of(int64_t type, int64_t group) const {
    if constexpr (kIsDense) return static_cast<uint64_t>(offset_[type]);
    return static_cast<uint64_t>(group * static_cast<int64_t>(num_types()) + type) << shift_;
  }
  // For edges of a chunk's type that lead to a node.
  uint64_t base_of(const SampleChunk& chunk, int64_t position) const {
    const auto& relation = request_.relations[chunk.relation];
    return base_of(relation.src_type, group_of(relation.dst_type, position));
  }
  int64_t group_of(int64_t type, int64_t position) const {
    return request_.disjoint ? static_cast<int64_t>(sample_.batch[type][position]) : 0;
  }

  void count_nodes(int64_t hop) {
    for (size_t t = 0; t < num_types(); ++t) {
      begin_[t] = end_[t];
      end_[t] = sample_.node[t].size();
      sample_.num_nodes[t * (request_.num_hops + 1) + hop] = end_[t] - begin_[t];
    }
  }

  SampleDefect take_seeds() {
    int64_t num_seeds = 0;
    for (const auto& type : request_.types) num_seeds += type.num_seeds;
    if (num_seeds > kMost) return {SampleDefect::kTooLarge, 0, 0, num_seeds, 0};
    numbers_.reserve(num_seeds);
    int64_t group = 0;
    for (size_t t = 0; t < num_types(); ++t) {
      const auto& type = request_.types[t];
      sample_.node[t].reserve(type.num_seeds);
      if (request_.disjoint) sample_.batch[t].reserve(type.num_seeds);
      for (int64_t i = 0; i < type.num_seeds; ++i, ++group) {
        const int64_t node = type.seeds[i];
        if (static_cast<uint64_t>(node) >= static_cast<uint64_t>(limit_[t])) {
          return {SampleDefect::kSeed, static_cast<int64_t>(t), i, node, 0};
        }
        offer(numbers_.entry(base_of(t, request_.disjoint ? group : 0) + node),
              numbers_.stamp() | static_cast<uint64_t>(i));
        sample_.node[t].push(static_cast<Index>(node));
        if (request_.disjoint) sample_.batch[t].push(static_cast<Index>(group));
        if (type.seed_time) {
          seed_time_.push_back(type.seed_time[i]);
        } else if (type.node_time) {
          seed_time_.push_back(type.node_time[node]);
        }
      }
    }
    return {};
  }

  // Which edges of a node may be drawn, as far as times go.
  SampleDefect find_range(const Relation<Ptr, Index>& relation, int64_t position, int64_t fanout,
                          EdgeRange& range) const {
    const int64_t node = sample_.node[relation.dst_type][position];
    const int64_t begin = relation.colptr[node];
    int64_t end = relation.colptr[node + 1];
    if (begin < 0 || end < begin || end > relation.num_edges) {
      return {SampleDefect::kColptr, 0, node, end, 0};
    }
    range = {begin, end - begin, 0};
    if (!relation.is_temporal() || begin == end) return {};
    const int64_t until = seed_time_[group_of(relation.dst_type, position)];
    const int64_t limit = limit_[relation.src_type];
    int64_t low = begin;
    while (low < end) {  // the first edge that is later
      const int64_t middle = low + (end - low) / 2;
      if (const SampleDefect defect = check_row(relation, middle, limit); defect.kind)
        return defect;
      if (relation.time_of(middle) > until) {
        end = middle;
      } else {
        low = middle + 1;
      }
    }
    range.population = end - begin;
    if (request_.last && fanout >= 0 && range.population > fanout) {
      range = {end - fanout, fanout, 0};
    }
    return {};
  }

  static SampleDefect check_row(const Relation<Ptr, Index>& relation, int64_t e, int64_t limit) {
    const int64_t node = relation.row[e];
    if (static_cast<uint64_t>(node) < static_cast<uint64_t>(limit)) return {};
    return {SampleDefect::kRow, 0, e, node, 0};
  }

  static bool takes_all(EdgeRange range, int64_t fanout, bool replace) {
    return fanout < 0 || (!replace && fanout >= range.population);
  }

  // The ranges of a chunk's nodes and the number of its edges.
  void count(SampleChunk& chunk) {
    const auto& relation = request_.relations[chunk.relation];
    EdgeRange* range = ranges_.data() + chunk.range;
    for (int64_t position = chunk.first; position < chunk.last; ++position, ++range) {
      chunk.defect = find_range(relation, position, chunk.fanout, *range);
      if (chunk.defect.kind) return;
      if (takes_all(*range, chunk.fanout, request_.replace)) {
        range->count = range->population;
      } else if (relation.is_weighted()) {
        chunk.defect = count_weighted(relation, chunk.fanout, request_.replace, *range);
        if (chunk.defect.kind == SampleDefect::kTotal) {
          chunk.defect.position = sample_.node[relation.dst_type][position];
        }
        if (chunk.defect.kind) return;
      } else {
        range->count = range->population ? chunk.fanout : 0;
      }
      chunk.num_edges += range->count;
    }
  }

  // Writes which edges these are.
  void choose(const SampleChunk& chunk, Ptr* out) const {
    const auto& relation = request_.relations[chunk.relation];
    const EdgeRange* ranges = ranges_.data() + chunk.range;
    const int64_t fanout = chunk.fanout;
    const auto stream = static_cast<uint32_t>(chunk.relation);
    FewDraws<Ptr> few[kChunk];
    int64_t num_few = 0;
    for (int64_t position = chunk.first; position < chunk.last; ++position) {
      const EdgeRange range = ranges[position - chunk.first];
      if (range.count == 0) continue;
      const Draws draws(request_.random_seed, static_cast<uint32_t>(position), stream);
      if (takes_all(range, fanout, request_.replace)) {
        for (int64_t d = 0; d < range.count; ++d) out[d] = static_cast<Ptr>(range.begin + d);
      } else if (relation.is_weighted()) {
        if (request_.replace) {
          draw_by_weight(relation, draws, range, out);
        } else {
          draw_distinct_by_weight(relation, draws, range, out);
        }
      } else if (fanout <= kFewDraws && range.population <= kFewChoices) {
        few[num_few++] = {static_cast<uint32_t>(position), static_cast<uint32_t>(range.population),
                          range.begin, out};
      } else if (request_.replace) {
        draw_with_replacement(draws, range, out);
      } else {
        draw_distinct(draws, range, out);
      }
      out += range.count;
    }
    draw_few(few, num_few, fanout, request_.replace, request_.random_seed, stream, relation.row);
  }

  // Writes a chunk's edges: `row` has the nodes themselves for now.
  void draw(SampleChunk& chunk) {
    const auto& relation = request_.relations[chunk.relation];
    Ptr* const edge = sample_.edge[chunk.relation].data() + chunk.place;
    Index* const row = sample_.row[chunk.relation].data() + chunk.place;
    Index* col = sample_.col[chunk.relation].data() + chunk.place;
    choose(chunk, edge);
    const EdgeRange* range = ranges_.data() + chunk.range;
    for (int64_t position = chunk.first; position < chunk.last; ++position, ++range) {
      col = std::fill_n(col, range->count, static_cast<Index>(position));
    }
    const auto limit = static_cast<uint64_t>(limit_[relation.src_type]);
    bool good = true;
    for (int64_t i = 0; i < chunk.num_edges; ++i) {
      const Index node = relation.row[edge[i]];
      good &= static_cast<uint64_t>(static_cast<int64_t>(node)) < limit;
      row[i] = node;
    }
    for (int64_t i = 0; !good && i < chunk.num_edges && !chunk.defect.kind; ++i) {
      chunk.defect = check_row(relation, edge[i], static_cast<int64_t>(limit));
    }
    if (relation.is_temporal() && !chunk.defect.kind) check_times(chunk, edge);
  }

  void check_times(SampleChunk& chunk, const Ptr* edge) const {
    const auto& relation = request_.relations[chunk.relation];
    const EdgeRange* range = ranges_.data() + chunk.range;
    for (int64_t position = chunk.first; position < chunk.last; ++position, ++range) {
      const int64_t until = seed_time_[group_of(relation.dst_type, position)];
      for (int64_t d = 0; d < range->count; ++d) {
        if (relation.time_of(*edge++) > until) {
          chunk.defect = {SampleDefect::kUnsorted, 0, sample_.node[relation.dst_type][position], 0,
                          0};
          return;
        }
      }
    }
  }

  // Numbers the nodes that a chunk has found, after all chunks before it.
  void number_at_once(const SampleChunk& chunk) {
    const auto& relation = request_.relations[chunk.relation];
    Index* const node = sample_.node[relation.src_type].data();
    Index* const group = sample_.batch[relation.src_type].data();  // null if there are none
    int64_t size = sample_.node[relation.src_type].size();
    Index* row = sample_.row[chunk.relation].data() + chunk.place;
    const EdgeRange* range = ranges_.data() + chunk.range;
    const uint64_t stamp = numbers_.stamp();
    for (int64_t position = chunk.first; position < chunk.last; ++position, ++range) {
      const uint64_t base = base_of(chunk, position);
      const auto of_group = static_cast<Index>(group_of(relation.dst_type, position));
      for (const Index* const end = row + range->count; row < end; ++row) {
        uint64_t* const entry = numbers_.entry(base + static_cast<uint64_t>(*row));
        // Without a branch, which would be as hard to foresee as the sample.
        const uint64_t there = *entry, next = stamp | static_cast<uint64_t>(size);
        const bool is_new = there >= (stamp | kClaim);
        const uint64_t number = is_new ? next : there;
        *entry = number;
        node[size] = *row;
        if (group) group[size] = of_group;
        size += is_new;
        *row = static_cast<Index>(number & (kClaim - 1));
      }
    }
    sample_.node[relation.src_type].set_size(size);
    if (group) sample_.batch[relation.src_type].set_size(size);
  }

  uint64_t key_of(const SampleChunk& chunk, int64_t i) const {
    const int64_t place = chunk.place + i;
    return base_of(chunk, sample_.col[chunk.relation][place]) +
           static_cast<uint64_t>(sample_.row[chunk.relation][place]);
  }

  // Claims the nodes of a chunk's edges, and notes where that had success.
  void claim(SampleChunk& chunk) {
    int32_t* const found = found_.data() + chunk.slot;
    for (int64_t i = 0; i < chunk.num_edges; ++i) {
      const uint64_t claim = numbers_.stamp() | kClaim | static_cast<uint64_t>(chunk.slot + i);
      if (offer(numbers_.entry(key_of(chunk, i)), claim)) {
        found[chunk.num_found++] = static_cast<int32_t>(i);
      }
    }
  }

  // Leaves the claims that no earlier edge has displaced.
  void settle(SampleChunk& chunk) {
    int32_t* const found = found_.data() + chunk.slot;
    int64_t num_left = 0;
    for (int64_t j = 0; j < chunk.num_found; ++j) {
      const int64_t i = found[j];
      const uint64_t claim = numbers_.stamp() | kClaim | static_cast<uint64_t>(chunk.slot + i);
      if (load_entry(numbers_.entry(key_of(chunk, i))) == claim) found[num_left++] = found[j];
    }
    chunk.num_found = num_left;
  }

  void number_found(const SampleChunk& chunk) {
    const auto& relation = request_.relations[chunk.relation];
    const int32_t* const found = found_.data() + chunk.slot;
    for (int64_t j = 0; j < chunk.num_found; ++j) {
      const int64_t place = chunk.place + found[j], number = chunk.number + j;
      store_entry(numbers_.entry(key_of(chunk, found[j])),
                  numbers_.stamp() | static_cast<uint64_t>(number));
      sample_.node[relation.src_type][number] = sample_.row[chunk.relation][place];
      if (request_.disjoint) {
        sample_.batch[relation.src_type][number] =
            sample_.batch[relation.dst_type][sample_.col[chunk.relation][place]];
      }
    }
  }

  void rename(const SampleChunk& chunk) {
    Index* const row = sample_.row[chunk.relation].data() + chunk.place;
    for (int64_t i = 0; i < chunk.num_edges; ++i) {
      row[i] = static_cast<Index>(*numbers_.entry(key_of(chunk, i)) & (kClaim - 1));
    }
  }

  // Cuts the nodes of a hop, counts their edges and says where these go.
  SampleDefect plan_hop(int64_t hop) {
    chunks_.clear();
    int64_t num_ranges = 0;
    for (size_t r = 0; r < num_relations(); ++r) {
      const int64_t fanout = request_.fanouts[hop * num_relations() + r];
      const int64_t type = request_.relations[r].dst_type;
      if (fanout == 0) continue;
      for (int64_t first = begin_[type]; first < end_[type]; first += kChunk) {
        const int64_t last = std::min(first + kChunk, end_[type]);
        SampleChunk chunk{};
        chunk.relation = static_cast<int64_t>(r);
        chunk.first = first;
        chunk.last = last;
        chunk.range = num_ranges;
        chunk.fanout = fanout;
        chunks_.push_back(chunk);
        num_ranges += last - first;
      }
    }
    ranges_.resize(num_ranges);
    for_each_chunk(num_ranges * (weighs_ ? kWorkOfWeights : kWorkOfRange),
                   [&](SampleChunk& chunk) { count(chunk); });
    if (const SampleDefect defect = first_defect(); defect.kind) return defect;
    int64_t slot = 0;
    std::vector<int64_t> most_new(num_types(), 0);
    for (SampleChunk& chunk : chunks_) {
      int64_t& edges = sample_.num_edges[chunk.relation * request_.num_hops + hop];
      chunk.slot = slot;
      chunk.place = sample_.edge[chunk.relation].size() + edges;
      edges += chunk.num_edges;
      slot += chunk.num_edges;
      most_new[request_.relations[chunk.relation].src_type] += chunk.num_edges;
    }
    num_slots_ = slot;
    int64_t num_keys = slot;
    for (size_t t = 0; t < num_types(); ++t) {
      const int64_t size = sample_.node[t].size() + most_new[t];
      num_keys += sample_.node[t].size();
      if (size > kMost || slot > kMost) return {SampleDefect::kTooLarge, 0, 0, slot, 0};
      // One more is written beside each node that is known.
      sample_.node[t].reserve(size + 1);
      if (request_.disjoint) sample_.batch[t].reserve(size + 1);
    }
    for (size_t r = 0; r < num_relations(); ++r) {
      const int64_t before = sample_.edge[r].size();
      const int64_t size = before + sample_.num_edges[r * request_.num_hops + hop];
      if (size > kMost) return {SampleDefect::kTooLarge, 0, 0, size, 0};
      set_num_edges(r, size);
    }
    numbers_.reserve(num_keys);
    return {};
  }

  void set_num_edges(size_t r, int64_t size) {
    sample_.row[r].reserve(size);
    sample_.col[r].reserve(size);
    sample_.edge[r].reserve(size);
    sample_.row[r].set_size(size);
    sample_.col[r].set_size(size);
    sample_.edge[r].set_size(size);
  }

  SampleDefect take_hop(int64_t hop) {
    if (const SampleDefect defect = plan_hop(hop); defect.kind) return defect;
    const bool shared =
        max_threads() > 1 && chunks_.size() > 1 && num_slots_ * kWorkOfEdge >= kParallelThreshold;
    if (!shared) {
      for (SampleChunk& chunk : chunks_) {
        draw(chunk);
        if (chunk.defect.kind) return first_defect();
        number_at_once(chunk);
      }
      return {};
    }
    return max_threads() <= kFewThreads ? draw_while_numbering() : claim_and_number();
  }

  // One thread at a time numbers what was drawn, as far as nothing before it is missing.
  SampleDefect draw_while_numbering() {
    for_each_then_in_order(
        static_cast<int64_t>(chunks_.size()), num_slots_ * kWorkOfEdge,
        [&](int64_t i) {
          draw(chunks_[i]);
          return !chunks_[i].defect.kind;
        },
        [&](int64_t i) { number_at_once(chunks_[i]); });
    return first_defect();
  }

  SampleDefect claim_and_number() {
    found_.resize(num_slots_);
    for_each_chunk(num_slots_ * kWorkOfEdge, [&](SampleChunk& chunk) {
      draw(chunk);
      if (!chunk.defect.kind) claim(chunk);
    });
    if (const SampleDefect defect = first_defect(); defect.kind) return defect;
    int64_t num_claims = 0;
    for (const SampleChunk& chunk : chunks_) num_claims += chunk.num_found;
    const int64_t work = num_claims < kFewClaims ? 0 : num_claims * kWorkOfEdge;
    for_each_chunk(work, [&](SampleChunk& chunk) { settle(chunk); });
    for (SampleChunk& chunk : chunks_) {
      const int64_t type = request_.relations[chunk.relation].src_type;
      chunk.number = sample_.node[type].size();
      sample_.node[type].set_size(chunk.number + chunk.num_found);
      if (request_.disjoint) sample_.batch[type].set_size(chunk.number + chunk.num_found);
    }
    for_each_chunk(work, [&](SampleChunk& chunk) { number_found(chunk); });
    for_each_chunk(num_slots_ * kWorkOfEdge, [&](SampleChunk& chunk) { rename(chunk); });
    return {};
  }

  // Calls body(position of the destination, edge, number of its source) for a chunk's edges between
  // nodes of the sample.
  template <typename Body>
  void for_each_induced(SampleChunk& chunk, const Body& body) {
    const auto& relation = request_.relations[chunk.relation];
    const int64_t limit = limit_[relation.src_type];
    for (int64_t position = chunk.first; position < chunk.last; ++position) {
      EdgeRange range;
      chunk.defect = find_range(relation, position, -1, range);
      if (chunk.defect.kind) return;
      const uint64_t base = base_of(chunk, position), stamp = numbers_.stamp();
      const bool temporal = relation.is_temporal();
      const int64_t until = temporal ? seed_time_[group_of(relation.dst_type, position)] : 0;
      for (int64_t e = range.begin; e < range.begin + range.population; ++e) {
        chunk.defect = check_row(relation, e, limit);
        if (chunk.defect.kind) return;
        if (temporal && relation.time_of(e) > until) {
          chunk.defect = {SampleDefect::kUnsorted, 0, sample_.node[relation.dst_type][position], 0,
                          0};
          return;
        }
        const uint64_t* entry = numbers_.find(base + static_cast<uint64_t>(relation.row[e]));
        if (entry && *entry < (stamp | kClaim)) body(position, e, *entry & (kClaim - 1));
      }
    }
  }

  // All edges between the nodes of the sample in place of those that were drawn.
  SampleDefect induce() {
    chunks_.clear();
    int64_t num_nodes = 0;
    for (size_t r = 0; r < num_relations(); ++r) {
      const int64_t size = sample_.node[request_.relations[r].dst_type].size();
      for (int64_t first = 0; first < size; first += kChunk) {
        SampleChunk chunk{};
        chunk.relation = static_cast<int64_t>(r);
        chunk.first = first;
        chunk.last = std::min(first + kChunk, size);
        chunks_.push_back(chunk);
      }
      num_nodes += size;
    }
    const int64_t work = num_nodes * kWorkOfEdge;
    for_each_chunk(work, [&](SampleChunk& chunk) {
      for_each_induced(chunk, [&](int64_t, int64_t, uint64_t) { ++chunk.num_edges; });
    });
    if (const SampleDefect defect = first_defect(); defect.kind) return defect;
    std::vector<int64_t> size(num_relations(), 0);
    for (SampleChunk& chunk : chunks_) {
      chunk.place = size[chunk.relation];
      size[chunk.relation] += chunk.num_edges;
    }
    for (size_t r = 0; r < num_relations(); ++r) {
      if (size[r] > kMost) return {SampleDefect::kTooLarge, 0, 0, size[r], 0};
      set_num_edges(r, size[r]);
    }
    for_each_chunk(work, [&](SampleChunk& chunk) {
      int64_t place = chunk.place;
      for_each_induced(chunk, [&](int64_t position, int64_t e, uint64_t number) {
        sample_.row[chunk.relation][place] = static_cast<Index>(number);
        sample_.col[chunk.relation][place] = static_cast<Index>(position);
        sample_.edge[chunk.relation][place++] = static_cast<Ptr>(e);
      });
    });
    return {};
  }

  template <typename Body>
  void for_each_chunk(int64_t work, const Body& body) {
    for_each_task(static_cast<int64_t>(chunks_.size()), work, [&](int64_t i) { body(chunks_[i]); });
  }

  SampleDefect first_defect() const {
    for (const SampleChunk& chunk : chunks_) {
      if (chunk.defect.kind) {
        SampleDefect defect = chunk.defect;
        defect.which = chunk.relation;
        return defect;
      }
    }
    return {};
  }

  static constexpr bool kIsDense = std::is_same_v<Numbers, DenseNumbers>;

  const SampleRequest<Ptr, Index>& request_;
  Sample<Ptr, Index>& sample_;
  Numbers numbers_;
  int shift_ = 63;
  std::vector<int64_t> offset_, limit_;  // of types
  std::vector<int64_t> begin_, end_;     // of the nodes that the last hop has found
  std::vector<int64_t> seed_time_;       // by group
  std::vector<SampleChunk> chunks_;
  std::vector<EdgeRange> ranges_;
  bool weighs_ = false;
  std::vector<int32_t> found_;  // edges within their chunk, from its slot on
  int64_t num_slots_ = 0;
};

}  // namespace

template <typename Ptr, typename Index>
SampleDefect sample_neighbors(const SampleRequest<Ptr, Index>& request,
                              Sample<Ptr, Index>& sample) {
  int64_t num_keys = 0;
  for (const auto& type : request.types) {
    const bool is_few = type.num_nodes >= 0 && type.num_nodes <= kMostDense - num_keys;
    num_keys = is_few ? num_keys + type.num_nodes : kMostDense + 1;
    if (!is_few) break;
  }
  if (request.disjoint || num_keys > kMostDense) {
    return Sampler<Ptr, Index, HashedNumbers>(request, sample, num_keys).run();
  }
  return Sampler<Ptr, Index, DenseNumbers>(request, sample, num_keys).run();
}

template SampleDefect sample_neighbors(const SampleRequest<int32_t, int32_t>&,
                                       Sample<int32_t, int32_t>&);
template SampleDefect sample_neighbors(const SampleRequest<int64_t, int64_t>&,
                                       Sample<int64_t, int64_t>&);
template SampleDefect sample_neighbors(const SampleRequest<int64_t, int32_t>&,
                                       Sample<int64_t, int32_t>&);
template SampleDefect sample_neighbors(const SampleRequest<int32_t, int64_t>&,
                                       Sample<int32_t, int64_t>&);

}  // namespace fastgraph
