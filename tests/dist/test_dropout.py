"""Dropout of attention on ranks: what one process drops, and nothing kept for edges and heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fastgraph
import fastgraph.dist as fgd
from fastgraph import ops
from fastgraph.backends.dropout import dropout_factors
from fastgraph.dist.operators.dropout import factors_by_number
from fastgraph.dist.operators.heads.cost import head_ranges
from fastgraph.dist.ranks.world import WORLD
from tests.dist.comparing import deviation
from tests.dist.graphs import NUM_FEATURES, PARTITIONS, graph
from tests.dist.test_fused import HALVES, by_halves

D, C, H, SEED = NUM_FEATURES, 3, 6, 11
TOLERANCE = 1e-12

Operator = Callable[[Any, Tensor, Tensor, Tensor, Tensor], Any]

# Of a graph, vectors for heads that are made from the features of its nodes, and parameters.
OPERATORS: dict[str, Operator] = {
    "gat": lambda d, x, y, z, w: ops.gat(x, y.sum(-1), z.sum(-1), d.edge_index, dropout=0.4),
    "gatv2": lambda d, x, y, z, w: ops.gatv2(x, y, w[:1], d.edge_index, dropout=0.4),
    "gatv2, shared": lambda d, x, y, z, w: ops.gatv2(x, x, w[:1], d.edge_index, dropout=0.4),
    "gatv2, features": lambda d, x, y, z, w: ops.gatv2(
        x, y, w[:1], d.edge_index, edge=d.edge_attr, weight_edge=w.transpose(0, 1), dropout=0.4
    ),
    "attention": lambda d, x, y, z, w: ops.attention(x, y, z, d.edge_index, dropout=0.4),
}
MODES = {"halo": "uneven", "halo by halves": "one is empty", "heads": "uneven", "grid": "uneven"}


def called(name: str, data: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The output of an operator, parameters and features."""
    torch.manual_seed(SEED)
    weight = torch.randn(3 * H * C, D, requires_grad=True)
    x = data.x.detach().clone().requires_grad_()
    first, second, third = F.linear(x, weight).view(-1, 3, H, C).unbind(1)
    parameters = weight.sum(1).view(3, H, C)
    out, *_ = OPERATORS[name](data, first, second, third, parameters)
    return out, weight, x


def step(name: str, data: Any, *, twice: bool) -> list[Tensor]:
    """The output and gradients, for the sum of squares or the square of a first gradient."""
    out, weight, x = called(name, data)
    loss = out.square().sum()
    if twice:
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        loss = grad.square().sum()
    loss.backward()
    return [out.detach(), *(leaf.grad for leaf in (weight, x) if leaf.grad is not None)]


def saved_for_edges(name: str, data: Any) -> int:
    """Values that the forward pass saves for edges of this rank and its heads."""
    counts = [0]
    edges = {data.edge_index.local.shape[1], data.edge_index.shape[1]}
    heads = {H, len(head_ranges(H, WORLD.size)[WORLD.rank])}

    def pack(x: Tensor) -> Tensor:
        if x.is_floating_point() and x.dim() > 1 and x.shape[0] in edges and x.shape[1] in heads:
            counts[0] += x.numel()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        called(name, data)
    return counts[0]


def tokens(data: Any, seed: Tensor) -> list[Tensor]:
    """Attention of two rows to all nodes, of which each rank computes a part."""
    q, x = torch.ones(2, H, C, requires_grad=True), data.x.detach().clone().requires_grad_()
    keys = (x @ torch.linspace(-1, 1, D * H * C).view(D, H * C)).view(-1, H, C)
    n = len(data.x)
    index, ptr = torch.arange(n).repeat(2), torch.tensor([0, n, 2 * n])
    out, *_ = ops.attention(q, keys, keys.sin(), index, ptr=ptr, dropout=0.4, seed=seed)
    out.square().sum().backward()
    return [out.detach(), q.grad, x.grad]


def on_this_rank() -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    fastgraph.enable()
    plain, found = graph(), {}
    for value in ("x", "edge_attr"):
        plain[value] = plain[value].double()
    both = False, True
    expected = {
        (name, twice): step(name, plain, twice=twice) for name in OPERATORS for twice in both
    }
    for mode, layout in MODES.items():
        by_halves(HALVES["one is empty"] if "halves" in mode else (2.0, 2.0))
        parts = PARTITIONS[layout](WORLD.size)
        data = fgd.shard(plain, parts=parts, mode=mode.split()[0])
        for (name, twice), wanted in expected.items():
            fgd.COUNTS.reset()
            results = [fgd.whole(x) for x in step(name, data, twice=twice)]
            pairs = zip(wanted, results, strict=True)
            found[f"{name}, {mode}, {twice}"] = (
                next(filter(None, (deviation(a, b, TOLERANCE) for a, b in pairs)), ""),
                dict(fgd.COUNTS.gathers),
            )
            if not twice and "features" not in name:
                found[f"saved for {name}, {mode}"] = saved_for_edges(name, data)
    seed = torch.tensor([SEED])
    pairs = zip(tokens(plain, seed), map(fgd.whole, tokens(data, seed)), strict=True)
    found["tokens"] = [deviation(a, b, TOLERANCE) for a, b in pairs]
    return found


@pytest.fixture(scope="module")
def found(world_size: int, once_on_ranks: Any) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = once_on_ranks(on_this_rank, world_size)
    return results


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPERATORS)
def test_ranks_drop_what_one_process_drops(
    found: list[dict[str, Any]], name: str, mode: str, twice: bool
) -> None:
    for of_rank in found:
        assert of_rank[f"{name}, {mode}, {twice}"] == ("", {})


def test_nothing_is_kept_for_edges_and_heads(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        saved = {key: count for key, count in of_rank.items() if key.startswith("saved for")}
        assert len(saved) == len(MODES) * (len(OPERATORS) - 1)
        assert not any(saved.values()), saved


def test_few_rows_drop_what_one_process_drops(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert of_rank["tokens"] == ["", "", ""]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("first", "heads"), [(0, 4), (0, 1), (3, 6), (5, 2), (8, 9)])
def test_factors_are_those_of_operators(dtype: torch.dtype, first: int, heads: int) -> None:
    g = torch.Generator().manual_seed(0)
    numbers = torch.randint(2**40, (1300,), generator=g)
    numbers[:3] = torch.tensor([0, 2**32 - 1, 2**32])
    like = torch.empty(0, heads, dtype=dtype)
    for rate in (0.3, 1.0):
        drawn = factors_by_number(like, rate, torch.tensor([2**62 + 5]), numbers, first)
        expected = dropout_factors(like.new_empty(1300, heads), rate, 2**62 + 5, numbers, first)
        assert drawn.dtype == dtype and torch.equal(drawn == 0, expected == 0)
        torch.testing.assert_close(drawn, expected)
