"""Products before the aggregation, and aggregations that are remembered, each with and without.

    FASTGRAPH_DATA=FOLDER python benchmarks/less_work.py [--name NAME]

``SAGEConv`` of PyG. Plain, ours with neither, with each and by default take turns in one process;
processor time on one thread. Beside them stand the errors in float32 of PyG and of both orders of
the product, relative to PyG in float64. Results go to
``benchmarks/results/<date>-<name>.json`` and ``.md``.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.console import Console
from rich.progress import track

from measure.graphs import default_graphs
from measure.output import RESULTS, publish


class Cell(NamedTuple):
    """A layer and what is computed of it.

    Attributes:
        graph: its name.
        num_in: channels of the features.
        num_out: channels of the output.
        mode: ``"hidden"``, both passes with the gradients of features and parameters; ``"first"``,
            those of parameters alone; ``"frozen"``, those of features alone; ``"inference"``.
    """

    graph: str
    num_in: int
    num_out: int
    mode: str


CELLS = (
    Cell("tolokers", 256, 40, "hidden"),
    Cell("tolokers", 256, 40, "first"),
    Cell("tolokers", 256, 40, "frozen"),
    Cell("tolokers", 256, 40, "inference"),
    Cell("tolokers", 256, 256, "first"),
    Cell("tolokers", 256, 256, "inference"),
    Cell("wing", 128, 16, "hidden"),
    Cell("wing", 128, 16, "first"),
    Cell("wing", 128, 16, "frozen"),
    Cell("wing", 128, 16, "inference"),
    Cell("wordnet", 128, 128, "first"),
    Cell("cora", 1433, 16, "first"),
    Cell("cora", 1433, 16, "inference"),
)

WAYS = {
    "neither": (False, False),
    "product first": (True, False),
    "remembered": (False, True),
    "default": (None, True),
}
"""True where the product comes first, and true where aggregations are remembered."""

SHAPES = ((256, 40), (128, 16))
"""Channels in and out of which errors are measured."""

SIDES = ("PyG", "PyG, sorted", "product last", "product first")
"""Who computed what has an error: PyG with the edges as given, and sorted by destination."""

COMPUTED = ("output", "features", "matrix")
"""The results that have errors: the output, and the gradients of these two."""


@contextlib.contextmanager
def _way(project_first: bool | None, is_remembered: bool) -> Iterator[None]:
    """One of :data:`WAYS`, while fastgraph is enabled."""
    from fastgraph import settings
    from fastgraph.layers import constant

    before, least = settings.current(), constant._LEAST_GATHERED
    settings.set_current(before.replace(project_first=project_first))
    if not is_remembered:
        constant._LEAST_GATHERED = sys.maxsize
    try:
        yield
    finally:
        settings.set_current(before)
        constant._LEAST_GATHERED = least


def _times(cell: Cell) -> dict[str, float]:
    """Milliseconds of a step of PyG and of each way."""
    import torch
    from torch_geometric.nn import SAGEConv

    import fastgraph
    from fastgraph.routing.switch import SWITCH
    from measure.graphs import load
    from measure.turns import Effort, Side, measure_all

    data = load(cell.graph)
    torch.manual_seed(0)
    is_given = cell.mode in ("hidden", "frozen")
    x = torch.randn(data.num_nodes, cell.num_in, requires_grad=is_given)
    conv = SAGEConv(cell.num_in, cell.num_out).requires_grad_(cell.mode != "frozen")
    wanted = [tensor for tensor in (x, *conv.parameters()) if tensor.requires_grad]
    grad = torch.randn(data.num_nodes, cell.num_out)

    def step() -> None:
        if cell.mode == "inference":
            with torch.no_grad():
                conv(x, data.edge_index)
        else:
            torch.autograd.grad(conv(x, data.edge_index), wanted, grad)

    def enter(way: tuple[bool | None, bool]) -> Callable[[], Any]:
        return lambda: _way(*way)

    with fastgraph.enabled():
        plain = Side(step, context=SWITCH.suspended)
        sides = [Side(step, context=enter(way)) for way in WAYS.values()]
        for side in sides:
            side.turn(3, warm_up=False)  # what is remembered is so from the second time on
        found = measure_all(plain, sides, Effort(0.05, 7, 15, again=0))
    longest = max(found, key=lambda beside: beside.rounds)
    ours = {name: 1e3 * one.ours for name, one in zip(WAYS, found, strict=True)}
    return {"PyG": 1e3 * longest.plain, **ours}


def _errors(graph: str, aggr: str, num_in: int, num_out: int) -> dict[str, dict[str, Any]]:
    """Of the output and the gradients of features and matrix, by who computed them.

    Each is the norm of the differences over the norm of what is right, and the largest difference
    over the largest magnitude. PyG adds up in the order of the edges, once as they are given and
    once as we do, sorted by destination: where many are between the same nodes, that matters.
    """
    import torch
    from torch_geometric.nn import SAGEConv

    import fastgraph
    from measure.graphs import load

    data = load(graph)
    torch.manual_seed(0)
    conv = SAGEConv(num_in, num_out, aggr=aggr)
    torch.nn.init.zeros_(conv.lin_r.weight)  # so that errors are those of what neighbours give
    x = torch.randn(data.num_nodes, num_in)
    grad = torch.randn(data.num_nodes, num_out)

    order = (data.edge_index[1] * data.num_nodes + data.edge_index[0]).argsort()

    def compute(dtype: torch.dtype, edges: Any = data.edge_index) -> list[Any]:
        given = x.to(dtype).requires_grad_()
        out = conv.to(dtype)(given, edges)
        found = torch.autograd.grad(out, [given, conv.lin_l.weight], grad.to(dtype))
        return [out.detach(), *found]

    expected = compute(torch.float64)
    found = {
        "PyG": compute(torch.float32),
        "PyG, sorted": compute(torch.float32, data.edge_index[:, order]),
    }
    with fastgraph.enabled(min_edges=0):
        for name, first in (("product last", False), ("product first", True)):
            with _way(first, False):
                found[name] = compute(torch.float32)
    return {
        side: {
            name: [
                float((a.double() - b).norm() / b.norm()),
                float((a.double() - b).abs().max() / b.abs().max()),
            ]
            for name, a, b in zip(COMPUTED, results, expected, strict=True)
        }
        for side, results in found.items()
    }


def _over(cell: dict[str, Any], kind: int) -> str:
    """The errors of the product first over PyG's."""
    ratios = (cell["product first"][name][kind] / cell["PyG"][name][kind] for name in COMPUTED)
    return " / ".join(f"{ratio:.2f}" for ratio in ratios)


