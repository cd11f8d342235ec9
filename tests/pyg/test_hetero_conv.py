"""``HeteroConv`` adds what nodes add themselves once for all types of edges, with PyG's numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import (
    GATConv,
    GINConv,
    GraphConv,
    HeteroConv,
    SAGEConv,
    Sequential,
)

import fastgraph
from fastgraph.layers import linear as products
from tests.graphs import random_edges

SIZES = {"paper": 12, "author": 9}
TYPES = (
    ("author", "writes", "paper"),
    ("paper", "cites", "paper"),
    ("paper", "extends", "paper"),
    ("paper", "by", "author"),
)
EDGES = {kind: random_edges(SIZES[kind[0]], SIZES[kind[2]], 40) for kind in TYPES}

Layer = Callable[[], nn.Module]


class Doubled(SAGEConv):  # type: ignore[misc]
    """It uses what its base computes."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return 2 * super().forward(*args, **kwargs)


class Squared(SAGEConv):  # type: ignore[misc]
    def forward(self, x: Any, edge_index: Tensor, size: Any = None) -> Tensor:
        return super().forward(x, edge_index, size).square()


LAYERS: dict[str, Layer] = {
    "SAGE": lambda: SAGEConv((5, 5), 4),
    "SAGE of maxima": lambda: SAGEConv((5, 5), 4, aggr="max", bias=False),
    "GraphConv": lambda: GraphConv((5, 5), 4),
    "normalised": lambda: SAGEConv((5, 5), 4, normalize=True),
    "projected": lambda: SAGEConv((5, 5), 4, project=True),
    "without roots": lambda: SAGEConv((5, 5), 4, root_weight=False),
    "of a user": lambda: Doubled((5, 5), 4),
}


