"""All columns of one layer on one graph."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastgraph.graphs.repeats import REPEATS
from measure.graphs import GraphData
from measure.layers import LayerCase, linear_modules, without_linear
from measure.routing import (
    ColumnError,
    expect_routed,
    expect_upstream,
    ordering_after,
    ours_enabled,
)
from measure.timing import Contestant, interleave

# Norm of the difference over the norm of upstream's value. One wrong row among 100,000 differs by
# more; sums of 20,000 float32 terms in another order by less, and so does a score whose sign rounds
# the other way at the kink of leaky_relu (seen: 1.3e-4 for GAT on debian, where float64 says that
# the error is upstream's).
_TOLERANCE = 1e-3

# The same for bfloat16 beside float32: inputs themselves are rounded to 0.4 %, and gradients of
# attention vectors are small sums of large terms (seen: a tenth of the norm).
_HALF_TOLERANCE = 0.25

# A softmax does not change when all scores of a row do, so these are 0 but for roundings.
_ZERO_GRADIENTS = ("gradient of lin_key.bias",)


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    Args:
        rounds: fewest and most rounds of a comparison.
        budget: seconds for the rounds of a comparison.
    """

    rounds: tuple[int, int]
    budget: float


class Run:
    """Forward and backward of one layer on fixed inputs, as hidden layers see them.

    Args:
        layer: the layer; ``forward`` is what runs, compiled or not.
        x: leaf features that require a gradient.
        adjacency: what the user passes.
        fresh: pass a new copy of ``adjacency`` at each step, as if none had been seen before;
            making it is not timed.
    """

    def __init__(
        self,
        layer: nn.Module,
        x: Tensor,
        adjacency: Tensor,
        *,
        forward: Callable[[Tensor, Tensor], Tensor] | None = None,
        fresh: bool = False,
    ) -> None:
        self.layer = layer
        self.x = x
        self.out: Tensor | None = None
        self._forward = layer if forward is None else forward
        self._original = self._adjacency = adjacency
        self._fresh = fresh
        self._grad: Tensor | None = None

    def prepare(self) -> None:
        """Reset outputs and gradients, as a training loop does between steps."""
        self.out = None
        self.x.grad = None
        self.layer.zero_grad(set_to_none=True)
        if self._fresh:
            REPEATS.clear()
            self._adjacency = self._original.clone()

    def step(self) -> None:
        """One forward and backward pass."""
        self.out = self._forward(self.x, self._adjacency)
        if self._grad is None:
            torch.manual_seed(1)
            self._grad = torch.randn_like(self.out)
        self.out.backward(self._grad)

    def results(self) -> dict[str, Tensor]:
        """Output and gradients of the last step."""
        assert self.out is not None and self.x.grad is not None
        gradients = {
            f"gradient of {name}": parameter.grad.clone()
            for name, parameter in self.layer.named_parameters()
            if parameter.grad is not None
        }
        return {"output": self.out.detach(), "gradient of x": self.x.grad, **gradients}


def _contestant(name: str, run: Run, *, ours: bool = False) -> Contestant:
    context: Callable[[], AbstractContextManager[object]] = ours_enabled if ours else nullcontext
    return Contestant(name, run.step, run.prepare, context)


def _check(
    runs: dict[str, tuple[Contestant, Run]],
    expected: dict[str, Tensor] | None = None,
    tolerance: float = _TOLERANCE,
) -> dict[str, Tensor]:
    """Run each contestant once: it must take its own path, and all must agree with the first.

    Raises:
        ColumnError: they do not.
    """
    for name, (contestant, run) in runs.items():
        expect = expect_routed if contestant.context is ours_enabled else expect_upstream
        with expect(run.layer):
            (contestant.estimate,) = contestant.turn()
            if contestant.context is ours_enabled:  # rows of a graph are put in order once
                with ordering_after(0):
                    contestant.turn()
        found = run.results()
        expected = found if expected is None else expected
        if found.keys() != expected.keys():
            raise ColumnError(f"{name} has {sorted(found)}, upstream has {sorted(expected)}")
        largest = max(value.norm() for value in expected.values())
        for what, value in expected.items():
            norm = largest if what in _ZERO_GRADIENTS else value.norm().clamp(min=1e-30)
            error = float((found[what] - value).norm() / norm)
            if not error < tolerance:
                raise ColumnError(
                    f"{name}: {what} differs from upstream's by {error:.1e} of its norm, "
                    f"expected less than {tolerance:.0e}"
                )
        run.prepare()
    assert expected is not None
    return expected


def _measure(
    runs: dict[str, tuple[Contestant, Run]], effort: Effort
) -> dict[str, dict[str, float]]:
    ours = [run for contestant, run in runs.values() if contestant.context is ours_enabled]
    with expect_routed(ours[0].layer) if ours else nullcontext():
        interleave(
            [contestant for contestant, _ in runs.values()],
            rounds=effort.rounds,
            budget=effort.budget,
        )
    return {name: contestant.spread.to_json() for name, (contestant, _) in runs.items()}


