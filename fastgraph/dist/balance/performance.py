"""A model of the time of a part of a graph on the device of each rank.

After nuGNN's idea: the model is trained on parts of the user's own graph, and regressors learn from
features of the parts how long that takes. Samples are unions of neighbouring parts of one partition
into many, which ranks share out: so each rank does with its part what it will do with a larger one,
its halo, plans and kernels included.
"""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NotRequired, TypedDict

import torch
from torch import Tensor, nn

from fastgraph.comparison.memory import resident, restart_peak
from fastgraph.dist.balance.balance import Balance, Measurement
from fastgraph.dist.balance.features import describe
from fastgraph.dist.graphs.partition import PartitionError, partition
from fastgraph.dist.graphs.protocols import PygGraph
from fastgraph.dist.graphs.pyg import check_can_be_sharded, joint_edges, num_nodes, shard
from fastgraph.dist.graphs.relayout import Placement
from fastgraph.dist.graphs.usual import Forward, Loss, usual_forward, usual_loss
from fastgraph.dist.ranks import transport
from fastgraph.dist.ranks.agreement import on_first_rank
from fastgraph.dist.ranks.devices import devices, identities, scores
from fastgraph.dist.ranks.own_device import HOST, random_state, set_random_state
from fastgraph.dist.ranks.phases import Phases
from fastgraph.dist.ranks.world import WORLD
from fastgraph.dist.tensor.layout import only_here
from fastgraph.machine import cache
from fastgraph.routing.switch import SWITCH

if TYPE_CHECKING:
    from torch_geometric.data import Data, HeteroData

    from fastgraph.dist.balance.estimators import Chosen

RATIOS = (0.05, 0.1, 0.2, 0.35, 0.5, 0.75)

_FEWEST_RATIOS = 2
"""Each is sampled twice, and regressors are chosen by four samples at least."""

_BLOCKS = 32
_BLOCKS_OF_RANK = 4
_NODES_OF_BLOCK = 4

_SECONDS = 0.4
"""Of a sample at least: several periods of a quota, in the first part of which any rank is fast."""

_MOST_EPOCHS = 50

_KIND = "performance"

Sample = TypedDict(
    "Sample",
    {
        "features": dict[str, float],
        "seconds": float,
        "exchange": float,
        "collectives": float,
        "sent": float,
        "most sent": float,
        "peak": int | None,
        "sample": NotRequired[str],
        "ratio": NotRequired[float],
        "graph": NotRequired[str],
    },
)
"""An epoch of a rank on a part of a graph, as it is kept in the cache.

``features`` are those of the part (:func:`describe`); ``seconds`` and ``exchange`` of computing and
exchanging; ``collectives``, bytes ``sent``, and the ``most sent`` by a rank; the ``peak`` of memory
in bytes, where it is counted; then which ``sample`` it was, its ``ratio``, and of which ``graph``.
"""


@dataclass(frozen=True)
class Estimate:
    """The time and memory that a partition is predicted to take.

    Attributes:
        phases: of each rank, seconds of an epoch.
        memory: bytes that an epoch of each rank needs besides its rows; 0 if nobody counts them.
    """

    phases: list[Phases]
    memory: list[float]

    @property
    def seconds(self) -> float:
        """Of an epoch of the slowest rank, which is that of all."""
        return max(one.total for one in self.phases)


