"""Several aggregations of a message, and variances, go by one edge program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.nn.aggr import (
    DegreeScalerAggregation,
    MaxAggregation,
    MeanAggregation,
    MultiAggregation,
    StdAggregation,
    VarAggregation,
)

import fastgraph
from fastgraph.backends import edge_programs
from tests.ab import Arguments, arguments
from tests.graphs import Case, all_cases, hub_edges, quantised
from tests.outcomes import differences
from tests.pyg.traced_layers import (
    CHANNELS,
    EDGES,
    NODES,
    Scaled,
    refused,
    routed,
    second_derivative,
    x64,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::fastgraph.FallbackWarning"),
    pytest.mark.usefixtures("nothing_known"),
]

ALL = ["sum", "mean", "max", "min", "var", "std"]


def multi(aggrs: list[Any], mode: str, **options: Any) -> MultiAggregation:
    return MultiAggregation(aggrs, mode=mode, mode_kwargs=options)


def of_two(mode: str) -> MultiAggregation:
    return multi(["mean", "max"], mode, in_channels=CHANNELS, out_channels=CHANNELS)


class Weighting(pyg.SimpleConv):
    """A known message that is multiplied by a weight for each edge."""

    def forward(self, x: Any, edge_index: Tensor) -> Tensor:
        weight = torch.linspace(-1, 1, edge_index.shape[1], dtype=torch.float64)
        out: Tensor = super().forward(x, edge_index, weight)
        return out


class Heads(Scaled):
    """Messages of two dimensions of channels, which PyG does not fuse."""

    def __init__(self, aggr: Any) -> None:
        super().__init__(aggr, node_dim=0)

    def forward(self, x: Any, edge_index: Tensor) -> Tensor:
        x = tuple(t.view(-1, 2, 2) for t in x) if isinstance(x, tuple) else x.view(-1, 2, 2)
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return x_i * x_j + x_j


class Scalars(Scaled):
    """Messages of one number for each edge."""

    def forward(self, x: Any, edge_index: Tensor) -> Tensor:
        x = tuple(t[:, 0] for t in x) if isinstance(x, tuple) else x[:, 0]
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return x_i * x_j + x_j


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "SAGEConv": lambda: pyg.SAGEConv(CHANNELS, 3, aggr=["mean", "max"]),
    "SAGEConv, all": lambda: pyg.SAGEConv(CHANNELS, 3, aggr=list(ALL)),
    "SAGEConv, in another order": lambda: pyg.SAGEConv(CHANNELS, 3, aggr=ALL[::-1]),
    "SAGEConv, var": lambda: pyg.SAGEConv(CHANNELS, 3, aggr="var"),
    "a weighted std": lambda: Weighting(aggr="std"),
    "weighted extrema": lambda: Weighting(aggr=["max", "min"]),
    "GraphConv": lambda: pyg.GraphConv(CHANNELS, 3, aggr=of_two("min")),
    "GINConv": lambda: pyg.GINConv(nn.Linear(CHANNELS, 3), aggr=of_two("proj")),
    "attention": lambda: pyg.GINConv(nn.Linear(CHANNELS, 3), aggr=of_two("attn")),
    **{mode: lambda mode=mode: Scaled(of_two(mode)) for mode in ("sum", "mean", "max")},
    "logsumexp": lambda: Scaled(of_two("logsumexp")),
    "mean and std": lambda: Scaled(["mean", "std"]),
    "std alone": lambda: Scaled("std"),
    "one of several": lambda: Scaled(multi(["std"], "cat")),
    "several of several": lambda: Scaled(multi([multi(["mean", "max"], "sum"), "std"], "cat")),
    "semi-gradients": lambda: Scaled(VarAggregation(semi_grad=True)),
    "semi-gradients of roots": lambda: Scaled(StdAggregation(semi_grad=True)),
    # PyG takes them from variances alone, and then for all spreads, or of each for itself.
    "semi-gradients, fused": lambda: Scaled([VarAggregation(semi_grad=True), "std"]),
    "semi-gradients that fusing drops": lambda: Scaled([StdAggregation(semi_grad=True), "mean"]),
    "semi-gradients of heads": lambda: Heads([VarAggregation(semi_grad=True), "std"]),
    "roots of heads": lambda: Heads([StdAggregation(semi_grad=True), "mean"]),
    "heads": lambda: Heads(list(ALL)),
    "scalars": lambda: Scalars(list(ALL), node_dim=0),
    "backwards": lambda: Scaled(list(ALL), flow="target_to_source"),
}


def call_of(case: Case, layer: nn.Module) -> Arguments | None:
    x = quantised(case.num_src, CHANNELS)
    if case.num_src == case.num_dst:
        edges = getattr(layer, "edge_dim", None)
        features = [] if edges is None else [quantised(case.num_edges, edges, seed=2)]
        return arguments(x, case.edge_index, *features)
    if layer.flow == "target_to_source" or isinstance(layer, (pyg.GINConv, pyg.PNAConv)):
        return None
    return arguments((x, quantised(case.num_dst, CHANNELS, seed=1)), case.edge_index)


SCALERS = ["identity", "amplification", "attenuation", "linear", "inverse_linear"]
DEGREES = torch.tensor([1, 3, 2, 5])


def pna(aggregators: Any, **options: Any) -> pyg.PNAConv:
    return pyg.PNAConv(CHANNELS, 6, aggregators, SCALERS, DEGREES, **options)


LAYERS |= {
    "PNAConv": lambda: pna(["mean", "min", "max", "std"]),
    "PNAConv, normalisation": lambda: pna(["mean", "sum", "var"], train_norm=True),
    "PNAConv, towers": lambda: pna(["mean", "max"], towers=3),
    "PNAConv, divided": lambda: pna(["mean", "std"], towers=2, divide_input=True),
    "PNAConv, two layers afterwards": lambda: pna(["max"], post_layers=2),
    "PNAConv, two layers before": lambda: pna(["mean", "max"], pre_layers=2),
    "PNAConv, edges": lambda: pna(["mean", "min", "max", "std"], edge_dim=3),
    "PNAConv, towers with edges": lambda: pna(["mean", "std"], edge_dim=3, towers=2),
    "scaled": lambda: Scaled(DegreeScalerAggregation(StdAggregation(), SCALERS, DEGREES)),
    "scaled once": lambda: Scaled(DegreeScalerAggregation(["max", "std"], ["linear"], DEGREES)),
    "scaled, combined": lambda: Scaled(
        DegreeScalerAggregation(of_two("proj"), SCALERS, DEGREES, train_norm=True)
    ),
    "scaled backwards": lambda: Scaled(
        DegreeScalerAggregation(MeanAggregation(), SCALERS, DEGREES), flow="target_to_source"
    ),
    "scaled heads": lambda: Heads(DegreeScalerAggregation(list(ALL), SCALERS, DEGREES)),
    "scaled scalars": lambda: Scalars(
        DegreeScalerAggregation(StdAggregation(), ["identity"], DEGREES), node_dim=-1
    ),
    "PyG's error": lambda: Scalars(
        DegreeScalerAggregation(list(ALL), SCALERS, DEGREES), node_dim=-1
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_what_they_are_upstream(name: str) -> None:
    torch.manual_seed(0)
    layer = LAYERS[name]().double()
    calls = {c.name: call_of(c, layer) for c in all_cases() if c.name not in ("int32", "hub")}
    taken = {name: call for name, call in calls.items() if call is not None}
    assert differences(layer, taken) == {}
    (row,) = fastgraph.status().rows
    assert (dict(row.reasons), row.programs) == ({}, len(taken))


def test_several_aggregations_are_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x, programs = Scaled(list(ALL)).double(), x64().requires_grad_(), []
    made = edge_programs._made
    monkeypatch.setattr(
        edge_programs, "_made", lambda program, *r: programs.append(program) or made(program, *r)
    )
    with fastgraph.enabled(min_edges=0), torch.no_grad():
        layer(x, EDGES)
    reductions = [[output.reduction for output in program.outputs] for program in programs]
    assert reductions == [["sum", "mean", "max", "min", "mean"]]
    with fastgraph.enabled(min_edges=0):
        layer(x, EDGES).square().sum().backward()
    assert len(programs) == 4  # one forward, and one for each end's gradients


def test_second_derivatives() -> None:
    torch.manual_seed(0)
    layer = Scaled(list(ALL), act=nn.Tanh()).double()
    x = quantised(NODES + 1, CHANNELS).add(0.25).requires_grad_()  # one without edges

    def loss() -> Tensor:
        return layer(x, EDGES).square().sum() + x.square().sum()

    expected = second_derivative(loss, x)
    with fastgraph.enabled(min_edges=0):
        found = second_derivative(loss, x)
    assert fastgraph.status().row("Scaled").programs == 1
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-8)


def test_rows_of_many_edges_and_threads() -> None:
    torch.manual_seed(0)
    layer, x = Scaled(list(ALL)).double(), quantised(40, CHANNELS).requires_grad_()
    edges = hub_edges(40, 12_000)
    leaves = [x, *layer.parameters()]

    def results() -> list[Tensor]:
        out = layer(x, edges)
        return [out, *torch.autograd.grad(out.sin().sum(), leaves)]

    expected, found = results(), []
    count = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            with fastgraph.enabled(min_edges=0):
                found.append(results())
    finally:
        torch.set_num_threads(count)
    assert fastgraph.status().row("Scaled").programs == 2
    assert all(map(torch.equal, *found))
    # Sums of thousands of messages, in another order.
    torch.testing.assert_close(found[0], expected, rtol=1e-8, atol=1e-6)


def test_int32_indices_give_the_gradients_of_int64_ones() -> None:
    layer, x = Scaled(list(ALL)).double(), x64().requires_grad_()
    found = []
    with fastgraph.enabled(min_edges=0):
        for edges in (EDGES, EDGES.int()):
            out = layer(x, edges)
            found.append((out, *torch.autograd.grad(out.sin().sum(), [x, *layer.parameters()])))
    assert fastgraph.status().row("Scaled").programs == 2
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("aggr", ["var", "std", ["mean", "std"]])
def test_equal_messages_have_no_spread(aggr: Any) -> None:
    """Roots of variances that round to nothing are zero, and have no gradient."""
    x = torch.full((NODES, CHANNELS), 0.1, dtype=torch.float64)
    x[: NODES // 2] += 1e-4  # the square of it is too little to count
    layer = pyg.SimpleConv(aggr=aggr)
    call = arguments(x, EDGES)
    assert differences(layer, {"equal": call}) == {}
    assert fastgraph.status().row("SimpleConv").programs == 1


def test_programs_are_told() -> None:
    layer = pyg.SAGEConv(CHANNELS, 3, aggr=["max", "std"]).double()
    routed(layer, x64())
    text = fastgraph.explain(layer)
    assert text.startswith("SAGEConv: edge program, reduced by max, mean, mean of squares:\n")
    assert "edge program" in str(fastgraph.status())


def test_several_layers_before_the_aggregation_of_towers() -> None:
    routed(pna(["mean", "max"], pre_layers=2, towers=2).double(), x64(), EDGES)


def test_what_is_left_to_upstream() -> None:
    x = x64()
    several = Scaled(["mean", "median"]).double()
    assert refused(several, x, EDGES) == "aggregation MedianAggregation"
    assert refused(Scaled(["mean", "mul"]).double(), x, EDGES) == "aggregation MulAggregation"
    assert refused(Scaled(["mean", "mean"]).double(), x, EDGES) == "one aggregation several times"

    class Own(MeanAggregation):
        """A user's aggregation."""

    assert refused(Scaled([Own(), "max"]).double(), x, EDGES) == "aggregation Own"
    scaled = DegreeScalerAggregation(["max", "median"], SCALERS, DEGREES)
    assert refused(Scaled(scaled).double(), x, EDGES) == "aggregation MedianAggregation"


