// Attention of all queries of a graph to all its keys. Blocks of scores are products of matrices in
// working memory, and never leave it; the backward pass makes them again, once.
#include "cpu/dense_attention.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "cpu/block_products.h"
#include "cpu/kernels.h"
#include "cpu/pair_bias.h"
#include "fastgraph/dot.h"
#include "fastgraph/dropout.h"
#include "fastgraph/exponential.h"
#include "fastgraph/memory.h"
#include "fastgraph/parallel.h"

namespace fastgraph {
namespace {

// The most queries and keys of a block of scores, which the cache of a core holds.
constexpr int64_t kQueries = 48;
constexpr int64_t kKeys = kMostKeysOfBlock;

// A backward pass cuts the keys of a graph into so many parts at most, of at least so many. Each
// part leaves a gradient of all queries, of which the sum is taken in their order.
constexpr int64_t kMostParts = 8;
constexpr int64_t kKeysOfPart = 256;

// Units are computed by threads in groups of about equal work, of which there are about so many.
constexpr int64_t kGroups = 64;
constexpr int64_t kLeastPairs = 1024;

// Queries of a graph, forward, or a part of its keys, backward.
struct Unit {
  int64_t graph;
  int64_t begin;
  int64_t end;
  int64_t part;  // where the part's gradient of queries goes; -1 if it is the only one
  int64_t pairs;
};

// A graph whose keys are cut into several parts, and where the first of their gradients is.
struct CutGraph {
  int64_t begin;  // of its queries
  int64_t end;
  int64_t first_row;
  int64_t parts;
};

struct Plan {
  std::vector<Unit> units;
  std::vector<int64_t> groups{0};   // where each begins, and the end of the last
  std::vector<int64_t> first_pair;  // the number of the first pair of each graph
  int64_t pairs = 0;
  int64_t most_queries = 0;  // of a graph
  int64_t most_keys = 0;

  int64_t num_groups() const { return static_cast<int64_t>(groups.size()) - 1; }
};

// `cut(graph, queries, keys, pairs)` adds the units of a graph; groups have `least` pairs and more.
template <typename T, typename Cut>
Plan plan_of(const DenseAttentionInputs<T>& in, int64_t least, const Cut& cut) {
  Plan plan;
  plan.first_pair.reserve(in.graphs);
  plan.units.reserve(in.graphs);
  for (int64_t g = 0; g < in.graphs; ++g) {
    const int64_t queries = in.ptr[g + 1] - in.ptr[g], keys = in.key_ptr[g + 1] - in.key_ptr[g];
    plan.first_pair.push_back(plan.pairs);
    plan.pairs += queries * keys;
    plan.most_queries = std::max(plan.most_queries, queries);
    plan.most_keys = std::max(plan.most_keys, keys);
    cut(plan, g, queries, keys);
  }
  const int64_t limit = std::max(least, plan.pairs / kGroups);
  int64_t pairs = 0;
  for (size_t i = 0; i < plan.units.size(); ++i) {
    if (pairs > 0 && pairs + plan.units[i].pairs > limit) {
      plan.groups.push_back(static_cast<int64_t>(i));
      pairs = 0;
    }
    pairs += plan.units[i].pairs + 1;
  }
  if (!plan.units.empty()) plan.groups.push_back(static_cast<int64_t>(plan.units.size()));
  return plan;
}

// Computes the units of all groups in the working memory of each.
template <typename A, typename Pass>
void run_plan(const Plan& plan, int64_t work_of_pair, const Pass& pass) {
  const typename Pass::Memory at(plan, pass);
  for_each_task(plan.num_groups(), plan.pairs * work_of_pair, [&](int64_t group) {
    const auto memory = scratch<A>(at.size);
    pass.begin_group(at, memory.get());
    for (int64_t i = plan.groups[group]; i < plan.groups[group + 1]; ++i) {
      for (int64_t head = 0; head < pass.in.query.heads; head += at.heads) {
        pass(plan, plan.units[i], head, at, memory.get());
      }
    }
    pass.end_group(group, at, memory.get());
  });
}

// The factors of dropout: those of ops.attention, by the numbers of pair and head.
template <typename A>
class Kept {
 public:
  static constexpr int N = kLanes<A>;

