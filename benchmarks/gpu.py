"""Build, test and measure the CUDA kernels on a machine with a GPU, in one command.

    FASTGRAPH_DATA=... python benchmarks/gpu.py

Needs torch, nvcc, cmake, ninja and the packages that fastgraph depends on, but no network. The
tests run on the GPU, some also under compute-sanitizer; then message passing of each layer is
timed beside upstream and other packages. Results go to ``benchmarks/results/<date>-gpu.json`` and
``.md``.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from torch import Tensor

from measure.device import (
    Contestant,
    bandwidth,
    copies_beyond_cache,
    facts,
    interleave,
    peak_bytes,
    summary,
)
from measure.graphs import SHAPES, GraphData, default_graphs, imitate, load
from measure.output import RESULTS, write
from measure.rivals import Rival, rivals

ROOT = Path(__file__).resolve().parent.parent
_LAYERS = ("GCN", "SAGE-max", "SAGE-mean", "GATv2", "GAT", "Transformer")
_WIDTHS = (64, 256, 512)
# Where compiling upstream's layers, about half a minute each, is worth the time.
_COMPILED = ("tolokers", 256)
# Each test under a tool that watches every access runs a hundred times slower.
_SANITIZED = "test_every_graph and (random or hub_small) and not dropout"

console = Console(stderr=True)


@click.command(help=(__doc__ or "").split("\n\n")[0])
@click.option("--build/--no-build", default=True)
@click.option("--test/--no-test", default=True)
@click.option("--sanitize/--no-sanitize", default=True)
@click.option("--seconds", default=240.0, show_default=True, help="For all timings together.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
@click.option("--device", default="cuda", show_default=True, help="cpu tries the script itself.")
@click.option("--graphs", help="Names with commas between; all there are unless told.")
@click.option("--widths", default=",".join(map(str, _WIDTHS)), show_default=True)
def main(
    build: bool,
    test: bool,
    sanitize: bool,
    seconds: float,
    out: Path,
    device: str,
    graphs: str | None,
    widths: str,
) -> None:
    stages: dict[str, Any] = {}
    for name, commands in (
        ("build", _build_commands() if build else []),
        ("test", _test_commands() if test else []),
        ("sanitize", _sanitize_commands() if sanitize else []),
    ):
        stages[name] = [_run(command) for command in commands]
    names = graphs.split(",") if graphs else [*default_graphs(), *SHAPES]
    results = _measure(device, names, [int(w) for w in widths.split(",")], seconds)
    results["stages"] = stages
    results["command"] = shlex.join(["python", "benchmarks/gpu.py", *sys.argv[1:]])
    path = write(out, "gpu", results, markdown(results))
    console.print(f"written to {path}")
    if any(step["exit_code"] for steps in stages.values() for step in steps):
        sys.exit("a stage before the measurements has failed; see the table")


def _build_commands() -> list[list[str]]:
    folder = str(ROOT / "build" / "gpu")
    options = [f"-DPython_EXECUTABLE={sys.executable}", "-DFASTGRAPH_CUDA=auto"]
    return [
        ["cmake", "-S", str(ROOT), "-B", folder, "-G", "Ninja", *options],
        ["cmake", "--build", folder, "--target", "all"],
    ]


def _test_commands() -> list[list[str]]:
    return [[sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/cuda"]]


def _sanitize_commands() -> list[list[str]]:
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(tool).exists():
        console.print("compute-sanitizer is not installed: nothing is run under it")
        return []
    tests = [sys.executable, "-m", "pytest", "-q", "-x", "tests/cuda/test_operators.py"]
    return [
        [tool, "--tool", kind, "--error-exitcode", "9", *tests, "-k", _SANITIZED]
        for kind in ("memcheck", "racecheck")
    ]


def _run(command: list[str]) -> dict[str, Any]:
    console.print(shlex.join(command))
    start = time.perf_counter()
    process = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    tail = process.stdout.splitlines()[-15:]
    if process.returncode:
        console.print("\n".join(tail), markup=False)
    return {
        "command": shlex.join(command),
        "exit_code": process.returncode,
        "seconds": round(time.perf_counter() - start, 1),
        "last_line": tail[-1] if tail else "",
    }


def _measure(
    device_name: str, graphs: list[str], widths: list[int], seconds: float
) -> dict[str, Any]:
    device = torch.device(device_name)
    if device.type == "cuda":
        os.environ["FASTGRAPH_BACKEND"] = "cuda"  # which computes on request only
    results: dict[str, Any] = {
        "machine": facts(device),
        "bandwidth": bandwidth(device),
        "cells": [],
    }
    cells = len(graphs) * len(_LAYERS) * len(widths) * 2
    for name in graphs:
        graph = imitate(name, device) if name in SHAPES else load(name)
        graph = replace(graph, edge_index=graph.edge_index.to(device))
        for layer in _LAYERS:
            for width in widths:
                for dtype in (torch.float32, torch.bfloat16):
                    console.print(f"{name} {layer} {width} {dtype}")
                    results["cells"] += _cells(graph, layer, width, dtype, seconds / cells)
    return results


def _cells(
    graph: GraphData, layer: str, width: int, dtype: torch.dtype, seconds: float
) -> list[dict[str, Any]]:
    """A row for each rival: forward and backward time, and peak memory."""
    device = graph.edge_index.device
    copies = copies_beyond_cache(device, graph.num_nodes * width * dtype.itemsize)
    torch.manual_seed(0)
    inputs = [
        torch.randn(graph.num_nodes, width, device=device, dtype=dtype, requires_grad=True)
        for _ in range(copies)
    ]
    compiled = (graph.name, width) == _COMPILED and dtype == torch.float32
    rows: list[dict[str, Any]] = []
    timed: list[tuple[dict[str, Any], Contestant, Contestant]] = []
    for rival in rivals(layer, graph, width, dtype, compiled):
        row = {
            "graph": graph.name,
            "num_nodes": graph.num_nodes,
            "num_edges": graph.num_edges,
            "layer": layer,
            "width": width,
            "dtype": str(dtype).removeprefix("torch."),
            "rival": rival.name,
        }
        rows.append(row)
        try:
            timed.append((row, *_contestants(rival, inputs, row)))
        except torch.OutOfMemoryError:
            row["failed"] = "out of memory"
    interleave([forward for _, forward, _ in timed], device, copies, seconds / 2)
    interleave([backward for _, _, backward in timed], device, copies, seconds / 2)
    for row, forward, backward in timed:
        row |= {"forward": summary(forward), "backward": summary(backward)}
    return rows


def _contestants(
    rival: Rival, inputs: list[Tensor], row: dict[str, Any]
) -> tuple[Contestant, Contestant]:
    """The forward and the backward pass; each has run once, and their memory is in the row."""

    def forward(number: int) -> Tensor:
        return rival.forward(inputs[number])

    # Two graphs of gradients are kept; more would not fit beside upstream's edge tensors.
    with rival.context():
        outputs = [forward(number) for number in (0, 1)]
        grads = [torch.randn_like(out) for out in outputs]
        row["peak_bytes"] = peak_bytes(
            lambda number: torch.autograd.grad(forward(number), inputs[number], grads[number]),
            inputs[0].device,
        )

    def backward(number: int) -> None:
        at = number % 2
        torch.autograd.grad(outputs[at], inputs[at], grads[at], retain_graph=True)

    return (
        Contestant(rival.name, forward, rival.context),
        Contestant(rival.name, backward),
    )


def markdown(results: dict[str, Any]) -> str:
    """The tables: what ran, and milliseconds, megabytes and ratios of each cell."""
    lines = ["# Message passing on a GPU", "", f"`{results['command']}`", ""]
    lines += [f"- {name}: {value}" for name, value in results["machine"].items()]
    lines += [f"- {name}: {value:,.0f}" for name, value in results["bandwidth"].items()]
    lines += ["", "| stage | seconds | exit code | last line |", "|---|---|---|---|"]
    for name, steps in results["stages"].items():
        for step in steps:
            lines.append(
                f"| {name} | {step['seconds']} | {step['exit_code']} | {step['last_line']} |"
            )
    lines += [
        "",
        "Forward and backward in milliseconds (medians); gather: bytes of the features of all",
        "edges over the time of the forward pass; ratios are of a rival's figures over ours.",
        "",
        "| graph | layer | width | dtype | rival | forward | backward | peak MB | gather GB/s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for cell in results["cells"]:
        place = f"| {cell['graph']} | {cell['layer']} | {cell['width']} | {cell['dtype']} "
        if "failed" in cell:
            lines.append(f"{place}| {cell['rival']} | {cell['failed']} | | | |")
            continue
        size = 4 if cell["dtype"] == "float32" else 2
        gathered = cell["num_edges"] * cell["width"] * size / cell["forward"]["median"] / 1e6
        peak = "" if cell["peak_bytes"] is None else f"{cell['peak_bytes'] / 1e6:,.0f}"
        lines.append(
            f"{place}| {cell['rival']} | {cell['forward']['median']:.3f} "
            f"| {cell['backward']['median']:.3f} | {peak} | {gathered:,.0f} |"
        )
    return "\n".join([*lines, "", *_ratios(results["cells"])])


def _ratios(cells: list[dict[str, Any]]) -> list[str]:
    lines = ["| graph | layer | width | dtype | rival | forward | backward | memory |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    timed = [cell for cell in cells if "failed" not in cell]
    for ours in (cell for cell in timed if cell["rival"] == "ours"):
        key = ("graph", "layer", "width", "dtype")
        for cell in timed:
            if cell is ours or any(cell[k] != ours[k] for k in key):
                continue
            ratios = [
                f"{cell[k]['median'] / ours[k]['median']:.2f}" for k in ("forward", "backward")
            ]
            memory = f"{cell['peak_bytes'] / ours['peak_bytes']:.1f}" if ours["peak_bytes"] else ""
            place = " | ".join(str(ours[k]) for k in key)
            lines.append(f"| {place} | {cell['rival']} | {' | '.join(ratios)} | {memory} |")
    return lines


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
