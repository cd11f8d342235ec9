"""Blocks of ``dgl.dataloading``: of what they are made, and those along several types of edges."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from numbers import Integral
from typing import Any, NamedTuple

import torch
from dgl import graph_index, random, utils
from dgl.base import NID
from dgl.heterograph import DGLBlock
from dgl.heterograph_index import create_heterograph_from_relations, create_unitgraph_from_coo
from torch import Tensor

from fastgraph.dgl.drawable_edges import Columns, columns_of
from fastgraph.dgl.structure import structure_of
from fastgraph.plugins.refusal import Refusal
from fastgraph.routing.conditions import plain_tensor
from fastgraph.routing.dispatch import Computation
from fastgraph.sampling import hetero_neighbor_sample, unique_and_compact

NO_SEEDS = Refusal("no seeds")

_FORMATS = ["coo", "csr", "csc"]


class Ends(NamedTuple):
    """Edges of one type in a block.

    Attributes:
        row: ``[edges]``, sources as positions among those of the block.
        col: ``[edges]``, destinations likewise.
        ids: ``[edges]``, the numbers of edges in the graph.
    """

    row: Tensor
    col: Tensor
    ids: Tensor


def seeds_refusal(g: Any, kind: str, seeds: Any) -> Refusal | None:
    """Why nodes of one type cannot be seeds here, if they cannot.

    Raises:
        IndexError: a seed is not in the graph, where DGL reads on.
    """
    refusal = plain_tensor("seeds", seeds)
    if refusal is not None:
        return refusal
    if seeds.dim() != 1 or seeds.dtype != g.idtype or seeds.device != g.device:
        return Refusal("seeds that are no node numbers in one dimension of the graph's dtype")
    if seeds.numel() == 0:
        return None
    least, most, size = int(seeds.min()), int(seeds.max()), g.num_nodes(kind)
    if least < 0 or most >= size:
        wrong = least if least < 0 else most
        name = "seed_nodes" if len(g.ntypes) == 1 else f"seed_nodes[{kind!r}]"
        raise IndexError(f"{name} must be in [0, {size}), got {wrong}")
    if unique_and_compact([seeds])[0].numel() < seeds.numel():
        return Refusal("seeds that come twice")
    return None


def fanouts_refusal(groups: Iterable[Collection[Any]]) -> Refusal | None:
    """Why numbers of neighbours cannot be drawn here, if they cannot.

    Args:
        groups: of the types of edges that lead to one type of nodes, in each hop.
    """
    groups = list(groups)
    fanouts = [fanout for group in groups for fanout in group]
    if any(isinstance(fanout, bool) or not isinstance(fanout, Integral) for fanout in fanouts):
        return Refusal("fanouts that are no integers")
    if not all(-1 <= fanout < 2**31 for fanout in fanouts):
        return Refusal("a fanout below -1, or of 2^31 and more")
    if not all(map(any, groups)):  # where DGL may leave the seeds out, too
        return Refusal("a fanout of 0 for all edges to a node, for which versions of DGL differ")
    return None


class Excluded:
    """Edges of one type that blocks are not to have.

    Args:
        ids: their numbers, ``[edges]``, at least one.
        num_edges: how many edges there are.
    """

    def __init__(self, ids: Tensor, num_edges: int) -> None:
        self._is_here: Tensor | None = None
        if num_edges <= _MOST_MARKS and 0 <= int(ids.min()) <= int(ids.max()) < num_edges:
            self._is_here = torch.zeros(num_edges, dtype=torch.bool)
            self._is_here[ids.long()] = True
        else:
            self._ids = ids.sort().values

    def others(self, ids: Tensor) -> Tensor:
        """The positions in ``ids`` of edges that are none of these."""
        if self._is_here is not None:
            return (~self._is_here.index_select(0, ids)).nonzero().squeeze(1)
        ids = ids.to(self._ids.dtype)
        places = torch.searchsorted(self._ids, ids).clamp_(max=len(self._ids) - 1)
        return (self._ids.index_select(0, places) != ids).nonzero().squeeze(1)


_MOST_MARKS = 1 << 22
"""Up to so many edges one byte for each is written sooner than numbers are searched."""


def edges_to_exclude(g: Any, given: Any) -> dict[Any, Excluded] | Refusal:
    """The edges by type that blocks are not to have, or why not to do this here.

    Args:
        g: the graph.
        given: ``exclude_eids`` of DGL's samplers.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        if len(g.canonical_etypes) > 1:
            return Refusal("edges to exclude of one type that nobody has named")
        given = {g.canonical_etypes[0]: given}
    found = {}
    for kind, ids in given.items():
        if kind not in g.canonical_etypes:
            return Refusal("edges to exclude of no type of edges, as DGL names these")
        refusal = plain_tensor("exclude_eids", ids)
        if refusal is not None:
            return refusal
        if ids.dim() != 1 or ids.dtype != g.idtype or ids.device != g.device:
            return Refusal("edges to exclude that are no numbers of the graph's dtype")
        if ids.numel() > 0:
            found[kind] = Excluded(ids, g.num_edges(kind))
    return found


