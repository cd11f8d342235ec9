"""The definition of neighbour sampling in plain Python.

:func:`check` judges samples that depend on chance, and :func:`hetero_sample` makes those that do
not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastgraph.sampling import HeteroNeighborSample, NeighborSample, hetero_neighbor_sample
from fastgraph.sampling.neighbors import EdgeType, NodeType

NODE = "node"
EDGE = (NODE, "to", NODE)
Choose = Callable[[list[int], int], list[int]]
"""Some of a node's edges."""


@dataclass
class Columns:
    """One type of edges by destination."""

    colptr: Tensor
    row: Tensor
    weight: Tensor | None = None
    time: Tensor | None = None

    @property
    def dst(self) -> Tensor:
        return torch.arange(len(self.colptr) - 1).repeat_interleave(self.colptr.long().diff())


@dataclass
class Call:
    """A call of the sampler for any types, with the defaults of the sampler."""

    graph: dict[EdgeType, Columns]
    seed: dict[NodeType, Tensor]
    fanouts: dict[EdgeType, list[int]]
    node_time: dict[NodeType, Tensor] = field(default_factory=dict)
    seed_time: dict[NodeType, Tensor] = field(default_factory=dict)
    replace: bool = False
    directed: bool = True
    disjoint: bool = False
    temporal_strategy: str = "uniform"

    def run(self, random_seed: int | None = None) -> HeteroNeighborSample:
        return hetero_neighbor_sample(
            {r: columns.colptr for r, columns in self.graph.items()},
            {r: columns.row for r, columns in self.graph.items()},
            self.seed,
            self.fanouts,
            node_time=self.node_time or None,
            edge_time={r: c.time for r, c in self.graph.items() if c.time is not None} or None,
            seed_time=self.seed_time or None,
            edge_weight={r: c.weight for r, c in self.graph.items() if c.weight is not None},
            replace=self.replace,
            directed=self.directed,
            disjoint=self.disjoint,
            temporal_strategy=self.temporal_strategy,
            random_seed=random_seed,
        )

    def times_of_seeds(self) -> list[int | None]:
        times: list[int | None] = []
        for kind, seeds in self.seed.items():
            if kind in self.seed_time:
                times += self.seed_time[kind].tolist()
            elif kind in self.node_time:
                times += self.node_time[kind][seeds.long()].tolist()
            else:
                times += [None] * len(seeds)
        return times

    def allowed(self, relation: EdgeType, node: int, until: int | None) -> list[int]:
        """Edges of a node that are not later than its seed."""
        columns = self.graph[relation]
        edges = list(range(int(columns.colptr[node]), int(columns.colptr[node + 1])))
        if columns.time is not None:
            return [e for e in edges if int(columns.time[e]) <= until]
        time = self.node_time.get(relation[0])
        if time is not None:
            return [e for e in edges if int(time[int(columns.row[e])]) <= until]
        return edges


def as_hetero(sample: NeighborSample) -> HeteroNeighborSample:
    """The sample of one type of edges, as one of many."""
    return HeteroNeighborSample(
        {EDGE: sample.row},
        {EDGE: sample.col},
        {NODE: sample.node},
        None if sample.edge is None else {EDGE: sample.edge},
        None if sample.batch is None else {NODE: sample.batch},
        {NODE: sample.num_sampled_nodes},
        None if sample.num_sampled_edges is None else {EDGE: sample.num_sampled_edges},
    )