def measure_cell(
    graph: GraphData, case: LayerCase, columns: Collection[str], channels: int, effort: Effort
) -> dict[str, Any]:
    """Times of the wanted columns, in milliseconds, grouped by what was interleaved with what."""
    torch.manual_seed(0)
    x = torch.randn(graph.num_nodes, channels, requires_grad=True)
    edge_index = graph.edge_index
    adjacency = case.adjacency(edge_index, graph.num_nodes) if case.adjacency else None
    plain = case.build(channels)
    result: dict[str, Any] = {}

    def runs_of(
        layer: nn.Module, layer_csr: nn.Module, names: Collection[str]
    ) -> dict[str, tuple[Contestant, Run]]:
        runs: dict[str, tuple[Contestant, Run]] = {}
        for name in ("upstream", "upstream-csr", "ours", "ours-fresh", "ours-csr"):
            csr = name.endswith("-csr")
            if name not in names or (csr and adjacency is None):
                continue
            run = Run(
                layer_csr if csr else layer,
                x,
                adjacency if csr and adjacency is not None else edge_index,
                fresh=name == "ours-fresh",
            )
            runs[name] = _contestant(name, run, ours=name.startswith("ours")), run
        return runs

    runs = runs_of(plain, case.build(channels, **case.adjacency_options), {"upstream", *columns})
    if "ceiling" in columns:
        dense = _dense_products(plain, x, edge_index)
        runs["dense"] = Contestant("dense", dense.step, dense.prepare), dense
    if len(runs) > 1:
        comparable = {name: run for name, run in runs.items() if name != "dense"}
        expected = _check(comparable)
        result["layer"] = _measure(runs, effort)
    else:
        expected = _check(runs)

    if "message-passing" in columns:
        more = case.propagate_options
        runs = runs_of(
            without_linear(case.build(channels, **more)),
            without_linear(case.build(channels, **{**more, **case.adjacency_options})),
            {"upstream", *columns} - {"ours-fresh"},
        )
        passed = _check(runs)
        result["message_passing"] = _measure(runs, effort)

    if "bfloat16" in columns:
        result["bfloat16"] = _half(case, x, edge_index, channels, effort)

    if "compile" in columns:
        result["compile"] = _compiled(plain, x, edge_index, expected, effort)
        if "message-passing" in columns:
            bare = without_linear(case.build(channels, **case.propagate_options))
            result["message_passing_compile"] = _compiled(bare, x, edge_index, passed, effort)
    return result


def _half(
    case: LayerCase, x: Tensor, edge_index: Tensor, channels: int, effort: Effort
) -> dict[str, dict[str, float]]:
    """Our message passing alone in float32 and in bfloat16."""
    runs = {}
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        layer = without_linear(case.build(channels, **case.propagate_options)).to(dtype)
        run = Run(layer, x.detach().to(dtype).requires_grad_(), edge_index)
        runs[name] = _contestant(name, run, ours=True), run
    _check(runs, tolerance=_HALF_TOLERANCE)
    return _measure(runs, effort)


def _compiled(
    layer: nn.Module, x: Tensor, edge_index: Tensor, expected: dict[str, Tensor], effort: Effort
) -> dict[str, Any]:
    """Upstream beside upstream compiled.

    Apart from the other columns: switching fastgraph resets Dynamo, which would compile again.
    """
    torch.compiler.reset()
    run, plain = Run(layer, x, edge_index, forward=torch.compile(layer)), Run(layer, x, edge_index)
    runs = {
        "upstream": (_contestant("upstream", plain), plain),
        "compile": (_contestant("compile", run), run),
    }
    try:
        _check(runs, expected)
    except torch._dynamo.exc.TorchDynamoException as error:
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    runs["compile"][0].estimate = None  # the first call compiled
    least, most = effort.rounds
    return _measure(runs, Effort((min(2, least), most), effort.budget / 2))


class _Dense(Run):
    """Forward and backward of a layer's Linear modules, each on the input it sees in the layer."""

    def __init__(self, layer: nn.Module, inputs: list[tuple[nn.Module, Tensor]]) -> None:
        super().__init__(layer, inputs[0][1], inputs[0][1])
        self._products = inputs
        self._gradients = [torch.randn_like(module(x).detach()) for module, x in inputs]

    def prepare(self) -> None:
        self.layer.zero_grad(set_to_none=True)
        for _, x in self._products:
            x.grad = None

    def step(self) -> None:
        outputs = [module(x) for module, x in self._products]
        torch.autograd.backward(outputs, self._gradients)


def _dense_products(layer: nn.Module, x: Tensor, edge_index: Tensor) -> _Dense:
    seen: list[tuple[nn.Module, Tensor]] = []

    def remember(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        seen.append((module, arguments[0].detach().clone().requires_grad_()))

    handles = [m.register_forward_pre_hook(remember) for m in linear_modules(layer).values()]
    with torch.no_grad():
        layer(x, edge_index)
    for handle in handles:
        handle.remove()
    return _Dense(layer, seen)
