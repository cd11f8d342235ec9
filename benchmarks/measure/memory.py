"""Peak memory of one forward and backward pass, in a process of its own (``python -m``)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import click

from fastgraph.comparison.memory import release_freed, resident, restart_peak


def peak_in_child(
    graph: str,
    layer: str,
    *,
    ours: bool,
    channels: int,
    threads: int,
    module: str = "measure.memory",
) -> int:
    """Bytes above the baseline, measured in a fresh process by a module like this one.

    Raises:
        subprocess.CalledProcessError: the child failed; its messages went to stderr.
    """
    here, given = str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH")
    search_path = os.pathsep.join([here, given] if given else [here])
    arguments = (graph, layer, int(ours), channels, threads)
    child = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": search_path},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return int(json.loads(child.stdout.splitlines()[-1])["peak"])


@click.command()
@click.argument("graph")
@click.argument("layer")
@click.argument("ours", type=int)
@click.argument("channels", type=int)
@click.argument("threads", type=int)
def main(graph: str, layer: str, ours: int, channels: int, threads: int) -> None:
    """Print the peak of one forward and backward pass above the baseline, in bytes, as JSON."""
    import torch

    from measure.graphs import kronecker, load
    from measure.layers import LAYERS
    from measure.routing import expect_routed, ours_enabled

    torch.set_num_threads(threads)
    case = LAYERS[layer]
    module = case.build(channels)

    def step(x: torch.Tensor, grad: torch.Tensor, edge_index: torch.Tensor) -> None:
        module(x, edge_index).backward(grad)

    def features(num_nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(num_nodes, channels, requires_grad=True)
        with torch.no_grad():
            grad = torch.randn_like(module(x, torch.empty(2, 0, dtype=torch.int64)))
        return x, grad

    with ours_enabled() if ours else nullcontext():
        # Code pages, thread stacks and library workspaces are part of the baseline.
        warm_up = kronecker(6)
        step(*features(warm_up.num_nodes), warm_up.edge_index)
        data = load(graph)
        x, grad = features(data.num_nodes)
        with expect_routed(module) if ours else nullcontext():
            release_freed()
            if not restart_peak():
                raise click.ClickException("this system does not let the peak start again")
            baseline = resident() or 0
            step(x, grad, data.edge_index)
            peak = (resident("VmHWM") or 0) - baseline
    click.echo(json.dumps({"peak": peak, "baseline": baseline}))


if __name__ == "__main__":
    main()
