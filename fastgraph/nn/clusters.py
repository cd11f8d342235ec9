"""Clusters of the nodes of each graph of a pattern, and how many of them caches ask for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fastgraph.graphs.offsets import offsets_of
from fastgraph.graphs.ranks import decided, whole
from fastgraph.layers.arguments import check_integers
from fastgraph.machine.processor import second_cache
from fastgraph.nn.dual_pattern import EDGE, DualPattern
from fastgraph.sampling.clusters import cluster_each

SHARE_OF_CACHE = 0.8

USUAL_CACHE = 1 << 20
"""Bytes, where the system does not say."""


@dataclass(frozen=True, eq=False)
class Clusters:
    """The clusters of a batch of graphs, each of the nodes of one graph.

    Attributes:
        counts: clusters of each graph, int64 ``[graphs]``.
        cluster: of each node, graph by graph, int64 ``[nodes]``.
        place: of each node among those of its cluster, in ascending order, int64 ``[nodes]``.
        order: nodes cluster by cluster, int64 ``[nodes]``.
        offsets: of clusters in this order, int64 ``[clusters + 1]``.
    """

    counts: Tensor
    cluster: Tensor
    place: Tensor
    order: Tensor
    offsets: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        parts = (self.counts, self.cluster, self.place, self.order, self.offsets)
        return sum(part.nbytes for part in parts)


def clusters_of_cache(nodes: int, row_bytes: int, cache: int | None = None) -> int:
    """The fewest clusters of which keys and values of one fit into 0.8 of the second cache.

    TorchGT's own rule (section III-D), the root of the size of the cache by channels and a natural
    number that it leaves open, knows no nodes.

    Args:
        nodes: of the graph.
        row_bytes: of the keys of a node, all heads together; values have as many.
        cache: bytes; default: the second cache of a core, or a MiB where that is not known.

    Raises:
        ValueError: an argument is no integer in its range.
    """
    check_integers(0, nodes=nodes)
    check_integers(row_bytes=row_bytes)
    check_integers(or_none=True, cache=cache)
    available = SHARE_OF_CACHE * ((second_cache() or USUAL_CACHE) if cache is None else cache)
    of_cluster = int(available // (2 * row_bytes))  # nodes
    return min(max(-(-nodes // max(of_cluster, 1)), 1), max(nodes, 1))


def cache_of(device: torch.device) -> int | None:
    """The bytes of the second cache of a GPU; ``None`` for that of this processor."""
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def clusters_by_metis(pattern: DualPattern, counts: list[int]) -> Clusters:
    """Clusters with few edges in between, by METIS for each graph (TorchGT, section III-C).

    Args:
        pattern: of the graphs.
        counts: clusters of each, at least 1 and at most its nodes.

    Raises:
        ValueError: a graph has fewer nodes than clusters.
        ModuleNotFoundError: ``pymetis`` is not installed.
        fastgraph.dist.PartitionError: METIS failed.
    """
    number = _by_metis(pattern, counts).to(pattern.ptr.device)
    return _arranged(number, torch.tensor(counts, dtype=torch.int64))


def clusters_by_cache(pattern: DualPattern, row_bytes: int) -> Clusters:
    """As many as :func:`clusters_of_cache` says; on several ranks as many as that of the first.

    Args:
        pattern: of the graphs.
        row_bytes: of the keys of a node.

    Raises:
        ModuleNotFoundError: ``pymetis`` is not installed.
        fastgraph.dist.PartitionError: METIS failed.
    """
    cache = cache_of(pattern.ptr.device)

    def make() -> list[int]:
        return [clusters_of_cache(size, row_bytes, cache) for size in pattern.sizes]

    return clusters_by_metis(pattern, decided(make) if pattern.is_on_ranks else make())


def _by_metis(pattern: DualPattern, counts: list[int]) -> Tensor:
    """The cluster of each node, on the host."""
    ptr, sources = (part.cpu() for part in edges_of(pattern))
    given, first = [], 0
    for graph, (size, count) in enumerate(zip(pattern.sizes, counts, strict=True)):
        if count > max(size, 1):
            raise ValueError(
                f"clusters: expected at most {size}, as graph {graph} has nodes, got {count}"
            )
        begins = ptr[first : first + size + 1]
        own = sources[int(begins[0]) : int(begins[-1])] - first
        given.append((begins - begins[0], own, count))
        first += size
    make = partial(cluster_each, given)
    # METIS may give other ranks something else.
    parts = decided(make) if pattern.is_on_ranks else make()
    before = offsets_of(torch.tensor(counts, dtype=torch.int64)).tolist()
    found = [own + start for own, start in zip(parts, before, strict=False)]
    return torch.cat(found) if found else sources.new_zeros(0)


def clusters_given(pattern: DualPattern, number: Tensor) -> Clusters:
    """Clusters by numbers that go from 0 on in each graph.

    Args:
        pattern: of the graphs.
        number: of the cluster of each node, int64 ``[nodes]``.

    Raises:
        ValueError: a number is negative, there is not one for each node, or a graph has fewer
            nodes than clusters.
    """
    number = whole(number)
    if number.dtype != torch.int64 or list(number.shape) != [pattern.num_nodes]:
        raise ValueError(
            f"clusters: expected int64 [{pattern.num_nodes}], one for each node, "
            f"got {number.dtype} {list(number.shape)}"
        )
    number = number.to(pattern.ptr.device)
    if number.numel() and int(number.min()) < 0:
        raise ValueError(f"clusters: expected numbers from 0 on, got {int(number.min())}")
    graph = pattern.graph_of_nodes
    largest = graph.new_zeros(pattern.num_graphs).scatter_reduce(0, graph, number, "amax")
    counts = largest + 1
    sizes = torch.tensor(pattern.sizes, device=graph.device)
    if bool((counts > sizes.clamp(min=1)).any()):
        wrong = int((counts > sizes.clamp(min=1)).nonzero()[0])
        raise ValueError(
            f"clusters: expected at most {pattern.sizes[wrong]}, as graph {wrong} has nodes, "
            f"got {int(counts[wrong])}"
        )
    return _arranged(number + offsets_of(counts)[graph], counts)


def edges_of(pattern: DualPattern) -> tuple[Tensor, Tensor]:
    """Offsets of nodes, and whom they attend to along edges, without loops, tokens and path."""
    is_edge = pattern.types == EDGE
    ptr = offsets_of(is_edge.long())[pattern.ptr[: pattern.num_nodes + 1]]
    return ptr, pattern.sources[is_edge]


def _arranged(number: Tensor, counts: Tensor) -> Clusters:
    counts = counts.to(number.device)
    order = number.argsort(stable=True)
    offsets = offsets_of(torch.bincount(number, minlength=int(counts.sum())))
    nodes = torch.arange(len(number), device=number.device)
    place = torch.empty_like(nodes)
    place[order] = nodes - offsets[number[order]]
    return Clusters(counts, number, place, order, offsets)
