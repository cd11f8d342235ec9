"""``fastgraph.compare``: what it reports, what it refuses, and that it leaves nothing behind."""

from __future__ import annotations

import copy
import dataclasses
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch_geometric import EdgeIndex
from torch_geometric.data import Data
from torch_geometric.nn import (
    GATConv,
    GATv2Conv,
    GCNConv,
    GINEConv,
    SAGEConv,
    Sequential,
    TransformerConv,
)

import fastgraph
from fastgraph.backends import reference
from fastgraph.comparison import modules
from fastgraph.comparison.modules import compare_call
from tests.graphs import random_edges

NODES = 40
EDGES = random_edges(NODES, NODES, 300)


def features() -> Tensor:
    return torch.randn(NODES, 6)


def compare(module: nn.Module, *args: Any, **kwargs: Any) -> fastgraph.Comparison:
    return compare_call(module, args, kwargs, budget=0.02)


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (GCNConv, {}),
        (SAGEConv, {"aggr": "max"}),
        (GATv2Conv, {"heads": 2}),
        (GATConv, {"heads": 2}),
        (TransformerConv, {"heads": 2}),
    ],
)
def test_layers_agree_and_were_routed(cls: type[nn.Module], options: dict[str, Any]) -> None:
    layer = cls(6, 4, **options)
    found = compare(layer, features(), EDGES)
    assert found.ok, str(found)
    assert repr(found) == str(found)
    assert [(row.layer, row.routed, row.fell_back) for row in found.routing] == [
        (cls.__name__, 1, 0)
    ]
    kinds = {error.kind: error.name for error in found.tensors}
    assert kinds["output"] == "output"
    assert kinds["gradient of input"] == "x"
    names = [e.name for e in found.tensors if e.kind == "gradient of parameter"]
    assert names == [name for name, _ in layer.named_parameters()]
    assert all(0 < error.upstream < 1e-5 for error in found.tensors if error.kind == "output")
    assert found.upstream.seconds > 0
    assert found.ours.samples >= 3
    assert not found.notes


def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = reference.spmm

    def wrong(*args: Any, **kwargs: Any) -> Tensor:
        out = right(*args, **kwargs)
        out[3, 1] += 1e-3
        return out

    monkeypatch.setattr(reference, "spmm", wrong)
    with fastgraph.enabled(backend="reference"):
        found = compare(GCNConv(6, 4), features(), EDGES)
    assert not found.ok
    output = found.tensors[0]
    assert output.worst == (3, 1)
    assert output.ours > 100 * output.upstream
    assert found.worst.ours / found.worst.limit >= output.ours / output.limit
    assert "DIFFERS FROM UPSTREAM" in str(found)
    assert "[3, 1]" in str(found)


def test_nothing_of_the_callers_changes() -> None:
    model = Sequential(
        "x, edge_index",
        [
            (GCNConv(6, 4, cached=True), "x, edge_index -> x"),
            nn.BatchNorm1d(4),
            nn.Dropout(0.5),
            (SAGEConv(4, 4), "x, edge_index -> x"),
        ],
    )
    x = features().requires_grad_()
    x.grad = torch.ones_like(x)
    model(x, EDGES).sum().backward()
    state = copy.deepcopy(model.state_dict())
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    x_gradient = x.grad.clone()
    drawn = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())

    found = compare(model, x, EDGES)

    assert found.ok, str(found)
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert all(
        torch.equal(old, new.grad) for old, new in zip(gradients, model.parameters(), strict=True)
    )
    assert torch.equal(x.grad, x_gradient)
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert random.getstate() == drawn[1]
    assert np.random.get_state()[1].tolist() == drawn[2]
    assert not fastgraph.is_enabled()
    assert not fastgraph.status().rows
    assert fastgraph.compare(model, x, EDGES).ok


def test_it_comes_back_enabled_with_the_callers_settings() -> None:
    fastgraph.enable(min_edges=10_000)
    found = compare(GCNConv(6, 4), features(), EDGES)
    assert fastgraph.is_enabled()
    assert found.routing[0].routed == 0
    assert "min_edges=10000" in str(found)
    assert "no layer was routed" in found.notes[0]
    assert found.worst.ratio == 1


def test_upstreams_path_is_told() -> None:
    adjacency = torch.sparse_coo_tensor(EDGES.flip(0), torch.ones(300), (NODES, NODES)).coalesce()
    model = Sequential("x, a, b", [(SAGEConv(6, 6), "x, a -> x"), (SAGEConv(6, 4), "x, b -> x")])
    found = compare(model, features(), EDGES, adjacency.to_sparse_csr())
    assert [(path.layer, path.graph, path.fused) for path in found.upstream_paths] == [
        ("module_0", "edge_index tensor", False),
        ("module_1", "torch.sparse CSR adjacency", True),
    ]
    assert found.ok, str(found)


