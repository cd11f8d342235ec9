"""Switching DGL's routes on and off, and what the rest of fastgraph sees of DGL."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fastgraph
from fastgraph import upstream
from fastgraph.dgl.framework import DGL
from tests.cli.commands import fastgraph as run
from tests.dgl.graphs import ORDINARY, block, dgl, of_case
from tests.dgl.test_message_passing import LAYERS

import dgl.backend.pytorch.sparse as sparse  # isort: skip
import dgl.nn as dglnn  # isort: skip
from dgl.heterograph_index import HeteroGraphIndex  # isort: skip


ROUTED = upstream.LAYERS["dgl.nn.pytorch.conv"]
WHOLE = [
    getattr(dglnn, layer.name) for layer in ROUTED if layer.file and hasattr(dglnn, layer.name)
]


def replaced() -> list[object]:
    """Everything that is replaced while fastgraph is enabled."""
    functions = ["GSpMM", "GSDDMM", "EdgeSoftmax", "GSpMM_hetero", "GSDDMM_hetero"]
    return [
        *(getattr(sparse, name) for name in [*functions, "EdgeSoftmax_hetero"]),
        *(vars(cls)["forward"] for cls in WHOLE),
        vars(HeteroGraphIndex)["get_relation_graph"],
        vars(HeteroGraphIndex)["reverse"],
    ]


def test_disable_restores_the_very_same_objects() -> None:
    before = replaced()
    fastgraph.enable()
    fastgraph.enable()
    assert not any(a is b for a, b in zip(replaced(), before, strict=True))
    with fastgraph.enabled():
        pass
    fastgraph.disable()
    assert all(a is b for a, b in zip(replaced(), before, strict=True))


def test_what_was_kept_beyond_disable_is_dgls() -> None:
    with fastgraph.enabled():
        function, reverse = sparse.GSpMM, HeteroGraphIndex.reverse
        assert function.forward is not None  # as of any autograd function
    g, x = of_case(ORDINARY), torch.randn(30, 4)
    out = function.apply(g._graph, "copy_lhs", "sum", x, None)
    torch.testing.assert_close(out, dgl.ops.copy_u_sum(g, x))
    assert reverse(g._graph).num_edges(0) == 150
    assert not fastgraph.status().rows


def test_a_gradient_after_disable() -> None:
    g, x = of_case(ORDINARY), torch.randn(30, 4, requires_grad=True)
    expected = torch.autograd.grad(dgl.ops.copy_u_mean(g, x).square().sum(), x)
    with fastgraph.enabled(strict=True):
        loss = dgl.ops.copy_u_mean(g, x).square().sum()
    torch.testing.assert_close(torch.autograd.grad(loss, x), expected)


def test_status_shows_the_routes() -> None:
    g, x = of_case(ORDINARY), torch.randn(30, 4)
    with fastgraph.enabled():
        dglnn.GATv2Conv(4, 3, 2, allow_zero_in_degree=True)(g, x)
        dglnn.GINConv()(g, x)
        dgl.ops.u_add_v(g, x, x)
    text = str(fastgraph.status())
    assert all(name in text for name in ("GATv2Conv", "dgl.gspmm", "dgl.gsddmm", "no operator"))


def test_the_warning_points_at_the_line_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastgraph.routing import status

    monkeypatch.setattr(status, "_warned", set())
    g = of_case(ORDINARY)
    with fastgraph.enabled(), pytest.warns(fastgraph.FallbackWarning, match="channels") as caught:
        dgl.ops.copy_e_sum(g, torch.rand(150, 3))
    assert caught[0].filename == __file__


def test_torch_compile_runs_dgls_code() -> None:
    g, x = of_case(ORDINARY), torch.randn(30, 4)
    module = dglnn.GATConv(4, 3, 2, allow_zero_in_degree=True)
    expected = module(g, x)
    with fastgraph.enabled():
        compiled = torch.compile(module, backend="eager")
        torch.testing.assert_close(compiled(g, x), expected)


def test_functional_transforms_run_dgls_code() -> None:
    g, x = of_case(ORDINARY), torch.randn(30, 4)
    with fastgraph.enabled(), torch.autograd.forward_ad.dual_level():
        dgl.ops.copy_u_sum(g, x)
    (reason,) = fastgraph.status().row("dgl.gspmm").reasons
    assert reason == "forward-mode automatic differentiation is active"


def test_is_accelerated_and_compare() -> None:
    g, x = of_case(ORDINARY), torch.randn(30, 4)
    gat = dglnn.GATConv(4, 3, 2, attn_drop=0.5, allow_zero_in_degree=True)
    with fastgraph.enabled():
        assert fastgraph.is_accelerated(gat, g, x) == (True, [])
        accelerated, reasons = fastgraph.is_accelerated(dglnn.SAGEConv(4, 3, "lstm"), g, x)
        assert not accelerated and reasons
    edge_gat = dglnn.EdgeGATConv(4, 2, 3, 2, attn_drop=0.5, allow_zero_in_degree=True)
    calls = (
        (gat, ()),
        (edge_gat, (torch.randn(150, 2),)),
        (dglnn.SAGEConv(4, 3, "pool"), ()),
        (dglnn.GraphConv(4, 3, allow_zero_in_degree=True), ()),
        (dglnn.AGNNConv(allow_zero_in_degree=True), ()),
        (dglnn.RelGraphConv(4, 3, 2), (torch.arange(150) % 2,)),
    )
    for module, more in calls:
        report = fastgraph.compare(module, g, x, *more)
        assert report.ok, report
    assert gat.attn_drop.p == 0.5


class Model(torch.nn.Module):
    """A layer with a whole route, and one whose sums have one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = dglnn.GraphConv(4, 5, allow_zero_in_degree=True)
        self.second = dglnn.GINConv(torch.nn.Linear(5, 3))

    def forward(self, g: Any, x: torch.Tensor) -> Any:
        return self.second(g, self.first(g, x).relu())


