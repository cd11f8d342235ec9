"""Run a module through upstream and through fastgraph, and compare everything that a user sees."""

from __future__ import annotations

import copy
import statistics
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

import fastgraph

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def arguments(*args: Any, **kwargs: Any) -> Arguments:
    """Positional and keyword arguments of a call."""
    return args, kwargs


def _leaves(value: Any) -> list[Tensor]:
    """All floating-point strided tensors within nested arguments."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        return [leaf for part in value for leaf in _leaves(part)]
    is_leaf = isinstance(value, Tensor) and value.is_floating_point()
    return [value] if is_leaf and value.layout == torch.strided else []


def double(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: double(part) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(double(part) for part in value)
    pyg = sys.modules.get("torch_geometric")
    if pyg is not None and isinstance(value, pyg.EdgeIndex):  # has cached something in float32
        return pyg.EdgeIndex(
            value.as_tensor(), sparse_size=value.sparse_size(), sort_order=value.sort_order
        )
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.double()
    return value


def _cotangent(out: Tensor, generator: torch.Generator) -> Tensor:
    # Drawn in one dtype, because torch draws other numbers in another: the gradients of float64 are
    # to be the truth about those of float32.
    return torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out)


def run(module: torch.nn.Module, call: Arguments, training: bool = True) -> list[Tensor]:
    """Outputs, then gradients of inputs and parameters, of a copy of ``module``."""
    module = copy.deepcopy(module).train(training)
    args, kwargs = call
    leaves = [leaf.detach().requires_grad_() for leaf in _leaves((args, kwargs))]
    replaced = iter(leaves)

    def substitute(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: substitute(part) for key, part in value.items()}
        if isinstance(value, (tuple, list)):
            return type(value)(substitute(part) for part in value)
        return next(replaced) if _leaves(value) else value

    args, kwargs = substitute(args), substitute(kwargs)
    torch.manual_seed(12)
    outputs = _leaves(module(*args, **kwargs))
    generator = torch.Generator().manual_seed(13)
    loss = sum((out * _cotangent(out, generator)).sum() for out in outputs)
    inputs = [*leaves, *(p for p in module.parameters() if p.requires_grad)]
    gradients = torch.autograd.grad(loss, inputs, allow_unused=True)
    zeros = (
        torch.zeros_like(i) if g is None else g for g, i in zip(gradients, inputs, strict=True)
    )
    return [*(out.detach() for out in outputs), *zeros]


def _upstream_and_truth(
    module: torch.nn.Module, call: Arguments, training: bool = True
) -> tuple[list[Tensor], list[Tensor]]:
    """Upstream's results as they are, and in float64."""
    exact = copy.deepcopy(module).double()
    return run(module, call, training), run(exact, double(call), training)


def _scale(value: Tensor) -> float:
    return float(value.abs().max()) if value.numel() else 0.0


def _distance(value: Tensor, exact: Tensor) -> float:
    """The largest difference; NaN, which is below no limit, where there is one in either."""
    return _scale(value.double() - exact)


def assert_same(
    module: torch.nn.Module,
    call: Arguments,
    *,
    upstream_call: Arguments | None = None,
    layer: str | None = None,
    reason: str | None = None,
    training: bool = True,
    factor: float = 2.0,
) -> None:
    """Outputs and gradients equal upstream's, and the route was taken or refused as expected.

    The error against float64 may be ``factor`` times upstream's own float32 error: both round, in a
    different order. A millionth of the scale is allowed besides, for where upstream's own error
    happens to be zero. Upstream is given ``upstream_call`` where its gradients are wrong for
    ``call`` itself.
    """
    layer = type(module).__name__ if layer is None else layer
    expected_call = call if upstream_call is None else upstream_call
    upstream, truth = _upstream_and_truth(module, expected_call, training)
    fastgraph.status().reset()
    with fastgraph.enabled(min_edges=0):
        ours = run(module, call, training)
    row = fastgraph.status().row(layer)
    if reason is None:
        assert row.routed > 0 and row.fell_back == 0, f"not routed: {dict(row.reasons)}"
    else:
        assert row.routed == 0, "was routed"
        assert any(reason in r for r in row.reasons), f"refused because of {dict(row.reasons)}"
    for position, (a, b, exact) in enumerate(zip(ours, upstream, truth, strict=True)):
        assert a.dtype == b.dtype and a.shape == b.shape, f"result {position}"
        error, own_error = _distance(a, exact), _distance(b, exact)
        assert error <= factor * own_error + 1e-6 * (1 + _scale(exact)), (
            f"result {position}: error {error}, upstream's {own_error}"
        )


def assert_errors_alike(
    draws: Iterable[tuple[torch.nn.Module, Arguments]], factor: float = 2.0
) -> None:
    """The median of our errors is no larger than ``factor`` times the median of upstream's.

    For inputs where chance decides which of the two happens to be closer to the truth: where scores
    are so large that their rounding moves weights, or rounded so coarsely that they change sign.
    """
    rows = []
    for module, call in draws:
        upstream, truth = _upstream_and_truth(module, call)
        with fastgraph.enabled(min_edges=0):
            ours = run(module, call)
        assert all(bool(a.isfinite().all()) for a in ours)
        triples = zip(ours, upstream, truth, strict=True)
        rows.append([(_distance(a, t), _distance(b, t), _scale(t)) for a, b, t in triples])
    for position, results in enumerate(zip(*rows, strict=True)):
        error, own_error, scale = map(statistics.median, zip(*results, strict=True))
        assert error <= factor * own_error + 1e-6 * (1 + scale), (
            f"result {position}: error {error}, upstream's {own_error}"
        )
