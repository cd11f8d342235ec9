"""Patterns of attention along edges, and beside it of all pairs, in batches with tokens."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastgraph.graphs.graph import normal_mode
from fastgraph.graphs.memo import MEMO
from fastgraph.graphs.offsets import offsets_of
from fastgraph.graphs.ranks import are_on_ranks, whole
from fastgraph.layers.arguments import check_edges, check_flags, check_integers, check_kinds
from fastgraph.nn.conditions import BUDGET, Conditions, conditions
from fastgraph.nn.shortest_paths import distances_in_ranges, nodes_within

LOOP, EDGE, TOKEN, PATH, OTHER = range(5)
"""The types of pairs: a node and itself, an edge, a token and a node, an edge of the path alone,
and a pair of which only attention of all pairs knows."""

TYPES = 5

LONGEST = 250
"""Distances with types of their own, which are bytes."""

KEPT_PAIRS = 1 << 26
"""The types of so many pairs, of a byte each, are kept beside a pattern."""

BLOCK_PAIRS = 1 << 18
"""Distances are looked for among so many pairs at once, or those of one query."""


@dataclass(frozen=True, eq=False)
class Split:
    """A batch of which some graphs are dense.

    Attributes:
        rows: those of dense graphs, graph by graph, int64.
        offsets: of these graphs among ``rows``.
        sources, ptr, types: the entries of the other graphs, as those of :class:`DualPattern`.
        pairs: of rows of dense graphs.
    """

    rows: Tensor
    offsets: Tensor
    sources: Tensor
    ptr: Tensor
    types: Tensor
    pairs: int


@dataclass(frozen=True, eq=False)
class DualPattern:
    """Which rows attend to which, along edges, in a batch of graphs. Made by :func:`dual_pattern`.

    Rows are the nodes, as they are numbered, then one token for each graph, if there are any: edges
    of nodes need no offset.

    Attributes:
        num_nodes: in the batch.
        num_graphs: in the batch.
        has_token: whether there is a global token for each graph.
        has_path: whether consecutive nodes attend to each other.
        sources: whom rows attend to, row by row, int64 ``[entries]``, each once.
        ptr: offsets of rows among the entries, int64 ``[rows + 1]``.
        types: of entries, uint8 ``[entries]``: ``LOOP``, ``EDGE``, ``TOKEN``, ``PATH``, or
            ``TYPES + d - 2`` for nodes that are d edges apart, from 2 on.
        order: rows graph by graph, with the token behind the nodes, int64 ``[rows]``, or ``None``
            where that is the order of rows.
        offsets: of graphs among these, int64 ``[graphs + 1]``.
        sizes: nodes of each graph, without tokens.
        pairs: of rows of one graph, in all.
        hops: the longest distance that entries have as a type.
        is_on_ranks: whether it was made of tensors with rows on several ranks, each of which has
            all of it.
        reformed: what :class:`Reformation` keeps of it, each with its ``nbytes``.
    """

    num_nodes: int
    num_graphs: int
    has_token: bool
    has_path: bool
    sources: Tensor
    ptr: Tensor
    types: Tensor
    order: Tensor | None
    offsets: Tensor
    sizes: tuple[int, ...]
    pairs: int
    hops: int = 1
    is_on_ranks: bool = False
    _splits: dict[int, Split] = field(default_factory=dict)
    _conditions: dict[tuple[int, int], tuple[Conditions, ...]] = field(default_factory=dict)
    _pair_types: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)
    reformed: dict[Hashable, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return (
            f"DualPattern({self.num_nodes} nodes in {self.num_graphs} graphs, "
            f"{self.num_entries} entries along edges, {self.pairs} pairs, "
            f"token={self.has_token}, path={self.has_path})"
        )

    @property
    def num_rows(self) -> int:
        """Of nodes and tokens."""
        return self.num_nodes + self.num_graphs * self.has_token

    @property
    def num_entries(self) -> int:
        """Pairs that attend to each other along edges."""
        return len(self.sources)

    @property
    def queries(self) -> Tensor:
        """Which row attends, of each entry, int64 ``[entries]``."""
        rows = torch.arange(self.num_rows, device=self.ptr.device)
        return rows.repeat_interleave(self.ptr.diff(), output_size=self.num_entries)

    @property
    def nbytes(self) -> int:
        """Bytes, with those of types of pairs, splits and reformations that it keeps."""
        tensors = [self.sources, self.ptr, self.types, self.offsets, *self._pair_types.values()]
        if self.order is not None:
            tensors.append(self.order)
        for split in self._splits.values():
            tensors += [split.rows, split.offsets, split.sources, split.ptr, split.types]
        kept = sum(value.nbytes for value in self.reformed.values())
        return int(sum(tensor.nbytes for tensor in tensors) + kept)

    def keep_reformed(self, key: Hashable, value: Any) -> None:
        """Keep something derived, with an attribute ``nbytes``, beside the pattern."""
        self.reformed[key] = value
        MEMO.recount()

    @property
    def graph_of_nodes(self) -> Tensor:
        """The graph of each node, int64 ``[num_nodes]``, as a batch has it."""
        graphs = torch.arange(self.num_graphs, device=self.ptr.device)
        sizes = self.offsets.diff() - int(self.has_token)
        return graphs.repeat_interleave(sizes, output_size=self.num_nodes)

    def in_order(self, x: Tensor) -> Tensor:
        """The rows of ``x``, graph by graph."""
        return x if self.order is None else x[self.order]

    def back(self, x: Tensor) -> Tensor:
        """The inverse of :meth:`in_order`."""
        return x if self.order is None else x[self.places]

    @property
    def places(self) -> Tensor:
        """Where each row is, graph by graph, int64 ``[rows]``."""
        rows = torch.arange(self.num_rows, device=self.ptr.device)
        return (
            rows if self.order is None else rows.new_empty(len(rows)).scatter_(0, self.order, rows)
        )

    def pair_types(self, rows: Tensor | None = None, hops: int = 1) -> Tensor:
        """The types of pairs of rows of one graph, query by query, key by key, uint8.

        Takes a byte for each pair, and with ``hops`` beside that what searches among
        ``BLOCK_PAIRS`` pairs take: tens of bytes for each of their edges.

        Args:
            rows: queries, int64, graph by graph; default: all rows in order, so that the result is
                ``[pairs]``.
            hops: the longest distance along edges, from key to query, that has a type of its own:
                of distance d from 2 on ``TYPES + d - 2``; 1 to 250.
        """
        if rows is not None:
            return self._types_of_pairs(rows, hops)
        return self.pair_types_between(0, self.num_rows, hops)

    def pair_types_between(self, begin: int, end: int, hops: int = 1) -> Tensor:
        """:meth:`pair_types` of the queries from one place in order on and before another.

        They are kept up to ``KEPT_PAIRS``.
        """
        key = hops, begin, end
        if key in self._pair_types:
            return self._pair_types[key]
        with normal_mode():  # what is kept must still serve training
            rows = self.in_order(torch.arange(self.num_rows, device=self.ptr.device))
            types = self._types_of_pairs(rows[begin:end], hops)
        if len(types) <= KEPT_PAIRS:
            self._pair_types[key] = types
            MEMO.recount()  # it may keep the pattern
        return types

    def _types_of_pairs(self, rows: Tensor, hops: int) -> Tensor:
        places, device = self.places, self.ptr.device
        graphs = torch.bucketize(places, self.offsets, right=True) - 1
        begins = offsets_of(self.offsets.diff()[graphs[rows]])
        places = places - self.offsets[graphs]  # within each graph
        types = torch.full((int(begins[-1]),), OTHER, dtype=torch.uint8, device=device)
        if hops > 1:
            first = (self.offsets[:-1] - self._tokens_before)[graphs[rows]]
            self._add_distances(types, rows, first, begins, hops)
        entries, counts = entries_of(self.ptr, rows)
        to = begins[:-1].repeat_interleave(counts) + places[self.sources[entries]]
        types[to] = self.types[entries]
        return types

    @property
    def _tokens_before(self) -> Tensor:
        """How many tokens precede each graph, graph by graph."""
        return torch.arange(self.num_graphs, device=self.ptr.device) * self.has_token

    def _add_distances(
        self, types: Tensor, rows: Tensor, first: Tensor, begins: Tensor, hops: int
    ) -> None:
        """Write the types of pairs that are up to ``hops`` edges apart, block by block.

        Those of tokens, which no edges join, are anything.
        """
        rows = torch.where(rows < self.num_nodes, rows, first)
        is_edge = self.types == EDGE
        ptr, sources = offsets_of(is_edge.int())[self.ptr], self.sources[is_edge]
        names = [LOOP, EDGE, *range(TYPES, TYPES + hops - 1), OTHER]
        names_of = torch.tensor(names, dtype=torch.uint8, device=types.device)
        ends, start = begins.tolist(), 0
        while start < len(rows):
            stop = max(bisect_right(ends, ends[start] + BLOCK_PAIRS) - 1, start + 1)
            own = begins[start : stop + 1] - begins[start]
            distances = distances_in_ranges(
                ptr, sources, rows[start:stop], first[start:stop], own, longest=hops
            )
            torch.index_select(names_of, 0, distances.int(), out=types[ends[start] : ends[stop]])
            start = stop

    def conditions(self, layers: int, budget: int = BUDGET) -> tuple[Conditions, ...]:
        """:func:`fastgraph.nn.conditions` of each graph with its token, once for each budget."""
        key = layers, budget
        if key not in self._conditions:
            with normal_mode():
                self._conditions[key] = tuple(self._conditions_one_by_one(layers, budget))
        return self._conditions[key]

    def _conditions_one_by_one(self, layers: int, budget: int) -> list[Conditions]:
        tensors = self.ptr, self.sources, self.types, self.queries
        ptr, sources, types, attending = (x.cpu() for x in tensors)
        found, first = [], 0
        for size in self.sizes:
            own = slice(int(ptr[first]), int(ptr[first + size]))
            is_own = types[own] != TOKEN
            index = torch.stack([sources[own], attending[own]])[:, is_own] - first
            found.append(conditions(index, size, layers, token=self.has_token, budget=budget))
            first += size
        return found

    def split(self, layers: int) -> Split:
        """The dense graphs and the others: those that all three conditions allow, once.

        By the answers within the default budget.
        """
        if layers not in self._splits:
            is_dense = [not found.hold for found in self.conditions(layers)]
            with normal_mode():
                self._splits[layers] = self._make_split(torch.tensor(is_dense, dtype=torch.bool))
            MEMO.recount()
        return self._splits[layers]

    def _make_split(self, is_dense: Tensor) -> Split:
        is_dense = is_dense.to(self.ptr.device)
        sizes = self.offsets.diff()
        of_order = is_dense.repeat_interleave(sizes)
        rows = self.in_order(torch.arange(self.num_rows, device=self.ptr.device))[of_order]
        own = sizes[is_dense]
        sources, ptr, types = without_rows(self.sources, self.ptr, self.types, rows)
        return Split(rows, offsets_of(own), sources, ptr, types, int((own * own).sum()))


def dual_pattern(
    edge_index: Tensor,
    num_nodes: int,
    batch: Tensor | None = None,
    *,
    num_graphs: int | None = None,
    token: bool = False,
    path: bool = False,
    hops: int = 1,
    types: Tensor | None = None,
) -> DualPattern:
    """The pattern of a batch of graphs: neighbours, self-loops, and tokens.

    Every node attends to itself, whether ``edge_index`` has the loop or not, and edges that come
    several times count once. Of edges that are shared out among ranks each has the whole pattern.

    Args:
        edge_index: int64 or int32 ``[2, E]``: node ``edge_index[1, e]`` attends to ``[0, e]``.
        num_nodes: in the batch.
        batch: the graph of each node, int64 ``[num_nodes]``, ascending; default: one graph.
        num_graphs: default: the last graph of ``batch``, and those before it.
        token: whether each graph has a global token, which attends to all of its nodes and to
            itself, and all nodes to it.
        path: whether consecutive nodes of a graph attend to each other, which makes a Hamiltonian
            path of their order; clusters should be consecutive then.
        hops: up to which distance along edges nodes attend to each other, 1 to 250. Pairs have
            types by their distance, which a layer with ``type_bias`` and as many ``hops`` tells
            apart. Distances are looked for on the CPU.
        types: of the pairs of ``edge_index``, uint8 ``[E]``, as ``attn_type`` of
            :class:`fastgraph.transforms.AttentionPattern`. ``hops`` is what they have, then.

    Raises:
        ValueError: an argument has the wrong shape, dtype or order, an edge joins two graphs, or
            ``types`` has two types of one pair.
        IndexError: ``edge_index`` points outside the nodes.
    """
    is_on_ranks = are_on_ranks(edge_index, batch, types)
    given = whole(edge_index), num_nodes, whole(batch), num_graphs
    with normal_mode():  # a pattern that is made in inference mode must still serve training
        return _pattern(*given, token, path, hops, whole(types), is_on_ranks)


def _pattern(
    edge_index: Tensor,
    num_nodes: int,
    batch: Tensor | None,
    num_graphs: int | None,
    token: bool,
    path: bool,
    hops: int,
    types: Tensor | None,
    is_on_ranks: bool,
) -> DualPattern:
    graph = _graphs(edge_index, num_nodes, batch)
    check_integers(0, or_none=True, num_graphs=num_graphs)
    check_flags(token=token, path=path)
    check_integers(1, LONGEST, hops=hops)
    last = int(graph[-1]) + 1 if num_nodes else 0
    if num_graphs is None:
        num_graphs = 1 if batch is None else last
    elif num_graphs < last:
        raise ValueError(f"num_graphs: expected at least {last}, as batch has, got {num_graphs}")
    source, destination = edge_index.long()
    if not torch.equal(graph[source], graph[destination]):
        edge = int((graph[source] != graph[destination]).nonzero()[0])
        raise ValueError(f"edge_index: edge {edge} joins two graphs of batch")
    device, rows = edge_index.device, num_nodes + num_graphs * token
    every = torch.arange(rows, device=device)
    is_pair, keys = source != destination, destination * rows + source
    if types is None:
        own = _types_by_distance(torch.unique(keys[is_pair]), rows, hops)
    else:
        _check_types(types, is_pair, path, hops)
        if bool(((types == PATH) & ((source - destination).abs() != 1)).any()):
            raise ValueError(
                f"types: expected {PATH} of consecutive nodes alone, got it of others: nodes get "
                "their order before pairs get types"
            )
        own = _types_once(keys[is_pair], types[is_pair])
    found = [own, _all_of(LOOP, every * (rows + 1))]
    if token:
        nodes, tokens = every[:num_nodes], graph + num_nodes
        found.append(_all_of(TOKEN, torch.cat([nodes * rows + tokens, tokens * rows + nodes])))
    if path:
        first = every[: max(num_nodes - 1, 0)][graph[:-1] == graph[1:]]
        steps = torch.cat([first * rows + first + 1, (first + 1) * rows + first])
        found.append(_all_of(PATH, steps[~torch.isin(steps, own[0])]))
    keys, by_key = torch.cat([keys for keys, _ in found]).sort()
    kinds = torch.cat([kind for _, kind in found])
    sizes = torch.bincount(graph, minlength=num_graphs)
    lengths = sizes + token
    order = None
    if token and num_graphs > 1:
        graphs = torch.cat([graph, torch.arange(num_graphs, device=device)])
        order = graphs.argsort(stable=True)
    return DualPattern(
        num_nodes,
        num_graphs,
        token,
        path,
        keys % max(rows, 1),
        offsets_of(torch.bincount(keys // max(rows, 1), minlength=rows)),
        kinds[by_key],
        order,
        offsets_of(lengths),
        tuple(sizes.tolist()),
        int((lengths * lengths).sum()),
        int(kinds.max()) - TYPES + 2 if bool((kinds >= TYPES).any()) else 1,
        is_on_ranks,
    )


def _all_of(kind: int, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs that have one type."""
    return keys, torch.full_like(keys, kind, dtype=torch.uint8)


