"""Training on two ranks, one of which has a share of a core."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import fastgraph
import fastgraph.dist as fgd
from fastgraph.dist.balance import balance
from fastgraph.dist.balance.performance import Sample
from fastgraph.dist.graphs.pyg import joint_edges
from fastgraph.dist.graphs.relayout import Placement
from fastgraph.dist.ranks import devices as facts
from fastgraph.dist.ranks import phases, transport
from fastgraph.dist.ranks.devices import devices, scores
from fastgraph.dist.ranks.world import WORLD
from measure.dist_steps import Model, Training, features
from measure.quota import limit_this_process
from measure.timing import Spread, no_garbage_collection

SLOW = 1
"""The rank with the quota."""

STEPS = 5
"""Whose losses are compared."""

_TURN_SECONDS = 1.0
"""Ten periods of the quota."""


PROCESSOR = "processor"
"""In place of a kind of quota: nobody is slowed down, and time is that of the processor."""


def go_by_processor_time(share: float) -> None:
    """Have this rank be measured by the time of its thread, as if it had a share of a core.

    So what else goes on on the machine is not measured, but for what it does to caches.
    """
    clock = SimpleNamespace(perf_counter=lambda: time.thread_time() / share)
    for module in (phases, balance):
        module.time = clock  # type: ignore[assignment]
    facts.cpu_quota = lambda: share


class Candidate:
    """A training with some shares, whose steps are timed in turns with those of others.

    Args:
        name: of the shares.
        training: with them.
    """

    def __init__(self, name: str, training: Training) -> None:
        self.name, self.training = name, training
        self.seconds: list[float] = []
        self.losses = [training.step() for _ in range(STEPS)]
        self.steps = 1
        self.steps = max(1, round(_TURN_SECONDS / self.turn()))

    def turn(self) -> float:
        """Seconds of a step of the slowest rank."""
        transport.barrier()
        started = time.perf_counter()
        for _ in range(self.steps):
            self.training.step()
        seconds = (time.perf_counter() - started) / self.steps
        return max(transport.gather_objects(seconds))

    def to_json(self) -> dict[str, Any]:
        placement = Placement.of(self.training.data)
        nodes, edges = placement.counts()
        return {
            "name": self.name,
            "share": (nodes[0] + edges[0]) / (sum(nodes) + sum(edges)),
            "spread": Spread.of(self.seconds).to_json(),
            "losses": self.losses,
        }


def measure_uneven(
    quota: tuple[str, str],
    graph: str,
    layer: str,
    channels: int,
    rounds: int,
    searched: Sequence[float],
) -> dict[str, Any]:
    """All shares on one graph; the same on all ranks."""
    if WORLD.rank == SLOW:
        limit_this_process(quota)
    fastgraph.enable()
    data = features(graph, channels)
    before = time.perf_counter()
    performance = fgd.measure_performance(Model(layer, channels), data, reuse=False)
    learning = time.perf_counter() - before
    # Before others have the same layout, as their rows would be moved along.
    rebalanced, before_that = _rebalanced(data, layer, channels)
    candidates = [rebalanced, Candidate("uniform", _training(data, layer, channels, "uniform"))]
    started = time.perf_counter()
    sharded = fgd.shard(data, weights="auto", model=performance, mode="halo")
    sharding = time.perf_counter() - started
    candidates.append(Candidate("auto", Training(layer, sharded, channels)))
    predicted = _predicted(sharded)
    by_scores = fgd.shard(data, weights="auto", mode="halo")
    candidates.append(Candidate("auto by scores", Training(layer, by_scores, channels)))
    for share in searched:
        training = _training(data, layer, channels, [share, 1 - share])
        candidates.append(Candidate(f"{share:.1%}", training))
    with no_garbage_collection():
        for _ in range(rounds):
            for candidate in candidates:
                candidate.seconds.append(candidate.turn())
    return {
        "learning": learning,
        "sharding": sharding,
        "devices": [asdict(device) for device in devices()],
        "candidates": [candidate.to_json() for candidate in candidates],
        "rebalanced from": [asdict(one) for one in before_that.measured],
        "imbalance before": before_that.imbalance,
        "predicted": predicted,
        "measured": _phases(candidates[2].training),
        "cross-validation": performance.errors if WORLD.rank == 0 else None,
        "regressors": performance.regressors if WORLD.rank == 0 else None,
    }


def _training(data: Any, layer: str, channels: int, weights: Any) -> Training:
    return Training(layer, fgd.shard(data, weights=weights, mode="halo"), channels)


def _rebalanced(data: Any, layer: str, channels: int) -> tuple[Candidate, fgd.Balance]:
    """A training that begins with equal shares, is measured, and goes on with others."""
    training = _training(data, layer, channels, "uniform")
    losses = [training.step() for _ in range(2)]
    with fgd.measured(training.data, epochs=STEPS - 2) as found:
        losses += [training.step() for _ in range(STEPS - 2)]
    fgd.rebalance(training.data, found)
    candidate = Candidate("uniform, rebalanced", training)
    candidate.losses = losses  # those from the start, as of the others
    return candidate, found


def _predicted(data: Any) -> Any:
    """The prediction of the model of performance for a graph that was sharded by it."""
    with fgd.measured(data) as found:
        pass
    return [asdict(one) for one in found.predicted or []]


def _phases(training: Training, epochs: int = 5) -> Any:
    with fgd.measured(training.data, epochs=epochs) as found:
        for _ in range(epochs):
            training.step()
    return [asdict(one) for one in found.measured]


def measure_unseen(
    quota: tuple[str, str], graphs: Sequence[str], layer: str, channels: int
) -> dict[str, Any]:
    """Predictions for whole graphs, by samples of other graphs alone and by their own.

    Returns:
        By graph the errors of the seconds of computing, as fractions of those measured, of both
        ranks with equal shares and with those of the scores; "calibrated" are those with shares by
        the scores, of models that what was measured with equal shares has corrected.
    """
    if quota[0] == PROCESSOR:
        go_by_processor_time(float(quota[1]) if WORLD.rank == SLOW else 1.0)
    elif WORLD.rank == SLOW:
        limit_this_process(quota)
    fastgraph.enable()
    found: dict[str, list[list[Sample]]] = {}
    names: list[str] = []
    for graph in graphs:
        data = features(graph, channels)
        performance = fgd.measure_performance(Model(layer, channels), data, reuse=False)
        names = performance.identities
        last = performance.samples[0][-1]["graph"]
        found[graph] = [
            [one for one in of_rank if one["graph"] == last] for of_rank in performance.samples
        ]
    errors = {}
    for graph in graphs:
        others = [
            [one for other in graphs if other != graph for one in found[other][rank]]
            for rank in range(WORLD.size)
        ]
        models = {
            "unseen": fgd.Performance(others, names),
            "own": fgd.Performance(found[graph], names),
        }
        errors[graph] = _errors(features(graph, channels), models, layer, channels)
    return errors


def _errors(
    data: Any, models: dict[str, fgd.Performance], layer: str, channels: int
) -> dict[str, list[float]]:
    edges = joint_edges(data, [data.num_nodes])
    errors: dict[str, list[float]] = {name: [] for name in models}
    errors |= {f"{name}, calibrated": [] for name in models}
    equal, by_scores = [1 / WORLD.size] * WORLD.size, scores(devices())
    for weights in (equal, by_scores):
        parts = fgd.partition(edges, data.num_nodes, WORLD.size, weights=weights)
        parts = transport.broadcast(parts)
        training = Training(layer, fgd.shard(data, parts=parts, mode="halo"), channels)
        training.step()
        training.step()
        measured = _phases(training)
        if WORLD.rank == 0:
            for name, model in models.items():
                found = model.estimate(edges, parts).phases
                pairs = [(p.compute, r["compute"]) for p, r in zip(found, measured, strict=True)]
                if weights is by_scores:  # as the first parts have corrected it
                    errors[f"{name}, calibrated"] += [abs(p - real) / real for p, real in pairs]
                    of_model = [
                        p / factor for (p, _), factor in zip(pairs, model.factors, strict=True)
                    ]
                    pairs = [(p, real) for p, (_, real) in zip(of_model, pairs, strict=True)]
                errors[name] += [abs(p - real) / real for p, real in pairs]
                model.factors = [real / p for p, real in pairs]
    return errors
