"""Features of nodes and of what is around them, in a file that is mapped and never loaded.

A row has all that a token of LargeGT is made of, side by side: the node's own features and those of
each hop. So a token costs one read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastgraph import manifest

FORMAT = manifest.Format("fastgraph hop features", 1)
FILE = "rows.bin"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class HopFeatures:
    """The features that :func:`fastgraph.tokens.write_context` has written.

    Pickled, as for workers that are spawned, it is the path of its folder.

    Args:
        folder: where they are.
        verify: whether the file is read as a whole, for its SHA-256; else its size is compared.

    Attributes:
        folder: where they are.
        num_nodes: how many rows there are.
        hops: how many hops each row has beside the node's own features.
        channels: of the features.
        dtype: bfloat16, float16 or float32.
        num_nan: how many values of the node's own features are NaN.

    Raises:
        FileFormatError: the folder is none of these, or a file is cut off or another one.
    """

    def __init__(self, folder: Path | str, *, verify: bool = False) -> None:
        self.folder = Path(folder)
        found = manifest.read(self.folder, FORMAT)
        content: dict[str, Any] = found.content
        names = ("num_nodes", "hops", "channels", "num_nan")
        if not all(type(content.get(name)) is int and content[name] >= 0 for name in names):
            raise _wrong(self.folder, "numbers of nodes, hops and channels", content)
        self.num_nodes: int = content["num_nodes"]
        self.hops: int = content["hops"]
        self.channels: int = content["channels"]
        self.num_nan: int = content["num_nan"]
        if content.get("dtype") not in DTYPES:
            raise _wrong(self.folder, f"a dtype of {sorted(DTYPES)}", content)
        self.dtype = DTYPES[content["dtype"]]
        manifest.verify(found, [FILE], checksums=verify)
        if found.files[FILE]["bytes"] != self.nbytes:
            raise _wrong(self.folder, f"{self.nbytes} bytes for {list(self.shape)}", found.files)
        self.rows = map_rows(self.folder / FILE, self.shape, self.dtype, writable=False)
        """``[num_nodes, hops + 1, channels]``, mapped; edits of it stay in memory."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of :attr:`rows`."""
        return self.num_nodes, self.hops + 1, self.channels

    @property
    def nbytes(self) -> int:
        """Of the file."""
        return self.num_nodes * (self.hops + 1) * self.channels * self.dtype.itemsize

    def __reduce__(self) -> tuple[type[HopFeatures], tuple[Path]]:
        return HopFeatures, (self.folder,)

    def __repr__(self) -> str:
        return f"HopFeatures({str(self.folder)!r}, shape={list(self.shape)}, dtype={self.dtype})"


def map_rows(
    file: Path, shape: tuple[int, int, int], dtype: torch.dtype, *, writable: bool
) -> Tensor:
    """A file of rows as a tensor, whose edits go into the file if it is ``writable``."""
    size = shape[0] * shape[1] * shape[2]
    return torch.from_file(str(file), shared=writable, size=size, dtype=dtype).view(shape)


def _wrong(folder: Path, expected: str, got: Any) -> manifest.FileFormatError:
    return manifest.FileFormatError(
        f"{folder / manifest.NAME}: expected {expected}, got {got}: it is corrupt"
    )
