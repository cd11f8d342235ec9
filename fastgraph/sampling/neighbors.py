"""Neighbour sampling over several hops, of one type of edges or of many."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fastgraph.sampling.arguments import (
    check_flags,
    check_keys,
    check_mappings,
    check_relation,
    check_weights,
    checked_count,
    fanouts,
)
from fastgraph.sampling.native_calls import (
    call_native,
    check_all_tensors,
    check_tensors,
    in_named_items,
)
from fastgraph.sampling.random_seeds import chosen_seed

NodeType = str
EdgeType = tuple[str, str, str]
"""Type of the sources, name of the relation, type of the destinations."""


class NeighborSample(NamedTuple):
    """The sampled graph of :func:`neighbor_sample`.

    Edge ``i`` leads from ``node[row[i]]`` to ``node[col[i]]``, and ``col`` ascends: edges are
    grouped by destination, as compressed columns have them.
    """

    row: Tensor
    """Sources of edges as positions in ``node``, ``[edges]``, of ``row``'s dtype."""
    col: Tensor
    """Destinations of edges as positions in ``node``, ``[edges]``, ascending."""
    node: Tensor
    """Nodes of the graph, ``[nodes]``: all seeds as they came, then others as they were found."""
    edge: Tensor | None
    """Places of edges in the graph's ``row``, ``[edges]``, of ``colptr``'s dtype, if asked for."""
    batch: Tensor | None
    """The seed, by its position, to whose sample each node belongs, if samples are disjoint."""
    num_sampled_nodes: list[int]
    """How many nodes are seeds, and how many each hop has found: one more than hops."""
    num_sampled_edges: list[int] | None
    """How many edges each hop has drawn; ``None`` for an induced subgraph."""


class HeteroNeighborSample(NamedTuple):
    """The sampled graph of :func:`hetero_neighbor_sample`, by types of nodes and of edges.

    Has every type of nodes that an edge type or ``seed`` names and every type of edges. Members are
    those of :class:`NeighborSample`; positions count within one type of nodes.
    """

    row: dict[EdgeType, Tensor]
    col: dict[EdgeType, Tensor]
    node: dict[NodeType, Tensor]
    edge: dict[EdgeType, Tensor] | None
    batch: dict[NodeType, Tensor] | None
    num_sampled_nodes: dict[NodeType, list[int]]
    num_sampled_edges: dict[EdgeType, list[int]] | None


def neighbor_sample(
    colptr: Tensor,
    row: Tensor,
    seed: Tensor,
    num_neighbors: Sequence[int],
    *,
    node_time: Tensor | None = None,
    edge_time: Tensor | None = None,
    seed_time: Tensor | None = None,
    edge_weight: Tensor | None = None,
    replace: bool = False,
    directed: bool = True,
    disjoint: bool = False,
    temporal_strategy: str = "uniform",
    return_edge_id: bool = True,
    random_seed: int | None = None,
) -> NeighborSample:
    """Sample neighbours of seeds, neighbours of these, and so on (Hamilton et al., NeurIPS 2017).

    In each hop every node that the hop before has found (in the first, every seed) draws edges
    among those that lead to it. A seed that comes twice draws twice, and edges from it start at its
    first position, unless samples are disjoint.

    Args:
        colptr: Where the edges of each destination begin and end, ``[nodes + 1]``, int32 or int64.
        row: The source of each edge, ``[edges]``, int32 or int64.
        seed: Nodes whose neighbours are sampled, ``[seeds]``, of ``row``'s dtype.
        num_neighbors: How many edges a node draws in each hop; all of them for ``-1``.
        node_time: Time of each node, ``[nodes]``, int64. Only edges from nodes that are not later
            than the seed are drawn; those of one destination must be sorted by the source's time.
            Needs ``disjoint``.
        edge_time: Time of each edge, ``[edges]``, int64, in place of ``node_time``: only edges
            that are not later than the seed are drawn. Those of one destination must be sorted by
            it. Needs ``disjoint`` and ``seed_time``.
        seed_time: Time of each seed, ``[seeds]``, int64; by default that of its node.
        edge_weight: Weight of each edge, ``[edges]``, float32 or float64, at least 0: the next edge
            is drawn with a probability in proportion to it among those that may still be drawn, and
            one of weight 0 never, unless a node takes all its edges without drawing.
        replace: Whether an edge may be drawn more than once. A node without edges draws none.
        directed: Whether the graph has only the edges that were drawn, rather than all edges
            between its nodes.
        disjoint: Whether each seed has a sample of its own, without nodes in common.
        temporal_strategy: ``"uniform"``, or ``"last"`` for the latest edges that may be drawn.
        return_edge_id: Whether the sample has ``edge``.
        random_seed: Of the random numbers, any int64; by default drawn from torch's generator, so
            that :func:`torch.manual_seed` repeats the sample. It alone decides, for any number of
            threads.

    Raises:
        TypeError: An argument has another type or dtype.
        ValueError: Shapes or options do not fit, ``colptr`` falls, edges are not sorted by time or
            a weight is negative or not finite, among what the sample looks at.
        IndexError: ``seed``, or ``row`` where the sample looks at it, names no node.
    """
    check_tensors(colptr=colptr, row=row, seed=seed, node_time=node_time, edge_time=edge_time)
    check_tensors(seed_time=seed_time, edge_weight=edge_weight)
    check_flags(
        replace=replace, directed=directed, disjoint=disjoint, return_edge_id=return_edge_id
    )
    sampled = _sample(
        _Graph([colptr], [row], [0], [0], [None], [node_time], [edge_time], [edge_weight]),
        [seed],
        [seed_time],
        fanouts([num_neighbors]),
        _Manner(replace, directed, disjoint, temporal_strategy, random_seed),
        _NAMES_OF_ONE,
    )
    node, of_row, of_col, edge = sampled[:4]
    num_nodes, num_edges = sampled[-2:]
    return NeighborSample(
        of_row,
        of_col,
        node,
        edge if return_edge_id else None,
        sampled[4] if disjoint else None,
        num_nodes.tolist(),
        num_edges.tolist() if directed else None,
    )


