"""Plots of what ranks have and take, and of what they would take. They need matplotlib."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "plots need matplotlib: pip install 'fastgraph[compare]'", name="matplotlib"
    ) from error

if TYPE_CHECKING:
    from fastgraph.dist.balance import Balance
    from fastgraph.dist.forecast import Forecast, Total
    from fastgraph.dist.shards import Shards

_OF_PHASES = {"compute": "#1f77b4", "exchange": "#ff7f0e", "wait": "#c7c7c7"}
_OF_MODES = {"halo": "#1f77b4", "heads": "#ff7f0e", "2d": "#2ca02c"}
_OWN, _OF_OTHERS = "#1f77b4", "#ff7f0e"
_WIDTH = 0.38
_NUMBERS = 8
"""Of ranks, up to which there is room for numbers in a matrix of them."""


def draw_balance(balance: Balance, path: str | os.PathLike[str]) -> None:
    """Bars for each rank, predicted and measured side by side, of its phases on each other."""
    ranks = range(len(balance.measured))
    figure = Figure(figsize=(1.6 + 1.2 * len(ranks), 3.4), layout="constrained")
    axes: Axes = figure.add_subplot()
    kinds = {"measured": balance.measured}
    if balance.predicted is not None:
        kinds = {"predicted": balance.predicted, **kinds}
    for number, (kind, phases) in enumerate(kinds.items()):
        places = [rank + (number - (len(kinds) - 1) / 2) * _WIDTH for rank in ranks]
        below = [0.0] * len(phases)
        for phase, colour in _OF_PHASES.items():
            heights = [1e3 * getattr(one, phase) for one in phases]
            axes.bar(
                places,
                heights,
                0.9 * _WIDTH,
                below,
                color=colour,
                label=phase if number == 0 else None,
                hatch="//" if kind == "predicted" else None,
                edgecolor="white",
            )
            below = [b + h for b, h in zip(below, heights, strict=True)]
        for place, height in zip(places, below, strict=True):
            axes.annotate(kind, (place, height), ha="center", va="bottom", fontsize="x-small")
    axes.set_xticks(list(ranks), [f"rank {rank}" for rank in ranks])
    axes.set_ylabel("ms of an epoch")
    axes.margins(y=0.12)
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path)


def draw_shards(shards: Shards, path: str | os.PathLike[str]) -> None:
    """Bars of the nodes and edges of each rank, and a matrix of the edges between ranks."""
    parts = shards.parts
    figure = Figure(figsize=(11, 1.8 + 0.28 * max(len(parts), 6)), layout="constrained")
    of_nodes, of_edges, of_pairs = figure.subplots(1, 3)
    inside = [row[rank] for rank, row in enumerate(shards.between)]
    outside = [part.edges - own for part, own in zip(parts, inside, strict=True)]
    _stacked(of_nodes, {"nodes": [p.nodes for p in parts], "halo": [p.halo for p in parts]})
    _stacked(of_edges, {"edges from its nodes": inside, "from other ranks": outside})
    # Between parts there are far fewer edges than within them.
    shown = of_pairs.imshow(shards.between, cmap="Blues", norm="symlog", vmin=0)
    figure.colorbar(shown, ax=of_pairs)
    share = shards.cut / max(shards.edges, 1)
    of_pairs.set_title(f"edges; {shards.cut:,} are cut ({share:.1%})", fontsize="medium")
    of_pairs.set_xlabel("from the nodes of rank")
    of_pairs.set_ylabel("to those of rank")
    for axis in (of_pairs.xaxis, of_pairs.yaxis, of_nodes.yaxis, of_edges.yaxis):
        axis.get_major_locator().set_params(integer=True)
    if len(parts) <= _NUMBERS:
        dark = max(map(max, shards.between)) ** 0.5
        for to, row in enumerate(shards.between):
            for source, count in enumerate(row):
                of_pairs.annotate(
                    f"{count:,}",
                    (source, to),
                    ha="center",
                    va="center",
                    color="white" if count > dark else "black",
                    fontsize="x-small",
                )
    figure.savefig(path)


def _stacked(axes: Axes, kinds: dict[str, list[int]]) -> None:
    """A bar for each rank, of two kinds side by side."""
    (own, counts), (others, more) = kinds.items()
    ranks = range(len(counts))
    axes.barh(ranks, counts, color=_OWN, label=own)
    axes.barh(ranks, more, left=counts, color=_OF_OTHERS, label=others)
    axes.invert_yaxis()
    axes.set_ylabel("rank")
    axes.legend(fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)


def draw_forecasts(forecasts: Sequence[Forecast], path: str | os.PathLike[str]) -> None:
    """Milliseconds of a step and bytes that a rank sends, by mode and number of devices."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    devices = [forecast.devices for forecast in forecasts]
    axes: Sequence[Axes] = figure.subplots(1, 2)
    for name, colour in _OF_MODES.items():
        totals = [forecast.modes[name] for forecast in forecasts]
        _line(axes, devices, totals, name, colour, "-")
    _line(axes, devices, [forecast.auto for forecast in forecasts], "auto", "black", ":")
    axes[0].set_ylabel("ms of a step, modelled")
    axes[1].set_ylabel("MB that a rank sends in a step, modelled")
    for one in axes:
        one.set_xlabel("devices")
        one.set_xscale("log", base=2)
        one.set_xticks(devices, [str(number) for number in devices])
        one.set_yscale("log")
        one.grid(visible=True, alpha=0.3)
    axes[0].legend(fontsize="small")
    figure.savefig(path)


def _line(
    axes: Sequence[Axes],
    devices: Sequence[int],
    totals: Sequence[Total],
    name: str,
    colour: str,
    style: str,
) -> None:
    milliseconds = [1e3 * total.seconds for total in totals]
    # Nothing is sent by one device, of which there is no logarithm.
    megabytes = [total.sent / 1e6 if total.sent else float("nan") for total in totals]
    for one, values in zip(axes, (milliseconds, megabytes), strict=True):
        one.plot(devices, values, style, color=colour, marker="o", markersize=3, label=name)