def test_a_model_compared() -> None:
    report = fastgraph.compare(Model(), of_case(ORDINARY), torch.randn(30, 4))
    assert report.ok, report
    with fastgraph.enabled():
        accelerated = fastgraph.is_accelerated(Model(), of_case(ORDINARY), torch.randn(30, 4))
    assert accelerated == (True, [])


TESTS = """\
import dgl
import torch
from dgl.nn import GATConv

import fastgraph


def test_a_layer() -> None:
    g = dgl.add_self_loop(dgl.rand_graph(20, 60))
    GATConv(4, 3, 2)(g, torch.randn(20, 4)).sum().backward()
    assert fastgraph.status().row("GATConv").routed == 1
"""


def test_any_projects_tests(tmp_path: Path) -> None:
    (tmp_path / "test_project.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "--fastgraph", "-q", "-p", "no:cacheprovider", "."]
    variables = {**os.environ, "DGLBACKEND": "pytorch", "FASTGRAPH_MIN_EDGES": "0"}
    ended = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_every_call_compared() -> None:
    module = dglnn.GATv2Conv(4, 3, 2, allow_zero_in_degree=True)
    with fastgraph.enabled(compare=True):
        module(of_case(ORDINARY), torch.randn(30, 4))
        mfg = block(ORDINARY)
        module(mfg, torch.randn(mfg.num_src_nodes(), 4))


@pytest.mark.parametrize("is_block", [False, True])
def test_features_in_graphs_are_those_of_copies(is_block: bool) -> None:
    g = block(ORDINARY) if is_block else of_case(ORDINARY)
    g.srcdata["x"], g.edata["w"] = torch.randn(g.num_src_nodes(), 2), torch.rand(g.num_edges())
    if is_block:
        g.dstdata["y"] = torch.randn(g.num_dst_nodes())
    names: list[str] = []

    def replace(value: torch.Tensor, name: str) -> torch.Tensor:
        names.append(name)
        return value.double() if value.is_floating_point() else value

    copied = DGL().map_tensors(g, replace, "g")
    assert copied.srcdata["x"].dtype == copied.edata["w"].dtype == torch.float64
    assert g.srcdata["x"].dtype == g.edata["w"].dtype == torch.float32
    kind = "srcnodes" if is_block else "nodes"
    assert f"g.{kind}['_N'].x" in names
    assert not is_block or copied.dstdata["y"].dtype == torch.float64
    assert DGL().map_tensors(torch.zeros(1), replace, "x") is NotImplemented


def test_layers_that_are_named_have_a_route() -> None:
    by_primitives = {name.partition(" ")[0] for name in LAYERS} | {"GMMConv"}
    assert {layer.name for layer in ROUTED if layer.file is None} == by_primitives


def test_layers_that_have_a_route_are_named_in_the_page() -> None:
    page = Path(__file__).parents[2] / "docs/dgl.md"
    section = page.read_text().split("## What is routed")[1].split("\n## ")[0]
    assert not [layer.name for layer in ROUTED if f"`{layer.name}`" not in section]


PROGRAM = """\
import torch, dgl
from dgl.nn import GATConv
torch.manual_seed(0)
g = dgl.add_self_loop(dgl.graph(tuple(torch.randint(40, (2, 200))), num_nodes=40))
x, y = torch.randn(40, 8), torch.randint(3, (40,))
layers = torch.nn.ModuleList([GATConv(8, 8, 4), GATConv(32, 3, 1)])
optimizer = torch.optim.Adam(layers.parameters(), lr=0.01)
for _ in range(5):
    hidden = layers[0](g, x).flatten(1).relu()
    loss = torch.nn.functional.cross_entropy(layers[1](g, hidden).squeeze(1), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.4f}")
"""


def test_a_script_under_the_runner(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    folder = str(Path(dgl.__file__).parents[1])
    variables = {"PYTHONPATH": folder, "DGLBACKEND": "pytorch"}
    ours = run("--report", "--strict", "train.py", cwd=tmp_path, **variables)
    assert ours.returncode == 0, ours.stderr
    plain = run("train.py", cwd=tmp_path, FASTGRAPH_MIN_EDGES="1000", **variables)
    assert ours.stdout.splitlines()[:5] == plain.stdout.splitlines()[:5] != []
    assert "GATConv" in ours.stdout + ours.stderr


def test_a_script_compared(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    folder = str(Path(dgl.__file__).parents[1])
    variables = {"PYTHONPATH": folder, "DGLBACKEND": "pytorch"}
    ours = run("compare", "train.py", cwd=tmp_path, **variables)
    assert ours.returncode == 0, ours.stdout + ours.stderr
    assert "GATConv" in ours.stdout + ours.stderr
