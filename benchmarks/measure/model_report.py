"""The report of the model's predictions for all layers, beside published and measured figures."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastgraph.tune.gpus import SHEETS, sheet_of
from measure.graphs import GraphData
from measure.model import Graph, predict_cell
from measure.model_kernels import HEADS, LAYERS, SIZES, WITH_SELF_LOOPS, Table
from measure.model_slots import Lengths, Rows
from measure.report import table as lines_of

DIRECTIONS = ("forward", "backward")
_DETAILED = 256
"""The width whose kernels are listed one by one."""

Cell = dict[str, Any]
Degrees = Mapping[str, tuple[Lengths, Lengths]]

# arXiv 2605.31500, table of tolokers-2 on an A100 of 80 GB in float32: milliseconds of forward and
# backward pass. Its kernels walk over a row, and a head of it, with a warp, and cut none.
PUBLISHED = (
    ("GATv2", "DGL", 8.47, 11.13),
    ("GATv2", "PyG", 18.71, 21.42),
    ("GATv2", "fused CSR", 1.18, 5.44),
    ("Transformer", "DGL, with its linear layers and norm", 3.52, 5.47),
    ("Transformer", "fused CSR, with its linear layers and norm", 1.50, 5.14),
    ("Transformer", "tensor cores, with its linear layers and norm", 1.10, 6.58),
    ("GCN", "DGL", 1.13, 0.75),
    ("GCN", "PyG", 6.32, 6.02),
    ("GCN", "cuSPARSE with a cached transpose", 0.33, 0.38),
    ("SAGE-max", "DGL, minimum", 0.91, 0.26),
    ("SAGE-max", "fused CSR, minimum", 0.38, 0.19),
)


def degrees(graph: GraphData) -> tuple[Lengths, Lengths]:
    """In- and out-degrees without self-loops of layers."""
    found = (torch.bincount(graph.edge_index[i], minlength=graph.num_nodes) for i in (1, 0))
    incoming, outgoing = (counts.numpy().astype(np.int64) for counts in found)
    return incoming, outgoing


def _graph(ends: tuple[Lengths, Lengths], layer: str, order: str) -> Graph:
    # Those that are in the data already are replaced; they are few.
    more = 1 if layer in WITH_SELF_LOOPS else 0
    incoming, outgoing = (Rows(lengths + more, order) for lengths in ends)
    return Graph(incoming, outgoing)


def predicted(table: Table, graphs: Degrees, order: str, widths: Sequence[int]) -> list[Cell]:
    """A cell for each GPU, graph, layer, width and dtype."""
    cells: list[Cell] = []
    for name, ends in graphs.items():
        for layer in LAYERS:
            graph = _graph(ends, layer, order)
            for sheet in SHEETS:
                for width in widths:
                    for dtype in SIZES:
                        place = {"gpu": sheet.name, "graph": name, "layer": layer}
                        cell = {**place, "width": width, "dtype": dtype}
                        found = predict_cell(table, sheet, graph, layer, width, dtype)
                        cells.append(cell | _numbers(found, width))
    return cells


def _numbers(found: Any, width: int) -> Cell:
    if isinstance(found, str):
        return {"missing": found}
    numbers: Cell = {way: round(sum(k.milliseconds for k in found[way]), 4) for way in DIRECTIONS}
    numbers["launches"] = {way: len(found[way]) for way in DIRECTIONS}
    if width == _DETAILED:
        numbers["kernels"] = {
            way: [f"{k.kernel} {k.milliseconds:.4f} ({k.bound})" for k in found[way]]
            for way in DIRECTIONS
        }
    return numbers


def compared(cells: Iterable[Cell], files: Iterable[Path]) -> list[dict[str, Any]]:
    """How far predictions are from our column of each measured cell, on GPUs with a sheet.

    Returns:
        For each file and pass: mean of the absolute errors in percent of what was measured, the
        worst cell, and how many there were.
    """
    keys = ("graph", "layer", "width", "dtype")
    found = []
    for path in files:
        measured = json.loads(path.read_text())
        sheet = sheet_of(measured.get("machine", {}).get("GPU", ""))
        if sheet is None:
            continue
        rows = {
            tuple(row[key] for key in keys): row
            for row in measured["cells"]
            if (row["rival"], row["beside"]) == ("ours", "upstream") and "failed" not in row
        }
        for way in DIRECTIONS:
            errors = {
                " ".join(map(str, place)): 100 * (cell[way] / rows[place][way]["median"] - 1)
                for cell in cells
                if cell["gpu"] == sheet.name and "missing" not in cell
                if (place := tuple(cell[key] for key in keys)) in rows
            }
            if not errors:
                continue
            worst = max(errors, key=lambda name: abs(errors[name]))
            found.append(
                {
                    "file": path.name,
                    "gpu": sheet.name,
                    "pass": way,
                    "cells": len(errors),
                    "mean_absolute_percent": statistics.mean(map(abs, errors.values())),
                    "worst": f"{worst}: {errors[worst]:+.0f} %",
                }
            )
    return found


class _Counting(TorchDispatchMode):
    """Counts operations of torch that compute; views start no kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        is_view = isinstance(out, torch.Tensor) and out._is_view()
        self.count += not (is_view or func.overloadpacket.__name__ in ("detach", "empty"))
        return out


