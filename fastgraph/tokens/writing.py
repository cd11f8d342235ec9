"""Writes rows of local nodes, shard by shard, in blocks of which a journal keeps account.

A shard is a folder: ``rows.npy``, ``nodes.npy`` where not all nodes have rows, and while it is
written ``journal.jsonl``. Its first line names the sample; each further one says that a block of
rows is in permanent storage, with the SHA-256 of it. When a process was killed, bytes behind the
last block of the journal are dropped, and the next block is sampled. The manifest is written in the
end, and then the journal is removed.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastgraph import manifest
from fastgraph.layers.arguments import check_flags, check_functions, checked_path
from fastgraph.tokens.graph_files import NeighborLists, as_lists
from fastgraph.tokens.journal import (
    JOURNAL,
    Progress,
    add_to_journal,
    begin_journal,
    bytes_of,
    cut_journal,
    digest,
    digest_of_file,
    digest_of_graph,
    disk_may_be_full,
    locked,
    read_journal,
    write_all,
    write_new,
)
from fastgraph.tokens.local_nodes import (
    Counts,
    LocalNodesSampler,
    Manner,
    checked_manner,
    chosen_nodes,
)
from fastgraph.tokens.store import (
    FORM,
    NODES,
    ROWS,
    check_same,
    rows_of_shard,
    shard_folder,
    shard_folders,
)

_BLOCK_BYTES = 32 << 20
_OF_BLOCK = {"rows", "sha256", "counts"}
"""Of a line of the journal."""


def write_tokens(
    graph: Any,
    folder: Path | str,
    k: int,
    *,
    seed: int = 0,
    nodes: Tensor | None = None,
    shard: int = 1,
    shards: int = 1,
    resume: bool = False,
    direction: str = "in",
    hub_cap: int | None = None,
    variant: str = "paper",
    num_nodes: int | None = None,
    block_rows: int | None = None,
    progress: Progress | None = None,
) -> Path:
    """Sample local nodes into one shard of a folder, which :class:`TokenStore` reads.

    The rows are those of :func:`local_nodes`, whatever the number of shards, and whether a shard
    was written at once or resumed. Memory beside the graph is that of one block, of 32 MiB unless
    one row has more, and of a graph in mapped files little more than that.

    Args:
        graph: see :func:`local_nodes`, as for all that is not below.
        folder: of all shards, which may be on one disk or copied there later.
        k: see there.
        seed: see there.
        nodes: whose rows are sampled: their numbers, in any order, or a mask ``[nodes]`` of bools;
            by default all.
        shard: which one is written, counted from 1.
        shards: how many there are.
        resume: whether a shard that is there is finished rather than refused. One that is whole is
            read, for its SHA-256, and left as it is.
        direction: see there.
        hub_cap: see there.
        variant: see there.
        num_nodes: see there.
        block_rows: how many rows are sampled and written together.
        progress: called after each block with the number of rows that are done, and of all.

    Returns:
        The folder of the shard.

    Raises:
        FileExistsError: the shard is there, and is not to be resumed.
        FileFormatError: it is of another graph, sample or number of shards, or is cut off.
        BlockingIOError: another process is writing it.
        OSError: a file cannot be written. Where the disk is full, what was written is kept, and can
            be resumed.
        TypeError: see there.
        ValueError: see there.
        IndexError: see there.
    """
    manner = checked_manner(k, seed, direction, hub_cap, variant)
    folder = checked_path(folder=folder)
    check_flags(resume=resume)
    check_functions(progress=progress, or_none=True)
    of_block = 1 if block_rows is None else block_rows
    for name, value in (("shards", shards), ("shard", shard), ("block_rows", of_block)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {value!r}")
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if shard > shards:
        raise ValueError(f"shard must be in [1, {shards}], got {shard}")
    lists = as_lists(graph, direction, num_nodes)
    size = lists[0].ptr.numel() - 1
    chosen = None if nodes is None else _in_range(chosen_nodes(nodes, size).unique(), size)
    num_rows = size if chosen is None else chosen.numel()
    identity: dict[str, Any] = {
        **manner._asdict(),
        "graph": digest_of_graph(lists),
        "num_nodes": size,
        "nodes": None if chosen is None else digest(chosen),
        "num_rows": num_rows,
        "shards": shards,
    }
    out = shard_folder(folder, shard, shards)
    for other in shard_folders(folder):
        if other != out and (found := _found_identity(other)) is not None:
            check_same(other, identity, found)
    if out.exists() and not resume:
        raise FileExistsError(f"{out} exists: resume finishes it, or leaves it if it is whole")
    out.mkdir(parents=True, exist_ok=True)
    own = rows_of_shard(shard, shards, num_rows)
    with locked(out, "this shard"), disk_may_be_full(out):
        if _is_whole(out, identity):
            if progress is not None:
                progress(len(own), len(own))
            return out
        task = _Task(out, identity, shard, own, chosen, block_rows or _usual_rows(k))
        _write_shard(task, lists, manner, progress or (lambda done, total: None))
    return out


class _Task(NamedTuple):
    folder: Path
    identity: dict[str, Any]
    shard: int
    rows: range
    chosen: Tensor | None
    block_rows: int

    def nodes(self, begin: int, end: int) -> Tensor:
        """Of rows of the shard."""
        begin, end = self.rows.start + begin, self.rows.start + end
        return torch.arange(begin, end) if self.chosen is None else self.chosen[begin:end]


def _usual_rows(k: int) -> int:
    return max(_BLOCK_BYTES // (4 * k), 1)


def _write_shard(
    task: _Task, lists: list[NeighborLists], manner: Manner, progress: Progress
) -> None:
    head = _header(len(task.rows), manner.k)
    temporary: list[Path] = []

    def allocate(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if not shape[0]:
            return torch.empty(shape, dtype=dtype)
        temporary.append(task.folder / f"{name}.npy")
        kind = np.int32 if dtype is torch.int32 else np.int64
        mapped = np.lib.format.open_memmap(temporary[-1], "w+", kind, shape)
        return torch.from_numpy(mapped)

    journal, done, counts = _resumed(task, head)
    if task.chosen is not None:
        write_new(task.folder / NODES, _npy(task.nodes(0, len(task.rows)).numpy()))
    try:
        sampler = LocalNodesSampler(lists, manner, allocate)
        with (task.folder / ROWS).open("r+b", buffering=0) as file, journal.open("ab") as log:
            file.seek(len(head) + done * 4 * manner.k)
            rows = torch.empty(min(task.block_rows, len(task.rows)), manner.k, dtype=torch.int32)
            progress(done, len(task.rows))
            while done < len(task.rows):
                end = min(done + task.block_rows, len(task.rows))
                block, found = sampler.sample(task.nodes(done, end), rows[: end - done])
                counts = counts.plus(found)
                write_all(file.fileno(), bytes_of(block))
                os.fdatasync(file.fileno())
                line = {"rows": end, "sha256": digest(block), "counts": counts}
                add_to_journal(log, line)
                done = end
                progress(done, len(task.rows))
    finally:
        for path in temporary:
            path.unlink(missing_ok=True)
    names = [ROWS] if task.chosen is None else [ROWS, NODES]
    content = {
        **task.identity,
        "shard": task.shard,
        "rows": len(task.rows),
        **counts._asdict(),
        "thinned": sampler.num_thinned,
    }
    files = {name: manifest.seal(task.folder / name) for name in names}
    manifest.write(task.folder, FORM, content, files)
    journal.unlink()
    manifest.sync_folder(task.folder)


def _resumed(task: _Task, head: bytes) -> tuple[Path, int, Counts]:
    """The journal, how many rows it has account of, and their counts; the files are ready."""
    journal, file = task.folder / JOURNAL, task.folder / ROWS
    lines = read_journal(journal, _OF_BLOCK)
    if lines and not file.is_file():
        raise manifest.FileFormatError(f"{file}: expected the rows of this shard, got no file")
    if not lines:
        known = {JOURNAL, ROWS, NODES, "thinned-0.npy", "thinned-1.npy"}
        if foreign := sorted({path.name for path in task.folder.iterdir()} - known):
            raise manifest.FileFormatError(f"{task.folder}: expected a shard, got {foreign[0]}")
        write_new(file, head)
        begin_journal(journal, task.identity)
        return journal, 0, Counts()
    done, counts = 0, Counts()
    with file.open("r+b", buffering=0) as stream:
        if stream.read(len(head)) != head:
            raise manifest.FileFormatError(f"{file}: expected the rows of this shard, got others")
        for line in lines[1:]:
            size = (line["rows"] - done) * 4 * task.identity["k"]
            if digest_of_file(stream, size) != line["sha256"]:
                raise manifest.FileFormatError(
                    f"{file}: expected rows {done} to {line['rows']} as the journal has them, got "
                    "others: it is cut off or corrupt"
                )
            done, counts = line["rows"], Counts(*line["counts"])
        stream.truncate(stream.tell())
    cut_journal(journal, lines)
    return journal, done, counts


def _found_identity(folder: Path) -> dict[str, Any] | None:
    """The identity of a shard that is there, whole or not; ``None`` if it is not begun."""
    if lines := read_journal(folder / JOURNAL, _OF_BLOCK):
        found: dict[str, Any] = lines[0]["identity"]
        return found
    if (folder / manifest.NAME).exists():
        return manifest.read(folder, FORM).content
    return None


def _is_whole(folder: Path, identity: dict[str, Any]) -> bool:
    found = _found_identity(folder)
    if found is not None:
        check_same(folder, identity, found)
    is_whole = found is not None and not (folder / JOURNAL).exists()
    if is_whole:
        whole = manifest.read(folder, FORM)
        manifest.verify(whole, whole.files)
    return is_whole


def _in_range(nodes: Tensor, size: int) -> Tensor:
    """Nodes in ascending order, which are in the graph."""
    if nodes.numel() and not 0 <= int(nodes[0]) <= int(nodes[-1]) < size:
        raise IndexError(f"nodes must be in [0, {size}), got {int(nodes[0])} to {int(nodes[-1])}")
    return nodes


def _header(rows: int, k: int) -> bytes:
    """How an ``.npy`` file of int32 ``[rows, k]`` begins."""
    return _npy(np.empty((0, k), np.int32), shape=(rows, k))


def _npy(values: np.ndarray, shape: tuple[int, ...] | None = None) -> bytes:
    made = io.BytesIO()
    header = {**np.lib.format.header_data_from_array_1_0(values)}
    header["shape"] = values.shape if shape is None else shape
    np.lib.format.write_array_header_1_0(made, header)
    return made.getvalue() + values.tobytes()
