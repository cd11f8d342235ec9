"""Random graphs that are born on ranks: none ever holds the whole, and no edge is sent.

Each rank draws the cells of the adjacency matrix in which it has edges
(:mod:`fastgraph.dist.graphs.cells`), each by a generator of its own. So the graph is a function of
the seed and its sizes, whatever the number of ranks and the mode. So are features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastgraph.dist.graphs import dgl, pyg_functions
from fastgraph.dist.graphs.cells import Cells, Kronecker, Uniform, counts_of, levels_for
from fastgraph.dist.graphs.owners import owner_of_edges
from fastgraph.dist.operators.modes import checked_mode
from fastgraph.dist.ranks import transport
from fastgraph.dist.ranks.mesh import Mesh
from fastgraph.dist.ranks.own_device import HOST
from fastgraph.dist.ranks.world import WORLD
from fastgraph.dist.tensor import hooks
from fastgraph.dist.tensor.layout import Consecutive, Layout, know, known
from fastgraph.dist.tensor.sharded import ShardedTensor

if TYPE_CHECKING:
    from torch_geometric.data import Data

GRAPH500 = (0.57, 0.19, 0.19, 0.05)
"""The initiator of the Graph500 benchmark."""

_PIECE = 1 << 18
"""Edges of a cell that are drawn at once."""

_ROWS = 1 << 12
"""Rows of features that one generator draws."""

_LARGEST_SCALE = 31

_EDGES, _FEATURES, _NAMES, _COUNTS = 0, 1, 2, 3
"""Kinds of what is drawn: their generators are others."""


def kronecker(
    scale: int,
    num_edges: int,
    *,
    features: int = 0,
    seed: int = 0,
    initiator: Sequence[float] = GRAPH500,
    mode: str = "auto",
    mesh: Mesh | None = None,
) -> Data:
    """A Kronecker graph of ``2 ** scale`` nodes, of which each rank draws its block alone.

    Each edge falls into a quadrant of the adjacency matrix by the probabilities of the initiator,
    into a quadrant of that, and so on (Chakrabarti et al., "R-MAT", SDM 2004; Leskovec et al.,
    "Kronecker graphs", JMLR 11, 2010). Nodes then are renamed at random, so that hubs are with all
    ranks; several edges between two nodes in one direction become one, and self-loops are kept.
    Nodes may be left without edges. Ranks send each other nothing of the graph: each draws the
    block that it computes with, and holds nothing else.

    Args:
        scale: 0 to 31.
        num_edges: how many are drawn, duplicates included.
        features: how many normally distributed features in ``data.x`` a node has; 0: none.
        seed: 0 or more; the graph is the same for any number of ranks.
        initiator: four probabilities: of the first row, then of the second, where rows are those of
            sources.
        mode: see :func:`fastgraph.dist.shard`.
        mesh: likewise.

    Returns:
        ``Data`` with sharded ``edge_index``, ``num_nodes`` and ``x``; nodes are consecutive on each
        rank.

    Raises:
        RuntimeError: :func:`fastgraph.dist.init` was not called.
        ValueError: an argument that cannot be used, or that is another one on another rank.
    """
    _check_number("scale", scale, 0, _LARGEST_SCALE)
    _check_number("seed", seed, 0)
    shares = torch.tensor([float(share) for share in initiator], dtype=torch.float64, device=HOST)
    fits = len(shares) == 4 and bool((shares >= 0).all()) and abs(float(shares.sum()) - 1) < 1e-6
    if not fits:
        raise ValueError(
            f"initiator must be four probabilities that add up to 1, got {[*initiator]}"
        )

    def make() -> Cells:
        names = _generator(seed, _NAMES, 0)
        return Kronecker(scale, shares.tolist(), levels_for(num_edges), names)

    key = "kronecker", scale, tuple(shares.tolist())
    return _graph(make, 1 << scale, num_edges, features, seed, mode, mesh, key)


def erdos_renyi(
    num_nodes: int,
    num_edges: int,
    *,
    features: int = 0,
    seed: int = 0,
    mode: str = "auto",
    mesh: Mesh | None = None,
) -> Data:
    """A graph whose edges have ends that are drawn evenly, by all ranks together.

    Several edges between two nodes in one direction become one, self-loops are kept. All else is as
    for :func:`kronecker`.

    Args:
        num_nodes: 1 or more.
        num_edges: how many are drawn, duplicates included.
        features: see :func:`kronecker`.
        seed: likewise.
        mode: likewise.
        mesh: likewise.

    Raises:
        RuntimeError, ValueError: as for :func:`kronecker`.
    """
    _check_number("num_nodes", num_nodes, 1, 1 << _LARGEST_SCALE)

    def make() -> Cells:
        return Uniform(num_nodes, levels_for(num_edges))

    return _graph(
        make, num_nodes, num_edges, features, seed, mode, mesh, ("erdos_renyi", num_nodes)
    )


def _check_number(name: str, value: object, least: int, most: int | None = None) -> None:
    fits = isinstance(value, int) and not isinstance(value, bool) and value >= least
    if not fits or (most is not None and isinstance(value, int) and value > most):
        limits = f">= {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} must be an integer {limits}, got {value!r}")


def _generator(seed: int, kind: int, piece: int) -> torch.Generator:
    """Of one piece: seeds that are close to each other give unrelated numbers."""
    mixed = (seed * 4 + kind) * 0x9E3779B97F4A7C15 + piece * 0xBF58476D1CE4E5B9
    mixed = (mixed ^ mixed >> 31) * 0x94D049BB133111EB % (1 << 64)
    return torch.Generator().manual_seed(mixed >> 1)


def _graph(
    make: Callable[[], Cells],
    num_nodes: int,
    num_edges: int,
    features: int,
    seed: int,
    mode: str,
    mesh: Mesh | None,
    key: object,
) -> Data:
    from torch_geometric.data import Data

    if not WORLD.is_ready:
        raise RuntimeError("call fastgraph.dist.init() before a graph is drawn")
    mode = checked_mode(mode, mesh)
    for name, value in (("num_edges", num_edges), ("features", features), ("seed", seed)):
        _check_number(name, value, 0)
    given = (key, num_edges, features, seed, mode, mesh)
    asked = transport.gather_objects(given)
    if any(other != given for other in asked):
        raise ValueError(f"arguments must be the same on all ranks, got {asked}")
    hooks.install()
    pyg_functions.install()
    dgl.install()
    cuts = _cuts(num_nodes)
    nodes = Consecutive([stop - start for start, stop in pairwise(cuts)])
    nodes.mode, nodes.mesh = mode, mesh
    know(nodes)

    def owners(ranks: Tensor) -> Tensor:
        return owner_of_edges(ranks[0], ranks[1], mode, mesh)

    pair = _of_block(make(), num_nodes, num_edges, seed, owners)
    of_ranks = transport.all_gather(torch.tensor([pair.shape[1]], device=HOST), [1] * WORLD.size)
    edges = Consecutive(of_ranks.tolist())
    if known(edges.n) is None:
        know(edges)
    data = Data(edge_index=ShardedTensor(pair, edges, 1), num_nodes=num_nodes)
    if features:
        rows = _rows(nodes, features, seed)
        data.x = ShardedTensor(rows, nodes, 0)
    return data


def _of_block(
    cells: Cells, num_nodes: int, num_edges: int, seed: int, owners: Callable[[Tensor], Tensor]
) -> Tensor:
    """The edges that this rank computes with, int64 ``[2, edges]``, by destination, each once.

    Args:
        cells: where edges may be.
        num_nodes: how many there are.
        num_edges: how many are drawn in all cells.
        seed: of the graph.
        owners: gives the ranks of edges, of pairs of the ranks of their ends.
    """
    counts = counts_of(cells, num_edges, _generator(seed, _COUNTS, 0))
    ends = torch.tensor(_cuts(num_nodes)[1:-1], device=HOST)
    found = [torch.empty(0, dtype=torch.int64, device=HOST)]
    for source, destination in _near(cells.bounds, ends, owners).nonzero().tolist():
        left, cell = int(counts[source, destination]), source * len(counts) + destination
        generator = _generator(seed, _EDGES, cell)
        drawn = [torch.empty(0, dtype=torch.int64, device=HOST)]
        while left > 0:
            pair = cells.draw(source, destination, min(left, _PIECE), generator)
            left -= _PIECE
            is_own = owners(torch.bucketize(pair, ends, right=True)) == WORLD.rank
            drawn.append((pair[1] * num_nodes + pair[0])[is_own])
        found.append(torch.cat(drawn).unique())  # those of another cell are others
    places = torch.cat(found).sort().values
    return torch.stack([places % num_nodes, places // num_nodes])


def _near(bounds: Tensor, ends: Tensor, owners: Callable[[Tensor], Tensor]) -> Tensor:
    """Bool ``[groups, groups]``: the cells in which this rank may have edges."""
    ranks = torch.arange(WORLD.size, device=HOST)
    is_own = owners(torch.cartesian_prod(ranks, ranks).T) == WORLD.rank
    before = torch.zeros(WORLD.size + 1, WORLD.size + 1, dtype=torch.int64, device=HOST)
    before[1:, 1:] = is_own.view(WORLD.size, WORLD.size).long().cumsum(0).cumsum(1)
    first = torch.bucketize(bounds[:-1], ends, right=True)
    last = torch.bucketize(bounds[1:] - 1, ends, right=True) + 1
    of_last, of_first = before[last], before[first]
    return (of_last[:, last] - of_last[:, first] - of_first[:, last] + of_first[:, first]) > 0


def _cuts(num_nodes: int) -> list[int]:
    """Where the nodes of each rank begin, and where those of the last one end."""
    return [num_nodes * rank // WORLD.size for rank in range(WORLD.size + 1)]


def _rows(nodes: Layout, features: int, seed: int) -> Tensor:
    """The features of the nodes of this rank."""
    start = int(nodes.key[0]) if nodes.mine else 0
    first, found = start // _ROWS, [torch.empty(0, features, device=HOST)]
    for piece in range(first, -(-(start + nodes.mine) // _ROWS)):
        found.append(
            torch.randn(_ROWS, features, generator=_generator(seed, _FEATURES, piece), device=HOST)
        )
    rows = torch.cat(found)
    return rows[start - first * _ROWS :][: nodes.mine].clone()
