"""The examples of graph transformers, with few and small graphs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import forks

pytest.importorskip("torch_geometric")

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "graph_transformers"
LAUNCHED = ("-m", "fastgraph.dist", "--min-nodes", "10", "--random", "exact", "--mode")
IN_FLOAT64 = """
import sys, torch
torch.set_default_dtype(torch.float64)
torch.Tensor.float = torch.Tensor.double  # by which the script rounds its loss
sys.path.insert(0, sys.argv[1])
sys.argv[:2] = [sys.argv[1] + "/nodes.py"]
__file__ = sys.argv[0]
exec(compile(open(__file__).read(), __file__, "exec"))
"""
ENDED = """
import sys
sys.path.insert(0, sys.argv[1])
sys.argv[:3] = [sys.argv[1] + "/" + sys.argv[2]]
__file__ = sys.argv[0]
import training
save = training.Checkpoints.save
def save_and_end(self, **besides):
    save(self, **besides)
    if besides["epoch"] == 2:
        sys.exit(3)
training.Checkpoints.save = save_and_end
exec(compile(open(__file__).read(), __file__, "exec"))
"""
TRAINED = re.compile(r"^Epoch: .*(?=, Time)", re.MULTILINE)
LOSS = re.compile(r"^Epoch: \d+, Loss: (\S+),", re.MULTILINE)


def losses(script: str, *words: str, cwd: Path) -> list[str]:
    done = forks.python(str(FOLDER / script), *words, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return LOSS.findall(done.stdout)


@pytest.mark.parametrize(
    ("script", "size"),
    [
        ("nodes.py", ["--nodes", "120"]),
        ("graphs.py", ["--graphs", "40", "--batch-size", "16"]),
        ("sequences.py", ["--nodes", "240", "--clusters", "6", "--together", "2"]),
    ],
)
def test_they_train(script: str, size: list[str], tmp_path: Path) -> None:
    words = [*size, "--lr", "0.01", "--warm-up", "1", "--epochs", "4"]
    found = losses(script, *words, cwd=tmp_path)
    assert len(found) == 4 and float(found[-1]) < float(found[0])
    # To compute layers once more changes nothing, dropout included.
    assert losses(script, *words, "--checkpoint", cwd=tmp_path) == found


WITHOUT_TRAINING = """
import sys
sys.path.insert(0, sys.argv[1])
sys.argv[:3] = [sys.argv[1] + "/" + sys.argv[2]]
__file__ = sys.argv[0]
import training
generated = training.generated
def without_training(nodes):
    data, classes = generated(nodes)
    data.train_mask[:] = False
    return data, classes
training.generated = without_training
exec(compile(open(__file__).read(), __file__, "exec"))
"""


@pytest.mark.parametrize(
    ("script", "words", "error"),
    [
        ("nodes.py", ["--nodes", "3"], "--nodes: expected at least 4, one of each class, got 3"),
        ("sequences.py", ["--nodes", "8", "--clusters", "9"], "--clusters: expected at most 8"),
        ("graphs.py", ["--graphs", "1"], "--graphs: expected at least 2"),
    ],
)
def test_too_few_are_errors(script: str, words: list[str], error: str, tmp_path: Path) -> None:
    done = forks.python(str(FOLDER / script), *words, cwd=tmp_path)
    assert done.returncode and error in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("script", ["nodes.py", "sequences.py"])
def test_a_graph_without_nodes_to_train_on_is_an_error(script: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(WITHOUT_TRAINING)
    done = forks.python("script.py", str(FOLDER), script, "--nodes", "80", cwd=tmp_path)
    assert done.returncode and "train_mask: expected some of 80 nodes, got none" in done.stderr


def test_sequences_lose_the_edges_between_them(tmp_path: Path) -> None:
    words = ["--nodes", "240", "--clusters", "4", "--epochs", "1", "--together"]
    some, all_of_them = (
        forks.python(str(FOLDER / "sequences.py"), *words, together, cwd=tmp_path).stdout
        for together in ("2", "4")
    )
    assert "Lost edges: 0.0%" in all_of_them
    lost = re.search(r"Lost edges: (\S+)%", some)
    assert lost is not None and 0 < float(lost[1]) < 100


@pytest.mark.parametrize(
    ("script", "size"),
    [
        ("nodes.py", ["--nodes", "120"]),
        ("graphs.py", ["--graphs", "40"]),
        ("sequences.py", ["--nodes", "240", "--clusters", "4", "--together", "2"]),
    ],
)
def test_they_go_on_from_a_checkpoint(script: str, size: list[str], tmp_path: Path) -> None:
    words = [*size, "--warm-up", "1", "--lr", "0.01", "--keep", "kept"]
    folders = tmp_path / "once", tmp_path / "twice"
    for folder in folders:
        folder.mkdir()
    once = losses(script, *words, "--epochs", "3", cwd=folders[0])
    (folders[1] / "script.py").write_text(ENDED)
    given = str(FOLDER), script, *words, "--epochs", "3"
    ended = forks.python("script.py", *given, cwd=folders[1])
    assert ended.returncode == 3, ended.stderr
    before = LOSS.findall(ended.stdout)
    assert len(before) == 2
    assert before + losses(script, *words, "--epochs", "3", cwd=folders[1]) == once


def test_mixed_precision(tmp_path: Path) -> None:
    words = ["--graphs", "40", "--batch-size", "16", "--epochs", "1"]
    exact, rounded = (losses("graphs.py", *words, *more, cwd=tmp_path) for more in ([], ["--amp"]))
    assert rounded != exact and float(rounded[0]) == pytest.approx(float(exact[0]), rel=0.05)


@pytest.mark.parametrize(
    ("ranks", "mode", "checkpoint"),
    [(2, "halo", []), (3, "heads", ["--checkpoint"]), (3, "auto", [])],
)
def test_ranks_print_what_one_process_prints(
    ranks: int, mode: str, checkpoint: list[str], tmp_path: Path
) -> None:
    """With dropout everywhere, a token, biases by types, and turns of both kinds."""
    (tmp_path / "script.py").write_text(IN_FLOAT64)
    given = [str(FOLDER), "--nodes", "120", "--lr", "0.01", "--warm-up", "1", "--epochs", "3"]
    given += checkpoint
    one = forks.python("script.py", *given, cwd=tmp_path)
    assert one.returncode == 0, one.stderr
    found = forks.launched(ranks, *LAUNCHED, mode, "script.py", *given, cwd=tmp_path)
    expected = TRAINED.findall(one.stdout)
    assert len(expected) == 3 and TRAINED.findall(found) == expected, found
    assert "attention" not in found  # is gathered
