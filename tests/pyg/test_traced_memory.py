"""The memory that message passing by edge programs takes, and copies that it spares."""

import gc
import importlib
import weakref
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import EdgeConv, MessagePassing, SAGEConv

import fastgraph
from fastgraph.comparison.memory import release_freed, resident, restart_peak
from fastgraph.edge_programs.moments import spread_of
from fastgraph.layers.prepared import Prepared
from fastgraph.layers.scaled_parts import scaled_parts
from fastgraph.routing.programs import last_outcome
from tests.pyg.traced_layers import EDGES, NODES

operator = importlib.import_module("fastgraph.ops.edge_program")  # not the function of its name


def mlp(channels: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(2 * channels, channels), nn.ReLU(), nn.Linear(channels, channels)
    )


def prepared(layer: MessagePassing, *arguments: Tensor) -> Prepared:
    with fastgraph.enabled(min_edges=0):
        layer(*arguments)
    outcome = last_outcome(layer)
    assert isinstance(outcome, Prepared)
    return outcome


def test_steps_leave_nothing_but_operands() -> None:
    """Not even until Python looks for cycles."""
    layer, x = EdgeConv(mlp(16)), torch.randn(NODES, 16)
    traced = prepared(layer, x, EDGES).traced
    made: list[weakref.ref[Tensor]] = []

    def watched(function):  # type: ignore[no-untyped-def]
        def call(*args, **kwargs):  # type: ignore[no-untyped-def]
            out = function(*args, **kwargs)
            made.append(weakref.ref(out))
            return out

        return call

    steps = [
        s if s.function is None else replace(s, function=watched(s.function)) for s in traced.steps
    ]
    given = {"x_i": x, "x_j": x, **dict(layer.named_parameters())}
    gc.disable()
    try:
        with torch.no_grad():
            operands = replace(traced, steps=tuple(steps)).operands(given)
        living = [r() for r in made if r() is not None]
    finally:
        gc.enable()
    kept = {id(tensor) for tensor in operands.values()}
    assert len(made) > len(living) > 0
    assert all(id(tensor) in kept for tensor in living)


def test_parts_of_one_value_are_mapped_at_once() -> None:
    layer = EdgeConv(mlp(16))
    text = prepared(layer, torch.randn(NODES, 16), EDGES) and fastgraph.explain(layer)
    assert text.count("linear(x_i") == 1


def rows_at_peak(layer: nn.Module, x: Tensor, edge_index: Tensor) -> float:
    """The most that both passes have at once, in copies of the features."""

    def run() -> list[Tensor | None]:
        out = layer(x, edge_index)
        leaves = [x, *layer.parameters()]
        return [out.detach(), *torch.autograd.grad(out.sum(), leaves, allow_unused=True)]

    with fastgraph.enabled(min_edges=0):
        run()
        gc.disable()
        try:
            release_freed()
            if not restart_peak():
                pytest.skip("this system does not let the peak start again")
            before = resident() or 0
            run()
            return ((resident("VmHWM") or 0) - before) / x.nbytes
        finally:
            gc.enable()


@pytest.mark.repeats  # of kernels: the emulator would take minutes for so many nodes
@pytest.mark.parametrize(
    ("make", "most"),
    [
        # The copy of x, two operands, output, ties and their share, and the gradients of both.
        pytest.param(lambda: EdgeConv(mlp(32)), 9.5, id="EdgeConv"),
        # Here x is what is gathered, and maps follow: no mean's gradient is stored divided.
        pytest.param(lambda: SAGEConv(32, 32, aggr="std", root_weight=False), 9.5, id="std"),
    ],
)
def test_few_rows_are_held(make, most: float) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    num_nodes = 1 << 18  # 32 MiB of features, which the C library gives back at once
    x = torch.randn(num_nodes, 32, requires_grad=True)
    edge_index = torch.randint(num_nodes, (2, 2 * num_nodes))
    rows = rows_at_peak(make(), x, edge_index)
    assert 2 < rows < most


