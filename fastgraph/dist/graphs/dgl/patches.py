"""Patches of DGL by which graphs with sharded edges are sharded graphs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import dgl
import torch
from dgl import convert, core, heterograph_index, subgraph, transforms
from dgl.base import is_all
from dgl.dataloading import DataLoader
from dgl.heterograph import DGLGraph
from dgl.nn.pytorch.linear import TypedLinear
from dgl.transforms import functional
from torch import Tensor

from fastgraph.dgl.relations import TYPED_LINEAR
from fastgraph.dgl.structure import FOREIGN, SEVERAL_RELATIONS, Structure
from fastgraph.dist.graphs.dgl import reducing
from fastgraph.dist.graphs.dgl import rules as rules
from fastgraph.dist.graphs.dgl.graphs import is_sharded_graph, sharded_as_usual, whole_graph
from fastgraph.dist.graphs.dgl.index import ShardedIndex, of_relations, of_sharded_edges
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


def _keep_sharded(module: Any, name: str) -> None:
    """Replace a function of DGL in all modules that offer it."""
    upstream = getattr(module, name)
    if not inspect.isfunction(upstream):
        return
    replacement = _sharded_again(upstream)
    for owner in (module, dgl, transforms):
        if vars(owner).get(name) is upstream:
            PATCHES.replace(owner, name, replacement)


def _sharded_again(upstream: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes graphs out of graphs, perhaps by the C++ library from whole ones."""

    @functools.wraps(upstream)
    def transform(*args: Any, **kwargs: Any) -> Any:
        result = upstream(*args, **kwargs)
        if any(is_sharded_graph(value) for value in leaves(args, kwargs)):
            return tree_map(_as_sharded, result)
        return result

    return transform


def _as_sharded(value: Any) -> Any:
    is_whole = isinstance(value, DGLGraph) and not is_sharded_graph(value) and not value.is_block
    return sharded_as_usual(value) if is_whole else value


def _loader(upstream: Callable[..., None]) -> Callable[..., None]:
    """``DataLoader.__init__``: every rank samples all mini-batches of the whole graph."""

    def init(self: Any, graph: Any, indices: Any, *args: Any, **kwargs: Any) -> None:
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


def _of_edges(upstream: Callable[..., Any]) -> Callable[..., Any]:
    """``create_unitgraph_from_coo``, to which all graphs of edges come."""

    def create(
        num_ntypes: int, num_src: int, num_dst: int, row: Any, col: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if is_sharded(row) or is_sharded(col):
            return of_sharded_edges(int(num_ntypes), int(num_src), int(num_dst), row, col)
        return upstream(num_ntypes, num_src, num_dst, row, col, *args, **kwargs)

    return create


def _of_relations(upstream: Callable[..., Any]) -> Callable[..., Any]:
    """``create_heterograph_from_relations``."""

    def create(metagraph: Any, rel_graphs: Any, num_nodes_per_type: Any) -> Any:
        if not any(isinstance(graph, ShardedIndex) for graph in rel_graphs):
            return upstream(metagraph, rel_graphs, num_nodes_per_type)
        if num_nodes_per_type is None:
            sizes = _sizes(metagraph, rel_graphs)
        else:
            sizes = num_nodes_per_type.tonumpy().tolist()
        return of_relations(metagraph, rel_graphs, sizes)

    return create


def _sizes(metagraph: Any, graphs: Any) -> list[int]:
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
        self: Any,
        gidx: Any = [],  # noqa: B006  # as upstream's
        ntypes: Any = ["_N"],  # noqa: B006
        etypes: Any = ["_E"],  # noqa: B006
        node_frames: Any = None,
        edge_frames: Any = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(gidx, ShardedIndex):
            self._init(gidx, ntypes, etypes, node_frames, edge_frames)
        else:
            upstream(self, gidx, ntypes, etypes, node_frames, edge_frames, **kwargs)

    return init


def _set_nodes(upstream: Callable[..., None]) -> Callable[..., None]:
    def set_n_repr(self: Any, ntid: int, u: Any, data: Any) -> None:
        if isinstance(self._graph, ShardedIndex) and is_all(u):
            data = _placed(data, self._graph.num_nodes(ntid))
        upstream(self, ntid, u, data)

    return set_n_repr


def _set_edges(upstream: Callable[..., None]) -> Callable[..., None]:
    def set_e_repr(self: Any, etid: int, edges: Any, data: Any) -> None:
        if isinstance(self._graph, ShardedIndex) and is_all(edges):
            data = _placed(data, self._graph.num_edges(etid))
        upstream(self, etid, edges, data)

    return set_e_repr


def _placed(data: Any, n: int) -> Any:
    """Replicated features for a frame, as sharded ones."""
    if not hasattr(data, "items"):
        return data  # an error of DGL's
    return {
        key: taken(value, usual(n), 0, is_tied=True, name=key)
        if type(value) is Tensor and value.dim() and len(value) == n
        else value
        for key, value in data.items()
    }


def _own_reduction(upstream: Callable[..., Any]) -> Callable[..., Any]:
    def invoke(graph: Any, func: Any, msgdata: Any, *, orig_nid: Any = None) -> Any:
        reduce = reducing.reduced if is_sharded_graph(graph) else upstream
        return reduce(graph, func, msgdata, orig_nid=orig_nid)

    return invoke


def _by_kind(upstream: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``TypedLinear.forward``, by which each rank multiplies its own rows."""

    def forward(self: Any, x: Any, x_type: Any, sorted_by_type: bool = False) -> Tensor:
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

    def __init__(self, module: Any) -> None:
        self._module = module

    def get_weight(self) -> Any:
        """Its matrices."""
        return enter(self._module.get_weight())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
