"""Rows of local nodes in a folder of shards."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastgraph import manifest
from fastgraph.layers.arguments import check_flags, checked_path
from fastgraph.tokens.graph_files import map_file
from fastgraph.tokens.journal import JOURNAL, check_identity
from fastgraph.tokens.local_nodes import chosen_nodes

FORM = manifest.Format("fastgraph.tokens", 1)
ROWS = "rows.npy"
NODES = "nodes.npy"
_SHARD = re.compile(r"shard-(\d+)-of-(\d+)")
_OF_SHARD = ("shard", "rows")
"""In these, and in counts, manifests of two shards may differ."""
IDENTITY = (
    *("k", "seed", "variant", "direction", "hub_cap"),
    *("graph", "num_nodes", "nodes", "num_rows", "shards"),
)
"""In these they agree."""


def shard_folder(folder: Path, shard: int, shards: int) -> Path:
    """The folder of a shard, counted from 1."""
    return folder / f"shard-{shard:05d}-of-{shards:05d}"


def shard_folders(folder: Path) -> list[Path]:
    """Those that are there, in order."""
    return sorted(path for path in folder.glob("shard-*-of-*") if _SHARD.fullmatch(path.name))


def rows_of_shard(shard: int, shards: int, num_rows: int) -> range:
    """Which rows of a store a shard has."""
    return range((shard - 1) * num_rows // shards, shard * num_rows // shards)


class TokenStore:
    """The rows that ``python -m fastgraph tokens`` or :func:`write_tokens` wrote, mapped.

    Pickles as its path, and so goes to the workers of a ``DataLoader``.

    Args:
        folder: with all shards.
        verify: whether files are read for their SHA-256; else their sizes are compared.

    Attributes:
        folder: where it is.
        num_nodes: of the graph.
        k: how many nodes a row has.
        seed: of the sample.
        variant: see :func:`local_nodes`, as for those below.
        direction: see there.
        hub_cap: see there.
        nodes: those that have rows, int64 ``[rows]``, in ascending order; ``None`` if all have.
        counts: of all rows together: ``candidates``, entries of lists that were looked at,
            ``few`` and ``none``, nodes with fewer than ``k - 1`` nodes in two hops and without any,
            and ``thinned``, lists longer than ``hub_cap``.

    Raises:
        FileFormatError: a shard is missing, unfinished, cut off, of another sample or no shard.
    """

    def __init__(self, folder: Path | str, *, verify: bool = False) -> None:
        self.folder = checked_path(folder=folder)
        check_flags(verify=verify)
        shards = [_read(path, verify) for path in shard_folders(self.folder)]
        if not shards:
            raise manifest.FileFormatError(f"{self.folder}: expected a folder of shards, got none")
        first = shards[0].content
        for other in shards:
            check_same(other.folder, first, other.content)
        there = {one.content["shard"] for one in shards}
        if missing := sorted(set(range(1, first["shards"] + 1)) - there):
            raise manifest.FileFormatError(
                f"{self.folder}: expected {first['shards']} shards, got none of number "
                f"{', '.join(map(str, missing))}"
            )
        self.num_nodes: int = first["num_nodes"]
        self.k: int = first["k"]
        self.seed: int = first["seed"]
        self.variant: str = first["variant"]
        self.direction: str = first["direction"]
        self.hub_cap: int | None = first["hub_cap"]
        names = ("candidates", "few", "none")
        self.counts = {name: sum(one.content[name] for one in shards) for name in names}
        self.counts["thinned"] = first["thinned"]
        self._rows = [_rows(one) for one in shards]
        self._starts = torch.tensor([0, *(len(rows) for rows in self._rows)]).cumsum(0)
        self.nodes: Tensor | None = None
        if first["nodes"] is not None:
            self.nodes = torch.cat([map_file(one.folder / NODES) for one in shards])
        expected = first["num_rows"]
        if len(self) != expected or (self.nodes is not None and self.nodes.numel() != expected):
            raise manifest.FileFormatError(
                f"{self.folder}: expected {expected} rows and nodes, got {len(self)}"
            )

    def __len__(self) -> int:
        """The number of rows."""
        return int(self._starts[-1])

    def __reduce__(self) -> tuple[type[TokenStore], tuple[Path]]:
        return type(self), (self.folder,)

    def __repr__(self) -> str:
        return f"TokenStore({str(self.folder)!r}, rows={len(self)}, k={self.k}, seed={self.seed})"

    def lookup(self, nodes: Tensor) -> Tensor:
        """The rows of some nodes.

        Args:
            nodes: ``[M]``, int64 or int32, in any order and as often as they like, or a mask of all
                nodes of the graph, ``M`` of which are chosen.

        Returns:
            int32 ``[M, k]``.

        Raises:
            TypeError: ``nodes`` is no tensor of integers, and no mask.
            ValueError: it has another shape.
            IndexError: a node has no row.
        """
        rows = self._row_numbers(chosen_nodes(nodes, self.num_nodes))
        found = torch.empty(len(rows), self.k, dtype=torch.int32)
        shard = torch.bucketize(rows, self._starts[1:], right=True)
        for number in shard.unique().tolist():
            own = (shard == number).nonzero().flatten()
            places = (rows[own] - self._starts[number]).numpy()
            found[own] = torch.from_numpy(self._rows[number][places])
        return found

    def _row_numbers(self, nodes: Tensor) -> Tensor:
        if self.nodes is None:
            rows, has_row = nodes, (nodes >= 0) & (nodes < self.num_nodes)
        elif self.nodes.numel():
            rows = torch.searchsorted(self.nodes, nodes)
            has_row = self.nodes[rows.clamp(max=self.nodes.numel() - 1)] == nodes
        else:
            rows, has_row = nodes, torch.zeros_like(nodes, dtype=torch.bool)
        if not bool(has_row.all()):
            without = int(nodes[~has_row][0])
            among = f"{len(self)} of {self.num_nodes} nodes" if self.nodes is not None else "all"
            raise IndexError(
                f"nodes holds {without}, which has no row in {self.folder}: it has those of {among}"
                + ("" if self.nodes is not None else f" {self.num_nodes} nodes")
            )
        return rows

    def sha256(self) -> str:
        """The SHA-256 of all rows in order, which is the same for any number of shards."""
        digest = hashlib.sha256()
        for rows in self._rows:
            for at in range(0, len(rows), _ROWS_AT_ONCE):
                digest.update(np.ascontiguousarray(rows[at : at + _ROWS_AT_ONCE]).data)
        return digest.hexdigest()


_ROWS_AT_ONCE = 1 << 14


def _read(folder: Path, verify: bool) -> manifest.Manifest:
    if (folder / JOURNAL).exists():
        raise manifest.FileFormatError(
            f"{folder}: expected a whole shard, got one that is not finished: write it with resume"
        )
    found = manifest.read(folder, FORM)
    known = {*IDENTITY, *_OF_SHARD, "candidates", "few", "none", "thinned"}
    if set(found.content) != known:
        raise manifest.FileFormatError(
            f"{folder}: expected a manifest with {sorted(known)}, got {sorted(found.content)}"
        )
    if shard_folder(folder.parent, found.content["shard"], found.content["shards"]) != folder:
        raise manifest.FileFormatError(
            f"{folder}: expected this shard, got number {found.content['shard']} of "
            f"{found.content['shards']}"
        )
    names = [ROWS] if found.content["nodes"] is None else [ROWS, NODES]
    manifest.verify(found, names, checksums=verify)
    return found


def _rows(shard: manifest.Manifest) -> np.ndarray:
    """The rows of a shard, int32 ``[rows, k]``, mapped."""
    file = shard.folder / ROWS
    shape = (shard.content["rows"], shard.content["k"])
    try:
        rows: np.ndarray = np.load(file, mmap_mode="r" if shape[0] else None, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise manifest.FileFormatError(f"{file}: expected a whole .npy file: {error}") from error
    if rows.shape != shape or rows.dtype != np.int32:
        raise manifest.FileFormatError(
            f"{file}: expected int32 of shape {list(shape)}, got {rows.dtype} of {list(rows.shape)}"
        )
    return rows


def check_same(folder: Path, expected: dict[str, Any], found: dict[str, Any]) -> None:
    """Refuse a shard of another sample.

    Raises:
        FileFormatError: it is one; the error names what differs.
    """
    check_identity(folder, IDENTITY, expected, found, "it is a shard of another sample")
