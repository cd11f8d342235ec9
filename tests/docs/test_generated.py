"""Lists and tables in the documentation agree with the code."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch

pytest.importorskip("torch_geometric")

from torch_geometric import nn

import fastgraph
from fastgraph.settings import Settings
from tests.docs.blocks import ROOT
from tests.graphs import random_edges


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate = load(ROOT / "docs" / "generate.py")


@pytest.mark.parametrize("name", generate.TABLES)
def test_pages_are_up_to_date(name: str) -> None:
    pages = [p for p in generate.DOCS.rglob("*.md") if f"generated: {name} -->" in p.read_text()]
    assert len(pages) == 1
    text = pages[0].read_text()
    assert generate.up_to_date(text) == text, "run python docs/generate.py"


def rows(table: str) -> dict[str, list[str]]:
    """The cells of each row by its first."""
    lines = [line[2:-2].split(" | ") for line in table.splitlines()[2:]]
    return {line[0].strip("`"): line for line in lines}


def test_every_setting_is_named_with_its_meaning() -> None:
    found = rows(generate.settings_table())
    assert list(found) == [field.name for field in attrs.fields(Settings)]
    for name, (_, variable, argument, default, meaning) in found.items():
        assert variable == f"`{attrs.fields_dict(Settings)[name].metadata['variable']}`"
        assert argument.strip() in ("", f"`{name}`")
        assert default == f"`{getattr(Settings(), name)}`"
        assert len(meaning) > 20


X, EDGES = torch.randn(6, 4), random_edges(6, 6, 20)
WEIGHT = torch.rand(20)

# By layer: how to make one, and what it is called with.
CALLS: dict[str, tuple[Callable[[], torch.nn.Module], tuple[Any, ...]]] = {
    "APPNP": (lambda: nn.APPNP(2, 0.1), (X, EDGES)),
    "ARMAConv": (lambda: nn.ARMAConv(4, 3), (X, EDGES)),
    "ChebConv": (lambda: nn.ChebConv(4, 3, 2), (X, EDGES)),
    "ClusterGCNConv": (lambda: nn.ClusterGCNConv(4, 3), (X, EDGES)),
    "GATConv": (lambda: nn.GATConv(4, 3), (X, EDGES)),
    "GATv2Conv": (lambda: nn.GATv2Conv(4, 3), (X, EDGES)),
    "GCN2Conv": (lambda: nn.GCN2Conv(4, 0.1), (X, X, EDGES)),
    "GCNConv": (lambda: nn.GCNConv(4, 3), (X, EDGES)),
    "GINConv": (lambda: nn.GINConv(torch.nn.Linear(4, 3)), (X, EDGES)),
    "GatedGraphConv": (lambda: nn.GatedGraphConv(4, 2), (X, EDGES)),
    "GPSConv": (lambda: nn.GPSConv(4, None, heads=2), (X, EDGES)),
    "GraphConv": (lambda: nn.GraphConv(4, 3), (X, EDGES)),
    "LGConv": (lambda: nn.LGConv(), (X, EDGES)),
    "MFConv": (lambda: nn.MFConv(4, 3), (X, EDGES)),
    "MixHopConv": (lambda: nn.MixHopConv(4, 3), (X, EDGES)),
    "PANConv": (lambda: nn.PANConv(4, 3, 2), (X, EDGES)),
    "PDNConv": (lambda: nn.PDNConv(4, 3, 1, 2), (X, EDGES, WEIGHT.view(-1, 1))),
    "SAGEConv": (lambda: nn.SAGEConv(4, 3, aggr="max"), (X, EDGES)),
    "SGConv": (lambda: nn.SGConv(4, 3), (X, EDGES)),
    "SSGConv": (lambda: nn.SSGConv(4, 3, 0.1), (X, EDGES)),
    "SignedConv": (lambda: nn.SignedConv(4, 3, first_aggr=True), (X, EDGES, EDGES)),
    "SimpleConv": (lambda: nn.SimpleConv(), (X, EDGES)),
    "TAGConv": (lambda: nn.TAGConv(4, 3), (X, EDGES)),
    "TransformerConv": (lambda: nn.TransformerConv(4, 3), (X, EDGES)),
    "WLConvContinuous": (lambda: nn.WLConvContinuous(), (X, EDGES)),
}


@pytest.mark.filterwarnings("ignore::fastgraph.FallbackWarning")
def test_every_layer_is_named_with_the_operators_that_it_calls() -> None:
    """Those of a call, as torch's profiler lists them."""
    found = rows(generate.layers_table())
    assert sorted(found) == sorted(generate.routed_layers())
    unknown = [name for name in found if name not in CALLS]
    assert not unknown, f"CALLS must say how {unknown} are called"
    for name, (_, _, operators, _) in found.items():
        make, arguments = CALLS[name]
        layer = make()
        with fastgraph.enabled(), torch.profiler.profile() as profile, torch.no_grad():
            try:
                layer(*arguments)
            except ImportError:  # PANConv needs torch-sparse
                continue
        called = {
            e.key.partition("::")[2] for e in profile.key_averages() if "fastgraph::" in e.key
        }
        assert called, f"{name} called no operator"
        assert called <= set(re.findall(r"`(\w+)`", operators)), f"{name} called {called}"


def test_the_picture_shows_the_results_that_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.delitem(sys.modules, "measure", raising=False)
    picture = load(ROOT / "benchmarks" / "picture.py")
    text = picture.PICTURE.read_text()
    panels, machine = picture.panels()
    labels = [la for panel in panels for las in panel.labels().values() for la in las]
    for shown in (*labels, *(panel.title for panel in panels), machine):
        assert f">{shown}</text>" in text, f"run python benchmarks/picture.py: {shown} is missing"
