"""Memory, processor time and bytes sent of a rank of a graph transformer, by the number of ranks.

    PYTHONPATH=. .venv/bin/python benchmarks/dist_graph_transformer.py [--ranks 1,2,4]

Graphormer is trained on shards of a generated graph, with a global token and biases by types: along
edges alone, with and without dropout of weights, and with one layer of four that attends to all
pairs, on fewer nodes. Losses of ranks must be those of one process, where nothing is dropped.
Results go to ``benchmarks/results/<date>-dist-graph-transformer.json`` and ``.md``.
"""

from __future__ import annotations

import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from measure.output import RESULTS, write

_MIB = 2**20
_TOLERANCE = 1e-5  # of float32 losses, which are sums in another order


TURNS = {
    "sparse": (None, 0.0),
    "sparse, dropout": (None, 0.1),
    "one of four dense, dropout": (4, 0.1),
}
"""The period of dense layers, and dropout of weights."""


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--ranks", default="1,2,4", show_default=True, help="Separated by commas.")
@click.option("--modes", default="heads,halo", show_default=True, help="Separated by commas.")
@click.option("--turns", multiple=True, type=click.Choice(list(TURNS)), default=list(TURNS))
@click.option("--nodes", type=click.IntRange(100), default=40000, show_default=True)
@click.option("--dense-nodes", type=click.IntRange(100), default=6000, show_default=True)
@click.option("--steps", type=click.IntRange(3), default=4, show_default=True)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
def main(
    ranks: str,
    modes: str,
    turns: tuple[str, ...],
    nodes: int,
    dense_nodes: int,
    steps: int,
    out: Path,
) -> None:
    from measure.dist_graph_transformer_steps import CHANNELS, HEADS, LAYERS
    from measure.machine import machine_facts

    console = Console(stderr=True)
    results: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/dist_graph_transformer.py", *sys.argv[1:]]),
        "machine": machine_facts(1),
        "channels": CHANNELS,
        "layers": LAYERS,
        "heads": HEADS,
        "runs": [],
    }
    for name in turns:
        period, dropout = TURNS[name]
        size = nodes if period is None else dense_nodes
        for count in map(int, ranks.split(",")):
            for mode in modes.split(",") if count > 1 else ["one process"]:
                found = _measured(
                    size, count, mode if count > 1 else "halo", period, dropout, steps
                )
                found = {"turns": name, "nodes": size, "ranks": count, "mode": mode} | found
                console.print({key: value for key, value in found.items() if key != "of ranks"})
                results["runs"].append(found)
                write(out, "dist-graph-transformer", results, markdown(results))


def _measured(
    nodes: int, ranks: int, mode: str, period: int | None, dropout: float, steps: int
) -> dict[str, Any]:
    from fastgraph.dist.ranks.spawning import run_on_ranks
    from measure.dist_graph_transformer_steps import train, write_shards

    with tempfile.TemporaryDirectory() as folder:
        entries = write_shards(f"communities-{nodes}", ranks, folder)
        of_ranks = run_on_ranks(train, ranks, folder, mode, period, dropout, steps)
    returned = [of["returned"] for of in of_ranks]
    return {
        "entries": entries,
        "loss": returned[0]["loss"],
        "peak": max(of["anonymous"] - of["anonymous before"] for of in of_ranks),
        "seconds": max(of["seconds"] for of in returned),
        "sent": max(of["sent"] for of in returned),
        "of ranks": of_ranks,
    }


def markdown(results: dict[str, Any]) -> str:
    """The whole report."""
    from measure.report import machine_lines, table

    rows, off = [], 0.0
    for run in results["runs"]:
        same = [x for x in results["runs"] if x["turns"] == run["turns"]]
        one = next((x for x in same if x["ranks"] == 1), run)
        half = [x for x in same if 2 * x["ranks"] == run["ranks"]]
        half = [x for x in half if x["mode"] in (run["mode"], "one process")]
        if "dropout" not in run["turns"]:  # ranks drop others than one process does
            off = max(off, abs(run["loss"] - one["loss"]) / abs(one["loss"]))
        rows.append(
            [
                run["turns"],
                f"{run['nodes']:,}",
                run["mode"],
                str(run["ranks"]),
                f"{run['peak'] / _MIB:.0f}",
                f"{half[0]['peak'] / run['peak']:.2f}x" if half else "",
                f"{run['seconds']:.2f}",
                f"{run['sent'] / _MIB:.1f}",
            ]
        )
    columns = [
        "turns",
        "nodes",
        "mode",
        "ranks",
        "peak of memory, MiB (largest rank)",
        "half the ranks take",
        "processor seconds of a step",
        "sent in a step, MiB",
    ]
    head = [
        "# A rank of a graph transformer",
        "",
        f"Graphormer, {results['layers']} layers, {results['channels']} channels in "
        f"{results['heads']} heads, float32, with a global token and biases by types; 16 edges for "
        "each node of `communities-N`, which METIS has cut into shards. Memory is what is resident "
        "and not of a file, above what a rank has once it has trained on something small. Seconds "
        "are those of the processor, of the slowest rank, without those that it waits; the machine "
        "did other things meanwhile.",
        "",
        f"Losses of ranks without dropout are those of one process: they differ by {off:.1e} at "
        f"most ({'**yes**' if off <= _TOLERANCE else '**no**'}).",
        "",
    ]
    command = ["", f"    {results['command']}", ""]
    return "\n".join([*head, *table(columns, rows), *command, *machine_lines(results["machine"])])


if __name__ == "__main__":
    main()
