"""Local nodes: for each node a sample of those that are one or two hops away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgraph.machine import native, pages
from fastgraph.sampling.native_calls import check_tensors, in_named_items
from fastgraph.tokens.graph_files import MOST_NODES, NeighborLists, as_lists

VARIANTS = ("paper", "release")
_CHUNK = 1 << 20
"""How many values of a list of any length are looked at together."""

_NAMES = {
    "in": {"ptr[0]": "colptr", "index[0]": "row"},
    "out": {"ptr[0]": "rowptr", "index[0]": "col"},
    "both": {"ptr[0]": "colptr", "index[0]": "row", "ptr[1]": "rowptr", "index[1]": "col"},
}
"""Lists of each direction, as errors name them."""

Allocate = Callable[[str, tuple[int, ...], torch.dtype], Tensor]


class Manner(NamedTuple):
    """How local nodes are sampled; see :func:`local_nodes`."""

    k: int
    seed: int
    direction: str
    hub_cap: int | None
    variant: str


class Counts(NamedTuple):
    """Of all rows that were sampled.

    Attributes:
        candidates: entries of lists that were looked at.
        few: rows of nodes with fewer than ``k - 1`` nodes in one or two hops, without ``none``.
        none: rows of nodes without any.
    """

    candidates: int = 0
    few: int = 0
    none: int = 0

    def plus(self, other: Counts) -> Counts:
        """Those of both."""
        return Counts(*(a + b for a, b in zip(self, other, strict=True)))


def local_nodes(
    graph: Any,
    k: int,
    *,
    seed: int = 0,
    nodes: Tensor | None = None,
    direction: str = "in",
    hub_cap: int | None = None,
    variant: str = "paper",
    num_nodes: int | None = None,
) -> Tensor:
    """Sample nodes one or two hops away (Dwivedi et al., arXiv 2312.11109, algorithm 1).

    The row of node ``i`` begins with ``i``. ``k - 1`` of the distinct nodes that are one or two
    hops away, without ``i``, follow: without replacement if there are as many, else with
    replacement (line 7). A node that has none draws from all nodes (line 9), with replacement where
    there are fewer than ``k``.

    A node puts all others in a random order of its own, which is a function of the seed, and takes
    the first that it meets. So each set of ``k - 1`` is as likely as another, as are the first few
    of a row, and a row depends on the graph, ``k``, ``seed``, and its node alone: not on which
    other rows are asked for, nor on threads. The product of the adjacency matrix with itself, by
    which the authors' release finds two hops, is never made.

    Args:
        graph: an ``edge_index`` ``[2, edges]``; compressed columns ``(colptr, row)``; or a
            :class:`TokenGraph`, such as :func:`open_graph` maps. int32 or int64.
        k: how many nodes a row has, at least 1.
        seed: any int64.
        nodes: whose rows are sampled: their numbers ``[rows]``, int64 or int32, or a mask
            ``[nodes]`` of bools; by default those of all.
        direction: ``"in"`` walks against edges, as PyG's ``NeighborLoader`` does, ``"out"`` along
            them, as the release does, and ``"both"`` either way.
        hub_cap: longer lists of neighbours are thinned to as many, once for all rows, by a random
            order that the seed and the hub give. By default none is.
        variant: ``"release"`` samples from the neighbours followed by the distinct nodes at the end
            of two hops, so that a node may come twice, and the row's own among them; lists that are
            too short are repeated in order.
        num_nodes: of an ``edge_index``, where isolated nodes follow the last.

    Returns:
        Rows, int32 ``[rows, k]``.

    Raises:
        TypeError: an argument has another type or dtype.
        ValueError: shapes or options do not fit, or ``ptr`` of the graph's lists falls or ends
            elsewhere than at the number of edges, where it was looked at.
        IndexError: ``nodes``, or a list that was looked at, names no node.
    """
    manner = checked_manner(k, seed, direction, hub_cap, variant)
    sampler = LocalNodesSampler(as_lists(graph, direction, num_nodes), manner)
    if nodes is None:
        nodes = torch.arange(sampler.num_nodes)
    rows, _ = sampler.sample(nodes)
    return rows


def chosen_nodes(nodes: Tensor, num_nodes: int) -> Tensor:
    """Numbers of nodes, int64, of numbers or of a mask; whether they are in range is not looked at.

    Raises:
        TypeError: they are neither.
        ValueError: they have another shape.
    """
    if nodes is None:
        raise TypeError("nodes must be a tensor, got None")
    check_tensors(nodes=nodes)
    if nodes.dim() != 1:
        raise ValueError(f"nodes must have one dimension, got shape {list(nodes.shape)}")
    if nodes.dtype is torch.bool:
        if nodes.numel() != num_nodes:
            raise ValueError(f"nodes must be a mask of {num_nodes} nodes, got {nodes.numel()}")
        return nodes.nonzero().flatten()
    if nodes.dtype not in (torch.int32, torch.int64):
        dtype = str(nodes.dtype).removeprefix("torch.")
        raise TypeError(f"nodes must be int64, int32 or a mask of bools, got {dtype}")
    return nodes.to(torch.int64)


def checked_manner(k: Any, seed: Any, direction: str, hub_cap: Any, variant: str) -> Manner:
    """The arguments of :func:`local_nodes`, checked.

    Raises:
        TypeError: a number is no integer.
        ValueError: one is out of its range, or no choice.
    """
    for name, number in (("k", k), ("seed", seed), ("hub_cap", 1 if hub_cap is None else hub_cap)):
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"{name} must be an int, got {number!r}")
        if name != "seed" and not 1 <= number <= MOST_NODES:
            raise ValueError(f"{name} must be in [1, 2^31), got {number}")
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed must be in [-2^63, 2^63), got {seed}")
    if variant not in VARIANTS:
        raise ValueError(f"variant must be one of {VARIANTS}, got {variant!r}")
    return Manner(k, seed, direction, hub_cap, variant)


class LocalNodesSampler:
    """Samples rows of one graph in one manner, again and again.

    Args:
        lists: of the direction of the manner.
        manner: see :func:`checked_manner`.
        allocate: makes the tensors, by a name, for lists that are thinned; by default in memory.
        is_elsewhere: whether pages of the lists are read one by one, and asked for ahead. By
            default they are if the lists are in files larger than half of the memory; else the
            system reads what is around them, too, and soon has all.

    Attributes:
        num_nodes: of the graph.
        num_thinned: how many lists were longer than ``hub_cap``.
    """

    def __init__(
        self,
        lists: list[NeighborLists],
        manner: Manner,
        allocate: Allocate | None = None,
        is_elsewhere: bool | None = None,
    ) -> None:
        self.manner = manner
        self._ptr = [one.ptr for one in lists]
        self._index = [one.neighbors for one in lists]
        self.num_nodes = lists[0].ptr.numel() - 1
        if self.num_nodes > MOST_NODES:
            raise ValueError(f"graph must have less than 2^31 nodes, got {self.num_nodes}")
        if is_elsewhere is None:
            is_elsewhere = pages.is_elsewhere(*self._ptr, *self._index)
        self.is_elsewhere = is_elsewhere
        self._hubs: list[Tensor] = []
        self._thinned: list[Tensor] = []
        self._counts: list[Tensor] = []
        if manner.hub_cap is not None:
            names = list(_NAMES[manner.direction].values())
            for number, one in enumerate(lists):
                self._thin(one, manner.hub_cap, allocate or _in_memory, names[2 * number :])
        self.num_thinned = sum(hubs.numel() for hubs in self._hubs)

    def _thin(self, lists: NeighborLists, cap: int, allocate: Allocate, names: list[str]) -> None:
        starts = range(0, self.num_nodes, _CHUNK)
        long = [
            (lists.ptr[at : at + _CHUNK + 1].diff() > cap).nonzero().flatten() + at for at in starts
        ]
        hubs = torch.cat(long) if long else torch.empty(0, dtype=torch.int64)
        thinned = allocate(f"thinned-{len(self._hubs)}", (hubs.numel(), cap), lists.neighbors.dtype)
        counts = torch.empty(hubs.numel(), dtype=torch.int64)
        with in_named_items({"ptr": names[0], "index": names[1]}):
            native.library().thin_lists(*lists, hubs, self.manner.seed, thinned, counts)
        self._hubs.append(hubs)
        self._thinned.append(thinned)
        self._counts.append(counts)

    def sample(self, nodes: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Counts]:
        """The rows of some nodes.

        Args:
            nodes: see :func:`chosen_nodes`.
            rows: int32 ``[rows, k]``, which is written, if it is given.

        Returns:
            The rows, int32 ``[rows, k]``, and what was met.

        Raises:
            TypeError: ``nodes`` are neither numbers nor a mask.
            ValueError: see :func:`local_nodes`.
            IndexError: see there.
        """
        nodes = chosen_nodes(nodes, self.num_nodes)
        if rows is None:
            rows = torch.empty(nodes.numel(), self.manner.k, dtype=torch.int32)
        counted = torch.empty(3, dtype=torch.int64)
        names = _NAMES[self.manner.direction]
        with in_named_items(names):
            native.library().sample_local_nodes(
                *(self._ptr, self._index, self._hubs, self._thinned, self._counts),
                nodes.contiguous(),
                *(self.manner.variant == "release", self.manner.seed, self.is_elsewhere),
                *(rows, counted),
            )
        candidates, fewer, none = counted.tolist()
        return rows, Counts(candidates, fewer - none, none)


def _in_memory(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)