class Performance:
    """A model of the performance of all ranks, from samples; for rank 0, which predicts.

    Attributes:
        samples: of each rank.
        identities: of the ranks' devices; ranks on like devices share their samples.
        training: what was sampled, by which the model can be calibrated; ``None`` if nobody knows.
        factors: of each rank, by which seconds of computing were off where they were measured.
    """

    def __init__(
        self,
        samples: list[list[Sample]],
        identities: list[str],
        training: Training | None = None,
    ) -> None:
        self.samples, self.identities, self.training = samples, identities, training
        self.factors = [1.0] * len(identities)
        self._fitted: _Fitted | None = None

    @property
    def fitted(self) -> _Fitted:
        """The regressors, fitted when they are asked for.

        Raises:
            ModuleNotFoundError: scikit-learn is not installed.
        """
        if self._fitted is None:
            self._fitted = _Fitted(self.samples, self.identities)
        return self._fitted

    def estimate(self, edge_index: Tensor, owner: Tensor) -> Estimate:
        """The predicted cost of an epoch with this partition.

        Args:
            edge_index: int64 ``[2, E]``, of the whole graph.
            owner: int64 ``[n]``, the rank of each node.

        Raises:
            ModuleNotFoundError: scikit-learn is not installed.
        """
        features = [describe(edge_index, owner, rank) for rank in range(len(self.identities))]
        return self.fitted.estimate(features, self.factors)

    def calibrate(self, data: PygGraph, owner: Tensor, estimate: Estimate) -> float:
        """Correct predictions by epochs of each rank on its own part. All ranks must call it.

        Samples are smaller than parts, and are not trained at the time of these. A few epochs of
        the parts tell by how much each rank is off, and predictions for parts like these are
        corrected by that.

        Args:
            data: the whole graph, not sharded, on the CPU.
            owner: int64 ``[n]``, the rank of each node, the same on all ranks.
            estimate: what is predicted for these parts so far.

        Returns:
            The mean absolute percentage error of these predictions, of all ranks, as a fraction.

        Raises:
            ValueError: nobody knows what to train.
        """
        if self.training is None:
            raise ValueError("a Performance without training cannot be calibrated")
        with _same_random_states(), only_here():
            graph = _on_device(shard(data, parts=owner, mode="halo"), self.training)
            placement = Placement.of(graph)
            step, epochs = _warmed_up(self.training, graph, placement)
            with Measurement(placement) as measurement:
                for _ in range(epochs):
                    step()
            measured = measurement.finish(epochs).measured
        pairs = [
            (predicted.compute, real.compute)
            for predicted, real in zip(estimate.phases, measured, strict=True)
        ]
        self.factors = [
            factor * real / predicted if real > 0 and predicted > 0 else factor
            for factor, (predicted, real) in zip(self.factors, pairs, strict=True)
        ]
        off = [abs(predicted - real) / real for predicted, real in pairs if real > 0]
        return sum(off) / max(len(off), 1)

    @property
    def errors(self) -> dict[str, float]:
        """By device, the mean absolute percentage error in cross-validation, as a fraction."""
        return {name: chosen.error for name, chosen in self.fitted.chosen.items()}

    @property
    def regressors(self) -> dict[str, str]:
        """By device, the name of the regressor that was chosen."""
        return {name: chosen.name for name, chosen in self.fitted.chosen.items()}


class _Fitted:
    def __init__(self, samples: list[list[Sample]], identities: list[str]) -> None:
        import numpy as np

        from fastgraph.dist.balance import estimators

        self._identities = identities
        pooled: dict[str, list[Sample]] = {}
        for identity, of_rank in zip(identities, samples, strict=True):
            pooled.setdefault(identity, []).extend(of_rank)
        self.names = list(samples[0][0]["features"])
        self.chosen: dict[str, Chosen] = {}
        for identity, found in pooled.items():
            values = np.array([list(one["features"].values()) for one in found])
            seconds = np.array([one["seconds"] for one in found])
            _, groups = np.unique([one["sample"] for one in found], return_inverse=True)
            self.chosen[identity] = estimators.choose(self.names, values, seconds, groups)
        everything = [one for of_rank in samples for one in of_rank]
        self._bytes = estimators.multiples(
            np.array([_sent_sizes(one["features"]) for one in everything]),
            np.array([one["sent"] for one in everything]),
        )
        self._exchange = estimators.multiples(
            np.array([[one["collectives"], one["most sent"]] for one in everything]),
            np.array([one["exchange"] for one in everything]),
        )
        self._collectives = float(np.median([one["collectives"] for one in everything]))
        counted = [one for one in everything if one["peak"] is not None]
        self._memory = None
        if counted:
            sizes = np.array([_memory_sizes(one["features"]) for one in counted])
            peaks = np.array([one["peak"] for one in counted])
            self._memory = estimators.multiples(sizes, peaks)

    @property
    def latency(self) -> float:
        """Seconds of a collective that sends nothing."""
        return float(self._exchange[0])

    @property
    def seconds_per_byte(self) -> float:
        """One over the bandwidth between ranks."""
        return float(self._exchange[1])

    def estimate(self, features: Sequence[dict[str, float]], factors: Sequence[float]) -> Estimate:
        import numpy as np

        compute = [
            factor * float(self.chosen[identity].predict(np.array([list(one.values())]))[0])
            for identity, one, factor in zip(self._identities, features, factors, strict=True)
        ]
        sent = max(float(np.dot(_sent_sizes(one), self._bytes)) for one in features)
        exchange = self._collectives * self.latency + sent * self.seconds_per_byte
        phases = [Phases(one, exchange, max(compute) - one) for one in compute]
        memory = [0.0] * len(features)
        if self._memory is not None:
            memory = [float(np.dot(_memory_sizes(one), self._memory)) for one in features]
        return Estimate(phases, memory)


def _sent_sizes(features: dict[str, float]) -> list[float]:
    """Rows that are given forward, and gradients that go back; what is sent anyway."""
    return [1.0, features["given"], features["halo"]]


def _memory_sizes(features: dict[str, float]) -> list[float]:
    return [1.0, features["rows"], features["halo"], features["entries"]]