def hetero_neighbor_sample(
    colptr: Mapping[EdgeType, Tensor],
    row: Mapping[EdgeType, Tensor],
    seed: Mapping[NodeType, Tensor],
    num_neighbors: Mapping[EdgeType, Sequence[int]] | Sequence[int],
    *,
    num_nodes: Mapping[NodeType, int] | None = None,
    node_time: Mapping[NodeType, Tensor] | None = None,
    edge_time: Mapping[EdgeType, Tensor] | None = None,
    seed_time: Mapping[NodeType, Tensor] | None = None,
    edge_weight: Mapping[EdgeType, Tensor] | None = None,
    replace: bool = False,
    directed: bool = True,
    disjoint: bool = False,
    temporal_strategy: str = "uniform",
    return_edge_id: bool = True,
    random_seed: int | None = None,
) -> HeteroNeighborSample:
    """Sample neighbours along several types of edges in one call.

    In each hop the types of edges draw one after the other, in the order of ``colptr``, for the
    nodes that the hop before has found. Arguments are those of :func:`neighbor_sample` by type, and
    all tensors of ``colptr`` have one dtype, as have all of ``row`` and ``seed``.

    Args:
        colptr: Of each type of edges, over its destinations.
        row: Of each type of edges.
        seed: Of some types of nodes. Disjoint samples are numbered in this order.
        num_neighbors: Of each type of edges, or for all of them; each as many hops.
        num_nodes: Of types of nodes, to check ids of those to which no type of edges leads, and to
            find them faster; other counts are those of ``colptr``.
        node_time: Of some types of nodes; applies to edges that come from them.
        edge_time: Of some types of edges.
        seed_time: Of each type of nodes in ``seed``; needed where ``node_time`` has not that type.
        edge_weight: Of some types of edges.
        replace: See :func:`neighbor_sample`, as for those below.
        directed: See there.
        disjoint: See there.
        temporal_strategy: See there.
        return_edge_id: See there.
        random_seed: See there.

    Raises:
        TypeError: See :func:`neighbor_sample`; errors name the argument and its type.
        ValueError: See there; besides where a type has no entry that it needs, or one that the
            graph has not has one, and where counts of one type of nodes differ.
        IndexError: See there.
    """
    check_flags(
        replace=replace, directed=directed, disjoint=disjoint, return_edge_id=return_edge_id
    )
    check_mappings(colptr=colptr, row=row, seed=seed, num_nodes=num_nodes, node_time=node_time)
    check_mappings(edge_time=edge_time, seed_time=seed_time, edge_weight=edge_weight)
    relations = list(colptr)
    for relation in relations:
        check_relation(relation)
    # Disjoint samples are numbered by these, so types with seeds come first.
    ends = chain.from_iterable((src, dst) for src, _, dst in relations)
    types = list(dict.fromkeys(chain(seed, ends)))
    place = {name: i for i, name in enumerate(types)}
    given_tensors = (colptr, row, seed, node_time, edge_time, seed_time, edge_weight)
    for name, tensors in zip(_NAMES, given_tensors, strict=True):
        check_all_tensors(name, (tensors or {}).items())
    if not types:
        raise ValueError("seed must have a type of nodes, got none")
    for name, given in (("row", row), ("num_neighbors", num_neighbors)):
        if isinstance(given, Mapping) and (missing := [r for r in relations if r not in given]):
            raise ValueError(f"{name} must have every type of edges of colptr, lacks {missing}")
    check_keys(types, "types of nodes", num_nodes=num_nodes, node_time=node_time)
    check_keys(seed, "types of seeds", seed_time=seed_time)
    check_keys(relations, "types of edges", row=row, num_neighbors=num_neighbors)
    check_keys(relations, "types of edges", edge_time=edge_time, edge_weight=edge_weight)
    counts = {
        name: checked_count(f"num_nodes[{name!r}]", count)
        for name, count in (num_nodes or {}).items()
    }
    if isinstance(num_neighbors, Mapping):
        of_hops = fanouts([num_neighbors[r] for r in relations])
    else:
        of_hops = fanouts([num_neighbors] * len(relations))
    no_seeds = next(chain(seed.values(), row.values())).new_empty(0)
    sampled = _sample(
        _Graph(
            [colptr[r] for r in relations],
            [row[r] for r in relations],
            [place[src] for src, _, _ in relations],
            [place[dst] for _, _, dst in relations],
            [counts.get(t) for t in types],
            [(node_time or {}).get(t) for t in types],
            [(edge_time or {}).get(r) for r in relations],
            [(edge_weight or {}).get(r) for r in relations],
        ),
        [seed.get(t, no_seeds) for t in types],
        [(seed_time or {}).get(t) for t in types],
        of_hops,
        _Manner(replace, directed, disjoint, temporal_strategy, random_seed),
        _names_of_items(types, relations),
    )
    of_types, of_relations = len(types), len(relations)
    nodes, rest = sampled[:of_types], sampled[of_types:]
    rows, cols, edges = (rest[i * of_relations : (i + 1) * of_relations] for i in range(3))
    batches = rest[3 * of_relations : -2]
    node_counts = sampled[-2].view(of_types, -1).tolist()
    edge_counts = sampled[-1].view(of_relations, of_hops.shape[0]).tolist()
    return HeteroNeighborSample(
        dict(zip(relations, rows, strict=True)),
        dict(zip(relations, cols, strict=True)),
        dict(zip(types, nodes, strict=True)),
        dict(zip(relations, edges, strict=True)) if return_edge_id else None,
        dict(zip(types, batches, strict=True)) if disjoint else None,
        dict(zip(types, node_counts, strict=True)),
        dict(zip(relations, edge_counts, strict=True)) if directed else None,
    )


