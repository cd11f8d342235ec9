"""How full tiles for tensor cores are on real and generated graphs, and whether that is enough.

    FASTGRAPH_DATA=... python benchmarks/tiles.py

Of each graph, as it is numbered and in the order of clusters: edges of a block, all counted and
from a sample; and what tiles and rows have to move on GPUs for sums of 256 channels of bfloat16.
Making tiles is measured, everything else is counted. Results go to
``benchmarks/results/<date>-tiles.json`` and ``.md``.
"""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from measure.output import RESULTS, publish

WIDTH = 256


def compute(edge_index: Any, num_nodes: int) -> dict[str, Any]:
    """Of the rows by destination."""
    import torch

    from fastgraph import Graph
    from fastgraph.graphs.tiles import tiles_of
    from fastgraph.tune.gpus import SHEETS
    from fastgraph.tune.tiles import Product, by_rows, by_tiles, predict_fill, why_not_tiles

    graph = Graph(edge_index, num_nodes, num_nodes)
    rows = graph.by_destination
    start = time.perf_counter()
    fill = predict_fill(rows)
    sampled = time.perf_counter() - start
    times = []
    for _ in range(3):
        start = time.perf_counter()
        tiles = tiles_of(rows, num_nodes)
        times.append(time.perf_counter() - start)
    product = Product(num_nodes, num_nodes, graph.num_edges, WIDTH, torch.bfloat16, False)
    return {
        "nodes": num_nodes,
        "edges": graph.num_edges,
        "fill": tiles.fill,
        "predicted": fill._asdict(),
        "bytes of an edge": tiles.nbytes / graph.num_edges,
        "seconds": {"sample": sampled, "tiles": min(times)},
        "gpus": {
            sheet.name: {
                "rows": by_rows(product, sheet),
                "tiles": by_tiles(product, fill, sheet),
                "why not": why_not_tiles(product, fill, sheet),
            }
            for sheet in SHEETS
        },
    }


def graphs() -> dict[str, tuple[Any, int]]:
    """Edges and nodes by name: real ones, and generated ones that fill tiles and do not."""
    import torch
    from torch_geometric.data import Data

    from fastgraph import reorder
    from measure.graphs import communities, default_graphs, load, mesh

    found: dict[str, tuple[Any, int]] = {}
    data = [load(name) for name in default_graphs()]
    for graph in (*data, communities(100_000, 10, 50), communities(100_000, 100, 128), mesh(400)):
        found[graph.name] = graph.edge_index, graph.num_nodes
        given = Data(edge_index=graph.edge_index, num_nodes=graph.num_nodes)
        found[f"{graph.name}, clusters"] = reorder(given).data.edge_index, graph.num_nodes
    size, count = 32, 2000
    place = torch.cartesian_prod(torch.arange(size), torch.arange(size)).t()
    cliques = place.repeat(1, count) + size * torch.arange(count).repeat_interleave(size**2)
    found[f"cliques of {size}"] = cliques, size * count
    return found


def markdown(results: dict[str, Any]) -> str:
    """The whole report."""
    from measure.report import table

    columns = [
        "graph",
        "edges",
        "edges of a block",
        "predicted",
        "columns an edge",
        "bytes an edge",
    ]
    columns += ["sample, ms", "tiles, ms"]
    first = next(iter(results["graphs"].values()))
    columns += [f"{gpu}, us: rows / tiles" for gpu in first["gpus"]]
    lines = []
    for name, found in results["graphs"].items():
        predicted, seconds = found["predicted"], found["seconds"]
        lines.append(
            [
                name,
                f"{found['edges']:,}",
                f"{found['fill']:.2f}",
                f"{predicted['edges']:.2f} ({predicted['low']:.2f} to {predicted['high']:.2f})",
                f"{predicted['columns']:.2f}",
                f"{found['bytes of an edge']:.1f}",
                *(f"{1e3 * seconds[key]:.1f}" for key in ("sample", "tiles")),
                *(_cell(gpu) for gpu in found["gpus"].values()),
            ]
        )
    return "\n".join(
        [
            "# How full tiles are",
            "",
            f"`{results['command']}`, {results['threads']} threads. Blocks have 128 slots. Of "
            f"GPUs: the least microseconds that the traffic of sums of {WIDTH} channels of "
            "bfloat16 allows, by data sheets and **never measured**; bold where tiles may be used. "
            "Making tiles is measured on this machine's CPU, the least of three times.",
            "",
            *table(columns, lines),
        ]
    )


def _cell(found: dict[str, Any]) -> str:
    text = f"{1e3 * found['rows']:.1f} / {1e3 * found['tiles']:.1f}"
    return f"**{text}**" if found["why not"] is None else text


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
def main(out: Path) -> None:
    import torch

    results = {
        "command": shlex.join(["python", "benchmarks/tiles.py", *sys.argv[1:]]),
        "threads": torch.get_num_threads(),
        "graphs": {name: compute(*given) for name, given in graphs().items()},
    }
    publish(Console(stderr=True), out, "tiles", results, markdown(results))


if __name__ == "__main__":
    main()
