"""``FASTGRAPH=compare``: every call of a routed layer is run both ways."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GCNConv, SAGEConv

import fastgraph
from fastgraph.backends import reference
from fastgraph.comparison import checking
from tests.forks import python
from tests.graphs import random_edges

NODES = 20
EDGES = random_edges(NODES, NODES, 120)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([GATConv(6, 4, dropout=0.5), GCNConv(4, 4, cached=True)])
        self.last = SAGEConv(4, 3, aggr="max")
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs:
            x = self.dropout(conv(x, edge_index=edge_index)).relu()
        return self.last(x, edge_index)


@pytest.fixture(autouse=True)
def nothing_said_at_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep faults that these tests plant out of the report at the end of the test run."""
    monkeypatch.setattr(checking, "print_at_exit", lambda text: None)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the classes of the layers that were compared."""
    names: list[str] = []
    upstream = checking._check

    def check(module: nn.Module, *args: Any) -> None:
        names.append(type(module).__name__)
        upstream(module, *args)

    monkeypatch.setattr(checking, "_check", check)
    return names


def train(model: nn.Module, x: Tensor, steps: int = 2) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x, EDGES).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_training_is_checked_and_not_changed(checked: list[str]) -> None:
    x = torch.randn(NODES, 6)
    results = []
    for compare in (False, True):
        torch.manual_seed(0)
        with fastgraph.enabled(compare=compare):
            results.append(train(Model(), x))
    assert results[0] == results[1]
    assert checked == 2 * ["GATConv", "GCNConv", "SAGEConv"]
    rows = {row.layer: row.routed for row in fastgraph.status().rows}
    assert rows == {"GATConv": 4, "GCNConv": 4, "SAGEConv": 4}


def broken_spmm(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]) -> None:
    right = reference.spmm

    def wrong(*args: Any, **kwargs: Any) -> Tensor:
        out = right(*args, **kwargs)
        if out.shape == shape:
            out[3, 1] += 1e-3
        return out

    monkeypatch.setattr(reference, "spmm", wrong)


def test_wrong_output_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    broken_spmm(monkeypatch, (NODES, 4))
    with (
        fastgraph.enabled(backend="reference", compare=True),
        pytest.raises(fastgraph.DivergenceError, match=r"GCNConv 'convs\.1': output .*\[3, 1\]"),
    ):
        Model()(torch.randn(NODES, 6), EDGES)


def test_wrong_gradient_is_named_though_none_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    right = reference.spmm

    def wrong_in_backward(graph: Any, x: Tensor, weight: Any, reduce: str, transpose: bool) -> Any:
        return right(graph, x, weight, reduce, transpose) * (1.001 if transpose else 1)

    monkeypatch.setattr(reference, "spmm", wrong_in_backward)
    with (
        torch.no_grad(),
        fastgraph.enabled(backend="reference", compare=True),
        pytest.raises(fastgraph.DivergenceError, match="SAGEConv: the gradient of input x ") as e,
    ):
        SAGEConv(6, 4, aggr="sum", root_weight=False)(torch.randn(NODES, 6), EDGES)
    assert e.value.layer == ""
    assert e.value.error.ours > e.value.error.limit


def test_only_while_enabled_and_only_what_was_routed(checked: list[str]) -> None:
    conv, x = GCNConv(6, 4), torch.randn(NODES, 6)
    with fastgraph.enabled(compare=True):
        with fastgraph.enabled(compare=False):
            conv(x, EDGES)
        assert not checked
        SAGEConv(6, 4, aggr="median")(x, EDGES)
        with pytest.raises(RuntimeError):
            conv(torch.randn(NODES, 7), EDGES)
        assert not checked
        conv(x, EDGES)
        assert checked == ["GCNConv"]
    conv(x, EDGES)
    fastgraph.enable()
    conv(x, EDGES)
    assert checked == ["GCNConv"]


def test_comparisons_are_not_compared_themselves(checked: list[str]) -> None:
    with fastgraph.enabled(compare=True):
        assert fastgraph.compare(GCNConv(6, 4), torch.randn(NODES, 6), EDGES).ok
    assert not checked


def test_torchs_own_function_comes_back() -> None:
    upstream = nn.Module.__call__
    fastgraph.enable(compare=True)
    fastgraph.enable(compare=True)
    assert nn.Module.__call__ is not upstream
    fastgraph.enable()
    assert nn.Module.__call__ is upstream
    fastgraph.enable(compare=True)
    fastgraph.disable()
    assert nn.Module.__call__ is upstream


def test_variable(tmp_path: Path) -> None:
    code = """\
import fastgraph, torch
from torch_geometric.nn import GCNConv
from fastgraph.comparison import checking
checking._check = lambda module, *args: print("checked", type(module).__name__)
GCNConv(3, 2)(torch.randn(4, 3), torch.tensor([[0, 1], [1, 2]]))
"""
    assert python("-c", code, cwd=tmp_path, FASTGRAPH="compare").stdout == "checked GCNConv\n"
    assert python("-c", code, cwd=tmp_path, FASTGRAPH="1").stdout == ""


def test_what_was_compared_is_said_at_exit(tmp_path: Path) -> None:
    code = """\
import os, torch, fastgraph
from torch_geometric.nn import GCNConv
x, edges = torch.randn(4, 3), torch.tensor([[0, 1], [1, 2]])
net = torch.nn.ModuleDict({"first": GCNConv(3, 2)})
net.forward = lambda: net["first"](x, edges)
for _ in range(3): net()
fastgraph.disable()
fastgraph.enable(compare=True)
if os.fork() == 0: raise SystemExit
os.wait()
"""
    said = python("-c", code, cwd=tmp_path, FASTGRAPH="compare").stderr
    (line,) = (line for line in said.splitlines() if line.startswith("fastgraph"))
    assert re.fullmatch(
        r"fastgraph compared 3 calls of routed layers with upstream: the largest error is [\d.]+ "
        r"of what is allowed, in [a-z_. ]+ of GCNConv 'first'",
        line,
    )


def test_compiled_calls_are_said_not_to_be_compared(tmp_path: Path) -> None:
    code = """\
import torch, fastgraph
from torch_geometric.nn import GCNConv
conv = torch.compile(GCNConv(3, 2), backend="eager")
conv(torch.randn(4, 3), torch.tensor([[0, 1], [1, 2]]))
"""
    said = python("-c", code, cwd=tmp_path, FASTGRAPH="compare").stderr
    expected = f"fastgraph compared no calls: no routed layer ran; {checking.NOT_COMPARED}"
    assert said.splitlines()[-1] == expected