  Kept(const Dropout& dropout, int64_t first_head, int64_t first_pair)
      : seed_(dropout.seed),
        first_head_(static_cast<uint64_t>(first_head)),
        first_pair_(static_cast<uint64_t>(first_pair)),
        factors_(dropout.rate),
        drops_(dropout.rate > 0) {}

  bool drops() const { return drops_; }

  // Of N pairs from this one on, the upper half of whose number is a counter of its own.
  FASTGRAPH_INLINE Vector<A, N> factors(int64_t pair, int64_t head) const {
    constexpr int kHalf = kVectorBytes / 8;
    using W = Vector<uint64_t, kHalf>;
    uint32_t bits[N];
    const uint64_t own = first_head_ + static_cast<uint64_t>(head);
#pragma GCC unroll 2
    for (int first = 0; first < N; first += kHalf) {
      const uint64_t number = first_pair_ + static_cast<uint64_t>(pair + first);
      const W numbers = lane_numbers<uint64_t, kHalf>() + number;
      const W four = splat<uint64_t, kHalf>(own / 4);
      W words[4] = {numbers, four, numbers >> 32, W{}};
      philox_blocks<kHalf>(seed_, words);
      const auto chosen = __builtin_convertvector(words[own % 4], Vector<uint32_t, kHalf>);
      store_raw<kHalf>(bits + first, chosen);
    }
    return factors_.template of<N>(load_raw<N>(bits));
  }

 private:
  uint64_t seed_;
  uint64_t first_head_;
  uint64_t first_pair_;
  KeptFactors<A> factors_;
  bool drops_;
};

// The products of queries and keys of the h-th of some heads, added to their biases.
template <typename T, typename A>
FASTGRAPH_INLINE void score_pairs(const PairBias<T>& bias, const PairBlock& block, int64_t h,
                                  int64_t channels, Block<A> query, Block<A> key, Block<A> score) {
  const LeftFactor<A> left{query.data, query.row, 1};
  const Block<const A> right{key.data, key.row};
  if (bias.given()) {
    if (!bias.is_of_pairs()) bias.look_up(block, h, score.data);
    multiply<true, A>(block.queries, block.wide, channels, left, right, score);
  } else {
    multiply<false, A>(block.queries, block.wide, channels, left, right, score);
  }
}

// Its parts are inlined by force: compilers leave calls, as the products have several callers, and
// small graphs have little else to do.
template <typename T>
struct Forward {
  using A = Accumulator<T>;
  static constexpr int N = kLanes<T>;
  using V = Vector<A, N>;
  static constexpr A kLowest = -std::numeric_limits<A>::infinity();

  const DenseAttentionInputs<T>& in;
  A scale;
  Kept<A> kept;
  Heads<T> out;
  SoftmaxStats<A> stats;
  const PairBias<T>& bias;

  // Working memory for units of a plan, where blocks of scores and what is known of softmax are of
  // several heads.
  struct Memory {
    int64_t heads, width, queries, keys;  // of a row and of a block, padded
    int64_t query, key, value, score, sum, largest, total, size;
    int64_t of_score;  // blocks of scores of heads are so far apart: one may serve all of them

