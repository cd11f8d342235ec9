"""Patches of DGL that let a ``DGLGraph`` have sharded edges and features."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Protocol, SupportsInt

import dgl
import torch
from dgl import convert, core, heterograph_index, subgraph, transforms
from dgl.base import is_all
from dgl.dataloading import DataLoader
from dgl.heterograph import DGLGraph
from dgl.nn.pytorch.linear import TypedLinear
from dgl.transforms import functional
from dgl.udf import NodeBatch
from torch import Tensor

from fastgraph.dgl.relations import TYPED_LINEAR
from fastgraph.dgl.structure import FOREIGN, SEVERAL_RELATIONS, Structure
from fastgraph.dist.graphs.dgl import reducing
from fastgraph.dist.graphs.dgl import rules as rules
from fastgraph.dist.graphs.dgl.graphs import is_sharded_graph, sharded_as_usual, whole_graph
from fastgraph.dist.graphs.dgl.index import ShardedIndex, of_relations, of_sharded_edges
from fastgraph.dist.graphs.protocols import DglGraph, Frame, GraphIndex, Metagraph
from fastgraph.dist.ranks.counts import COUNTS
from fastgraph.dist.ranks.world import WORLD
from fastgraph.dist.tensor.layout import usual
from fastgraph.dist.tensor.sharded import (
    ShardedTensor,
    aligned,
    enter,
    is_sharded,
    leaves,
    taken,
    tree_map,
    whole,
)
from fastgraph.plugins.patching import Patches
from fastgraph.plugins.refusal import Refusal

PATCHES = Patches()


class Sizes(Protocol):
    """Some integers of DGL's own class."""

    def tonumpy(self) -> Iterable[SupportsInt]:
        """As an array."""


class Typed(Protocol):
    """A ``TypedLinear``."""

    def get_weight(self) -> Tensor:
        """Its matrices, one for each type."""


_METHODS = (
    "subgraph",
    "edge_subgraph",
    "node_type_subgraph",
    "edge_type_subgraph",
    "line_graph",
    "khop_graph",
    "to_simple",
)
"""Methods of ``DGLGraph`` that make another graph."""


def install() -> None:
    """Replace functions of DGL, once in a process."""
    if ShardedIndex in FOREIGN:
        return
    FOREIGN[ShardedIndex] = _structure_of
    for owner, name, replacement in (
        (heterograph_index, "create_unitgraph_from_coo", _of_edges),
        (heterograph_index, "create_heterograph_from_relations", _of_relations),
        (DGLGraph, "__init__", _init),
        (DGLGraph, "_set_n_repr", _set_nodes),
        (DGLGraph, "_set_e_repr", _set_edges),
        (DGLGraph, "in_degrees", _degrees),
        (DGLGraph, "out_degrees", _degrees),
        (TypedLinear, "forward", _by_kind),
        (DataLoader, "__init__", _loader),
        (core, "invoke_udf_reduce", _own_reduction),
    ):
        upstream = getattr(owner, name)
        PATCHES.replace(owner, name, functools.wraps(upstream)(replacement(upstream)))
    TYPED_LINEAR.renew()
    for module in (functional, subgraph, convert):
        for name in module.__all__:
            _keep_sharded(module, name)
    for name in _METHODS:
        if hasattr(DGLGraph, name):
            PATCHES.replace(DGLGraph, name, _sharded_again(getattr(DGLGraph, name)))


def _keep_sharded(module: ModuleType, name: str) -> None:
    """Replace a function of DGL in all modules that offer it."""
    upstream = getattr(module, name)
    if not inspect.isfunction(upstream):
        return
    replacement = _sharded_again(upstream)
    for owner in (module, dgl, transforms):
        if vars(owner).get(name) is upstream:
            PATCHES.replace(owner, name, replacement)


def _sharded_again(upstream: Callable[..., object]) -> Callable[..., object]:
    """A function that makes graphs out of graphs, perhaps by the C++ library from whole ones."""

    @functools.wraps(upstream)
    def transform(*args: object, **kwargs: object) -> object:
        result = upstream(*args, **kwargs)
        if any(is_sharded_graph(value) for value in leaves(args, kwargs)):
            return tree_map(_as_sharded, result)
        return result

    return transform


def _as_sharded(value: object) -> object:
    if not isinstance(value, DGLGraph) or is_sharded_graph(value) or value.is_block:
        return value
    return sharded_as_usual(value)


def _loader(upstream: Callable[..., None]) -> Callable[..., None]:
    """``DataLoader.__init__``: every rank samples all mini-batches of the whole graph."""

    def init(
        self: object, graph: DglGraph, indices: object, *args: object, **kwargs: object
    ) -> None:
        if is_sharded_graph(graph) or any(is_sharded(x) for x in leaves(indices)):
            if WORLD.size > 1 and torch.get_num_threads() > 1:
                raise RuntimeError(
                    "DGL samples other neighbours on each rank if it has several threads: set "
                    "OMP_NUM_THREADS=1 to sample from a sharded graph"
                )
            COUNTS.gathers["dgl.dataloading.DataLoader"] += 1
            graph, indices = whole_graph(graph), tree_map(whole, indices)
        upstream(self, graph, indices, *args, **kwargs)

    return init


def _structure_of(gidx: ShardedIndex) -> Structure | Refusal:
    if gidx.number_of_etypes() != 1:
        return SEVERAL_RELATIONS
    return gidx.relation(0)


