"""The example datasets and scripts, on a corpus small enough to check by hand."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tests import forks, interpreter

pytest.importorskip("torch_geometric")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

CORPUS = {
    "shapes/__init__.py": "from .base import Shape\nfrom .round import *\n",
    "shapes/base.py": (
        '"""Geometric primitives."""\n'
        "LIMIT = 3\n"
        "class Shape:\n"
        "    def area(self): return helper()\n"
        "    def describe(self): return self.area()\n"
        "def helper(): return LIMIT\n"
    ),
    "shapes/round.py": (
        "from .base import Shape\n"
        "class Circle(Shape):\n"
        "    def area(self): return super().area()\n"
        "    def show(self): return self.describe()\n"
    ),
    "app.py": (
        "import shapes.base as sb\n"
        "from shapes import Circle\n"
        "def main(helper):\n"
        "    helper()\n"
        "    shape = Circle()\n"
        "    shape.show()\n"
        "    return sb.LIMIT, sb.helper\n"
    ),
    "broken.py": "def (:\n",
}
EDGES = {
    ("shapes", "import", "shapes.base.Shape"),
    ("shapes", "import", "shapes.round"),
    ("shapes.base.Shape.area", "call", "shapes.base.helper"),
    ("shapes.base.Shape.describe", "call", "shapes.base.Shape.area"),
    ("shapes.round", "import", "shapes.base.Shape"),
    ("shapes.round.Circle", "inheritance", "shapes.base.Shape"),
    ("shapes.round.Circle.area", "call", "shapes.base.Shape.area"),
    ("shapes.round.Circle.show", "call", "shapes.base.Shape.describe"),
    ("app", "import", "shapes.base"),
    ("app", "import", "shapes.round.Circle"),
    ("app.main", "call", "shapes.round.Circle"),
    ("app.main", "call", "shapes.round.Circle.show"),
    ("app.main", "reference", "shapes.base"),
    ("app.main", "reference", "shapes.base.helper"),
}


@pytest.fixture(autouse=True)
def examples_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.fixture
def python_graph() -> ModuleType:
    import python_graph

    return python_graph


@pytest.fixture
def python_source() -> ModuleType:
    import python_source

    return python_source


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    root = tmp_path / "corpus"
    for name, text in CORPUS.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def build(module: ModuleType, root: Path, **options: Any) -> Any:
    return module.build_graph([root], progress=False, **{"workers": 0, **options})


def test_edges_are_those_of_the_corpus(
    python_graph: ModuleType, python_source: ModuleType, corpus: Path
) -> None:
    graph = build(python_graph, corpus)
    found = {
        (graph.names[source], python_source.EDGE_TYPES[kind], graph.names[target])
        for source, target, kind in zip(*graph.edge_index, graph.edge_type, strict=True)
    }
    assert found == EDGES
    assert graph.skipped == 1


def test_nodes_and_labels(
    python_graph: ModuleType, python_source: ModuleType, corpus: Path
) -> None:
    graph = build(python_graph, corpus)
    kinds = dict(zip(graph.names, graph.node_type, strict=True))
    assert len(kinds) == len(graph.names) == 12
    assert kinds["shapes.base"] == python_source.MODULE
    assert kinds["shapes.base.Shape"] == python_source.CLASS
    assert kinds["shapes.base.Shape.area"] == python_source.FUNCTION
    assert graph.classes == ["shapes", "app"]
    expected = [int(name.startswith("app")) for name in graph.names]
    assert graph.y.tolist() == expected
    assert build(python_graph, corpus, max_classes=1).y.tolist() == [-e for e in expected]


def test_features_are_scaled_and_do_not_hold_the_package(
    python_graph: ModuleType, python_source: ModuleType, corpus: Path
) -> None:
    graph = build(python_graph, corpus)
    np.testing.assert_allclose((graph.x**2).mean(axis=1)[graph.x.any(axis=1)], 1.0, rtol=1e-5)
    words = python_source.Words("torch_geometric", 256)
    assert words("torch") == words("pytorch") == words("Geometric") == ()
    assert len(words("MessagePassing")) == 2


def test_graph_does_not_depend_on_the_run(python_graph: ModuleType, corpus: Path) -> None:
    first, second = build(python_graph, corpus), build(python_graph, corpus, workers=2)
    for key, value in vars(first).items():
        np.testing.assert_array_equal(value, vars(second)[key], err_msg=key)


def test_file_limit_cuts_the_largest_package(python_graph: ModuleType, corpus: Path) -> None:
    files = python_graph.find_files([corpus], max_files=4)
    assert sorted(file.package for file in files) == ["app", "broken", "shapes", "shapes"]
    assert files == python_graph.find_files([corpus], max_files=4)


def test_roots_without_sources(python_graph: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected directories with Python source"):
        build(python_graph, tmp_path)


def test_unwritable_cache_is_named(tmp_path: Path) -> None:
    import python_code

    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(PermissionError, match=f"root: expected a writable.*{blocked / 'cache'}"):
        python_code.PythonCode(blocked / "cache")


def test_dataset_argument() -> None:
    from torch_geometric.datasets import Planetoid

    import data_loading

    assert data_loading.dataset_class("Planetoid:Cora") == (Planetoid, "Cora")
    assert data_loading.dataset_class("PythonCode")[1] is None
    for text, message in (
        ("Planetod:Cora", "did you mean Planetoid"),
        ("Planetoid", "needs a name"),
        ("PythonCode:x", "takes no name"),
    ):
        with pytest.raises(argparse.ArgumentTypeError, match=message):
            data_loading.dataset_class(text)


# A subprocess sees the small corpus instead of the installation.
_RUN = """
import runpy, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import python_code, python_graph
corpus = Path(sys.argv[2])
def process(self):
    graph = python_graph.build_graph([corpus], workers=0, progress=False)
    self.save([python_code.to_data(vars(graph))], self.processed_paths[0])
