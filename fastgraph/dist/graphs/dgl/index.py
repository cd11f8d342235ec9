"""The index object of a sharded graph, in the place of DGL's ``HeteroGraphIndex``.

DGL's own is a handle of an object in its C++ library. This one answers the questions of
``DGLGraph`` from sharded edges. Whatever else is asked, and every function of the library that it
is handed to, gets DGL's own index object of the whole graph, for which the edges are gathered once:
right, but from there on each rank does all, which is counted.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from dgl import backend, graph_index, heterograph_index, utils
from dgl._ffi.base import DGLError
from dgl._ffi.object_generic import ObjectGeneric
from dgl.heterograph_index import HeteroGraphIndex
from torch import Tensor

from fastgraph.dist.graphs.dgl.structure import ShardedStructure
from fastgraph.dist.graphs.protocols import GraphIndex, Metagraph
from fastgraph.dist.ranks.counts import COUNTS
from fastgraph.dist.ranks.own_device import HOST
from fastgraph.dist.tensor.layout import usual
from fastgraph.dist.tensor.memo import on_host
from fastgraph.dist.tensor.sharded import as_sharded, is_sharded, placed, whole

Context = Any  # a device, of DGL's own class
Subgraph = Any  # of DGL's own class, or what has its attributes

KINDS_OF_LIBRARY: tuple[str, ...] = ("cuda",)
"""Devices besides the CPU that DGL's C++ library can be built for; it cannot be asked of others."""

_IDS = {torch.int32: "int32", torch.int64: "int64"}
_WITHIN = ("dgl._ffi", "fastgraph", "functools")


