"""Kronecker graphs in files, made out of core: edges are sorted part by part."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

_LEVELS_OF_DRAW = 2
_CHUNK = 1 << 22
_EDGES_OF_PART = 1 << 24
_QUADRANTS = (0.57, 0.19, 0.19, 0.05)
"""Of R-MAT, as Graph500 has them: source bit 0 or 1 by rows, destination bit by columns."""


def write_kronecker(folder: Path, scale: int, factor: int) -> None:
    """Write a directed graph of ``2^scale`` nodes and ``factor`` edges a node by destination.

    ``colptr.npy`` is int64, ``row.npy`` int32, as :func:`fastgraph.tokens.open_graph` maps them.
    Numbers of nodes are mixed, so that hubs are anywhere. Memory is that of a part of the edges,
    whatever their number; beside the graph the disk holds 8 bytes for each edge meanwhile.
    """
    folder.mkdir(parents=True)
    num_nodes, num_edges = 1 << scale, factor << scale
    parts = min(max(num_edges // _EDGES_OF_PART, 1), num_nodes)
    width = num_nodes // parts if num_nodes % parts == 0 else num_nodes // parts + 1
    files = [folder / f"part-{number}" for number in range(-(-num_nodes // width))]
    streams = [file.open("wb") for file in files]
    for source, target in _edges(scale, num_edges):
        which = target // width
        order = which.argsort(kind="stable")
        ends = np.searchsorted(which[order], np.arange(len(files) + 1))
        pairs = np.stack([target, source], axis=1)[order]
        for number, stream in enumerate(streams):
            pairs[ends[number] : ends[number + 1]].tofile(stream)
    for stream in streams:
        stream.close()
    ptr = np.lib.format.open_memmap(folder / "colptr.npy", "w+", np.int64, (num_nodes + 1,))
    row = np.lib.format.open_memmap(folder / "row.npy", "w+", np.int32, (num_edges,))
    done = 0
    for number, file in enumerate(files):
        pairs = np.fromfile(file, np.uint32).reshape(-1, 2)
        file.unlink()
        first, last = number * width, min((number + 1) * width, num_nodes)
        keys = pairs[:, 0].astype(np.uint64) << np.uint64(32) | pairs[:, 1]
        keys.sort()
        row[done : done + len(keys)] = (keys & np.uint64(0xFFFFFFFF)).astype(np.int32)
        degrees = np.bincount(
            (keys >> np.uint64(32)).astype(np.int64) - first, minlength=last - first
        )
        ptr[first + 1 : last + 1] = done + degrees.cumsum()
        done += len(keys)
    ptr.flush()
    row.flush()


def _edges(scale: int, num_edges: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Sources and destinations, uint32, in chunks."""
    generator = np.random.default_rng(0)
    sources, targets = _tables()
    for begin in range(0, num_edges, _CHUNK):
        size = min(_CHUNK, num_edges - begin)
        source, target = np.zeros(size, np.uint32), np.zeros(size, np.uint32)
        for _ in range(-(-scale // _LEVELS_OF_DRAW)):
            draw = generator.integers(0, 1 << 16, size, dtype=np.uint16)
            source = source << np.uint32(_LEVELS_OF_DRAW) | sources[draw]
            target = target << np.uint32(_LEVELS_OF_DRAW) | targets[draw]
        yield _mixed(source, scale), _mixed(target, scale)


def _tables() -> tuple[np.ndarray, np.ndarray]:
    """The bits of two levels for each number of 16 bits: chances in steps of 2^-16."""
    of_level = np.array(_QUADRANTS)
    ends = np.rint(np.outer(of_level, of_level).ravel().cumsum() * (1 << 16)).astype(np.int64)
    cell = np.searchsorted(ends, np.arange(1 << 16), side="right")
    upper, lower = cell // 4, cell % 4
    source = (upper // 2) * 2 + lower // 2
    target = (upper % 2) * 2 + lower % 2
    return source.astype(np.uint32), target.astype(np.uint32)


def _mixed(node: np.ndarray, scale: int) -> np.ndarray:
    """A bijection of the numbers of ``scale`` bits; higher ones are dropped."""
    mask = np.uint32((1 << scale) - 1)
    node = node & mask
    for factor in (0x9E3779B1, 0x85EBCA6B):
        node = (node * np.uint32(factor)) & mask
        node ^= node >> np.uint32(max(scale // 2, 1))
    return node
