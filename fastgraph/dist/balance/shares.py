"""Sharding a graph, with shares that fit the devices of the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from fastgraph.dist.balance.balance import PREDICTED
from fastgraph.dist.balance.first_epochs import say
from fastgraph.dist.balance.performance import Estimate, Performance, measure_performance
from fastgraph.dist.graphs.dgl import is_dgl_graph
from fastgraph.dist.graphs.partition import METHODS, PartitionError, partition
from fastgraph.dist.graphs.protocols import AnyGraph
from fastgraph.dist.graphs.pyg import (
    Graph,
    by_row,
    check_can_be_sharded,
    check_is_graph,
    joint_edges,
    num_nodes,
)
from fastgraph.dist.graphs.pyg import shard as shard_by_numbers
from fastgraph.dist.graphs.relayout import Placement
from fastgraph.dist.operators.modes import checked_mode
from fastgraph.dist.ranks import transport
from fastgraph.dist.ranks.agreement import on_first_rank
from fastgraph.dist.ranks.devices import Device, devices, in_use, scores
from fastgraph.dist.ranks.mesh import Mesh
from fastgraph.dist.ranks.world import WORLD

NAMES = ("auto", "uniform")

_ROUNDS = 8
_BALANCED = 1.02
_DAMPING = 0.8
"""Of the exponent by which shares are corrected, lest they swing around the balance."""

_LEAST = 1e-3

MOST_ERROR = 0.12
"""Of a model of performance on parts that it has not seen, mean of ranks, to be used."""


def shard(
    data: Graph,
    *,
    weights: Sequence[float] | str | None = None,
    model: nn.Module | Performance | None = None,
    method: str = "metis",
    parts: Tensor | None = None,
    mode: str = "auto",
    mesh: Mesh | None = None,
    order: str | Tensor | None = None,
) -> Graph:
    """A graph whose tensors of nodes and edges are sharded; all ranks give the same one.

    Edges live with their destination, or in their block of the grid. What has neither a row for
    each node nor one for each edge stays as it is, on every rank.

    Args:
        data: ``Data`` or ``HeteroData`` of PyG, or a ``DGLGraph``, on the CPU.
        weights: the share of the work of each rank: numbers above 0, of which only the ratios
            matter; ``"uniform"``, the default: equal shares; ``"auto"``: what fits the devices.
        model: with ``"auto"`` and a graph of PyG, what is going to be trained: copies of it are
            trained on parts of the graph, and the shares are those by which ranks take equally
            long, see :func:`fastgraph.dist.measure_performance`, whose result can be given as well.
            A few epochs of the parts that are found correct it, and other parts are found. Without
            it, and where it is off by more than 12 % on the latter, shares follow scores, from
            cores, clock and bandwidth of memory.
        method: how nodes are partitioned, see :func:`fastgraph.dist.graphs.partition.partition`.
        parts: the rank of each node, int64 ``[num_nodes]``, instead. Where there are several types
            the nodes of all of them, in the order of ``data.node_types`` or ``data.ntypes``.
        mode: how fused operators are computed. ``"halo"``: each rank gets the rows that its nodes
            need of others. ``"heads"``: of attention, each rank computes some of the heads, of all
            nodes and over all edges; every rank then keeps the whole ``edge_index``.
            ``"grid"``: each rank computes with the edges from the nodes of a column of a grid of
            ranks to those of a row, which it then holds. ``"auto"``, the default: what a model
            with measured links finds fastest, for each layer of attention, sums or extrema, if
            there is memory for it; others, and those too small to gain anything, are by halo. The
            first rank prints why.
            What is measured is kept in the cache directory, so that further runs on such devices
            take the same modes, and have the same bits.
        mesh: with ``"grid"``, the numbers of rows and columns of the grid; default: the most square
            one, with no more columns than rows.
        order: of the rows of nodes on each rank: ``"cluster"``, cluster by cluster, of 256 nodes
            each by METIS, so that neighbours are near each other in memory, as in
            :func:`fastgraph.reorder`; or a permutation, int64 ``[num_nodes]``. Programs see the
            order that the graph has, before and after. Default: that order. For ``Data`` alone.

    Returns:
        A copy.

    Raises:
        RuntimeError: :func:`fastgraph.dist.init` was not called.
        TypeError: an argument of another type.
        ValueError: an argument that cannot be used.
        ModuleNotFoundError: a model of performance needs scikit-learn.
        MemoryError: with ``"auto"``, the ranks together have too little memory for the graph.
    """
    if isinstance(weights, str) and weights not in NAMES:
        raise ValueError(
            f"weights must be one of {list(NAMES)} or a number for each rank, got {weights!r}"
        )
    if weights != "auto":
        if model is not None:
            raise ValueError(f"model is for weights='auto', got weights={weights!r}")
        numbers = None if isinstance(weights, str) else weights
        return shard_by_numbers(
            data, weights=numbers, method=method, parts=parts, mode=mode, mesh=mesh, order=order
        )
    if parts is not None:
        raise ValueError("parts says which rank gets which node: weights must not be given, too")
    if not isinstance(model, (nn.Module, Performance, type(None))):
        raise TypeError(
            f"model must be a torch.nn.Module or a Performance, got {type(model).__name__}"
        )
    check_is_graph(data)
    if model is not None and is_dgl_graph(data):
        raise TypeError("model must be None for a DGLGraph: performance is measured with PyG")
    if not WORLD.is_ready:
        raise RuntimeError("call fastgraph.dist.init() before fastgraph.dist.shard()")
    found = devices()
    if model is None:
        shares = within_memory(scores(found), found, data)
        return shard_by_numbers(
            data, weights=shares, method=method, mode=mode, mesh=mesh, order=order
        )
    if method not in METHODS:
        raise ValueError(f"method must be one of {list(METHODS)}, got {method!r}")
    performance = model if isinstance(model, Performance) else measure_performance(model, data)
    return _by_performance(data, performance, found, method, mode, mesh, order)


def _by_performance(
    data: Graph,
    performance: Performance,
    found: list[Device],
    method: str,
    mode: str,
    mesh: Mesh | None,
    order: str | Tensor | None,
) -> Graph:
    mode = checked_mode(mode, mesh)
    check_can_be_sharded(data)
    sizes = num_nodes(data)
    used = _used()

    def best() -> tuple[Tensor, Estimate]:
        return solve(
            joint_edges(data, sizes),
            sum(sizes),
            performance,
            scores(found),
            method=method,
            memory=lambda more: _free(found, used, _bytes_of(data) + more),
        )

    errors = (ValueError, ModuleNotFoundError, PartitionError, MemoryError)
    parts, estimate = on_first_rank(best, errors)
    if WORLD.size > 1:
        if performance.training is None:
            off = on_first_rank(lambda: max(performance.errors.values()), errors)
        else:
            performance.calibrate(data, parts, estimate)
            parts, estimate = on_first_rank(best, errors)
            off = performance.calibrate(data, parts, estimate)  # of which it has seen none
        if off > MOST_ERROR:
            say(
                "shares of the work by the devices: the model of performance is off by "
                f"{off:.0%} on parts that it has not seen, more than {MOST_ERROR:.0%}"
            )
            shares = within_memory(scores(found), found, data)
            return shard_by_numbers(
                data, weights=shares, method=method, mode=mode, mesh=mesh, order=order
            )
    out = shard_by_numbers(data, parts=parts, mode=mode, mesh=mesh, order=order)
    if any(size for size in sizes):
        PREDICTED[Placement.of(out).nodes[0]] = estimate.phases
    return out


def solve(
    edge_index: Tensor,
    num_nodes: int,
    performance: Performance,
    shares: Sequence[float],
    *,
    method: str = "metis",
    memory: Callable[[float], list[float]] | None = None,
) -> tuple[Tensor, Estimate]:
    """The partition for which ranks are predicted to take equally long.

    Partitions by some shares, predicts, corrects the shares, and so on; halos and the lengths of
    rows differ between partitions, so that times do not just follow the shares.

    Args:
        edge_index: int64 ``[2, E]``, of the whole graph.
        num_nodes: how many nodes there are.
        performance: of the ranks.
        shares: to begin with.
        method: see :func:`fastgraph.dist.partition`.
        memory: from the bytes that an epoch needs on all ranks together, the highest share of each;
            default: no limits.

    Returns:
        The rank of each node, int64 ``[num_nodes]``, and what an epoch will take.

    Raises:
        MemoryError: the ranks together have too little memory.
    """
    limits = memory or (lambda more: [1.0] * len(shares))
    shares = capped(shares, limits(0.0))
    best: tuple[Tensor, Estimate] | None = None
    for _ in range(_ROUNDS):
        parts = partition(edge_index, num_nodes, len(shares), weights=shares, method=method)
        estimate = performance.estimate(edge_index, parts)
        highest = limits(sum(estimate.memory))
        fits = all(s <= h * _BALANCED for s, h in zip(shares, highest, strict=True))
        if fits and (best is None or estimate.seconds < best[1].seconds):
            best = parts, estimate
        compute = [one.compute for one in estimate.phases]
        mean = sum(compute) / len(compute)
        if fits and max(compute) <= _BALANCED * mean:
            break
        wanted = [
            max(share * (mean / max(one, 1e-9)) ** _DAMPING, _LEAST)
            for share, one in zip(shares, compute, strict=True)
        ]
        shares = capped([one / sum(wanted) for one in wanted], highest)
    if best is None:
        raise MemoryError(
            "no partition was found whose parts are predicted to fit into the memory of their ranks"
        )
    return best


def capped(shares: Sequence[float], limits: Sequence[float]) -> list[float]:
    """Shares that add up to 1 and are within limits; what one may not have, the others get.

    Raises:
        MemoryError: the limits do not add up to 1.
    """
    if sum(limits) < 1:
        raise MemoryError(
            "the ranks together have too little memory for the graph: they can hold "
            f"{', '.join(f'{limit:.0%}' for limit in limits)} of it"
        )
    found = [min(s, high) for s, high in zip(shares, limits, strict=True)]
    for _ in shares:
        missing = 1 - sum(found)
        free = [s if f < high else 0.0 for s, f, high in zip(shares, found, limits, strict=True)]
        if missing <= 1e-12 or not sum(free):
            break
        found = [
            min(f + missing * one / sum(free), high)
            for f, one, high in zip(found, free, limits, strict=True)
        ]
    return found


def within_memory(shares: Sequence[float], found: Sequence[Device], data: Graph) -> list[float]:
    """Shares of a graph, no more of it than each rank has memory for. All ranks must call it.

    Args:
        shares: of the ranks, which add up to 1.
        found: their devices.
        data: a graph that is not sharded.

    Raises:
        MemoryError: the ranks together have too little memory for the graph.
    """
    return capped(shares, memory_shares(found, _bytes_of(data)))


def memory_shares(found: Sequence[Device], needed: float) -> list[float]:
    """The highest share of something of so many bytes that each rank has memory for.

    All ranks must call it.
    """
    return _free(found, _used(), needed)


def _used() -> list[tuple[int, int]]:
    """Bytes in use and those of the address space, of all ranks."""
    now, _, space = in_use()
    return transport.gather_objects((now, space))


def _free(found: Sequence[Device], used: Sequence[tuple[int, int]], needed: float) -> list[float]:
    """The same, where it is known what each rank uses."""
    shares = []
    for device, (own, space) in zip(found, used, strict=True):
        taken = own
        if device.kind == "cpu":  # ranks on one host share its memory
            pairs = zip(found, used, strict=True)
            taken = sum(u for d, (u, _) in pairs if d.host == device.host)
        free = min(device.limit - space, device.memory - taken)
        shares.append(min(1.0, max(free, 0.0) / max(needed, 1.0)))
    return shares


def _bytes_of(data: AnyGraph) -> float:
    """Bytes of the tensors that are sharded."""
    if is_dgl_graph(data):
        from fastgraph.dist.graphs.dgl.graphs import features

        index = 2 * data.idtype.itemsize * data.num_edges()
        return float(index + sum(x.nbytes for x in features(data)))
    total = 0
    check_can_be_sharded(data)
    for store, size in zip(data.node_stores, num_nodes(data), strict=True):
        total += sum(store[key].nbytes for key in by_row(store, store.is_node_attr, size))
    for edges in data.edge_stores:
        index = edges.get("edge_index")
        if isinstance(index, Tensor):
            names = by_row(edges, edges.is_edge_attr, index.shape[1])
            total += sum(edges[key].nbytes for key in names)
    return float(total)