def launches(cells: Iterable[Cell]) -> dict[str, dict[str, list[int]]]:
    """Kernels that a pass of each layer starts on a small graph: ours, and at least upstream's.

    Upstream's are operations of torch that are no views, each of which is a kernel or more.
    """
    from measure.rivals import message_passing

    index = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    ours: dict[str, dict[str, int]] = {}
    for cell in cells:
        if "missing" not in cell:
            least = ours.setdefault(cell["layer"], cell["launches"])
            ours[cell["layer"]] = {
                way: min(least[way], cell["launches"][way]) for way in DIRECTIONS
            }
    found = {}
    for layer, counts in ours.items():
        width = 4 * HEADS
        module, x = message_passing(layer, width), torch.randn(3, width, requires_grad=True)
        with _Counting() as forward:
            out = module(x, index)
        given = torch.ones_like(out)
        with _Counting() as backward:
            torch.autograd.grad(out, x, given)
        upstream = {"forward": forward.count, "backward": backward.count}
        found[layer] = {way: [counts[way], upstream[way]] for way in DIRECTIONS}
    return found


def markdown(results: dict[str, Any], graphs: Degrees, table: Table) -> str:
    """Predictions at width 256, lane slots, and both comparisons."""
    cells = results["cells"]
    lines = [
        "# Message passing on GPUs, by a model",
        "",
        "**Predicted, never measured**: no GPU has run these kernels for this page. How is in",
        "`measure/model.py`, from which data sheets in `fastgraph/tune/gpus.py`. It ranks",
        "kernels and tells what bounds them; milliseconds may be off by 40 %, ratios between",
        "our own kernels by less.",
        "",
        f"- `{results['command']}`",
        f"- machine code: table {results['table']}, rows dealt to warps by {results['order']}",
        "",
        "## Milliseconds: 256 channels, 4 heads in attention",
        "",
    ]
    names = [sheet.name for sheet in SHEETS]
    heads = [f"{name}, {way}" for name in names for way in DIRECTIONS]
    lines += lines_of(
        ["graph", "layer", "dtype", *heads, "bound on the first"], _wide(cells, names)
    )
    missing = sorted({cell["missing"] for cell in cells if "missing" in cell})
    if missing:
        lines += ["Not predicted:", "", *(f"- {why}" for why in missing), ""]
    lines += [
        "## Beside published figures",
        "",
        "tolokers on an A100, float32, 256 channels; forward / backward. The last column is",
        "the model of our loops where each row, and head of it, has a warp of its own and",
        "none is cut, as in the published kernels. It tells how far the model can be trusted",
        "where loops do the same work. Their backward passes add by atomics what ours",
        "gathers, and that of the minimum scatters saved winners, so these are other loops.",
        "",
        *lines_of(
            ["layer", "published", "theirs", "ours, predicted", "a warp a row, predicted"],
            _published(cells, graphs, table),
        ),
        "## Lane slots",
        "",
        "Slots that groups of lanes have for entries, for each entry; 1 leaves no lane idle.",
        "",
        *lines_of(["graph", *_SLOTS], _slots(graphs)),
        "## Small graphs",
        "",
        "Kernels that a pass starts without long rows, ours and at least upstream's",
        "(operations of torch that compute). Each costs the host some microseconds, and that",
        "is what a small graph takes. Ours are no more for any layer, so the model knows no",
        "size below which upstream would be faster, and no `min_edges` for GPUs follows from",
        "it.",
        "",
        *lines_of(
            ["layer", *(f"{who}, {way}" for way in DIRECTIONS for who in ("ours", "upstream"))],
            (
                [layer, *(str(n) for way in DIRECTIONS for n in counts[way])]
                for layer, counts in results["launches"].items()
            ),
        ),
        "## Beside measurements",
        "",
    ]
    if not results["compared"]:
        return "\n".join([*lines, "There are none yet."])
    keys = ("file", "gpu", "pass", "cells", "mean_absolute_percent", "worst")
    return "\n".join(
        [
            *lines,
            *lines_of(
                ["file", "GPU", "pass", "cells", "mean absolute error, %", "worst"],
                ([_text(row[key]) for key in keys] for row in results["compared"]),
            ),
        ]
    )


