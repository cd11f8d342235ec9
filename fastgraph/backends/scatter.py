"""torch_scatter's kernels, where that package is installed."""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

from fastgraph.backends import reference
from fastgraph.backends.softmax_reference import endpoints
from fastgraph.graphs.graph import Graph
from fastgraph.plugins.backend import Kernel, accumulator


class ScatterBackend:
    """Gather, then torch_scatter; for comparison, and on request."""

    name = "scatter"
    priority = -2

    def unavailable(self) -> str | None:
        return _why_unavailable()

    def kernel(self, operator: str, device_type: str, dtype: torch.dtype) -> Kernel | None:
        if device_type not in ("cpu", "cuda"):
            return None
        kernels: dict[str, Kernel] = {"spmm": _spmm, "segment_reduce": _segment_reduce}
        if operator in kernels:
            return kernels[operator]
        return reference.ReferenceBackend().kernel(operator, device_type, dtype)


@functools.cache
def _why_unavailable() -> str | None:
    if importlib.util.find_spec("torch_scatter") is None:
        return "torch_scatter is not installed"
    try:
        import torch_scatter  # noqa: F401
    except (ImportError, OSError) as error:  # a build for another torch version
        return f"torch_scatter cannot be imported: {error}"
    return None


def _spmm(graph: Graph, x: Tensor, weight: Tensor | None, reduce: str, transpose: bool) -> Tensor:
    from torch_scatter import scatter

    gathered, aggregating, num_out = endpoints(graph, transpose)
    dtype = accumulator(x.dtype)
    message = reference.messages(
        x.to(dtype), None if weight is None else weight.to(dtype), gathered
    )
    if reduce == "mean_adjoint":
        scale = graph.inverse_degree(transpose=not transpose, dtype=dtype)
        message, reduce = message * scale[gathered].unsqueeze(-1), "sum"
    out: Tensor = scatter(message, aggregating, dim=0, dim_size=num_out, reduce=reduce)
    return out.to(x.dtype)


def _segment_reduce(
    graph: Graph, x: Tensor, weight: Tensor | None, reduce: str, transpose: bool, ties: str
) -> tuple[Tensor, Tensor]:
    from torch_scatter import scatter

    gathered, aggregating, num_out = endpoints(graph, transpose)
    message = reference.messages(x, weight, gathered)
    out: Tensor = scatter(message, aggregating, dim=0, dim_size=num_out, reduce=reduce)
    index = aggregating.unsqueeze(-1).expand_as(message)
    return out, reference.extremum_record(message, out, index, ties)
