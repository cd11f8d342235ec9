"""Tables of layers: which are routed in their usual configuration, by what, and how fast.

Each is called once, on a small graph, and ``fastgraph.status()`` is asked; speed and memory are
those of results that were measured before.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
RESULTS = {
    library: ROOT / "benchmarks" / "results" / f"2026-11-30-any-message-table-{library}.json"
    for library in ("pyg", "dgl")
}

GRAPH, CHANNELS = "tolokers", 64
"""Those of which figures are shown; small graphs have as many channels."""


class Found(NamedTuple):
    """How a configuration was computed.

    Attributes:
        name: of the configuration.
        operators: functions of ``fastgraph.ops`` that ran.
        reasons: why calls were left to upstream.
    """

    name: str
    operators: tuple[str, ...]
    reasons: tuple[str, ...]

    @property
    def is_routed(self) -> bool:
        """True if nothing was left to upstream."""
        return bool(self.operators) and not self.reasons

    @property
    def is_usual(self) -> bool:
        """True if it is the first configuration of its class."""
        return "," not in self.name


@functools.cache
def found(kind: str) -> list[Found] | None:
    """How all configurations of a kind are computed; ``None`` where their library is missing.

    Configurations that need other packages are left out.

    Args:
        kind: ``"convs"``, ``"aggregations"``, ``"pooling"``, ``"models"`` or ``"dgl"``.
    """
    if kind == "dgl" and importlib.util.find_spec("dgl") is None:
        return None
    import fastgraph

    with warnings.catch_warnings(), fastgraph.enabled(min_edges=0):
        warnings.simplefilter("ignore")
        rows = [_called(name, usual) for name, usual in configurations(kind).items()]
    return [row for row in rows if row is not None]


def configurations(kind: str) -> Mapping[str, Any]:
    """The configurations of a kind, by name."""
    if str(ROOT / "benchmarks") not in sys.path:
        sys.path.append(str(ROOT / "benchmarks"))
    if kind == "dgl":
        import fastgraph.dgl

        fastgraph.dgl.fix_import()
        from measure import dgl_usual

        return dgl_usual.LAYERS
    from measure import pyg_usual, pyg_usual_others

    return {
        "convs": pyg_usual.CONVS,
        "aggregations": pyg_usual_others.AGGREGATIONS,
        "pooling": pyg_usual_others.POOLING,
        "models": pyg_usual_others.MODELS,
    }[kind]


def _called(name: str, usual: Any) -> Found | None:
    import torch
    from torch.autograd import profiler_legacy  # the newer one writes to stderr at each start

    from fastgraph.routing.status import recording
    from measure.given import Given
    from measure.shapes import at_random

    given = Given(at_random("example", 30, 200), CHANNELS)
    torch.manual_seed(0)
    try:
        layer = usual.build(given)
        with recording() as status, profiler_legacy.profile() as profile:
            usual.call(layer, given)
    except ImportError:
        return None
    called = (event.name.partition("fastgraph::") for event in profile.function_events)
    operators = sorted({operator for _, package, operator in called if package})
    own = name.partition(",")[0]
    reasons = dict.fromkeys(
        reason if row.layer.rpartition(".")[2] == own else f"{row.layer}: {reason}"
        for row in status.rows
        for reason in row.reasons
    )
    return Found(name, tuple(operators), tuple(reasons) or _unseen(status.rows))


def _unseen(rows: list[Any]) -> tuple[str, ...]:
    """The reason where nothing of a call was seen."""
    return () if rows else ("it is not seen: nothing that it calls has a route",)


def table(kind: str) -> str | None:
    """The configurations of a kind, each with the operators or the reason, and figures."""
    rows = found(kind)
    if rows is None:
        return None
    figures = _figures("dgl" if kind == "dgl" else "pyg")
    lines = ["| configuration | computed by | forward | backward | memory |"]
    lines.append("| --- | --- | ---: | ---: | ---: |")
    for row in rows:
        shown = figures.get(row.name, ("", "", "")) if row.operators else ("", "", "")
        lines.append(f"| `{row.name}` | {_computed_by(row)} | {' | '.join(shown)} |")
    return "\n".join(lines)


def _computed_by(row: Found) -> str:
    operators = ", ".join(
        "edge program" if name == "edge_program" else f"`{name}`" for name in row.operators
    )
    if row.is_routed:
        return operators
    left = "; ".join(row.reasons)
    return f"{operators}; upstream in part: {left}" if operators else f"upstream: {left}"


def _figures(library: str) -> dict[str, tuple[str, str, str]]:
    result = RESULTS[library]
    cells = json.loads(result.read_text())["cells"] if result.exists() else []
    return {
        cell["configuration"]: (
            *(f"{ratio(cell, way):.3g}x" for way in ("forward", "backward")),
            f"{cell['memory']['plain'] / max(cell['memory']['ours'], 1):.3g}x",
        )
        if cell["routed_by_default"]
        else ("left", "left", "left")
        for cell in cells
        if (cell["graph"], cell["channels"], cell["part"]) == (GRAPH, CHANNELS, "layer")
    }


def ratio(cell: Mapping[str, Any], way: str) -> float:
    """How many times as fast as upstream a pass of a cell is."""
    plain, ours = (cell["times"][side][way]["median"] for side in ("plain", "ours"))
    return float(plain / ours)


def counts() -> str:
    """How many are routed, of each kind but DGL's."""
    every = found("convs") or []
    usual = [row for row in every if row.is_usual]
    lines = [
        f"**{_routed(usual)} of {len(usual)} convolutions are routed in their usual "
        f"configuration**, and {_routed(every)} of the {len(every)} configurations below. "
        "The others:",
        "",
        "| | listed | routed | in part |",
        "| --- | ---: | ---: | ---: |",
    ]
    for kind in ("aggregations", "pooling", "models"):
        rows = found(kind) or []
        in_part = sum(bool(row.operators and row.reasons) for row in rows)
        lines.append(f"| {kind} | {len(rows)} | {_routed(rows)} | {in_part} |")
    return "\n".join(lines)


def _routed(rows: list[Found]) -> int:
    return sum(row.is_routed for row in rows)


def tables() -> dict[str, Callable[[], str | None]]:
    """The functions that make the generated parts of the page, by name."""
    kinds = ("convs", "aggregations", "pooling", "models", "dgl")
    return {
        "coverage-counts": counts,
        **{f"coverage-{kind}": functools.partial(table, kind) for kind in kinds},
    }
