"""Which gradients a backward pass is asked for, and that kernels make no others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import combinations
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fastgraph import ops
from fastgraph.backends import cpu
from fastgraph.ops.library import wanted_gradients
from tests.graphs import random_edges

NODES, HEADS, WIDTH, EDGE_DIM = 9, 2, 4, 3
INDEX = random_edges(NODES, NODES, 40)


class Sum(torch.autograd.Function):
    """``a + b``, which notes what it is asked for; between them is what is no tensor."""

    asked: ClassVar[list[tuple[bool, ...]]] = []

    @staticmethod
    def forward(ctx: Any, a: Tensor, number: int, b: Tensor, none: None) -> Tensor:
        return a + b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        wanted = wanted_gradients(ctx)
        Sum.asked.append((wanted[0], wanted[2]))
        return grad if wanted[0] else None, None, grad if wanted[2] else None, None


def total(a: Tensor, b: Tensor) -> Tensor:
    out: Tensor = Sum.apply(a, 3, b, None)  # type: ignore[no-untyped-call]
    return out


@pytest.fixture(autouse=True)
def _nothing_asked() -> None:
    Sum.asked = []


def leaf() -> Tensor:
    return torch.ones(3, requires_grad=True)


BOTH, FIRST, SECOND = (True, True), (True, False), (False, True)


@pytest.mark.parametrize("is_root", [True, False])
@pytest.mark.parametrize("depth", [0, 1])
def test_what_the_engine_asks_for(is_root: bool, depth: int) -> None:
    a, b = leaf(), leaf()
    inner = [2 * t if depth else t for t in (a, b)]
    for tensor in inner:
        tensor.retain_grad()  # is a hook, which runs only where a gradient comes by
    out = total(*inner)
    out = out if is_root else out.square()
    ones = torch.ones_like(out)
    for wanted, expected in (
        ([a], FIRST),
        ([b], SECOND),
        ([a, b], BOTH),
        ([inner[0]], FIRST),
        ([inner[1], a], BOTH),
    ):
        torch.autograd.grad(out, wanted, ones, retain_graph=True)
        torch.autograd.grad(out, wanted, ones, create_graph=True)
        torch.autograd.grad(out, wanted, torch.eye(3), retain_graph=True, is_grads_batched=True)
        out.backward(ones, inputs=wanted, retain_graph=True)
        assert Sum.asked == [expected] * 4
        Sum.asked.clear()
    out.backward(ones)
    assert Sum.asked == [BOTH]
    assert inner[1].grad is not None


def test_frozen_and_shared_operands() -> None:
    a, b = leaf(), torch.ones(3)
    torch.autograd.grad(total(a, b).sum(), a)
    torch.autograd.grad(total(b, a).sum(), a)
    (grad,) = torch.autograd.grad(total(a, a).sum(), a)
    first, second = torch.ones(2, 3, requires_grad=True).unbind()  # one node makes both
    torch.autograd.grad(total(first, second).sum(), second)
    assert Sum.asked == [FIRST, SECOND, BOTH, BOTH]
    assert torch.equal(grad, torch.full((3,), 2.0))


@pytest.mark.parametrize("outer", [None, "engine"])
def test_a_call_by_something_else_than_the_engine(outer: str | None) -> None:
    node: Any = total(2 * leaf(), leaf()).grad_fn
    if outer is None:
        node.apply(torch.ones(3))
    else:
        other = leaf()
        other.register_hook(lambda grad: node.apply(grad)[0])
        (2 * other).sum().backward()
    assert Sum.asked == [BOTH]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints(use_reentrant: bool) -> None:
    a, b = leaf(), leaf()
    out = checkpoint(lambda a, b: total(a, b).square(), a, b, use_reentrant=use_reentrant)
    if use_reentrant:  # a backward pass of its own, for all that it is given
        out.sum().backward()
        assert Sum.asked == [BOTH]
    else:
        torch.autograd.grad(out.sum(), b)
        assert Sum.asked == [SECOND]


def test_threads_ask_for_themselves() -> None:
    a, b = leaf(), leaf()
    out = total(a, b).sum()
    wanted = [a, b] * 8

    def run(tensor: Tensor) -> None:
        torch.autograd.grad(out, tensor, retain_graph=True)

    threads = [threading.Thread(target=run, args=(tensor,)) for tensor in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(Sum.asked) == [SECOND] * 8 + [FIRST] * 8


TYPES = (torch.arange(INDEX.shape[1]) % 3).to(torch.uint8)


def heads(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def of_nodes() -> Tensor:
    return heads(NODES, HEADS, WIDTH)


OPERATORS: dict[str, Callable[[], tuple[Callable[..., Tensor], list[Tensor]]]] = {
    "spmm": lambda: (
        lambda x, w: ops.spmm(x, INDEX, w),
        [heads(NODES, WIDTH), heads(INDEX.shape[1])],
    ),
    "gat": lambda: (
        lambda x, s, d, e: ops.gat(x, s, d, INDEX, score_edge=e)[0],
        [of_nodes(), heads(NODES, HEADS), heads(NODES, HEADS), heads(INDEX.shape[1], HEADS)],
    ),
    "gat_with_scores": lambda: (
        lambda x, a, e, b: ops.gat_with_scores(x, a, INDEX, score_edge=e, addend=b)[0],
        [of_nodes(), heads(2, HEADS, WIDTH), heads(INDEX.shape[1], HEADS), heads(1, HEADS, WIDTH)],
    ),
    "gatv2": lambda: (
        lambda s, d, a, e, w: ops.gatv2(s, d, a, INDEX, edge=e, weight_edge=w)[0],
        [
            of_nodes(),
            of_nodes(),
            heads(1, HEADS, WIDTH),
            heads(INDEX.shape[1], EDGE_DIM),
            heads(HEADS, EDGE_DIM, WIDTH),
        ],
    ),
    "attention": lambda: (
        lambda q, k, v, e: ops.attention(q, k, v, INDEX, edge=e)[0],
        [
            heads(NODES, HEADS, WIDTH + EDGE_DIM),
            of_nodes(),
            of_nodes(),
            heads(INDEX.shape[1], EDGE_DIM),
        ],
    ),
    "biased_attention of edges": lambda: (
        lambda q, k, v, b: ops.attention(q, k, v, INDEX, bias=b)[0],
        [*(of_nodes() for _ in range(3)), heads(INDEX.shape[1], HEADS)],
    ),
    "biased_attention of types": lambda: (
        lambda q, k, v, e, b: ops.attention(q, k, v, INDEX, edge=e, bias=b, bias_index=TYPES)[0],
        [
            heads(NODES, HEADS, WIDTH + EDGE_DIM),
            *(of_nodes() for _ in range(2)),
            heads(INDEX.shape[1], EDGE_DIM),
            heads(3, HEADS),
        ],
    ),
    "edge_attention": lambda: (
        lambda q, k, v, e, w: ops.edge_attention(q, k, v, INDEX, edge=e, weight_edge=w)[0],
        [
            *(of_nodes() for _ in range(3)),
            heads(INDEX.shape[1], EDGE_DIM),
            heads(HEADS, EDGE_DIM, WIDTH),
        ],
    ),
    "head_scores": lambda: (ops.head_scores, [of_nodes(), heads(2, HEADS, WIDTH)]),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_any_choice_of_gradients_is_the_same_in_bits(name: str) -> None:
    torch.manual_seed(0)
    operator, operands = OPERATORS[name]()
    out = operator(*operands)
    grad = torch.randn_like(out)
    whole = torch.autograd.grad(out, operands, grad, retain_graph=True)
    positions = range(len(operands))
    for count in range(1, len(operands)):
        for chosen in combinations(positions, count):
            wanted = [operands[i] for i in chosen]
            found = torch.autograd.grad(out, wanted, grad, retain_graph=True)
            frozen = [t if i in chosen else t.detach() for i, t in enumerate(operands)]
            alone = torch.autograd.grad(operator(*frozen), wanted, grad)
            for i, a, b in zip(chosen, found, alone, strict=True):
                assert torch.equal(a, whole[i])
                assert torch.equal(b, whole[i])


class Library:
    """A native library that notes its calls, and which of their arguments are ``None``."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)

        def call(*arguments: Any) -> Any:
            self.calls.append((name, arguments))
            return function(*arguments)

        return call


@pytest.mark.parametrize(
    ("name", "chosen", "passes"),
    [
        ("gatv2", [1, 2], ["gatv2_backward_dst"]),
        ("gatv2", [0], ["gatv2_backward_dst", "gatv2_backward_src"]),
        ("attention", [0, 3], ["attention_backward_dst"]),
        ("attention", [2], ["attention_backward_dst", "attention_backward_src"]),
        ("head_scores", [0], ["head_scores_backward"]),
    ],
)
def test_passes_of_the_native_library(
    name: str, chosen: list[int], passes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    operator, operands = OPERATORS[name]()
    out = operator(*operands)
    owner: Any = cpu._KERNELS[f"{name}_backward"].__self__  # type: ignore[attr-defined]
    library = Library(owner._device.library())
    monkeypatch.setattr(owner, "_device", owner._device._replace(library=lambda: library))
    torch.autograd.grad(out.sum(), [operands[i] for i in chosen])
    assert [called for called, _ in library.calls] == passes
    last = library.calls[0][1][-1]  # the gradient of an edge, its weight or a parameter
    is_left_out = len(operands) - 1 not in chosen
    assert (last is None) == is_left_out