def _types_by_distance(edges: Tensor, rows: int, hops: int) -> tuple[Tensor, Tensor]:
    """The pairs of nodes that are up to ``hops`` edges apart, and their types.

    Args:
        edges: ``destination * rows + source`` of those one edge apart, ascending.
        rows: nodes and tokens.
        hops: 1 to 250.
    """
    edges, types = _all_of(EDGE, edges)
    if hops == 1:
        return edges, types
    counts = torch.bincount(edges.cpu() // rows, minlength=rows) if rows else edges.cpu()
    near, node, distance = nodes_within(offsets_of(counts), edges.cpu() % max(rows, 1), hops)
    is_far = distance > 1
    keys = (node * rows + near)[is_far].to(edges.device)
    far = (distance[is_far] + (TYPES - 2)).to(edges.device)
    return torch.cat([edges, keys]), torch.cat([types, far])


def _types_once(keys: Tensor, types: Tensor) -> tuple[Tensor, Tensor]:
    """Each key once, ascending, with its type, of which it must have one."""
    unique, place = torch.unique(keys, return_inverse=True)
    of_unique = types.new_empty(len(unique)).scatter_(0, place, types)
    if not torch.equal(of_unique[place], types):
        entry = int((of_unique[place] != types).nonzero()[0])
        raise ValueError(
            "types: expected one type of each pair, got "
            f"{int(types[entry])} and {int(of_unique[place[entry]])} of one"
        )
    return unique, of_unique


def _check_types(types: Tensor, is_pair: Tensor, path: bool, hops: int) -> None:
    """Raise an error unless these are types of pairs of nodes."""
    check_kinds(Tensor, types=types)
    if types.dtype != torch.uint8 or types.shape != is_pair.shape:
        raise ValueError(
            f"types: expected uint8 [{len(is_pair)}], one of each pair of edge_index, got "
            f"{types.dtype} {list(types.shape)}"
        )
    if hops != 1:
        raise ValueError(f"hops: expected 1 beside types, which have distances, got {hops}")
    if not torch.equal(types == LOOP, ~is_pair):
        raise ValueError(f"types: expected {LOOP} of loops and of no other pairs, got otherwise")
    if bool(((types == TOKEN) | (types == OTHER) | (types >= TYPES + LONGEST - 1)).any()):
        raise ValueError(
            f"types: expected those of loops, edges, the path or distances up to {LONGEST}, got "
            f"{sorted(set(types.tolist()))}"
        )
    if not path and bool((types == PATH).any()):
        raise ValueError("types: expected none of a path without path=True, got some")


def refuse_beside_pattern(**given: object) -> None:
    """Raise ``ValueError`` if an argument that a pattern has in it is given besides."""
    for name, value in given.items():
        if value is not None:
            got = "a tensor" if isinstance(value, Tensor) else repr(value)
            raise ValueError(f"{name}: expected None beside a pattern, which has one, got {got}")


def without_rows(
    sources: Tensor, ptr: Tensor, types: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The entries of a pattern without those of some rows, which stay, with none."""
    counts = ptr.diff()
    is_kept = torch.ones_like(counts, dtype=torch.bool)
    is_kept[rows] = False
    kept = is_kept.repeat_interleave(counts)
    return sources[kept], offsets_of(torch.where(is_kept, counts, 0)), types[kept]


def entries_of(ptr: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The entries of some rows, row by row, and how many each row has."""
    counts = ptr[rows + 1] - ptr[rows]
    begins = counts.cumsum(0) - counts
    total = int(counts.sum())
    within = torch.arange(total, device=ptr.device) - begins.repeat_interleave(counts)
    return ptr[rows].repeat_interleave(counts) + within, counts


def _graphs(edge_index: Tensor, num_nodes: int, batch: Tensor | None) -> Tensor:
    """The graph of each node, after checks of the arguments."""
    check_edges(num_nodes, edge_index=edge_index)
    if batch is None:
        return torch.zeros(num_nodes, dtype=torch.int64, device=edge_index.device)
    check_kinds(Tensor, batch=batch)
    if batch.dtype != torch.int64 or list(batch.shape) != [num_nodes]:
        raise ValueError(
            f"batch: expected int64 [{num_nodes}], got {batch.dtype} {list(batch.shape)}"
        )
    if num_nodes and (int(batch[0]) < 0 or bool((batch[1:] < batch[:-1]).any())):
        raise ValueError("batch: expected graphs in ascending order from 0 on")
    return batch