def features(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    torch.manual_seed(2)
    return {kind: torch.randn(size, 5, dtype=dtype) for kind, size in SIZES.items()}


def run(
    module: nn.Module, x_dict: dict[str, Tensor], edges: Any = EDGES
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Outputs, and the gradients of inputs and parameters."""
    x_dict = {kind: x.detach().requires_grad_() for kind, x in x_dict.items()}
    module.zero_grad()
    out = module(x_dict, edges)
    torch.manual_seed(3)
    sum((value * torch.rand_like(value)).sum() for value in out.values()).backward()  # type: ignore[union-attr]
    inputs = [*x_dict.values(), *module.parameters()]
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in inputs]
    return {kind: value.detach() for kind, value in out.items()}, gradients


def assert_same(module: nn.Module, x_dict: dict[str, Tensor], edges: Any = EDGES) -> None:
    expected = run(module, x_dict, edges)
    with fastgraph.enabled():
        ours = run(module, x_dict, edges)
    torch.testing.assert_close(ours, expected)


def of(layer: Layer, aggr: str | None = "sum") -> HeteroConv:
    torch.manual_seed(1)
    return HeteroConv({kind: layer() for kind in TYPES}, aggr).double()


@pytest.mark.parametrize("aggr", ["sum", "mean", "min", "max", "cat", None])
@pytest.mark.parametrize("name", LAYERS)
def test_every_sum_is_pygs(name: str, aggr: str | None) -> None:
    assert_same(of(LAYERS[name], aggr), features())


@pytest.mark.parametrize("aggr", ["sum", "mean"])
def test_a_product_for_all_types_of_edges(aggr: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x_dict = of(LAYERS["SAGE"], aggr), features()
    weights: list[tuple[Tensor, Tensor]] = []
    original = products.add_linear

    def noted(out: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        weights.append((x, weight.detach()))
        return original(out, x, weight)

    monkeypatch.setattr("fastgraph.pyg.hetero_conv.add_linear", noted)
    with fastgraph.enabled():
        module(x_dict, EDGES)
    [(x, weight)] = weights
    assert x is x_dict["paper"]
    own = [module.convs[kind].lin_r.weight for kind in TYPES if kind[2] == "paper"]
    torch.testing.assert_close(weight, sum(own))


def test_layers_of_several_kinds_and_another_number_of_types() -> None:
    torch.manual_seed(1)
    module = HeteroConv(
        {
            TYPES[0]: SAGEConv((5, 5), 4),
            TYPES[1]: GATConv((5, 5), 4, add_self_loops=False),
            TYPES[2]: GraphConv(5, 4, aggr="mean"),
            TYPES[3]: SAGEConv((-1, -1), 4),
        }
    ).double()
    x_dict = features()
    module(x_dict, EDGES)  # makes lazy weights
    assert_same(module, x_dict)
    for kept in (TYPES[:1], TYPES[1:], TYPES[3:]):
        assert_same(module, x_dict, {kind: EDGES[kind] for kind in kept})


class Wrapped(nn.Module):
    """It uses what another layer computes, of which modules need not know."""

    def __init__(self, layer: nn.Module, registered: bool) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList([layer]) if registered else (layer,)

    def forward(self, x: Any, edge_index: Tensor) -> Tensor:
        out: Tensor = self.layers[0](x, edge_index)
        return out.square()


@pytest.mark.parametrize("registered", [True, False])
def test_a_layer_that_another_layer_uses_too(registered: bool) -> None:
    torch.manual_seed(1)
    layer = SAGEConv((5, 5), 4).double()
    user = Wrapped(layer, registered).double()
    module = HeteroConv({TYPES[0]: layer, TYPES[1]: user, TYPES[2]: SAGEConv((5, 5), 4)})
    assert_same(module.double(), features())


def test_a_layer_within_one_of_pygs() -> None:
    torch.manual_seed(1)
    layer = SAGEConv((5, 5), 4)
    network = Sequential(
        "x",
        [
            (lambda x: (x, EDGES[TYPES[1]][:, :0]), "x -> y, none"),
            (layer, "y, none -> x"),
            nn.ReLU(),
        ],
    )
    module = HeteroConv({TYPES[1]: layer, TYPES[2]: GINConv(network, train_eps=True)})
    assert_same(module.double(), features())


class Halving(nn.Module):
    """It edits features that layers before it were given."""

    def forward(self, x: Any, edge_index: Tensor) -> Tensor:
        target: Tensor = x[1] if isinstance(x, tuple) else x
        return target.mul_(0.5)[:, :4].clone()


def test_features_that_are_edited_after_a_layer() -> None:
    torch.manual_seed(1)
    module = HeteroConv({TYPES[1]: SAGEConv(5, 4), TYPES[2]: Halving()}).double()
    with torch.no_grad():
        expected = module(features(), EDGES)
        with fastgraph.enabled():
            ours = module(features(), EDGES)
    torch.testing.assert_close(ours, expected)


def test_vmap() -> None:
    """Of a weight, so that terms of one type alone have the dimension that is mapped over."""
    module, x_dict = of(LAYERS["SAGE"]), features()
    parameters = dict(module.named_parameters())
    weights = torch.randn(3, 4, 5, dtype=torch.float64)
    for name in (name for name in parameters if name.endswith("lin_r.weight")):

        def of_weight(weight: Tensor, name: str = name) -> dict[str, Tensor]:
            given = {**parameters, name: weight}
            return torch.func.functional_call(module, given, (x_dict, EDGES))  # type: ignore[no-any-return]

        expected = torch.func.vmap(of_weight)(weights)
        with fastgraph.enabled():
            torch.testing.assert_close(torch.func.vmap(of_weight)(weights), expected)


def test_one_layer_for_several_types() -> None:
    torch.manual_seed(1)
    layer = SAGEConv((5, 5), 4)
    assert_same(HeteroConv(dict.fromkeys(TYPES, layer)).double(), features())


def test_layers_within_modules_are_whole() -> None:
    """And so is a layer that calls another ``HeteroConv``'s."""

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = SAGEConv((5, 5), 4)

        def forward(self, x: Any, edge_index: Tensor) -> Tensor:
            out: Tensor = self.conv(x, edge_index)
            return out.relu()

    assert_same(of(Wrapped), features())
    assert_same(of(lambda: Squared((5, 5), 4)), features())


@pytest.mark.parametrize("where", ["layer", "projection", "everywhere", "instance"])
def test_results_that_somebody_sees_are_whole(where: str) -> None:
    def results(ours: bool) -> list[Tensor]:
        module, seen = copy.deepcopy(made), list[Tensor]()
        layer = module.convs[TYPES[0]]

        def see(watched: Any, _: Any, out: Tensor) -> None:
            if where != "everywhere" or isinstance(watched, SAGEConv):
                seen.append(out)

        handle: Any = None
        if where == "layer":
            layer.register_forward_hook(see)
        elif where == "projection":
            layer.lin_r.register_forward_hook(see)
        elif where == "everywhere":
            handle = nn.modules.module.register_module_forward_hook(see)
        else:
            forward = layer.forward
            layer.forward = lambda *args: seen.append(forward(*args)) or seen[-1]
        try:
            with fastgraph.enabled() if ours else torch.enable_grad():
                seen.append(module(features(), EDGES)["paper"])
        finally:
            if handle is not None:
                handle.remove()
        return seen

    made = of(LAYERS["SAGE"])
    expected, ours = results(False), results(True)
    assert len(expected) > 1
    torch.testing.assert_close(ours, expected)


def test_a_layer_by_itself_is_whole_after_an_error() -> None:
    module, x_dict = of(LAYERS["SAGE"]), features()
    layer, given = module.convs[TYPES[1]], (x_dict["paper"], EDGES[TYPES[1]])
    expected = layer(*given)
    with fastgraph.enabled():
        module(x_dict, EDGES)
        torch.testing.assert_close(layer(*given), expected)
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            module({**x_dict, "author": torch.randn(9, 6).double()}, EDGES)
        torch.testing.assert_close(layer(*given), expected)


def test_features_that_do_not_fit_are_pygs_error() -> None:
    wrong = {**features(), "paper": torch.randn(12, 7).double()}
    for ours in (False, True):
        with (
            fastgraph.enabled() if ours else torch.enable_grad(),
            pytest.raises(RuntimeError, match="cannot be multiplied"),
        ):
            of(LAYERS["GraphConv"])(wrong, EDGES)


def test_tensors_without_memory() -> None:
    x_dict = {kind: x.to("meta") for kind, x in features().items()}
    edges = {kind: index.to("meta") for kind, index in EDGES.items()}
    with fastgraph.enabled():
        out = of(LAYERS["SAGE"]).to("meta")(x_dict, edges)
    assert {kind: value.shape for kind, value in out.items()} == {
        "paper": (12, 4),
        "author": (9, 4),
    }


def test_results_of_several_sizes_are_pygs_error() -> None:
    torch.manual_seed(1)
    module = HeteroConv({TYPES[0]: SAGEConv((5, 5), 4), TYPES[1]: SAGEConv((5, 5), 3)}).double()
    for ours in (False, True):
        with (
            fastgraph.enabled() if ours else torch.enable_grad(),
            pytest.raises(RuntimeError, match="equal size"),
        ):
            module(features(), EDGES)


def test_a_comparison_sees_whole_results(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x_dict = of(LAYERS["SAGE"]).float(), features(torch.float32)
    expected = module(x_dict, EDGES)
    with fastgraph.enabled(compare=True):  # raises where a layer differs
        torch.testing.assert_close(module(x_dict, EDGES), expected)
    assert fastgraph.status().row("SAGEConv").routed > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes_and_autocast(dtype: torch.dtype) -> None:
    module, x_dict = of(LAYERS["SAGE"]).to(dtype), features(dtype)
    exact = run(copy.deepcopy(module).double(), {k: x.double() for k, x in x_dict.items()})
    tolerance = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 32 * torch.finfo(dtype).eps}
    with fastgraph.enabled():
        ours = run(module, x_dict)
    torch.testing.assert_close(ours[0], {k: v.to(dtype) for k, v in exact[0].items()}, **tolerance)
    with fastgraph.enabled(), torch.autocast("cpu", dtype=torch.bfloat16):
        out = module(x_dict, EDGES)["paper"]
    # Autocast rounds all to bfloat16, whose numbers have 8 bits.
    torch.testing.assert_close(out.double(), exact[0]["paper"], rtol=0.05, atol=0.2)
