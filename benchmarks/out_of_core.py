"""LargeGT's preparation and loader in a control group with less memory than their files have.

    PYTHONPATH=. python benchmarks/out_of_core.py [--quick]

Three parts. ``tokens``: a Kronecker graph, made out of core, is sampled by
``python -m fastgraph tokens`` for some nodes. ``context``: ``python -m fastgraph context`` on a
smaller one, in half of the memory. ``loader``: a ``TokenLoader`` over features that do not fit,
without and with ``cache=``.
Each runs in a control group whose limit includes pages of files, and the first two once more
without, to the same bytes. Files are dropped from memory first.

A group needs root and control groups of version 1. Where none can be made the page says so, and all
runs are without a limit. Results go to ``benchmarks/results/<date>-out-of-core.json`` and ``.md``.
"""

from __future__ import annotations

import gc
import json
import os
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console

from measure.kronecker import write_kronecker
from measure.memory_group import drop_pages, measured, memory_group, reason_without
from measure.output import RESULTS, machine_table, publish, write

_MIB = 1 << 20
_K = 100
_FACTOR, _SMALL_FACTOR = 16, 4


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--scale", default=25, show_default=True, help="Of the graph that is sampled.")
@click.option("--small", default=20, show_default=True, help="Of that of context and loader.")
@click.option("--nodes", default=20_000, show_default=True, help="How many are sampled.")
@click.option("--limit", default=512, show_default=True, help="MiB of the control group.")
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False), help="For the files.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
@click.option("--quick", is_flag=True, help="Small graphs.")
@click.option("--parts", default="tokens,context,loader", show_default=True)
@click.option("--load", type=click.Path(path_type=Path), hidden=True, help="Run a loader.")
def main(
    scale: int,
    small: int,
    nodes: int,
    limit: int,
    folder: Path | None,
    out: Path,
    quick: bool,
    parts: str,
    load: Path | None,
) -> None:
    if load is not None:
        print(json.dumps(_load(load)))
        return
    from measure.machine import machine_facts

    scale, small, nodes = (14, 12, 300) if quick else (scale, small, nodes)
    reason = reason_without()
    results: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/out_of_core.py", *sys.argv[1:]]),
        "machine": machine_facts(2),
        "limit": None if reason else limit * _MIB,
        "no_limit_because": reason,
    }
    most = results["limit"]
    with tempfile.TemporaryDirectory(dir=folder) as name:
        work = Path(name)
        for part in parts.split(","):
            if part == "tokens":
                large = (folder or work) / f"kronecker-{scale}"
                results["generated"] = _generated(large, scale)
                results[part] = _tokens(large, work, scale, nodes, most)
            elif part == "context":
                results[part] = _context(work, small, most and most // 2)
            else:
                results[part] = _loader(work, small, 32 if quick else 1024, most)
            write(out, "out-of-core", results, _markdown(results))
    publish(Console(), out, "out-of-core", results, _markdown(results))


def _generated(folder: Path, scale: int) -> dict[str, Any]:
    """A graph that is in the folder already is taken as it is."""
    begin = time.perf_counter()
    if not folder.exists():
        write_kronecker(folder, scale, _FACTOR)
    return {
        "nodes": 1 << scale,
        "edges": _FACTOR << scale,
        "bytes": _size(folder),
        "wall": time.perf_counter() - begin,
    }


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _run(arguments: list[Any], limit: int | None, *cold: Path) -> dict[str, Any]:
    """A program of Python on two threads; folders are dropped from memory first."""
    for folder in cold:
        drop_pages(folder)
    env = {**os.environ, "OMP_NUM_THREADS": "2"}
    with memory_group(limit) as group:
        found = measured([sys.executable, *map(str, arguments)], group, env)
    if found["code"]:
        raise RuntimeError(f"{arguments} ended with {found['code']}")
    return found


def _tokens(graph: Path, work: Path, scale: int, count: int, limit: int | None) -> dict[str, Any]:
    from fastgraph.tokens import TokenStore

    generator = np.random.default_rng(1)
    chosen = np.sort(generator.choice(1 << scale, count, replace=False))
    np.save(work / "nodes.npy", chosen)
    np.save(work / "none.npy", chosen[:0])
    cells: dict[str, Any] = {}
    for name, nodes, most in (
        ("start", "none.npy", limit),
        ("limited", "nodes.npy", limit),
        ("free", "nodes.npy", None),
    ):
        command = ["-m", "fastgraph", "tokens", graph, work / name, "--k", _K]
        cells[name] = _run([*command, "--nodes", work / nodes], most, graph)
        store = TokenStore(work / name)
        cells[name] |= {"sha256": store.sha256(), **store.counts, "rows": len(store)}
    of_sampling = cells["limited"]["processor"] - cells["start"]["processor"]
    return {
        "runs": cells,
        "same_bytes": cells["limited"]["sha256"] == cells["free"]["sha256"],
        "candidates_per_s": cells["limited"]["candidates"] / of_sampling,
        "read_for_lists": cells["limited"]["read"] - cells["start"]["read"],
        "wall_of_sampling": cells["limited"]["wall"] - cells["start"]["wall"],
    }


def _context(work: Path, scale: int, limit: int | None, channels: int = 32) -> dict[str, Any]:
    from fastgraph import manifest

    graph, given = work / "for-context", work / "features"
    write_kronecker(graph, scale, _SMALL_FACTOR)
    given.mkdir()
    shape = (1 << scale, channels)
    x = np.lib.format.open_memmap(given / "x.npy", "w+", np.float32, shape)
    generator = np.random.default_rng(2)
    for begin in range(0, len(x), 1 << 18):
        x[begin : begin + (1 << 18)] = generator.standard_normal(
            (len(x[begin : begin + (1 << 18)]), channels)
        )
    x.flush()
    del x
    cells: dict[str, Any] = {}
    for name, most, memory in (("limited", limit, "64MiB"), ("free", None, "4GiB")):
        out = work / f"context-{name}"
        command = ["-m", "fastgraph", "context", graph, given / "x.npy", out, "--memory", memory]
        cells[name] = _run(command, most, graph, given)
        cells[name]["memory"] = memory
        cells[name]["sha256"] = manifest.seal(out / "rows.bin")["sha256"]
    return {
        "runs": cells,
        "limit": limit,
        "graph": _size(graph),
        "features": _size(given),
        "result": _size(work / "context-limited"),
        "same_bytes": cells["limited"]["sha256"] == cells["free"]["sha256"],
    }


def _loader(work: Path, scale: int, seeds: int, limit: int | None) -> dict[str, Any]:
    """Rows of 3 x 128 random numbers in bfloat16, of which a loader only makes copies."""
    import torch

    from fastgraph import manifest
    from fastgraph.tokens import open_graph, write_tokens
    from fastgraph.tokens.hop_features import FILE, FORMAT

    folder, nodes, channels = work / "loader", 1 << scale, 128
    chosen = torch.randperm(nodes, generator=torch.Generator().manual_seed(3))[:seeds]
    write_kronecker(work / "for-loader", scale, _SMALL_FACTOR)
    write_tokens(open_graph(work / "for-loader"), folder / "tokens", _K, nodes=chosen)
    (folder / "context").mkdir()
    noise = np.random.default_rng(4).integers(0, 1 << 14, 1 << 22, dtype=np.uint16)
    with (folder / "context" / FILE).open("wb") as stream:
        for begin in range(0, nodes * 3 * channels, len(noise)):
            noise[:1024] = begin >> 22
            noise[: nodes * 3 * channels - begin].tofile(stream)
    content = {"num_nodes": nodes, "hops": 2, "channels": channels, "dtype": "bfloat16"}
    files = {FILE: manifest.seal(folder / "context" / FILE)}
    manifest.write(folder / "context", FORMAT, {**content, "num_nan": 0}, files)
    run = _run([__file__, "--load", folder], limit, folder)
    found = json.loads(run.pop("output").splitlines()[-1])
    return {"features": _size(folder / "context"), "seeds": seeds, **run, **found}


def _load(folder: Path) -> dict[str, Any]:
    """An epoch with each cache, after it was filled, and little else of the file in memory."""
    from fastgraph.pyg.token_loader import TokenLoader
    from fastgraph.tokens import HopFeatures, TokenStore

    store, cells = TokenStore(folder / "tokens"), []
    for cache in (None, "16MiB", "64MiB"):
        drop_pages(folder)  # which are in no memory that is mapped, as the last features are gone
        features = HopFeatures(folder / "context")
        begin, read = time.perf_counter(), _read_bytes()
        loader = TokenLoader(store, features=features, batch_size=256, cache=cache)
        filling = {"wall": time.perf_counter() - begin, "read": _read_bytes() - read}
        begin, read, used = time.perf_counter(), _read_bytes(), time.process_time()
        total = sum(batch.tokens.nbytes for batch in loader)
        cells.append(
            {
                "cache": cache,
                "filling": filling,
                "wall": time.perf_counter() - begin,
                "processor": time.process_time() - used,
                "read": _read_bytes() - read,
                "tokens": total,
                **loader.cache_info()._asdict(),
            }
        )
        is_elsewhere = features.is_elsewhere
        del loader, features
        gc.collect()
    return {"is_elsewhere": is_elsewhere, "runs": cells}


def _read_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def _markdown(results: dict[str, Any]) -> str:
    limit = results["limit"]
    lines = ["# Out of core", "", f"`{results['command']}`", "", *machine_table(results["machine"])]
    lines += [
        "",
        f"No control group could be made: {results['no_limit_because']}. All runs are unlimited."
        if limit is None
        else f"The control group has {limit / _MIB:,.0f} MiB, with pages of files. MiB throughout. "
        "`anonymous` is all of the program's own memory, with that of Python and torch; `wall` is "
        "on a machine that has other work.",
    ]
    if "tokens" in results:
        lines += _of_tokens(results["generated"], results["tokens"])
    if "context" in results:
        lines += _of_context(results["context"])
    if "loader" in results:
        lines += _of_loader(results["loader"])
    return "\n".join(lines)


def _of_tokens(made: dict[str, Any], tokens: dict[str, Any]) -> list[str]:
    limited = tokens["runs"]["limited"]
    return [
        "",
        "## Tokens",
        "",
        f"Kronecker graph: {made['nodes']:,} nodes, {made['edges']:,} edges, int64 and int32, "
        f"{made['bytes'] / _MIB:,.0f} MiB in files. Local nodes of {limited['rows']:,} nodes, "
        f"K = {_K}; `start` samples none: it reads the graph for its SHA-256.",
        "",
        *_table(tokens["runs"]),
        "",
        f"{limited['candidates']:,} candidates, {tokens['candidates_per_s'] / 1e6:,.0f} million a "
        "second of the processor, without `start`; "
        f"{tokens['read_for_lists'] / _MIB:,.0f} MiB were read for lists. The bytes are "
        f"{'the same' if tokens['same_bytes'] else 'NOT THE SAME'} without a limit.",
    ]


def _of_context(context: dict[str, Any]) -> list[str]:
    sizes = (context[name] / _MIB for name in ("graph", "features", "result"))
    memory = context["runs"]["limited"]["memory"]
    group = "" if context["limit"] is None else f", in {context['limit'] / _MIB:,.0f}"
    return [
        "",
        "## Context",
        "",
        "A graph of {:,.0f} MiB, features of {:,.0f} and a result of {:,.0f}".format(*sizes)
        + f"{group}; `--memory` {memory}, and 4GiB without a limit.",
        "",
        *_table(context["runs"]),
        "",
        f"The bytes are {'the same' if context['same_bytes'] else 'NOT THE SAME'}.",
    ]


def _of_loader(loader: dict[str, Any]) -> list[str]:
    lines = [
        "",
        "## Loader",
        "",
        f"Features of {loader['features'] / _MIB:,.0f} MiB; an epoch of {loader['seeds']:,} seeds "
        "in batches of 256, after the cache was filled, which leaves its pages in memory. The "
        f"program took {loader['anonymous'] / _MIB:,.0f} MiB of its own at most.",
        "",
        "| cache | filling, s | epoch, s | processor, s | read | tokens | rows from the cache |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for run in loader["runs"]:
        lines.append(
            f"| {run['cache'] or 'none'} | {run['filling']['wall']:.1f} | {run['wall']:.1f} "
            f"| {run['processor']:.1f} | {run['read'] / _MIB:,.0f} | {run['tokens'] / _MIB:,.0f} "
            f"| {run['hits'] / run['reads']:.0%} |"
        )
    return lines


def _table(runs: dict[str, Any]) -> list[str]:
    lines = [
        "| run | wall, s | processor, s | read | major faults | anonymous | usage of the group |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, run in runs.items():
        usage = "" if run["usage"] is None else f"{run['usage'] / _MIB:,.0f}"
        lines.append(
            f"| {name} | {run['wall']:.1f} | {run['processor']:.1f} | {run['read'] / _MIB:,.0f} "
            f"| {run['major_faults']:,} | {run['anonymous'] / _MIB:,.0f} | {usage} |"
        )
    return lines


if __name__ == "__main__":
    main()
