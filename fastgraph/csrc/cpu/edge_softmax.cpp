// The softmax of what edges have, over the entries of each row, for all heads.
//
// What the entries of a row have is copied from where it lies, by number of edge, to places that
// follow each other, and computed with in whole vectors whatever the number of heads is. A place is
// as wide as a power of two, or as some vectors; what stands beside its heads plays no part.
#include <algorithm>
#include <limits>

#include "cpu/kernels.h"
#include "fastgraph/chunks.h"
#include "fastgraph/exponential.h"
#include "fastgraph/memory.h"
#include "fastgraph/parallel.h"
#include "fastgraph/schedule.h"
#include "fastgraph/simd.h"

namespace fastgraph {
namespace {

int64_t round_up(int64_t size, int64_t step) { return (size + step - 1) / step * step; }

// The places of a row's entries. kHeads is the number of heads, or 0 for any.
template <typename T, int kHeads>
struct Places {
  using A = Accumulator<T>;
  static constexpr int kLane = kLanes<T>;

  const OrderedCsr& graph;
  int64_t heads;
  int64_t width = width_for(heads);                  // of a place
  int64_t period = std::max<int64_t>(width, kLane);  // after which vectors hold the same heads

  static int64_t width_for(int64_t heads) {
    if (heads > kLane) return round_up(heads, kLane);
    int64_t width = 1;
    while (width < heads) width *= 2;
    return width;
  }

  // Of all places of some entries, in whole vectors.
  int64_t size(int64_t entries) const { return round_up(entries * width, kLane); }

  // Calls body(chunk, first head) for all heads.
  template <typename Body>
  FASTGRAPH_INLINE void for_heads(const Body& body) const {
    if constexpr (kHeads > 0) {
      body(Chunk<kHeads, 1>{}, int64_t{0});
    } else {
      for_each_part<kLane, 1>(0, heads, body);
    }
  }

  // What values(edge, chunk, first head) gives of each entry, with `filler` beside and behind it.
  template <typename Values, typename... Ts>
  void fill(EntryRange entries, int64_t stop, A filler, A* copy, const Values& values,
            const Matrix<Ts>&... expected) const {
    const int64_t all = size(entries.end - entries.begin);
    if (all == 0) return;
    std::fill_n(heads < width ? copy : copy + all - kLane, heads < width ? all : kLane, filler);
    for (int64_t e = entries.begin; e < entries.end; ++e, copy += width) {
      if (e + kAhead < stop) {
        [[maybe_unused]] const int64_t ahead = graph.edge(e + kAhead);
        (prefetch(expected.row(ahead), heads), ...);
      }
      const int64_t edge = graph.edge(e);
      for_heads([&](auto chunk, int64_t h) {
        store<decltype(chunk)::kLanes>(copy + h, values(edge, chunk, h));
      });
    }
  }

  void write(EntryRange entries, const A* copy, Matrix<T> to) const {
    for (int64_t e = entries.begin; e < entries.end; ++e, copy += width) {
      T* target = to.row(graph.edge(e));
      for_heads([&](auto chunk, int64_t h) {
        constexpr int N = decltype(chunk)::kLanes;
        store<N>(target + h, load<N>(copy + h));
      });
    }
  }

  // Calls change(vector, first lane of the period) for all vectors of the places.
  template <typename Change>
  FASTGRAPH_INLINE void for_vectors(int64_t entries, const Change& change) const {
    const int64_t all = size(entries);
    for (int64_t first = 0; first < period; first += kLane) {
      for (int64_t i = first; i < all; i += period) change(i, first);
    }
  }

  // total[h] = all values of a head combined, in each lane that holds it.
  template <typename Combine>
  FASTGRAPH_INLINE void combine(int64_t entries, const A* copy, A start, A* total,
                                const Combine& with) const {
    const int64_t all = size(entries);
    for (int64_t first = 0; first < period; first += kLane) {
      Vector<A, kLane> found = splat<A, kLane>(start);
      for (int64_t i = first; i < all; i += period) found = with(found, load<kLane>(copy + i));
      store<kLane>(total + first, combine_lanes<A, kLane>(found, width, with));
    }
  }
};

template <typename A, int N>
struct Add {
  Vector<A, N> operator()(Vector<A, N> a, Vector<A, N> b) const { return a + b; }
};

// Of each row `find` makes a state, and `write` then the results, both with the copies between.
template <typename T, int kHeads>
struct Forward {
  using A = Accumulator<T>;
  static constexpr int kLane = kLanes<T>;
  static constexpr int kCopies = 1;
  static constexpr A kLowest = -std::numeric_limits<A>::infinity();