    Memory(const Plan& plan, const Forward& pass)
        : heads(pass.bias.heads_together()),
          width(padded<A>(pass.in.query.width)),
          queries(padded<A>(std::min(plan.most_queries, kQueries))),
          keys(padded<A>(std::min(plan.most_keys, kKeys))) {
      const int64_t channels = pass.in.query.width;
      int64_t end = 0;
      const auto take = [&](int64_t values) { return std::exchange(end, end + values); };
      query = take(heads * queries * width);
      key = take(channels * keys);
      value = take(keys * width);
      of_score = pass.bias.is_of_pairs() ? queries * keys : 0;
      score = take(of_score > 0 ? heads * of_score : queries * keys);
      sum = take(heads * queries * width);
      largest = take(heads * queries);
      total = take(heads * queries);
      size = end;
    }
  };

  // Makes weights of a row of scores, relative to the largest so far, to which `sum` and `total`
  // are brought as well.
  FASTGRAPH_INLINE void weigh(A* score, int64_t keys, int64_t pair, int64_t head, A& largest,
                              A& total, A* sum, int64_t width) const {
    const int64_t end = padded<A>(keys);
    const V last = load<N>(score + end - N);
    const V is_key = lane_numbers<A, N>();
    const auto used = is_key < splat<A, N>(static_cast<A>(keys - (end - N)));
    store<N>(score + end - N, used ? last : splat<A, N>(kLowest));
    V top = splat<A, N>(kLowest);
    for (int64_t j = 0; j < end; j += N) top = larger<A, N>(load<N>(score + j), top);
    const A found = std::max(largest, max_of<A, N>(top));  // passes over NaN, which the sum will be
    const A origin = found == kLowest ? A{0} : found;
    if (largest != kLowest && largest != found) {
      const A shrunk = exp_of_negative<1>(Vector<A, 1>{largest - origin})[0];
      total *= shrunk;
      for (int64_t c = 0; c < width; c += N) store<N>(sum + c, shrunk * load<N>(sum + c));
    }
    largest = found;
    V added{};
    for (int64_t j = 0; j < end; j += N) {
      const V weight = exp_of_negative<N>(load<N>(score + j) - origin);
      added += weight;
      store<N>(score + j, kept.drops() ? weight * kept.factors(pair + j, head) : weight);
    }
    total += sum_of<A, N>(added);
  }

  void begin_group(const Memory&, A*) const {}
  void end_group(int64_t, const Memory&, const A*) const {}

  void operator()(const Plan& plan, const Unit& unit, int64_t head, const Memory& at,
                  A* memory) const {
    const int64_t heads = std::min(at.heads, in.query.heads - head);
    const int64_t row = in.query.heads * in.query.width, channels = in.query.width;
    const int64_t count = unit.end - unit.begin;
    const int64_t key_begin = in.key_ptr[unit.graph], key_end = in.key_ptr[unit.graph + 1];
    for (int64_t h = 0; h < heads; ++h) {
      const Block<A> query{memory + at.query + h * at.queries * at.width, at.width};
      copy_rows<T>(in.query.at(unit.begin, head + h), row, count, channels, scale, query);
      std::fill_n(memory + at.sum + h * at.queries * at.width, count * at.width, A{0});
      std::fill_n(memory + at.largest + h * at.queries, count, kLowest);
      std::fill_n(memory + at.total + h * at.queries, count, A{0});
    }
    for (int64_t first = key_begin; first < key_end; first += kKeys) {
      const int64_t keys = std::min(kKeys, key_end - first), wide = padded<A>(keys);
      const int64_t pair = plan.first_pair[unit.graph] + first - key_begin +
                           (unit.begin - in.ptr[unit.graph]) * (key_end - key_begin);
      const PairBlock block{pair, key_end - key_begin, count, keys, wide, head, heads};
      if (bias.is_of_pairs()) bias.copy(block, memory + at.score, at.of_score);
      for (int64_t h = 0; h < heads; ++h) attend(block, h, first, at, memory);
    }
    for (int64_t h = 0; h < heads; ++h) {
      write(unit, head + h, memory + at.sum + h * at.queries * at.width,
            memory + at.largest + h * at.queries, memory + at.total + h * at.queries, at.width);
    }
  }

