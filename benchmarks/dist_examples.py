"""Unmodified scripts on several ranks, beside one process, in float64.

    FASTGRAPH_DATA=... PYTHONPATH=. .venv/bin/python benchmarks/dist_examples.py FOLDER \
        --ranks 2,3 --steps 20

The folder holds scripts such as PyG's own examples that train on a whole graph. Each is run as it is
by upstream alone on one process, and by ``python -m fastgraph.dist`` on several, with routed layers,
uneven parts, and random numbers as one process draws them. Its losses, gradients and parameters are
compared, and what the ranks gathered as a whole is listed by name. Datasets that are not at hand are
replaced by small random ones of the same form (``measure/stand_ins.py``). Results go to
``benchmarks/results/<date>-dist-examples.json`` and ``.md``.
"""

from __future__ import annotations

import os
import pickle
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import track

from measure.output import RESULTS, publish

_RECORDER = Path(__file__).parent / "measure" / "dist_recorder.py"
_LINES_OF_ERRORS = 30


@click.command(help=__doc__.split("\n\n")[0])
@click.argument("folder", type=click.Path(path_type=Path, exists=True))
@click.option("--ranks", default="2,3", show_default=True, help="Separated by commas.")
@click.option("--steps", type=click.IntRange(1), default=20, show_default=True)
@click.option("--only", default="", help="Scripts whose path contains this.")
@click.option("--also", multiple=True, help="A script of the folder with arguments; repeatable.")
@click.option("--timeout", type=float, default=600.0, show_default=True, help="Seconds of a run.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
def main(
    folder: Path,
    ranks: str,
    steps: int,
    only: str,
    also: Sequence[str],
    timeout: float,
    out: Path,
) -> None:
    from measure.dist_comparison import compared, markdown
    from measure.machine import machine_facts

    paths = [folder] if folder.is_file() else sorted(folder.rglob("*.py"))
    root = folder.parent if folder.is_file() else folder
    calls = [[str(path.relative_to(root))] for path in paths] + [shlex.split(a) for a in also]
    calls = [call for call in calls if only in " ".join(call)]
    sizes = [int(size) for size in ranks.split(",")]
    console = Console(stderr=True)
    results: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/dist_examples.py", *sys.argv[1:]]),
        "machine": machine_facts(1),
        "steps": steps,
        "ranks": sizes,
        "scripts": {},
    }
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        environment = _environment(work)
        for call in track(calls, "scripts", console=console):
            record = work / "record"
            command = [str(_RECORDER), str(record), str(steps), str(root / call[0]), *call[1:]]
            reference = _run(command, environment, work, timeout)
            found = results["scripts"][" ".join(call)] = {}
            if isinstance(reference, str):
                found["one process"] = {"error": reference}
                console.print(f"{call}: one process: {reference}")
                continue
            expected = _records(record, 1)
            for size in sizes:
                shares = ",".join(str(size - rank) for rank in range(size))
                started = [
                    *("-m", "fastgraph.dist", "--nproc-per-node", str(size)),
                    *("--random", "exact", "--weights", shares, *command),
                ]
                ended = _run(started, environment, work, timeout)
                if isinstance(ended, str):
                    found[str(size)] = {"error": ended}
                    console.print(f"{call}: {size} ranks: {ended}")
                    continue
                of_ranks = _records(record, size)
                found[str(size)] = compared(expected[0], of_ranks, reference[0] == ended[0])
                console.print(f"{call}: {size} ranks: {found[str(size)]}")
    publish(console, out, "dist-examples", results, markdown(results))


def _environment(work: Path) -> dict[str, str]:
    """Variables of the runs; PyG writes beside the raw files of a dataset, so these are copied."""
    citations = Path(os.environ.get("FASTGRAPH_DATA", "data")) / "Planetoid"
    shutil.copytree(citations, work / "citations", ignore=shutil.ignore_patterns("processed"))
    here = str(Path(__file__).parents[1])
    return {
        **os.environ,
        "EXAMPLES_CITATIONS": str(work / "citations"),
        "OMP_NUM_THREADS": "1",
        "MPLBACKEND": "agg",
        "PYTHONPATH": os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")])),
        "PYTHONWARNINGS": "ignore",
    }


def _run(
    command: Sequence[str], environment: dict[str, str], work: Path, timeout: float
) -> tuple[str] | str:
    """What a run printed, or the end of its errors."""
    for old in work.glob("record.*"):
        old.unlink()
    try:
        done = subprocess.run(
            [sys.executable, *command], cwd=work, env=environment, capture_output=True, text=True,
            timeout=timeout, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"did not end in {timeout} s"
    if done.returncode != 0:
        return "\n".join(done.stderr.splitlines()[-_LINES_OF_ERRORS:])
    return (done.stdout,)


def _records(path: Path, size: int) -> list[dict[str, Any]]:
    return [pickle.loads(Path(f"{path}.{rank}").read_bytes()) for rank in range(size)]


if __name__ == "__main__":
    main()
