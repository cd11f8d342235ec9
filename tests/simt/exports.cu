// The kernels behind a C interface, for ctypes. A dtype is 0 for float32, 1 for bfloat16 and 2 for
// float16.
#include "cuda/kernels.h"

namespace fastgraph::cuda {
namespace {

template <typename Body>
int with_type(int dtype, const Body& body) {
  switch (dtype) {
    case 0: return body(float{});
    case 1: return body(bfloat16{});
    default: return body(float16{});
  }
}

}  // namespace
}  // namespace fastgraph::cuda

using namespace fastgraph;
using namespace fastgraph::cuda;

#define SIMT_EXPORT extern "C" __attribute__((visibility("default")))

SIMT_EXPORT int64_t simt_spmm_workspace(const Csr* graph, int64_t longest, int64_t width) {
  return spmm_workspace(*graph, longest, width);
}

SIMT_EXPORT int simt_spmm(int dtype, const Csr* graph, int64_t longest, const void* weight,
                          const float* row_scale, const float* col_scale, const void* x, void* out,
                          int64_t width, float* workspace) {
  return with_type(dtype, [&](auto tag) -> int {
    using T = decltype(tag);
    return spmm<T>(*graph, longest, static_cast<const T*>(weight), row_scale, col_scale,
                   {static_cast<const T*>(x), graph->num_cols, width},
                   {static_cast<T*>(out), graph->num_rows, width}, workspace, nullptr);
  });
}

SIMT_EXPORT int64_t simt_gatv2_workspace(const Csr* graph, int64_t longest, int64_t heads,
                                         int64_t width) {
  return gatv2_workspace(*graph, longest, heads, width);
}

SIMT_EXPORT int simt_gatv2(int dtype, const Csr* graph, int64_t longest, const void* x_src,
                           const void* x_dst, const void* att, const void* edge,
                           const void* weight_edge, int64_t edge_dim, float slope, double dropout,
                           uint64_t seed, void* out, float* stats, void* alpha, int64_t heads,
                           int64_t width, float* workspace) {
  return with_type(dtype, [&](auto tag) -> int {
    using T = decltype(tag);
    const Gatv2Inputs<T> in{{static_cast<const T*>(x_src), graph->num_cols, heads, width},
                            {static_cast<const T*>(x_dst), graph->num_rows, heads, width},
                            {static_cast<const T*>(att), 1, heads, width},
                            {static_cast<const T*>(edge), graph->num_entries, edge_dim},
                            {static_cast<const T*>(weight_edge), heads, edge_dim, width}};
    const SoftmaxOutputs<T> outputs{{static_cast<T*>(out), graph->num_rows, heads, width},
                                    stats,
                                    {static_cast<T*>(alpha), graph->num_entries, heads}};
    return gatv2<T>(*graph, longest, in, slope, {dropout, seed}, outputs, workspace, nullptr);
  });
}