def _of_edges(upstream: Callable[..., object]) -> Callable[..., object]:
    """``create_unitgraph_from_coo``, to which all graphs of edges come."""

    def create(
        num_ntypes: int,
        num_src: int,
        num_dst: int,
        row: Tensor,
        col: Tensor,
        *args: object,
        **kwargs: object,
    ) -> object:
        if is_sharded(row) or is_sharded(col):
            return of_sharded_edges(int(num_ntypes), int(num_src), int(num_dst), row, col)
        return upstream(num_ntypes, num_src, num_dst, row, col, *args, **kwargs)

    return create


def _of_relations(upstream: Callable[..., object]) -> Callable[..., object]:
    """``create_heterograph_from_relations``."""

    def create(
        metagraph: Metagraph, rel_graphs: Sequence[GraphIndex], num_nodes_per_type: Sizes | None
    ) -> object:
        if not any(isinstance(graph, ShardedIndex) for graph in rel_graphs):
            return upstream(metagraph, rel_graphs, num_nodes_per_type)
        if num_nodes_per_type is None:
            sizes = _sizes(metagraph, rel_graphs)
        else:
            sizes = list(map(int, num_nodes_per_type.tonumpy()))
        return of_relations(metagraph, rel_graphs, sizes)

    return create


def _sizes(metagraph: Metagraph, graphs: Sequence[GraphIndex]) -> list[int]:
    """The numbers of nodes of all kinds, each of which some relation has."""
    found: dict[int, int] = {}
    for etype, graph in enumerate(graphs):
        source, destination = map(int, metagraph.find_edge(etype))
        found[source] = graph.num_nodes(0)
        found[destination] = graph.num_nodes(graph.number_of_ntypes() - 1)
    return [found[ntype] for ntype in range(len(found))]


def _init(upstream: Callable[..., None]) -> Callable[..., None]:
    """``DGLGraph.__init__``, which asks for an index object of its own class."""

    def init(
        self: DGLGraph,
        gidx: object = [],  # as upstream's
        ntypes: Sequence[str] = ["_N"],
        etypes: Sequence[str] = ["_E"],
        node_frames: Sequence[Frame] | None = None,
        edge_frames: Sequence[Frame] | None = None,
        **kwargs: object,
    ) -> None:
        if isinstance(gidx, ShardedIndex):
            self._init(gidx, ntypes, etypes, node_frames, edge_frames)
        else:
            upstream(self, gidx, ntypes, etypes, node_frames, edge_frames, **kwargs)

    return init


def _set_nodes(upstream: Callable[..., None]) -> Callable[..., None]:
    def set_n_repr(self: DglGraph, ntid: int, u: object, data: object) -> None:
        if isinstance(self._graph, ShardedIndex) and is_all(u):
            data = _placed(data, self._graph.num_nodes(ntid))
        upstream(self, ntid, u, data)

    return set_n_repr


def _set_edges(upstream: Callable[..., None]) -> Callable[..., None]:
    def set_e_repr(self: DglGraph, etid: int, edges: object, data: object) -> None:
        if isinstance(self._graph, ShardedIndex) and is_all(edges):
            data = _placed(data, self._graph.num_edges(etid))
        upstream(self, etid, edges, data)

    return set_e_repr


def _degrees(upstream: Callable[..., object]) -> Callable[..., object]:
    """``in_degrees`` or ``out_degrees``, which for all nodes need no numbers on their device."""
    is_out, signature = upstream.__name__ == "out_degrees", inspect.signature(upstream)

    def degrees(self: DglGraph, *given: object, **options: object) -> object:
        if not isinstance(self._graph, ShardedIndex):
            return upstream(self, *given, **options)
        found = signature.bind(self, *given, **options)
        found.apply_defaults()
        _, nodes, etype = found.args
        if not is_all(nodes):
            return upstream(self, *given, **options)
        relation = self._graph.relation(self.get_etype_id(etype))
        return relation.reversed.in_degrees if is_out else relation.in_degrees

    return degrees


def _placed(data: object, n: int) -> object:
    """Replicated features for a frame, as sharded ones."""
    if not isinstance(data, Mapping):
        return data  # an error of DGL's
    return {
        key: taken(value, usual(n), 0, is_tied=True, name=key)
        if type(value) is Tensor and value.dim() and len(value) == n
        else value
        for key, value in data.items()
    }


def _own_reduction(upstream: Callable[..., object]) -> Callable[..., object]:
    def invoke(
        graph: DglGraph,
        func: Callable[[NodeBatch], Mapping[str, Tensor]],
        msgdata: Mapping[str, Tensor],
        *,
        orig_nid: Tensor | None = None,
    ) -> object:
        if is_sharded_graph(graph):
            return reducing.reduced(graph, func, msgdata, orig_nid=orig_nid)
        return upstream(graph, func, msgdata, orig_nid=orig_nid)

    return invoke


def _by_kind(upstream: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``TypedLinear.forward``, by which each rank multiplies its own rows."""

    def forward(self: Typed, x: Tensor, x_type: Tensor, sorted_by_type: bool = False) -> Tensor:
        lead = next((value for value in (x, x_type) if is_sharded(value)), None)
        if lead is None or lead.axis != 0 or x.shape[0] != x_type.shape[0]:
            return upstream(self, x, x_type, sorted_by_type)
        # Local rows are in the order of global ones, so they are sorted if these are.
        local = aligned(x, lead.rows, 0), aligned(x_type, lead.rows, 0)
        out = upstream(_WithEntered(self), *local, sorted_by_type)
        return ShardedTensor(out, lead.rows, 0)

    return forward


class _WithEntered:
    """A module whose matrices each rank is about to use on its own rows."""

    def __init__(self, module: Typed) -> None:
        self._module = module

    def get_weight(self) -> Tensor:
        """Its matrices."""
        return enter(self._module.get_weight())

    def __getattr__(self, name: str) -> object:
        found: object = getattr(self._module, name)
        return found
