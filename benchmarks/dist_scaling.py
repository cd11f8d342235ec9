"""Weak and strong scaling of training steps: measured to some ranks, modelled beyond.

    PYTHONPATH=. python benchmarks/dist_scaling.py --record FILE [--ranks 8,4,2,1]

Each rank has the same share of a core, by a quota, and a link of limited bandwidth in a network
namespace of its own, which takes root: ranks are slow machines that are alike, however many there
are. What is modelled is what ``python -m fastgraph dist-plan`` would say, with links and work as
the largest number of ranks measures them, and what else a step takes as on one rank. With
``--record`` several runs make one: numbers of ranks that the file has are not measured again.
Results go to ``benchmarks/results/<date>-dist-scaling.json`` and ``.md``, the picture to
``docs/images``.
"""

from __future__ import annotations

import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from measure.output import RESULTS, Record, publish

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "scaling.svg"

_GRAPHS = ("communities", "random")


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--nodes", type=click.IntRange(64), default=32000, show_default=True, help="Strong.")
@click.option("--ranks", default="8,4,2,1", show_default=True, help="Separated by commas.")
@click.option("--beyond", default="16,32,64", show_default=True, help="Modelled only.")
@click.option("--share", type=float, default=0.22, show_default=True, help="Of a core, a rank's.")
@click.option("--period", type=click.IntRange(1000), default=5000, show_default=True, help="us.")
@click.option("--megabits", type=float, default=1000.0, show_default=True, help="Of a link.")
@click.option("--channels", type=click.IntRange(8), default=64, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--record", type=click.Path(path_type=Path, dir_okay=False), help="To go on with.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
@click.option("--picture", type=click.Path(path_type=Path, dir_okay=False), default=PICTURE)
def main(
    nodes: int,
    ranks: str,
    beyond: str,
    share: float,
    period: int,
    megabits: float,
    channels: int,
    rounds: int,
    record: Path | None,
    out: Path,
    picture: Path,
) -> None:
    from measure.dist_transformer_steps import HEADS, NUM_LAYERS
    from measure.machine import machine_facts
    from measure.scaling_picture import draw

    console = Console(stderr=True)
    sizes = sorted((int(size) for size in ranks.split(",")), reverse=True)
    done = Record(record) if record else Record.fresh(out, "dist-scaling")
    done.mend()
    known = {of["ranks"] for of in done.lines("measured")}
    for size in sizes:
        if size not in known:
            names = graphs_of(nodes, size, max(sizes))
            found = measured(size, names, share, period, megabits, channels, rounds)
            done.add("measured", found)
            console.print(f"{size} ranks: {found}")
    if not any(of["ranks"] == 1 for of in done.lines("measured")):
        console.print(f"{done.path}: one rank is not among them, of which models start")
        return
    results: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/dist_scaling.py", *sys.argv[1:]]),
        "machine": machine_facts(1),
        "nodes": nodes,
        "share": share,
        "period": period,
        "megabits": megabits,
        "channels": channels,
        "layers": NUM_LAYERS,
        "heads": HEADS,
        "measured": {of["ranks"]: of for of in done.lines("measured")},
    }
    numbers = sorted({*sizes, *(int(size) for size in beyond.split(",") if size)})
    results["curves"] = curves(results["measured"], nodes, numbers, channels)
    publish(console, out, "dist-scaling", results, markdown(results))
    draw(results["curves"], described(results), picture)
    if record is None:
        done.path.unlink()