PROGRAMS = {
    "row": "x = row 40\ny = gathered 40\nt0 = mul x y\nsum t0",
    "narrow": "x = row 1\ny = gathered 40\nt0 = mul x y\nmean t0",
    "gathered": "x = gathered 8\ny = gathered 8\nt0 = mul x y\nmax t0",
    "edge": "x = edge 3\ny = gathered 3\nt0 = add x y\nsum t0",
    "alone": "x = gathered 40\ny = row 40\nsum x\nsum y",
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", PROGRAMS)
def test_one_row_that_stands_for_all_is_no_copy(name: str, dtype: torch.dtype) -> None:
    text = PROGRAMS[name]
    torch.manual_seed(0)
    width = int(text.split()[3])
    index = torch.randint(20, (2, 70))
    count = 70 if name == "edge" else 20
    one = torch.randn(1, width, dtype=dtype)
    y = torch.randn(20, int(text.split("y = ")[1].split()[1]), dtype=dtype)
    x = one.expand(count, width)
    assert operator._laid_out(x).untyped_storage().nbytes() == width * dtype.itemsize
    found = operator.edge_program(text, {"x": x, "y": y}, index, num_in=20, num_out=20)
    expected = operator.edge_program(
        text, {"x": x.contiguous(), "y": y}, index, num_in=20, num_out=20
    )
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("is_one_row", [False, True])
@pytest.mark.parametrize("few_edges", [0, 1 << 20])
def test_gradients_of_means_are_divided_by_either(
    few_edges: int, is_one_row: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator, "_FEW_EDGES", few_edges)
    text = "x = gathered 5\ny = row 5\nt0 = mul x y\nt1 = mul t0 t0\nmean t0\nmean t1\nmax t0"
    torch.manual_seed(0)
    index = torch.randint(12, (2, 60))
    index[1] %= 10  # some rows have no edges
    x, y = (torch.randn(12, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def grads(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        outs = operator.edge_program(text, {"x": x, "y": y}, index)
        weights = [
            torch.ones(1, 1).double() if is_one_row else (out * out).detach() for out in outs
        ]
        return torch.autograd.grad(
            sum((w * out).sum() for w, out in zip(weights, outs, strict=True)), (x, y)
        )

    def upstream(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        t0 = x[index[0]] * y[index[1]]
        degree = torch.bincount(index[1], minlength=12).clamp(min=1).double().unsqueeze(1)
        means = [
            torch.zeros(12, 5).double().index_add(0, index[1], t) / degree for t in (t0, t0 * t0)
        ]
        most = (
            torch.zeros(12, 5)
            .double()
            .scatter_reduce(0, index[1].unsqueeze(1).expand(-1, 5), t0, "amax", include_self=False)
        )
        outs = [*means, most]
        weights = [
            torch.ones(1, 1).double() if is_one_row else (out * out).detach() for out in outs
        ]
        return torch.autograd.grad(
            sum((w * out).sum() for w, out in zip(weights, outs, strict=True)), (x, y)
        )

    for a, b in zip(grads(x, y), upstream(x, y), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_standard_deviations_have_the_gradients_of_torch(dtype: torch.dtype) -> None:
    mean = torch.tensor([0.5, 0.0, 1.0, float("nan"), 2.0, -1.0], dtype=dtype)
    square = torch.tensor([1.0, 1e-5, 1.0, 1.0, 4.1, 3.0], dtype=dtype)
    found, expected = [], []
    for is_plain, results in ((True, found), (False, expected)):
        given = [t.clone().requires_grad_() for t in (mean, square)]
        out = spread_of("std", *given, is_plain=is_plain)
        first = torch.autograd.grad(
            (out * out.detach().nan_to_num()).sum(), given, create_graph=True
        )
        second = torch.autograd.grad(sum(g[[0, 1, 2, 4, 5]].square().sum() for g in first), given)
        results += [out, *first, *second]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=4 * torch.finfo(dtype).eps, atol=0, equal_nan=True)
    assert found[0][0] > 0


@pytest.mark.parametrize("pattern", ["1f", "f1g", "fg", "11"])
def test_scaled_parts_are_those_of_torch(pattern: str) -> None:
    torch.manual_seed(0)
    factors = [
        None if name == "1" else torch.rand(6, 1, 1, dtype=torch.float64) for name in pattern
    ]
    parts = [
        torch.randn(6, 2, width, dtype=torch.float64, requires_grad=True) for width in (3, 1, 4)
    ]

    def expected(*parts: Tensor) -> Tensor:
        whole = torch.cat(parts, dim=-1)
        return torch.cat([whole if f is None else whole * f for f in factors], dim=-1)

    assert torch.equal(scaled_parts(parts, factors), expected(*parts))
    weights = torch.randn(6, 2, 8 * len(pattern), dtype=torch.float64)
    torch.testing.assert_close(
        torch.autograd.grad((scaled_parts(parts, factors) * weights).sum(), parts),
        torch.autograd.grad((expected(*parts) * weights).sum(), parts),
    )
    assert torch.autograd.gradgradcheck(lambda *p: scaled_parts(p, factors).square(), parts)
