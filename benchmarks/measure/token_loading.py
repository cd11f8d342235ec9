"""Loaders that ``largegt.py`` measures, each in a process of its own."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader

from fastgraph.pyg import fix_sampling
from fastgraph.pyg.token_loader import TokenLoader
from fastgraph.tokens import (
    HopFeatures,
    TokenStore,
    open_graph,
    write_context,
    write_graph,
    write_tokens,
)
from fastgraph.tokens.graph_files import graph_of_edges
from measure.graphs import load

FANOUTS = [20, 10]
WAYS = (
    "TokenLoader, bfloat16",
    "TokenLoader, float32",
    "TokenLoader, bfloat16, cached",
    "NeighborLoader [20, 10], float32",
    "the release's collate, float32 in memory",
)


def prepare(folder: Path, source: str, k: int, channels: int, num_seeds: int) -> dict[str, Any]:
    """Write all that the loaders read; returns facts of it."""
    data = load(source)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(data.num_nodes, channels, generator=generator)
    write_graph(folder / "graph", graph_of_edges(data.edge_index, data.num_nodes, "in"))
    np.save(folder / "x.npy", x.numpy())
    seeds = torch.randperm(data.num_nodes, generator=generator)[:num_seeds].sort().values
    into = open_graph(folder / "graph").into
    assert into is not None
    write_tokens(into, folder / "tokens", k, nodes=seeds)
    for dtype in (torch.bfloat16, torch.float32):
        write_context(into, x, folder / f"context-{dtype}", dtype=dtype)
    size = HopFeatures(folder / "context-torch.bfloat16").nbytes
    return {"nodes": data.num_nodes, "edges": data.num_edges, "bfloat16_bytes": size}


class _Release:
    """Batches as the authors' release makes them, of tensors in memory."""

    def __init__(self, store: TokenStore, features: Tensor, batch_size: int) -> None:
        assert store.nodes is not None
        self.nodes = store.nodes
        self.batch_size = batch_size
        self.sampled = store.lookup(store.nodes).long()
        self.own, self.context = features[:, 0].clone(), features[:, 1:].clone()

    def __iter__(self) -> Iterator[Data]:
        k, channels = self.sampled.shape[1], self.own.shape[1]
        for rows in torch.arange(len(self.nodes)).split(self.batch_size):
            tokens = torch.empty(len(rows), 3 * k, channels)
            nodes = torch.stack([self.sampled[row] for row in rows]).flatten()
            i, j = torch.meshgrid(torch.arange(len(rows)), torch.arange(k), indexing="ij")
            i, j = i.flatten(), 3 * j.flatten()
            tokens[i, j] = self.own[nodes]
            tokens[i, j + 1] = self.context[nodes, 0]
            tokens[i, j + 2] = self.context[nodes, 1]
            yield Data(tokens=tokens, n_id=self.nodes[rows])


def loader_of(way: str, folder: Path, batch: int, cache: int) -> Any:
    """A loader over mapped files."""
    store = TokenStore(folder / "tokens")
    assert store.nodes is not None
    if way.startswith("NeighborLoader"):
        fix_sampling()
        into = open_graph(folder / "graph").into
        assert into is not None
        x = torch.from_numpy(np.load(folder / "x.npy", mmap_mode="c"))
        # Of compressed columns, as PyG takes those of edges that are sorted already.
        targets = torch.repeat_interleave(into.ptr.long().diff())
        edge_index = torch.stack([into.neighbors.long(), targets])
        data = Data(x=x, edge_index=edge_index)
        return NeighborLoader(
            data, FANOUTS, input_nodes=store.nodes, batch_size=batch, is_sorted=True
        )
    dtype = torch.bfloat16 if "bfloat16" in way else torch.float32
    features = HopFeatures(folder / f"context-{dtype}")
    if way.startswith("the release"):
        return _Release(store, features.rows, batch)
    held = cache if "cached" in way else None
    return TokenLoader(store, features=features, batch_size=batch, cache=held)


def measured(
    way: str, folder: Path, batch: int, cache: int, rounds: int, threads: int
) -> dict[str, Any]:
    """One epoch after the pages of all files were dropped, and the best of some after it."""
    torch.set_num_threads(threads)
    before = _anonymous()
    loader = loader_of(way, folder, batch, cache)
    opened = _anonymous() - before
    if isinstance(loader, TokenLoader):  # what is mapped is not forgotten
        loader.features = HopFeatures(loader.features.folder)  # type: ignore[union-attr]
    _drop_pages(folder)
    found: dict[str, Any] = {"way": way, "opened_bytes": max(opened, 0)}
    peak = [0]

    def epoch() -> tuple[int, int]:
        seeds = size = 0
        for made in loader:
            seeds += len(made.n_id) if "tokens" in made else made.batch_size
            size += sum(value.nbytes for _, value in made if isinstance(value, Tensor))
            peak[0] = max(peak[0], _anonymous() - before)
        return seeds, size

    faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    read = _read_bytes()
    (seeds, size), cpu, wall = _timed(epoch)
    found |= {
        "seeds": seeds,
        "batch_bytes": size * batch // seeds,
        "cold_cpu": cpu,
        "cold_wall": wall,
        "cold_faults": resource.getrusage(resource.RUSAGE_SELF).ru_majflt - faults,
        "cold_read_bytes": _read_bytes() - read,
    }
    warm = [_timed(epoch)[1:] for _ in range(rounds)]
    found["warm_cpu"], found["warm_wall"] = (min(column) for column in zip(*warm, strict=True))
    found["peak_bytes"] = peak[0]
    info = loader.cache_info() if isinstance(loader, TokenLoader) else None
    if info is not None and info.rows:
        found |= {"cache_bytes": info.nbytes, "hit_rate": info.hits / info.reads}
    return found


def _timed(step: Callable[[], Any]) -> tuple[Any, float, float]:
    cpu, wall = time.process_time(), time.perf_counter()
    result = step()
    return result, time.process_time() - cpu, time.perf_counter() - wall


def _drop_pages(folder: Path) -> None:
    """Have the system forget what it has read of files, as after a start."""
    for path in folder.rglob("*"):
        if path.is_file():
            opened = os.open(path, os.O_RDONLY)
            os.fsync(opened)
            os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(opened)


def _anonymous() -> int:
    """Bytes of this process that no file backs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = dict(line.split(":", 1) for line in lines)
    return 1024 * sum(int(found[name].split()[0]) for name in ("RssAnon", "RssShmem"))


def _read_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ", 1) for line in lines)["read_bytes"])


def context_step(folder: Path, out: Path, memory: int, threads: int) -> dict[str, Any]:
    """Write context features within a bound, and say what of it was allocated at the most."""
    torch.set_num_threads(threads)
    into = open_graph(folder / "graph").into
    assert into is not None
    x = np.load(folder / "x.npy", mmap_mode="r")
    peak, before = [0], _anonymous()
    kernel = write_context.__globals__["spmm"]

    def watched(*arguments: Any, **options: Any) -> Tensor:
        sums: Tensor = kernel(*arguments, **options)
        peak[0] = max(peak[0], _anonymous() - before)
        return sums

    write_context.__globals__["spmm"] = watched
    _, cpu, wall = _timed(lambda: write_context(into, x, out, memory=memory))
    return {"memory": memory, "cpu": cpu, "wall": wall, "peak_bytes": peak[0]}