  // What a block of keys from this one on adds to the output of a head, of several.
  FASTGRAPH_INLINE void attend(const PairBlock& block, int64_t h, int64_t first, const Memory& at,
                               A* memory) const {
    const int64_t row = in.query.heads * in.query.width, channels = in.query.width;
    const int64_t head = block.head + h, count = block.queries, keys = block.keys;
    const Block<A> query{memory + at.query + h * at.queries * at.width, at.width};
    const Block<A> sum{memory + at.sum + h * at.queries * at.width, at.width};
    const Block<A> key{memory + at.key, block.wide}, value{memory + at.value, at.width};
    const Block<A> score{memory + at.score + h * at.of_score, block.wide};
    A* const largest = memory + at.largest + h * at.queries;
    A* const total = memory + at.total + h * at.queries;
    copy_transposed<T>(in.key.at(first, head), row, keys, channels, key);
    copy_rows<T>(in.value.at(first, head), row, keys, channels, A{1}, value);
    score_pairs(bias, block, h, channels, query, key, score);
    for (int64_t i = 0; i < count; ++i) {
      weigh(score.data + i * score.row, keys, block.first + i * block.row, head, largest[i],
            total[i], sum.data + i * sum.row, at.width);
    }
    multiply<true, A>(count, at.width, keys, {score.data, score.row, 1}, {value.data, value.row},
                      sum);
  }

  FASTGRAPH_INLINE void write(const Unit& unit, int64_t head, const A* sum, const A* largest,
                              const A* total, int64_t width) const {
    const bool has_keys = in.key_ptr[unit.graph] < in.key_ptr[unit.graph + 1];
    for (int64_t i = 0; i < unit.end - unit.begin; ++i) {
      // A bias may leave a query no key, as torch's scaled_dot_product_attention has it.
      const bool is_empty = !has_keys || (bias.given() && total[i] == 0);
      const A inverse = is_empty ? A{0} : 1 / total[i];
      A* const found = stats.at(unit.begin + i, head);
      found[0] = largest[i] == kLowest ? A{0} : largest[i];
      found[1] = inverse;
      T* const target = out.at(unit.begin + i, head);
      for_each_part<N, 1>(0, in.query.width, [&](auto chunk, int64_t c) {
        constexpr int kLane = decltype(chunk)::kLanes;
        store<kLane>(target + c, inverse * load<kLane>(sum + i * width + c));
      });
    }
  }
};

template <typename T>
struct Backward {
  using A = Accumulator<T>;
  static constexpr int N = kLanes<T>;
  using V = Vector<A, N>;

  const DenseAttentionInputs<T>& in;
  A scale;
  Kept<A> kept;
  Heads<const T> out;
  SoftmaxGradients<T> given;
  Heads<T> grad_query, grad_key, grad_value;
  const PairBiasGradient<T>& grad_bias;
  A* parts;  // gradients of queries, [rows of all parts, heads, padded width]
  const PairBias<T>& bias;

  // What there is of each of several heads is `of_head` values apart, scores and their gradients
  // `of_weight` and `of_product`: one block may serve all of them.
  struct Memory {
    int64_t heads, width, queries, keys;
    int64_t query, grad, key_rows, key, value, weight, product, of_key, of_value, of_query, of_bias,
        size;
    int64_t of_head, of_weight, of_product;

    Memory(const Plan& plan, const Backward& pass)
        : heads(pass.bias.heads_together()),
          width(padded<A>(pass.in.query.width)),
          queries(padded<A>(std::min(plan.most_queries, kQueries))),
          keys(padded<A>(std::min(plan.most_keys, kKeys))) {
      const int64_t channels = pass.in.query.width;
      int64_t end = 0;
      const auto take = [&](int64_t values) { return std::exchange(end, end + values); };
      key_rows = take(keys * width);
      key = take(channels * keys);
      value = take(channels * keys);
      of_key = take(keys * width);
      of_value = take(keys * width);
      of_query = take(plan.most_queries * width);
      of_head = end;
      end *= heads;
      of_weight = pass.bias.is_of_pairs() ? queries * keys : 0;
      weight = take(of_weight > 0 ? heads * of_weight : queries * keys);
      of_product = pass.grad_bias.is_wanted() ? queries * keys : 0;
      product = take((of_product > 0 ? heads * of_product : queries * keys) + kHeadsOfVector);
      query = take(queries * width);
      grad = take(queries * width);
      of_bias = take(pass.grad_bias.size());
      size = end;
    }
  };

