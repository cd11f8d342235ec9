"""Functions of users that reduce messages: values of nodes, by themselves, as DGL computes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fastgraph
from tests.ab import arguments
from tests.ab import assert_same as compare_layers
from tests.dgl.graphs import dgl
from tests.dgl.user_functions import APPLY, UPDATE, both, reason_of, square_graph

import dgl.function as fn  # isort: skip

# Of functions of users in general, by DGL.
pytestmark = pytest.mark.filterwarnings("ignore:The input graph for the user-defined")


def reduced(g: Any, x: Tensor, reduce: Callable[[Any], Any], *more: Tensor) -> list[Tensor]:
    """The results of a reduction of positive messages, and their gradients."""
    leaves = (x, *more)
    for leaf in leaves:
        leaf.grad = None
    with g.local_scope():
        g.ndata["h"] = x
        g.ndata["k"] = x.flip(0)
        g.update_all(lambda edges: {"m": edges.src["h"].exp()}, reduce)
        found = [g.ndata[name] for name in sorted(g.ndata) if name.startswith("out")]
    loss: Any = sum((out * out.detach().cos()).sum() for out in found)
    return [*found, *torch.autograd.grad(loss, leaves)]


def assert_same(call: Callable[[], list[Tensor]]) -> None:
    """In float64, whatever the dtype of the features: results have it, too."""
    expected, found, row = both(call)
    assert (row.programs, dict(row.reasons)) == (1, {})
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_nodes_without_messages_spoil_no_gradient() -> None:
    """Nothing is computed for them: 0 times the infinite derivative of 1 / 0 would be no number."""
    x = torch.randn(20, 4, dtype=torch.float64, requires_grad=True)
    layer, scale = nn.Linear(4, 3).double(), torch.rand(4, dtype=torch.float64, requires_grad=True)
    reductions: tuple[tuple[Callable[[Any], Any], tuple[Tensor, ...]], ...] = (
        (lambda n: {"out": layer(1 / n.mailbox["m"].sum(1))}, tuple(layer.parameters())),
        (lambda n: {"out": n.data["k"] / n.mailbox["m"].sum(1)}, ()),
        (
            lambda n: {
                "out": n.mailbox["m"].sum(1) * scale * np.log(n.mailbox["m"].size(1)),
                "out_too": n.mailbox["m"].max(1)[0],
            },
            (scale,),
        ),
    )
    g = square_graph()
    assert int((g.in_degrees() == 0).sum()) > 0
    for reduce, more in reductions:
        assert_same(lambda r=reduce, m=more: reduced(g, x, r, *m))


@pytest.mark.parametrize(
    "reduce", [lambda m: m.max(1)[0], lambda m: m.min(1)[0]], ids=["max", "min"]
)
def test_extrema_of_what_is_no_number_have_its_gradient(reduce: Callable[[Any], Any]) -> None:
    x = torch.randn(20, 4, dtype=torch.float64)
    x[::3, :2] = torch.nan
    x[1::3, 2] = torch.inf
    x.requires_grad_()
    expected, found, row = both(lambda: extremum_and_gradient(square_graph(), x, reduce))
    assert row.programs == 1
    assert expected[0].isnan().any()
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)


def extremum_and_gradient(g: Any, x: Tensor, reduce: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Whose gradient is different for each number."""
    with g.local_scope():
        g.ndata["h"] = x
        g.update_all(
            lambda edges: {"m": edges.src["h"] * 2}, lambda n: {"out": reduce(n.mailbox["m"])}
        )
        out = g.ndata["out"]
    weight = torch.arange(out.numel(), dtype=out.dtype).view_as(out)
    return [out, *torch.autograd.grad((out * weight).sum(), x)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (4,), (2, 3)], ids=str)