def measure_performance(
    model: nn.Module,
    data: Data | HeteroData,
    *,
    forward: Forward | None = None,
    loss: Loss | None = None,
    ratios: Sequence[float] = RATIOS,
    reuse: bool = True,
) -> Performance:
    """Learn how long a model takes on each rank, by training copies on parts of a graph.

    All ranks must call it. What is measured is kept in the cache directory, for each device and
    model, and is used again for the same graph. It takes some twenty epochs of the whole graph.

    Args:
        model: which is not changed. Copies of it are trained on the device of its parameters.
        data: the whole graph, not sharded, on the CPU.
        forward: see :func:`fastgraph.dist.validate`.
        loss: see :func:`fastgraph.dist.validate`.
        ratios: how much of the graph is sampled, above 0 and at most 1; each twice, shared out
            among ranks equally, and by the scores of their devices.
        reuse: whether what was measured before is used.

    Raises:
        RuntimeError: :func:`fastgraph.dist.init` was not called.
        TypeError: ``model`` or ``data`` is of another type.
        ValueError: an argument that cannot be used, or a graph too small to be sampled.
        ModuleNotFoundError: scikit-learn or ``pymetis`` is not installed.
    """
    from torch_geometric.data import Data, HeteroData

    if not WORLD.is_ready:
        raise RuntimeError("call fastgraph.dist.init() before measuring performance")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(data, (Data, HeteroData)):
        raise TypeError(f"data must be a Data or HeteroData of PyG, got {type(data).__name__}")
    if not ratios or not all(0 < ratio <= 1 for ratio in ratios):
        raise ValueError(f"ratios must be above 0 and at most 1, got {list(ratios)}")
    if len(ratios) < _FEWEST_RATIOS:
        raise ValueError(f"ratios must be at least {_FEWEST_RATIOS}, got {list(ratios)}")
    check_can_be_sharded(data)
    on_first_rank(_needs_scikit_learn, (ModuleNotFoundError,))
    training = Training(model, forward or usual_forward, loss or usual_loss)
    found = devices()
    names = identities(found)
    sizes = num_nodes(data)
    edges = joint_edges(data, sizes)
    # Of ranks on like devices, each has a file of its own.
    number = names[: WORLD.rank].count(names[WORLD.rank])
    identity = f"{_signature(model, data, forward, loss)} on {names[WORLD.rank]}, {number}"
    graph = _graph_signature(edges, sum(sizes))
    before: list[Sample] = (cache.read(_KIND, identity) or []) if reuse else []
    wanted = len(ratios) * 2
    has_all = sum(one.get("graph") == graph for one in before) >= wanted
    if not transport.agree(has_all):
        before = [one for one in before if one.get("graph") != graph]
        sampler = _Sampler(data, sizes, edges, scores(found))
        before += sampler.samples(training, ratios, graph)
        cache.write(_KIND, identity, before)
    # What belongs to one sample has one name on all ranks.
    own = copy.deepcopy(before)
    for one in own:
        one["sample"] = f"{one['graph']} {one['sample']}"
    return Performance(transport.gather_objects(own), names, training)


def _needs_scikit_learn() -> None:
    from fastgraph.dist.balance import estimators  # noqa: F401


