"""Parts of random calls of the native functions: a library, graphs and tensors."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tvm_ffi
from hypothesis import strategies as st
from torch import Tensor

from fastgraph.plugins.backend import FLOATING, accumulator
from tests.native.cases import Sparse

REFUSALS = (TypeError, ValueError, IndexError)
OTHER_DTYPES = (*FLOATING, torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64)
BAD_INDICES = (-1, -(2**31), -(2**63), 2**31 - 1, 2**31, 2**32, 2**32 + 1, 2**63 - 1)
BAD_SIZES = (-1, 2**31 - 1, 2**31, 2**32 + 1, -(2**63), 2**63 - 1, None, "3", 2.5)
BAD_OBJECTS = (None, "tensor", 3, 2.5, [1, 2], True)

Call = dict[str, Any]
# The arguments of a valid call, and a check of its result.
Prepared = tuple[Call, Callable[[Any], None]]


class Library:
    """The functions of one library; the call in progress is noted in a file that survives it."""

    def __init__(self, path: Path, journal: Path) -> None:
        self._module = tvm_ffi.load_module(str(path))
        self._journal = os.open(journal, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        self.num_calls = 0
        self.num_refused = 0

    def __call__(self, function: str, *arguments: Any) -> Any:
        text = f"{function}({', '.join(map(describe, arguments))})\n".encode()
        os.pwrite(self._journal, text, 0)
        os.ftruncate(self._journal, len(text))
        self.num_calls += 1
        try:
            return getattr(self._module, function)(*arguments)
        except REFUSALS:
            self.num_refused += 1
            raise


def describe(value: Any) -> str:
    if isinstance(value, Tensor):
        strides = "" if value.is_contiguous() else f" strides {list(value.stride())}"
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{strides}"
    return repr(value) if not isinstance(value, np.ndarray) else f"array{list(value.shape)}"


class Graph(Sparse):
    """The same as arguments by name."""

    @property
    def ascending(self) -> Call:
        """For functions that want rows in ascending order."""
        names = ("rowptr", "col", "edge_id", "num_cut")
        return dict(zip(names, self.csr[:4], strict=True))

    @property
    def arguments(self) -> Call:
        return self.ascending | {"row_id": self.row_id}

    @property
    def arguments_t(self) -> Call:
        """The same for functions whose graph is a transposed one."""
        names = ("rowptr_t", "col_t", "edge_id_t", "num_cut_t", "row_id_t")
        return dict(zip(names, self.arguments.values(), strict=True))

    # What the reference asks of a fastgraph.graphs.graph.Graph.

    @property
    def num_src(self) -> int:
        return self.num_cols

    @property
    def num_dst(self) -> int:
        return self.num_rows

    def edge_list(self) -> tuple[Tensor, Tensor]:
        return self.col, self.row


class Draw:
    """Random graphs and tensors; hypothesis chooses sizes and kinds, torch fills them."""

    def __init__(self, data: st.DataObject) -> None:
        # Choices of hypothesis itself repeat and cluster, which serves only to shrink them.
        self.random = data.draw(st.randoms(use_true_random=True))
        self.generator = torch.Generator().manual_seed(self.number(0, 2**31))

    def number(self, low: int, high: int) -> int:
        return self.random.randint(low, high)

    def flag(self) -> bool:
        return self.random.random() < 0.5

    def one_of(self, *values: Any) -> Any:
        return self.random.choice(values)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def edges(self) -> tuple[Tensor, Tensor, int, int]:
        """Row and column of each edge; most graphs are small, some have rows to be cut."""
        large = self.number(0, 7) == 0
        num_rows = self.number(0, 300 if large else 12)
        num_cols = self.number(0, 300 if large else 12)
        size = self.number(4000, 13_000) if large else self.number(0, 40)
        if num_rows == 0 or num_cols == 0:
            size = 0
        row = self.integers(0, max(num_rows, 1), size)
        col = self.integers(0, max(num_cols, 1), size)
        if large and self.flag():
            row[self.integers(0, 10, size) > 0] = max(num_rows - 1, 0)
        if large and self.flag():
            col[self.integers(0, 10, size) > 0] = 0
        return (row.sort().values if self.flag() else row), col, num_rows, num_cols

    def in_any_order(self, graph: Graph) -> Graph:
        """A graph as it is, or with its rows in another order."""
        rows = torch.randperm(graph.num_rows, generator=self.generator)
        return graph.in_order(rows) if self.flag() else graph

    def element(self) -> torch.dtype:
        """The dtype of features."""
        return self.one_of(*FLOATING)

    def index_dtype(self) -> torch.dtype:
        return self.one_of(torch.int32, torch.int64)

    def indices(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """The values with this dtype, possibly with gaps between them."""
        values = values.to(dtype)
        step = self.one_of(1, 1, 2, 3)
        if step == 1 or values.numel() == 0:
            return values.clone()
        # The memory ends with the last value.
        spread = torch.empty(step * (values.numel() - 1) + 1, dtype=values.dtype)
        spread[::step] = values
        return spread[::step]

    def width(self) -> int:
        return self.one_of(0, 1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 33, 48, 64, 100, 127, 130)

    def heads(self, width: int) -> int | None:
        """How many share so many columns evenly; ``None`` for no dimension of heads."""
        return self.one_of(None, *(h for h in (1, 2, 3, 5, 8, 16, 50) if width % h == 0))

    def features(self, dtype: torch.dtype, *shape: int) -> Tensor:
        """Multiples of 1/4, so that sums and products have no roundings to compare."""
        return (self.integers(-8, 9, *shape) / 4).to(dtype)

    def powers(self, dtype: torch.dtype, size: int) -> Tensor:
        return torch.exp2(self.integers(-2, 2, size).double()).to(dtype)

    def maybe(self, tensor: Tensor) -> Tensor | None:
        return tensor if self.flag() else None

    def with_specials(self, x: Tensor) -> bool:
        """Put NaN and infinities into some tensors; the formulas below are not for these."""
        if x.numel() == 0 or self.number(0, 4):
            return False
        for value in (float("nan"), float("inf"), float("-inf")):
            x.view(-1)[self.number(0, x.numel() - 1)] = value
        return True


def outputs(num_rows: int, num_edges: int, *, numbered: bool = True) -> tuple[Tensor, Tensor, Any]:
    index = torch.full((num_edges,), -7, dtype=torch.int32)
    return torch.full((num_rows + 1,), -7), index, index.clone() if numbered else None


def built(lib: Library, draw: Draw) -> Graph:
    return compressed(lib, *draw.edges())


def compressed(lib: Library, row: Tensor, col: Tensor, num_rows: int, num_cols: int) -> Graph:
    rowptr, index, edge_id = outputs(num_rows, row.numel())
    in_order = lib("build_csr", row, col, num_rows, num_cols, rowptr, index, edge_id)
    return Graph(row, col, num_rows, num_cols, rowptr, index, None if in_order else edge_id)


def transposed(lib: Library, graph: Graph) -> Graph:
    rowptr, index, edge_id = outputs(graph.num_cols, graph.num_edges)
    lib("transpose_csr", *graph.ascending.values(), graph.num_cols, rowptr, index, edge_id)
    return Graph(graph.col, graph.row, graph.num_cols, graph.num_rows, rowptr, index, edge_id)


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    expected = expected.to(actual.dtype)
    assert torch.equal(actual, expected), f"got {actual}, expected {expected}"


def assert_near(actual: Tensor, expected: Tensor, magnitude: float, what: str) -> None:
    """For results with roundings in terms of a magnitude, where a wrong row changes more than that.

    A gradient is the difference of such terms, and can be much smaller than they are.
    """
    eps = 2e-5 if accumulator(actual.dtype) == torch.float32 else 1e-12
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    bound = 2 * torch.finfo(actual.dtype).eps * expected.abs() + eps * (largest + magnitude)
    error = (actual.double() - expected).abs()
    assert bool((error <= bound).all()), f"{what}: got {actual}, expected {expected}"


def assert_all_near(
    found: dict[str, Tensor | None], expected: dict[str, Tensor], magnitude: float
) -> None:
    """The same of all results that there are, by name."""
    for name, tensor in found.items():
        if tensor is not None:
            assert_near(tensor, expected[name], magnitude, name)
