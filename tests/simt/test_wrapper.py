"""The code between operators and the native library for GPUs, with faults planted in it.

No test here has a GPU. That these find a fault in the part that the emulator shares with one, which
is all but the driver, is shown by making some.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from fastgraph import ops
from fastgraph.backends import kernels
from fastgraph.backends.cuda import CudaBackend
from fastgraph.plugins.backend import Backend
from fastgraph.registry.registry import REGISTRY
from tests.graphs import random_edges
from tests.simt.backend import emulator

# Of kernels.py: what is right, what is planted, and what finds it.
FAULTS = {
    "attention: a wrong keyword": (
        "addend: Tensor | None = None\n    ) -> tuple[Tensor, Tensor, Tensor]:",
        "bias: Tensor | None = None\n    ) -> tuple[Tensor, Tensor, Tensor]:\n"
        "        addend = bias",
    ),
    "attention: a missing argument": ("            seed,\n            out,", "            out,"),
    "attention: a swapped pair": (
        "*inputs, transpose, option, dropout, seed, weights = arguments",
        "first, second, *inputs, transpose, option, dropout, seed, weights = arguments\n"
        "        inputs = [second, first, *inputs]",
    ),
    "attention backward: gradients swapped": (
        "*(gradients[i] for i in self._operator.differentiable),\n",
        "*(gradients[i] for i in reversed(self._operator.differentiable)),\n",
    ),
    "attention backward: a swapped pair": (
        "            stats,\n            grad,\n",
        "            grad,\n            stats,\n",
    ),
    "spmm: scales swapped": (
        "spmm(*rows.arguments, weight, row_scale, col_scale, x, out)",
        "spmm(*rows.arguments, weight, col_scale, row_scale, x, out)",
    ),
    "sddmm: a swapped pair": (
        "sddmm(*rows.arguments, row_scale, grad, x, out)",
        "sddmm(*rows.arguments, row_scale, x, grad, out)",
    ),
    "segment_reduce: minima for maxima": ('reduce == "max",', 'reduce != "max",'),
    "segment_reduce backward: a swapped pair": (
        "            x,\n            out,\n            grad,\n",
        "            x,\n            grad,\n            out,\n",
    ),
    "head_scores backward: a wrong keyword": (
        "        grad: Tensor,\n        *,\n        addend: Tensor | None = None,\n",
        "        grad: Tensor,\n        *,\n        bias: Tensor | None = None,\n",
    ),
}


def changed(right: str, wrong: str) -> ModuleType:
    """``kernels.py`` with a fault."""
    source = Path(kernels.__file__).read_text()
    assert source.count(right) >= 1, f"kernels.py holds no {right!r}"
    module = ModuleType("fastgraph.backends.kernels")
    exec(compile(source.replace(right, wrong), kernels.__file__, "exec"), vars(module))
    return module


class Planted(CudaBackend):
    name = "planted"
    priority = -200

    def unavailable(self) -> None:
        return None


@pytest.fixture
def planted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The backend for GPUs with a fault in its wrapper and the emulator behind it."""
    if request.param is not None:
        module = changed(*FAULTS[request.param])
        monkeypatch.setattr("fastgraph.backends.cuda.native_kernels", module.native_kernels)
    backend: Backend = Planted(
        lambda: emulator().functions, "cpu", lambda call: 0.0, generated=None
    )
    monkeypatch.setitem(REGISTRY.backends, backend.name, backend)
    yield
    REGISTRY.select(None)


def results() -> list[Tensor]:
    """Outputs and gradients of all operators, by the selected backend, in float64."""
    torch.manual_seed(0)
    nodes, index = 12, random_edges(12, 12, 40)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    x, y, z = (leaf(nodes, 2, 5) for _ in range(3))
    att, weight, bias = leaf(2, 2, 5), leaf(index.shape[1]), leaf(nodes, 2, 5)
    of_edges = ops.gatv2(x, y, att[:1], index[:, ::2].contiguous())
    of_others = ops.gatv2(x, y, att[:1], index[:, 1::2].contiguous())
    outputs = [
        ops.merge(of_edges[0], of_edges[2], of_others[0], of_others[2])[0],
        ops.spmm(x, index, weight, reduce="mean"),
        ops.segment_reduce(x, index),
        ops.gat(x, y[..., 0], z[..., 0], index, addend=bias)[0],
        ops.gat_with_scores(x, att, index)[0],
        ops.gatv2(x, y, att[:1], index, addend=bias)[0],
        ops.attention(x, y, z, index, addend=bias)[0],
    ]
    loss = sum((out * torch.randn_like(out)).sum() for out in outputs)
    return [*outputs, *torch.autograd.grad(loss, [x, y, z, att, weight, bias])]


@pytest.mark.parametrize("planted", [None], indirect=True)
@pytest.mark.usefixtures("planted")
def test_without_a_fault_results_are_those_of_the_reference() -> None:
    REGISTRY.select("reference")
    expected = results()
    assert_planted_equals(expected)


@pytest.mark.parametrize("planted", FAULTS, indirect=True)
@pytest.mark.usefixtures("planted")
def test_a_fault_is_found() -> None:
    REGISTRY.select("reference")
    expected = results()
    # A kernel with wrong parameters is refused when it is selected, and the native library refuses
    # wrong arguments; else results differ.
    with pytest.raises((TypeError, ValueError, IndexError, AssertionError)):
        assert_planted_equals(expected)


def assert_planted_equals(expected: list[Tensor]) -> None:
    REGISTRY.select("planted")
    torch.testing.assert_close(results(), expected)