def test_reasons_are_told() -> None:
    conv = GINEConv(nn.Linear(6, 4), edge_dim=2, aggr="median")
    found = compare(conv, features(), EDGES, edge_attr=torch.randn(300, 2))
    (row,) = found.routing
    assert row.fell_back == 1
    assert "aggregation MedianAggregation" in str(found)
    assert [e.name for e in found.tensors if e.kind == "gradient of input"] == ["x", "edge_attr"]


def test_attention_dropout_is_said_and_judged_by_means() -> None:
    found = compare(GATConv(6, 4, heads=2, dropout=0.4), features(), EDGES)
    assert found.ok, str(found)
    assert "attention dropout is active in the module" in found.notes[0]
    assert {"output", "gradient of x", "gradient of att_src"} <= {m.name for m in found.means}
    assert any(mean.difference > 0 for mean in found.means)
    assert found.tensors[0].upstream < 1e-5
    assert not compare(GATConv(6, 4, dropout=0.4).eval(), features(), EDGES).means


def test_means_notice_another_distribution() -> None:
    layer = GATConv(6, 4, heads=2, dropout=0.2)
    found = compare(layer, features(), EDGES)
    assert found.ok

    class Doubled(GATConv):
        """Scaled where our route sees it, so the two sides differ by more than chance."""

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return (1.5 if fastgraph.is_enabled() else 1) * super().forward(x, edge_index)

    found = compare(Doubled(6, 4, heads=2, dropout=0.2), features(), EDGES)
    assert not all(mean.ok for mean in found.means)


def test_noise_of_the_modules_own_is_inconclusive() -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.randn_like(x)

    found = compare(Noisy(), features())
    assert not found.ok
    assert found.inconclusive is not None
    assert "INCONCLUSIVE" in str(found)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    found = compare(GCNConv(6, 4).to(dtype), features().to(dtype), EDGES)
    assert found.tensors[0].dtype is dtype
    assert found.ok, str(found)


def test_forms_of_arguments() -> None:
    class OnData(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = SAGEConv((6, 3), 4)

        def forward(self, data: Data, extra: dict[str, Any]) -> tuple[Tensor, Tensor]:
            out = self.conv((data.x, extra["other"][0]), data.edge_index)
            return out, out.argmax(dim=-1)

    x = features()
    data = Data(x=x, edge_index=EdgeIndex(EDGES, sparse_size=(NODES, NODES)))
    found = compare(OnData(), data, extra={"other": [torch.randn(NODES, 3)]})
    assert found.ok, str(found)
    assert [error.name for error in found.tensors[:4]] == [
        "output[0]",
        "output[1]",
        "data.x",
        "extra['other'][0]",
    ]
    assert data.x is x
    assert not x.requires_grad


def test_compiled_modules_are_said_to_be_uncounted() -> None:
    compiled = torch.compile(GCNConv(6, 4), backend="eager")
    found = compare(compiled, features(), EDGES)
    assert found.ok, str(found)
    assert found.notes == (
        "calls within torch.compile are not counted, so routing is not known for them",
    )


def test_only_inputs_that_require_a_gradient_where_some_do() -> None:
    weight = torch.rand(300).requires_grad_()
    found = compare(GCNConv(6, 4), features(), EDGES, edge_weight=weight)
    assert [e.name for e in found.tensors if e.kind == "gradient of input"] == ["edge_weight"]


def test_under_no_grad_and_inference_mode() -> None:
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            found = compare(GCNConv(6, 4), features(), EDGES)
        assert found.ok, str(found)
        assert len(found.tensors) == 4


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match=r"module must be a torch\.nn\.Module, got str"):
        fastgraph.compare("GCN")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"module must have been run once.*weight"):
        fastgraph.compare(GCNConv(-1, 4), features(), EDGES)
    with pytest.raises(ValueError, match="must return a floating-point tensor"):
        fastgraph.compare(nn.Flatten(), torch.ones(2, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="factor must be above 0, got -1"):
        compare_call(GCNConv(6, 4), (features(), EDGES), factor=-1)
    with pytest.raises(ValueError, match="seeds must be at least 2, got 1"):
        compare_call(GCNConv(6, 4), (features(), EDGES), seeds=1)
    monkeypatch.setenv("FASTGRAPH", "0")
    with pytest.raises(RuntimeError, match="FASTGRAPH=0"):
        fastgraph.compare(GCNConv(6, 4), features(), EDGES)


def test_comparison_is_frozen() -> None:
    found = compare(GCNConv(6, 4), features(), EDGES)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.factor = 3.0  # type: ignore[misc]
    assert modules.FACTOR == found.factor == 2.0
