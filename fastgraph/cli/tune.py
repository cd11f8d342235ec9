"""``python -m fastgraph tune``: finds the fastest kernels and orders of rows, and caches them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import torch
from rich.console import Console
from rich.table import Table

from fastgraph.cli.watched import left_by, nothing_routed

if TYPE_CHECKING:
    from fastgraph.cli.tuning.kernels import TimedCall
    from fastgraph.cli.tuning.measuring import Budget, Measured, Reordering
    from fastgraph.graphs.graph import Graph
    from fastgraph.tune.choices import Use
    from fastgraph.tune.gpus import Sheet
    from fastgraph.tune.tiles import Product


def tune_script(script: Path, arguments: Sequence[str], budget: float, device: str | None) -> int:
    """Measure the calls of a script, print what was found, and keep what was chosen.

    Args:
        script: whose first steps are run.
        arguments: of the script.
        budget: seconds for measurements.
        device: ``cpu`` or the name of a GPU that a model knows; ``None``: all of these.

    Returns:
        The exit code, 0.

    Raises:
        click.ClickException: the script failed, or calls nothing that could be measured.
        click.UsageError: an unknown device.
    """
    from fastgraph.cli.tuning import kernels, measuring

    sheets = _sheets(device)
    console = Console()
    console = console if console.is_terminal else Console(width=120)
    with Console(stderr=True).status("running the first steps") as status:
        program = left_by("fastgraph.cli.tuning", script, arguments, "before its calls were seen")
        torch.set_num_threads(program.threads)
        torch.backends.cuda.matmul.allow_tf32 = program.allow_tf32
        status.update("measuring")
        found = measuring.calls_of(program)
        spent = measuring.Budget(budget)
        on_gpus = kernels.time_kernels(program, spent) if device != "cpu" else []
        if not found and not on_gpus:
            raise nothing_routed(script)
        if on_gpus:
            _keep_kernels(on_gpus, console)
        if found and device in (None, "cpu"):
            _tune_rows(found, spent, console)
    for_tiles = [one for one in found if one.replay.call.operator in ("spmm", "attention")]
    if sheets and for_tiles:
        table, reasons = gpu_table(for_tiles, sheets)
        console.print(table)
        for reason in reasons:
            console.print(f"No tiles: {reason}.", soft_wrap=True, highlight=False)
    if program.elsewhere:
        console.print(f"{program.elsewhere} calls on other devices were left out.")
    return 0


def _tune_rows(found: Sequence[Measured], spent: Budget, console: Console) -> None:
    """Measure and keep orders of rows by half of what is left; show what other nodes' orders do."""
    from fastgraph.cli.tuning import measuring
    from fastgraph.tune import choices

    measuring.measure(found, measuring.Budget(spent.left / 2))
    chosen = measuring.chosen(found)
    choices.ORDERS.keep(choices.machine(), chosen)
    console.print(calls_table(found, chosen))
    graphs = measuring.by_graph(found)
    for place, ones in enumerate(graphs.values()):
        share = measuring.Budget(spent.left / (len(graphs) - place))
        others = measuring.reorderings(ones, share)
        if others:
            console.print(reordering_table(ones[0], others))
    for line in _remarks(found, chosen):
        console.print(line, soft_wrap=True, highlight=False)


def _keep_kernels(found: Sequence[TimedCall], console: Console) -> None:
    """Keep which kernels are fastest on GPUs, and print what each takes."""
    from fastgraph.tune.fastest import keep

    keep([one for call in found for one in call.timed])
    console.print(kernels_table(found))
    console.print("Programs with FASTGRAPH_MEASURE=1 take these kernels without measuring.")
    left = sum(not call.timed for call in found)
    if left:
        console.print(f"Not measured: {left}, for which --budget was too small.")


def kernels_table(found: Sequence[TimedCall]) -> Table:
    """Milliseconds of each call on a GPU, by kernel; the fastest first."""
    table = Table("layers", "call", "graph", "milliseconds", title="Measured on GPUs")
    for call in found:
        for one in call.timed:
            in_order = sorted(one.seconds.items(), key=lambda pair: pair[1])
            times = ", ".join(f"{name} {1e3 * seconds:.3f}" for name, seconds in in_order)
            table.add_row(_counted(call.layers), one.kind, _shape(one.graph), times)
    return table


def _sheets(device: str | None) -> list[Sheet]:
    from fastgraph.tune.gpus import SHEETS, sheet_of

    if device is None:
        return list(SHEETS)
    sheet = None if device == "cpu" else sheet_of(device)
    if sheet is None and device != "cpu":
        names = ", ".join(sheet.name for sheet in SHEETS)
        raise click.UsageError(f"--device must be cpu or one of {names}, got {device!r}")
    return [] if sheet is None else [sheet]