_OF_TYPES = ("seed", "node_time", "seed_time")
_OF_RELATIONS = ("colptr", "row", "edge_time", "edge_weight")
_ARGUMENTS = _OF_TYPES + _OF_RELATIONS
_NAMES_OF_ONE = {f"{name}[0]": name for name in _ARGUMENTS}
_NAMES = ("colptr", "row", "seed", "node_time", "edge_time", "seed_time", "edge_weight")


def _names_of_items(types: list[NodeType], relations: list[EdgeType]) -> dict[str, str]:
    """Items of lists, as native errors name them, as items of the caller's dictionaries."""
    named = ((_OF_TYPES, types), (_OF_RELATIONS, relations))
    return {
        f"{name}[{i}]": f"{name}[{key!r}]"
        for names, keys in named
        for name in names
        for i, key in enumerate(keys)
    }


class _Graph(NamedTuple):
    """A graph by numbers of types of nodes and of edges."""

    colptr: list[Tensor]
    row: list[Tensor]
    src_type: list[int]
    dst_type: list[int]
    num_nodes: list[int | None]
    node_time: list[Tensor | None]
    edge_time: list[Tensor | None]
    edge_weight: list[Tensor | None]


class _Manner(NamedTuple):
    """How edges are drawn."""

    replace: bool
    directed: bool
    disjoint: bool
    temporal_strategy: str
    random_seed: int | None


def _sample(
    graph: _Graph,
    seed: list[Tensor],
    seed_time: list[Tensor | None],
    of_hops: Tensor,
    manner: _Manner,
    names: dict[str, str],
) -> list[Tensor]:
    """The native call; ``names`` are those of items in errors."""
    if manner.temporal_strategy not in ("uniform", "last"):
        raise ValueError(
            f"temporal_strategy must be 'uniform' or 'last', got {manner.temporal_strategy!r}"
        )
    counts = [-1 if count is None else count for count in graph.num_nodes]
    of_weights = [names[f"edge_weight[{i}]"] for i in range(len(graph.edge_weight))]
    check_weights(graph.edge_weight, of_weights)
    with in_named_items(names):
        for type_, own in zip(graph.dst_type, graph.colptr, strict=True):
            if counts[type_] == -1:
                counts[type_] = own.numel() - 1
        return call_native(
            "sample_neighbors",
            *(graph.colptr, graph.row),
            *(_numbers(*values) for values in (graph.src_type, graph.dst_type, counts)),
            *(
                [nodes.contiguous() for nodes in seed],
                of_hops,
                graph.node_time,
                graph.edge_time,
                seed_time,
                graph.edge_weight,
            ),
            *(bool(manner.replace), bool(manner.directed), bool(manner.disjoint)),
            manner.temporal_strategy == "last",
            chosen_seed(manner.random_seed),
        )


@functools.lru_cache(maxsize=64)  # making a small tensor takes as long as drawing for some seeds
def _numbers(*values: int) -> Tensor:
    with _disable_current_modes():  # of which a tensor that is kept may have nothing
        return torch.tensor(values, dtype=torch.int64, device="cpu")
