"""Plots of the times of ranks, measured and predicted. They need matplotlib."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "plots need matplotlib: pip install 'fastgraph[compare]'", name="matplotlib"
    ) from error

if TYPE_CHECKING:
    from fastgraph.dist.balance.balance import Balance

_OF_PHASES = {"compute": "#1f77b4", "exchange": "#ff7f0e", "wait": "#c7c7c7"}
_WIDTH = 0.38


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
