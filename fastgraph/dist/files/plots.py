"""Plots of the parts of a graph in files. They need matplotlib."""

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
    from fastgraph.dist.files.shards import Shards

_OWN, _OF_OTHERS = "#1f77b4", "#ff7f0e"
_NUMBERS = 8
"""Of ranks, up to which there is room for numbers in a matrix of them."""


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