def leave_out(
    g: Any, src: list[Tensor], dst: list[Tensor], edges: list[Ends], excluded: dict[Any, Excluded]
) -> tuple[list[Tensor], list[Ends]]:
    """Sources and edges of a block without some edges, as DGL leaves them out once they are drawn.

    Args:
        g: the graph.
        src: as for :func:`block_of`.
        dst: likewise.
        edges: likewise.
        excluded: as :func:`edges_to_exclude` gives them.
    """
    kept = []
    for kind, found in zip(g.canonical_etypes, edges, strict=True):
        wrong = excluded.get(kind)
        if wrong is not None and len(found.ids) > 0:
            where = wrong.others(found.ids)
            found = Ends(*(tensor.index_select(0, where) for tensor in found))
        kept.append(found)
    for number, name in enumerate(g.ntypes):
        is_used = torch.zeros(len(src[number]), dtype=torch.bool)
        is_used[: len(dst[number])] = True
        of_type = [i for i, (a, _, _) in enumerate(g.canonical_etypes) if a == name]
        for i in of_type:
            is_used[kept[i].row.long()] = True
        places = is_used.cumsum(0) - 1
        src[number] = src[number][is_used]
        for i in of_type:
            row = kept[i].row
            kept[i] = kept[i]._replace(row=places.index_select(0, row).to(row.dtype))
    return src, kept


def block_of(g: Any, src: list[Tensor], dst: list[Tensor], edges: list[Ends]) -> Any:
    """A block with the features of a graph, as ``dgl.to_block`` makes it.

    Args:
        g: the graph.
        src: numbers of sources of each type of nodes, destinations of the same type first.
        dst: of destinations likewise.
        edges: of each type of edges.
    """
    positions = {kind: position for position, kind in enumerate(g.ntypes)}
    ends = [(positions[a], positions[b]) for a, _, b in g.canonical_etypes]
    relations = [
        create_unitgraph_from_coo(
            *(2, src[a].numel(), dst[b].numel()),
            *(found.row.to(g.idtype), found.col.to(g.idtype)),
            _FORMATS,
        )
        for (a, b), found in zip(ends, edges, strict=True)
    ]
    index = relations[0]
    if len(src) > 1 or len(relations) > 1:
        starts, stops = [a for a, _ in ends], [len(src) + b for _, b in ends]
        meta = graph_index.from_coo(2 * len(src), starts, stops, True)
        sizes = utils.toindex([nodes.numel() for nodes in src + dst])
        index = create_heterograph_from_relations(meta, relations, sizes)
    block = DGLBlock(index, (g.ntypes, g.ntypes), g.etypes)
    utils.set_new_frames(
        block,
        node_frames=utils.extract_node_subframes_for_block(g, src, dst),
        edge_frames=utils.extract_edge_subframes(g, [found.ids.to(g.idtype) for found in edges]),
    )
    return block