def test_degrees(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Numbers for DGL, they leave features of any number of dimensions in their dtype."""
    x = torch.randn(20, *shape, dtype=dtype, requires_grad=True)

    def reduce(nodes: Any) -> dict[str, Tensor]:
        m = nodes.mailbox["m"]
        return {"out": m.sum(1) / m.size(1), "out_too": m.mean(1) * m.shape[1] ** -0.5}

    assert_same(lambda: reduced(square_graph(), x, reduce))


def normalised(m: Any) -> Any:
    return m / (m.sum(dim=1, keepdim=True) + 1e-30)


SCALED: dict[str, Callable[[Any], Any]] = {
    "of a sum": lambda m: (normalised(m) * m).sum(1),
    "from the left": lambda m: (m * m.max(1, keepdim=True)[0] * m).mean(dim=1),
    "twice": lambda m: (normalised(m) * normalised(m.abs())).sum(1, keepdim=True).squeeze(1),
    "numbers": lambda m: torch.sum(2 * normalised(m) * 0.5 / 3, dim=1),
    "a channel": lambda m: (normalised(m[:, :, 1].abs()).unsqueeze(-1) * m).sum(1),
    "some channels": lambda m: (m[:, :, 1:3] * m[:, :, :2]).sum(1),
    "by messages": lambda m: (normalised(m) / m.square()).sum(1),
    "its own sum": lambda m: torch.abs(normalised(m).sum(1) - normalised(m * 2).sum(1) * m.mean(1)),
}


@pytest.mark.parametrize("name", SCALED)
def test_messages_that_their_node_scales(name: str) -> None:
    x = torch.randn(20, 4, dtype=torch.float64, requires_grad=True)
    reduce = SCALED[name]
    assert_same(lambda: reduced(square_graph(), x, lambda n: {"out": reduce(n.mailbox["m"])}))


UNSCALED: dict[str, Callable[[Any], Any]] = {
    "a difference": lambda m: (m - m.mean(1, keepdim=True)).square().sum(1),
    "a function": lambda m: torch.exp(normalised(m)).sum(1),
    "an extremum": lambda m: normalised(m).max(1)[0],
    "across nodes": lambda m: normalised(m).sum(0),
    "a divisor": lambda m: (m / normalised(m)).sum(1),
    "a single message": lambda m: m[:, 0],
    "no part of channels": lambda m: m[:1, :].sum(1),
}


@pytest.mark.parametrize("name", UNSCALED)
def test_other_uses_of_a_nodes_values_are_left_to_upstream(name: str) -> None:
    x, reduce = torch.randn(20, 4, dtype=torch.float64), UNSCALED[name]
    g = square_graph()

    def call() -> Tensor:
        with g.local_scope():
            g.ndata["h"] = x
            try:
                g.update_all(
                    lambda edges: {"m": edges.src["h"].exp()},
                    lambda nodes: {"out": reduce(nodes.mailbox["m"])},
                )
            except (RuntimeError, IndexError):  # DGL's own, for what is no value of nodes
                return torch.zeros(())
            return g.ndata["out"]

    assert "its reduction" in reason_of(call)


@pytest.mark.parametrize("aggregators", [["dir1-av", "mean"], ["dir2-dx", "std", "dir3-av"]])
@pytest.mark.parametrize("edge_size", [0, 2])
def test_directional_aggregation(edge_size: int, aggregators: list[str]) -> None:
    scalers = ["identity", "amplification"]
    """In float64: a gradient that cancels is as large as the processor's rounding of float32."""
    module = dgl.nn.DGNConv(4, 4, aggregators, scalers, 2.5, edge_feat_size=edge_size, num_towers=2)
    x, e, directions = (torch.randn(n, c).double() for n, c in ((20, 4), (120, 2), (20, 3)))
    call = arguments(square_graph(), x, e if edge_size else None, directions)
    compare_layers(module.double(), call, layer=UPDATE)


@pytest.mark.parametrize("name", ["twice", "a view", "used", "features"])
@pytest.mark.parametrize("has_lonely", [False, True])
def test_results_may_be_edited(name: str, has_lonely: bool) -> None:
    """Each for itself, as DGL puts each together."""

    def reduce(nodes: Any) -> dict[str, Tensor]:
        total = nodes.mailbox["m"].sum(1)
        others = {
            "twice": total,
            "a view": total.unsqueeze(1),
            "used": torch.tanh(total) * total,
            "features": nodes.data["h"],
        }
        return {"out": total, "other": others[name]}

    g = square_graph() if has_lonely else dgl.add_self_loop(square_graph())

    def call() -> Tensor:
        x = torch.linspace(-1, 1, 80, dtype=torch.float64).view(20, 4).requires_grad_()
        y = x * 1
        with g.local_scope():
            g.ndata["h"] = y
            g.update_all(fn.copy_u("h", "m"), reduce)
            loss = g.ndata["other"].sum() + g.ndata["out"].sum()
            kept = g.ndata["other"].detach().flatten()
            before = kept.clone()
            with torch.no_grad():
                g.ndata["out"].add_(1)
            changed = kept - before
            with torch.no_grad():
                g.ndata["other"].mul_(3)
        return torch.cat([changed, y.detach().flatten(), torch.autograd.grad(loss, x)[0].flatten()])

    expected, found, row = both(call)
    assert row.programs == 1
    torch.testing.assert_close(found, expected)


KEPT: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": lambda m: m.sum(1).exp(),
    "sigmoid": lambda m: torch.sigmoid(m.mean(1)),
    "relu": lambda m: m.sum(1).relu(),
    "one extremum": lambda m: m.max(1)[0],
    "attention": lambda m: (m.softmax(1) * m).sum(1),
}


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("has_lonely", [False, True])
def test_results_may_be_edited_before_their_gradients(name: str, has_lonely: bool) -> None:
    """Of functions, too, whose derivatives are made of their values."""
    kept = KEPT[name]
    g = square_graph() if has_lonely else dgl.add_self_loop(square_graph())

    def call() -> Tensor:
        x = torch.linspace(-1, 1, 80, dtype=torch.float64).view(20, 4).requires_grad_()
        with g.local_scope():
            g.ndata["h"] = x
            g.update_all(fn.copy_u("h", "m"), lambda nodes: {"out": kept(nodes.mailbox["m"])})
            loss = g.ndata["out"].sum()
            with torch.no_grad():
                g.ndata["out"].mul_(3)
        return torch.autograd.grad(loss, x)[0]

    expected, found, row = both(call)
    assert row.programs == 1
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["amax", "amin"])
def test_shared_extrema(name: str) -> None:
    """All edges that attain them share their gradient, and nothing else does, even for zeros."""
    g = square_graph()
    x = (torch.arange(80.0) % 3 - 1).view(20, 4).requires_grad_()

    get = torch.amax if name == "amax" else torch.amin

    def reduce(nodes: Any) -> dict[str, Tensor]:
        return {"out": get(nodes.mailbox["m"], 1)}

    def reduced_by(x: Tensor) -> Tensor:
        with g.local_scope():
            g.ndata["h"] = x
            g.update_all(fn.copy_u("h", "m"), reduce)
            return g.ndata["out"]

    assert "amax or amin" in reason_of(
        lambda: torch.autograd.grad((reduced_by(x) * torch.arange(4.0)).sum(), x)[0]
    )
    with torch.no_grad():
        expected, found, row = both(lambda: reduced_by(x))
    assert row.programs == 1
    torch.testing.assert_close(found, expected)