  // Makes weights with dropout of a row of scores, and the gradients of these scores of products.
  void differentiate(A* score, A* product, int64_t end, int64_t row, int64_t pair,
                     int64_t head) const {
    const A* const known = given.stats.at(row, head);
    const A delta =
        dot(given.grad.at(row, head), out.at(row, head), out.width) - given.of_logsum(row, head);
    for (int64_t j = 0; j < end; j += N) {
      const V weight = known[1] * exp_of_negative<N>(load<N>(score + j) - known[0]);
      V of_weight = load<N>(product + j), left = weight;
      if (kept.drops()) {
        const V factor = kept.factors(pair + j, head);
        of_weight *= factor;
        left *= factor;
      }
      store<N>(score + j, left);
      store<N>(product + j, weight * (of_weight - delta));
    }
  }

  void begin_group(const Memory& at, A* memory) const {
    grad_bias.begin_group(memory + at.of_bias);
  }
  void end_group(int64_t group, const Memory& at, const A* memory) const {
    grad_bias.end_group(group, memory + at.of_bias);
  }

  // The gradients of a unit's keys and values, and its part of that of the queries.
  void operator()(const Plan& plan, const Unit& unit, int64_t head, const Memory& at,
                  A* memory) const {
    const int64_t heads = std::min(at.heads, in.query.heads - head);
    const int64_t begin = in.ptr[unit.graph], count = in.ptr[unit.graph + 1] - begin;
    for (int64_t h = 0; h < heads; ++h) {
      const Block<A> of_query = gradient_of_queries(unit, head, h, at, memory);
      for (int64_t i = 0; i < count; ++i) {
        std::fill_n(of_query.data + i * of_query.row, at.width, A{0});
      }
    }
    for (int64_t first = unit.begin; first < unit.end; first += kKeys) {
      const int64_t keys = std::min(kKeys, unit.end - first);
      for (int64_t h = 0; h < heads; ++h) {
        prepare(first, keys, head + h, at, memory + h * at.of_head);
      }
      gather_block(plan, unit, first, keys, head, heads, at, memory);
      for (int64_t h = 0; h < heads; ++h) {
        const A* const own = memory + h * at.of_head;
        for (int64_t j = 0; j < keys; ++j) {
          write(own + at.of_key + j * at.width, A{1}, grad_key.at(first + j, head + h));
          write(own + at.of_value + j * at.width, A{1}, grad_value.at(first + j, head + h));
        }
      }
    }
    if (unit.part >= 0) return;
    for (int64_t h = 0; h < heads; ++h) {
      const Block<A> of_query = gradient_of_queries(unit, head, h, at, memory);
      for (int64_t i = 0; i < count; ++i) {
        write(of_query.data + i * of_query.row, scale, grad_query.at(begin + i, head + h));
      }
    }
  }

  // Where that of the h-th of several heads is added up.
  Block<A> gradient_of_queries(const Unit& unit, int64_t head, int64_t h, const Memory& at,
                               A* memory) const {
    if (unit.part < 0) return {memory + h * at.of_head + at.of_query, at.width};
    const int64_t heads = in.query.heads;
    return {parts + (unit.part * heads + head + h) * at.width, heads * at.width};
  }