def calls_table(found: Sequence[Measured], chosen: Mapping[str, Mapping[Use, int]]) -> Table:
    """Milliseconds of each call, forward and backward, by the order in which rows are visited."""
    table = Table("layers", "operator", "graph", "row", "dtype", title="Measured: milliseconds")
    for heading in ("as they are", "destinations in order", "sources in order"):
        table.add_column(heading, justify="right")
    table.add_column("chosen")
    for one in found:
        by_transpose = {use.transpose: seconds for use, seconds in one.in_order.items()}
        table.add_row(
            _counted(one.layers),
            one.replay.call.operator,
            _shape(one.graph),
            f"{_row_bytes(one)} B",
            str(one.replay.features.dtype).removeprefix("torch."),
            _milliseconds(one.as_they_are) if one.is_measured else "",
            *(
                _milliseconds(by_transpose[transpose]) if transpose in by_transpose else "none"
                for transpose in (False, True)
            ),
            _choice(one, chosen.get(one.identity, {})) if one.is_measured else "not measured",
        )
    return table


def _choice(one: Measured, orders: Mapping[Use, int]) -> str:
    names = {False: "destinations", True: "sources"}
    in_order = [names[use.transpose] for use in sorted(one.uses) if orders.get(use)]
    return f"{' and '.join(in_order)} in order" if in_order else "as they are"


def reordering_table(one: Measured, others: Sequence[Reordering]) -> Table:
    """The table of the effects of ``fastgraph.reorder`` on the graph of a call."""
    table = Table("fastgraph.reorder", title=f"Nodes in another order: {_shape(one.graph)}")
    for heading in ("found in, s", "reads, predicted", "time, measured"):
        table.add_column(heading, justify="right")
    for found in others:
        figures = (f"{figure:.2f}" for figure in (found.seconds, found.reads, found.step))
        table.add_row(found.order, *figures)
    table.caption = "reads from memory and time of its calls, over those in the order that there is"
    return table


def gpu_table(found: Sequence[Measured], sheets: Sequence[Sheet]) -> tuple[Table, list[str]]:
    """The times of sums and attention on tiles on GPUs, by a model, and why not for some."""
    from fastgraph.tune.tiles import by_rows, by_tiles, predict_fill, why_not_tiles

    table = Table("layers", "graph", "channels", "dtype", "edges of a block")
    table.title = "Predicted, never measured: milliseconds forward by rows / on tiles"
    for sheet in sheets:
        table.add_column(sheet.name, justify="right")
    table.add_column("tiles")
    table.caption = "at least, by what each form must move; under the setting measure both compete"
    reasons: dict[str, None] = {}
    for one in found:
        fill = predict_fill(one.graph.grouped(transpose=one.replay.argument("transpose")))
        product, refused = _product_of(one)
        why_not = {g.name: refused or why_not_tiles(product, fill, g) for g in sheets}
        reasons |= dict.fromkeys(reason for reason in why_not.values() if reason is not None)
        table.add_row(
            _counted(one.layers),
            _shape(one.graph),
            str(one.replay.features.shape[1:].numel()),
            str(product.dtype).removeprefix("torch."),
            f"{fill.edges:.1f} ({fill.low:.1f} to {fill.high:.1f})",
            *(f"{by_rows(product, g):.3f} / {by_tiles(product, fill, g):.3f}" for g in sheets),
            ", ".join(name for name, reason in why_not.items() if reason is None) or "no",
        )
    return table, list(reasons)


def _product_of(one: Measured) -> tuple[Product, str | None]:
    """The product that a call computes forward, and why attention never takes tiles, if so."""
    from fastgraph.tune.tiles import Product, why_not_attention, width_of_attention

    given, graph = one.replay.argument, one.graph
    refused = None
    if one.replay.call.operator == "attention":
        x = given("key")
        width, has_weights = width_of_attention(x), False
        has_edges = given("edge") is not None
        refused = why_not_attention(x, has_edges, given("dropout"), given("weights"))
    else:
        x = one.replay.features
        width, has_weights = x.shape[1:].numel(), given("weight") is not None
    num_rows = graph.num_src if given("transpose") else graph.num_dst
    return Product(num_rows, len(x), graph.num_edges, width, x.dtype, has_weights), refused


def _remarks(found: Sequence[Measured], chosen: Mapping[str, Mapping[Use, int]]) -> list[str]:
    from fastgraph.tune import choices

    uses = sum(len(orders) for orders in chosen.values())
    kept = "They are kept in" if choices.path().is_file() else "They could not be kept in"
    lines = [f"Choices: {uses}. Graphs: {len(chosen)}.", f"{kept} {choices.path()}"]
    left = sum(not one.is_measured for one in found)
    return [*lines, f"Not measured: {left}, for which --budget was too small."] if left else lines


def _counted(layers: Sequence[str]) -> str:
    names = dict.fromkeys(layers)
    return ", ".join(
        name if layers.count(name) == 1 else f"{layers.count(name)} {name}" for name in names
    )


def _shape(graph: Graph) -> str:
    nodes = {graph.num_src, graph.num_dst}
    return f"{' x '.join(f'{n:,}' for n in sorted(nodes))} nodes, {graph.num_edges:,} edges"


def _row_bytes(one: Measured) -> int:
    return max(use.row_bytes for use in one.uses)


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"
