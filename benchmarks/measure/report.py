"""The floors, and the tables as Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Cells = dict[str, dict[str, Any]]

_MIB = 2**20

ATTENTION = ("GATv2", "GAT", "Transformer")
"""Layers of the attention family, whose floors are apart."""

# What gathers beside the minimal loops, by its title. Floors are those of native calls: what an
# operator does around one in Python has its own, that of a routed call.
_OPERATORS = {"spmm": "spmm", "segment_reduce": "segment_reduce"}
_NATIVE = {"native spmm": "native_spmm", "native segment_reduce": "native_segment_reduce"}


@dataclass(frozen=True)
class Floor:
    """A required figure. ``met`` is ``None`` where the run did not measure it."""

    what: str
    required: str
    measured: str
    met: bool | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def milliseconds(seconds: float | None) -> str:
    """As a table has it; nothing where nothing was measured."""
    return "" if seconds is None else f"{1e3 * seconds:.0f}"


def geometric_mean(values: Sequence[float]) -> float:
    """NaN for no values."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def median(cell: dict[str, Any], group: str, column: str) -> float | None:
    """Milliseconds of a column, if it was measured."""
    spread = cell.get(group, {}).get(column)
    return None if spread is None else float(spread["median"])


def ratio(cell: dict[str, Any], group: str, over: str, under: str) -> float | None:
    """How many times faster ``under`` is than ``over``."""
    slow, fast = median(cell, group, over), median(cell, group, under)
    return None if slow is None or fast is None else slow / fast


def _ratios(cells: Cells, group: str, over: str, under: str) -> dict[str, float]:
    found = {name: ratio(cell, group, over, under) for name, cell in cells.items()}
    return {name: value for name, value in found.items() if value is not None}


def _memory_ratio(cell: dict[str, Any]) -> float | None:
    memory = cell.get("memory")
    return memory["upstream"] / max(memory["ours"], 1) if memory else None


def lowest(what: str, values: dict[str, float], required: float, unit: str = "x") -> Floor:
    """A floor for the lowest of the values."""
    if not values:
        return Floor(what, f">= {required:g}{unit}", "not measured", None)
    name = min(values, key=values.__getitem__)
    lowest = values[name]
    return Floor(what, f">= {required:g}{unit}", f"{lowest:.2f}{unit} ({name})", lowest >= required)


def _mean(what: str, values: dict[str, float], required: float) -> Floor:
    if not values:
        return Floor(what, f">= {required:g}x", "not measured", None)
    mean = geometric_mean(list(values.values()))
    return Floor(what, f">= {required:g}x", f"{mean:.2f}x", mean >= required)


def highest(what: str, values: dict[str, float], limit: float, unit: str) -> Floor:
    if not values:
        return Floor(what, f"<= {limit:g} {unit}", "not measured", None)
    name = max(values, key=values.__getitem__)
    highest = values[name]
    return Floor(what, f"<= {limit:g} {unit}", f"{highest:.1f} {unit} ({name})", highest <= limit)


