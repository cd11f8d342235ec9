"""Counts of the kernels of a backward pass, to test that only wanted gradients are computed."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fastgraph

PRODUCTS = {
    "mm",
    "addmm",
    "addmm_",
    "bmm",
    "baddbmm",
    "baddbmm_",
    "mv",
    "addmv",
    "_addmm_activation",
}


class Called(TorchDispatchMode):
    """Counts products of matrices, what they multiply, and calls of fastgraph's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.products = self.multiplications = 0
        self.passes: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        library, _, name = func._schema.name.partition("::")
        if library == "fastgraph":
            self.passes[name] += 1
        found = func(*args, **(kwargs or {}))
        if library != "fastgraph" and name in PRODUCTS:
            self.products += 1
            first = [arg for arg in args if isinstance(arg, Tensor)][-2]
            self.multiplications += found.numel() * first.shape[-1]
        return found


def gradients_of(out: Tensor, wanted: Sequence[Tensor]) -> tuple[list[Tensor | None], Called]:
    """The gradients of a fixed sum of an output, and what computed them."""
    torch.manual_seed(11)
    grad = torch.randn_like(out)
    with Called() as called:
        found = torch.autograd.grad(out, wanted, grad, retain_graph=True, allow_unused=True)
    return list(found), called


@contextlib.contextmanager
def frozen(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Within, these tensors require no gradient."""
    for tensor in tensors:
        tensor.requires_grad_(False)
    try:
        yield
    finally:
        for tensor in tensors:
            tensor.requires_grad_(True)


def assert_only_wanted_gradients(
    module: nn.Module,
    run: Callable[[nn.Module, Tensor], Tensor],
    x: Tensor,
    name: str | None = None,
    *,
    same_products: bool = True,
    more: int = 0,
    rtol: float = 0,
) -> None:
    """Check that ``torch.autograd.grad`` computes what it is asked for, and no more.

    Args:
        module: a layer with a route.
        run: calls it with features.
        x: features, a leaf that requires a gradient.
        name: as ``fastgraph.status`` calls the layer; default: what it consists of may be counted.
        same_products: false where the route multiplies other matrices than upstream's code, of
            nodes in place of edges: then these multiply no more numbers, though there may be more.
        more: the numbers that a route multiplies besides.
        rtol: by how much gradients may differ, where a program's passes have other gradients
            together; default: not a bit.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    run(module, x)  # layers that remember something do so now
    every = [x, *parameters]
    upstream = run(module, x)
    with fastgraph.enabled(min_edges=0):
        out = run(module, x)
        rows = fastgraph.status().rows if name is None else [fastgraph.status().row(name)]
        assert any(row.routed for row in rows)
        whole, _ = gradients_of(out, every)
        for wanted in filter(None, ([x], parameters, parameters[:1], every)):
            found, called = gradients_of(out, wanted)
            for tensor, gradient in zip(wanted, found, strict=True):
                expected = whole[next(i for i, t in enumerate(every) if t is tensor)]
                assert _are_equal(gradient, expected, rtol)
            _, of_upstream = gradients_of(upstream, wanted)
            assert not same_products or called.products <= of_upstream.products
            assert called.multiplications <= of_upstream.multiplications + more
            others = [t for t in every if not any(t is w for w in wanted)]
            with frozen(others):
                alone = run(module, x)
                if not alone.requires_grad:
                    continue
                least, with_frozen = gradients_of(alone, wanted)
            assert called.passes == with_frozen.passes
            assert called.products <= with_frozen.products
            for a, b in zip(least, found, strict=True):
                assert _are_equal(a, b, rtol)


def _are_equal(a: Tensor | None, b: Tensor | None, rtol: float) -> bool:
    if a is None or b is None:
        return a is b
    scale = float(b.abs().max()) if rtol and b.numel() else 0.0
    return torch.equal(a, b) if not rtol else torch.allclose(a, b, rtol=rtol, atol=rtol * scale)


def penalty_gradients(
    module: nn.Module, run: Callable[[nn.Module, Tensor], Tensor], x: Tensor
) -> list[Tensor | None]:
    """Gradients of :func:`penalty` for the parameters."""
    found = torch.autograd.grad(penalty(module, run, x), [*module.parameters()], allow_unused=True)
    return list(found)


def penalty(module: nn.Module, run: Callable[[nn.Module, Tensor], Tensor], x: Tensor) -> Tensor:
    """The squared gradient of features alone, of the sum of squares of what a layer computes."""
    (grad,) = torch.autograd.grad(run(module, x).square().sum(), x, create_graph=True)
    return grad.square().sum()
