"""The rows that ranks send by halo and on a grid, counted from layouts: no ranks are started.

    PYTHONPATH=. .venv/bin/python benchmarks/dist_volumes.py [--nodes 144000] [--scale 17]

On Erdős-Rényi graphs both send alike where ``1 - exp(-x) = 2 (sqrt(p) - 1) / (p - 1)``, with ``p``
ranks and a mean degree of ``p x`` (section 7.3 of "High-performance and programmable attentional
graph neural networks with global tensor formulations", SC 2023). Where they do is looked for by
bisection, and Kronecker graphs are counted beside them. Tests compare such counts with the bytes
that ranks send. Results go to ``benchmarks/results/<date>-dist-volumes.json`` and ``.md``.
"""

from __future__ import annotations

import math
import shlex
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import track

from measure.output import RESULTS, publish

RANKS = (4, 9, 16)
DEGREES = (1, 2, 4, 8, 16, 32, 64)
CHANNELS = (16, 32, 128)
_ITEM = 4  # bytes of float32


def equal_at(ranks: int) -> float:
    """The mean degree at which both send alike, by the closed form."""
    return -ranks * math.log(1 - 2 * (math.isqrt(ranks) - 1) / (ranks - 1))


def halo_of(edges: Any, nodes: int, ranks: int) -> dict[str, float]:
    """Rows that a rank sends by halo for a sum, forward, with consecutive nodes on each rank."""
    import torch

    from fastgraph.dist.operators.halo.cost import rows_of_halo

    owner = torch.arange(nodes) * ranks // nodes
    sends = rows_of_halo(edges, owner, owner, ranks).sends
    return {"mean": sum(sends) / ranks, "most": max(sends)}


def grid_of(nodes: int, ranks: int, layer: Any) -> float:
    """Bytes that a rank sends on a square grid for a layer, forward and backward; mean of all."""
    import torch

    from fastgraph.dist.operators.grid.cost import exchanged, volume
    from fastgraph.dist.ranks.mesh import usual_mesh

    owner = torch.arange(nodes) * ranks // nodes
    counts = torch.bincount(owner, minlength=ranks).tolist()
    return sum(volume(usual_mesh(ranks), exchanged(layer), counts, counts).sent) / ranks


def random_graphs(nodes: int) -> list[dict[str, Any]]:
    """Where both send alike for each number of ranks, and how far the halo is off at some degrees.

    Graphs of lower degrees are beginnings of one, so that the halo grows with the degree.
    """
    import torch

    from fastgraph.dist.operators.cost import sum_layer

    most = max(DEGREES)
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(0, nodes, (2, nodes * most), generator=generator)
    found = []
    for ranks in track(RANKS, description="random graphs", console=Console(stderr=True)):
        grid = grid_of(nodes, ranks, sum_layer(torch.empty(1, 1))) / _ITEM

        def halo(degree: float, ranks: int = ranks) -> float:
            return halo_of(edges[:, : round(nodes * degree)], nodes, ranks)["mean"]

        low, high = 0.0, float(most)
        while high - low > 1e-3:
            middle = (low + high) / 2
            low, high = (middle, high) if halo(middle) < grid else (low, middle)
        by_degree = {}
        for degree in DEGREES:
            expected = nodes * (ranks - 1) / ranks * (1 - math.exp(-degree / ranks))
            by_degree[degree] = {"halo": halo(degree), "closed form": expected}
        found.append(
            {
                "ranks": ranks,
                "grid": grid,
                "alike at": (low + high) / 2,
                "closed form": equal_at(ranks),
                "degrees": by_degree,
            }
        )
    return found


def kronecker_graphs(scale: int) -> list[dict[str, Any]]:
    """Halo and grid on Kronecker graphs, which one rank draws here and many would together."""
    import torch

    import fastgraph.dist as fgd
    from fastgraph.dist.operators.cost import sum_layer

    fgd.init()
    found = []
    for degree in track(DEGREES[2:], description="Kronecker", console=Console(stderr=True)):
        data = fgd.kronecker(scale, degree << scale)
        edges, nodes = fgd.whole(data.edge_index), data.num_nodes
        layer = sum_layer(torch.empty(1, 1))
        for ranks in RANKS:
            grid = grid_of(nodes, ranks, layer) / _ITEM
            halo = halo_of(edges, nodes, ranks)
            mean = edges.shape[1] / nodes
            found.append({"degree": mean, "ranks": ranks, "grid": grid, "halo": halo})
    return found


