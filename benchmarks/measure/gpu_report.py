"""The report of measurements on a GPU: tables, floors and a figure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from measure.agreement import worst
from measure.report import Floor, floor_lines, highest, lowest, table

Row = dict[str, Any]

DIRECTIONS = ("forward", "backward")
_PLACE = ("graph", "layer", "width", "dtype")
_ATTENTION = ("GATv2", "Transformer")
_SUMS = ("GCN", "SAGE-mean")

# How many rows of the nodes' features, outputs or gradients a pass gathers for each edge, when
# nothing is stored for edges: each once for every walk over the edges. That is one, but the
# gradient of a maximum compares outputs as well, and that of attention is two walks: one gathers
# features, the other gradients and, for scores that depend on both ends, features. Keys and values
# are one tensor here. What is read once for each node, indices, and the self-loops that layers add
# are not counted. Of edge programs, which have operands of all kinds, it is not said.
_GATHERED_ROWS = {
    "GCN": {"forward": 1, "backward": 1},
    "SAGE-mean": {"forward": 1, "backward": 1},
    "SAGE-max": {"forward": 1, "backward": 2},
    "GAT": {"forward": 1, "backward": 2},
    "GATv2": {"forward": 1, "backward": 3},
    "Transformer": {"forward": 1, "backward": 3},
}


def _itemsize(row: Row) -> int:
    return 4 if row["dtype"] == "float32" else 2


def _name(row: Row) -> str:
    return " ".join(str(row[key]) for key in _PLACE)


def gathered_gb_per_s(row: Row, direction: str) -> float:
    """Bytes that have to be gathered for all edges, over the time of a pass."""
    rows = row["num_edges"] * _GATHERED_ROWS[row["layer"]][direction]
    return float(rows * row["width"] * _itemsize(row) / row[direction]["median"] / 1e6)


def bandwidth_share(row: Row, results: dict[str, Any], direction: str) -> float:
    """Percent of the bandwidth that bounds a gather: the last cache's, where all fits into it."""
    gathers_two = _GATHERED_ROWS[row["layer"]][direction] > 1
    held = (2 if gathers_two else 1) * row["num_nodes"] * row["width"] * _itemsize(row)
    bound = "cached_gather_gb_per_s" if held <= results["cache_bytes"] else "copy_gb_per_s"
    return 100 * gathered_gb_per_s(row, direction) / float(results["bandwidth"][bound])


def _whole_peak(row: Row) -> int:
    return max(row["peak_bytes"].values())


def pairs(rows: Iterable[Row], column: str = "ours") -> list[tuple[Row, Row]]:
    """Each row that was timed, and that of our column in its cell."""
    timed = [row for row in rows if "failed" not in row]
    cells = {_cell(row): row for row in timed if row["rival"] == column}
    return [
        (row, cells[_cell(row)]) for row in timed if row["rival"] != column and _cell(row) in cells
    ]


def _cell(row: Row) -> tuple[Any, ...]:
    return (*(row[key] for key in _PLACE), row["beside"])


def _gains(
    rows: Iterable[Row],
    rival: str,
    direction: str,
    wanted: Callable[[Row], bool],
    column: str = "ours",
    clock: str = "median",
) -> dict[str, float]:
    """How many times faster we are, by cell."""
    return {
        _name(ours): row[direction][clock] / ours[direction][clock]
        for row, ours in pairs(rows, column)
        if row["rival"] == rival and wanted(row) and clock in row[direction]
    }