def hooked(aggregation: MultiAggregation) -> Any:
    return aggregation


def hooked_part(aggregation: MultiAggregation) -> Any:
    return aggregation.aggrs[0]


def hooked_fusion(aggregation: MultiAggregation) -> Any:
    return aggregation.fused_aggr


def hooked_variance(aggregation: MultiAggregation) -> Any:
    return aggregation.aggrs[1].var_aggr


@pytest.mark.parametrize("part", [hooked, hooked_part, hooked_fusion, hooked_variance])
def test_hooks_and_replaced_methods(part: Callable[[MultiAggregation], Any]) -> None:
    layer, x = Scaled(["mean", "std"]).double(), x64()
    routed(layer, x)
    module = part(layer.aggr_module)
    handle = module.register_forward_hook(lambda _, __, out: None)
    reason = "the aggregation is replaced or has hooks"
    assert refused(layer, x, EDGES) == reason
    handle.remove()
    routed(layer, x)
    module.forward = type(module).forward.__get__(module)
    assert refused(layer, x, EDGES) == reason
    del module.forward
    routed(layer, x)


def test_hooks_and_replaced_methods_of_what_is_scaled() -> None:
    layer, x = pna(["mean", "std"]).double(), x64()
    routed(layer, x)
    for module in (layer.aggr_module, layer.aggr_module.aggr, layer.aggr_module.aggr.aggrs[0]):
        handle = module.register_forward_pre_hook(lambda *_: None)
        assert refused(layer, x, EDGES) == "the aggregation is replaced or has hooks"
        handle.remove()
    layer.aggr_module.scaler = ["linear", *SCALERS[1:]]  # which PyG reads at every call
    routed(layer, x)


