"""The CUDA kernels beside those of the CPU, as tests compare them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastgraph.backends.cpu import CpuBackend
from fastgraph.graphs.graph import Graph
from tests.graphs import Case, all_cases, cut_case, hub_edges
from tests.native.cases import normal
from tests.simt.backend import SimtBackend, emulator

_SIMT, _CPU = SimtBackend(), CpuBackend()

WIDTHS = (0, 1, 7, 33, 64, 130, 200)
"""Every layout of packs and lanes, whole and with a rest."""

WIDER_THAN_A_GRID = 65535 * 32 + 1
"""Columns one by one: 32 for each block that a grid takes in the direction y, and one more."""

LOOP = Graph(torch.zeros(2, 1, dtype=torch.int64), 1, 1)

CASES = {
    case.name: case
    for case in (
        *(case for case in all_cases() if case.name not in ("int32", "strided", "hub")),
        Case("hub", hub_edges(40, 3000), 40, 40),
        cut_case(),
    )
}


def graph_of(name: str) -> Graph:
    case = CASES[name]
    return Graph(case.edge_index, case.num_src, case.num_dst)


def simt(operator: str, *arguments: Any, seed: int = 0, **options: Any) -> Any:
    """The result of the emulated CUDA kernel; ``seed`` decides the order of its threads."""
    emulator().seed(seed)
    return _SIMT.kernel(operator, "cpu", torch.float32)(*arguments, **options)


def cpu(operator: str, *arguments: Any, **options: Any) -> Any:
    return _CPU.kernel(operator, "cpu", torch.float32)(*arguments, **options)


def irregular(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Normal values, and here and there an infinite one or a NaN."""
    values = normal(*shape, dtype=dtype, seed=seed).flatten()
    values[::17], values[5::29], values[11::31] = float("inf"), -float("inf"), float("nan")
    return values.view(shape)


def misaligned(tensor: Tensor) -> Tensor:
    """The same values, one element off from where vectors of them can be read."""
    return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """The same values, of which NaNs count as equal."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def assert_same_in_every_order(operator: str, *arguments: Any) -> None:
    """The same bits, whichever threads come first."""
    first, *others = (simt(operator, *arguments, seed=seed) for seed in range(4))
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)
