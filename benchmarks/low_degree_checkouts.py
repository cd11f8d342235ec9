"""Attention by in-degree in this checkout beside an older one, in turns.

    python benchmarks/low_degree_checkouts.py OLDER [--operators gat,gatv2] [--degrees 2,4]

``OLDER`` is a checkout whose CPU kernels are compiled. Each has a process, of one thread; what is
reported is the fastest of all rounds, in processor time. Results go to
``benchmarks/results/<date>-<name>.json`` and ``.md``.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import track

from measure.output import RESULTS, publish

HERE = Path(__file__).parent

_SERVER = """
import json, sys
root, benchmarks = sys.argv[1:]
sys.path[:0] = [root, benchmarks]
import torch
import fastgraph
import low_degree
assert fastgraph.__file__.startswith(root + "/"), fastgraph.__file__
torch.set_num_threads(1)
made = {}
for line in sys.stdin:
    key = tuple(json.loads(line))
    made[key] = made.get(key) or low_degree._calls(*key)
    print(json.dumps([low_degree.nanoseconds(call, 4) for call in made[key]]), flush=True)
"""


def _serve(root: Path) -> subprocess.Popen[str]:
    environment = dict(os.environ, PYTHONPATH=str(root), OMP_NUM_THREADS="1")
    # An editable install comes before all paths.
    own = root / ".venv" / "bin" / "python"
    return subprocess.Popen(
        [str(own) if own.exists() else sys.executable, "-c", _SERVER, str(root), str(HERE)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def _ask(server: subprocess.Popen[str], key: tuple[Any, ...], dropout: float) -> list[float]:
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(json.dumps([*key, dropout]) + "\n")
    server.stdin.flush()
    answer = server.stdout.readline()
    if not answer:
        raise click.ClickException(f"a checkout cannot run {key}; its error is above")
    found: list[float] = json.loads(answer)
    return found


def markdown(results: dict[str, Any]) -> str:
    """The whole report."""
    from measure.report import machine_lines, table

    rows = []
    for cell in results["cells"]:
        old, new = cell["older"], cell["this"]
        rows.append(
            [
                cell["operator"],
                f"{cell['heads']} x {cell['channels']}",
                str(cell["degree"]),
                f"{old[0]:.0f} / {old[1]:.0f}",
                f"{new[0]:.0f} / {new[1]:.0f}",
                f"{old[0] / new[0]:.2f}x / {old[1] / new[1]:.2f}x",
            ]
        )
    head = ["operator", "heads x channels", "in-degree", "older", "this", "as fast"]
    return "\n".join(
        [
            "# Attention by in-degree, beside an older checkout",
            "",
            f"`{results['command']}`; nanoseconds for each edge, forward / backward with all "
            f"gradients, of one thread. The older checkout is {results['older']}.",
            "",
            *machine_lines(results["machine"]),
            *table(head, rows),
        ]
    )


@click.command(help=__doc__.split("\n\n")[0])
@click.argument("older", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.option("--commit", default="an older one", help="Of the older checkout.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
@click.option("--name", default="low-degree-checkouts", show_default=True)
@click.option("--operators", default="gat,gatv2,attention", show_default=True)
@click.option("--degrees", default="2,4,8,32", show_default=True)
@click.option("--shapes", default="8x8,4x16", show_default=True, help="Heads x channels.")
@click.option("--dropout", type=click.FloatRange(0, 1), default=0.0, help="Of weights.")
@click.option("--rounds", type=click.IntRange(1), default=15, show_default=True)
def main(
    older: Path,
    commit: str,
    out: Path,
    name: str,
    operators: str,
    degrees: str,
    shapes: str,
    dropout: float,
    rounds: int,
) -> None:
    from measure.machine import machine_facts

    servers = {"older": _serve(older.resolve()), "this": _serve(HERE.parent.resolve())}
    in_degrees = [int(degree) for degree in degrees.split(",")]
    sizes = [tuple(int(size) for size in shape.split("x")) for shape in shapes.split(",")]
    keys = [(o, d, *size) for o in operators.split(",") for size in sizes for d in in_degrees]
    best = {(name, key): [float("inf")] * 2 for name in servers for key in keys}
    for _ in track(range(rounds), console=Console(stderr=True)):
        for key in keys:
            for which, server in servers.items():
                pairs = zip(best[which, key], _ask(server, key, dropout), strict=True)
                best[which, key] = [min(pair) for pair in pairs]
    for server in servers.values():
        server.terminate()
    cells = [
        {
            **dict(zip(("operator", "degree", "heads", "channels"), key, strict=True)),
            **{which: best[which, key] for which in servers},
        }
        for key in keys
    ]
    arguments = [f"--commit={commit}", f"--operators={operators}", f"--degrees={degrees}"]
    arguments += [f"--shapes={shapes}", f"--dropout={dropout}", f"--rounds={rounds}"]
    results = {
        "command": shlex.join(
            ["python", "benchmarks/low_degree_checkouts.py", "OLDER", *arguments]
        ),
        "older": commit,
        "machine": machine_facts(1),
        "cells": cells,
    }
    publish(Console(stderr=True), out, name, results, markdown(results))


if __name__ == "__main__":
    main()
