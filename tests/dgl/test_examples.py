"""The examples for DGL reach the same losses with and without fastgraph."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fastgraph
from tests.dgl.graphs import dgl
from tests.graphs import random_edges

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPTS = {
    "dgl_gat.py": ["dgl.GATConv"],
    "dgl_gatv2.py": ["dgl.GATv2Conv"],
    "dgl_gcn.py": ["dgl.GraphConv"],
    "dgl_rgcn.py": ["dgl.RelGraphConv"],
    "dgl_sage.py": ["dgl.SAGEConv"],
    "dgl_transformer.py": ["dgl.gspmm"],
}


def test_all_are_tested() -> None:
    assert set(SCRIPTS) == {path.name for path in EXAMPLES.glob("dgl_*.py")} - {"dgl_training.py"}


@pytest.fixture
def one_thread() -> Iterator[None]:
    """With several, DGL's samplers draw other neighbours in every run."""
    before = dgl.utils.get_num_threads()
    dgl.utils.set_num_threads(1)
    yield
    dgl.utils.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore:Dataloader CPU affinity")
@pytest.mark.parametrize("script", SCRIPTS)
def test_losses(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = pytest.importorskip("torch_geometric.data")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import data_loading

    part = torch.arange(60) % 3
    small = data.Data(
        x=torch.randn(60, 8),
        y=torch.randint(4, (60,)),
        edge_index=random_edges(60, 60, 300),
        edge_type=torch.arange(300) % 2,
        train_mask=part == 0,
        val_mask=part == 1,
        test_mask=part == 2,
    )
    monkeypatch.setattr(data_loading, "load", lambda *_: (small, 4))
    monkeypatch.setattr(sys, "argv", [script, "--epochs", "3", "--hidden-channels", "16"])
    losses = []
    for active in (False, True):
        (fastgraph.enable if active else fastgraph.disable)()
        runpy.run_path(str(EXAMPLES / script))
        losses.append(
            [float(loss) for loss in re.findall(r"Loss: (\S+),", capsys.readouterr().out)]
        )
    torch.testing.assert_close(*losses, atol=1e-4, rtol=1e-4)
    assert len(losses[0]) == 3 and dgl.__version__
    rows = {row.layer: row.routed for row in fastgraph.status().rows}
    assert all(rows[layer] for layer in SCRIPTS[script])
