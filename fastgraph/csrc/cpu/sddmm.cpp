// Dot products of the heads of the rows of two matrices that each entry of a sparse one joins.
#include <algorithm>

#include "cpu/kernels.h"
#include "fastgraph/dot.h"
#include "fastgraph/memory.h"
#include "fastgraph/parallel.h"
#include "fastgraph/schedule.h"

namespace fastgraph {
namespace {

// Products of one head after another, of whatever entries and rows, whose lanes are added up
// together: that costs little more than for one of them.
template <typename T, int N>
class Products {
 public:
  using A = Accumulator<T>;

  ~Products() { write(); }

  void add(Vector<A, N> lanes, A scale, T* target) {
    lanes_[count_] = lanes;
    scale_[count_] = scale;
    target_[count_] = target;
    if (++count_ == N) write();
  }

 private:
  void write() {
    A sum[N];
    store<N>(sum, load<N>(scale_) * sums_of<A, N>(lanes_, count_));
    for (int i = 0; i < count_; ++i) store_one(target_[i], sum[i]);
    count_ = 0;
  }

  Vector<A, N> lanes_[N];
  A scale_[N] = {};
  T* target_[N];
  int count_ = 0;
};

template <typename T>
struct Sddmm {
  using A = Accumulator<T>;

  const OrderedCsr& graph;
  const A* row_scale;
  Heads<const T> grad;
  Heads<const T> x;
  Matrix<T> out;

  // With N lanes, of which a head has as many channels or more.
  template <int N>
  void run(const Task& task) const {
    const Matrix<const T> rows{x.data, x.nodes, x.heads * x.width};
    const Matrix<const T> grad_rows{grad.data, grad.nodes, rows.width};
    Products<T, N> products;
    for (int64_t place = task.place_begin; place < task.place_end; ++place) {
      const int64_t row = graph.row(place);
      task.expect_next(graph, place, grad_rows);
      const A scale = row_scale ? row_scale[row] : A{1};
      const EntryRange entries = task.entries(graph, place);
      for (int64_t e = entries.begin; e < entries.end; ++e) {
        if (e + kAhead < task.entry_end) prefetch(rows.row(graph.col[e + kAhead]), rows.width);
        T* target = out.row(graph.edge(e));
        for (int64_t h = 0; h < x.heads; ++h) {
          const T *own = grad.at(row, h), *other = x.at(graph.col[e], h);
          products.add(lanes_of_dot<N>(own, other, x.width), scale, target + h);
        }
      }
    }
  }

  // With one channel for each entry, which is all there is to multiply.
  void run_single(const Task& task) const {
    for (int64_t place = task.place_begin; place < task.place_end; ++place) {
      const int64_t row = graph.row(place);
      const A scale = row_scale ? row_scale[row] : A{1};
      const A own = load_one(grad.data + row);
      const EntryRange entries = task.entries(graph, place);
      for (int64_t e = entries.begin; e < entries.end; ++e) {
        store_one(out.data + graph.edge(e), scale * (own * load_one(x.data + graph.col[e])));
      }
    }
  }

  template <int N = kLanes<T>>
  void run_for_width(const Task& task) const {
    if (x.heads * x.width == 1) return run_single(task);
    if constexpr (N > 1) {
      if (x.width < N) return run_for_width<N / 2>(task);
    }
    run<N>(task);
  }
};

}  // namespace

template <typename T>
void sddmm(const OrderedCsr& graph, const Accumulator<T>* row_scale, Matrix<const T> grad,
           Matrix<const T> x, Matrix<T> out) {
  const int64_t heads = out.width, width = x.width / heads;
  if (width == 0) {
    std::fill_n(out.data, out.rows * heads, T{});
    return;
  }
  const Sddmm<T> op{
      graph, row_scale, {grad.data, grad.rows, heads, width}, {x.data, x.rows, heads, width}, out};
  const Schedule schedule = make_schedule(graph);
  for_each_task(schedule.tasks.size(), graph.num_entries * (x.width + heads),
                [&](int64_t i) { op.run_for_width(schedule.tasks[i]); });
}

FASTGRAPH_INSTANTIATE(sddmm)

}  // namespace fastgraph
