"""The example that trains LargeGT from files: without a graph, on one process and on ranks."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests import forks

pytest.importorskip("torch_geometric")

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "largegt"
SMALL = ("--batch-size", "250", "--hidden-channels", "16", "--centroids", "32")
NO_DROPOUT = ("--dropout", "0", "--encoder-dropout", "0")

# The scripts see a small graph.
RUN = """
import runpy, sys
sys.path.insert(0, sys.argv[1])
import graphs
graphs.generated.__defaults__ = (602, 3, 0)
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    import graphs

    return graphs


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All that training reads, and no graph any more."""
    folder = tmp_path_factory.mktemp("largegt")
    script = [str(FOLDER), str(FOLDER / "prepare.py")]
    options = ["--k", "6", "--position-channels", "8", "--dtype", "float32"]
    done = forks.python("-c", RUN, *script, "generated", "out", *options, cwd=folder)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(folder / "out" / "graph")
    left = sorted(path.name for path in (folder / "out").iterdir())
    assert left == ["context", "positions.npy", "split.npy", "tokens", "y.npy"]
    return folder / "out"


def test_settings_of_the_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    from settings import PAPER, parsed

    def of(*given: str) -> tuple[int, int]:
        parser = argparse.ArgumentParser()
        parser.add_argument("--batch-size", type=int, default=7)
        parser.add_argument("--k", type=int, default=50)
        monkeypatch.setattr(sys, "argv", ["script", *given])
        args = parsed(parser)
        return args.batch_size, args.k

    assert of() == (7, 50)
    assert of("--like", "snap-patents") == (2048, 50)
    assert of("--k", "3", "--like", "papers100M") == (1024, 3)
    page = (FOLDER.parents[1] / "docs" / "largegt.md").read_text()
    for name, cells in (
        ("batch", [str(own["batch_size"]) for own in PAPER.values()]),
        ("hidden channels", [str(own["hidden_channels"]) for own in PAPER.values()]),
        ("position channels", [str(own["position_channels"]) for own in PAPER.values()]),
    ):
        assert f"| {name} | {' | '.join(cells)} |" in page


def losses(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"Loss: (\S+),", printed)]


def test_what_was_prepared_is_not_prepared_again(tokens: Path) -> None:
    script = [str(FOLDER), str(FOLDER / "prepare.py")]
    done = forks.python("-c", RUN, *script, "generated", tokens.name, cwd=tokens.parent)
    assert done.returncode == 2
    assert "out must be a new folder, got out" in done.stderr


def test_training_without_a_graph(tokens: Path, tmp_path: Path) -> None:
    """It learns, and its model is the one that was saved."""
    from fastgraph.nn import LargeGT

    options = ["--epochs", "8", "--lr", "0.01", "--cache", "64KiB", "--checkpoint", "model.pt"]
    script = str(FOLDER / "train.py")
    done = forks.python(script, str(tokens), *SMALL, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = losses(done.stdout)
    assert len(found) == 8 and found[-1] < 0.8 * found[0]
    assert float(done.stdout.split()[-1]) > 0.5  # of three classes
    model = LargeGT(16, 16, 3, 602, num_centroids=32, position_channels=8)
    model.load_state_dict(torch.load(tmp_path / "model.pt"))
    assert int(model.global_module.codebook.counts.sum()) == 301  # those of the training


def test_ranks_take_the_steps_of_one_process(tokens: Path, tmp_path: Path) -> None:
    """Of 301 rows the last batch has one, for the first rank; the second has none."""
    script = [str(FOLDER / "train.py"), str(tokens), *SMALL, *NO_DROPOUT, "--epochs", "2"]
    one = forks.python(*script, "--batch-size", "300", cwd=tmp_path)
    assert one.returncode == 0, one.stderr
    two = forks.launched(2, *script, "--batch-size", "150", cwd=tmp_path)
    assert len(losses(two)) == 2
    assert losses(two) == pytest.approx(losses(one.stdout), rel=1e-4)


def test_splits_and_directions(graphs: ModuleType) -> None:
    graph = graphs.generated(100, 3)
    assert [int((graph.split == part).sum()) for part in range(3)] == [50, 25, 25]
    edges = {tuple(edge) for edge in graph.edge_index.T.tolist()}
    assert len(edges) == graph.edge_index.shape[1]
    assert edges == {(target, source) for source, target in edges}


def test_graphs_that_are_not_there(graphs: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTGRAPH_DATA", raising=False)
    with pytest.raises(SystemExit, match="debian: expected FASTGRAPH_DATA"):
        graphs.load("debian")


def test_the_area_under_the_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    import metrics

    draw = torch.Generator().manual_seed(0)
    scores = torch.randint(9, (60,), generator=draw).double()  # with ties
    classes = torch.randint(2, (60,), generator=draw)
    pairs = scores[classes == 1].unsqueeze(1) - scores[classes == 0]
    expected = float(((pairs > 0) + 0.5 * (pairs == 0)).mean())
    logits = torch.stack([torch.zeros_like(scores), scores], 1)
    assert metrics.accuracy_or_roc_auc(logits, classes) == pytest.approx(expected)
    three = torch.eye(3)[torch.tensor([0, 1, 2, 2])]
    assert metrics.accuracy_or_roc_auc(three, torch.tensor([0, 1, 2, 0])) == 0.75
