"""As :mod:`measure.memory`, for DGL's layers."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from typing import Any

import click

from fastgraph.comparison.memory import release_freed, resident, restart_peak


@click.command()
@click.argument("graph")
@click.argument("layer")
@click.argument("ours", type=int)
@click.argument("channels", type=int)
@click.argument("threads", type=int)
def main(graph: str, layer: str, ours: int, channels: int, threads: int) -> None:
    """Print the peak of one forward and backward pass above the baseline, in bytes, as JSON."""
    os.environ.setdefault("DGLBACKEND", "pytorch")
    import fastgraph.dgl

    fastgraph.dgl.fix_import()
    import torch

    from measure.dgl_layers import arguments_of, build, dgl_graph
    from measure.graphs import kronecker, load
    from measure.routing import ours_enabled

    torch.set_num_threads(threads)
    module = build(layer, channels)

    def given(structure: Any) -> tuple[Any, ...]:
        x = torch.randn(structure.num_nodes(), channels, requires_grad=True)
        return structure, x, *arguments_of(layer, structure)

    with ours_enabled() if ours else nullcontext():
        # Code pages, thread stacks and library workspaces are part of the baseline.
        module(*given(dgl_graph(kronecker(6)))).sum().backward()
        arguments = given(dgl_graph(load(graph)))
        release_freed()
        if not restart_peak():
            raise click.ClickException("this system does not let the peak start again")
        baseline = resident() or 0
        module(*arguments).sum().backward()
        peak = (resident("VmHWM") or 0) - baseline
    click.echo(json.dumps({"peak": peak, "baseline": baseline}))


if __name__ == "__main__":
    main()
