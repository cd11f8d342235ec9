"""Sampling of heterogeneous graphs by budgets (Hu et al., WWW 2020, algorithms 1 and 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

_SEPARATOR = "__"
_MOST_NEIGHBOURS = 520
"""So many neighbours of a node, drawn with replacement where it has more, fill the budget."""


class _Budget:
    """The nodes of one type that neighbours have named and that are not sampled yet."""

    def __init__(self) -> None:
        self.nodes = torch.empty(0, dtype=torch.int64)
        self.shares = torch.empty(0, dtype=torch.float64)

    def add(self, nodes: Tensor, shares: Tensor, sampled: Tensor) -> None:
        """Add to the shares of nodes, without those that are sampled already."""
        new = ~torch.isin(nodes, sampled)
        nodes = torch.cat([self.nodes, nodes[new]])
        shares = torch.cat([self.shares, shares[new]])
        self.nodes, places = nodes.unique(return_inverse=True)
        self.shares = torch.zeros(self.nodes.numel(), dtype=shares.dtype)
        self.shares.index_add_(0, places, shares)

    def draw(self, count: int) -> Tensor:
        """Take nodes out, with probabilities in proportion to squares of their shares."""
        if count >= self.nodes.numel():
            taken = torch.arange(self.nodes.numel())
        else:  # the largest of these keys are such a draw without replacement
            keys = self.shares.square() / torch.empty_like(self.shares).exponential_()
            taken = keys.topk(count).indices
        nodes = self.nodes[taken]
        left = torch.ones(self.nodes.numel(), dtype=torch.bool)
        left[taken] = False
        self.nodes, self.shares = self.nodes[left], self.shares[left]
        return nodes


def hgt_sample(
    colptr_dict: Mapping[str, Tensor],
    row_dict: Mapping[str, Tensor],
    input_node_dict: Mapping[str, Tensor],
    num_samples_dict: Mapping[str, Sequence[int]],
    num_hops: int,
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """``torch_sparse::hgt_sample``: about as many nodes of each type, and all edges between them.

    Every node that is sampled gives each neighbour ``1 / degree`` for its budget, and in every hop
    nodes of each type are drawn from theirs.

    Args:
        colptr_dict: where the edges of each destination begin and end, by types of edges
            ``source__relation__destination``.
        row_dict: their sources.
        input_node_dict: the seeds, by types of nodes.
        num_samples_dict: how many nodes each hop draws, by types of nodes.
        num_hops: how many hops.

    Returns:
        Nodes by type, seeds first, and sources, destinations, as positions in these, and places of
        edges by type of edges.
    """
    ends = {name: (name.split(_SEPARATOR)[0], name.split(_SEPARATOR)[-1]) for name in colptr_dict}
    types = dict.fromkeys(
        [*num_samples_dict, *input_node_dict, *(kind for pair in ends.values() for kind in pair)]
    )
    empty = torch.empty(0, dtype=torch.int64)
    nodes = {kind: input_node_dict.get(kind, empty) for kind in types}
    budgets = {kind: _Budget() for kind in types}
    latest = dict(nodes)
    for hop in range(num_hops):
        for name, (source, target) in ends.items():
            named, shares = _named(colptr_dict[name], row_dict[name], latest[target])
            budgets[source].add(named, shares, nodes[source])
        latest = dict.fromkeys(types, empty)
        for kind, counts in num_samples_dict.items():
            latest[kind] = budgets[kind].draw(counts[hop])
            nodes[kind] = torch.cat([nodes[kind], latest[kind]])
    rows, cols, edges = {}, {}, {}
    for name, (source, target) in ends.items():
        rows[name], cols[name], edges[name] = _between(
            colptr_dict[name], row_dict[name], nodes[source], nodes[target]
        )
    return nodes, rows, cols, edges


def _edges_of(colptr: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
    """All edges of nodes, and the position in ``nodes`` of the node of each."""
    begins, degrees = colptr[nodes], colptr.diff()[nodes]
    owners = torch.arange(nodes.numel()).repeat_interleave(degrees)
    before = degrees.cumsum(0) - degrees
    return torch.arange(owners.numel()) + (begins - before)[owners], owners


def _named(colptr: Tensor, row: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
    """The neighbours of nodes, and what they get for their budgets."""
    degrees = colptr.diff()[nodes]
    few = degrees <= _MOST_NEIGHBOURS
    edges, owners = _edges_of(colptr, nodes[few])
    shares = 1.0 / degrees[few][owners].double()
    hubs = nodes[~few]
    if hubs.numel() > 0:
        drawn = torch.rand(hubs.numel(), _MOST_NEIGHBOURS, dtype=torch.float64)
        places = (drawn * degrees[~few].unsqueeze(1)).long()
        edges = torch.cat([edges, (colptr[hubs].unsqueeze(1) + places).flatten()])
        of_hubs = shares.new_full((hubs.numel() * _MOST_NEIGHBOURS,), 1.0 / _MOST_NEIGHBOURS)
        shares = torch.cat([shares, of_hubs])
    return row[edges], shares


def _between(
    colptr: Tensor, row: Tensor, sources: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """All edges between sampled nodes, by target: both ends as positions, and which they are."""
    edges, cols = _edges_of(colptr, targets)
    ordered, order = sources.sort(stable=True)  # of a node that is there twice, the first
    neighbours = row[edges]
    places = torch.searchsorted(ordered, neighbours).clamp_(max=max(ordered.numel() - 1, 0))
    if ordered.numel() == 0:
        return edges[:0], cols[:0], edges[:0]
    kept = ordered[places] == neighbours
    return order[places[kept]], cols[kept], edges[kept]