class ShardedIndex(ObjectGeneric):  # type: ignore[misc]  # DGL has no types
    """Kinds of nodes, and the sharded edges of all relations.

    Args:
        metagraph: DGL's graph of kinds of nodes and relations.
        sizes: the number of nodes of each kind.
        relations: the edges of each relation, on one device.
        device: of a graph without relations.

    Attributes:
        device: on which edges are, and DGL wants features.
    """

    def __init__(
        self,
        metagraph: Metagraph,
        sizes: Sequence[int],
        relations: Sequence[ShardedStructure],
        device: torch.device = HOST,
    ) -> None:
        self.metagraph = metagraph
        self.device = relations[0].edge_index.device if relations else device
        self._sizes, self._relations = list(sizes), list(relations)
        self._of_relations: dict[int, ShardedIndex] = {}
        self._whole: GraphIndex | None = None

    def asobject(self) -> GraphIndex:
        """DGL's own index object of the whole graph, which DGL asks for before it calls C++."""
        COUNTS.gathers[_caller()] += 1
        return self.whole()

    def whole(self) -> GraphIndex:
        """DGL's own index object of the whole graph, on the device of the edges.

        Raises:
            DGLError: DGL's C++ library knows no such device, as the one that wheels have.
        """
        if self._whole is None:
            is_known = self.device.type in KINDS_OF_LIBRARY and self.ctx.exist
            if self.device != HOST and not is_known:
                raise DGLError(
                    f"{_caller()} needs DGL's C++ library, which was built without devices such as "
                    f"{self.device}; move the graph to the CPU before: graph.to('cpu')"
                )
            graphs = []
            for etype, relation in enumerate(self._relations):
                source, destination = self.ends(etype)
                graphs.append(
                    heterograph_index.create_unitgraph_from_coo(
                        1 if source == destination else 2,
                        relation.num_src,
                        relation.num_dst,
                        *on_host(whole(relation.edge_index)).contiguous(),
                        ["coo", "csr", "csc"],
                    )
                )
            sizes = utils.toindex(self._sizes, "int64")
            found = heterograph_index.create_heterograph_from_relations(
                self.metagraph, graphs, sizes
            )
            self._whole = found if self.device == HOST else found.copy_to(self.ctx)
        return self._whole

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """A method of DGL's own index object, where this class defines none, bound to this one."""
        if name.startswith("_"):
            raise AttributeError(name)
        return functools.partial(getattr(HeteroGraphIndex, name), self)

    def __reduce__(self) -> tuple[Callable[[GraphIndex], GraphIndex], tuple[GraphIndex]]:
        """Files hold whole graphs."""
        return _itself, (self.whole(),)

    def __copy__(self) -> ShardedIndex:
        return self

    def __deepcopy__(self, memo: object) -> ShardedIndex:
        return self

    def ends(self, etype: int) -> tuple[int, int]:
        """The kinds of the sources and of the destinations of a relation."""
        source, destination = self.metagraph.find_edge(etype)
        return int(source), int(destination)

    def relation(self, etype: int) -> ShardedStructure:
        """The edges of a relation."""
        return self._relations[int(etype)]

    @property
    def dtype(self) -> str:
        """The dtype of the numbers of nodes and edges."""
        return _IDS[self._relations[0].edge_index.dtype] if self._relations else "int64"

    @property
    def ctx(self) -> Context:
        """The device."""
        return utils.to_dgl_context(self.device)

    def is_metagraph_unibipartite(self) -> bool:
        """True if no kind of nodes has edges in both directions."""
        ends = [self.ends(etype) for etype in range(len(self._relations))]
        return not {source for source, _ in ends} & {destination for _, destination in ends}

    def number_of_ntypes(self) -> int:
        """The number of kinds of nodes."""
        return len(self._sizes)

    def number_of_etypes(self) -> int:
        """The number of relations."""
        return len(self._relations)

    def num_nodes(self, ntype: int) -> int:
        """The number of nodes of a kind."""
        return self._sizes[int(ntype)]

    def num_edges(self, etype: int) -> int:
        """The number of edges of a relation."""
        return int(self.relation(etype).edge_index.shape[1])

    number_of_nodes, number_of_edges = num_nodes, num_edges

    def is_readonly(self) -> bool:
        """As all of DGL's are."""
        return True

    def is_pinned(self) -> bool:
        """True if edges are in pinned memory."""
        return False

    def bits_needed(self, etype: int) -> int:
        """Enough for all numbers, see DGL's own."""
        relation = self.relation(etype)
        most = max(self.num_edges(etype), relation.num_src, relation.num_dst)
        return 32 if most <= 0x7FFFFFFF else 64

    def asbits(self, bits: int) -> ShardedIndex:
        """With numbers of 32 or 64 bits."""
        dtype = {32: torch.int32, 64: torch.int64}[int(bits)]
        if _IDS[dtype] == self.dtype:
            return self
        return self._with([r.edge_index.to(dtype) for r in self._relations])

    def copy_to(self, ctx: Context) -> ShardedIndex:
        """On the CPU, or on the device of this rank.

        Raises:
            ValueError: it is another one.
        """
        device = backend.to_backend_ctx(ctx)
        if device == self.device:
            return self
        relations = [relation.on(device) for relation in self._relations]
        return ShardedIndex(self.metagraph, self._sizes, relations, device)

    def formats(self, formats: object = None) -> ShardedIndex | dict[str, list[str]]:
        """The sparse formats there are; a restriction to some changes nothing."""
        return {"created": ["coo"], "not created": ["csr", "csc"]} if formats is None else self

    def create_formats_(self) -> None:
        """Nothing: what operators need is made when they do."""

    def get_relation_graph(self, etype: int) -> ShardedIndex:
        """The graph of one relation."""
        etype = int(etype)
        if etype not in self._of_relations:
            source, destination = self.ends(etype)
            relation = self._relations[etype]
            is_one = source == destination
            sizes = [relation.num_src] if is_one else [relation.num_src, relation.num_dst]
            metagraph = graph_index.from_edge_list([(0, 0 if is_one else 1)], True)
            self._of_relations[etype] = ShardedIndex(metagraph, sizes, [relation])
        return self._of_relations[etype]

    def reverse(self) -> ShardedIndex:
        """With all edges the other way round."""
        ends = [self.ends(etype)[::-1] for etype in range(len(self._relations))]
        metagraph = graph_index.from_edge_list(ends, True)
        relations = [relation.reversed for relation in self._relations]
        return ShardedIndex(metagraph, self._sizes, relations, self.device)

    def has_nodes(self, ntype: int, vids: Tensor) -> Tensor:
        """True for the numbers that are those of nodes."""
        return (vids >= 0) & (vids < self.num_nodes(ntype))

    def edges(self, etype: int, order: str | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Sources, destinations and numbers of all edges."""
        if order not in (None, "eid"):
            found: tuple[Tensor, Tensor, Tensor] = HeteroGraphIndex.edges(self, etype, order)
            return found
        relation = self.relation(etype)
        return relation.index, relation.destination, relation.number

    def find_edges(self, etype: int, eid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sources and destinations of some edges."""
        index = self.relation(etype).edge_index[:, eid]
        return index[0], index[1], eid

    def in_degrees(self, etype: int, v: Tensor) -> Tensor:
        """The in-degrees of some nodes."""
        return _of_nodes(self.relation(etype).in_degrees, v)

    def out_degrees(self, etype: int, v: Tensor) -> Tensor:
        """The out-degrees of some nodes."""
        return _of_nodes(self.relation(etype).reversed.in_degrees, v)

    def edge_subgraph(self, induced_edges: Sequence[Tensor], preserve_nodes: bool) -> Subgraph:
        """The graph of some edges, and all nodes."""
        if not preserve_nodes:
            return HeteroGraphIndex.edge_subgraph(self, list(map(whole, induced_edges)), False)
        edges = [
            relation.edge_index[:, chosen]
            for relation, chosen in zip(self._relations, induced_edges, strict=True)
        ]
        return SimpleNamespace(graph=self._with(edges), induced_edges=list(induced_edges))

    def _with(self, edges: Sequence[Tensor]) -> ShardedIndex:
        """With other edges among the same nodes."""
        relations = [
            ShardedStructure(as_sharded(edge_index), relation.num_src, relation.num_dst)
            for edge_index, relation in zip(edges, self._relations, strict=True)
        ]
        return ShardedIndex(self.metagraph, self._sizes, relations, self.device)


def _itself(value: GraphIndex) -> GraphIndex:
    return value


def _of_nodes(values: Tensor, nodes: Tensor) -> Tensor:
    """Some rows, or all of them, which then stay as they are."""
    is_all = not is_sharded(nodes) and torch.equal(
        nodes, torch.arange(len(values), dtype=nodes.dtype, device=nodes.device)
    )
    return values if is_all else values[nodes]


def _caller() -> str:
    """The function of DGL that cannot do with sharded edges."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name: str = frame.f_globals.get("__name__", "")
        function = frame.f_code.co_name
        if not name.startswith(_WITHIN) and not function.startswith("<"):
            return f"{name}.{function}"
        frame = frame.f_back
    return "dgl"


def of_sharded_edges(
    num_ntypes: int, num_src: int, num_dst: int, source: Tensor, destination: Tensor
) -> ShardedIndex:
    """The index object of one relation.

    Args:
        num_ntypes: 1 where edges lead to nodes of the kind that they start from, else 2.
        num_src: number of source nodes.
        num_dst: number of destination nodes.
        source: int32 or int64 ``[E]``, where edges start.
        destination: the same, where they lead to; one of both at least is sharded.
    """
    index = as_sharded(torch.stack([source, destination]))
    metagraph = graph_index.from_edge_list([(0, num_ntypes - 1)], True)
    sizes = [num_src] if num_ntypes == 1 else [num_src, num_dst]
    return ShardedIndex(metagraph, sizes, [ShardedStructure(index, num_src, num_dst)])


def of_relations(
    metagraph: Metagraph, graphs: Sequence[GraphIndex], sizes: Sequence[int]
) -> ShardedIndex:
    """The index object of several relations, of which one at least is sharded."""
    relations = []
    for etype, graph in enumerate(graphs):
        ends = metagraph.find_edge(etype)
        num_src, num_dst = (int(sizes[end]) for end in ends)
        if isinstance(graph, ShardedIndex):
            relation = graph.relation(0)
            if (relation.num_src, relation.num_dst) != (num_src, num_dst):
                relation = ShardedStructure(relation.edge_index, num_src, num_dst)
        else:
            source, destination, _ = graph.edges(0, "eid")
            edges = placed(torch.stack([source, destination]), usual(len(source)), 1)
            relation = ShardedStructure(edges, num_src, num_dst)
        relations.append(relation)
    return ShardedIndex(metagraph, sizes, relations)