def graphs_of(nodes: int, ranks: int, most: int) -> list[str]:
    """Those of strong scaling, with all nodes, and of weak scaling, with a share for each rank."""
    sizes = dict.fromkeys((nodes, nodes * ranks // most))
    return [f"{kind}-{size}" for size in sizes for kind in _GRAPHS]


def measured(
    ranks: int,
    graphs: list[str],
    share: float,
    period: int,
    megabits: float,
    channels: int,
    rounds: int,
) -> dict[str, Any]:
    """Seconds of steps by graph, kind of model and mode; and what ranks and links can do."""
    from fastgraph.dist.ranks.spawning import run_on_ranks
    from measure.dist_plan_steps import check_losses
    from measure.dist_scaling_steps import measure
    from measure.network import network
    from measure.quota import kept_open, quotas_of

    with network(ranks, megabits) as links, quotas_of(share, ranks, period) as quotas:
        opened, seen = zip(*map(kept_open, quotas), strict=True)
        prefixes = [[*first, *then] for first, then in zip(opened, links.prefixes, strict=True)]
        given = seen, graphs, channels, rounds
        found = run_on_ranks(measure, ranks, *given, timeout=600, prefixes=prefixes)[0]
    for modes in found["cells"].values():
        check_losses({mode: of["loss"] for mode, of in modes.items()})
    cells = {f"{graph}, {kind}": modes for (graph, kind), modes in found["cells"].items()}
    return {
        "ranks": ranks,
        "quota": quotas[0][0],
        "machine": found["machine"]._asdict(),
        "cells": cells,
    }


def curves(
    measured: dict[int, Any], nodes: int, numbers: list[int], channels: int
) -> list[dict[str, Any]]:
    """For each graph, kind of model and way to grow: seconds of a step by mode and ranks.

    Links and work are those that the largest number of ranks measured.
    """
    from fastgraph.dist.operators.cost import Cluster
    from measure.dist_plan_steps import KINDS
    from measure.dist_scaling_steps import layers_alone, modelled, rows

    most = max(measured)
    machine = Cluster(**measured[most]["machine"])._replace(paces=())  # of any number of ranks
    found = []
    shared: dict[tuple[str, int], Any] = {}
    for growth in ("strong", "weak"):
        for graph in _GRAPHS:
            names = {
                ranks: f"{graph}-{nodes if growth == 'strong' else nodes * ranks // most}"
                for ranks in numbers
            }
            for ranks, name in names.items():
                if (name, ranks) not in shared:
                    shared[name, ranks] = rows(name, ranks)
            for kind in KINDS:
                cells = {n: measured[n]["cells"][f"{names[n]}, {kind}"] for n in measured}
                times = {
                    n: {mode: of["spread"]["median"] / 1e3 for mode, of in cell.items()}
                    for n, cell in cells.items()
                }
                rest = times[1]["halo"]
                rest -= layers_alone(kind, channels, shared[names[1], 1], machine)
                found.append(
                    {
                        "growth": growth,
                        "graph": graph,
                        "kind": kind,
                        "rest": rest,
                        "measured": times,
                        "modelled": {
                            n: modelled(
                                kind,
                                channels,
                                rest if growth == "strong" else rest * n,
                                shared[name, n],
                                machine,
                            )
                            for n, name in names.items()
                        },
                    }
                )
    return found


def efficiency(curve: dict[str, Any], ranks: int, times: str = "measured") -> float:
    """Of the fastest mode: the time on one rank over the time that is taken, by rank."""
    alone = curve["measured"][1]["halo"]
    best = min(curve[times][ranks].values())
    return float(alone / best / (ranks if curve["growth"] == "strong" else 1))


def described(results: dict[str, Any]) -> str:
    """A sentence that says how many cores and how fast a link a rank has."""
    return (
        f"a rank has {results['share']:.0%} of a core and a link of {results['megabits']:g} Mbit/s"
    )


def markdown(results: dict[str, Any]) -> str:
    """The whole report."""
    from measure.report import machine_lines, milliseconds, table

    most = max(results["measured"])
    modes = ("halo", "heads", "grid")
    rows, errors = [], []
    for curve in results["curves"]:
        where = f"{curve['growth']}, {curve['graph']}, {curve['kind']}"
        for ranks, predicted in curve["modelled"].items():
            taken = curve["measured"].get(ranks, {})
            if ranks > 1:
                errors += [abs(predicted[mode] / seconds - 1) for mode, seconds in taken.items()]
            of = "measured" if taken else "modelled"
            rows.append(
                [
                    where,
                    str(ranks),
                    *(milliseconds(taken.get(mode)) for mode in modes),
                    *(milliseconds(predicted.get(mode)) for mode in modes),
                    f"{efficiency(curve, ranks, of):.0%}" + ("" if taken else " modelled"),
                ]
            )
            where = ""
    of_most = results["measured"][most]["machine"]
    head = ["", "ranks", *(f"{mode}, measured" for mode in modes)]
    head += [*(f"{mode}, modelled" for mode in modes), "efficiency"]
    return "\n".join(
        [
            "# Weak and strong scaling of training steps",
            "",
            f"`{results['command']}`",
            "",
            f"Milliseconds of a training step, medians, {results['layers']} layers with "
            f"{results['channels']} channels: `TransformerConv` with {results['heads']} heads, or",
            f"`GCNConv`. Ranks of one thread with gloo: {described(results)} in both directions",
            f"(quotas of {results['measured'][most]['quota']} in periods of "
            f"{results['period'] / 1000:g} ms, before all else that runs on this machine), so that",
            f"ranks are alike, whatever their number. Strong: {results['nodes']:,} nodes, 16 edges",
            f"for each. Weak: {results['nodes'] // most:,} nodes for each rank.",
            "",
            "Modelled: `fastgraph.dist.forecast`, with METIS partitions, links and work as "
            f"{most} ranks measured them ({1e6 * of_most['latency']:.0f} us of a message,",
            f"{of_most['bandwidth'] / 1e6:.1f} MB/s, {1e9 * of_most['work']:.2f} ns of work for an "
            f"edge and channel of attention, {1e9 * of_most['sums']:.2f} of sums), and what",
            "else a step takes on one rank, shared out. Nothing of steps on more ranks is used.",
            "",
            f"Errors of the model from 2 to {most} ranks: median "
            f"{100 * statistics.median(errors):.0f} %, at most {100 * max(errors):.0f} %. "
            "Efficiency is that of the fastest mode.",
            "",
            *table(head, rows),
            "",
            *machine_lines(results["machine"]),
        ]
    )


if __name__ == "__main__":
    main()
