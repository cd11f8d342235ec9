"""The report of ``any_message.py``: a table of each graph, means and floors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from measure.report import Floor, floor_lines, geometric_mean, machine_lines, table

Cell = dict[str, Any]

_MIB = 2**20


def _median(cell: Cell, side: str, way: str) -> float:
    return float(cell["times"][side][way]["median"])


def times_as_fast(cell: Cell, way: str) -> float:
    """How many times as fast as upstream a pass is."""
    return _median(cell, "plain", way) / _median(cell, "ours", way)


def both_passes(cell: Cell) -> float:
    """How many times as fast as upstream both passes together are."""
    plain, ours = (
        _median(cell, side, "forward") + _median(cell, side, "backward")
        for side in ("plain", "ours")
    )
    return plain / ours


def at_most(cell: Cell) -> float | None:
    """How many times as fast as upstream products alone could be, at the speed of torch's own.

    ``None`` for cells without products, or that were recorded without their numbers.
    """
    count = sum(cell.get("multiplications", {}).values())
    if not cell["products"] or not count:
        return None
    least = 2e-6 * count * cell["edges"] / cell["product_gflops"]  # milliseconds
    return sum(_median(cell, "plain", way) for way in ("forward", "backward")) / least


def times_below(cell: Cell) -> float:
    """How many times lower the peak memory of both passes is; a page at least counts as used."""
    plain, ours = (max(cell["memory"][side], 4096) for side in ("plain", "ours"))
    return float(plain / ours)


def times_below_at_most(cell: Cell) -> float | None:
    """How many times lower the peak would be if it were outputs and gradients, and nothing else.

    ``None`` for cells that were recorded without.
    """
    least = cell["memory"].get("results")
    return float(max(cell["memory"]["plain"], 4096) / max(least, 4096)) if least else None


def floors(cells: Sequence[Cell]) -> list[Floor]:
    """The floors for messages that are computed by edge programs."""
    alone = [cell for cell in cells if cell["part"] == "propagate"]
    products = [cell for cell in alone if cell["products"]]
    others = [cell for cell in alone if not cell["products"]]
    what = "message passing alone, geometric mean"
    return [
        _floor(f"{what} of both passes, elementwise messages", others, both_passes, 8),
        _floor(f"{what} of both passes, products of each edge", products, both_passes, 4),
        _floor(f"{what} of peak memory", alone, times_below, 10),
    ]


def _floor(
    what: str, cells: Sequence[Cell], value: Callable[[Cell], float], required: float
) -> Floor:
    if not cells:
        return Floor(what, f">= {required:g}x", "not measured", None)
    mean = _mean(cells, value)
    return Floor(what, f">= {required:g}x", f"{mean:.2f}x", mean >= required)


def _mean(cells: Iterable[Cell], value: Callable[[Cell], float]) -> float:
    return geometric_mean([value(cell) for cell in cells])


def markdown(results: dict[str, Any]) -> str:
    """The whole report."""
    cells: list[Cell] = results["cells"]
    lines = [
        "# Any message, on several graphs",
        "",
        f"`{results['command']}`",
        "",
        "float32, medians of processor time on one thread, upstream and ours in turns, short ones"
        " behind another forward pass on the same side, on a graph that is known; memory: the "
        "peak of both passes above what was resident before. The difference is the largest one of"
        " outputs and gradients, over the norm of upstream's; near 1 where a gradient is 0 but for "
        "rounding, as that of `PointTransformerConv.lin_dst` is, of scores that all neighbours "
        "share. Message passing alone: the calls of `propagate`, for layers whose messages are "
        "edge programs. *Both at most* is how many "
        "times as fast both passes would be if products of each edge, those that the gradients "
        "compute again among them, took as long as torch's own product of two large matrices "
        "does, and all else no time at all. *Below at most* is how many times less memory outputs "
        "and gradients alone take, which are all there at the end. Every cell is routed here; "
        "those that are not by default, as they have too few edges to gain from it, say so.",
        "",
        "## Floors",
        "",
        *floor_lines(floors(cells)),
        "## Geometric means",
        "",
        *_means(cells),
    ]
    for graph, channels, part in _groups(cells):
        group = [c for c in cells if _group(c) == (graph, channels, part)]
        title = "whole layers" if part == "layer" else "message passing alone"
        lines += [
            f"## {graph}, {channels} channels, {title}",
            "",
            f"{group[0]['nodes']:,} nodes and {group[0]['edges']:,} edges.",
            "",
            *_table(group),
        ]
    if results.get("left_out"):
        lines += ["Upstream has no memory for " + ", ".join(results["left_out"]) + ".", ""]
    return "\n".join([*lines, *machine_lines(results["machine"])])


def _group(cell: Cell) -> tuple[str, int, str]:
    return cell["graph"], cell["channels"], cell["part"]


def _groups(cells: Iterable[Cell]) -> list[tuple[str, int, str]]:
    return list(dict.fromkeys(map(_group, cells)))


def _means(cells: Sequence[Cell]) -> list[str]:
    rows = []
    kinds = {"elementwise": False, "products": True}
    for (graph, channels, part), kind in itertools.product(_groups(cells), kinds):
        group = [c for c in cells if _group(c) == (graph, channels, part) and c["programs"]]
        group = [cell for cell in group if cell["products"] is kinds[kind]]
        if not group:
            continue
        ways = (
            lambda c: times_as_fast(c, "forward"),
            lambda c: times_as_fast(c, "backward"),
            both_passes,
            times_below,
        )
        means = [f"{_mean(group, way):.2f}x" for way in ways]
        most = [bound for cell in group if (bound := times_below_at_most(cell)) is not None]
        means.append(f"{geometric_mean(most):.2f}x" if most else "")
        rows.append([f"{graph}, {channels} channels, {part}, {kind}", str(len(group)), *means])
    head = ["of edge programs", "cells", "forward", "backward", "both", "memory", "below at most"]
    return table(head, rows)


def _table(cells: Iterable[Cell]) -> list[str]:
    head = ["configuration"]
    for way in ("forward", "backward"):
        head += [f"{way}, plain, ms", "ours, ms", "times as fast"]
    rows = []
    for cell in cells:
        row = [cell["configuration"]]
        for way in ("forward", "backward"):
            row += [f"{_median(cell, side, way):.3g}" for side in ("plain", "ours")]
            row.append(f"{times_as_fast(cell, way):.2f}x")
        row += [f"{cell['memory'][side] / _MIB:.1f}" for side in ("plain", "ours")]
        row += [f"{times_below(cell):.1f}x", f"{cell['difference']:.1e}"]
        bounds = times_below_at_most(cell), at_most(cell)
        row += ["" if bound is None else f"{bound:.1f}x" for bound in bounds]
        rows.append([*row, "" if cell.get("routed_by_default", True) else "no"])
    head += ["memory, plain, MiB", "ours, MiB", "times below", "difference"]
    return table([*head, "below at most", "both at most", "by default"], rows)
