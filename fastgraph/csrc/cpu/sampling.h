// What samplers of graphs are given, and what they leave.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>
#include <utility>
#include <vector>

namespace fastgraph {

// Memory that grows, and whose owner may be a tensor in the end.
template <typename T>
class Buffer {
 public:
  Buffer() = default;
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Buffer() { std::free(data_); }

  T* data() const { return data_; }
  int64_t size() const { return size_; }
  T& operator[](int64_t i) const { return data_[i]; }

  void reserve(int64_t capacity) {
    if (capacity > capacity_) reallocate(capacity);
  }
  // Within the capacity; new values are not set.
  void set_size(int64_t size) { size_ = size; }
  void push(T value) { data_[size_++] = value; }
  // Frees what is more than a quarter of what is used.
  void trim() {
    if (capacity_ - size_ > size_ / 4) reallocate(size_);
  }
  T* release() {
    capacity_ = size_ = 0;
    return std::exchange(data_, nullptr);
  }

 private:
  void swap(Buffer& other) {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(capacity_, other.capacity_);
  }
  void reallocate(int64_t capacity) {
    void* data = std::realloc(data_, static_cast<size_t>(capacity > 0 ? capacity : 1) * sizeof(T));
    if (data == nullptr) throw std::bad_alloc();
    data_ = static_cast<T*>(data);
    capacity_ = capacity;
  }

  T* data_ = nullptr;
  int64_t size_ = 0;
  int64_t capacity_ = 0;
};

// One type of edges in compressed columns; edges of destination v are [colptr[v], colptr[v + 1]).
template <typename Ptr, typename Index>
struct Relation {
  const Ptr* colptr;
  const Index* row;
  int64_t num_dst;
  int64_t num_edges;
  int64_t src_type, dst_type;
  const int64_t* node_time;  // of the type of sources, or null
  const int64_t* edge_time;  // or null
  const float* weight;       // at most one of the two
  const double* weight64;

  bool is_temporal() const { return node_time || edge_time; }
  bool is_weighted() const { return weight || weight64; }
  double weight_of(int64_t e) const { return weight ? double{weight[e]} : weight64[e]; }
  int64_t time_of(int64_t e) const { return edge_time ? edge_time[e] : node_time[row[e]]; }
};

template <typename Index>
struct NodeType {
  int64_t num_nodes;  // -1 if it is not known
  const Index* seeds;
  int64_t num_seeds;
  const int64_t* seed_time;  // or null: node_time of the seeds, if that is there
  const int64_t* node_time;
};

template <typename Ptr, typename Index>
struct SampleRequest {
  std::vector<Relation<Ptr, Index>> relations;
  std::vector<NodeType<Index>> types;
  const int64_t* fanouts;  // [hops, relations]
  int64_t num_hops;
  bool replace, directed, disjoint, last;
  uint64_t random_seed;
};

// Why there is no sample.
struct SampleDefect {
  enum Kind {
    kNone,
    kSeed,      // is no node: `which` type, position in its seeds
    kColptr,    // does not run from 0 to the number of edges, or falls: relation, destination
    kRow,       // is no node: relation, edge
    kUnsorted,  // by time: relation, destination
    kWeight,    // negative or not finite: relation, edge
    kTotal,     // of weights is not finite: relation, destination
    kTooLarge,  // a sample of 2^31 nodes or edges
    kEdgeType,  // has no fanout: edge
  } kind = kNone;
  int64_t which = 0;
  int64_t position = 0;
  int64_t value = 0;
  double weight = 0;
};

template <typename Ptr, typename Index>
struct Sample {
  std::vector<Buffer<Index>> node, batch;  // by type
  std::vector<Buffer<Index>> row, col;     // by relation
  std::vector<Buffer<Ptr>> edge;
  std::vector<int64_t> num_nodes;  // [types, hops + 1]
  std::vector<int64_t> num_edges;  // [relations, hops]
};

template <typename Ptr, typename Index>
SampleDefect sample_neighbors(const SampleRequest<Ptr, Index>& request, Sample<Ptr, Index>& sample);

// Types of edges, integers of any size, which ascend among the edges of a node.
struct EdgeTypes {
  const void* memory = nullptr;
  int64_t bytes = 0;

  explicit operator bool() const { return memory != nullptr; }
  int64_t operator[](int64_t e) const {
    switch (bytes) {
      case 1: return static_cast<const uint8_t*>(memory)[e];
      case 2: return static_cast<const int16_t*>(memory)[e];
      case 4: return static_cast<const int32_t*>(memory)[e];
      default: return static_cast<const int64_t*>(memory)[e];
    }
  }
  // Where, from an edge on, the next type begins.
  int64_t end_of_type(int64_t begin, int64_t end) const {
    const int64_t type = (*this)[begin++];
    while (begin < end) {
      const int64_t middle = begin + (end - begin) / 2;
      if ((*this)[middle] > type) {
        end = middle;
      } else {
        begin = middle + 1;
      }
    }
    return begin;
  }
};

template <typename Ptr, typename Index>
struct LayerRequest {
  Relation<Ptr, Index> relation;
  const Index* seeds;
  int64_t num_seeds;
  const int64_t* fanouts;  // of types of edges, or one for all edges
  int64_t num_types;
  EdgeTypes edge_type;  // none if there is one fanout
  bool replace;
  bool by_layer;   // neighbours have one random number for all seeds
  bool ascending;  // edges of a seed and a type ascend
  uint64_t random_seed;
};

// Edges of the i-th seed are [colptr[i], colptr[i + 1]).
template <typename Ptr, typename Index>
struct Layer {
  Buffer<Ptr> colptr, edge;
  Buffer<Index> row;
};

template <typename Ptr, typename Index>
SampleDefect sample_layer(const LayerRequest<Ptr, Index>& request, Layer<Ptr, Index>& layer);

// A graph whose edges of node v are [rowptr[v], rowptr[v + 1]).
template <typename Ptr, typename Index>
struct Adjacency {
  const Ptr* rowptr;
  const Index* col;
  int64_t num_nodes;
  int64_t num_edges;
};

// Of node2vec (Grover and Leskovec, node2vec, KDD 2016).
struct WalkBias {
  double p, q;
  bool is_uniform() const { return p == 1 && q == 1; }
};

// Writes nodes, [walks, length + 1], and edges, [walks, length], -1 where a walk stays, if not
// null.
template <typename Ptr, typename Index>
SampleDefect random_walk(const Adjacency<Ptr, Index>& graph, const Index* seeds, int64_t num_walks,
                         int64_t length, const WalkBias& bias, uint64_t random_seed, Index* nodes,
                         Ptr* edges);

// How often a pair without an edge is looked for.
constexpr int kMostAttempts = 100;

// Writes pairs of one of num_other nodes and a node to which no edge leads to it, or -1 and -1
// where none was found.
template <typename Ptr, typename Index>
SampleDefect draw_negatives(const Adjacency<Ptr, Index>& graph, int64_t num_other, bool loops,
                            int64_t num_pairs, uint64_t random_seed, Index* other, Index* node);

template <typename Index>
struct Values {
  const Index* data;
  int64_t size;
};

// The distinct values in order of their first occurrence, and the position of each value among
// them.
template <typename Index>
SampleDefect unique_and_compact(const std::vector<Values<Index>>& values,
                                const std::vector<Index*>& positions, Buffer<Index>& distinct);

}  // namespace fastgraph
