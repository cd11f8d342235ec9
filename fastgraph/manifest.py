"""Folders of data files with a manifest, which says what they are and what is in them.

The manifest is JSON, has a version, and the size and SHA-256 of each file and of itself. So a file
that was cut off, edited, or put there by something else is noticed before it is used.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

if TYPE_CHECKING:
    from torch import Tensor

NAME = "manifest.json"

Json = Any  # as it is in a file: whoever reads it says what it must be


class Seal(TypedDict):
    """The facts of a file by which a change of it is noticed."""

    bytes: int
    sha256: str


class FileFormatError(ValueError):
    """A file is cut off, corrupt, of another program, or of a newer version of fastgraph."""


class Format(NamedTuple):
    """The format of a folder: a name, and the version that is written and read."""

    name: str
    version: int


class Manifest(NamedTuple):
    """The content of a folder.

    Attributes:
        folder: where it is.
        content: what its format wants to know.
        files: the size in bytes and the SHA-256 of each file.
    """

    folder: Path
    content: dict[str, Json]
    files: dict[str, Seal]


def check_safetensors(what: str) -> None:
    """Tensors can be kept in files on this machine.

    Args:
        what: is kept; in the plural.

    Raises:
        ModuleNotFoundError: there is no safetensors.
    """
    if importlib.util.find_spec("safetensors") is None:
        raise ModuleNotFoundError(
            f"{what} need safetensors: pip install 'fastgraph[dist]'", name="safetensors"
        )


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> Seal:
    """Write tensors by safetensors, to permanent storage.

    Returns:
        What :func:`seal` says of the file.
    """
    from safetensors.torch import save_file

    file.touch()
    mode = file.stat().st_mode
    save_file({name: x.contiguous() for name, x in tensors.items()}, file)
    file.chmod(mode)  # other users may read what they may read of other new files
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
    return seal(file)


def seal(file: Path) -> Seal:
    """The size and SHA-256 of a file."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"bytes": file.stat().st_size, "sha256": digest}


def write(folder: Path, form: Format, content: Json, files: Mapping[str, Seal]) -> None:
    """Write the manifest of a folder whose files are complete, to permanent storage.

    Args:
        folder: in which it is written.
        form: what the folder is.
        content: JSON.
        files: by name, what :func:`seal` says of each.
    """
    value = {
        "format": form.name,
        "version": form.version,
        "fastgraph": metadata.version("fastgraph"),
        "content": content,
        "files": files,
    }
    with (folder / NAME).open("w") as stream:
        json.dump({**value, "sha256": _digest(value)}, stream)
        stream.flush()
        os.fsync(stream.fileno())
    sync_folder(folder)


def read(folder: Path, form: Format) -> Manifest:
    """The manifest of a folder; :func:`verify` reads the files.

    Raises:
        FileFormatError: it is not there, or not what it must be.
    """
    file = folder / NAME
    if not file.is_file():
        raise FileFormatError(f"{folder}: expected a folder with a {NAME}, got none in it")
    try:
        value = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:  # json nests as deep as Python calls
        raise FileFormatError(
            f"{file}: expected JSON, got what is cut off or corrupt: {error}"
        ) from error
    found = value.get("format") if isinstance(value, dict) else None
    if found != form.name:
        raise FileFormatError(f"{file}: expected the format {form.name!r}, got {found!r}")
    version = value.get("version")
    if not isinstance(version, int) or version > form.version:
        writer = value.get("fastgraph")
        raise FileFormatError(
            f"{file}: expected version {form.version} of the format or an older one, got "
            f"{version!r}, written by fastgraph {writer}"
        )
    expected, got = value.pop("sha256", None), _digest(value)
    if expected != got:
        raise FileFormatError(f"{file}: expected the SHA-256 {expected}, got {got}: it is corrupt")
    content, files = value.get("content"), value.get("files")
    if not isinstance(content, dict) or not isinstance(files, dict):
        raise FileFormatError(f"{file}: expected content and files, got {sorted(value)}")
    if any(Path(name).name != name for name in files):
        raise FileFormatError(f"{file}: expected names of files in the folder, got {sorted(files)}")
    return Manifest(folder, content, files)


def verify(manifest: Manifest, names: Iterable[str], *, checksums: bool = True) -> None:
    """Compare files with the manifest.

    Args:
        manifest: of a folder.
        names: of files in it.
        checksums: whether the files are read, for their SHA-256; else their sizes are compared.

    Raises:
        FileFormatError: one is missing, or not the one that was written.
    """
    for name in names:
        file, expected = manifest.folder / name, manifest.files.get(name)
        if expected is None:
            raise FileFormatError(f"{manifest.folder / NAME}: expected {name} in it, got none")
        if not file.is_file():
            raise FileFormatError(f"{file}: expected a file of {expected['bytes']} bytes, got none")
        size = file.stat().st_size
        if size != expected["bytes"]:
            what = "cut off" if size < expected["bytes"] else "another file"
            raise FileFormatError(
                f"{file}: expected {expected['bytes']} bytes, got {size}: it is {what}"
            )
        found = seal(file)["sha256"] if checksums else expected["sha256"]
        if found != expected["sha256"]:
            raise FileFormatError(
                f"{file}: expected the SHA-256 {expected['sha256']}, got {found}: it is corrupt"
            )


def sync_folder(folder: Path) -> None:
    """Have the names of the files in a folder written to permanent storage."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
