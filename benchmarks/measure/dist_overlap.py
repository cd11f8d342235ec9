"""Training steps whose halo travels before operators compute, and while they do."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import fastgraph
import fastgraph.dist as fgd
from fastgraph.dist.operators.halo import exchange as overlap
from fastgraph.dist.ranks import transport
from measure.dist_steps import Training, features, turns_within
from measure.report import Floor, floor_lines, machine_lines, table
from measure.timing import Spread, no_garbage_collection

_GAIN = 1.2

_LEAST_BYTES = {"before": 1 << 62, "meanwhile": overlap.LEAST_BYTES}
"""From which on the halo travels meanwhile."""


def measure(
    graph: str, layers: Sequence[str], channels: int, rounds: tuple[int, int], budget: float
) -> dict[str, Any]:
    """Steps of both kinds in turns; arguments as for :func:`measure.dist_steps.measure_ranks`.

    Returns:
        By kind of layers: the times and phases, the losses of the first steps, and bytes sent.
    """
    fastgraph.enable()
    data = fgd.shard(features(graph, channels), mode="halo")
    return {layer: _of_layer(layer, data, channels, rounds, budget) for layer in layers}


def _of_layer(
    layer: str, data: Any, channels: int, rounds: tuple[int, int], budget: float
) -> dict[str, Any]:
    trainings = {when: Training(layer, data, channels) for when in _LEAST_BYTES}
    seconds: dict[str, list[float]] = {when: [] for when in trainings}
    found: dict[str, Any] = {when: {} for when in trainings}
    for when, training in trainings.items():
        overlap.LEAST_BYTES = _LEAST_BYTES[when]
        found[when]["loss"] = training.step()
        fgd.COUNTS.reset()
        started = time.perf_counter()
        training.step()
        estimate = time.perf_counter() - started
        found[when]["sent"] = fgd.COUNTS.sent["all_to_all"]
        found[when]["halo"] = dict(fgd.COUNTS.halo)
    with no_garbage_collection():
        for _ in range(turns_within(budget, 2 * estimate, rounds)):
            for when, training in trainings.items():
                overlap.LEAST_BYTES = _LEAST_BYTES[when]
                transport.barrier()
                started = time.perf_counter()
                training.step()
                seconds[when].append(time.perf_counter() - started)
    for when, training in trainings.items():
        overlap.LEAST_BYTES = _LEAST_BYTES[when]
        with fgd.measured(data, epochs=rounds[0]) as balance:
            for _ in range(rounds[0]):
                training.step()
        found[when]["phases"] = [asdict(phases) for phases in balance.measured]
        found[when]["step"] = Spread.of(seconds[when]).to_json()
    return found


def gain(cell: dict[str, Any]) -> float:
    """Steps in which the halo travels meanwhile, in the time of one in which it does before."""
    first = cell["ranks"][0]
    return float(first["before"]["step"]["median"] / first["meanwhile"]["step"]["median"])


def floors(results: dict[str, Any]) -> list[Floor]:
    """The floors: a gain on some case, and that nothing else is sent."""
    gains = {name: gain(cell) for name, cell in results["cells"].items()}
    best = max(gains, key=gains.__getitem__)
    measured = f"{gains[best]:.2f}x ({best})"
    off = max(
        abs(rank["before"]["sent"] - rank["meanwhile"]["sent"])
        for cell in results["cells"].values()
        for rank in cell["ranks"]
    )
    return [
        Floor("the best gain", f">= {_GAIN:g}x", measured, gains[best] >= _GAIN),
        Floor("bytes sent, off those of before", "0", f"{off}", off == 0),
    ]


def markdown(results: dict[str, Any], listed: list[Floor]) -> str:
    """The table, and how it was measured."""
    rows = []
    for name, cell in results["cells"].items():
        first = cell["ranks"][0]
        before, meanwhile = first["before"], first["meanwhile"]
        rows.append(
            [
                name,
                f"{before['step']['median']:.1f}",
                f"{meanwhile['step']['median']:.1f}",
                f"{gain(cell):.2f}x",
                _phases(before),
                _phases(meanwhile),
                ", ".join(meanwhile["halo"]),
                f"{sum(rank['meanwhile']['sent'] for rank in cell['ranks']):,}",
            ]
        )
    head = ["cell", "before", "meanwhile", "gain", "before: phases", "meanwhile: phases"]
    head += ["computed meanwhile", "bytes sent"]
    lines = [
        "# Training while the halo travels, over links of a limited bandwidth",
        "",
        f"`{results['command']}`",
        "",
        f"Milliseconds of a training step, medians, {results['layers']} layers of "
        f"{results['channels']} channels, {results['ranks']} ranks",
        "of one thread in network namespaces, whose links are limited by `tc tbf` in both",
        "directions. Before: the halo is exchanged, then an operator computes. Meanwhile: it",
        "computes what needs none of it. Both take turns. Phases are those of the first rank:",
        "computing, exchange and waiting; what is computed meanwhile is computing. Bytes are those",
        "of rows of nodes that all ranks send in a step.",
        "",
        *table(head, rows),
        "",
        *floor_lines(listed),
        "",
        *machine_lines(results["machine"]),
    ]
    return "\n".join(lines)


def _phases(of_rank: dict[str, Any]) -> str:
    phases = of_rank["phases"][0]
    return " + ".join(f"{1e3 * phases[name]:.0f}" for name in ("compute", "exchange", "wait"))