  Places<T, kHeads> places;
  Matrix<const T> score;
  Matrix<T> out;

  // The largest scores, and the sums of exponentials relative to them.
  int64_t state_size() const { return 2 * places.period; }

  void load_scores(EntryRange entries, int64_t stop, A* copy) const {
    const auto values = [&](int64_t edge, auto chunk, int64_t h) {
      return load<decltype(chunk)::kLanes>(score.row(edge) + h);
    };
    places.fill(entries, stop, kLowest, copy, values, score, out);
  }

  // exp(score - largest)
  void take_exponentials(int64_t entries, const A* largest, A* copy) const {
    places.for_vectors(entries, [&](int64_t i, int64_t first) {
      const Vector<A, kLane> found = load<kLane>(largest + first), zero{};
      // Minus infinity less itself would be NaN, for a piece of a row that has other scores too.
      const Vector<A, kLane> origin = found > kLowest ? found : zero;
      store<kLane>(copy + i, exp_of_negative<kLane>(load<kLane>(copy + i) - origin));
    });
  }

  void find(EntryRange entries, int64_t stop, A* copy, A* state) const {
    const int64_t count = entries.end - entries.begin;
    load_scores(entries, stop, copy);
    places.combine(count, copy, kLowest, state, [](auto a, auto b) {
      return larger<A, kLane>(b, a);  // passes over NaN, which the sum will be
    });
    take_exponentials(count, state, copy);
    places.combine(count, copy, A{0}, state + places.period, Add<A, kLane>{});
  }

  // Makes the states of all pieces that of their row.
  void merge(A* states, int64_t pieces) const {
    for (int64_t lane = 0; lane < places.period; ++lane) {
      A *largest = states + lane, *sum = largest + places.period;
      A of_all = kLowest, total = 0;
      for (int64_t p = 0; p < pieces; ++p) of_all = std::max(of_all, largest[p * state_size()]);
      for (int64_t p = 0; p < pieces; ++p) {
        const int64_t at = p * state_size();
        const Vector<A, 1> below{largest[at] - of_all};
        if (sum[at] != 0) total += sum[at] * exp_of_negative<1>(below)[0];
      }
      for (int64_t p = 0; p < pieces; ++p) {
        largest[p * state_size()] = of_all;
        sum[p * state_size()] = total;
      }
    }
  }

  // The copies again, for a piece whose state became that of its row.
  void find_again(EntryRange entries, A* copy, const A* state) const {
    load_scores(entries, entries.end, copy);
    take_exponentials(entries.end - entries.begin, state, copy);
  }

  void write(EntryRange entries, A* copy, const A* state) const {
    const A* sum = state + places.period;
    places.for_vectors(entries.end - entries.begin, [&](int64_t i, int64_t first) {
      store<kLane>(copy + i, load<kLane>(copy + i) / load<kLane>(sum + first));
    });
    places.write(entries, copy, out);
  }
};

template <typename T, int kHeads>
struct Backward {
  using A = Accumulator<T>;
  static constexpr int kLane = kLanes<T>;
  static constexpr int kCopies = 2;

  Places<T, kHeads> places;
  Matrix<const T> out;
  Matrix<const T> grad;
  Matrix<T> grad_score;

  // The sums of the products of weights and their gradients.
  int64_t state_size() const { return places.period; }

  // Products, and behind them the weights.
  void load_copies(EntryRange entries, int64_t stop, A* copy) const {
    A* weights = copy + places.size(entries.end - entries.begin);
    const auto of_edges = [](Matrix<const T> values) {
      return [=](int64_t edge, auto chunk, int64_t h) {
        return load<decltype(chunk)::kLanes>(values.row(edge) + h);
      };
    };
    places.fill(entries, stop, A{0}, weights, of_edges(out), out, grad, grad_score);
    places.fill(entries, 0, A{0}, copy, of_edges(grad));
    places.for_vectors(entries.end - entries.begin, [&](int64_t i, int64_t) {
      store<kLane>(copy + i, load<kLane>(copy + i) * load<kLane>(weights + i));
    });
  }

