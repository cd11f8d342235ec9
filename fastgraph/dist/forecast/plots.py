"""Plots of forecasts. They need matplotlib."""

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
    from fastgraph.dist.forecast.forecast import Forecast, Total

_COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd")
"""Of modes, in their order."""


def draw_forecasts(forecasts: Sequence[Forecast], path: str | os.PathLike[str]) -> None:
    """Milliseconds of a step and bytes that a rank sends, by mode and number of devices."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    devices = [forecast.devices for forecast in forecasts]
    axes: Sequence[Axes] = figure.subplots(1, 2)
    for name, colour in zip(forecasts[0].modes, _COLOURS, strict=False):
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
