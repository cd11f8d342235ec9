"""dense_attention in torch's operations, block by block, beside the kernels for the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastgraph import ops
from fastgraph.backends import dense_blocks, dense_reference
from fastgraph.plugins.backend import FLOATING
from fastgraph.registry.registry import REGISTRY
from tests.conftest import selected
from tests.ops.test_dense_attention import SEED, Bias, features, logsum, offsets

SIZES = [3, 0, 1, 7, 16, 0, 7, 7, 40, 1, 3]
"""Alike ones side by side and apart, and one that takes several blocks."""


@pytest.fixture(params=[1, 100, 4000])
def small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one query, of a part of a graph or some graphs, and of all that are alike."""
    monkeypatch.setattr(dense_blocks, "SCORES", request.param)
    monkeypatch.setattr(dense_blocks, "DRAWN", request.param)


@pytest.fixture
def cpu() -> Iterator[str]:
    yield from selected("cpu")


def results(backend: str, inputs: list[Tensor], ptr: Tensor, options: dict[str, Any]) -> Any:
    """Output, statistics and all gradients, of both."""
    REGISTRY.select(backend)
    leaves = [x.detach().requires_grad_() for x in inputs]
    given = options | ({"bias": leaves[3]} if len(leaves) > 3 else {})
    out, stats = ops.dense_attention(*leaves[:3], ptr, seed=SEED, **given)
    generator = torch.Generator().manual_seed(0)
    known = [out, logsum(stats)]
    grads = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in known]
    return out, stats, *torch.autograd.grad(known, leaves, grads)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("heads", [1, 5])
@pytest.mark.parametrize("kind", ["none", "pairs", "few", "many"])
def test_blocks_are_the_kernels(
    kind: str, heads: int, dropout: float, small_blocks: None, cpu: str
) -> None:
    torch.manual_seed(0)
    ptr = offsets(SIZES)
    inputs = [features(int(ptr[-1]), heads, 6) for _ in range(3)]
    options: dict[str, Any] = {"dropout": dropout}
    if kind != "none":
        bias = Bias(kind, ptr.diff().square(), heads, torch.float64)
        inputs.append(bias.values)
        options |= bias.given
    for ours, exact in zip(
        *(results(name, inputs, ptr, options) for name in ("blocks", "cpu")), strict=True
    ):
        torch.testing.assert_close(ours, exact)


@pytest.mark.parametrize("kind", ["pairs", "few"])
def test_keys_of_other_nodes_and_hidden_queries(kind: str, small_blocks: None, cpu: str) -> None:
    torch.manual_seed(0)
    ptr, key_ptr = offsets([2, 3, 0, 9, 9, 2]), offsets([14, 0, 4, 3, 3, 14])
    inputs = [features(25, 2, 5), features(38, 2, 5), features(38, 2, 5)]
    bias = Bias(kind, ptr.diff() * key_ptr.diff(), 2, torch.float64)
    hidden = torch.zeros(2 * 14 * 2 + 9 * 3 * 2, dtype=torch.bool)
    hidden[28 + 3 : 28 + 6] = True  # all keys of a query
    if kind == "pairs":
        with torch.no_grad():
            bias.values[hidden] = -torch.inf
    else:
        with torch.no_grad():
            bias.values[4] = -torch.inf
        bias.given["pair_type"] = bias.given["pair_type"].masked_fill(hidden, 4)
    options = bias.given | {"key_ptr": key_ptr, "dropout": 0.2}
    found, exact = (
        results(name, [*inputs, bias.values], ptr, options) for name in ("blocks", "cpu")
    )
    assert not found[0][6].any() and not found[1][6].any()
    assert not found[0][2:5].any()  # of no keys
    for ours, theirs in zip(found, exact, strict=True):
        torch.testing.assert_close(ours, theirs)


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that operations leave, views of what was there aside."""

    def __init__(self, *given: Tensor) -> None:
        super().__init__()
        self.known = {x.untyped_storage().data_ptr() for x in given}
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for x in tree_leaves(found):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in self.known:
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.itemsize)
        return found


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("has_table", [False, True])
def test_nothing_is_as_large_as_all_pairs(
    has_table: bool, dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither of a large graph nor of many small ones; the specification stores all pairs."""
    heads, limit = 4, 2000
    monkeypatch.setattr(dense_blocks, "SCORES", limit)
    monkeypatch.setattr(dense_blocks, "DRAWN", limit)
    ptr = offsets([120] + [9] * 40)
    query, key, value, grad = (torch.randn(480, heads, 2) for _ in range(4))
    pairs = 120**2 + 40 * 9**2
    bias, types = (
        (torch.randn(6, heads), torch.arange(pairs).remainder(6).byte())
        if has_table
        else (None, None)
    )
    given = (query, key, value, bias, ptr, ptr, types)
    options = (0.5, dropout, 7, 0, 0)
    tensors = [x for x in (*given, grad) if x is not None]
    largest = {}
    for name, module in (("blocks", dense_blocks), ("reference", dense_reference)):
        with Largest(*tensors) as seen:
            out, stats = module.dense_attention(*given, *options)
        with Largest(*tensors, out, stats) as backward:
            module.dense_attention_backward(
                grad, None, *given, out, stats, *options, bias is not None
            )
        largest[name] = max(seen.elements, backward.elements)
    assert largest["blocks"] <= query.numel()
    assert largest["reference"] >= 120**2 * heads


@pytest.mark.parametrize("types", [1, 7, 300])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_sums_by_type(types: int, dtype: torch.dtype) -> None:
    """Of many terms, none, and those that stand alone; one float32 sum errs 30 times as much."""
    torch.manual_seed(0)
    kind = torch.randint(types, (100_000,)).to(dtype)
    kind[kind == 3] = 0
    values = torch.rand(100_000, 2)
    table = torch.zeros(types, 2)
    dense_blocks._add_by_type(table, kind, values)
    exact = torch.zeros(types, 2, dtype=torch.float64).index_add(0, kind.long(), values.double())
    torch.testing.assert_close(table.double(), exact, rtol=2e-6, atol=0)
    again = torch.zeros(types, 2)
    dense_blocks._add_by_type(again, kind, values)
    assert torch.equal(table, again)


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("operator", ["dense_attention", "dense_attention_backward"])
def test_devices_without_a_kernel_have_blocks(operator: str, dtype: torch.dtype) -> None:
    """But layers are left to upstream there."""
    for device in ("cuda", "xpu"):
        assert REGISTRY.kernel(operator, device, dtype) is getattr(dense_blocks, operator)
        assert REGISTRY.refusal(operator, device, dtype) is not None
