"""How full tiles for tensor cores are on real and generated graphs, and whether that is enough.

    FASTGRAPH_DATA=... python benchmarks/tiles.py

Of each graph, real ones in the order of clusters, too: edges of a block, all counted and from a
sample; and what tiles and rows have to move on GPUs for sums of 256 channels of bfloat16, and for
attention forward.
Nothing is measured. Results go to ``benchmarks/results/<date>-tiles.json`` and ``.md``.
"""

from __future__ import annotations

import shlex
import sys
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
    from fastgraph.tune.tiles import (
        Product,
        by_rows,
        by_tiles,
        predict_fill,
        why_not_tiles,
        width_of_attention,
    )

    graph = Graph(edge_index, num_nodes, num_nodes)
    rows = graph.by_destination
    fill, tiles = predict_fill(rows), tiles_of(rows, num_nodes)
    size = num_nodes, num_nodes, graph.num_edges
    of_head = torch.empty(0, 1, WIDTH, dtype=torch.bfloat16)
    products = {
        kind: Product(*size, width, of_head.dtype, False)
        for kind, width in (("sums", WIDTH), ("attention", width_of_attention(of_head)))
    }
    return {
        "nodes": num_nodes,
        "edges": graph.num_edges,
        "fill": tiles.fill,
        "predicted": fill._asdict(),
        "bytes of an edge": tiles.nbytes / graph.num_edges,
        "gpus": {
            sheet.name: {
                kind: {
                    "rows": by_rows(product, sheet),
                    "tiles": by_tiles(product, fill, sheet),
                    "why not": why_not_tiles(product, fill, sheet),
                }
                for kind, product in products.items()
            }
            for sheet in SHEETS
        },
    }


def graphs() -> dict[str, tuple[Any, int]]:
    """Edges and nodes by name: real ones, and generated ones that fill tiles and do not."""
    import torch

    from measure.graphs import clustered, communities, default_graphs, load, mesh

    found: dict[str, tuple[Any, int]] = {}
    for name in default_graphs():
        graph = load(name)
        found[name] = graph.edge_index, graph.num_nodes
        found[f"{name}, clusters"] = clustered(graph).edge_index, graph.num_nodes
    for graph in (communities(50_000, 20, 64), mesh(400)):
        found[graph.name] = graph.edge_index, graph.num_nodes
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
    first = next(iter(results["graphs"].values()))
    kinds = [(gpu, kind) for gpu, by_kind in first["gpus"].items() for kind in by_kind]
    columns += [f"{gpu}, {kind}, us: rows / tiles" for gpu, kind in kinds]
    lines = []
    for name, found in results["graphs"].items():
        predicted = found["predicted"]
        lines.append(
            [
                name,
                f"{found['edges']:,}",
                f"{found['fill']:.2f}",
                f"{predicted['edges']:.2f} ({predicted['low']:.2f} to {predicted['high']:.2f})",
                f"{predicted['columns']:.2f}",
                f"{found['bytes of an edge']:.1f}",
                *(_cell(found["gpus"][gpu][kind]) for gpu, kind in kinds),
            ]
        )
    return "\n".join(
        [
            "# How full tiles are",
            "",
            f"`{results['command']}`; counted, not measured. Blocks have 128 slots; predicted is "
            "what a sample says, with its bound. Of GPUs: the least microseconds that the traffic "
            f"of sums of {WIDTH} channels of bfloat16 allows, or of attention forward on keys and "
            "values of as many, by data sheets; bold where tiles may be used.",
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
    results = {
        "command": shlex.join(["python", "benchmarks/tiles.py", *sys.argv[1:]]),
        "graphs": {name: compute(*given) for name, given in graphs().items()},
    }
    publish(Console(stderr=True), out, "tiles", results, markdown(results))


if __name__ == "__main__":
    main()