python_code.PythonCode.process = process
script = sys.argv[3]
sys.argv = [script, *sys.argv[4:]]
runpy.run_path(script, run_name="__main__")
"""


@pytest.mark.parametrize("script", ["gcn.py", "gatv2.py"])
def test_training_scripts(script: str, corpus: Path, tmp_path: Path) -> None:
    command = ["-c", _RUN, str(EXAMPLES), str(corpus), str(EXAMPLES / script)]
    command += ["--root", str(tmp_path / "cache"), "--epochs", "2", "--hidden-channels", "8"]
    done = forks.python(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert sum(line.startswith("Epoch: ") for line in lines) == 2
    assert lines[-1].startswith("Median epoch time: ")


def test_demo_compares_all_scripts(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    command = ["-c", _RUN, str(EXAMPLES), str(tmp_path / "corpus")]
    code = "def f():\n    return g()\ndef g():\n    return f()\n"
    for package in ("first", "second"):
        for module in "abc":
            (tmp_path / "corpus" / package).mkdir(parents=True, exist_ok=True)
            (tmp_path / "corpus" / package / f"{module}.py").write_text(code)
    load = [*command, str(EXAMPLES / "data_loading.py"), "--root", str(root)]
    loaded = forks.python(*load, cwd=tmp_path)
    assert loaded.returncode == 0, loaded.stderr

    page = tmp_path / "pages" / "demo.html"
    demo = [str(EXAMPLES / "demo.py"), "--root", str(root), "--epochs", "4", "--html", str(page)]
    done = interpreter.python(*demo, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    table = done.stdout[done.stdout.index("Time per epoch") :].splitlines()
    rows = [line.split() for line in table]
    for script in ("gcn.py", "sage.py", "gatv2.py", "gat.py", "transformer.py"):
        position = next(i for i, row in enumerate(rows) if row[:2] == [script, "plain"])
        plain, fast = rows[position], rows[position + 1]
        assert fast[0] == "fastgraph"
        assert plain[-1] == fast[-1], script  # accuracy
        assert float(plain[-2]) == pytest.approx(float(fast[-2]), abs=2e-5), script  # loss
        assert script in page.read_text()


def test_demo_shows_why_a_run_failed(tmp_path: Path) -> None:
    demo = [sys.executable, str(EXAMPLES / "demo.py"), "--dataset", "Nothing:of-this-name"]
    done = subprocess.run(
        [*demo, "--root", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "Nothing" in done.stderr
    assert "Loading the dataset failed with exit code 2" in done.stdout


def test_training_on_ranks_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    from torch_geometric.data import Data

    import fastgraph.dist as fgd

    nodes, edges = 60, torch.randint(0, 60, (2, 300), generator=torch.Generator().manual_seed(0))
    x = torch.randn(nodes, 4, generator=torch.Generator().manual_seed(1))
    data = Data(x=x, y=(x[:, 0] > 0).long(), edge_index=edges)
    fgd.write_shards(data, tmp_path / "shards", 2, method="even")
    script = str(EXAMPLES / "dist" / "train.py")
    first, last = (
        forks.launched(2, script, "shards", "--epochs", str(epochs), cwd=tmp_path)
        for epochs in (1, 7)
    )
    losses = dict(re.findall(r"^Epoch: (\d+), Loss: (\S+)$", first + last, re.MULTILINE))
    assert [int(epoch) for epoch in losses] == list(range(1, 8))
    assert float(losses["007"]) < float(losses["001"])
    assert "an epoch of each rank, ms (3 measured)" in last


PRINTS_LOSSES = """
import torch
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv

torch.manual_seed(0)
data = Data(x=torch.randn(1000, 8), edge_index=torch.randint(0, 1000, (2, 8000)))
conv = GCNConv(8, 3)
optimizer = torch.optim.SGD(conv.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    loss = conv(data.x, data.edge_index).square().mean()
    loss.backward()
    optimizer.step()
    print(f"Loss: {loss.item():.6f}, of {type(data.x).__name__}")
"""


@pytest.mark.exhaustive
def test_one_process_beside_ranks(tmp_path: Path) -> None:
    """As ``make demo-dist`` does it, with a script that needs no dataset."""
    (tmp_path / "script.py").write_text(PRINTS_LOSSES)
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "dist" / "compare.py"), "script.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    off = re.search(r"differ by (\S+) of the loss at most", done.stdout)
    assert off is not None and float(off[1]) < 1e-5  # of what is printed
