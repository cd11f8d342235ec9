"""Local nodes (LargeGT's sampling), by graph, beside the release's way.

    FASTGRAPH_DATA=... PYTHONPATH=. python benchmarks/local_nodes.py [--quick]

Processor time is that of all threads together. With two threads that of the busier one stands
beside it: on two free cores it is the time that passes, which means nothing on a machine that has
other work. Contestants take turns. The release multiplies the adjacency matrix with itself by
scipy, and samples from lists of Python; it runs in a process of its own, of which the most
anonymous memory is shown.

Two generated graphs: ``kronecker``, R-MAT's skew, in files that are mapped, first with nothing of
them in memory; and ``uniform``, lists of 14 or 15 nodes as papers100M has on average, far larger
than caches, from which its time is projected. Results go to
``benchmarks/results/<date>-local-nodes.json`` and ``.md``.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from measure.output import RESULTS, machine_table, publish

_K = 100
_REAL = ("wordnet", "debian", "tolokers")
_PAPERS_NODES, _PAPERS_EDGES = 111_059_956, 1_615_685_872


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--graphs", default="wordnet,debian,tolokers", show_default=True)
@click.option("--scale", default=20, show_default=True, help="Of the Kronecker graph.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
@click.option("--quick", is_flag=True, help="Small graphs, two rounds.")
@click.option("--release", "release_of", hidden=True, help="Run the release's way on a graph.")
@click.option("--memory-of", type=click.Path(path_type=Path), hidden=True)
def main(
    graphs: str,
    scale: int,
    rounds: int,
    out: Path,
    quick: bool,
    release_of: str | None,
    memory_of: Path | None,
) -> None:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is loaded
    if release_of is not None:
        print(json.dumps(_release(release_of, 300 if quick else 5000)))
        return
    if memory_of is not None:
        print(json.dumps(_memory(memory_of)))
        return
    from measure.machine import machine_facts

    rounds, scale = (2, min(scale, 12)) if quick else (rounds, scale)
    results: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/local_nodes.py", *sys.argv[1:]]),
        "machine": machine_facts(2),
        "k": _K,
        "graphs": {},
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cells = results["graphs"]
        for graph in filter(None, graphs.split(",")):
            cells[graph] = _real(graph, rounds, quick)
        cells["kronecker"] = _kronecker(folder / "kronecker", scale, rounds, quick)
        cells["uniform"] = _uniform(1 << (12 if quick else 22), rounds, quick)
        results["memory"] = _child("--memory-of", str(folder / "kronecker"))
    results["papers100M"] = _projected(results["graphs"]["uniform"], results["graphs"]["kronecker"])
    publish(Console(), out, "local-nodes", results, _markdown(results))


def _real(name: str, rounds: int, quick: bool) -> dict[str, Any]:
    from fastgraph.tokens.graph_files import graph_of_edges
    from measure.graphs import load

    data = load(name)
    lists = graph_of_edges(data.edge_index, data.num_nodes, "in").lists("in")
    cell = _measure(lists, None, rounds)
    cell["edges"] = data.num_edges
    capped = _measure(lists, None, 1, hub_cap=1024)
    cell["capped"] = {"candidates": capped["candidates"], "nodes_per_s": capped["nodes_per_s"]}
    flags = ["--quick"] if quick else []
    cell["release"] = _child("--release", name, *flags)
    return cell


def _measure(lists: Any, nodes: Any, rounds: int, **options: Any) -> dict[str, Any]:
    import torch

    from fastgraph.tokens.local_nodes import LocalNodesSampler, checked_manner

    manner = checked_manner(_K, 0, "in", options.get("hub_cap"), "paper")
    sampler = LocalNodesSampler(lists, manner)
    nodes = torch.arange(sampler.num_nodes) if nodes is None else nodes
    rows, counts = sampler.sample(nodes)
    times: dict[int, list[tuple[float, float]]] = {1: [], 2: []}
    before = torch.get_num_threads()
    for _ in range(rounds):
        for threads, taken in times.items():
            torch.set_num_threads(threads)
            taken.append(_timed(lambda: sampler.sample(nodes, rows)))
    torch.set_num_threads(before)
    one = statistics.median(whole for whole, _ in times[1])
    two, busier = (statistics.median(of) for of in zip(*times[2], strict=True))
    return {
        "nodes": sampler.num_nodes,
        "rows": len(nodes),
        "candidates": counts.candidates,
        "few": counts.few,
        "none": counts.none,
        "seconds": one,
        "seconds_all": [whole for whole, _ in times[1]],
        "nodes_per_s": len(nodes) / one,
        "candidates_per_s": counts.candidates / one,
        "two_threads": {"seconds": two, "busier": busier, "speedup": one / busier},
    }


def _timed(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds of the processor of all threads, and of the busiest."""
    begin = _of_threads()
    call()
    end = _of_threads()
    taken = [value - begin.get(thread, 0) for thread, value in end.items()]
    return sum(taken), max(taken)


def _of_threads() -> dict[str, float]:
    """Seconds of each thread, by the clock that Linux has for its number."""
    tasks = [task.name for task in Path("/proc/self/task").iterdir()]
    return {task: time.clock_gettime(~int(task) << 3 | 6) for task in tasks}


