"""Predictions of the planner for ranks on limited links, beside measured steps.

    PYTHONPATH=. python benchmarks/dist_plan.py [--quick]

Steps are measured with links of each bandwidth, in network namespaces, which takes root. For the
largest number of ranks they are also predicted, from what fewer ranks were measured to do. Results
go to ``benchmarks/results/<date>-dist-plan.json`` and ``.md``.
"""

from __future__ import annotations

import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import track

from measure.output import RESULTS, publish

_WITHIN = 1.15  # of the best mode


@click.command(help=__doc__.split("\n\n")[0])
@click.option(
    "--graphs",
    default="random-4000,communities-4000,mesh-64",
    show_default=True,
    help="Separated by commas; random-N, communities-N, mesh-SIDE, or the name of a real graph.",
)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
@click.option("--ranks", default="2,4,8", show_default=True, help="Separated by commas.")
@click.option(
    "--megabits", default="200,1000", show_default=True, help="Of a link, separated by commas."
)
@click.option("--channels", type=click.IntRange(8), default=64, show_default=True)
@click.option("--quick", is_flag=True, help="Fewer repetitions.")
def main(graphs: str, out: Path, ranks: str, megabits: str, channels: int, quick: bool) -> None:
    from fastgraph.dist.ranks.spawning import run_on_ranks
    from measure.dist_plan_steps import measure
    from measure.dist_transformer_steps import HEADS, NUM_LAYERS
    from measure.machine import machine_facts
    from measure.network import network

    console = Console(stderr=True)
    sizes = sorted(int(size) for size in ranks.split(","))
    if len(sizes) < 3:
        raise click.UsageError(f"--ranks must be three numbers or more, got {ranks}")
    results: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/dist_plan.py", *sys.argv[1:]]),
        "machine": machine_facts(1),
        "channels": channels,
        "layers": NUM_LAYERS,
        "heads": HEADS,
        "links": {},
    }
    for rate in track([float(rate) for rate in megabits.split(",")], "links", console=console):
        of_sizes = {}
        for size in sizes:
            with network(size, rate) as links:
                given = graphs.split(","), channels, 3 if quick else 5
                found = run_on_ranks(measure, size, *given, timeout=600, prefixes=links.prefixes)
            of_sizes[size] = found[0]
        results["links"][f"{rate:g}"] = _with_predictions(of_sizes, channels)
    title = "dist-plan-quick" if quick else "dist-plan"
    publish(console, out, title, results, markdown(results))


def _with_predictions(of_sizes: dict[int, dict[str, Any]], channels: int) -> dict[str, Any]:
    """Measurements of all numbers of ranks over links of one bandwidth, and what was predicted.

    What layers do not explain of the steps of fewer ranks, on the mean of the modes, goes on
    linearly, as what they do.
    """
    from fastgraph.dist.operators import cost
    from measure.dist_plan_steps import check_losses, layers

    *fewer, largest = of_sizes
    machines = {size: found["machine"] for size, found in of_sizes.items()}
    beforehand = cost.extrapolated_cluster({size: machines[size] for size in fewer}, largest)
    cells: dict[str, Any] = {}
    for graph, kind in of_sizes[largest]["cells"]:
        modelled: dict[int, dict[str, float]] = {}
        measured: dict[int, dict[str, float]] = {}
        for size, found in of_sizes.items():
            spreads = found["cells"][graph, kind]
            check_losses({mode: spread["loss"] for mode, spread in spreads.items()})
            measured[size] = {mode: of["spread"]["median"] / 1e3 for mode, of in spreads.items()}
            modelled[size] = {
                mode: _seconds(layers(kind, channels), mode, found["rows"][graph], machines[size])
                for mode in spreads
            }
        rest = {
            size: statistics.fmean(
                measured[size][mode] - modelled[size][mode] for mode in measured[size]
            )
            for size in fewer
        }
        predicted = {
            mode: cost.line(rest, largest)
            + _seconds(layers(kind, channels), mode, of_sizes[largest]["rows"][graph], beforehand)
            for mode in measured[largest]
        }
        cells[f"{graph}, {kind}"] = {
            "ranks": {
                size: {
                    "measured": measured[size],
                    "modelled layers": modelled[size],
                    "chosen": cost.fastest(modelled[size]),
                    "spreads": of_sizes[size]["cells"][graph, kind],
                }
                for size in of_sizes
            },
            "predicted": predicted,
            "chosen beforehand": cost.fastest(predicted),
        }
    return {
        "machines": {size: machine._asdict() for size, machine in machines.items()},
        "extrapolated": beforehand._asdict(),
        "cells": cells,
    }