def markdown(results: dict[str, Any]) -> str:
    """The whole report."""
    from measure.report import machine_lines, table

    times = [
        [
            cell["graph"],
            f"{cell['num_in']} to {cell['num_out']}",
            cell["mode"],
            *(f"{cell[side]:.2f}" for side in ("PyG", *WAYS)),
        ]
        for cell in results["times"]
    ]
    errors = [
        [
            cell["graph"],
            cell["aggr"],
            f"{cell['num_in']} to {cell['num_out']}",
            *(" / ".join(f"{cell[side][name][0]:.1e}" for name in COMPUTED) for side in SIDES),
            _over(cell, 0),
            _over(cell, 1),
        ]
        for cell in results["errors"]
    ]
    milliseconds = [
        "",
        "## Time",
        "",
        "Milliseconds of a step by mean, processor time on one thread. *hidden*: both passes, "
        "gradients of features and parameters; *first*: of parameters, with features that stay "
        "the same; *frozen*: of features alone.",
        "",
        *table(["graph", "channels", "", "PyG", *WAYS], times),
    ]
    return "\n".join(
        [
            "# Products before the aggregation, and aggregations that are remembered",
            "",
            f"`{results['command']}`; `SAGEConv` of PyG, float32.",
            "",
            *machine_lines(results["machine"]),
            *(milliseconds if times else ()),
            "",
            "## Error",
            "",
            "Norm of the difference from PyG in float64 over its norm: output / gradient of "
            "features / gradient of the matrix. Last, those of the product first over PyG's, by "
            "norm and by the largest difference.",
            "",
            *table(
                [
                    *("graph", "", "channels", *SIDES, "over PyG's", "by the largest"),
                ],
                errors,
            ),
        ]
    )


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
@click.option("--name", default="less-work", show_default=True, help="Of the results.")
@click.option("--quick", is_flag=True, help="Cells and errors of Cora alone.")
@click.option("--errors", is_flag=True, help="No times.")
def main(out: Path, name: str, quick: bool, errors: bool) -> None:
    import torch

    from measure.machine import machine_facts

    torch.set_num_threads(1)
    console = Console(stderr=True)
    chosen = [cell for cell in CELLS if not errors and (not quick or cell.graph == "cora")]
    times = [{**cell._asdict(), **_times(cell)} for cell in track(chosen, console=console)]
    kinds = [
        (graph, aggr, *shape)
        for graph in (("cora",) if quick else default_graphs())
        for aggr in ("mean", "sum")
        for shape in SHAPES
    ]
    keys = ("graph", "aggr", "num_in", "num_out")
    found = [
        {**dict(zip(keys, kind, strict=True)), **_errors(*kind)}
        for kind in track(kinds, console=console)
    ]
    results = {
        "command": shlex.join(["python", "benchmarks/less_work.py", *sys.argv[1:]]),
        "machine": machine_facts(1),
        "times": times,
        "errors": found,
    }
    publish(console, out, name, results, markdown(results))


if __name__ == "__main__":
    main()