def _text(value: Any) -> str:
    return f"{value:.0f}" if isinstance(value, float) else str(value)


def _wide(cells: Sequence[Cell], gpus: Sequence[str]) -> Iterable[list[str]]:
    """A line for each graph, layer and dtype, with the passes on all GPUs."""
    by_place: dict[tuple[str, str, str], dict[str, Cell]] = {}
    for cell in cells:
        if cell["width"] == _DETAILED and "missing" not in cell:
            place = (cell["graph"], cell["layer"], cell["dtype"])
            by_place.setdefault(place, {})[cell["gpu"]] = cell
    for place, found in by_place.items():
        times = [f"{found[gpu][way]:.3f}" for gpu in gpus for way in DIRECTIONS]
        slowest = (max(found[gpus[0]]["kernels"][way], key=_milliseconds) for way in DIRECTIONS)
        bounds = " / ".join(kernel.partition("(")[2].rstrip(")") for kernel in slowest)
        yield [*place, *times, bounds]


def _milliseconds(kernel: str) -> float:
    return float(kernel.partition("(")[0].split()[-1])


_SLOTS = {
    "2 groups in a warp, rows as numbered": (16, "rows"),
    "2 groups, a list of tasks": (16, "tasks"),
    "4 groups, rows as numbered": (8, "rows"),
    "4 groups, a list of tasks": (8, "tasks"),
}


def _slots(graphs: Degrees) -> Iterable[list[str]]:
    for name, (incoming, _) in graphs.items():
        walks = (Rows(incoming, order).walk(lanes, 4) for lanes, order in _SLOTS.values())
        yield [name, *(f"{walk.slots:.2f}" for walk in walks)]


def _published(cells: Sequence[Cell], graphs: Degrees, table: Table) -> Iterable[list[str]]:
    if "tolokers" not in graphs:
        return
    sheet = sheet_of("A100")
    assert sheet is not None
    wanted = {"gpu": sheet.name, "graph": "tolokers", "width": 256, "dtype": "float32"}
    for layer, whose, forward, backward in PUBLISHED:
        graph = _graph(graphs["tolokers"], layer, "uncut")
        uncut = _numbers(predict_cell(table, sheet, graph, layer, 256, "float32"), 0)
        ours = next(cell for cell in cells if (wanted | {"layer": layer}).items() <= cell.items())
        pairs = (
            " / ".join(f"{c[way]:.2f}" for way in DIRECTIONS)
            for c in (ours, uncut)
            if "missing" not in c
        )
        yield [layer, whose, f"{forward:.2f} / {backward:.2f}", *pairs]
