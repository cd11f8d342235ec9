"""The definition of neighbour sampling in plain Python, for what does not depend on chance."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

Choose = Callable[[list[int], int], list[int]]
"""Some of a node's edges."""

EdgeType = tuple[str, str, str]


def all_or_last(edges: list[int], count: int) -> list[int]:
    """Those edges that ``temporal_strategy="last"`` chooses: all, or the last ones."""
    return edges if count < 0 or count >= len(edges) else edges[len(edges) - count :]


def hetero_sample(
    colptr: Mapping[EdgeType, Tensor],
    row: Mapping[EdgeType, Tensor],
    seed: Mapping[str, Tensor],
    num_neighbors: Mapping[EdgeType, Sequence[int]],
    *,
    node_time: Mapping[str, Tensor] | None = None,
    edge_time: Mapping[EdgeType, Tensor] | None = None,
    seed_time: Mapping[str, Tensor] | None = None,
    disjoint: bool = False,
    choose: Choose = all_or_last,
) -> dict[str, Any]:
    """Nodes, edges and counts by type, as lists: what the loaders of PyG make a batch of."""
    kinds = dict.fromkeys([*seed, *(end for kind in colptr for end in (kind[0], kind[2]))])
    nodes: dict[str, list[tuple[int, int]]] = {kind: [] for kind in kinds}
    places: dict[str, dict[tuple[int, int], int]] = {kind: {} for kind in kinds}
    times: list[int | None] = []
    for kind, ids in seed.items():
        for position, node in enumerate(ids.tolist()):
            time = None
            if seed_time is not None and kind in seed_time:
                time = int(seed_time[kind][position])
            elif node_time is not None and kind in node_time:
                time = int(node_time[kind][node])
            key = (len(times) if disjoint else 0, node)
            times.append(time)
            places[kind].setdefault(key, len(nodes[kind]))
            nodes[kind].append(key)
    edges: dict[EdgeType, list[tuple[int, int, int]]] = {kind: [] for kind in colptr}
    node_counts = {kind: [len(found)] for kind, found in nodes.items()}
    edge_counts: dict[EdgeType, list[int]] = {kind: [] for kind in colptr}
    begin = dict.fromkeys(kinds, 0)
    for hop in range(len(next(iter(num_neighbors.values()), ()))):
        end = {kind: len(found) for kind, found in nodes.items()}
        for kind in colptr:
            source, _, target = kind
            before = len(edges[kind])
            for position in range(begin[target], end[target]):
                group, node = nodes[target][position]
                here = list(range(int(colptr[kind][node]), int(colptr[kind][node + 1])))
                if node_time is not None and source in node_time:
                    here = [e for e in here if node_time[source][row[kind][e]] <= times[group]]
                if edge_time is not None and kind in edge_time:
                    here = [e for e in here if edge_time[kind][e] <= times[group]]
                for edge in choose(here, num_neighbors[kind][hop]):
                    key = (group, int(row[kind][edge]))
                    if key not in places[source]:
                        places[source][key] = len(nodes[source])
                        nodes[source].append(key)
                    edges[kind].append((places[source][key], position, edge))
            edge_counts[kind].append(len(edges[kind]) - before)
        begin = end
        for kind in kinds:
            node_counts[kind].append(len(nodes[kind]) - end[kind])
    return {"nodes": nodes, "edges": edges, "node_counts": node_counts, "edge_counts": edge_counts}
