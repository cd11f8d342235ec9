"""Features of nodes and of what is around them, in a file that is mapped and never loaded.

A row has all that a token of LargeGT is made of, side by side: the node's own features and those of
each hop. So a token costs one read.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastgraph import manifest
from fastgraph.layers.arguments import check_flags, checked_path
from fastgraph.machine.pages import usable_memory

FORMAT = manifest.Format("fastgraph hop features", 1)
FILE = "rows.bin"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class HopFeatures:
    """The features that :func:`fastgraph.tokens.write_context` has written.

    Pickled, as for workers that are spawned, it is the path of its folder.

    Args:
        folder: where they are.
        verify: whether the file is read as a whole, for its SHA-256; else its size is compared.
        is_elsewhere: whether rows are read one by one, and those of a batch asked for together. By
            default they are if the file is larger than half of the memory that the machine or the
            control group has; else the system reads what is around them, too, and soon has all.

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

    def __init__(
        self, folder: Path | str, *, verify: bool = False, is_elsewhere: bool | None = None
    ) -> None:
        self.folder = checked_path(folder=folder)
        check_flags(verify=verify)
        found = manifest.read(self.folder, FORMAT)
        content: dict[str, Any] = found.content
        names = ("num_nodes", "hops", "channels", "num_nan")
        least = dict.fromkeys(names, 1) | {"num_nan": 0}
        if not all(
            type(content.get(name)) is int and content[name] >= least[name] for name in names
        ):
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
        if is_elsewhere is None:
            is_elsewhere = self.nbytes > usable_memory() // 2
        self.is_elsewhere = is_elsewhere
        self.rows = self._mapped()
        """``[num_nodes, hops + 1, channels]``, mapped; edits of it stay in memory."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of :attr:`rows`."""
        return self.num_nodes, self.hops + 1, self.channels

    @property
    def nbytes(self) -> int:
        """Of the file."""
        return self.num_nodes * (self.hops + 1) * self.channels * self.dtype.itemsize

    def _mapped(self) -> Tensor:
        with (self.folder / FILE).open("rb") as stream:
            memory = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        if self.is_elsewhere:
            memory.madvise(mmap.MADV_RANDOM)
        return torch.frombuffer(memory, dtype=self.dtype).view(self.shape)

    def __reduce__(self) -> tuple[Callable[..., HopFeatures], tuple[Path, bool]]:
        return _opened, (self.folder, self.is_elsewhere)

    def __repr__(self) -> str:
        return f"HopFeatures({str(self.folder)!r}, shape={list(self.shape)}, dtype={self.dtype})"


def _opened(folder: Path, is_elsewhere: bool) -> HopFeatures:
    return HopFeatures(folder, is_elsewhere=is_elsewhere)


def _wrong(folder: Path, expected: str, got: Any) -> manifest.FileFormatError:
    return manifest.FileFormatError(
        f"{folder / manifest.NAME}: expected {expected}, got {got}: it is corrupt"
    )