def floors(results: dict[str, Any]) -> list[Floor]:
    """The floors for an H200, met or not."""
    rows = results["cells"]
    ours = [
        row
        for row in rows
        if (row["rival"], row["beside"]) == ("ours", "upstream") and "failed" not in row
    ]

    def is_float32(row: Row) -> bool:
        return bool(row["dtype"] == "float32")

    def is_anchor(row: Row) -> bool:
        return _name(row) == "tolokers GATv2 256 float32"

    def of(*layers: str) -> Callable[[Row], bool]:
        return lambda row: row["layer"] in layers

    listed = [
        lowest(f"over PyG, float32, {way}, slowest cell", _gains(rows, "upstream", way, w), 1)
        for way, w in ((way, is_float32) for way in DIRECTIONS)
    ]
    for way in DIRECTIONS:
        found = _gains(rows, "upstream", way, is_float32, clock="wall")
        listed.append(lowest(f"over PyG, float32, {way}, by the host's clock", found, 1))
    for way, required in zip(DIRECTIONS, (20, 8), strict=True):
        found = _gains(rows, "upstream", way, is_anchor)
        listed.append(lowest(f"over PyG, tolokers GATv2 of 4 heads of 64, {way}", found, required))
    memory = {
        _name(b): _whole_peak(a) / _whole_peak(b)
        for a, b in pairs(rows)
        if a["rival"] == "upstream" and is_anchor(a) and b["peak_bytes"]
    }
    listed.append(lowest("peak memory below PyG's, tolokers GATv2", memory, 30))
    for layers, way, required in (
        (_ATTENTION, "forward", 1.3),
        (_ATTENTION, "backward", 2),
        (("SAGE-max",), "forward", 1.2),
        (("SAGE-max",), "backward", 1.2),
        (_SUMS, "forward", 1),
        (_SUMS, "backward", 1),
    ):
        found = _gains(rows, "turbo-gnn", way, of(*layers))
        listed.append(lowest(f"over turbo-gnn, {', '.join(layers)}, {way}", found, required))
    for way in DIRECTIONS:
        found = _gains(rows, "turbo-gnn", way, of(*_SUMS), "ours-measured")
        what = f"ours-measured over turbo-gnn, {', '.join(_SUMS)}, {way}"
        listed.append(lowest(what, found, 1))
    for way in DIRECTIONS:
        shares = {
            _name(row): bandwidth_share(row, results, way)
            for row in ours
            if row["width"] == 256 and is_float32(row) and results["bandwidth"]
            if row["layer"] in _GATHERED_ROWS
        }
        listed.append(lowest(f"share of measured bandwidth, {way}, width 256", shares, 70, " %"))
    halves = {_name(row): row for row in ours if row["dtype"] == "bfloat16"}
    for way in DIRECTIONS:
        gains = {
            name: row[way]["median"] / half[way]["median"]
            for row in ours
            if (half := halves.get(name := _name({**row, "dtype": "bfloat16"}))) is not None
            and is_float32(row)
        }
        listed.append(lowest(f"bfloat16 over float32, {way}, slowest cell", gains, 1.6))
    repeats = {_name(row): float(row["repeats"]) for row in ours}
    listed.append(lowest("results with the same bits in two runs", repeats, 1, ""))
    errors = {
        f"{_name(row)}, {row['rival']}": worst(row["errors"]) / allowed
        for row in rows
        if (allowed := row.get("errors", {}).get("allowed")) is not None
    }
    listed.append(highest("error of any column over what is allowed", errors, 1, "x"))
    return listed


def markdown(results: dict[str, Any]) -> str:
    """Floors, what ran, and milliseconds, megabytes and ratios of each cell."""
    lines = ["# Message passing on a GPU", ""]
    lines += [f"- `{command}`" for command in results["commands"]]
    lines += [f"- {name}: {value}" for name, value in results["machine"].items()]
    lines += [f"- {name}: {value:,.0f}" for name, value in results["bandwidth"].items()]
    lines += ["", "## Floors", "", *floor_lines(floors(results))]
    lines += ["## Geometric means over upstream", "", *_means(results["cells"]), "## Stages", ""]
    keys = ("stage", "seconds", "exit_code", "last_line")
    stages = ([str(step[key]) for key in keys] for step in results["stages"])
    lines += table(["stage", "seconds", "exit code", "last line"], stages)
    looked = [step["output"] for step in results["stages"] if step["stage"] == "preflight"]
    if looked:
        lines += ["## Preflight", "", *(f"- {line}" for line in looked[-1]), ""]
    if results["left"]:
        lines += ["Left when the time was over: " + "; ".join(results["left"]) + ".", ""]
    heads = [*_PLACE, "rival", *(f"{way}{what}" for what in _FIGURES for way in DIRECTIONS)]
    lines += [
        "## Milliseconds",
        "",
        "Medians, by the clock of the GPU. Host: by the clock of the host, of steps that follow",
        "each other without waiting, so that it is the longer one of what host and GPU need. Peak:",
        "memory during a pass above that before the forward pass. Gather: bytes that are gathered",
        "for all edges if nothing is stored for them, over the time, and percent of the measured",
        "bandwidth. Error: the larger one of output and gradient, against upstream in float64 (in",
        "float32 where memory is short), or the column that is named.",
        "",
        *table([*heads, "error"], (_cells(row, results) for row in results["cells"])),
        "## Times and memory of other columns over ours",
        "",
        *table([*_PLACE, "rival", *DIRECTIONS, "memory"], map(_ratios, pairs(results["cells"]))),
        "## Kernels that competed under the setting `measure`",
        "",
        "Milliseconds of each that may make a call; the least is taken. A call is its operator,",
        "what distinguishes it, and whether it gathers along the transpose.",
        "",
        *table([*_PLACE, "call", "milliseconds"], _competitions(results["cells"])),
    ]
    return "\n".join(lines)


