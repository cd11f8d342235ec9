"""Tiles in a folder: a file of tensors, and a manifest with its checksum.

For programs that make tiles beforehand. Backends make their own: that takes less time than to check
what was read.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastgraph import manifest
from fastgraph.graphs.tiles import COLUMNS, ROWS, Tiles
from fastgraph.manifest import FileFormatError, Format, Manifest, check_safetensors

FORMAT = Format("tiles of fastgraph", 1)
_FILE = "tiles.safetensors"
_DTYPES = {
    "ptr": torch.int64,
    "col": torch.int32,
    "bits": torch.int64,
    "first": torch.int64,
    "edge_id": torch.int32,
}


def save(tiles: Tiles, folder: str | os.PathLike[str]) -> None:
    """Write tiles into a new folder.

    Raises:
        ModuleNotFoundError: ``safetensors`` is not installed.
        FileExistsError: there is something in the folder.
        OSError: a file could not be written.
    """
    check_safetensors("tiles")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise FileExistsError(f"folder must be a new or empty one, got {folder}")
    tensors = {name: getattr(tiles, name) for name in _DTYPES}
    # The manifest comes last: a folder without one is not complete.
    sealed = manifest.write_tensors(folder / _FILE, tensors)
    sizes = {"rows": tiles.num_rows, "columns": tiles.num_cols}
    manifest.write(folder, FORMAT, sizes, {_FILE: sealed})


def load(folder: str | os.PathLike[str]) -> Tiles:
    """Tiles that :func:`save` wrote.

    Raises:
        ModuleNotFoundError: ``safetensors`` is not installed.
        FileFormatError: a file is missing, cut off, corrupt, foreign or of a newer version, or what
            it holds are no tiles.
    """
    check_safetensors("tiles")
    found = manifest.read(Path(folder), FORMAT)
    manifest.verify(found, [_FILE])
    tiles = _read(found)
    wrong = _what_is_wrong(tiles)
    if wrong is not None:
        raise FileFormatError(f"{found.folder / _FILE}: expected tiles, got {wrong}")
    return tiles


def _read(found: Manifest) -> Tiles:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    sizes: list[Any] = [found.content.get(name) for name in ("rows", "columns")]
    try:
        tensors = load_file(found.folder / _FILE)
        values: list[Any] = [*(tensors[name] for name in _DTYPES), *sizes]
        tiles = Tiles(*values)
    except (KeyError, SafetensorError) as error:
        raise FileFormatError(
            f"{found.folder / _FILE}: expected the tensors of tiles, got {error!r}"
        ) from error
    if any(not isinstance(size, int) or size < 0 for size in sizes):
        raise FileFormatError(
            f"{found.folder / manifest.NAME}: expected numbers of rows and columns, got {sizes}"
        )
    return tiles


def _what_is_wrong(tiles: Tiles) -> str | None:
    """Why these are no tiles; kernels trust that they are."""
    if tiles.bits.dim() != 2:
        return f"bits of shape {list(tiles.bits.shape)}"
    num_windows, num_blocks = -(-tiles.num_rows // ROWS), tiles.num_blocks
    shapes = {
        "ptr": [num_windows + 1],
        "col": [COLUMNS * num_blocks],
        "bits": [num_blocks, 2],
        "first": [num_blocks + 1],
        "edge_id": [tiles.edge_id.numel()],
    }
    for name, shape in shapes.items():
        tensor = getattr(tiles, name)
        if list(tensor.shape) != shape or tensor.dtype != _DTYPES[name]:
            return f"{name} of {tensor.dtype} and shape {list(tensor.shape)}"
    if not _delimits(tiles.ptr, num_blocks):
        return "a ptr that does not delimit the blocks"
    rows, columns = tiles.slots()
    counts = torch.bincount(columns // COLUMNS, minlength=num_blocks)
    ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    if not torch.equal(tiles.first, ends):
        return "a first that does not delimit the edges of blocks"
    if rows.numel() and int(rows.max()) >= tiles.num_rows:
        return f"an edge in row {int(rows.max())} of {tiles.num_rows}"
    used = tiles.col[columns]
    if bool((tiles.col < -1).any() | (tiles.col >= tiles.num_cols).any() | (used < 0).any()):
        return f"columns outside of the {tiles.num_cols} that there are"
    if not torch.equal(tiles.edge_id.sort().values.long(), torch.arange(rows.numel())):
        return "edges that do not have each number once"
    return None


def _delimits(ptr: Tensor, size: int) -> bool:
    return int(ptr[0]) == 0 and int(ptr[-1]) == size and bool((ptr.diff() >= 0).all())
