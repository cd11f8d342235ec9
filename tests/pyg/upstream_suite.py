"""A pytest plugin with which PyG's own tests of loaders see our sampler.

PyG's tests ask whether a package is installed, not whether what they call is there. In a checkout
of PyG's tests: ``PYTHONPATH=<fastgraph> python -m pytest -p tests.pyg.upstream_suite test/loader
test/sampler``. Tests that build a ``SparseTensor`` to compare with get a matrix of torch's.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch_geometric.typing
from torch import Tensor
from torch_geometric import testing
from torch_geometric.testing import decorators

import fastgraph
from fastgraph.pyg import fix_sampling
from fastgraph.pyg.adjacency import Adjacency

fastgraph.enable()
fix_sampling()

_has_package = decorators.has_package


class Matrix(Adjacency):
    """With what tests call besides."""

    @classmethod
    def from_edge_index(
        cls, edge_index: Tensor, edge_attr: Tensor | None = None, sparse_sizes: Any = None
    ) -> Matrix:
        return cls(edge_index[0], None, edge_index[1], edge_attr, sparse_sizes)

    def __getitem__(self, index: tuple[Tensor, Tensor]) -> Matrix:
        rows, columns = index
        pairs = (self._row.unsqueeze(0) == rows.unsqueeze(1)).nonzero()
        found = (self._col[pairs[:, 1]].unsqueeze(1) == columns.unsqueeze(0)).nonzero()
        entry = pairs[found[:, 0], 1]
        value = None if self._value is None else self._value[entry]
        sizes = rows.numel(), columns.numel()
        return Matrix(pairs[found[:, 0], 0], None, found[:, 1], value, sizes)


def has_package(package: str) -> bool:
    """True also for those packages in whose place our sampler is."""
    if "|" in package:
        return any(map(has_package, package.split("|")))
    return package in ("pyg_lib", "torch_sparse") or _has_package(package)


decorators.has_package = has_package
testing.has_package = has_package
decorators.WITH_PYG_LIB = torch_geometric.typing.WITH_PYG_LIB
decorators.WITH_METIS = torch_geometric.typing.WITH_METIS


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: Any, name: str, obj: object) -> None:
    """Modules of tests have these by value."""
    module = getattr(collector, "module", None)
    if isinstance(module, ModuleType):
        if hasattr(module, "WITH_TORCH_SPARSE"):
            module.WITH_TORCH_SPARSE = True
        if hasattr(module, "SparseTensor"):
            module.SparseTensor = Matrix