def check(call: Call, sample: HeteroNeighborSample) -> None:
    """Assert that a sample is one of those that the definition allows."""
    assert sample.edge is not None
    kinds = {kind for src, _, dst in call.graph for kind in (src, dst)} | set(call.seed)
    assert set(sample.node) == kinds
    hops = max(map(len, call.fanouts.values()), default=0)
    until = call.times_of_seeds()
    nodes: dict[str, list[tuple[int, int]]] = {kind: [] for kind in kinds}
    number: dict[str, dict[tuple[int, int], int]] = {kind: {} for kind in kinds}
    group = 0
    for kind, seeds in call.seed.items():
        for seed in seeds.tolist():
            key = (group if call.disjoint else 0, seed)
            number[kind].setdefault(key, len(nodes[kind]))
            nodes[kind].append(key)
            group += 1
    used = dict.fromkeys(call.graph, 0)
    begin = dict.fromkeys(kinds, 0)
    counts = {kind: [len(nodes[kind])] for kind in kinds}
    drawn = {relation: [list(t.tolist()) for t in edges_of(sample, relation)] for relation in used}
    for hop in range(hops):
        end = {kind: len(nodes[kind]) for kind in kinds}
        for relation, columns in call.graph.items():
            src, _, dst = relation
            rows, cols, edges = drawn[relation]
            before = used[relation]
            for position in range(begin[dst], end[dst]):
                owner, node = nodes[dst][position]
                may = call.allowed(relation, node, until[owner] if call.disjoint else None)
                at = used[relation]
                count = expected_count(call, relation, may, hop)
                if call.directed:
                    mine = edges[at : at + count]
                    assert cols[at : at + count] == [position] * count
                else:  # drawn edges are not told
                    continue
                check_choice(call, relation, may, mine, hop)
                for i, e in enumerate(mine):
                    key = (owner, int(columns.row[e]))
                    if key not in number[src]:
                        number[src][key] = len(nodes[src])
                        nodes[src].append(key)
                    assert rows[at + i] == number[src][key]
                used[relation] += count
            if call.directed:
                assert sample.num_sampled_edges is not None
                assert sample.num_sampled_edges[relation][hop] == used[relation] - before
        for kind in kinds:
            begin[kind] = end[kind]
            counts[kind].append(len(nodes[kind]) - end[kind])
    if not call.directed:
        check_induced(call, sample, until)
        return
    for relation in call.graph:
        assert len(drawn[relation][0]) == used[relation]
    for kind in kinds:
        assert sample.node[kind].tolist() == [node for _, node in nodes[kind]]
        assert sample.num_sampled_nodes[kind] == counts[kind]
        if call.disjoint:
            assert sample.batch is not None
            assert sample.batch[kind].tolist() == [owner for owner, _ in nodes[kind]]


def edges_of(sample: HeteroNeighborSample, relation: EdgeType) -> tuple[Tensor, Tensor, Tensor]:
    assert sample.edge is not None
    return sample.row[relation], sample.col[relation], sample.edge[relation]


def expected_count(call: Call, relation: EdgeType, may: list[int], hop: int) -> int:
    fanout = call.fanouts[relation][hop]
    is_last = call.temporal_strategy == "last" and is_temporal(call, relation) and fanout >= 0
    if is_last:
        may = may[max(len(may) - fanout, 0) :]
    if fanout < 0 or (not call.replace and fanout >= len(may)):
        return len(may)
    weight = call.graph[relation].weight
    if weight is not None:
        may = [e for e in may if float(weight[e]) > 0]
    return (fanout if may else 0) if call.replace else min(fanout, len(may))


def is_temporal(call: Call, relation: EdgeType) -> bool:
    return call.graph[relation].time is not None or relation[0] in call.node_time


def check_choice(call: Call, relation: EdgeType, may: list[int], mine: list[int], hop: int) -> None:
    fanout, weight = call.fanouts[relation][hop], call.graph[relation].weight
    if call.temporal_strategy == "last" and is_temporal(call, relation) and fanout >= 0:
        may = may[max(len(may) - fanout, 0) :]
    assert set(mine) <= set(may)
    takes_all = fanout < 0 or (not call.replace and fanout >= len(may))
    if takes_all:
        assert mine == may
    if not call.replace:
        assert len(set(mine)) == len(mine)
    if weight is not None and not takes_all:
        assert all(float(weight[e]) > 0 for e in mine)


def check_induced(call: Call, sample: HeteroNeighborSample, until: list[int | None]) -> None:
    assert sample.num_sampled_edges is None
    for relation, columns in call.graph.items():
        src, _, dst = relation
        first: dict[tuple[int, int], int] = {}
        owners = {
            kind: sample.batch[kind].tolist() if sample.batch else [0] * len(sample.node[kind])
            for kind in (src, dst)
        }
        for position, node in enumerate(sample.node[src].tolist()):
            first.setdefault((owners[src][position], node), position)
        expected = []
        for position, node in enumerate(sample.node[dst].tolist()):
            owner = owners[dst][position]
            for e in call.allowed(relation, node, until[owner] if call.disjoint else None):
                found = first.get((owner, int(columns.row[e])))
                if found is not None:
                    expected.append((found, position, e))
        rows, cols, edges = edges_of(sample, relation)
        assert list(zip(rows.tolist(), cols.tolist(), edges.tolist(), strict=True)) == expected


def columns(src: Tensor, dst: Tensor, num_dst: int) -> Columns:
    order = dst.argsort(stable=True)
    counts = torch.bincount(dst, minlength=num_dst)
    return Columns(torch.cat([counts.new_zeros(1), counts.cumsum(0)]), src[order])


def random_columns(
    num_src: int, num_dst: int, num_edges: int, generator: torch.Generator
) -> Columns:
    """Edges at random, with a hub, duplicates and, mostly, isolated nodes."""
    src = torch.randint(num_src, (num_edges,), generator=generator)
    dst = torch.randint(num_dst, (num_edges,), generator=generator)
    dst[: num_edges // 4] = num_dst // 2
    dst[dst == 1] = 0
    return columns(src, dst, num_dst)


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