def plan_of_types(
    sampler: Any, g: Any, seed_nodes: Any, excluded: dict[Any, Excluded]
) -> Computation | Refusal:
    """The blocks of seeds in a graph of several types, or why to leave them to upstream.

    Types of edges without probabilities are drawn with equal chances where others have some.

    Raises:
        IndexError: a seed is not in the graph.
        ValueError: a probability is negative or not finite.
    """
    hops = [_by_type(g, fanout) for fanout in sampler.fanouts]
    for hop in hops:
        if isinstance(hop, Refusal):
            return hop
        into: dict[str, list[Any]] = {}
        for (_, _, name), fanout in hop.items():
            into.setdefault(name, []).append(fanout)
        refusal = fanouts_refusal(into.values())
        if refusal is not None:
            return refusal
    seeds = seed_nodes if isinstance(seed_nodes, dict) else {g.ntypes[0]: seed_nodes}
    if not isinstance(seed_nodes, dict) and len(g.ntypes) > 1:
        return Refusal("seeds of one type that nobody has named")
    if any(kind not in g.ntypes for kind in seeds):
        return Refusal("seeds of no type of nodes")
    for kind, nodes in seeds.items():
        refusal = seeds_refusal(g, kind, nodes)
        if refusal is not None:
            return refusal
    if all(nodes.numel() == 0 for nodes in seeds.values()):
        return NO_SEEDS
    feature = sampler.prob
    having = [kind for kind in g.canonical_etypes if feature in g.edges[kind].data]
    if feature is not None and not having:
        return Refusal("probabilities that edges do not have")
    columns = {}
    for number, kind in enumerate(g.canonical_etypes):
        structure = structure_of(g._graph.get_relation_graph(number))
        if isinstance(structure, Refusal):
            return structure
        found = columns_of(g, structure, kind, feature if kind in having else None)
        if isinstance(found, Refusal):
            return found
        columns[kind] = found
    if len({(found.ptr.dtype, found.row.dtype) for found in columns.values()}) > 1:
        return Refusal("types of edges of which DGL has grouped some")
    options = hops, bool(sampler.replace), excluded
    return lambda: _blocks(g, columns, seed_nodes, seeds, *options)


def _by_type(g: Any, fanout: Any) -> dict[Any, Any] | Refusal:
    """How many neighbours are drawn by type of edges."""
    relations = g.canonical_etypes
    if not isinstance(fanout, Mapping):
        return dict.fromkeys(relations, fanout)
    names = dict(zip(g.etypes, relations, strict=True))
    found = {kind if kind in relations else names.get(kind): n for kind, n in fanout.items()}
    if len(set(g.etypes)) < len(relations) and any(isinstance(kind, str) for kind in fanout):
        return Refusal("fanouts by names that several types of edges have")
    if len(fanout) != len(relations) or set(found) != set(relations):
        return Refusal("fanouts of other types of edges")
    return found


def _blocks(
    g: Any,
    columns: dict[Any, Columns],
    output_nodes: Any,
    seeds: dict[str, Tensor],
    hops: list[Any],
    replace: bool,
    excluded: dict[Any, Excluded],
) -> tuple[Any, Any, list[Any]]:
    """Input nodes, output nodes and a block for each hop, the last hop first."""
    kind = next(iter(columns.values())).row.dtype
    ptrs = {relation: one.ptr for relation, one in columns.items()}
    rows = {relation: one.row for relation, one in columns.items()}
    weights = {relation: one.weight for relation, one in columns.items() if one.weight is not None}
    sizes = {name: g.num_nodes(name) for name in g.ntypes}
    nothing = next(iter(seeds.values()))[:0]
    dst = [seeds.get(name, nothing) for name in g.ntypes]
    blocks: list[Any] = []
    for fanouts in reversed(hops):
        given = {
            name: nodes.to(kind) for name, nodes in zip(g.ntypes, dst, strict=True) if len(nodes)
        }
        drawn = hetero_neighbor_sample(
            *(ptrs, rows, given, {relation: [n] for relation, n in fanouts.items()}),
            num_nodes=sizes,
            edge_weight=weights or None,
            replace=replace,
            random_seed=int(random.choice(2**62, 1)),
        )
        assert drawn.edge is not None
        src = [
            drawn.node[name].to(g.idtype) if name in drawn.node else nothing for name in g.ntypes
        ]
        edges = []
        for relation, one in columns.items():
            ids = drawn.edge[relation]
            if one.edge_ids is not None:
                ids = one.edge_ids.index_select(0, ids)
            edges.append(Ends(drawn.row[relation], drawn.col[relation], ids))
        if excluded:
            src, edges = leave_out(g, src, dst, edges, excluded)
        blocks.insert(0, block_of(g, src, dst, edges))
        dst = src
    return blocks[0].srcdata[NID], output_nodes, blocks
