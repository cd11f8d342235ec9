"""GraphBolt's operators, ``torch.ops.graphbolt``, where its library is missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from fastgraph import sampling
from fastgraph.dgl.graphbolt_graph import SamplingGraph, edges_of
from fastgraph.dgl.graphbolt_randomness import set_seed
from fastgraph.dgl.importing import without_library


def unique_and_compact(
    src_ids: Tensor, dst_ids: Tensor, unique_dst_ids: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Distinct nodes, and positions among them.

    Returns:
        ``unique_dst_ids``, as they are, and other values of ``src_ids`` in order of their first
        occurrence; the positions of ``src_ids`` and ``dst_ids``.

    Raises:
        RuntimeError: ``dst_ids`` holds a value that the others have not.
    """
    dtype = src_ids.dtype
    if dtype not in (torch.int32, torch.int64):
        made = unique_and_compact(src_ids.long(), dst_ids.long(), unique_dst_ids.long())
        return made[0].to(dtype), made[1].to(dtype), made[2].to(dtype)
    if src_ids.device.type != "cpu":
        raise without_library("torch.ops.graphbolt.unique_and_compact on a GPU")
    unique, (at, src, dst) = sampling.unique_and_compact([unique_dst_ids, src_ids, dst_ids])
    num_known = 1 + max((int(one.max()) for one in (at, src) if one.numel()), default=-1)
    if num_known < unique.numel():
        raise RuntimeError(f"Id not found: {int(unique[num_known])}")
    num_given = unique_dst_ids.numel()
    num_distinct = 1 + int(at.max()) if num_given else 0
    if num_distinct == num_given:
        return unique, src, dst
    # A destination that came twice keeps both places, and is found at the last.
    last = torch.zeros(num_distinct, dtype=dtype)
    last.scatter_reduce_(0, at.long(), torch.arange(num_given, dtype=dtype), "amax")
    place = torch.cat([last, torch.arange(num_given, num_given + unique.numel() - num_distinct)])
    place = place.to(dtype)
    unique = torch.cat([unique_dst_ids, unique[num_distinct:]])
    return unique, place[src.long()], place[dst.long()]


def isin(elements: Tensor, test_elements: Tensor) -> Tensor:
    """True for each element that is among others."""
    return torch.isin(elements, test_elements)


def index_select(tensor: Tensor, index: Tensor) -> Tensor:
    """Rows of a tensor.

    Raises:
        ImportError: The tensor is in pinned memory and the index on a GPU.
    """
    if index.device.type != "cpu" and tensor.device.type == "cpu":
        raise without_library("torch.ops.graphbolt.index_select of a tensor in pinned memory")
    return tensor[index.long()]


def index_select_csc(
    indptr: Tensor, indices: Tensor, nodes: Tensor, output_size: int | None
) -> tuple[Tensor, Tensor]:
    """Columns of a matrix, compressed.

    Raises:
        RuntimeError: ``indices`` is not of integers in one dimension, or a node not in the graph.
    """
    if indices.dim() != 1:
        raise RuntimeError("IndexSelectCSC only supports 1d tensors")
    if indices.is_floating_point() or indices.is_complex() or indices.dtype == torch.bool:
        raise RuntimeError("IndexSelectCSC is not implemented to slice noninteger types yet.")
    starts, edges = edges_of(indptr, nodes)
    return starts, indices[edges]


def expand_indptr(
    indptr: Tensor, dtype: torch.dtype, node_ids: Tensor | None, output_size: int | None
) -> Tensor:
    """The column of each entry, or what ``node_ids`` has for it."""
    if node_ids is None:
        node_ids = torch.arange(indptr.numel() - 1, device=indptr.device)
    return node_ids.to(dtype).repeat_interleave(indptr.diff(), output_size=output_size)


def set_max_uva_threads(count: int) -> None:
    """Limit the threads of a GPU that read memory of the CPU, of which none does here."""


def _refused(name: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise without_library(f"torch.ops.graphbolt.{name}")

    return refuse


OPERATORS: dict[str, Callable[..., Any]] = {
    "expand_indptr": expand_indptr,
    "fused_csc_sampling_graph": SamplingGraph,
    "gpu_cache": _refused("gpu_cache"),
    "index_select": index_select,
    "index_select_csc": index_select_csc,
    "isin": isin,
    "load_from_shared_memory": _refused("load_from_shared_memory"),
    "set_max_uva_threads": set_max_uva_threads,
    "set_seed": set_seed,
    "unique_and_compact": unique_and_compact,
}
"""All that GraphBolt 2.1 calls."""


def provide() -> None:
    """Put these operators where GraphBolt looks for those of its library."""
    for name, function in OPERATORS.items():
        setattr(torch.ops.graphbolt, name, function)