def _means(rows: list[Row]) -> list[str]:
    """How many times faster we are on the mean, and the least without the smallest graph."""
    lines = []
    for dtype in ("float32", "bfloat16"):
        for way in DIRECTIONS:
            gains = _gains(rows, "upstream", way, lambda row, d=dtype: row["dtype"] == d)
            larger = [gain for name, gain in gains.items() if not name.startswith("cora ")]
            if gains and larger:
                mean = statistics.geometric_mean(gains.values())
                figures = [f"{mean:.1f}", f"{min(gains.values()):.2f}", f"{min(larger):.1f}"]
                lines.append([dtype, way, str(len(gains)), *figures])
    memory = [
        _whole_peak(a) / _whole_peak(b)
        for a, b in pairs(rows)
        if a["rival"] == "upstream" and b["peak_bytes"]
    ]
    if memory:
        mean = statistics.geometric_mean(memory)
        lines.append(
            ["all", "peak memory", str(len(memory)), f"{mean:.1f}", f"{min(memory):.2f}", ""]
        )
    return table(["dtype", "of", "cells", "mean", "least", "least without Cora"], lines)


def _competitions(rows: Iterable[Row]) -> Iterable[list[str]]:
    """The times of all kernels, for each call of a column that took the fastest."""
    for row in rows:
        for call, milliseconds in row.get("kernels", {}).items():
            place = [str(row[key]) for key in _PLACE]
            times = sorted(milliseconds.items(), key=lambda item: item[1])
            yield [*place, call, ", ".join(f"{name} {time:.3f}" for name, time in times)]


_FIGURES = ("", ", host", ", peak MB", ", gather GB/s")


def _cells(row: Row, results: dict[str, Any]) -> list[str]:
    place = [str(row[key]) for key in (*_PLACE, "rival")]
    error = _error(row)
    if "failed" in row:
        blank = [""] * (len(_FIGURES) * len(DIRECTIONS) - 1)
        return [*place, row["failed"].replace("|", "/"), *blank, error]
    times = [f"{row[way]['median']:.3f}" for way in DIRECTIONS]
    walls = [f"{row[way]['wall']:.3f}" if "wall" in row[way] else "" for way in DIRECTIONS]
    peaks = [
        f"{row['peak_bytes'][way] / 1e6:,.0f}" if row["peak_bytes"] else "" for way in DIRECTIONS
    ]
    gathers = [_gather(row, results, way) for way in DIRECTIONS]
    return [*place, *times, *walls, *peaks, *gathers, error]


def _gather(row: Row, results: dict[str, Any], direction: str) -> str:
    if row["layer"] not in _GATHERED_ROWS:
        return ""
    text = f"{gathered_gb_per_s(row, direction):,.0f}"
    if results["bandwidth"]:
        text += f" ({bandwidth_share(row, results, direction):.0f} %)"
    return text


def _error(row: Row) -> str:
    if "errors" not in row:
        return ""
    by = row["errors"]["of"]
    return f"{worst(row['errors']):.1e}" + ("" if by == "upstream" else f" ({by})")


def _ratios(pair: tuple[Row, Row]) -> list[str]:
    row, ours = pair
    gains = [f"{row[way]['median'] / ours[way]['median']:.2f}" for way in DIRECTIONS]
    memory = f"{_whole_peak(row) / _whole_peak(ours):.1f}" if ours["peak_bytes"] else ""
    return [*(str(row[key]) for key in (*_PLACE, "rival")), *gains, memory]


def plot(results: dict[str, Any], path: Path) -> None:
    """Draw each rival's times over ours in float32 at width 256, by graph and layer.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    drawn = [
        (row, ours)
        for row, ours in pairs(results["cells"])
        if row["dtype"] == "float32" and row["width"] == 256
    ]
    rivals = list(dict.fromkeys(row["rival"] for row, _ in drawn))
    graphs = list(dict.fromkeys(row["graph"] for row, _ in drawn))
    layers = list(dict.fromkeys(row["layer"] for row, _ in drawn))
    if not drawn:
        return
    figure, axes = pyplot.subplots(
        len(rivals), 2, figsize=(14, 3 * len(rivals)), squeeze=False, sharex=True
    )
    width = 0.8 / len(layers)
    for line, rival in zip(axes, rivals, strict=True):
        for axis, way in zip(line, DIRECTIONS, strict=True):
            for number, layer in enumerate(layers):
                found = {
                    row["graph"]: row[way]["median"] / ours[way]["median"]
                    for row, ours in drawn
                    if (row["rival"], row["layer"]) == (rival, layer)
                }
                places = [i + (number - (len(layers) - 1) / 2) * width for i in range(len(graphs))]
                heights = [found.get(graph, math.nan) for graph in graphs]
                axis.bar(places, heights, width, label=layer)
            axis.axhline(1, color="black", linewidth=0.8)
            axis.set_yscale("log")
            axis.set_title(f"{rival}: {way} time over ours")
            axis.set_xticks(range(len(graphs)), graphs, rotation=20)
    axes[0][0].legend(ncols=3, fontsize="small")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
