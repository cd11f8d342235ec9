"""Classes of PyG with an ``aggregate`` of their own that is known, and others that have one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor

import fastgraph
from tests.ab import Arguments, arguments
from tests.graphs import quantised, square_cases
from tests.outcomes import difference, differences, outcome
from tests.pyg.traced_layers import CHANNELS, EDGES, refused, second_derivative, x64

pytestmark = [
    pytest.mark.filterwarnings("ignore::fastgraph.FallbackWarning"),
    pytest.mark.usefixtures("nothing_known"),
]

ALL = ["symnorm", "sum", "mean", "min", "max", "var", "std"]


def conv(*names: str, **options: Any) -> Any:
    made = pyg.EGConv(CHANNELS, 6, list(names) or None, num_heads=2, num_bases=2, **options)
    return made.double()


def calls() -> dict[str, Arguments]:
    """Graphs with ties, equal messages, whose variance is zero, and nodes without edges."""
    return {
        case.name: arguments(quantised(case.num_src, CHANNELS), case.edge_index)
        for case in square_cases()
        if case.edge_index.dtype is torch.int64
    }


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("names", [(), tuple(ALL), *((name,) for name in ALL)], ids=str)
def test_aggregators_of_eg_conv(names: tuple[str, ...], flow: str) -> None:
    torch.manual_seed(0)
    layer = conv(*names, flow=flow, add_self_loops="var" in names)
    assert differences(layer, calls()) == {}
    (row,) = fastgraph.status().rows
    assert row.programs == len(calls()), row


def test_cached_edges_and_edges_of_32_bits() -> None:
    layer, x = conv(*ALL, cached=True), x64()
    assert differences(layer, {"cached": arguments(x, EDGES)}) == {}
    layer = conv(*ALL)
    right = outcome(layer, arguments(x, EDGES))
    with fastgraph.enabled(min_edges=0):
        ours = outcome(layer, arguments(x, EDGES.int()))
    assert difference(right, ours) is None


def test_second_derivatives() -> None:
    layer, x = conv("symnorm", "mean", "var"), x64().requires_grad_()
    expected = second_derivative(lambda: layer(x, EDGES).square().sum(), x)
    with fastgraph.enabled(min_edges=0):
        found = second_derivative(lambda: layer(x, EDGES).square().sum(), x)
    torch.testing.assert_close(found, expected)
    assert fastgraph.status().rows[0].programs == 1


def test_aggregators_that_are_changed() -> None:
    layer, x = conv("sum", "max"), x64()
    with fastgraph.enabled(min_edges=0):
        layer(x, EDGES)
        layer.aggregators[0] = "min"
        found = layer(x, EDGES)
    torch.testing.assert_close(found, layer(x, EDGES))
    assert fastgraph.status().rows[0].programs == 2


def test_aggregates_of_users_are_left_to_upstream() -> None:
    class Doubled(pyg.EGConv):
        def aggregate(self, inputs: Tensor, index: Tensor, dim_size: Any = None) -> Tensor:
            return super().aggregate(2 * inputs, index, dim_size)

    layer = Doubled(CHANNELS, 6, ["sum", "max"], num_heads=2).double()
    assert refused(layer, x64(), EDGES) == "aggregate is overridden"
    layer = conv("sum")
    layer.aggregate = lambda inputs, index, **_: pyg.EGConv.aggregate(layer, inputs, index)
    assert refused(layer, x64(), EDGES) == "aggregate is overridden on the instance"