def test_replaced_parts() -> None:
    layer, x = Scaled(["mean", "std"]).double(), x64()
    layer.aggr_module.aggrs[0] = MaxAggregation()  # which PyG does not see in what it fuses
    assert refused(layer, x, EDGES) == "the aggregation is replaced or has hooks"
    layer = Scaled("std").double()
    layer.aggr_module.var_aggr = MeanAggregation()
    assert refused(layer, x, EDGES) == "the aggregation is replaced or has hooks"
    layer = Scaled(["mean", "max"]).double()
    layer.aggr_module.combine = lambda parts: parts[0] - parts[1]
    routed(layer, x)


def test_a_combination_with_a_hook_is_upstreams() -> None:
    layer = pyg.GINConv(nn.Linear(CHANNELS, 3), aggr=of_two("proj")).double()
    layer.aggr_module.lin.register_forward_hook(lambda _, __, out: 2 * out)
    assert "has hooks" in refused(layer, x64(), EDGES)


def test_modes_are_read_at_every_call() -> None:
    layer, x = Scaled(of_two("sum")).double(), x64()
    first = routed(layer, x)
    layer.aggr_module.dense_combine = torch.mean
    torch.testing.assert_close(routed(layer, x), first / 2)
    routed(Scaled(of_two("max")).double(), x)