def _signature(model: nn.Module, data: PygGraph, forward: Forward | None, loss: Loss | None) -> str:
    """A text that names what the time of a model depends on besides graph and device."""
    shapes = [(name, tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters()]
    widths = [
        (str(store._key), key, tuple(value.shape[1:]), str(value.dtype))
        for store in data.stores
        for key, value in store.items()
        if isinstance(value, Tensor) and key != "edge_index"
    ]
    functions = [getattr(f, "__qualname__", str(type(f))) for f in (forward, loss)]
    is_routed = SWITCH.active
    return f"{model!r} {shapes} {widths} {functions} fused {is_routed} torch {torch.__version__}"


def _graph_signature(edges: Tensor, n: int) -> str:
    content = hashlib.sha256(edges.contiguous().numpy().tobytes()).hexdigest()[:16]
    return f"{n} {edges.shape[1]} {content}"


@dataclass(frozen=True)
class Training:
    """Epochs of a copy of a model.

    Attributes:
        model: which is not changed.
        forward: see :func:`fastgraph.dist.validate`.
        loss: likewise.
    """

    model: nn.Module
    forward: Forward
    loss: Loss

    @property
    def device(self) -> torch.device:
        """That of the model's parameters."""
        return next((p.device for p in self.model.parameters()), HOST)

    def steps(self, data: PygGraph) -> Callable[[], None]:
        """A function that trains for one epoch."""
        model = copy.deepcopy(self.model).train()

        def step() -> None:
            model.zero_grad()
            self.loss(self.forward(model, data), data).backward()

        return step


class _Sampler:
    """Samples of a graph: ranges of the parts of a partition into many, which are neighbours."""

    def __init__(
        self, data: PygGraph, sizes: list[int], edges: Tensor, by_score: list[float]
    ) -> None:
        self._data, self._sizes, self._edges, self._by_score = data, sizes, edges, by_score
        self._num_blocks = max(_BLOCKS, _BLOCKS_OF_RANK * WORLD.size)
        if sum(sizes) < _NODES_OF_BLOCK * self._num_blocks:
            fewest = _NODES_OF_BLOCK * self._num_blocks
            raise ValueError(
                f"data must have at least {fewest} nodes to be sampled, got {sum(sizes)}"
            )
        errors = (ValueError, ModuleNotFoundError, PartitionError)
        make = lambda: partition(edges, sum(sizes), self._num_blocks)  # noqa: E731
        self._block = on_first_rank(make, errors)

    def samples(self, train: Training, ratios: Sequence[float], graph: str) -> list[Sample]:
        """The samples that this rank has measured, of a graph with this name."""
        draw = random.Random(0)  # the same on all ranks, and no number of the program's
        equal = [1 / WORLD.size] * WORLD.size
        found: list[Sample] = []
        for ratio in ratios:
            for shares in (equal, self._by_score):
                count = max(WORLD.size, round(ratio * self._num_blocks))
                first = draw.randint(0, self._num_blocks - count)
                rank_of = _shared_out(count, shares)
                with _same_random_states(), only_here():
                    one = self._measured(train, first, rank_of)
                one["sample"], one["ratio"], one["graph"] = f"{len(found)}", ratio, graph
                found.append(one)
        return found

    def _measured(self, train: Training, first: int, rank_of: list[int]) -> Sample:
        inside = (self._block >= first) & (self._block < first + len(rank_of))
        owner = torch.tensor(rank_of, device=HOST)[self._block[inside] - first]
        edges = self._edges[:, inside[self._edges].all(0)]
        edges = (inside.cumsum(0) - 1)[edges]
        # Features of parts are those of halos, by which their performance is to be explained.
        part = _subgraph(self._data, inside, self._sizes)
        graph = _on_device(shard(part, parts=owner, mode="halo"), train)
        placement = Placement.of(graph)
        step, epochs = _warmed_up(train, graph, placement)
        counts_peak = train.device == HOST and restart_peak()
        before = resident()
        with Measurement(placement) as measurement:
            for _ in range(epochs):
                step()
        balance: Balance = measurement.finish(epochs)
        peak = resident("VmHWM")
        own = balance.measured[WORLD.rank]
        return {
            "features": describe(edges, owner, WORLD.rank),
            "seconds": own.compute,
            "exchange": own.exchange,
            "collectives": balance.collectives,
            "sent": balance.sent[WORLD.rank],
            "most sent": max(balance.sent),
            "peak": max(peak - before, 0) if counts_peak and peak and before else None,
        }


@contextmanager
def _same_random_states() -> Iterator[None]:
    """Have a program draw afterwards what it would have drawn."""
    state, of_device = torch.get_rng_state(), random_state(WORLD.device)
    try:
        yield
    finally:
        torch.set_rng_state(state)
        if of_device is not None:
            set_random_state(WORLD.device, of_device)


def _on_device(graph: Data | HeteroData, train: Training) -> Data | HeteroData:
    return graph if train.device == HOST else graph.to(train.device)


def _warmed_up(
    train: Training, graph: PygGraph, placement: Placement
) -> tuple[Callable[[], None], int]:
    """A function that trains for an epoch, when all is planned, and how often to time it."""
    step = train.steps(graph)
    step()  # plans, sorted graphs
    with Measurement(placement) as warm:
        step()
    seconds = max(one.total for one in warm.finish(1).measured)
    return step, max(2, min(_MOST_EPOCHS, round(_SECONDS / max(seconds, 1e-6))))


def _shared_out(count: int, shares: Sequence[float]) -> list[int]:
    """The rank of each of ``count`` neighbouring blocks; each rank gets at least one."""
    free = count - len(shares)
    ends, total = [], 0.0
    for position, share in enumerate(shares):
        total += share
        ends.append(position + 1 + round(free * total))
    ranks: list[int] = []
    for rank, end in enumerate(ends):
        ranks += [rank] * (end - len(ranks))
    return ranks


def _subgraph(data: PygGraph, inside: Tensor, sizes: list[int]) -> PygGraph:
    masks = inside.split(sizes)
    if len(data.node_stores) == 1 and data.node_stores[0]._key is None:
        return data.subgraph(masks[0])
    types = [store._key or "" for store in data.node_stores]  # as HeteroData has them
    return data.subgraph(dict(zip(types, masks, strict=True)))
