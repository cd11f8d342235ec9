"""A graph that exceeds the memory of one process trains on several, each of which has as much.

    PYTHONPATH=. .venv/bin/python benchmarks/dist_memory.py [--side 700] [--ranks 4]

A mesh is written to a file, and by ``write_shards`` to one for each rank. Graph convolutions are
trained on it by one process that loads it as a whole, and by ranks that load their shards: first
without a limit, to see what each needs, then all under one limit (``RLIMIT_DATA``, private memory)
halfway between. Ranks that leave freed memory to the C library are measured beside them. Results
go to ``benchmarks/results/<date>-dist-memory.json`` and ``.md``.
"""

from __future__ import annotations

import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from measure.output import RESULTS, publish

_TOLERANCE = 1e-5  # of float32 losses, which are sums in another order
_MIB = 2**20


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--side", type=click.IntRange(2), default=700, show_default=True, help="Of the mesh.")
@click.option("--ranks", type=click.IntRange(2), default=4, show_default=True)
@click.option("--channels", type=click.IntRange(1), default=128, show_default=True)
@click.option("--steps", type=click.IntRange(1), default=3, show_default=True)
@click.option("--limit", type=click.IntRange(1), help="MiB; default: halfway between.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
def main(side: int, ranks: int, channels: int, steps: int, limit: int | None, out: Path) -> None:
    from fastgraph.dist.ranks.spawning import run_on_ranks
    from measure.dist_memory_steps import train
    from measure.machine import machine_facts

    console = Console(stderr=True)
    results: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/dist_memory.py", *sys.argv[1:]]),
        "machine": machine_facts(1),
        "nodes": side * side,
        "channels": channels,
        "ranks": ranks,
    }
    with tempfile.TemporaryDirectory() as name:
        whole, shards = str(Path(name) / "graph.pt"), str(Path(name) / "shards")
        results |= run_on_ranks(write, 1, side, channels, whole, shards, ranks)[0]
        console.print("written")
        alone = run_on_ranks(train, 1, whole, False, None, channels, steps)
        console.print(f"one process: {alone}")
        together = run_on_ranks(train, ranks, shards, True, None, channels, steps)
        console.print(f"{ranks} ranks: {together}")
        results["on ranks, as glibc does"] = run_on_ranks(
            train, ranks, shards, True, None, channels, steps, False
        )
        most = max(rank["data"] for rank in together)
        bytes_ = limit * _MIB if limit else (alone[0]["data"] + most) // 2
        results |= {"limit": bytes_, "one process": alone, "on ranks": together}
        results["one process, limited"] = run_on_ranks(
            train, 1, whole, False, bytes_, channels, steps
        )
        results["on ranks, limited"] = run_on_ranks(
            train, ranks, shards, True, bytes_, channels, steps
        )
    publish(console, out, "dist-memory", results, markdown(results))


def write(side: int, channels: int, whole: str, shards: str, ranks: int) -> dict[str, Any]:
    """Both forms of the graph, by a process that ends with what it needed."""
    import torch
    from torch_geometric.data import Data

    from fastgraph.dist import write_shards
    from measure.dist_memory_steps import CLASSES
    from measure.graphs import mesh

    graph = mesh(side)
    generator = torch.Generator().manual_seed(0)
    data = Data(
        x=torch.randn(graph.num_nodes, channels, generator=generator),
        y=torch.randint(CLASSES, (graph.num_nodes,), generator=generator),
        edge_index=graph.edge_index,
    )
    torch.save(data, whole)
    written = write_shards(data, shards, ranks)
    return {
        "edges": written.edges,
        "cut": written.cut,
        "halo": [part.halo for part in written.parts],
        "file": Path(whole).stat().st_size,
        "shards": [part.bytes for part in written.parts],
    }


def markdown(results: dict[str, Any]) -> str:
    """The page: the memory that each needed, and who trained under the limit."""
    from measure.report import machine_lines, table

    def figures(found: list[Any]) -> list[str]:
        if any(rank == "out of memory" for rank in found):
            return ["out of memory", "", "", ""]
        data = max(rank["data"] for rank in found)
        own = max(rank["data"] - rank["before"] for rank in found)
        anonymous = max(rank["anonymous"] - rank["anonymous before"] for rank in found)
        sizes = (f"{size / _MIB:.0f}" for size in (data, own, anonymous))
        return [f"{found[0]['losses'][-1]:.6f}", *sizes]

    ranks, limit = results["ranks"], results["limit"] / _MIB
    names = {
        "one process": "one process",
        "on ranks": f"{ranks} ranks with shards",
        "on ranks, as glibc does": f"{ranks} ranks with shards, freed memory left to glibc",
        "one process, limited": f"one process, limit {limit:.0f} MiB",
        "on ranks, limited": f"{ranks} ranks with shards, each limited to {limit:.0f} MiB",
    }
    rows = [[text, *figures(results[key])] for key, text in names.items()]
    limited, free = results["on ranks, limited"], results["one process"]
    trained = all(rank != "out of memory" for rank in limited)
    off = float("nan")
    if trained:
        pairs = (zip(free[0]["losses"], rank["losses"], strict=True) for rank in limited)
        off = max(abs(a - b) / abs(a) for pair in pairs for a, b in pair)
    exceeds = results["one process, limited"] == ["out of memory"]
    met = exceeds and trained and off <= _TOLERANCE
    head = [
        f"# A graph of {results['nodes']:,} nodes under a limit of {limit:.0f} MiB",
        "",
        f"Mesh with {results['edges']:,} edges, {results['channels']} features, 3 layers of GCN. "
        f"The file is {results['file'] / _MIB:.0f} MiB, the largest shard "
        f"{max(results['shards']) / _MIB:.0f} MiB; {results['cut']:,} edges are cut, the largest "
        f"halo is {max(results['halo']):,} nodes.",
        "",
        f"One process exceeds the limit, and {ranks} ranks train under it with its losses: "
        f"{'**yes**' if met else '**no**'} (losses differ by {off:.1e} at most).",
        "",
    ]
    columns = [
        "",
        "last loss",
        "peak of private memory, MiB (largest rank)",
        "of that for the graph",
        "of that resident and not of a file",
    ]
    lines = table(columns, rows)
    command = ["", f"    {results['command']}", ""]
    return "\n".join([*head, *lines, *command, *machine_lines(results["machine"])])


if __name__ == "__main__":
    main()