  void find(EntryRange entries, int64_t stop, A* copy, A* state) const {
    load_copies(entries, stop, copy);
    places.combine(entries.end - entries.begin, copy, A{0}, state, Add<A, kLane>{});
  }

  void merge(A* states, int64_t pieces) const {
    for (int64_t lane = 0; lane < places.period; ++lane) {
      A total = 0;
      for (int64_t p = 0; p < pieces; ++p) total += states[p * state_size() + lane];
      for (int64_t p = 0; p < pieces; ++p) states[p * state_size() + lane] = total;
    }
  }

  void find_again(EntryRange entries, A* copy, const A*) const {
    load_copies(entries, entries.end, copy);
  }

  void write(EntryRange entries, A* copy, const A* state) const {
    const A* weights = copy + places.size(entries.end - entries.begin);
    places.for_vectors(entries.end - entries.begin, [&](int64_t i, int64_t first) {
      const Vector<A, kLane> share = load<kLane>(weights + i) * load<kLane>(state + first);
      store<kLane>(copy + i, load<kLane>(copy + i) - share);
    });
    places.write(entries, copy, grad_score);
  }
};

// Rows are visited once. A row that was cut is visited twice, because its pieces have to know of
// each other before anything can be written.
template <typename T, typename Op>
void run(const Op& op) {
  using A = Accumulator<T>;
  const OrderedCsr& graph = op.places.graph;
  const int64_t size = op.state_size();
  const Schedule schedule = make_schedule(graph);
  const auto states = scratch<A>(schedule.num_pieces * size);
  const auto copies = [&](const Task& task) {
    return scratch<A>(Op::kCopies * op.places.size(task.entry_end - task.entry_begin));
  };
  const int64_t work = 8 * graph.num_entries * op.places.heads;
  run_schedule(
      schedule, work, size,
      [&](const Task& task) {
        const auto copy = copies(task);
        const auto own = scratch<A>(task.whole() ? size : 0);
        A* state = task.whole() ? own.get() : states.get() + task.piece * size;
        for (int64_t place = task.place_begin; place < task.place_end; ++place) {
          const EntryRange entries = task.entries(graph, place);
          op.find(entries, task.entry_end, copy.get(), state);
          if (task.whole()) op.write(entries, copy.get(), state);
        }
      },
      [&](const CutRow& cut) {
        op.merge(states.get() + cut.piece_begin * size, cut.piece_end - cut.piece_begin);
      });
  if (schedule.num_pieces == 0) return;
  for_each_task(schedule.tasks.size(), work, [&](int64_t i) {
    const Task& task = schedule.tasks[i];
    if (task.whole()) return;
    const auto copy = copies(task);
    const EntryRange entries = task.entries(graph, task.place_begin);
    const A* state = states.get() + task.piece * size;
    op.find_again(entries, copy.get(), state);
    op.write(entries, copy.get(), state);
  });
}

// Calls body with the number of heads, if it is a usual one, as a constant, and else with 0.
template <typename Body>
void with_heads(int64_t heads, const Body& body) {
  switch (heads) {
    case 0: return;
    case 1: return body(std::integral_constant<int, 1>{});
    case 4: return body(std::integral_constant<int, 4>{});
    case 8: return body(std::integral_constant<int, 8>{});
    default: return body(std::integral_constant<int, 0>{});
  }
}

}  // namespace

template <typename T>
void edge_softmax(const OrderedCsr& graph, Matrix<const T> score, Matrix<T> out) {
  with_heads(score.width,
             [&](auto heads) { run<T>(Forward<T, heads>{{graph, score.width}, score, out}); });
}

template <typename T>
void edge_softmax_backward(const OrderedCsr& graph, Matrix<const T> out, Matrix<const T> grad,
                           Matrix<T> grad_score) {
  with_heads(out.width, [&](auto heads) {
    run<T>(Backward<T, heads>{{graph, out.width}, out, grad, grad_score});
  });
}

FASTGRAPH_INSTANTIATE(edge_softmax)
FASTGRAPH_INSTANTIATE(edge_softmax_backward)

}  // namespace fastgraph
