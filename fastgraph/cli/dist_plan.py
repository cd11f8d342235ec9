"""``python -m fastgraph dist-plan``: a forecast of a script's time on numbers of devices."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from fastgraph.cli.watched import left_by, nothing_routed

if TYPE_CHECKING:
    from fastgraph.dist.forecast.dry_run import Step
    from fastgraph.dist.forecast.forecast import Forecast, Total
    from fastgraph.dist.operators.cost import Cluster

_SHOWN = 3
"""How many kinds of layers a cell names before it only counts them."""


@dataclass(frozen=True)
class Options:
    """The options of the command.

    Attributes:
        devices: numbers of them.
        latency: of a message, in microseconds; ``None``: as measured here.
        bandwidth: of a device, in GB (1e9 bytes) a second; ``None``: as measured here.
        work: of a device, in nanoseconds for an edge and a channel; ``None``: as measured here.
        memory: of a device, in GiB; ``None``: as this process may use here.
        seconds: for partitions, before halos are extrapolated.
        plot, json: files to write.
    """

    devices: Sequence[int]
    latency: float | None
    bandwidth: float | None
    work: float | None
    memory: float | None
    seconds: float
    plot: Path | None
    json: Path | None


def devices_of(text: str) -> list[int]:
    """Numbers of devices: ``1..512``, the powers of two in it and its ends, or ``2,4,8``.

    Raises:
        ValueError: it is neither.
    """
    span = re.fullmatch(r"(\d+)\.\.(\d+)", text)
    if span is not None:
        first, last = int(span[1]), int(span[2])
        if 0 < first <= last:
            powers = [2**n for n in range(last.bit_length()) if first < 2**n < last]
            return sorted({first, *powers, last})
    elif re.fullmatch(r"\d+(,\d+)*", text) and all(int(number) > 0 for number in text.split(",")):
        return sorted({int(number) for number in text.split(",")})
    raise ValueError(f"expected numbers above 0 like 1..512 or 2,4,8, got {text}")


def plan_script(script: Path, arguments: Sequence[str], options: Options) -> int:
    """Print what a script will take.

    Args:
        script: of PyG; its first steps are run.
        arguments: of the script.
        options: of the command.

    Returns:
        The exit code, 0.

    Raises:
        click.ClickException: the script has no step that could be seen, a partition failed, or a
            file cannot be written.
    """
    from fastgraph.dist.forecast.forecast import by_pace, forecasts
    from fastgraph.dist.graphs.partition import PartitionError

    if options.plot is not None:
        try:
            from fastgraph.dist.forecast.plots import draw_forecasts
        except ModuleNotFoundError as error:
            raise click.ClickException(f"--plot: {error}") from None
    with Console(stderr=True).status("running the first steps") as status:
        step = _seen(script, arguments)
        if options.work is not None:
            step = by_pace(step, options.work * 1e-9)
        status.update("measuring links")
        cluster = _cluster(options)
        given = step, cluster, options.devices
        try:
            found = list(forecasts(*given, seconds=options.seconds, report=status.update))
        except (ModuleNotFoundError, PartitionError) as error:
            raise click.ClickException(str(error)) from None
    console = Console()
    console = console if console.is_terminal else Console(width=120)
    console.print(table(found))
    for line in remarks(step, cluster, options, any(one.has_extrapolated_halos for one in found)):
        console.print(line, soft_wrap=True, highlight=False)
    try:
        if options.plot is not None:
            draw_forecasts(found, options.plot)
        if options.json is not None:
            options.json.write_text(json.dumps(to_json(step, cluster, found), indent=1) + "\n")
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    return 0


def _seen(script: Path, arguments: Sequence[str]) -> Step:
    """The step of a script, which runs in a process of its own and prints to standard error."""
    from fastgraph.dist.forecast.dry_run import Step

    what = "before a step of training was seen"
    step = Step(**left_by("fastgraph.dist.forecast.dry_run", script, arguments, what))
    if not step.calls:
        raise nothing_routed(script)
    return step


def _cluster(options: Options) -> Cluster:
    """Links as they were given, or else as two processes on this machine have them; and memory."""
    from fastgraph.dist.operators import links
    from fastgraph.dist.operators.cost import Cluster
    from fastgraph.dist.ranks.devices import cpu, memory_of_a_rank
    from fastgraph.dist.ranks.spawning import run_on_ranks

    if options.latency is None or options.bandwidth is None:
        measured: Cluster = run_on_ranks(links.of_ranks, 2)[0]
    else:
        measured = Cluster(0.0, 1.0, 0.0, 0.0)
    latency = measured.latency if options.latency is None else options.latency * 1e-6
    bandwidth = measured.bandwidth if options.bandwidth is None else options.bandwidth * 1e9
    memory = options.memory * 2**30 if options.memory else memory_of_a_rank([cpu(bandwidth=False)])
    # Layers have their own pace, and devices one.
    return Cluster(latency, bandwidth, measured.work, measured.sums, memory)


def table(found: Sequence[Forecast]) -> Table:
    """A line for each number of devices."""
    shown = Table("devices", title="Modelled: milliseconds of a step of training")
    modes = list(found[0].modes)
    for heading in (*modes, "auto", "sent, MB", "memory, MiB"):
        shown.add_column(heading, justify="right")
    shown.add_column("mode")
    for one in found:
        mark = "~" if one.has_extrapolated_halos else ""
        times = [_milliseconds(one.modes[name].seconds) for name in modes]
        shown.add_row(
            f"{mark}{one.devices}",
            *times,
            _milliseconds(one.auto.seconds),
            f"{one.auto.sent / 1e6:,.1f}",
            f"{one.auto.memory / 2**20:,.0f}",
            chosen(one.auto) if one.devices > 1 else "",
        )
    return shown


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}"


def chosen(total: Total) -> str:
    """The modes of the layers in their order, those that are alike one after the other as one."""
    from fastgraph.dist.ranks.mesh import GRID

    runs: list[tuple[str, int]] = []
    meshes = iter(total.meshes)
    for name in total.layers:
        described = name
        if name == GRID:
            height, width = next(meshes)
            described = f"{name} {height}x{width}"
        if runs and runs[-1][0] == described:
            runs[-1] = described, runs[-1][1] + 1
        else:
            runs.append((described, 1))
    if len(runs) == 1:
        return runs[0][0]
    return ", ".join(name if count == 1 else f"{count} {name}" for name, count in runs)


def remarks(
    step: Step, cluster: Cluster, options: Options, has_extrapolated_halos: bool
) -> list[str]:
    """Sentences that say which figures were measured, given or extrapolated."""
    measured = "measured between two processes here"
    links = [
        f"{1e6 * cluster.latency:.3g} us of a message"
        + (f" ({measured})" if options.latency is None else ""),
        f"{cluster.bandwidth / 1e9:.3g} GB/s"
        + (f" ({measured})" if options.bandwidth is None else ""),
    ]
    work = "as here" if options.work is None else f"{options.work:.3g} ns for an edge and a channel"
    names = [name for name, *_ in step.calls]
    layers = ", ".join(
        name if names.count(name) == 1 else f"{names.count(name)} {name}"
        for name in dict.fromkeys(names)
    )
    edges = max(ends.shape[1] for ends, *_ in step.graphs)
    lines = [
        f"Layers: {layers}, on {edges:,} edges. Links: {', '.join(links)}. Work: {work}. "
        f"Memory: {cluster.memory / 2**30:.3g} GiB.",
        "Halos are those of METIS partitions. Sent and memory are of the slowest rank by auto. Not "
        "in it: what overlaps, other collectives than those of layers and parameters.",
    ]
    if has_extrapolated_halos:
        lines.append("~ Halos extrapolated: METIS would take longer than --seconds allows.")
    if step.others:
        lines.append(f"Counted as operations on rows: {', '.join(sorted(set(step.others)))}.")
    return lines


def to_json(step: Step, cluster: Cluster, found: Sequence[Forecast]) -> dict[str, Any]:
    """All figures, in seconds and bytes."""
    return {
        "modelled": True,
        "machine": cluster._asdict(),
        "layers": [name for name, *_ in step.calls],
        "devices": [
            {
                "devices": one.devices,
                "extrapolated": one.has_extrapolated_halos,
                "modes": {name: total._asdict() for name, total in one.modes.items()},
                "auto": one.auto._asdict(),
            }
            for one in found
        ],
    }
