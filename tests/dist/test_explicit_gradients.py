"""Gradients that a program gives, asks for and replaces, beside those of one process."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import functional

import fastgraph.dist as fgd
from fastgraph.dist.ranks.world import WORLD
from tests.dist.comparing import deviation
from tests.dist.graphs import NUM_FEATURES, NUM_NODES, PARTITIONS, graph

# Of the largest value: sums are taken in another order.
TOLERANCE = 1e-12

Values = list[Any]
CASES: dict[str, Callable[[Any], Values]] = {}


def case(function: Callable[[Any], Values]) -> Callable[[Any], Values]:
    CASES[function.__name__.replace("_", " ")] = function
    return function


def leaf(data: Any) -> Any:
    return data.x.clone().detach().requires_grad_()


def numbers() -> Tensor:
    return torch.randn(NUM_NODES, NUM_FEATURES, generator=torch.Generator().manual_seed(1))


@case
def grad_with_rows_in_another_layout(data: Any) -> Values:
    x, reverse = leaf(data), torch.arange(NUM_NODES - 1, -1, -1)
    return list(torch.autograd.grad(x**3, x, grad_outputs=data.x[reverse]))


@case
def grad_with_a_replicated_gradient(data: Any) -> Values:
    x = leaf(data)
    found = torch.autograd.grad((x**3, x.sin()), [x], [numbers(), data.x[data.y % NUM_NODES]])
    return [*found, *torch.autograd.grad([x.sum()], [x], [torch.tensor(2.0)])]


@case
def backward_with_a_replicated_gradient(data: Any) -> Values:
    x = leaf(data)
    (x**3).backward(numbers())
    (2 * x).backward(gradient=torch.ones(NUM_NODES, NUM_FEATURES))
    return [x.grad]


@case
def backward_of_several(data: Any) -> Values:
    x = leaf(data)
    a, b = x**3, (x * x).sum()
    torch.autograd.backward([a, b], [numbers(), None], retain_graph=True)
    torch.autograd.backward((b, x.sin()), (torch.tensor(3.0), data.x[data.y]))
    torch.autograd.backward(x.exp().sum(), inputs=[x])
    return [x.grad]


@case
def gradients_of_replicated_results(data: Any) -> Values:
    x, w = leaf(data), torch.ones(NUM_FEATURES, requires_grad=True)
    out = (x * w).mean(0)
    out.backward(data.x[0], retain_graph=True)
    found = torch.autograd.grad(out, [x, w], grad_outputs=torch.arange(float(NUM_FEATURES)))
    return [x.grad, w.grad, *found]


@case
def second_derivatives_with_explicit_gradients(data: Any) -> Values:
    x, v = leaf(data), numbers().requires_grad_()
    (g,) = torch.autograd.grad(x**3, x, grad_outputs=v, create_graph=True)
    g.square().sum().backward()
    return [x.grad, v.grad]


@case
def functional_products(data: Any) -> Values:
    f = lambda x: (x**3).sum()  # noqa: E731
    rows = lambda x: x**3  # noqa: E731
    return [
        *functional.hvp(f, data.x, numbers()),
        *functional.vhp(f, data.x, data.x),
        *functional.vjp(rows, data.x, numbers()),
        *functional.jvp(rows, data.x, numbers()),
    ]


@case
def a_gradient_penalty(data: Any) -> Values:
    torch.manual_seed(0)
    lin, x = nn.Linear(NUM_FEATURES, 3), leaf(data)
    out = lin(x).tanh()
    (g,) = torch.autograd.grad(out, x, torch.ones(out.size()), create_graph=True)
    ((g.norm(2, dim=1) - 1) ** 2).mean().backward()
    return [x.grad, lin.weight.grad]


@case
def hooks_that_return_ordinary_tensors(data: Any) -> Values:
    x = leaf(data)
    y = 2 * x
    y.register_hook(lambda grad: numbers())
    x.register_hook(lambda grad: grad.flip(0))
    y.sum().backward()
    return [x.grad]


@case
def an_embedding_with_sparse_gradients(data: Any) -> Values:
    torch.manual_seed(0)
    table = nn.Embedding(10, 3, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)
    seen = []
    for _ in range(3):
        optimizer.zero_grad()
        (table(data.y) * data.w).square().sum().backward()
        seen.append(table.weight.grad.to_dense())
        optimizer.step()
    return [*seen, table.weight]


@case
def a_shape_that_differs(data: Any) -> Values:
    x = leaf(data)
    for act in (
        lambda: (2 * x).backward(torch.ones(NUM_NODES, 1)),
        lambda: torch.autograd.grad(2 * x, x, torch.ones(3, NUM_FEATURES)),
        lambda: (2 * x).backward(),
        lambda: torch.autograd.grad(2 * x, x),
    ):
        with pytest.raises(RuntimeError):
            act()
    return []


def outcome(action: Callable[[Any], Values], data: Any, expected: Values) -> str:
    try:
        found = [fgd.whole(value) for value in action(data)]
    except Exception:
        return traceback.format_exc()
    pairs = zip(expected, found, strict=True)
    return "; ".join(filter(None, (deviation(a, b, TOLERANCE) for a, b in pairs)))


def compare_on_this_rank() -> dict[str, str]:
    torch.set_default_dtype(torch.float64)
    WORLD.check = True
    found = {}
    for key, parts in PARTITIONS.items():
        data = fgd.shard(graph(), parts=parts(WORLD.size))
        for name, action in CASES.items():
            found[f"{name}, {key}"] = outcome(action, data, action(graph()))
    return found


@pytest.fixture(scope="module")
def found(world_size: int, once_on_ranks: Any) -> list[dict[str, str]]:
    found: list[dict[str, str]] = once_on_ranks(compare_on_this_rank, world_size)
    return found


@pytest.mark.parametrize("key", PARTITIONS)
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_one_process(
    found: list[dict[str, str]], name: str, key: str
) -> None:
    for rank, of_rank in enumerate(found):
        assert not of_rank[f"{name}, {key}"], f"rank {rank}: {of_rank[f'{name}, {key}']}"
