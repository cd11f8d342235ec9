"""The documented functions of version 0.1.0rc4 of turbo-gnn, computed on the CPU.

The variable ``TURBO_GNN_FAULTS`` says which functions crash or hang their process, such as
``gatv2_aggr:crash,reduction_aggr:hang``.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric.utils import scatter, softmax


@dataclass
class AutotuneConfig:
    warmup: int = 10
    iters: int = 50
    tune_backward: bool = False


@dataclass
class AdjacencyForwardBackwardWithNodeBuckets:
    """Destinations are the rows."""

    forward_indptr: Tensor
    forward_indices: Tensor

    @classmethod
    def from_edge_list(
        cls, index: Tensor, num_nodes: int, index_dtype: torch.dtype
    ) -> AdjacencyForwardBackwardWithNodeBuckets:
        index = index[:, (index[1] * num_nodes + index[0]).argsort()]
        indptr = torch.zeros(num_nodes + 1, dtype=index_dtype)
        indptr[1:] = torch.bincount(index[1], minlength=num_nodes).cumsum(0)
        return cls(indptr, index[0].to(index_dtype))


def spmm_aggr(
    x: Tensor,
    forward_indptr: Tensor,
    forward_indices: Tensor,
    norm_type: str,
    cu_sparse_algorithm_id: int,
    block_dim: int,
) -> Tensor:
    _fail_if_asked("spmm_aggr")
    source, destination, num = _ends(forward_indptr, forward_indices)
    inward = torch.bincount(destination, minlength=num)[destination]
    outward = torch.bincount(source, minlength=num)[source]
    divisor = {"right": inward, "both": (inward * outward).sqrt()}[norm_type]
    return scatter(x[source] / divisor.unsqueeze(-1), destination, dim_size=num)


def reduction_aggr(graph: Any, x: Tensor, reduce: str) -> Tensor:
    _fail_if_asked("reduction_aggr")
    source, destination, num = _ends(graph.forward_indptr, graph.forward_indices)
    return scatter(x[source], destination, dim_size=num, reduce=reduce)


def gatv2_aggr(
    graph: Any,
    x: Tensor,
    x_neighbors: Tensor,
    attention_weights: Tensor,
    negative_slope: float,
    autotune: bool,
    autotune_config: AutotuneConfig,
) -> Tensor:
    _fail_if_asked("gatv2_aggr")

    def score(source: Tensor, destination: Tensor) -> Tensor:
        z = torch.nn.functional.leaky_relu(x[destination] + x_neighbors[source], negative_slope)
        return (z * attention_weights).sum(-1)

    return _attend(graph, score, x_neighbors).flatten(1)


def graph_transformer_aggr(
    graph: Any,
    x: Tensor,
    Q: Tensor,  # noqa: N803
    K: Tensor,  # noqa: N803
    V: Tensor,  # noqa: N803
    scale: float,
    autotune: bool,
    autotune_config: AutotuneConfig,
) -> Tensor:
    _fail_if_asked("graph_transformer_aggr")

    def score(source: Tensor, destination: Tensor) -> Tensor:
        return (Q[source] * K[destination]).sum(-1) * scale

    return _attend(graph, score, V)


def _fail_if_asked(function: str) -> None:
    faults = dict(
        fault.split(":") for fault in os.environ.get("TURBO_GNN_FAULTS", "").split(",") if fault
    )
    if faults.get(function) == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if faults.get(function) == "hang":
        time.sleep(3600)


def _attend(graph: Any, score: Callable[[Tensor, Tensor], Tensor], value: Tensor) -> Tensor:
    source, destination, num = _ends(graph.forward_indptr, graph.forward_indices)
    weight = softmax(score(source, destination), destination, num_nodes=num)
    return scatter(weight.unsqueeze(-1) * value[source], destination, dim_size=num)


def _ends(indptr: Tensor, indices: Tensor) -> tuple[Tensor, Tensor, int]:
    assert indptr.dtype == indices.dtype == torch.int32
    num = indptr.numel() - 1
    return indices.long(), torch.arange(num).repeat_interleave(indptr.diff()), num
