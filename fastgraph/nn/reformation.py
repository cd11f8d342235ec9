"""Elastic computation reformation: sparse pairs of clusters as dense sub-blocks."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastgraph import ops
from fastgraph.graphs.graph import normal_mode
from fastgraph.layers.arguments import check_choices, check_integers, check_numbers
from fastgraph.nn.auto_tuner import START, AutoTuner, densities
from fastgraph.nn.clusters import (
    Clusters,
    clusters_by_cache,
    clusters_by_metis,
    clusters_given,
)
from fastgraph.nn.dual_pattern import DualPattern
from fastgraph.nn.softmax_mass import chosen_by_mass
from fastgraph.nn.sub_blocks import Grid, Reformed

SELECTIONS = ("indolent", "elastic", "mass", "exact")
PLACEMENTS = ("edges", "random")


class Reformation:
    """Which pairs of clusters lose their edges to sub-blocks, shared by the layers of a model.

    TorchGT's elastic computation reformation (Zhang et al., SC 2024, section III-D). The nodes of
    each graph are clustered, and a pair of clusters that is transferred has, in place of its E
    edges, ``ceil(E / block ** 2)`` sub-blocks of ``block`` rows and columns, in which all attend to
    all. Edges outside these are dropped, and entries that are no edges invented: sparse turns
    compute something else then. Self-loops, tokens, steps of a path and pairs that are several
    edges apart, of patterns with ``hops``, stay.

    Pairs are selected

    - ``"indolent"``: if their density is below that of the graph;
    - ``"elastic"``: if it is below a threshold, which an :class:`AutoTuner` sets;
    - ``"mass"``, ours: as long as no softmax loses more than ``mass`` by what is dropped. Nothing
      is invented, as its share is not known before, so that outputs of attention move by at most
      ``2 mass max|v|``. Pairs are selected by layer in :meth:`measuring`, and none before;
    - ``"exact"``, ours: none. What is computed is as without a reformation, and the report has
      the sub-blocks that have an edge.

    Args:
        select: one of these.
        clusters: of each graph, at least 1; or the cluster of each node, from 0 on in each graph,
            int64 ``[nodes]``, of which a copy is kept. Default: the fewest of which the keys and
            values of one fit into 0.8 of the second cache (:func:`clusters_of_cache`). TorchGT has
            8 at 64 channels on an RTX 3090. Of a graph that is shared out among ranks the cache of
            the first decides; ranks that each have all of it need a number where caches differ.
        block: rows and columns of a sub-block, 1 to 64; see :func:`fastest_block`. The last ones of
            a cluster have fewer.
        placement: of sub-blocks within a pair: ``"edges"``, where most edges are, or ``"random"``,
            as TorchGT has them; not with ``select="mass"``.
        mass: with ``select="mass"``, the largest part of a softmax that may be dropped, 0 to below
            1.
        tuner: with ``select="elastic"``, default: a new one.
        seed: of random placement.
        evaluation: ``"same"``: where a model is not in training mode, too, or ``"exact"``: there
            the edges are as they were.
        kernel: ``"rows"``, :func:`fastgraph.ops.attention`, or ``"blocks"``,
            :func:`fastgraph.ops.block_attention`, in steps without dropout of weights. Nodes should
            be in the order of their clusters then; which is faster depends on the graph.

    Copies, as of a whole model, have no pairs that were selected by mass until they are measured.

    Attributes:
        is_measuring: whether layers select pairs in the sparse turns that they compute.

    Raises:
        ValueError: an argument is none of these, or is given where it has no use.
    """

    def __init__(
        self,
        select: str = "indolent",
        *,
        clusters: int | Tensor | None = None,
        block: int = 16,
        placement: str = "edges",
        mass: float | None = None,
        tuner: AutoTuner | None = None,
        seed: int = 0,
        evaluation: str = "same",
        kernel: str = "rows",
    ) -> None:
        check_choices(
            select=(select, SELECTIONS),
            placement=(placement, PLACEMENTS),
            evaluation=(evaluation, ("same", "exact")),
            kernel=(kernel, ("rows", "blocks")),
        )
        if not isinstance(clusters, Tensor | None) and (type(clusters) is not int or clusters < 1):
            raise ValueError(
                f"clusters: expected an integer of at least 1, a tensor or None, got {clusters!r}"
            )
        check_integers(1, 64, block=block)
        check_integers(0, seed=seed)
        if select == "mass":
            check_numbers("0 to below 1", lambda part: 0 <= part < 1, mass=mass)
        elif mass is not None:
            raise ValueError(f"mass: expected None with select={select!r}, got {mass!r}")
        if select == "mass" and placement == "random":
            raise ValueError("placement: expected 'edges' with select='mass', got 'random'")
        if tuner is not None and (select != "elastic" or not isinstance(tuner, AutoTuner)):
            wanted = "an AutoTuner" if select == "elastic" else f"None with select={select!r}"
            raise ValueError(f"tuner: expected {wanted}, got {tuner!r}")
        # Patterns keep what follows from it, which no change to the tensor given may make wrong.
        self.clusters = clusters.clone() if isinstance(clusters, Tensor) else clusters
        self.select, self.block, self.mass = select, block, mass
        self.placement, self.seed = placement, seed
        self.evaluation, self.kernel = evaluation, kernel
        self.tuner = AutoTuner() if select == "elastic" and tuner is None else tuner
        self.is_measuring = False
        self._name = uuid.uuid4().hex  # under which patterns keep what is of this one alone

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._name = uuid.uuid4().hex  # a copy's model has other values, and pairs of its own

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """A context in which layers select pairs by mass, each in the sparse turns it computes.

        Raises:
            ValueError: pairs are not selected by mass.
        """
        if self.select != "mass":
            raise ValueError(f"select: expected 'mass' to be measured, got {self.select!r}")
        before, self.is_measuring = self.is_measuring, True
        try:
            yield
        finally:
            self.is_measuring = before

    def entries(
        self,
        pattern: DualPattern,
        row_bytes: int,
        *,
        hops: int = 1,
        layer: int = 0,
        training: bool = True,
    ) -> Reformed | None:
        """The entries of sparse turns now; ``None`` for those of the pattern.

        Args:
            pattern: of the graphs.
            row_bytes: of the keys of a node, as many as of its values, by which clusters are
                counted.
            hops: up to which distance along edges what is invented has a type of its own. Beyond 1
                distances from all queries with invented entries are looked for, as in dense turns.
            layer: which asks.
            training: whether it is in training mode.

        Raises:
            ValueError: a graph has fewer nodes than clusters, or there is not one of each node.
            ModuleNotFoundError: ``pymetis`` is not installed.
            fastgraph.dist.PartitionError: METIS failed.
        """
        if not training and self.evaluation == "exact":
            return None
        kept, key = pattern.reformed, self._key(row_bytes, hops, layer)
        if key not in kept:
            if self.select == "mass":
                return None
            with normal_mode():  # what is kept must still serve training
                pattern.keep_reformed(
                    key, self._made(pattern, self._grid(pattern, row_bytes), hops)
                )
        found: Reformed = kept[key]
        return found

    def measure(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pattern: DualPattern,
        table: Tensor | None,
        row_bytes: int,
        layer: int,
    ) -> None:
        """Select pairs for a layer by mass, as layers do in :meth:`measuring`.

        Args:
            query: ``[rows, heads, channels]``, as the others.
            key: likewise.
            value: likewise.
            pattern: of the rows.
            table: biases by types of pairs, ``[types, heads]``.
            row_bytes: as for :meth:`entries`.
            layer: which asks.

        Raises:
            ValueError: pairs are not selected by mass, or as :meth:`entries`.
        """
        if self.mass is None:
            raise ValueError(f"select: expected 'mass' to be measured, got {self.select!r}")
        with normal_mode(), torch.no_grad():
            grid = self._grid(pattern, row_bytes)
            types = None if table is None else pattern.types
            _, weights, _ = ops.attention(
                query,
                key,
                value,
                pattern.sources,
                ptr=pattern.ptr,
                bias=table,
                bias_index=types,
                need_weights=True,
            )
            assert weights is not None  # asked for
            chosen = chosen_by_mass(pattern, grid, weights[grid.is_edge], self.mass)
            largest = _largest(value, pattern)
            bound = float((2 * chosen.mass * largest).amax()) if largest.numel() else 0.0
            mass = float(chosen.mass.amax()) if chosen.mass.numel() else 0.0
            found = replace(grid.masked(pattern, chosen.is_moved), mass=mass, bound=bound)
            pattern.keep_reformed(self._key(row_bytes, 1, layer), found)

    def _key(self, row_bytes: int, hops: int, layer: int) -> tuple[object, ...]:
        clusters = self._key_of_clusters(row_bytes)
        if self.select == "exact":
            return "exact", clusters, self.block
        if self.mass is not None:
            return "mass", self._name, layer
        index = START if self.tuner is None else self.tuner.index
        return self.select, clusters, self.block, self.placement, self.seed, index, hops

    def _key_of_clusters(self, row_bytes: int) -> object:
        if self.clusters is None:
            return "cache", row_bytes
        return self._name if isinstance(self.clusters, Tensor) else self.clusters

    def _grid(self, pattern: DualPattern, row_bytes: int) -> Grid:
        clusters = self._key_of_clusters(row_bytes)
        key = "grid", clusters, self.block
        if key not in pattern.reformed:
            of_nodes = "clusters", clusters
            if of_nodes not in pattern.reformed:
                pattern.keep_reformed(of_nodes, self._clustered(pattern, row_bytes))
            pattern.keep_reformed(key, Grid(pattern, pattern.reformed[of_nodes], self.block))
        grid: Grid = pattern.reformed[key]
        return grid

    def _clustered(self, pattern: DualPattern, row_bytes: int) -> Clusters:
        if isinstance(self.clusters, Tensor):
            return clusters_given(pattern, self.clusters)
        if self.clusters is not None:
            return clusters_by_metis(pattern, [self.clusters] * pattern.num_graphs)
        return clusters_by_cache(pattern, row_bytes)

    def _made(self, pattern: DualPattern, grid: Grid, hops: int) -> Reformed:
        if self.select == "exact":
            return grid.whole(pattern)
        of_graphs = grid.density_of_graphs
        if self.tuner is not None:
            graphs = zip(of_graphs.tolist(), grid.clusters.counts.tolist(), strict=True)
            now = [densities(graph, clusters)[self.tuner.index] for graph, clusters in graphs]
            of_graphs = of_graphs.new_tensor(now)
        is_moved = grid.density < of_graphs[grid.graph]
        return grid.reformed(pattern, is_moved, self.placement, self.seed, hops)

    def state_dict(self) -> dict[str, Any]:
        """The state for checkpoints, that of the tuner."""
        return {} if self.tuner is None else {"tuner": self.tuner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint.

        Raises:
            ValueError: it is of another selection, or no state of a tuner.
        """
        if ("tuner" in state) != (self.tuner is not None):
            raise ValueError(f"state: expected one of select={self.select!r}, got {list(state)}")
        if self.tuner is not None:
            self.tuner.load_state_dict(state["tuner"])

    def __repr__(self) -> str:
        clusters = "given" if isinstance(self.clusters, Tensor) else self.clusters
        kernel = ", kernel='blocks'" if self.kernel == "blocks" else ""
        return f"Reformation({self.select!r}, clusters={clusters}, block={self.block}{kernel})"


def _largest(value: Tensor, pattern: DualPattern) -> Tensor:
    """The largest channel of the values of each graph and head, float64 ``[graphs, heads]``."""
    rows = value.abs().amax(2).double()
    graph = pattern.graph_of_nodes
    if pattern.has_token:
        graph = torch.cat([graph, torch.arange(pattern.num_graphs, device=graph.device)])
    largest = rows.new_zeros(pattern.num_graphs, value.shape[1])
    return largest.scatter_reduce(0, graph.unsqueeze(1).expand_as(rows), rows, "amax")
