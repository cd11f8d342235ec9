"""Unmodified scripts on several ranks, beside one process, in float64.

    FASTGRAPH_DATA=... PYTHONPATH=. .venv/bin/python benchmarks/dist_examples.py FOLDER \
        --ranks 2,3 --steps 20

The folder holds scripts such as PyG's own examples that train on a whole graph. Each is run as it
is by upstream alone on one process, and by ``python -m fastgraph.dist`` on several, with routed
layers, uneven parts, and random numbers as one process draws them. Its losses, gradients and
parameters are compared, and what the ranks gathered as a whole is listed by name. Scripts that
choose nodes by their scores, which rounding may decide, are run again with the choices of one
process, and on one process that rounds otherwise (``measure/choices.py``). Datasets that are not at
hand are replaced by small random ones of the same form (``measure/stand_ins.py``).
Results go to ``benchmarks/results/<date>-dist-examples.json`` and ``.md``.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import pickle
import re
import runpy
import shlex
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import click
from rich.console import Console
from rich.progress import track

from measure.output import RESULTS, Record, publish

_RECORDER = Path(__file__).parent / "measure" / "dist_recorder.py"
_LINES_OF_ERRORS = 30
_IMPORTED = (
    "torch_geometric.nn",
    "torch_geometric.datasets",
    "matplotlib.pyplot",
    "sklearn.metrics",
)
"""Modules that take long to import, and are neither upstream's nor ours to change."""


@click.command(help=__doc__.split("\n\n")[0])
@click.argument("folder", type=click.Path(path_type=Path, exists=True))
@click.option("--ranks", default="2,3", show_default=True, help="Separated by commas.")
@click.option("--steps", type=click.IntRange(1), default=20, show_default=True)
@click.option("--only", default="", help="A regular expression that calls match.")
@click.option("--also", multiple=True, help="A script of the folder with arguments; repeatable.")
@click.option("--timeout", type=float, default=600.0, show_default=True, help="Seconds of a run.")
@click.option(
    "--record",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A file of scripts that are done, which a run that was ended goes on from.",
)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
def main(
    folder: Path,
    ranks: str,
    steps: int,
    only: str,
    also: Sequence[str],
    timeout: float,
    record: Path | None,
    out: Path,
) -> None:
    from measure.dist_comparison import compared, markdown
    from measure.machine import machine_facts

    folder = folder.resolve()  # runs are in folders of their own
    paths = [folder] if folder.is_file() else sorted(folder.rglob("*.py"))
    root = folder.parent if folder.is_file() else folder
    calls = [[str(path.relative_to(root))] for path in paths] + [shlex.split(a) for a in also]
    calls = [call for call in calls if re.search(only, " ".join(call))]
    sizes = [int(size) for size in ranks.split(",")]
    console = Console(stderr=True)
    results: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/dist_examples.py", *sys.argv[1:]]),
        "machine": machine_facts(1),
        "steps": steps,
        "ranks": sizes,
        "scripts": {},
    }
    done = Record(record) if record else Record.fresh(out, "dist-examples")
    for name, found in done.lines("script"):
        results["scripts"][name] = found
    left = [call for call in calls if " ".join(call) not in results["scripts"]]
    with tempfile.TemporaryDirectory() as folder_of_runs:
        runs = Runs(Path(folder_of_runs), timeout)
        for call in track(left, "scripts", console=console):
            command = [str(runs.record), str(steps), str(root / call[0]), *call[1:]]
            reference = runs.alone(command)
            found = results["scripts"][" ".join(call)] = {}
            if isinstance(reference, str):
                found["one process"] = {"error": reference}
                console.print(f"{call}: one process: {reference}", markup=False)
                done.add("script", [" ".join(call), found])
                continue
            (expected,) = reference.records
            for kind, run in _runs_of(runs, sizes, expected["choices"]):
                ended = run(command)
                if isinstance(ended, str):
                    found[kind] = {"error": ended}
                else:
                    same = ended.text == reference.text
                    found[kind] = compared(expected, ended.records, same)
                console.print(f"{call}: {kind}: {found[kind]}", markup=False)
            done.add("script", [" ".join(call), found])
    publish(console, out, "dist-examples", results, markdown(results))