def layers(nodes: int) -> list[dict[str, Any]]:
    """Mebibytes that a rank sends on a grid for a layer, forward and backward."""
    import torch

    from fastgraph.dist.operators import cost
    from fastgraph.edge_programs.program import parse
    from fastgraph.ops.edge_program import with_records
    from fastgraph.registry import operators

    found = []
    for k in CHANNELS:
        x = torch.empty(1, k, requires_grad=True)
        text = f"y = row {k}\nx = gathered {k}\nt0 = dot y x 1\nt1 = mul t0 x\nsum t1"
        heads = [torch.empty(1, 1, k, requires_grad=True), *torch.empty(2, 1, 1).unbind()]
        scores = [score.requires_grad_() for score in heads[1:]]
        gat = cost.attention_layer(operators.GAT.shapes, [heads[0], *scores, None], 1)
        products = cost.program_layer(
            parse(f"y = row {k}\nx = gathered {k}\nt0 = dot y x 1\nedge t0"), [x, x]
        )
        asked = {
            "sum": [cost.sum_layer(x)],
            "VA, one program": [cost.program_layer(with_records(parse(text)), [x, x])],
            "VA, `sddmm` and `spmm`": [products, cost.sum_layer(x)],
            "GAT": [gat],
        }
        for name, made in asked.items():
            sizes = {
                ranks: sum(grid_of(nodes, ranks, layer) for layer in made) / 2**20
                for ranks in RANKS
            }
            found.append({"layer": name, "channels": k, "sent": sizes})
    return found


def markdown(results: dict[str, Any]) -> str:
    """The whole report."""
    from measure.report import machine_lines, table

    random, nodes = results["random"], results["nodes"]
    off = max(
        abs(one["halo"] / one["closed form"] - 1)
        for found in random
        for one in found["degrees"].values()
    )
    alike = [
        [
            str(found["ranks"]),
            f"{found['grid']:,.0f}",
            f"{found['closed form']:.2f}",
            f"{found['alike at']:.2f}",
            *(f"{one['halo'] / found['grid']:.2f}" for one in found["degrees"].values()),
        ]
        for found in random
    ]
    kronecker = [
        [
            f"{found['degree']:.1f}",
            str(found["ranks"]),
            f"{found['grid']:,.0f}",
            f"{found['halo']['mean'] / found['grid']:.2f}",
            f"{found['halo']['most'] / found['grid']:.2f}",
        ]
        for found in results["kronecker"]
    ]
    of_layers = [
        [found["layer"], str(found["channels"]), *(f"{x:.2f}" for x in found["sent"].values())]
        for found in results["layers"]
    ]
    head = ["ranks", "rows on a grid", "alike at, closed form", "counted"]
    sizes = [f"{ranks} ranks" for ranks in RANKS]
    return "\n".join(
        [
            "# What ranks send by halo and on a grid",
            "",
            f"`{results['command']}`. Rows that a rank sends for a sum, forward, mean of all",
            "ranks, counted from layouts with consecutive nodes on each rank.",
            "",
            f"## Erdős-Rényi graphs of {nodes:,} nodes",
            "",
            "The mean degree at which both send alike, and by mean degree the rows of the halo,",
            f"of those of the grid. At these degrees the halo is within {100 * off:.2f} % of the",
            "closed form, `n (p - 1) / p (1 - exp(-d / p))`.",
            "",
            *table([*head, *(f"degree {degree}" for degree in DEGREES)], alike),
            "",
            f"## Kronecker graphs of 2^{results['scale']} nodes",
            "",
            "Duplicates removed. The rows of the halo, of those of the grid: the mean of ranks,",
            "and of the rank that sends most.",
            "",
            *table(["mean degree", "ranks", "rows on a grid", "halo", "most"], kronecker),
            "",
            f"## Layers on a grid, {nodes:,} nodes",
            "",
            "MiB that a rank sends in a step, forward and backward, float32.",
            "",
            *table(["layer", "channels", *sizes], of_layers),
            "",
            *machine_lines(results["machine"]),
        ]
    )


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--nodes", type=click.IntRange(144), default=144_000, show_default=True)
@click.option("--scale", type=click.IntRange(4, 24), default=17, show_default=True)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
def main(nodes: int, scale: int, out: Path) -> None:
    from measure.machine import machine_facts

    results: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/dist_volumes.py", *sys.argv[1:]]),
        "machine": machine_facts(1),
        "nodes": nodes,
        "scale": scale,
        "random": random_graphs(nodes),
        "kronecker": kronecker_graphs(scale),
        "layers": layers(nodes),
    }
    publish(Console(stderr=True), out, "dist-volumes", results, markdown(results))


if __name__ == "__main__":
    main()
