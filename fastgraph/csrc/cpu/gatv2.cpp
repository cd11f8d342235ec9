// Additive attention, forward.
#include "cpu/gatv2.h"

namespace fastgraph {

template <typename T>
void gatv2(const OrderedCsr& graph, const Gatv2Inputs<T>& in, double slope, Dropout dropout,
           const SoftmaxOutputs<T>& outputs) {
  const PackedProjection<T> packed(in.weight_edge);
  with_edges<T>(in, packed.matrix(), [&](const auto& edges) {
    using Pass = AdditiveScores<T, std::decay_t<decltype(edges)>>;
    const Pass scores{in, static_cast<Accumulator<T>>(slope), edges};
    const EdgeRows<T> no_edges(Matrix<const T>{});
    run_forward<T, Pass>(graph, (1 + in.edge.width) * in.x_src.width,
                         {scores, NodeRows<T>::seen_before(in.x_src), no_edges, dropout, outputs});
  });
}

FASTGRAPH_INSTANTIATE(gatv2)

}  // namespace fastgraph