def _runs_of(
    runs: Runs, sizes: Sequence[int], chosen: list[Any]
) -> Iterator[tuple[str, Callable[[Sequence[str]], Ended | str]]]:
    """How a script is run beside one process, by the name of the row in the table."""
    for size in sizes:
        yield str(size), functools.partial(runs.on_ranks, size=size)
    if not chosen:
        return
    imposed = {"EXAMPLES_CHOICES": runs.keep(chosen)}
    rounded = {"EXAMPLES_ROUNDING": "otherwise"}
    yield "1, rounded otherwise", functools.partial(runs.alone, variables=rounded)
    both = {**rounded, **imposed}
    yield "1, rounded otherwise, same choices", functools.partial(runs.alone, variables=both)
    for size in sizes:
        run = functools.partial(runs.on_ranks, size=size, variables=imposed)
        yield f"{size}, same choices", run


class Ended(NamedTuple):
    """The results of a run: the text that its first process printed, and the record of each."""

    text: str
    records: list[dict[str, Any]]


class Runs:
    """Runs of scripts in new processes, forked from one that has imported the libraries.

    Args:
        work: an empty folder for all of them.
        timeout: seconds of a run.
    """

    def __init__(self, work: Path, timeout: float) -> None:
        self.record = work / "record"
        self._work, self._timeout = work, timeout
        citations = Path(os.environ.get("FASTGRAPH_DATA", "data")) / "Planetoid"
        # PyG writes beside the raw files.
        ignored = shutil.ignore_patterns("processed")
        shutil.copytree(citations, work / "citations", ignore=ignored)
        os.environ.update(
            EXAMPLES_CITATIONS=str(work / "citations"),
            OMP_NUM_THREADS="1",
            MPLBACKEND="agg",
            PYTHONWARNINGS="ignore",
        )
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(_IMPORTED))

    def keep(self, chosen: list[Any]) -> str:
        """A file with choices of nodes, for later runs."""
        path = self._work / "choices"
        path.write_bytes(pickle.dumps(chosen))
        return str(path)

    def alone(
        self, command: Sequence[str], variables: Mapping[str, str] = MappingProxyType({})
    ) -> Ended | str:
        """A script by upstream alone on one process; or the end of its errors."""
        return self._run([(self._words_of_recorder(command), dict(variables))])

    def on_ranks(
        self, command: Sequence[str], size: int, variables: Mapping[str, str] = MappingProxyType({})
    ) -> Ended | str:
        """The same on ranks, the first of which has the most work."""
        shares = ",".join(str(size - rank) for rank in range(size))
        words = ["--random", "exact", "--weights", shares, *self._words_of_recorder(command)]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        world = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        world.update(variables)
        return self._run([(words, {**world, "RANK": str(r)}) for r in range(size)])

    def _words_of_recorder(self, command: Sequence[str]) -> list[str]:
        return [str(_RECORDER), *command]

    def _run(self, calls: list[tuple[list[str], dict[str, str]]]) -> Ended | str:
        for old in self._work.glob("record.*"):
            old.unlink()
        processes = [
            self._context.Process(target=_process, args=(words, variables, self._work, rank))
            for rank, (words, variables) in enumerate(calls)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + self._timeout
        for process in processes:
            process.join(max(deadline - time.monotonic(), 0))
        late = [process for process in processes if process.is_alive()]
        for process in late:
            process.kill()
            process.join()
        failed = [rank for rank, process in enumerate(processes) if process.exitcode]
        if failed:
            # Ranks that wait for one that has ended fail as well, and are not the reason.
            errors = [self._errors(rank, processes[rank].exitcode) for rank in failed]
            reason = min(errors, key=lambda text: "CollectiveError" in text)
            return f"did not end in {self._timeout} s\n{reason}" if late else reason
        records = [
            pickle.loads(Path(f"{self.record}.{rank}").read_bytes()) for rank in range(len(calls))
        ]
        return Ended((self._work / "text.0").read_text(), records)

    def _errors(self, rank: int, code: int | None) -> str:
        lines = (self._work / f"errors.{rank}").read_text(errors="replace").splitlines()
        return "\n".join([f"rank {rank} ended with {code}:", *lines[-_LINES_OF_ERRORS:]])


def _process(words: list[str], variables: dict[str, str], work: Path, rank: int) -> None:
    """A script, or a rank of it, whose output goes to files."""
    os.environ.update(variables)
    os.chdir(work)
    for stream, name in ((sys.stdout, "text"), (sys.stderr, "errors")):
        file = os.open(work / f"{name}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, stream.fileno())
    if "RANK" in variables:
        launch = importlib.import_module("fastgraph.dist.running.launch")
        launch.main(words)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
