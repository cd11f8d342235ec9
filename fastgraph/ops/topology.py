"""The look-up of an operator's graph by its index tensors, and checks of all operators.

``index`` and ``ptr`` are described in :class:`fastgraph.Graph`. ``transpose`` reverses every edge:
features are then gathered at the destinations and aggregated at the sources. ``num_out`` is the
number of aggregating nodes; the number of gathered ones is the first size of the features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastgraph.graphs.edges import given_graph, graph_of, renumbered_graph
from fastgraph.graphs.graph import Graph
from fastgraph.graphs.memo import is_called_by_compiled_code
from fastgraph.machine.memory import contiguous
from fastgraph.plugins.backend import FLOATING


def topology(
    index: Tensor,
    ptr: Tensor | None,
    num_in: int,
    num_out: int,
    transpose: bool,
    self_loops: int = 0,
    *,
    numbered: bool = True,
) -> Graph:
    """The memoised graph with ``num_in`` gathered and ``num_out`` aggregating nodes.

    Compiled code gets one without the numbers of edges where these are not needed: what backward
    passes leave for each edge is then written in the order of rows. Layers that are not compiled
    ask for it themselves.

    Raises:
        ValueError: ``num_out`` is negative, or as for :class:`fastgraph.Graph`.
        IndexError: ``index`` points outside the nodes.
    """
    check_num_out(num_out)
    num_src, num_dst = (num_out, num_in) if transpose else (num_in, num_out)
    if not numbered and ptr is None and is_called_by_compiled_code():
        # The forward pass may have needed the numbers.
        given = given_graph(index, num_src, num_dst, self_loops)
        return given or renumbered_graph(index, num_src, num_dst, self_loops)
    return graph_of(index, ptr, num_src, num_dst, self_loops)


def check_num_out(num_out: int) -> None:
    """The number of aggregating nodes is one."""
    if num_out < 0:
        raise ValueError(f"num_out must be an integer >= 0, got {num_out}")


def check_values(name: str, x: Tensor) -> None:
    """A tensor is dense and of a floating-point dtype that operators take."""
    if x.dtype not in FLOATING:
        raise ValueError(f"{name} must be one of {[str(d) for d in FLOATING]}, got {x.dtype}")
    if x.layout is not torch.strided:
        raise ValueError(f"{name} must be a dense tensor, got layout {x.layout}")


def check_features(name: str, x: Tensor) -> None:
    """Features are floating point ``[nodes, *channels]``."""
    check_values(name, x)
    if x.dim() < 2:
        raise ValueError(f"{name} must be [nodes, *channels], got shape {list(x.shape)}")


def check_operands(
    x: Tensor, index: Tensor, ptr: Tensor | None, weight: Tensor | None, *, heads: bool = False
) -> None:
    """Features, topology and optional weights of edges, or of edges and heads, fit together.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    check_features("x", x)
    check_index(index, ptr, x)
    if weight is None:
        return
    has_heads = heads and weight.dim() == 2
    if weight.shape[:1] != index.shape[-1:] or not (has_heads or weight.dim() == 1):
        of_heads = ", or one for each of them and each head" if heads else ""
        raise ValueError(
            f"weight must have one value for each of {index.shape[-1]} edges{of_heads}, "
            f"got shape {list(weight.shape)}"
        )
    if has_heads:
        check_heads_share("weight", weight.shape[1], x)
    if weight.dtype != x.dtype or weight.device != x.device:
        raise ValueError(
            f"weight must have x's dtype and device ({x.dtype}, {x.device}), "
            f"got ({weight.dtype}, {weight.device})"
        )


def check_heads_share(name: str, heads: int, x: Tensor) -> None:
    """Heads have as many consecutive channels each.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    channels = x.shape[1:].numel()
    if heads < 1 or channels % heads:
        raise ValueError(
            f"{name} must have a number of heads that share {channels} channels, got {heads}"
        )


def check_index(index: Tensor, ptr: Tensor | None, features: Tensor) -> None:
    """The topology is dense and on the features' device.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    if index.layout is not torch.strided:
        raise ValueError(f"index must be a dense tensor, got layout {index.layout}")
    if index.device != features.device or (ptr is not None and ptr.device != features.device):
        found = index.device if ptr is None else f"{index.device} and {ptr.device}"
        raise ValueError(
            f"index and ptr must be on the features' device {features.device}, got {found}"
        )


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuse a value that is not one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {list(choices)}, got {value!r}")


def flatten(x: Tensor) -> Tensor:
    """``[nodes, *channels]`` as a contiguous ``[nodes, channels]`` matrix."""
    if x.dim() == 2:
        return contiguous(x)
    return contiguous(x).view(x.shape[0], x.shape[1:].numel())


def unflatten(matrix: Tensor, *shape: int) -> Tensor:
    """Give a fresh matrix its final shape, without autograd seeing a view.

    In-place operations on a view that was made inside an operator are an error.
    """
    if matrix.shape == shape:
        return matrix
    out: Tensor = torch.ops.aten._unsafe_view.default(matrix, shape)
    return out
