"""Draws ``docs/images/measured.svg``, the picture of time and memory, from results kept here.

    python benchmarks/picture.py

All results are of one machine; the picture says which. It takes no measurements.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from measure.output import RESULTS

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "measured.svg"
SUMS = "2026-11-23-pyg-cpu-zen5.json"
ATTENTION = "2026-11-24-pyg-cpu-attention-zen5.json"
MEMORY_OF_ATTENTION = "2026-11-24-pyg-cpu-memory-zen5.json"

LAYERS = ("GCN", "SAGE-max", "GAT", "GATv2", "Transformer")
COLOURS = {"PyG": "#9a9a9a", "PyG compiled": "#c9c9c9", "fastgraph": "#00796b"}
# Where a cell has it: the measurement, and the contestant there.
_TIMES = {
    "PyG": ("layer", "upstream"),
    "PyG compiled": ("compile", "compile"),
    "fastgraph": ("layer", "ours"),
}
_MEMORY = {"PyG": ("memory", "upstream"), "fastgraph": ("memory", "ours")}


class Panel(NamedTuple):
    """One part of the picture: by contestant a value for each layer."""

    title: str
    unit: str
    values: dict[str, list[float]]

    def labels(self) -> dict[str, list[str]]:
        """The values as they are written beside the bars."""
        return {name: [f"{v:,.0f}" for v in values] for name, values in self.values.items()}


def panels() -> tuple[list[Panel], str]:
    """The panels of the picture, and the machine on which they were measured."""
    results = [_read(name) for name in (SUMS, ATTENTION, MEMORY_OF_ATTENTION)]
    machines = {(r["machine"]["CPU"], r["machine"]["threads"]) for r in results}
    if len(machines) != 1:
        raise ValueError(f"expected results of one machine, got {sorted(machines)}")
    processor, threads = machines.pop()
    edges = {name: count for r in results for name, count in r["num_edges"].items()}
    times = [
        Panel(
            f"Time, {graph} ({edges[graph]:,} edges)",
            "ms",
            {
                name: [_found(results, graph, layer, *where)["median"] for layer in LAYERS]
                for name, where in _TIMES.items()
            },
        )
        for graph in ("tolokers", "wing")
    ]
    memory = Panel(
        f"Peak memory, tolokers ({edges['tolokers']:,} edges)",
        "MiB",
        {
            name: [_found(results, "tolokers", layer, *where) / 2**20 for layer in LAYERS]
            for name, where in _MEMORY.items()
        },
    )
    return [*times, memory], f"{processor}, {threads} threads, 256 channels, float32"


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return found


def _found(
    results: Sequence[dict[str, Any]], graph: str, layer: str, measurement: str, contestant: str
) -> Any:
    cells = (result["cells"].get(f"{graph} {layer}", {}) for result in results)
    return next(cell[measurement][contestant] for cell in cells if measurement in cell)


def draw(path: Path) -> None:
    """Write the picture; the format is that of the name."""
    import matplotlib

    matplotlib.use("svg" if path.suffix == ".svg" else "agg")
    # Text stays text, and the same results give the same file.
    matplotlib.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "fastgraph", "font.size": 8}
    )
    from matplotlib import pyplot

    shown, machine = panels()
    figure, axes = pyplot.subplots(1, len(shown), figsize=(11, 3.9))
    for axis, panel in zip(axes, shown, strict=True):
        _draw_panel(axis, panel)
    axes[0].legend(loc="upper center", bbox_to_anchor=(1.75, -0.13), ncols=3, frameon=False)
    figure.suptitle("Forward and backward of one layer; logarithmic, less is better", fontsize=10)
    figure.text(0.5, 0.01, machine, ha="center", color="#555555")
    figure.subplots_adjust(left=0.075, right=0.975, top=0.83, bottom=0.2, wspace=0.42)
    metadata = {"Date": None, "Creator": None} if path.suffix == ".svg" else None
    figure.savefig(path, metadata=metadata)


def _draw_panel(axis: Any, panel: Panel) -> None:
    height = 0.84 / len(panel.values)
    for i, (name, values) in enumerate(panel.values.items()):
        places = [k + (i - (len(panel.values) - 1) / 2) * height for k in range(len(values))]
        bars = axis.barh(places, values, height * 0.92, color=COLOURS[name], label=name)
        axis.bar_label(bars, labels=panel.labels()[name], padding=2, fontsize=7)
    axis.set_xscale("log")
    highest = max(max(values) for values in panel.values.values())
    axis.set_xlim(left=10, right=highest * 4)
    axis.set_yticks(range(len(LAYERS)), LAYERS)
    axis.invert_yaxis()
    axis.set_title(panel.title, fontsize=9)
    axis.set_xlabel(panel.unit, labelpad=1)
    axis.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    draw(PICTURE)
    print(f"written to {PICTURE}")
