"""Random graphs that ranks draw together: none ever holds the whole.

Edges are drawn in pieces of a fixed size, each by a generator of its own. A rank draws some pieces,
and each edge moves once, to the rank that computes with it. So the graph is a function of the seed
and its sizes, whatever the number of ranks and the mode. Features are drawn like that, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastgraph.dist.graphs import dgl, pyg_functions
from fastgraph.dist.graphs.owners import owner_of_edges
from fastgraph.dist.operators.modes import checked_mode
from fastgraph.dist.ranks import transport
from fastgraph.dist.ranks.mesh import Mesh
from fastgraph.dist.ranks.world import WORLD
from fastgraph.dist.tensor import hooks
from fastgraph.dist.tensor.layout import Layout, know, known
from fastgraph.dist.tensor.sharded import ShardedTensor

if TYPE_CHECKING:
    from torch_geometric.data import Data

GRAPH500 = (0.57, 0.19, 0.19, 0.05)
"""The initiator of the Graph500 benchmark."""

_PIECE = 1 << 16
"""Edges that one generator draws."""

_ROWS = 1 << 12
"""Rows of features that one generator draws."""

_LARGEST_SCALE = 31

_EDGES, _FEATURES, _NAMES = 0, 1, 2
"""Kinds of pieces: their generators are others."""

Draw = Callable[[int, torch.Generator], Tensor]


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
    """A Kronecker graph of ``2 ** scale`` nodes, drawn by all ranks together.

    Each edge falls into a quadrant of the adjacency matrix by the probabilities of the initiator,
    into a quadrant of that, and so on (Chakrabarti et al., "R-MAT", SDM 2004; Leskovec et al.,
    "Kronecker graphs", JMLR 11, 2010). Nodes then are renamed at random, so that hubs are with all
    ranks; several edges between two nodes in one direction become one. Nodes may be left without
    edges. A rank holds its edges and nodes, and, as of any graph, who owns which node: four bytes
    for each.

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
    shares = torch.tensor([float(share) for share in initiator], dtype=torch.float64)
    fits = len(shares) == 4 and bool((shares >= 0).all()) and abs(float(shares.sum()) - 1) < 1e-6
    if not fits:
        raise ValueError(
            f"initiator must be four probabilities that add up to 1, got {[*initiator]}"
        )
    names = _Names(scale, seed)
    ends = shares.cumsum(0)[:3]

    def draw(count: int, generator: torch.Generator) -> Tensor:
        pair = torch.zeros(2, count, dtype=torch.int64)
        for _ in range(scale):
            drawn = torch.rand(count, generator=generator, dtype=torch.float64)
            quadrant = torch.bucketize(drawn, ends, right=True)
            pair = pair * 2 + torch.stack([quadrant // 2, quadrant % 2])
        return names(pair)

    key = "kronecker", scale, tuple(shares.tolist())
    return _graph(draw, 1 << scale, num_edges, features, seed, mode, mesh, key)


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

    def draw(count: int, generator: torch.Generator) -> Tensor:
        return torch.randint(0, num_nodes, (2, count), generator=generator)

    return _graph(
        draw, num_nodes, num_edges, features, seed, mode, mesh, ("erdos_renyi", num_nodes)
    )


def _check_number(name: str, value: object, least: int, most: int | None = None) -> None:
    fits = isinstance(value, int) and not isinstance(value, bool) and value >= least
    if not fits or (most is not None and isinstance(value, int) and value > most):
        limits = f">= {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} must be an integer {limits}, got {value!r}")


class _Names:
    """Other numbers for nodes: a bijection of ``2 ** scale`` of them, which takes no memory."""

    def __init__(self, scale: int, seed: int) -> None:
        self._scale, self._mask = scale, (1 << scale) - 1
        drawn = torch.randint(0, 1 << 31, (6,), generator=_generator(seed, _NAMES, 0)).tolist()
        self._rounds = [(drawn[i] | 1, drawn[i + 1]) for i in (0, 2, 4)]

    def __call__(self, nodes: Tensor) -> Tensor:
        for factor, term in self._rounds:  # products of 31 bits each fit into 63
            nodes = (nodes * (factor & self._mask | 1) + (term & self._mask)) & self._mask
            nodes = nodes ^ nodes >> (self._scale + 1) // 2
        return nodes


def _generator(seed: int, kind: int, piece: int) -> torch.Generator:
    """Of one piece: seeds that are close to each other give unrelated numbers."""
    mixed = (seed * 3 + kind) * 0x9E3779B97F4A7C15 + piece * 0xBF58476D1CE4E5B9
    mixed = (mixed ^ mixed >> 31) * 0x94D049BB133111EB % (1 << 64)
    return torch.Generator().manual_seed(mixed >> 1)


def _graph(
    draw: Draw,
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
    cuts = [num_nodes * rank // WORLD.size for rank in range(WORLD.size + 1)]
    nodes = _consecutive([cuts[rank + 1] - cuts[rank] for rank in range(WORLD.size)])
    nodes.mode, nodes.mesh = mode, mesh
    know(nodes)
    ends = torch.tensor(cuts[1:-1])

    def owners(pair: Tensor) -> Tensor:
        source, destination = torch.bucketize(pair, ends, right=True)
        return owner_of_edges(source, destination, mode, mesh)

    pair = _distinct(_at_owners(_drawn(draw, num_edges, seed), owners), num_nodes)
    edges = _consecutive(transport.all_gather(torch.tensor([pair.shape[1]]), [1] * WORLD.size))
    if known(edges.n) is None:
        know(edges)
    data = Data(edge_index=ShardedTensor(pair, edges, 1), num_nodes=num_nodes)
    if features:
        rows = _rows(nodes, features, seed)
        data.x = ShardedTensor(rows, nodes, 0)
    return data


def _consecutive(counts: Sequence[int] | Tensor) -> Layout:
    """The layout of so many rows on each rank, one rank after the other."""
    counts = [int(count) for count in counts]
    start = sum(counts[: WORLD.rank])
    return Layout(torch.arange(start, start + counts[WORLD.rank]), sum(counts), counts)


def _drawn(draw: Draw, num_edges: int, seed: int) -> Iterator[Tensor]:
    """The edges that this rank draws, ``[2, edges]`` for each round of pieces, as many on all."""
    pieces = -(-num_edges // _PIECE)
    for first in range(0, pieces, WORLD.size):
        piece = first + WORLD.rank
        count = max(min(_PIECE, num_edges - piece * _PIECE), 0)
        yield draw(count, _generator(seed, _EDGES, piece))


def _at_owners(drawn: Iterator[Tensor], owners: Callable[[Tensor], Tensor]) -> Tensor:
    """The edges of this rank, of all that were drawn."""
    found = [torch.empty(0, 2, dtype=torch.int64)]
    for pair in drawn:
        owner = owners(pair)
        sends = torch.bincount(owner, minlength=WORLD.size)
        receives = transport.all_gather(sends[None], [1] * WORLD.size)[:, WORLD.rank]
        sent = pair[:, owner.argsort(stable=True)].t().contiguous()
        found.append(transport.all_to_all(sent, sends.tolist(), receives.tolist()))
    return torch.cat(found).t()


def _distinct(pair: Tensor, num_nodes: int) -> Tensor:
    """Edges in ascending order by destination, each once."""
    places = torch.unique(pair[1] * num_nodes + pair[0])
    return torch.stack([places % num_nodes, places // num_nodes])


def _rows(nodes: Layout, features: int, seed: int) -> Tensor:
    """The features of the nodes of this rank."""
    start = int(nodes.key[0]) if nodes.mine else 0
    first, found = start // _ROWS, [torch.empty(0, features)]
    for piece in range(first, -(-(start + nodes.mine) // _ROWS)):
        found.append(torch.randn(_ROWS, features, generator=_generator(seed, _FEATURES, piece)))
    rows = torch.cat(found)
    return rows[start - first * _ROWS :][: nodes.mine].clone()
