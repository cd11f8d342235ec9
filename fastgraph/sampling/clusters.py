"""Clusters of nodes with few edges between them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fastgraph.sampling.native_calls import check_tensors, in_named_items
from fastgraph.sampling.neighbors import neighbor_sample


class PartitionError(RuntimeError):
    """METIS did not give a partition."""


def cluster(rowptr: Tensor, col: Tensor, num_parts: int, *, recursive: bool = False) -> Tensor:
    """Cut a graph into parts of about the same size by METIS (Karypis and Kumar, SISC 1998).

    Args:
        rowptr: Where the edges of each node begin and end, ``[nodes + 1]``, int32 or int64.
        col: The other end of each edge, ``[edges]``, int32 or int64. Directions, loops and repeated
            edges do not matter.
        num_parts: At least 1.
        recursive: Whether to bisect again and again rather than to cut at once.

    Returns:
        The part of each node, ``[nodes]``, int64.

    Raises:
        PartitionError: METIS failed, or counts no further than the edges of the graph.
        TypeError: An argument has another type or dtype.
        ValueError: Shapes do not fit, ``rowptr`` falls, or ``num_parts`` is not positive.
        IndexError: ``col`` names no node.
        ModuleNotFoundError: ``pymetis`` is not installed.
    """
    return cluster_each([(rowptr, col, num_parts)], recursive=recursive)[0]


def cluster_each(
    graphs: Sequence[tuple[Tensor, Tensor, int]], *, recursive: bool = False
) -> list[Tensor]:
    """:func:`cluster` of several graphs, by one process, which takes a while to start.

    Args:
        graphs: Of each ``rowptr``, ``col`` and ``num_parts``.
        recursive: See :func:`cluster`.
    """
    for package in ("numpy", "pymetis"):
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(
                f"clusters by METIS need {package}: pip install 'fastgraph[dist]'", name=package
            )
    found: list[Tensor | None] = []
    cuts = []
    for rowptr, col, num_parts in graphs:
        check_tensors(rowptr=rowptr, col=col)
        if num_parts < 1:
            raise ValueError(f"num_parts must be at least 1, got {num_parts}")
        num_nodes = max(rowptr.numel() - 1, 0)
        with in_named_items({"colptr": "rowptr", "row": "col"}):
            # The sample of no hops of all nodes has all edges, checked.
            every = torch.arange(num_nodes, dtype=col.dtype)
            whole = neighbor_sample(rowptr, col, every, [], directed=False, random_seed=0)
        edge_index = torch.stack([whole.row, whole.col]).long()
        starts, neighbours = symmetric(edge_index, num_nodes)
        if num_parts == 1 or neighbours.numel() == 0 or num_nodes <= num_parts:
            found.append(torch.arange(num_nodes) * num_parts // max(num_nodes, num_parts))
            continue
        if neighbours.numel() > torch.iinfo(torch.int32).max:
            raise PartitionError(f"METIS counts to 2^31 - 1, got {neighbours.numel():,} entries")
        shares = torch.full((num_parts,), 1 / num_parts, dtype=torch.float64)
        cuts.append(Cut(starts, neighbours, shares))
        found.append(None)
    parts = iter(parts_by_metis(cuts, recursive=recursive))
    return [next(parts) if own is None else own for own in found]


class Cut(NamedTuple):
    """A graph, and the parts that are wanted of it.

    Attributes:
        starts: Of the rows of a symmetric graph, ``[nodes + 1]``.
        neighbours: Its entries, fewer than 2^31.
        shares: Of the parts, ``[parts]``, with a sum of 1.
        weights: Of nodes, ``[nodes]``, with a sum of less than 2^31; by default all equal.
    """

    starts: Tensor
    neighbours: Tensor
    shares: Tensor
    weights: Tensor | None = None


def parts_by_metis(cuts: Sequence[Cut], *, recursive: bool) -> list[Tensor]:
    """The part of each node, int64 ``[nodes]``, of each graph, by METIS in a process of its own.

    Args:
        cuts: Of the graphs.
        recursive: See :func:`cluster`.

    Raises:
        PartitionError: METIS failed.
    """
    import numpy as np

    if not cuts:
        return []
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / f"{number:09}" for number in range(len(cuts))]
        for folder, cut in zip(folders, cuts, strict=True):
            folder.mkdir()
            arrays = {
                "starts": cut.starts.to(torch.int32),
                "neighbours": cut.neighbours.to(torch.int32),
                "targets": cut.shares.float(),
            }
            if cut.weights is not None:
                arrays["weights"] = cut.weights.to(torch.int32)
            for key, values in arrays.items():
                np.save(folder / f"{key}.npy", values.numpy())
        script = Path(__file__).with_name("metis.py")
        manner = "recursive" if recursive else "kway"
        command = [sys.executable, "-P", str(script), name, manner]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise PartitionError(f"METIS ended with {done.returncode}: {done.stderr.strip()}")
        found = [torch.from_numpy(np.load(folder / "parts.npy")) for folder in folders]
    for parts, cut in zip(found, cuts, strict=True):
        is_usable = parts.shape == (len(cut.starts) - 1,)
        if not is_usable or not 0 <= int(parts.min()) <= int(parts.max()) < len(cut.shares):
            raise PartitionError(
                f"METIS gave parts of shape {list(parts.shape)} that are out of range"
            )
    return found


def symmetric(edge_index: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """The undirected graph without self-loops and duplicates: starts of rows, neighbours."""
    source, target = edge_index[:, edge_index[0] != edge_index[1]]
    both = torch.cat([source * num_nodes + target, target * num_nodes + source]).unique()
    counts = torch.bincount(both // num_nodes, minlength=num_nodes)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)]), both % num_nodes