LOOKS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "one of several degrees": (
        lambda n: n.mailbox["m"].sum(1) if n.mailbox["m"].size(1) in {3, 5} else n.data["h"] * 1,
        "depends on values",
    ),
    "a table of degrees": (
        lambda n: n.mailbox["m"].sum(1) * {3: 2.0, 5: 7.0}.get(n.mailbox["m"].shape[1], 1.0),
        "depends on values",
    ),
    "a type": (
        lambda n: n.mailbox["m"].sum(1) if type(n.mailbox["m"]) is Tensor else n.data["h"] * 1,
        "looks at the type",
    ),
    "a bound of each node": (
        lambda n: n.mailbox["m"].sum(1).clamp(0, n.mailbox["m"].size(1)),
        "for a setting",
    ),
    "a named bound": (
        lambda n: torch.clamp(n.mailbox["m"].sum(1), max=n.mailbox["m"].size(1)),
        "names an argument of clamp",
    ),
    "a slope of each node": (
        lambda n: nn.functional.leaky_relu(n.mailbox["m"].sum(1), 1 / n.mailbox["m"].size(1)),
        "names an argument of leaky_relu",
    ),
}


@pytest.mark.parametrize("name", LOOKS)
def test_looks_at_messages(name: str) -> None:
    look, text = LOOKS[name]
    g = square_graph()
    g.ndata["h"] = torch.randn(20, 4)

    def call() -> Tensor:
        with g.local_scope():
            g.update_all(fn.copy_u("h", "m"), lambda nodes: {"out": look(nodes)})
            return g.ndata["out"]

    assert text in reason_of(call)