  // Brings a block of keys and values of a head to its working memory.
  void prepare(int64_t first, int64_t keys, int64_t head, const Memory& at, A* memory) const {
    const int64_t row = in.query.heads * in.query.width, channels = in.query.width;
    const int64_t width = at.width, wide = padded<A>(keys);
    copy_transposed<T>(in.key.at(first, head), row, keys, channels, {memory + at.key, wide});
    copy_transposed<T>(in.value.at(first, head), row, keys, channels, {memory + at.value, wide});
    copy_rows<T>(in.key.at(first, head), row, keys, channels, A{1}, {memory + at.key_rows, width});
    std::fill_n(memory + at.of_key, keys * width, A{0});
    std::fill_n(memory + at.of_value, keys * width, A{0});
  }

  // The same gradients of a block of keys, in working memory.
  void gather_block(const Plan& plan, const Unit& unit, int64_t first, int64_t keys, int64_t head,
                    int64_t heads, const Memory& at, A* memory) const {
    const int64_t begin = in.ptr[unit.graph], end = in.ptr[unit.graph + 1];
    const int64_t key_begin = in.key_ptr[unit.graph];
    const int64_t keys_of_graph = in.key_ptr[unit.graph + 1] - key_begin;
    for (int64_t i = begin; i < end; i += kQueries) {
      const int64_t count = std::min(kQueries, end - i);
      const int64_t pair =
          plan.first_pair[unit.graph] + (i - begin) * keys_of_graph + first - key_begin;
      const PairBlock block{pair, keys_of_graph, count, keys, padded<A>(keys), head, heads};
      if (bias.is_of_pairs()) bias.copy(block, memory + at.weight, at.of_weight);
      for (int64_t h = 0; h < heads; ++h) {
        const Block<A> of_query = gradient_of_queries(unit, head, h, at, memory);
        gather_head(block, i, h, at, memory,
                    {of_query.data + (i - begin) * of_query.row, of_query.row});
      }
      grad_bias.add(block, memory + at.product, at.of_product, memory + at.of_bias);
    }
  }

  // The same of a block of queries, from the i-th on, and the h-th of the heads.
  void gather_head(const PairBlock& block, int64_t i, int64_t h, const Memory& at, A* memory,
                   Block<A> of_query) const {
    A* const own = memory + h * at.of_head;
    const int64_t head = block.head + h;
    const int64_t row = in.query.heads * in.query.width, channels = in.query.width;
    const int64_t count = block.queries, keys = block.keys, wide = block.wide, width = at.width;
    const Block<A> query{memory + at.query, width}, grad{memory + at.grad, width};
    const Block<A> key{own + at.key, wide}, value{own + at.value, wide};
    const Block<A> key_rows{own + at.key_rows, width};
    const Block<A> weight{memory + at.weight + h * at.of_weight, wide};
    const Block<A> product{memory + at.product + h * at.of_product, wide};
    const Block<A> of_key{own + at.of_key, width}, of_value{own + at.of_value, width};
    copy_rows<T>(in.query.at(i, head), row, count, channels, scale, query);
    copy_rows<T>(given.grad.at(i, head), row, count, channels, A{1}, grad);
    score_pairs(bias, block, h, channels, query, key, weight);
    multiply<false, A>(count, wide, channels, {grad.data, width, 1}, {value.data, wide}, product);
    for (int64_t r = 0; r < count; ++r) {
      differentiate(weight.data + r * wide, product.data + r * wide, wide, i + r,
                    block.first + r * block.row, head);
    }
    multiply<true, A>(keys, width, count, {weight.data, 1, wide}, {grad.data, width}, of_value);
    multiply<true, A>(keys, width, count, {product.data, 1, wide}, {query.data, width}, of_key);
    multiply<true, A>(count, width, keys, {product.data, wide, 1}, {key_rows.data, width},
                      of_query);
  }

