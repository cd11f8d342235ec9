"""Gradients of parameters, which are summed together: whoever looks at them finds them whole."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fastgraph.dist as fgd
from fastgraph.dist.ranks import gradients, transport
from fastgraph.dist.ranks.world import WORLD
from tests.dist.comparing import deviation
from tests.dist.graphs import NUM_FEATURES, PARTITIONS, graph

# Of the largest value of a gradient: sums are taken in another order.
TOLERANCE = 1e-12

D = NUM_FEATURES


class Model(nn.Module):
    """Parameters that meet rows as they are, as their elements, and as what is computed of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D, bias=False)
        self.third = nn.Linear(D, D)
        self.left, self.right = (nn.Parameter(torch.randn(1, D // 2)) for _ in range(2))
        self.unused = nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x).tanh()).tanh()
        x = x * torch.cat([self.left, self.right], 1) + self.third.bias.view(1, D)
        return x @ self.third.weight.t() + x @ (2 * self.second.weight)

    def loss(self, x: Tensor) -> Tensor:
        return self(x).square().mean() + 0.1 * self.second.weight.square().sum()


def gradients_of(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


Values = list[Tensor | None]
CASES: dict[str, Callable[[Tensor], Values]] = {}


def case(function: Callable[[Tensor], Values]) -> Callable[[Tensor], Values]:
    CASES[function.__name__.replace("_", " ")] = function
    return function


@case
def a_backward_pass(x: Tensor) -> Values:
    model = Model()
    model.loss(x).backward()
    return gradients_of(model)


@case
def gradients_that_accumulate_and_are_clipped(x: Tensor) -> Values:
    model = Model()
    for scale in (1, 2):
        model.loss(scale * x).backward()
    loss = model.loss(x)
    loss.backward(retain_graph=True)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return [norm, *gradients_of(model)]


@case
def hooks_that_read_gradients(x: Tensor) -> Values:
    model, seen = Model(), {}
    model.first.weight.register_hook(lambda grad: seen.update(hooked=grad.clone()))
    model.left.register_hook(lambda grad: 2 * grad)
    model.second.weight.register_post_accumulate_grad_hook(
        lambda p: seen.update(accumulated=p.grad.clone())
    )
    model.unused.register_hook(lambda grad: seen.update(unused=grad))
    loss = model.loss(x)
    model.first.bias.register_hook(lambda grad: seen.update(late=grad.clone()))
    loss.backward()
    assert "unused" not in seen
    return [*(seen[key] for key in sorted(seen)), *gradients_of(model)]


@case
def gradients_of_elements_that_are_kept(x: Tensor) -> Values:
    model, seen = Model(), []
    joined = torch.cat([model.left, model.right], 1)
    column = model.third.weight.t()
    column.retain_grad()
    joined.register_hook(lambda grad: seen.append(grad.clone()))
    ((x * joined + joined[0]) @ column + x * joined.sum()).square().mean().backward()
    return [*seen, column.grad, *gradients_of(model)]


def derived(model: Model) -> list[Tensor]:
    """Weights that layers make of parameters by moving, adding and subtracting elements."""
    weight, half = model.first.weight, D // 2
    return [
        weight[:, :half] - weight[:, half:],
        weight.t().reshape(4, half, half)[1],
        1 + model.left,
        model.third.weight.view(2, half, D).sum(0).expand(2, half, D)[0],
    ]


def loss_of_derived(x: Tensor, weights: list[Tensor]) -> Tensor:
    first, second, scale, third = weights
    hidden = x @ first + x[:, : D // 2] @ second
    return (hidden * scale + x @ third.t()).square().mean()


@case
def gradients_of_derived_weights(x: Tensor) -> Values:
    model = Model()
    loss_of_derived(x, derived(model)).backward()
    return gradients_of(model)


@case
def gradients_of_derived_weights_that_others_get(x: Tensor) -> Values:
    """Hooks on what comes before a derived weight, which is kept, wanted, or used otherwise."""
    model, seen = Model(), []
    copied, summed = model.first.weight.clone(), model.second.weight + 1
    kept, hooked = copied.view(D, D), summed.t()
    copied.retain_grad()
    summed.register_hook(lambda grad: seen.append(grad.clone()))
    summed.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
    (x @ kept.t() + x @ hooked.t() + copied.sum()).square().mean().backward()
    seen.append(copied.grad)
    again = Model()
    middle = again.first.weight.clone()
    (x @ middle.t()).square().mean().backward(inputs=[middle, again.first.weight])
    (x @ again.second.weight.clone().t()).sum().backward(inputs=[again.second.weight])
    return [*seen, middle.grad, *gradients_of(model), *gradients_of(again)]


@case
def derived_weights_that_are_kept_or_edited(x: Tensor) -> Values:
    """For several passes, beside other uses of theirs, and in memory that is written to."""
    model = Model()
    weight, bias = model.first.weight, model.first.bias
    kept, scale = weight - weight.t(), (bias + 1).expand(3, D).sum(0)
    for _ in range(2):
        loss = (x @ kept * scale).square().mean() + kept.square().sum() + (scale * bias).sum()
        loss.backward(retain_graph=True)
    zeroed, doubled, added = (weight.clone() for _ in range(3))
    zeroed[0] = 0
    doubled.mul_(2)
    added += bias
    (x @ zeroed + x @ doubled + x @ added).sigmoid().mean().backward()
    return gradients_of(model)


@case
def gradients_of_some(x: Tensor) -> Values:
    model = Model()
    some = [model.third.bias, model.first.weight]
    found = torch.autograd.grad(model.loss(x), some)
    for wanted in some:
        model.loss(x).backward(inputs=[wanted])
    unused = torch.autograd.grad(model.loss(x), [model.unused], allow_unused=True)
    return [*found, *unused, *gradients_of(model)]


@case
def second_derivatives(x: Tensor) -> Values:
    model = Model()
    parameters = [p for p in model.parameters() if p is not model.unused]
    found = torch.autograd.grad(model.loss(x), parameters, create_graph=True)
    penalty = sum(grad.square().sum() for grad in found)
    (model.loss(x) + penalty).backward()
    values = gradients_of(model)
    again = Model()
    again.loss(x).backward(create_graph=True)
    assert again.left.grad is not None
    again.left.grad.sum().backward()
    return [*values, *gradients_of(again)]


@case
def parameters_that_are_frozen(x: Tensor) -> Values:
    model = Model()
    model.first.weight.requires_grad_(False)
    loss = model.loss(x)
    model.second.weight.requires_grad_(False)
    loss.backward()
    return gradients_of(model)


@case
def a_pass_within_a_pass(x: Tensor) -> Values:
    model = Model()
    start = torch.ones(1, requires_grad=True)
    for reentrant in (True, False):
        out = checkpoint(lambda s: model.first(x * s).sum(), start, use_reentrant=reentrant)
        (out + model.loss(x)).backward()
    return [start.grad, *gradients_of(model)]


@case
def a_pass_that_fails(x: Tensor) -> Values:
    def fail(grad: Tensor) -> None:
        raise ZeroDivisionError

    model = Model()
    hidden = model.first(x)
    hidden.local.register_hook(fail) if fgd.is_sharded(hidden) else hidden.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        (model(x) + model.second(hidden)).sum().backward()
    model.zero_grad()
    model.loss(x).backward()
    return gradients_of(model)


@case
def second_derivatives_of_a_batch_norm(x: Tensor) -> Values:
    """Of channels whose means are far from zero, where the order of sums matters most."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(D)
    offset = (x.detach() + 1e3).requires_grad_()
    wanted = [offset, *norm.parameters()]
    first = torch.autograd.grad(norm(offset).sin().sum(), wanted, create_graph=True)
    penalty = sum(grad.square().sum() for grad in first)
    second = torch.autograd.grad(penalty, wanted)
    found = [*first, *second, norm.running_mean, norm.running_var]
    return [fgd.whole(grad.detach()) / grad.detach().abs().max() for grad in found]


@case
def gradients_of_several_types(x: Tensor) -> Values:
    single, double = (torch.ones(D, dtype=d, requires_grad=True) for d in (torch.float32, x.dtype))
    ((x * double).float() * single).double().square().mean().backward()
    return [double.grad, single.grad]


def outcome(action: Callable[[Tensor], Values], x: Tensor, expected: Values) -> str:
    try:
        found = action(x)
    except Exception:
        return traceback.format_exc()
    tolerances = [TOLERANCE if x is None or x.dtype == torch.float64 else 1e-5 for x in expected]
    pairs = zip(expected, found, tolerances, strict=True)
    return "; ".join(filter(None, (deviation(*values) for values in pairs)))


def sums(action: Callable[[], object]) -> int:
    """How many sums over ranks something takes."""
    fgd.COUNTS.reset()
    action()
    return fgd.COUNTS.calls["all_reduce"]


def compare_on_this_rank() -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    data = graph()
    x = fgd.shard(data, parts=PARTITIONS["uneven"](WORLD.size)).x
    WORLD.check = True
    found: dict[str, Any] = {}
    for name, action in CASES.items():
        found[name] = outcome(action, x, action(data.x))
    WORLD.check = False
    model = Model()
    loss = model.loss(x)
    found["sums"] = [sums(lambda: model.loss(x)), sums(lambda: loss.backward())]
    loss = loss_of_derived(x, derived(Model()))
    found["of derived"] = sums(lambda: loss.backward())
    norm = nn.BatchNorm1d(D)
    out = norm(x * x.detach().requires_grad_())
    target = out.detach().clone()
    found["norm"] = [sums(lambda: norm(x)), sums(lambda: out.backward(target))]
    found["at once"], found["in bundles"] = [], []
    gradients.TOGETHER = 2 * 8 * D * D
    for key in ("at once", "in bundles"):
        again = Model()
        if key == "at once":
            for p in again.parameters():
                p.register_hook(lambda grad: None)
        loss = again.loss(x)
        found[key] = [sums(lambda loss=loss: loss.backward()), gradients_of(again)]
    found["together"] = gradients_of(model)
    values = torch.randn(101, generator=torch.Generator().manual_seed(WORLD.rank))
    found["at once, in parts"] = []
    for limit in (2**20, 0):
        transport._AT_ONCE = limit
        found["at once, in parts"].append(transport.all_reduce_in_order(values))
    found["left"] = len(gradients._PASSES)
    return found


@pytest.fixture(scope="module")
def found(world_size: int, once_on_ranks: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = once_on_ranks(compare_on_this_rank, world_size)
    return found


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_one_process(found: list[dict[str, Any]], name: str) -> None:
    for rank, of_rank in enumerate(found):
        assert not of_rank[name], f"rank {rank}: {of_rank[name]}"


def test_gradients_are_summed_together(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        # That of the product is computed, and does not wait; the loss is a mean of rows.
        assert of_rank["sums"] == [1, 2]
        assert of_rank["at once"][0] == 7
        assert 2 < of_rank["in bundles"][0] < 7
        assert of_rank["left"] == 0


def test_gradients_of_derived_weights_are_summed_together(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert of_rank["of derived"] == 1


def test_bits_do_not_depend_on_what_is_summed_together(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        for way in ("at once", "in bundles"):
            for expected, grad in zip(of_rank["together"], of_rank[way][1], strict=True):
                assert (expected is None and grad is None) or torch.equal(expected, grad)
        at_once, in_parts = of_rank["at once, in parts"]
        assert torch.equal(at_once, in_parts)
        assert torch.equal(at_once, found[0]["at once, in parts"][0])


def test_bundles() -> None:
    limit = gradients.TOGETHER
    assert list(gradients.bundles([])) == []
    assert list(gradients.bundles([limit + 1])) == [slice(0, 1)]
    sizes = [1, limit - 1, 1, limit, 2]
    assert list(gradients.bundles(sizes)) == [slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 5)]


def test_a_batch_norm_takes_one_sum_in_each_pass_besides_that_of_its_parameters(
    found: list[dict[str, Any]],
) -> None:
    for of_rank in found:
        assert of_rank["norm"] == [1, 2]