def test_kinds_of_messages() -> None:
    """They are tensors, and degrees are numbers."""
    g = square_graph()
    g.ndata["h"] = torch.randn(20, 4)

    def reduce(nodes: Any) -> dict[str, Tensor]:
        m = nodes.mailbox["m"]
        is_known = isinstance(m, Tensor) and torch.is_tensor(m.sum(1))
        return {"out": m.sum(1) if is_known and isinstance(m.size(1), int) else m.mean(1)}

    def call() -> Tensor:
        with g.local_scope():
            g.update_all(fn.copy_u("h", "m"), reduce)
            return g.ndata["out"]

    expected, found, row = both(call)
    assert row.programs == 1
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", [UPDATE, APPLY])
def test_features_without_channels(name: str) -> None:
    """DGL's operators refuse them, and its functions of edges do not."""
    g = square_graph()
    g.ndata["h"], g.ndata["k"] = torch.randn(20, 0), torch.randn(20, 4)

    def call() -> Tensor:
        with g.local_scope():
            if name == APPLY:
                g.apply_edges(lambda edges: {"m": edges.src["h"] * 2})
                return g.edata["m"]
            g.update_all(
                lambda edges: {"m": edges.src["h"] * 2},
                lambda nodes: {"out": nodes.mailbox["m"].sum(1)},
            )
            return g.ndata["out"]

    assert "no channels" in reason_of(call, name)


LOG: list[int] = []


class Log:
    """A log of users."""

    seen: list[int] = []  # noqa: RUF012


def _logs(edges: Any) -> dict[str, Tensor]:
    LOG.append(1)
    return {"m": edges.src["h"] * 2}


def _logs_in_class(edges: Any) -> dict[str, Tensor]:
    Log.seen.append(1)
    return {"m": edges.src["h"] * 2}


@pytest.mark.parametrize(("message", "seen"), [(_logs, LOG), (_logs_in_class, Log.seen)])
def test_lists_are_changed_by_upstream_alone(message: Any, seen: list[int]) -> None:
    """A function that changes them is refused before it does."""
    g = square_graph()
    g.ndata["h"] = torch.randn(20, 4)
    seen.clear()
    with fastgraph.enabled(min_edges=0):
        g.update_all(message, fn.sum("m", "out"))
    assert len(seen) == 1
    (reason,) = fastgraph.status().row(UPDATE).reasons
    assert "a list that may change unnoticed" in reason


def test_modules_with_calls_of_their_own() -> None:
    class Doubled(nn.Module):
        def __call__(self, edges: Any) -> dict[str, Tensor]:
            return {name: 2 * value for name, value in super().__call__(edges).items()}

        def forward(self, edges: Any) -> dict[str, Tensor]:
            return {"m": edges.src["h"].sin()}

    g, layer = square_graph(), Doubled()
    g.ndata["h"] = torch.randn(20, 4)

    def call() -> Tensor:
        with g.local_scope():
            g.update_all(layer, fn.sum("m", "out"))
            return g.ndata["out"]

    assert "whose call is not that of its forward" in reason_of(call)