def floors(results: dict[str, Any]) -> list[Floor]:
    """All floors, met or not."""
    cells: Cells = results["cells"]
    listed = []
    for group, title in (("layer", "layer"), ("message_passing", "message passing alone")):
        for over, under in (
            ("upstream", "ours"),
            ("upstream", "ours-fresh"),
            ("upstream-csr", "ours-csr"),
            ("upstream-csr", "ours"),
        ):
            if (group, under) != ("message_passing", "ours-fresh"):
                values = _ratios(cells, group, over, under)
                listed.append(lowest(f"{title}: {under} over {over}, slowest cell", values, 1))
    compiled = {}
    for name, cell in cells.items():
        gain, by_compiling = ratio(cell, "layer", "upstream", "ours"), compile_gain(cell)
        if gain is not None and by_compiling is not None:
            compiled[name] = gain / by_compiling
    listed.append(lowest("layer: ours over upstream compiled, slowest cell", compiled, 1))
    attention = {name: cell for name, cell in cells.items() if name.endswith(ATTENTION)}
    sums = {name: cell for name, cell in cells.items() if name not in attention}
    for family, over, required in (
        (sums, "upstream", 25),
        (sums, "upstream-csr", 1.5),
        (attention, "upstream", 25),
    ):
        values = _ratios(family, "message_passing", over, "ours")
        kind = "attention" if family is attention else "GCN and SAGE"
        what = f"message passing alone, {kind}: ours over {over}, geometric mean"
        listed.append(_mean(what, values, required))
    over_compiled = {}
    for name, cell in attention.items():
        gain = ratio(cell, "message_passing", "upstream", "ours")
        by_compiling = compile_gain(cell, "message_passing_compile")
        if gain is not None and by_compiling is not None:
            over_compiled[name] = gain / by_compiling
    what = "message passing alone, attention: ours over upstream compiled, geometric mean"
    listed.append(_mean(what, over_compiled, 10))
    for layer, under, required in (
        ("GCN", "ours", 25),
        ("SAGE-max", "ours", 25),
        ("SAGE-max", "ours-fresh", 10),
        ("GATv2", "ours", 18),
        ("GAT", "ours", 15),
        ("Transformer", "ours", 12),
        ("GATv2", "ours-fresh", 10),
        ("GAT", "ours-fresh", 10),
        ("Transformer", "ours-fresh", 10),
    ):
        name = f"tolokers {layer}"
        found = ratio(cells.get(name, {}), "layer", "upstream", under)
        values = {} if found is None else {name: found}
        listed.append(
            lowest(f"layer on tolokers: {layer}, {under} over upstream", values, required)
        )
    halves = _ratios(attention, "bfloat16", "float32", "bfloat16")
    what = "message passing alone, attention: bfloat16 over float32, slowest cell"
    listed.append(lowest(what, halves, 1))
    for title, operator in _NATIVE.items():
        for loop, what in (
            ("minimal_read", "that reads"),
            ("minimal_sum", "that reads and writes"),
        ):
            shares = {
                graph: 100 * row[operator]["gb_per_s"] / row[loop]["gb_per_s"]
                for graph, row in results["bandwidth"].items()
            }
            listed.append(
                lowest(f"{title} forward: bandwidth over a loop {what}", shares, 80, " %")
            )
    overheads = {name: row["overhead_us"] for name, row in results["routed_call"].items()}
    listed.append(highest("a routed call on a small graph", overheads, 60, "us"))
    times = results["import"]
    adds = {"median": times["fastgraph"]["median"]} if times else {}
    listed.append(highest("import fastgraph after import torch", adds, 200, "ms"))
    memory = {name: value for name, cell in cells.items() if (value := _memory_ratio(cell))}
    listed.append(lowest("peak memory: ours below upstream, worst cell", memory, 1))
    for layer in ("SAGE-max", "GATv2", "Transformer"):
        name = f"tolokers {layer}"
        tolokers = {name: memory[name]} if name in memory else {}
        listed.append(lowest(f"peak memory of {layer} on tolokers", tolokers, 30))
    for layer in ATTENTION:
        hubs, even = (_per_edge(results, graph, layer) for graph in ("debian", "tolokers"))
        values = {} if hubs is None or even is None else {layer: hubs / even}
        what = f"time per edge on debian over tolokers', message passing of {layer}"
        listed.append(highest(what, values, 1.5, "x"))
    return listed


def _per_edge(results: dict[str, Any], graph: str, layer: str) -> float | None:
    """Nanoseconds that our message passing takes for each edge."""
    time = median(results["cells"].get(f"{graph} {layer}", {}), "message_passing", "ours")
    return None if time is None else 1e6 * time / results["num_edges"][graph]


def compile_gain(cell: dict[str, Any], group: str = "compile") -> float | None:
    """How many times faster upstream is compiled; both were timed in turns."""
    if "error" in cell.get(group, {}):
        return None
    return ratio(cell, group, "upstream", "compile")


def _number(value: float | None, suffix: str = "") -> str:
    if value is None:
        return "-"
    digits = 1 if value >= 9.95 else 2
    return f"{value:.{digits}f}{suffix}" if value < 999.5 else f"{value:.0f}{suffix}"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """A Markdown table, numbers to the right."""
    heads = list(head)
    lines = [heads, ["---"] + ["---:"] * (len(heads) - 1), *(list(row) for row in rows)]
    return ["| " + " | ".join(line) + " |" for line in lines] + [""]


_COMPILED = {"layer": "compile", "message_passing": "message_passing_compile"}


def _time_table(cells: Cells, group: str, columns: Sequence[str], gains: Sequence[tuple[str, str]]):  # type: ignore[no-untyped-def]
    rows, collected = [], {gain: [] for gain in gains}
    for name, cell in cells.items():
        if group not in cell:
            continue
        row = [name]
        for column in columns:
            where = _COMPILED[group] if column == "compile" else group
            row.append(_number(median(cell, where, column)))
        for gain in gains:
            found = ratio(cell, group, *gain)
            row.append(_number(found, "x"))
            if found is not None:
                collected[gain].append(found)
        rows.append(row)
    if not rows:
        return []
    means = [_number(geometric_mean(v), "x") if v else "-" for v in collected.values()]
    rows.append(["**geometric mean**", *[""] * len(columns), *means])
    heads = [f"{under} over {over}" if under != "dense" else "ceiling" for over, under in gains]
    return table(["graph, layer", *columns, *heads], rows)


