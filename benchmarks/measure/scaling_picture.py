"""The picture of weak and strong scaling."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

_COLOURS = {"halo": "#1f77b4", "heads": "#ff7f0e", "grid": "#2ca02c"}
_GROWTHS = {"strong": "one graph", "weak": "as many nodes for each rank"}

_MEASURED: dict[str, Any] = {"marker": "o", "markersize": 3.5, "linewidth": 1.6}
_MODELLED: dict[str, Any] = {"linestyle": "--", "linewidth": 1}


def draw(curves: Sequence[dict[str, Any]], ranks: str, path: Path) -> None:
    """Seconds of a step by number of ranks; the format is that of the name.

    Args:
        curves: as ``benchmarks/dist_scaling.py`` has them.
        ranks: what a rank is.
        path: of the picture.
    """
    import matplotlib

    matplotlib.use("svg" if path.suffix == ".svg" else "agg")
    # Text stays text, and the same results give the same file.
    matplotlib.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "fastgraph", "font.size": 8}
    )
    from matplotlib import pyplot

    columns = list(dict.fromkeys((curve["kind"], curve["graph"]) for curve in curves))
    figure, axes = pyplot.subplots(
        len(_GROWTHS), len(columns), figsize=(11, 5.6), sharex=True, squeeze=False
    )
    for curve in curves:
        row = list(_GROWTHS).index(curve["growth"])
        axis = axes[row][columns.index((curve["kind"], curve["graph"]))]
        _draw_curve(axis, curve)
        axis.set_title(f"{curve['kind']}, {curve['graph']}", fontsize=9)
    for row, growth in enumerate(_GROWTHS):
        axes[row][0].set_ylabel(f"{growth}: {_GROWTHS[growth]}\n(seconds of a step)")
    for axis in axes[-1]:
        axis.set_xlabel("ranks")
    figure.legend(
        handles=_legend(pyplot),
        loc="lower center",
        ncols=len(_COLOURS) + 3,
        frameon=False,
        fontsize=8,
    )
    figure.suptitle(f"Training steps: {ranks}; logarithmic, less is better", fontsize=10)
    figure.subplots_adjust(left=0.07, right=0.985, top=0.89, bottom=0.15, wspace=0.2, hspace=0.25)
    metadata = {"Date": None, "Creator": None} if path.suffix == ".svg" else None
    figure.savefig(path, metadata=metadata)
    pyplot.close(figure)


def _draw_curve(axis: Any, curve: dict[str, Any]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    modelled, measured = (
        {int(ranks): modes for ranks, modes in curve[kind].items()}
        for kind in ("modelled", "measured")
    )
    numbers = sorted(modelled)
    alone = measured[1]["halo"]
    ideal = [alone / n if curve["growth"] == "strong" else alone for n in numbers]
    axis.plot(numbers, ideal, ":", color="#9a9a9a", linewidth=1)
    for mode, colour in _COLOURS.items():
        for times, style in ((modelled, _MODELLED), (measured, _MEASURED)):
            # One rank is the same in all modes.
            of_mode = {n: times[n].get(mode, times[n]["halo"]) for n in sorted(times)}
            if any(mode in modes for modes in times.values()):
                axis.plot(of_mode.keys(), of_mode.values(), color=colour, **style)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda seconds, _: f"{seconds:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.set_xticks(numbers, [str(number) for number in numbers])
    axis.axvspan(max(measured) * 1.15, numbers[-1] * 1.15, color="#f2f2f2", zorder=0)
    axis.set_xlim(0.87, numbers[-1] * 1.15)
    axis.grid(visible=True, alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)


def _legend(pyplot: Any) -> list[Any]:
    line = pyplot.Line2D
    return [
        *(line([], [], color=colour, label=mode) for mode, colour in _COLOURS.items()),
        line([], [], color="black", label="measured", **_MEASURED),
        line([], [], color="black", label="modelled", **_MODELLED),
        line([], [], color="#9a9a9a", linestyle=":", label="without exchange: ideal"),
    ]