def _kronecker(folder: Path, scale: int, rounds: int, quick: bool) -> dict[str, Any]:
    """A directed R-MAT graph in files: cold, then as others."""
    import torch

    from fastgraph.tokens import TokenGraph, open_graph, write_graph

    write_graph(folder, TokenGraph(_rmat(scale, 16), None))
    size = sum(file.stat().st_size for file in folder.iterdir())
    nodes = torch.randperm(1 << scale, generator=torch.Generator().manual_seed(1))
    nodes = nodes[: 200 if quick else 4000].sort().values
    lists = open_graph(folder).lists("in")
    from fastgraph.tokens.local_nodes import LocalNodesSampler, checked_manner

    sampler = LocalNodesSampler(lists, checked_manner(_K, 0, "in", None, "paper"))
    for file in folder.iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before, wall = _read_bytes(), time.perf_counter()
    torch.set_num_threads(1)
    cold, _ = _timed(lambda: sampler.sample(nodes))
    read, wall = _read_bytes() - before, time.perf_counter() - wall
    cell = _measure(lists, nodes, rounds)
    return {
        **cell,
        "bytes": size,
        "cold": {"seconds": cold, "wall": wall, "bytes_read": read, "pages": read // 4096},
    }


def _read_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def _rmat(scale: int, factor: int) -> Any:
    import torch

    from fastgraph.tokens import NeighborLists

    generator = torch.Generator().manual_seed(0)
    size, order = 1 << scale, torch.randperm(1 << scale, generator=generator)
    keys = []
    for _ in range(factor):
        source = torch.zeros(size, dtype=torch.int64)
        target = torch.zeros(size, dtype=torch.int64)
        for _ in range(scale):
            draw = torch.rand(size, generator=generator)
            source = 2 * source + (draw > 0.76)
            target = 2 * target + (((draw > 0.57) & (draw <= 0.76)) | (draw > 0.95))
        keys.append(order[target] << 32 | order[source])
    edges = torch.cat(keys).sort().values
    ptr = torch.zeros(size + 1, dtype=torch.int64)
    torch.cumsum(torch.bincount(edges >> 32, minlength=size), 0, out=ptr[1:])
    return NeighborLists(ptr, (edges & 0xFFFFFFFF).to(torch.int32))


def _uniform(size: int, rounds: int, quick: bool) -> dict[str, Any]:
    import torch

    from fastgraph.tokens import NeighborLists

    ptr = (torch.arange(size + 1, dtype=torch.float64) * (_PAPERS_EDGES / _PAPERS_NODES)).long()
    generator = torch.Generator().manual_seed(0)
    other = torch.randint(0, size, (int(ptr[-1]),), generator=generator, dtype=torch.int32)
    # Rows in a row, as all nodes are.
    nodes = torch.arange(size // 2, size // 2 + (500 if quick else 200_000))
    return _measure([NeighborLists(ptr, other)], nodes, rounds)


def _projected(uniform: dict[str, Any], kronecker: dict[str, Any]) -> dict[str, Any]:
    """Minutes of 16 cores for papers100M.

    Time is that of a node of the uniform graph, with its lists, and of each candidate beyond as in
    the Kronecker graph. Nobody here knows how many candidates papers100M has: its mean degree
    squared, times a factor for hubs; debian's is 417, wordnet's 27, tolokers' 4.4.
    """
    of_node = uniform["seconds"] / uniform["rows"]
    of_candidate = kronecker["seconds"] / kronecker["candidates"]
    known = uniform["candidates"] / uniform["rows"]
    degree = _PAPERS_EDGES / _PAPERS_NODES
    found: dict[str, Any] = {"efficiency": 0.9, "cores": 16, "minutes": {}}
    for factor in (1, 5, 27, 100, 417):
        candidates = degree + factor * degree**2
        seconds = of_node + max(candidates - known, 0) * of_candidate
        found["minutes"][str(factor)] = _PAPERS_NODES * seconds / 16 / 0.9 / 60
    found["rows_gib"] = _PAPERS_NODES * _K * 4 / 2**30
    pages = kronecker["cold"]["pages"] / kronecker["rows"]
    found["pages_per_node_cold"] = pages
    return found


def _child(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


class _Peak:
    """The most anonymous memory while a block runs, above that before, in bytes."""

    def __enter__(self) -> _Peak:
        self._begin, self._done = self._now(), threading.Event()
        self.bytes = 0
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.01):
            self.bytes = max(self.bytes, self._now() - self._begin)

    @staticmethod
    def _now() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def _memory(folder: Path) -> dict[str, Any]:
    """Of writing a store of a graph in files, with its blocks of 32 MiB."""
    import torch

    from fastgraph.tokens import open_graph, write_tokens

    graph = open_graph(folder)
    size = graph.lists("in")[0].ptr.numel() - 1
    torch.set_num_threads(2)
    found: dict[str, Any] = {}
    for hub_cap, every in ((16, 1), (1024, max(size // 20_000, 1))):
        with tempfile.TemporaryDirectory() as out, _Peak() as peak:
            nodes = None if every == 1 else torch.arange(0, size, every)
            written = write_tokens(graph, out, _K, nodes=nodes, hub_cap=hub_cap)
            rows = (written / "rows.npy").stat().st_size
        found[str(hub_cap)] = {"anonymous": peak.bytes, "rows": rows}
    return found


def _release(name: str, most: int) -> dict[str, Any]:
    """The release's way: A A by scipy, and lists of Python, for some nodes."""
    import numpy as np
    import scipy.sparse as sp

    from measure.graphs import load

    data = load(name)
    ends, size = data.edge_index.numpy(), data.num_nodes
    with _Peak() as peak:
        begin = time.process_time()
        ones = np.ones(data.num_edges, dtype=np.float32)
        near = sp.csr_matrix((ones, (ends[1], ends[0])), shape=(size, size))
        far = near @ near
        hops = [np.split(matrix.indices, matrix.indptr)[1:-1] for matrix in (near, far)]
        made = time.process_time() - begin
        begin = time.process_time()
        for i in random.Random(0).sample(range(size), min(most, size)):
            candidates = hops[0][i].tolist() + hops[1][i].tolist()
            if len(candidates) >= _K - 1:
                random.sample(candidates, _K - 1)
            elif candidates:
                (candidates * ((_K - 1) // len(candidates) + 1))[: _K - 1]
            else:
                random.sample(range(size), _K - 1)
        each = (time.process_time() - begin) / min(most, size)
    return {
        "seconds_product": made,
        "seconds_per_node": each,
        "nodes_per_s": size / (made + each * size),
        "entries": int(far.nnz),
        "anonymous": peak.bytes,
    }


def _markdown(results: dict[str, Any]) -> str:
    lines = ["# Local nodes", "", f"`{results['command']}`", "", f"K = {results['k']}."]
    lines += ["", *machine_table(results["machine"]), ""]
    lines += [
        "Processor time of one thread, the median; two threads by the busier one's.",
        "",
        "| graph | nodes | rows | candidates a row | 1,000 rows/s | M candidates/s | 2 threads |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, cell in results["graphs"].items():
        lines.append(
            f"| {name} | {cell['nodes']:,} | {cell['rows']:,} "
            f"| {cell['candidates'] / cell['rows']:,.0f} | {cell['nodes_per_s'] / 1e3:,.1f} "
            f"| {cell['candidates_per_s'] / 1e6:,.0f} | {cell['two_threads']['speedup']:.2f} x |"
        )
    lines += [
        "",
        "The release's way; all of its product, and sampling from some nodes.",
        "",
        "| graph | product, s | entries of it | 1,000 nodes/s | ours | anonymous GiB |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, cell in results["graphs"].items():
        if release := cell.get("release"):
            lines.append(
                f"| {name} | {release['seconds_product']:.2f} | {release['entries']:,} "
                f"| {release['nodes_per_s'] / 1e3:.1f} "
                f"| {cell['nodes_per_s'] / release['nodes_per_s']:.1f} x "
                f"| {release['anonymous'] / 2**30:.2f} |"
            )
    lines += ["", "With `hub_cap=1024`:", ""]
    for name, cell in results["graphs"].items():
        if capped := cell.get("capped"):
            lines.append(
                f"- {name}: {capped['candidates'] / cell['rows']:,.0f} candidates a node, "
                f"{capped['nodes_per_s'] / 1e3:,.1f} thousand nodes/s"
            )
    kronecker = results["graphs"]["kronecker"]
    cold = kronecker["cold"]
    lines += [
        "",
        f"The Kronecker graph is in files of {kronecker['bytes'] / 2**20:,.0f} MiB. With nothing "
        f"of it in memory {kronecker['rows']:,} rows took {cold['seconds']:.2f} s of the processor "
        f"({kronecker['seconds']:.2f} s after that), {cold['wall']:.2f} s by the clock, and read "
        f"{cold['bytes_read'] / 2**20:,.0f} MiB.",
        "",
        "Most anonymous memory of writing a store of it, on two threads, above that before:",
        "",
    ]
    for hub_cap, found in results["memory"].items():
        lines.append(
            f"- `hub_cap={hub_cap}`: {found['anonymous'] / 2**20:,.1f} MiB for "
            f"{found['rows'] / 2**20:,.0f} MiB of rows"
        )
    papers = results["papers100M"]
    lines += [
        "",
        f"## papers100M, projected: {_PAPERS_NODES:,} nodes, {_PAPERS_EDGES:,} edges",
        "",
        "Assumed: CSR in memory; 16 cores like this one, of which 0.9 are used; a node takes what "
        "it takes in `uniform`, and each further candidate what it takes in `kronecker`. How many "
        "candidates there are is not known here: mean degree squared times a factor, which is 1 "
        "without hubs, 4.4 for tolokers, 27 for wordnet, 417 for debian.",
        "",
        "| factor | minutes |",
        "| ---: | ---: |",
        *(f"| {factor} | {minutes:.1f} |" for factor, minutes in papers["minutes"].items()),
        "",
        f"Rows: {papers['rows_gib']:.1f} GiB.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
