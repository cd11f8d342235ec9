"""``python -m fastgraph tune``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fastgraph.cli.tune import gpu_table
from fastgraph.cli.tuning.measuring import calls_of
from fastgraph.cli.tuning.recording import Given, OperatorCall, Program, Values
from fastgraph.tune.gpus import SHEETS
from tests import forks, interpreter
from tests.tune.test_tiles import cliques

SCRIPT = """
import sys
import torch
from torch_geometric.nn import GATv2Conv, GCNConv, SAGEConv

from tests.graphs import mixed_communities

torch.manual_seed(0)
torch.set_num_threads(2)
nodes = 5000
generator = torch.Generator().manual_seed(0)
edges = mixed_communities(nodes, 10, generator=generator)
x = torch.randn(nodes, 256)
layers = [SAGEConv(256, 256), GATv2Conv(256, 64, heads=4), GCNConv(256, 256), GCNConv(256, 256)]
print("with", sys.argv[1:])
for epoch in range(4):
    y = torch.nn.functional.dropout(x, 0.1)  # else the first layer would aggregate once for all
    for layer in layers:
        y = layer(y, edges).relu()
    y.square().mean().backward()
    print("epoch", epoch)
"""

AGAIN = """
from fastgraph.graphs.edges import graph_of
from fastgraph.tune.choices import orders_of
import torch
from tests.graphs import mixed_communities

torch.set_num_threads(2)
generator = torch.Generator().manual_seed(0)
edges = mixed_communities(5000, 10, generator=generator)
for loops in (0, 5000):
    print(len(orders_of(graph_of(edges, None, 5000, 5000, loops))))
"""


def test_a_script(tmp_path: Path) -> None:
    pytest.importorskip("torch_geometric")
    (tmp_path / "train.py").write_text(SCRIPT)
    kept = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    words = ("--budget", "40", "train.py", "--budget", "mine")
    done = interpreter.python("-m", "fastgraph", "tune", *words, cwd=tmp_path, **kept)
    assert done.returncode == 0, done.stderr
    assert "with ['--budget', 'mine']" in done.stderr
    assert "epoch 1" in done.stderr and "epoch 2" not in done.stderr
    lines = done.stdout.splitlines()
    assert any("2 GCNConv" in line and "spmm" in line for line in lines)
    assert any("GATv2Conv" in line and "gatv2" in line for line in lines)
    assert "Predicted, never measured" in done.stdout and "RTX 4090" in done.stdout
    assert "Choices: 5. Graphs: 2." in lines
    assert f"They are kept in {tmp_path / 'cache'}" in done.stdout
    again = forks.python("-c", AGAIN, cwd=tmp_path, **kept)
    # The first layer has no gradient; attention and GCN have both directions of a graph with loops.
    assert again.stdout.split() == ["1", "4"], again.stderr


@pytest.mark.parametrize(
    ("script", "words", "message"),
    [
        ("print('no model')", (), "no layer of its models takes a route to a fused operator"),
        ("", ("--device", "tpu"), "--device must be cpu or one of H200, A100, RTX 4090, got 'tpu'"),
    ],
)
def test_what_cannot_be_tuned(
    tmp_path: Path, script: str, words: tuple[str, ...], message: str
) -> None:
    (tmp_path / "train.py").write_text(script)
    command = ("-m", "fastgraph", "tune", *words, "train.py")
    done = interpreter.python(*command, cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode in (1, 2) and message in done.stderr
    assert not list(tmp_path.glob("fastgraph/*"))


def test_attention_on_tiles_is_predicted() -> None:
    nodes = 40_000
    operands = [Values((nodes, 2, 64), torch.bfloat16, False)] * 3
    calls = {
        OperatorCall(
            "attention",
            (*operands, None, None, Given(0), None, None, 0, False, 0.125, 0.0, weights),
        ): [layer]
        for weights, layer in ((False, "GPSConv"), (True, "TransformerConv"))
    }
    found = calls_of(Program(calls, [cliques(nodes, 16)], 2, False, 0))
    table, reasons = gpu_table(found, SHEETS)
    cells = {column.header: list(column.cells) for column in table.columns}
    tiles = dict(zip(cells["layers"], cells["tiles"], strict=True))
    assert tiles == {"GPSConv": "H200, A100, RTX 4090", "TransformerConv": "no"}
    assert cells["channels"] == ["128", "128"]
    assert reasons == ["attention on tiles drops no edges and gives no weights of them"]
