"""Global attention on a grid of ranks: bytes beside formulas, processor time, memory.

    PYTHONPATH=. .venv/bin/python benchmarks/dist_global.py --record FILE [--ranks 1,4,9,16]

In the shape of figures 6 to 8 and of section 7 of "High-performance and programmable attentional
graph neural networks with global tensor formulations" (SC 2023), on Kronecker graphs that are born
in blocks. All ranks share the cores of one machine: what is compared is the processor time of the
slowest rank, not the time on the wall. With ``--record`` several runs make one. Results go to
``benchmarks/results/<date>-dist-global.json`` and ``.md``.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from dist_volumes import equal_at
from measure.output import RESULTS, Record, publish

WIDTHS = (16, 64)
KINDS = ("rows", "parameters")
DENSITIES = {"1 %": 1e-2, "0.1 %": 1e-3, "0.01 %": 1e-4}
STRONG = {"1 %": 12, "0.1 %": 14, "0.01 %": 15}
WEAK = {"1 %": 12, "0.1 %": 13}
"""Scales on one rank; nodes grow with the square root of the number of ranks."""


def graphs_for(ranks: int) -> dict[str, tuple[int, int]]:
    """The graphs that are trained on so many ranks: their scales and edges, by name."""
    found = {f"strong, {d}": (s, round(DENSITIES[d] * 4**s)) for d, s in STRONG.items()}
    if ranks in (1, 4, 16):
        grown = {1: 0, 4: 1, 16: 2}[ranks]
        for density, scale in WEAK.items():
            edges = round(DENSITIES[density] * 4 ** (scale + grown))
            found[f"weak, {density}"] = scale + grown, edges
    return found


def measured(
    ranks: int, nodes: int, rounds: int, largest: tuple[int, int, int], are_timed: bool
) -> list[Any]:
    """The results of each rank."""
    from fastgraph.dist.ranks.spawning import run_on_ranks
    from measure.dist_global_steps import measure

    crossing = [equal_at(ranks) * factor for factor in (0.5, 1, 2)] if ranks > 1 else []
    graphs = graphs_for(ranks) if are_timed else {}
    given = crossing, nodes, WIDTHS, graphs, rounds, largest
    return run_on_ranks(measure, ranks, *given, timeout=3600)


def markdown(results: dict[str, Any]) -> str:
    """The whole report."""
    from measure.report import machine_lines, table

    measured: dict[int, Any] = results["measured"]
    many = [ranks for ranks in measured if ranks > 1]

    def mean(ranks: int, *keys: Any) -> float:
        total = 0.0
        for of_rank in measured[ranks]:
            for key in keys:
                of_rank = of_rank[key]
            total += of_rank
        return total / ranks

    def slowest(ranks: int, graph: str, key: str) -> float:
        return max(of_rank["times"][graph][key]["ms"] for of_rank in measured[ranks])

    crossing = [
        [
            str(ranks),
            f"{equal_at(ranks):.2f}",
            f"{mean(ranks, 'crossing', 1, 'grid'):,.0f}",
            *(
                f"{mean(ranks, 'crossing', i, 'halo') / mean(ranks, 'crossing', i, 'grid'):.3f}"
                for i in range(3)
            ),
        ]
        for ranks in many
    ]
    volumes: list[list[str]] = []
    for name in measured[many[0]][0]["volumes"]:
        for ranks in many:
            found = [of_rank["volumes"][name] for of_rank in measured[ranks]]
            equal = all(
                of[what] == of[f"{what}, formula"]
                for of in found
                for what in ("rows", "parameters")
            )
            sent = (mean(ranks, "volumes", name, what) for what in found[0])
            volumes.append(
                [name, str(ranks), *(f"{x:,.0f}" for x in sent), "yes" if equal else "no"]
            )

    def scaling(growth: str) -> list[list[str]]:
        found = []
        for graph in [name for name in graphs_for(1) if name.startswith(growth)]:
            for model in ("VA", "AGNN", "GAT"):
                for step in ("inference", "training"):
                    sizes = [r for r in measured if graph in measured[r][0]["times"]]
                    key = f"{model}, {step}, grid"
                    taken = {r: slowest(r, graph, key) for r in sizes}
                    cells = []
                    for ranks in results["ranks"]:
                        if ranks not in taken:
                            cells.append("")
                            continue
                        ideal = ranks if growth == "strong" else 1
                        share = taken[1] / taken[ranks] / ideal
                        text = f"{taken[ranks]:.1f}"
                        cells.append(text if ranks == 1 else f"{text} ({share:.0%})")
                    most = max(sizes)
                    halo = slowest(most, graph, f"{model}, {step}, halo")
                    grid, by_halo = (
                        mean(most, "times", graph, f"{model}, {step}, {mode}", "sent")
                        for mode in ("grid", "halo")
                    )
                    density = graph.partition(", ")[2]
                    found.append(
                        [density, model, step, *cells, f"{halo:.1f}", f"{by_halo / grid:.2f}"]
                    )
        return found

    memory = []
    for ranks in measured:
        of_ranks = [of_rank["memory"] for of_rank in measured[ranks]]
        most = {what: max(of[what] for of in of_ranks) for what in of_ranks[0]}
        memory.append(
            [
                str(ranks),
                f"{most['rows']:,}",
                f"{most['edges']:,}",
                *(f"{most[what] / 2**20:.0f}" for what in ("born", "at birth", "training")),
            ]
        )
    scaled: list[str] = []
    columns = [f"{ranks} ranks" if ranks > 1 else "1 rank" for ranks in results["ranks"]]
    head = ["density", "model", "pass", *columns, "halo", "sent by halo"]
    if measured[1][0]["times"]:
        scaled = [
            "## Strong scaling, as in figure 6",
            "",
            "Kronecker graphs, 3 layers of 16 channels: milliseconds of processor time of the",
            "slowest rank, lower quartiles, with the efficiency in brackets; that by halo on most",
            "ranks, and the bytes by halo, of those on the grid. Two cores have all ranks; others",
            "use them, too.",
            "",
            *table(head, scaling("strong")),
            "",
            "## Weak scaling, as in figure 8",
            "",
            "Nodes grow with the square root of the number of ranks, so that each has as many",
            "edges.",
            "",
            *table(head, scaling("weak")),
            "",
        ]
    scale, edges, channels = results["largest"]
    return "\n".join(
        [
            "# Global attention on a grid of ranks",
            "",
            f"`{results['command']}`",
            "",
            "## Random graphs: where halo and grid send alike",
            "",
            f"{results['nodes']:,} nodes; rows counted by ranks, for a sum, forward. The rows of",
            "the halo over those of a grid, at half the degree of the formula, at it and twice.",
            "",
            *table(["ranks", "degree", "rows on a grid", "half", "closed form", "twice"], crossing),
            "",
            "## Bytes that a rank sends, counted and by formula",
            "",
            "Mean of ranks, a step of one layer of k channels with both gradients, 4,096 nodes:",
            "rows are the O(n k / sqrt(p)) of the paper, parameters its k^2. Last: on every rank.",
            "",
            *table(
                ["layer, k", "ranks", "rows", "formula", "parameters", "formula", "equal"], volumes
            ),
            "",
            *scaled,
            "## Memory of a rank",
            "",
            f"A graph of 2^{scale} nodes, {edges:,} edges drawn, {channels} channels: MiB of the",
            "rank with most, above what it has without a graph: with it, at most while drawn,",
            "and at most in steps of training of a layer of vanilla attention.",
            "",
            *table(["ranks", "nodes", "edges", "born", "at birth", "training"], memory),
            "",
            *machine_lines(results["machine"]),
        ]
    )


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--ranks", default="1,4,9,16", show_default=True, help="Separated by commas.")
@click.option("--nodes", type=click.IntRange(144), default=14_400, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--scale", type=click.IntRange(4, 24), default=17, show_default=True)
@click.option("--degree", type=click.IntRange(1), default=16, show_default=True)
@click.option("--channels", type=click.IntRange(1), default=64, show_default=True)
@click.option("--times/--no-times", default=True, help="Of steps; all else is counted.")
@click.option("--record", type=click.Path(path_type=Path, dir_okay=False), help="To go on with.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
def main(
    ranks: str,
    nodes: int,
    rounds: int,
    scale: int,
    degree: int,
    channels: int,
    times: bool,
    record: Path | None,
    out: Path,
) -> None:
    from measure.machine import machine_facts

    console = Console(stderr=True)
    numbers = sorted({1, *(int(size) for size in ranks.split(","))})
    largest = scale, degree << scale, channels
    done = Record(record) if record else Record.fresh(out, "dist-global")
    done.mend()
    for size in numbers:
        if size not in {of["ranks"] for of in done.lines("measured")}:
            found = measured(size, nodes, rounds, largest, times)
            done.add("measured", {"ranks": size, "found": found})
            console.print(f"{size} ranks")
    results: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/dist_global.py", *sys.argv[1:]]),
        "machine": machine_facts(1),
        "ranks": numbers,
        "nodes": nodes,
        "largest": largest,
        "measured": {of["ranks"]: of["found"] for of in done.lines("measured")},
    }
    publish(console, out, "dist-global", results, markdown(results))
    if record is None:
        done.path.unlink()


if __name__ == "__main__":
    main()