def machine_lines(facts: dict[str, str]) -> list[str]:
    return table(["machine", ""], facts.items())


def floor_lines(listed: Sequence[Floor]) -> list[str]:
    words = {True: "met", False: "**not met**", None: "-"}
    rows = [(f.what, f.required, f.measured, words[f.met]) for f in listed]
    return table(["floor", "required", "measured", ""], rows)


def markdown(results: dict[str, Any], listed: Sequence[Floor]) -> str:
    """The whole report."""
    cells: Cells = results["cells"]
    lines = [
        "# PyG layers on the CPU",
        "",
        f"`{results['command']}`; {results['channels']} channels, float32, medians. Quartiles and "
        "minima are in the JSON file beside this one.",
        "",
        *machine_lines(results["machine"]),
        "## Floors",
        "",
        *floor_lines(listed),
        "## Whole layer, forward and backward, milliseconds",
        "",
        "`compile` is upstream under `torch.compile`; `csr` means that a `torch.sparse` CSR "
        "adjacency is passed (for GCN normalised beforehand); `ours-fresh` gets a new `edge_index` "
        "at each step. `dense` is the layer's Linear modules alone, so `ceiling` (upstream / "
        "dense) bounds what faster message passing can give.",
        "",
        *_time_table(
            cells,
            "layer",
            ("upstream", "compile", "upstream-csr", "ours", "ours-fresh", "ours-csr", "dense"),
            (
                ("upstream", "ours"),
                ("upstream", "ours-fresh"),
                ("upstream-csr", "ours-csr"),
                ("upstream", "dense"),
            ),
        ),
    ]
    passing = _time_table(
        cells,
        "message_passing",
        ("upstream", "compile", "upstream-csr", "ours", "ours-csr"),
        (("upstream", "ours"), ("upstream-csr", "ours"), ("upstream-csr", "ours-csr")),
    )
    if passing:
        lines += [
            "## Message passing alone, forward and backward, milliseconds",
            "",
            "The same layers with their Linear modules replaced by the identity; GCN with "
            "`cached=True`.",
            "",
            *passing,
        ]
    memory = [
        (
            name,
            f"{m['upstream'] / _MIB:.0f}",
            f"{m['ours'] / _MIB:.0f}",
            _number(_memory_ratio(cell), "x"),
        )
        for name, cell in cells.items()
        if (m := cell.get("memory"))
    ]
    if memory:
        lines += ["## Peak memory of one forward and backward above the baseline, MiB", ""]
        lines += table(["graph, layer", "upstream", "ours", "below"], memory)
    halves = [
        (
            name,
            _number(median(cell, "bfloat16", "float32")),
            _number(median(cell, "bfloat16", "bfloat16")),
            _number(ratio(cell, "bfloat16", "float32", "bfloat16"), "x"),
        )
        for name, cell in cells.items()
        if "bfloat16" in cell
    ]
    if halves:
        lines += ["## Message passing alone, ours in two dtypes, milliseconds", ""]
        lines += table(["graph, layer", "float32", "bfloat16", "gain"], halves)
    if results["bandwidth"]:
        columns = {
            "minimal loop": "minimal_read",
            "with output": "minimal_sum",
            **_OPERATORS,
            **_NATIVE,
        }
        rows = [
            (graph, *(_number(row[name]["gb_per_s"]) for name in columns.values()))
            for graph, row in results["bandwidth"].items()
        ]
        lines += [
            "## Gathered rows, GB/s",
            "",
            "Bytes of the rows read, over the time of one forward call. The minimal loops "
            "(`measure/gather.cpp`) read the same rows in the same order; the second also writes "
            "one row for each destination, as the operators must. The native calls leave out what "
            "the operators do in Python, which only small graphs show; the floors are theirs.",
            "",
            *table(["graph", *columns], rows),
        ]
    if results["routed_call"]:
        rows = [
            (
                name,
                f"{1e3 * r['native']['median']:.0f}",
                f"{1e3 * r['routed']['median']:.0f}",
                f"{r['overhead_us']:.0f}",
            )
            for name, r in results["routed_call"].items()
        ]
        lines += [f"## A routed call on {results['small_graph']}, forward, microseconds", ""]
        lines += table(["layer", "native call", "routed layer", "difference"], rows)
    if results["import"]:
        rows = [(name, _number(spread["median"])) for name, spread in results["import"].items()]
        lines += ["## Start-up, milliseconds", ""]
        lines += table(["import torch, then fastgraph, then enable()", "median"], rows)
    errors = [
        f"- {name}: {c['compile']['error']}"
        for name, c in cells.items()
        if "error" in c.get("compile", {})
    ]
    if errors:
        lines += ["## Not compiled", "", *errors, ""]
    return "\n".join(lines)
