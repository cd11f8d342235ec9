"""Loading and epochs of LargeGT: tokens from mapped files beside a neighbour sampler.

    FASTGRAPH_DATA=... PYTHONPATH=. python benchmarks/largegt.py [--source debian]

Each loader runs in a process of its own, over the same input nodes: one epoch after the system has
forgotten the files, then some whose best counts. Processor time is that of all threads, and by the
wall clock a machine counts what else it does, too. Memory is what the process has allocated besides
pages of files. Beside them the bounded computation of context features, and epochs of all models
that ``largegt_accuracy.py`` trains, by some of their batches. Results go to
``benchmarks/results/<date>-<name>.json`` and ``.md``.
"""

from __future__ import annotations

import multiprocessing
import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import track

from measure.output import RESULTS, publish

_MIB = 1 << 20
PARTS = ("loaders", "context", "epochs")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "largegt"))


def apart(step: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a function in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(step, arguments)


def markdown(results: dict[str, Any]) -> str:
    """The whole report."""
    from measure.report import machine_lines, table

    rows = []
    for source, cells in results["loaders"].items():
        for cell in cells:
            hits = f", hits {100 * cell['hit_rate']:.0f} %" if "hit_rate" in cell else ""
            batch = results["batch"] / cell["seeds"] * 1e3
            rows.append(
                [
                    source,
                    cell["way"] + hits,
                    *(f"{cell[key] * batch:.1f}" for key in ("warm_cpu", "warm_wall")),
                    *(f"{cell[key] * batch:.1f}" for key in ("cold_cpu", "cold_wall")),
                    f"{cell['seeds'] / cell['warm_cpu']:,.0f}",
                    f"{cell['batch_bytes'] / _MIB:.1f}",
                    f"{cell['opened_bytes'] / _MIB:.0f}",
                    f"{cell['peak_bytes'] / _MIB:.0f}",
                    f"{cell['cold_read_bytes'] / _MIB:.0f}",
                ]
            )
    heading = ["graph", "loader", "warm, ms", "wall", "cold, ms", "wall", "seeds/s"]
    heading += ["batch, MiB", "opened, MiB", "peak, MiB", "cold reads, MiB"]
    of_context = [
        [
            source,
            *(f"{cell[key] / _MIB:.0f}" for key in ("memory", "peak_bytes")),
            *(f"{cell[key]:.2f}" for key in ("cpu", "wall")),
        ]
        for source, cells in results["context"].items()
        for cell in cells
    ]
    epochs = [
        [
            source,
            cell["model"],
            f"{cell['parameters']:,}",
            f"{cell['plain']:.1f}" if "plain" in cell else "",
            f"{cell['ours']:.1f}",
            f"{cell['plain'] / cell['ours']:.2f}x" if "plain" in cell else "",
        ]
        for source, cells in results["epochs"].items()
        for cell in cells
    ]
    lines = ["# Loading and epochs of LargeGT", "", f"`{results['command']}`", ""]
    lines += machine_lines(results["machine"])
    if rows:
        lines += [
            f"Milliseconds of a batch of {results['batch']} nodes with {results['k']} local nodes "
            f"and {results['channels']} channels, processor and wall; seeds per second of "
            "processor time, warm:",
            "",
            *table(heading, rows),
        ]
    if of_context:
        lines += [
            "Context features of two hops in bfloat16, by how much memory they may take; MiB and "
            "seconds:",
            "",
            *table(["graph", "bound", "peak", "processor", "wall"], of_context),
        ]
    if epochs:
        sizes = ", ".join(f"{key} {value}" for key, value in results["sizes"].items())
        lines += [
            "Epochs of training, on half of the nodes, in processor seconds, by some of their "
            f"batches; {sizes}. Message passing samples 20 and 10 neighbours, on both sides by our "
            "sampler:",
            "",
            *table(["graph", "model", "parameters", "PyG", "fastgraph", ""], epochs),
        ]
    return "\n".join(lines)


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
@click.option("--name", default="largegt-loading", show_default=True, help="Of the results.")
@click.option("--threads", default=1, show_default=True)
@click.option("--rounds", default=3, show_default=True, help="Warm epochs.")
@click.option("--batch", default=1024, show_default=True)
@click.option("--batches", default=8, show_default=True, help="Of an epoch.")
@click.option("--k", default=100, show_default=True, help="Local nodes.")
@click.option("--channels", default=100, show_default=True)
@click.option("--epoch-k", default=50, show_default=True, help="Local nodes, in epochs.")
@click.option("--epoch-batches", default=2, show_default=True, help="Measured of an epoch.")
@click.option(
    "--part", "parts", multiple=True, type=click.Choice(PARTS), default=PARTS, help="Of all."
)
@click.option("--source", "sources", multiple=True, default=("debian", "wordnet"))
def main(
    out: Path,
    name: str,
    threads: int,
    rounds: int,
    batch: int,
    batches: int,
    k: int,
    channels: int,
    epoch_k: int,
    epoch_batches: int,
    parts: tuple[str, ...],
    sources: tuple[str, ...],
) -> None:
    from measure import largegt_epochs
    from measure.largegt_models import Sizes
    from measure.machine import machine_facts
    from measure.token_loading import WAYS, context_step, measured, prepare

    console = Console(stderr=True)
    results: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/largegt.py", *sys.argv[1:]]),
        "machine": machine_facts(threads),
        "batch": batch,
        "k": k,
        "channels": channels,
        "graphs": {},
        "loaders": {},
        "context": {},
        "sizes": (sizes := Sizes(epoch_k))._asdict(),
        "epochs": {},
    }
    for source in sources:
        if "epochs" in parts:
            given = (source, sizes, epoch_batches, rounds, threads)
            results["epochs"][source] = apart(largegt_epochs.measured, *given)
        if parts == ("epochs",):
            continue
        with tempfile.TemporaryDirectory() as name_of_folder:
            folder = Path(name_of_folder)
            facts = apart(prepare, folder, source, k, channels, batch * batches)
            results["graphs"][source] = facts
            quarter = facts["bfloat16_bytes"] // 4
            if "loaders" in parts:
                results["loaders"][source] = [
                    apart(measured, way, folder, batch, quarter, rounds, threads)
                    for way in track(WAYS, source, console=console)
                ]
            if "context" in parts:
                results["context"][source] = [
                    apart(context_step, folder, folder / f"bounded-{mib}", mib * _MIB, threads)
                    for mib in (24, 64, 1024)
                ]
    publish(console, out, name, results, markdown(results))


if __name__ == "__main__":
    main()
