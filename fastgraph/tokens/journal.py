"""Work that a killed process leaves, and another goes on with: a journal, a lock and fingerprints.

A journal is a file of lines of JSON. The first names the work, and each further one says that a
part of it is in permanent storage, with its SHA-256. Of a last line without an end nothing is
believed.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastgraph import manifest
from fastgraph.tokens.graph_files import NeighborLists

JOURNAL = "journal.jsonl"
_BYTES_AT_ONCE = _NODES_AT_ONCE = 1 << 22
_VALUES_AT_ONCE = 1 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

Progress = Callable[[int, int], None]
"""Is told how many rows of how many are done."""


def check_identity(
    folder: Path, names: Iterable[str], expected: dict[str, Any], found: dict[str, Any], other: str
) -> None:
    """Refuse what belongs to other work.

    Args:
        folder: where it was found.
        names: of the facts in which both must agree.
        expected: the facts of this work.
        found: those of the other.
        other: what it is then, for the error.

    Raises:
        FileFormatError: a fact differs; the error names it.
    """
    for name in names:
        if found.get(name) != expected[name]:
            raise manifest.FileFormatError(
                f"{folder}: expected {name} {expected[name]!r}, got {found.get(name)!r}: {other}"
            )


def read_journal(file: Path, of_part: set[str]) -> list[dict[str, Any]]:
    """The whole lines of a journal; none if there is no file.

    Args:
        file: where it is.
        of_part: the names in each line but the first.

    Raises:
        FileFormatError: a line is something else.
    """
    try:
        text, _, _ = file.read_bytes().rpartition(b"\n")
    except FileNotFoundError:  # another rank may have finished its shard since it was listed
        return []
    try:
        lines = [json.loads(line) for line in text.splitlines()]
    except ValueError as error:
        raise manifest.FileFormatError(f"{file}: expected lines of JSON: {error}") from error
    for number, line in enumerate(lines):
        expected = of_part if number else {"identity"}
        if not isinstance(line, dict) or set(line) != expected:
            raise manifest.FileFormatError(f"{file}: expected {sorted(expected)}, got {line}")
    return lines


def begin_journal(file: Path, identity: dict[str, Any]) -> None:
    """Write the first line, to permanent storage."""
    write_new(file, _line({"identity": identity}))
    manifest.sync_folder(file.parent)


def cut_journal(file: Path, lines: list[dict[str, Any]]) -> None:
    """Drop what follows its whole lines."""
    os.truncate(file, sum(len(_line(line)) for line in lines))


def add_to_journal(log: Any, line: dict[str, Any]) -> None:
    """Write a line behind the others of an open file, to permanent storage."""
    log.write(_line(line))
    log.flush()
    os.fdatasync(log.fileno())


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"


@contextmanager
def locked(folder: Path, what: str) -> Iterator[None]:
    """No other process writes into a folder.

    Raises:
        BlockingIOError: one does.
    """
    opened = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(f"{folder}: another process is writing {what}") from None
        yield
    finally:
        os.close(opened)


@contextmanager
def disk_may_be_full(folder: Path) -> Iterator[None]:
    """Say of a full disk that the work can be resumed.

    Raises:
        OSError: there is no space left.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise OSError(
            error.errno,
            f"{os.strerror(error.errno)}: what was written is kept, and resume goes on from there",
            str(folder),
        ) from error


def write_new(file: Path, content: bytes) -> None:
    """Write a small file, to permanent storage."""
    with file.open("wb", buffering=0) as stream:
        write_all(stream.fileno(), memoryview(content))
        os.fsync(stream.fileno())


def write_all(descriptor: int, content: memoryview) -> None:
    """Write all bytes, in as many calls as the system wants."""
    while content:
        content = content[os.write(descriptor, content) :]


def bytes_of(values: Tensor) -> memoryview:
    """The bytes of a tensor of any dtype and strides."""
    return values.contiguous().flatten().view(torch.uint8).numpy().data


def digest(values: Tensor) -> str:
    """The SHA-256 of the bytes of a tensor."""
    return hashlib.sha256(bytes_of(values)).hexdigest()


def digest_of_graph(lists: list[NeighborLists]) -> str:
    """The SHA-256 of lists of neighbours with their dtypes and lengths, read part by part."""
    found = hashlib.sha256()
    for values in (tensor for one in lists for tensor in one):
        found.update(f"{values.dtype} {values.numel()}\n".encode())
        for part in values.split(_NODES_AT_ONCE):
            found.update(bytes_of(part))
    return found.hexdigest()


def digest_of_rows(values: Tensor | np.ndarray) -> str:
    """The SHA-256 of a matrix with its dtype and shape, read part by part."""
    found = hashlib.sha256()
    num_rows, width = values.shape
    name = str(values.dtype).removeprefix("torch.")
    found.update(f"{name} {num_rows} {width}\n".encode())
    rows = max(_VALUES_AT_ONCE // max(width, 1), 1)
    for begin in range(0, num_rows, rows):
        part = values[begin : begin + rows]
        if isinstance(part, Tensor):
            found.update(bytes_of(part.detach()))
        else:
            found.update(np.ascontiguousarray(part).view(np.uint8).data)
    return found.hexdigest()


def digest_of_file(stream: Any, size: int) -> str:
    """The SHA-256 of so many bytes of an open file, or of as many as there are."""
    found = hashlib.sha256()
    while size > 0 and (part := stream.read(min(size, _BYTES_AT_ONCE))):
        found.update(part)
        size -= len(part)
    return found.hexdigest()