  void write(const A* from, A factor, T* to) const {
    for_each_part<N, 1>(0, in.query.width, [&](auto chunk, int64_t c) {
      constexpr int kLane = decltype(chunk)::kLanes;
      store<kLane>(to + c, factor * load<kLane>(from + c));
    });
  }
};

}  // namespace

template <typename T>
void dense_attention(const DenseAttentionInputs<T>& in, double scale, Dropout dropout, Heads<T> out,
                     SoftmaxStats<Accumulator<T>> stats) {
  using A = Accumulator<T>;
  const auto cut = [&](Plan& plan, int64_t g, int64_t queries, int64_t keys) {
    for (int64_t i = 0; i < queries; i += kQueries) {
      const int64_t count = std::min(kQueries, queries - i);
      plan.units.push_back({g, in.ptr[g] + i, in.ptr[g] + i + count, -1, count * keys});
    }
  };
  const Plan plan = plan_of(in, kLeastPairs, cut);
  const PairBias<T> bias(in.bias, plan.pairs);
  const Forward<T> pass{
      in, static_cast<A>(scale), Kept<A>(dropout, in.first_head, in.first_pair), out, stats, bias};
  run_plan<A>(plan, 2 * in.query.heads * in.query.width, pass);
}

template <typename T>
void dense_attention_backward(const DenseAttentionInputs<T>& in, double scale, Dropout dropout,
                              Heads<const T> out, const SoftmaxGradients<T>& given,
                              Heads<T> grad_query, Heads<T> grad_key, Heads<T> grad_value,
                              T* grad_bias) {
  using A = Accumulator<T>;
  int64_t rows_of_parts = 0;
  std::vector<CutGraph> cut;
  const auto add_units = [&](Plan& plan, int64_t g, int64_t queries, int64_t keys) {
    const int64_t parts = std::clamp<int64_t>(keys / kKeysOfPart, 1, kMostParts);
    const int64_t begin = in.key_ptr[g];
    if (parts > 1) cut.push_back({in.ptr[g], in.ptr[g + 1], rows_of_parts, parts});
    for (int64_t p = 0; p < parts; ++p) {
      const int64_t first = keys * p / parts, end = keys * (p + 1) / parts;
      plan.units.push_back(
          {g, begin + first, begin + end, parts > 1 ? rows_of_parts : -1, (end - first) * queries});
      if (parts > 1) rows_of_parts += queries;
    }
  };
  PairBiasGradient<T> of_bias(in.bias, grad_bias);
  const Plan plan = plan_of(in, std::max(kLeastPairs, of_bias.least_pairs()), add_units);
  of_bias.expect_groups(plan.num_groups());
  const int64_t heads = in.query.heads, row = heads * padded<A>(in.query.width);
  const auto parts = scratch<A>(rows_of_parts * row);
  const PairBias<T> bias(in.bias, plan.pairs);
  const Backward<T> pass{in,
                         static_cast<A>(scale),
                         Kept<A>(dropout, in.first_head, in.first_pair),
                         out,
                         given,
                         grad_query,
                         grad_key,
                         grad_value,
                         of_bias,
                         parts.get(),
                         bias};
  run_plan<A>(plan, 5 * heads * in.query.width, pass);
  of_bias.finish(plan.num_groups());
  for (const CutGraph& graph : cut) {
    const int64_t queries = graph.end - graph.begin;
    for_each_task(queries, queries * row * graph.parts, [&](int64_t i) {
      A* const sum = parts.get() + (graph.first_row + i) * row;
      for (int64_t p = 1; p < graph.parts; ++p) {
        const A* other = sum + p * queries * row;
        for (int64_t c = 0; c < row; ++c) sum[c] += other[c];
      }
      for (int64_t head = 0; head < heads; ++head) {
        pass.write(sum + head * (row / heads), pass.scale, grad_query.at(graph.begin + i, head));
      }
    });
  }
}

FASTGRAPH_INSTANTIATE(dense_attention)
FASTGRAPH_INSTANTIATE(dense_attention_backward)

}  // namespace fastgraph