def _seconds(layers: Any, mode: str, rows: Any, machine: Any) -> float:
    """Of all layers in one mode."""
    from fastgraph.dist.operators.modes import BY_NAME

    return sum(layer.seconds(BY_NAME[mode].cost(layer, rows, machine), machine) for layer in layers)


def markdown(results: dict[str, Any]) -> str:
    """The whole report."""
    from measure.report import machine_lines, milliseconds, table

    rows, predictions, errors, losses = [], [], [], []
    wins: dict[str, int] = {}
    for rate, link in results["links"].items():
        for name, cell in link["cells"].items():
            for size, at in cell["ranks"].items():
                times = at["measured"]
                best = min(times, key=times.__getitem__)
                wins[best] = wins.get(best, 0) + 1
                loss = times[at["chosen"]] / times[best]
                losses.append(loss)
                rows.append(
                    [
                        rate,
                        name,
                        str(size),
                        *(milliseconds(times.get(mode)) for mode in ("halo", "heads", "grid")),
                        best,
                        at["chosen"] + ("" if loss <= _WITHIN else " (!)"),
                        f"{loss:.2f}x",
                    ]
                )
            largest = max(cell["ranks"], key=int)
            times = cell["ranks"][largest]["measured"]
            best = min(times, key=times.__getitem__)
            for mode, seconds in cell["predicted"].items():
                errors.append(abs(seconds / times[mode] - 1))
                predictions.append(
                    [
                        rate,
                        name,
                        mode,
                        milliseconds(seconds),
                        milliseconds(times[mode]),
                        f"{100 * (seconds / times[mode] - 1):+.0f} %",
                        cell["chosen beforehand"] if mode == best else "",
                    ]
                )
    within = sum(loss <= _WITHIN for loss in losses)
    won = ", ".join(f"{mode} {count}" for mode, count in wins.items())
    return "\n".join(
        [
            "# What the planner predicts, beside measured steps",
            "",
            f"`{results['command']}`",
            "",
            f"Milliseconds of a training step, medians, {results['layers']} layers with "
            f"{results['channels']} channels: `TransformerConv` with {results['heads']} heads, or",
            "`GCNConv`. Ranks of one thread with gloo, each in a network namespace whose link has",
            "the bandwidth in Mbit/s; all of them share the cores of this machine. The mode is",
            "chosen by the links and work that these ranks measure.",
            "",
            f"The mode that is chosen is within 15 % of the best in {within} of {len(losses)} "
            f"cells, at worst {max(losses):.2f} times as slow. Best modes: {won}.",
            "",
            *table(
                ["Mbit/s", "model", "ranks", "halo", "heads", "grid", "best", "chosen", "of best"],
                rows,
            ),
            "",
            "## The largest number of ranks, from fewer",
            "",
            "Links, work and all else that a step takes are extrapolated along a line from fewer",
            "ranks. Nothing of what the largest number was measured to do is used, only how the",
            "graph is shared out. The last column has, beside the best mode, the one that would",
            "have been chosen.",
            "",
            f"Errors: median {100 * statistics.median(errors):.0f} %, "
            f"at most {100 * max(errors):.0f} %.",
            "",
            *table(
                ["Mbit/s", "model", "mode", "predicted", "measured", "error", "chosen"],
                predictions,
            ),
            "",
            "## What ranks were measured to do",
            "",
            *table(
                ["Mbit/s", "ranks", "us of a message", "MB/s", "ns of work", "of a sum"],
                [
                    [rate, str(size), *_facts(machine)]
                    for rate, link in results["links"].items()
                    for size, machine in [
                        *link["machines"].items(),
                        ("extrapolated", link["extrapolated"]),
                    ]
                ],
            ),
            "",
            *machine_lines(results["machine"]),
        ]
    )


def _facts(machine: dict[str, float]) -> list[str]:
    return [
        f"{1e6 * machine['latency']:.0f}",
        f"{machine['bandwidth'] / 1e6:.1f}",
        f"{1e9 * machine['work']:.2f}",
        f"{1e9 * machine['sums']:.2f}",
    ]


if __name__ == "__main__":
    main()
