"""A graph and the features of its nodes and edges, with which layers are called."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from measure.graphs import GraphData

EDGE_FEATURES = 4
"""Features of an edge that a layer maps to its own number of channels."""

RELATIONS = 3
"""Kinds of edges, and of nodes."""


class Given:
    """A graph, and features of its nodes and edges, made where a layer takes them.

    Args:
        data: the graph.
        channels: of the features of nodes, and of those of edges that are not mapped.
        num_targets: of a bipartite graph, whose edges lead to as many nodes; ``None`` for a graph
            of one kind of nodes.
        values: makes floating-point features of a shape, by their name; default: normal ones.
        index: the dtype of ``edge_index``.

    Attributes:
        leaves: by name, what ``values`` has made so far.
        graph: of DGL, where calls share one.
    """

    def __init__(
        self,
        data: GraphData,
        channels: int,
        *,
        num_targets: int | None = None,
        values: Callable[[tuple[int, ...], str], Tensor] | None = None,
        index: torch.dtype = torch.int64,
    ) -> None:
        self.num_nodes, self.num_edges = data.num_nodes, data.num_edges
        self.edges = data.edge_index.to(index)
        self.channels = channels
        self.num_targets = num_targets
        self.leaves: dict[str, Tensor] = {}
        self.graph: Any = None
        self._values = values or normal

    def _made(self, name: str, *shape: int) -> Tensor:
        self.leaves[name] = made = self._values(shape, name)
        return made

    def change(self, x: Tensor, edges: Tensor) -> None:
        """Take other features of nodes, and other edges of the same graph."""
        if x is not self.__dict__.get("x"):
            self.__dict__["x"] = x
            self.__dict__.pop("x_by_kind", None)
        if edges is not self.edges:
            self.edges = edges
            self.__dict__.pop("relations", None)

    @cached_property
    def x(self) -> Any:
        """Features of nodes, ``[N, C]``; of a bipartite graph a pair."""
        x = self._made("x", self.num_nodes, self.channels)
        if self.num_targets is None:
            return x
        return x, self._made("x of targets", self.num_targets, self.channels)

    @cached_property
    def features(self) -> Tensor:
        """A few features of each edge, ``[E, 4]``."""
        return self._made("features", self.num_edges, EDGE_FEATURES)

    @cached_property
    def rows(self) -> Tensor:
        """As many features of each edge as of each node, ``[E, C]``."""
        return self._made("rows", self.num_edges, self.channels)

    @cached_property
    def weight(self) -> Tensor:
        """One positive weight of each edge, ``[E]``."""
        return self._made("weight", self.num_edges).abs() + 0.5

    @cached_property
    def pos(self) -> Any:
        """Positions of nodes in space, ``[N, 3]``; of a bipartite graph a pair."""
        pos = self._made("pos", self.num_nodes, 3)
        if self.num_targets is None:
            return pos
        return pos, self._made("pos of targets", self.num_targets, 3)

    @cached_property
    def normal(self) -> Tensor:
        """Unit vectors of nodes, ``[N, 3]``."""
        made = normal((self.num_nodes, 3), "normal").to(self.pos)
        return nn.functional.normalize(made, dim=-1)

    @cached_property
    def kinds(self) -> Tensor:
        """The kind of each edge, ``[E]``."""
        return torch.arange(self.num_edges) % RELATIONS

    @cached_property
    def node_kinds(self) -> Tensor:
        """The kind of each node, ``[N]``."""
        return torch.arange(self.num_nodes) % RELATIONS

    @cached_property
    def batch(self) -> Tensor:
        """The graph of each node, if there were about ten nodes in each, ``[N]``, ascending."""
        return torch.arange(self.num_nodes) // 10

    @cached_property
    def degrees(self) -> Tensor:
        """How many nodes have each number of incoming edges."""
        size = self.num_nodes if self.num_targets is None else self.num_targets
        return torch.bincount(torch.bincount(self.edges[1].long(), minlength=size))

    @cached_property
    def four_neighbours(self) -> Tensor:
        """Edges of a mesh: each node has four neighbours, in order."""
        ends = torch.arange(self.num_nodes).repeat_interleave(4)
        steps = torch.tensor([1, 2, 5, 7]).repeat(self.num_nodes)
        return torch.stack([(ends + steps) % self.num_nodes, ends])

    @cached_property
    def relations(self) -> dict[tuple[str, str, str], Tensor]:
        """Half of the edges lead from one kind of nodes to another, half back."""
        half = self.num_edges // 2
        return {
            ("a", "to", "b"): self.edges[:, :half],
            ("b", "of", "a"): self.edges[:, half:],
        }

    @cached_property
    def x_by_kind(self) -> dict[str, Tensor]:
        """Features for :attr:`relations`."""
        return {"a": self.x, "b": self._made("x of b", self.num_nodes, self.channels)}


def normal(shape: tuple[int, ...], name: str) -> Tensor:
    """Normal values, the same for the same shape and name."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator)


class Usual(NamedTuple):
    """A class in a usual configuration.

    Attributes:
        build: the layer for what it will be called with.
        call: its forward pass.
        takes_pair: true if it takes a pair of features, of a bipartite graph.
        takes_flow: true if edges may be followed backwards.
    """

    build: Callable[[Given], nn.Module]
    call: Callable[[Any, Given], Any]
    takes_pair: bool = False
    takes_flow: bool = True


def plainly(layer: nn.Module, given: Given) -> Any:
    """A call with features of nodes and edges."""
    return layer(given.x, given.edges)


def heads_of(channels: int) -> int:
    """Eight channels a head, and eight heads at most."""
    return max(1, min(8, channels // 8))
